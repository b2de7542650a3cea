"""What the model said, what the environment said, and what each turn earned, position by position."""

import asyncio
import copy
import json
import math
import re

import msgspec
import numpy as np
import pytest
import torch

from actors.env_calls.instances import Instances
from actors.render import Renderer
from actors.rollout import run_group, sendable
from envs.adapters.gymnasium_text import GymnasiumEnv
from envs.agents.task import AgentEnv
from envs.tools.environment import ToolRules, tool_env
from streamrl.environment import ChatMessage, Step
from streamrl.messages import TO_HUB, Limits, MemberStatus, Outcome, Purpose, ReturnReason, Sampling, Span, Turn
from streamrl.messages.codec import Decoder, encode, unpack_ids, unpack_logprobs
from streamrl.transport.session import ActorSession
from tests.kit.loops import jump, jumping, until
from tests.unit.actors.fakes import (
    TOKENIZER,
    V1,
    VOCAB,
    AsyncTask,
    TableTask,
    always,
    ids_of,
    installed_engine,
    lease,
    make_runner,
    says,
)

LIMITS = Limits(vocab_size=VOCAB, max_prompt_tokens=16, max_new_tokens=64)


async def play_one(task, engine=None, **rules):
    """One member, checked as the hub would check its group."""
    runner = make_runner(task, engine or await installed_engine(), **rules)
    group = await run_group(lease(), runner)
    assert sendable(group, lease(), LIMITS) is group
    return group, runner


# --- numbers at the door --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [np.float64(0.5), np.float32(0.5), torch.tensor(0.5), np.array(0.5)])
async def test_rewards_of_number_libraries_become_plain_numbers_that_can_be_sent(number):
    group, _ = await play_one(always(reward=number, score=number, parts={"form": number}))
    (member,) = group.members
    assert encode(group)
    assert (member.reward, member.turns) == (0.5, (Turn(0, 2, 0.5, finish="stop"),))
    assert member.scores == {"form": 0.5, "score": 0.5}
    assert {type(x) for x in (member.reward, *member.scores.values(), member.turns[0].reward)} == {float}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"reward": math.nan}, "reward nan"),
        ({"reward": "1.0"}, "reward '1.0'"),
        ({"reward": None}, "reward None"),
        ({"score": np.float64("inf")}, r"score np.float64\(inf\)"),
        ({"parts": {"form": math.nan}}, "part 'form' nan"),
        ({"parts": {"x" * 33: 1.0}}, "a part named 'x{33}', expected 1 to 32"),
        ({"parts": {"a\ud800": 1.0}}, "a part named 'a\\\\ud800'"),
        ({"parts": {7: 1.0}}, "a part named 7"),
        ({"parts": {f"part{n}": 1.0 for n in range(65)}}, "parts of 65 names, at most 63"),
    ],
)
async def test_what_cannot_be_sent_costs_the_member_and_is_said_by_name_and_value(fields, complaint):
    group, runner = await play_one(always(**fields))
    assert (group.outcome, group.reason) == (Outcome.RETURNED, ReturnReason.ENV_ERROR)
    assert re.search(f"Plain.step of task table returned {complaint}", group.detail), group.detail
    assert runner.num_env_errors == 1
    assert encode(group)


async def test_as_many_parts_as_a_member_can_carry_are_carried():
    group, _ = await play_one(always(parts={f"part{n}": 1.0 for n in range(63)}))
    assert len(group.members[0].scores) == 64


class Spiteful(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no name for you")


class Surrogate(Exception):
    def __str__(self) -> str:
        return "lone \ud800 surrogate"


@pytest.mark.parametrize("error", [Spiteful(), Surrogate(), StopIteration(), SystemExit(1)])
async def test_no_exception_of_an_environment_gets_further_than_its_member(error):
    def step(action):
        raise error

    group, _ = await play_one(TableTask(step))
    assert group.reason == ReturnReason.ENV_ERROR and encode(group)


async def test_an_environment_that_cannot_be_made_or_says_nonsense_costs_the_member():
    class Unmade(TableTask):
        def env(self):
            raise OSError("no display")

    group, _ = await play_one(Unmade(lambda action: None))
    assert "no display" in group.detail
    group, _ = await play_one(TableTask(lambda action: 1.0))
    assert "returned float, expected streamrl.Step" in group.detail
    wrong = TableTask(lambda action: Step(0.0, done=False, messages=["not a message"]))
    group, _ = await play_one(wrong, max_turns=2, renderer=Renderer(TOKENIZER))
    assert group.reason == ReturnReason.ENV_ERROR


async def test_members_are_drawn_with_samplings_of_their_own_and_name_them():
    engine = await installed_engine()
    own = (Sampling(temperature=0.5), Sampling(temperature=1.5))
    granted = lease(members=2, samplings=own)
    group = await run_group(granted, make_runner(always(), engine))
    assert tuple(member.sampling for member in group.members) == own and group.sampling == granted.sampling
    assert {request.seed: request.sampling for request in engine.requests} == dict(enumerate(own))
    assert sendable(group, granted, LIMITS) is group


@pytest.mark.parametrize(("where", "task"), [
    ("reset", TableTask(lambda action: Step(1.0), lambda record: [ChatMessage("human", "hi")])),
    ("step", TableTask(lambda action: Step(0.0, done=False, messages=[ChatMessage("human", "hi")]))),
    ("step", TableTask(lambda action: Step(0.0, done=False, context=[ChatMessage("human", "hi")]))),
])
async def test_a_role_that_does_not_exist_costs_the_member_and_is_named_during_a_run_too(where, task):
    group, _ = await play_one(task, max_turns=2)
    assert re.search(rf"{where} of task table gave the role 'human': allowed are system, user", group.detail)


# --- turns ----------------------------------------------------------------------------------------------------------


def three_turns(done_at: int):
    """Rewards 1, 2, 3 ...; says the number of the turn to come."""
    def env():
        turn = 0

        def step(action):
            nonlocal turn
            turn += 1
            said = [ChatMessage("user", f" q{turn} ")]
            return Step(float(turn), done=turn == done_at, messages=said, parts={action or "nothing": 10.0})

        return TableTask(step)

    return env()


def reply_by_turn(*texts: str):
    """Which turn it is, is seen in how many questions the prompt holds."""
    return lambda prompt, seed, version: ids_of(texts[TOKENIZER.decode(prompt).count("q")])


async def test_three_turns_stand_in_one_trajectory_with_observations_off_the_mask():
    engine = await installed_engine(reply_by_turn("one", "two", "three"))
    group, _ = await play_one(three_turns(done_at=3), engine, max_turns=5)
    (member,) = group.members
    assert TOKENIZER.decode(unpack_ids(member.token_ids)) == "one q1 two q2 three"
    assert member.mask == ((0, 3), (7, 10), (14, 19))
    assert [(turn.start, turn.end, turn.reward) for turn in member.turns] == [
        (0, 3, 1.0), (7, 10, 2.0), (14, 19, 3.0)
    ] and member.reward == 6.0
    assert member.versions == (Span(1, 1, 0, 3), Span(1, 1, 7, 10), Span(1, 1, 14, 19))
    logprobs = unpack_logprobs(member.logprobs)
    actions = np.zeros(19, bool)
    for start, end in member.mask:
        actions[start:end] = True
    assert (logprobs[actions] == -1.0).all() and (logprobs[~actions] == 0.0).all()
    assert member.scores == {"score": 6.0, "one": 10.0, "two": 10.0, "three": 10.0}
    assert (member.status, member.finish) == (MemberStatus.FINISHED, "stop")
    # Token in, token out: the next prompt is what stood there, not what a tokenizer makes of it.
    assert list(engine.requests[2].prompt_ids) == ids_of("hi" + "one q1 two q2 ")
    assert len({request.seed for request in engine.requests}) == 3


async def test_an_observation_that_leaves_no_room_for_an_answer_ends_the_episode_truncated_with_what_there_is():
    engine = await installed_engine(reply_by_turn("one", "two", "three"))
    # "hi", "one", " q1 ", "two" are 12 tokens; " q2 " brings 16, and an answer needs one more.
    group, runner = await play_one(three_turns(done_at=3), engine, max_turns=5, max_tokens=16)
    (member,) = group.members
    assert TOKENIZER.decode(unpack_ids(member.token_ids)) == "one q1 two"
    assert member.mask == tuple((turn.start, turn.end) for turn in member.turns) == ((0, 3), (7, 10))
    assert (member.status, member.finish) == (MemberStatus.TRUNCATED, "length")
    assert runner.num_env_errors == 0 and group.outcome == Outcome.COMPLETE


async def test_the_last_answer_gets_the_room_that_is_left():
    engine = await installed_engine(reply_by_turn("one", "two", "three"))
    group, _ = await play_one(three_turns(done_at=3), engine, max_turns=5, max_tokens=18)
    (member,) = group.members
    assert TOKENIZER.decode(unpack_ids(member.token_ids)) == "one q1 two q2 th"
    assert [request.max_new_tokens for request in engine.requests] == [8, 8, 2]
    assert (member.status, member.finish, member.cut) == (MemberStatus.FINISHED, "length", True)


async def test_a_prompt_that_fills_the_whole_trajectory_is_too_long():
    group, _ = await play_one(always(), max_tokens=2)
    assert (group.outcome, group.reason) == (Outcome.RETURNED, ReturnReason.TOO_LONG)


async def test_an_episode_that_max_turns_ends_is_truncated():
    engine = await installed_engine(reply_by_turn("one", "two", "three"))
    group, _ = await play_one(three_turns(done_at=3), engine, max_turns=2)
    (member,) = group.members
    assert TOKENIZER.decode(unpack_ids(member.token_ids)) == "one q1 two"
    assert (member.status, member.finish, member.reward) == (MemberStatus.TRUNCATED, "env", 3.0)


async def test_an_answer_cut_by_max_new_tokens_and_judged_is_finished_and_says_that_it_was_cut():
    group, _ = await play_one(always(), await installed_engine(says("abcdef")), max_new_tokens=4)
    (member,) = group.members
    assert (len(member.token_ids), member.status, member.finish) == (16, MemberStatus.FINISHED, "length")
    assert member.cut


async def test_each_turn_says_how_it_ended_and_its_score_where_that_is_not_its_reward():
    answers = [Step(0.5, done=False, score=2.0, messages=[ChatMessage("user", "q")]), Step(1.0, score=1.0)]
    engine = await installed_engine(reply_by_turn("abcdef", "two"))
    group, _ = await play_one(TableTask(lambda action: answers.pop(0)), engine, max_turns=2, max_new_tokens=4)
    (member,) = group.members
    assert member.turns == (Turn(0, 4, 0.5, 2.0, "length"), Turn(5, 8, 1.0, None, "stop"))
    assert (member.finish, member.scores["score"]) == ("stop", 3.0)
    wild = msgspec.structs.replace(member, turns=(msgspec.structs.replace(member.turns[0], score=math.nan),
                                                  member.turns[1]))
    returned = sendable(msgspec.structs.replace(group, members=(wild,)), lease(), LIMITS)
    assert "the score of turn 0..4 is nan" in returned.detail


@pytest.mark.parametrize("empty", [0, 1, 2])
async def test_a_turn_without_tokens_has_no_range_and_its_reward_is_kept(empty):
    texts = ["one", "two", "six"]
    texts[empty] = ""

    engine = await installed_engine(reply_by_turn(*texts))
    group, _ = await play_one(three_turns(done_at=3), engine, max_turns=3)
    (member,) = group.members
    assert len(member.mask) == len(member.turns) == len(member.versions) == 2
    assert [turn.reward for turn in member.turns] == [[3.0, 3.0], [3.0, 3.0], [1.0, 5.0]][empty]
    assert member.reward == 6.0


async def test_an_episode_without_any_token_is_aborted_not_an_empty_range():
    group, _ = await play_one(always(), await installed_engine(says("")))
    assert (group.outcome, group.reason) == (Outcome.RETURNED, ReturnReason.ENV_ERROR)
    assert "no generation had a token" in group.detail


# --- settings that end up in an episode ------------------------------------------------------------------------------


def fails_for(word: str):
    def step(action):
        if action == word:
            raise ValueError("broken")
        return Step(1.0)

    return TableTask(step)


def by_seed(prompt, seed, version):
    return ids_of(["ok", "bad"][seed % 2])


async def test_env_on_error_drop_aborts_the_failed_member_alone():
    runner = make_runner(fails_for("bad"), await installed_engine(by_seed))
    group = await run_group(lease(members=3), runner)
    assert group.outcome == Outcome.COMPLETE
    states = {member.index: member.status for member in group.members}
    assert states == {0: MemberStatus.FINISHED, 1: MemberStatus.ABORTED, 2: MemberStatus.FINISHED}
    aborted = next(member for member in group.members if member.index == 1)
    assert (aborted.token_ids, aborted.finish) == (b"", "ValueError: broken")
    assert runner.num_env_errors == 1 and sendable(group, lease(members=3), LIMITS) is group
    assert group.num_failed_episodes == 1 and group.detail.endswith("ValueError: broken")


@pytest.mark.parametrize("floor", [-1.5, 0.0])
async def test_env_on_error_floor_gives_the_failed_member_the_reward_floor(floor):
    runner = make_runner(fails_for("bad"), await installed_engine(by_seed), error_floor=floor)
    group = await run_group(lease(members=2), runner)
    failed = group.members[1]
    assert (failed.status, failed.finish, failed.reward) == (MemberStatus.FINISHED, "env", floor)
    assert failed.scores == {"score": floor, "env_error": 1.0}
    assert TOKENIZER.decode(unpack_ids(failed.token_ids)) == "bad"
    assert group.members[0].reward == 1.0 and sendable(group, lease(members=2), LIMITS) is group


@pytest.mark.parametrize("floor", [-1.0, 0.3])
async def test_env_on_error_floor_is_not_added_to_what_earlier_turns_earned(floor):
    answers = [Step(0.7, done=False, messages=[ChatMessage("user", "more")])] * 2

    def step(action):
        if answers:
            return answers.pop()
        raise ValueError("broken")

    group, _ = await play_one(TableTask(step), error_floor=floor, max_turns=3, max_new_tokens=2)
    (member,) = group.members
    assert (member.reward, [turn.reward for turn in member.turns]) == (floor, [0.0, 0.0, floor])
    assert member.scores == {"score": floor, "env_error": 1.0}


@jumping
async def test_env_step_timeout_s_ends_an_async_step_and_names_itself():
    async def step(action):
        waiting.append(action)
        await asyncio.Event().wait()

    waiting: list[str] = []

    runner = make_runner(AsyncTask(step), await installed_engine(), step_timeout_s=30.0)
    task = asyncio.create_task(run_group(lease(), runner))
    await until(lambda: bool(waiting))
    await jump(29.0)
    assert not task.done()
    await jump(2.0)
    group = await task
    assert group.reason == ReturnReason.ENV_ERROR and "env.step_timeout_s=30" in group.detail
    assert runner.executor.num_hung_calls == 1


async def test_a_prompt_over_max_prompt_tokens_is_handed_back_and_its_siblings_stop():
    task = always()
    task._reset = lambda record: [ChatMessage("user", "x" * record["length"])]

    engine = await installed_engine()
    runner = make_runner(task, engine, max_prompt_tokens=5)
    fits = await run_group(lease(prompt=b'{"length": 5}'), runner)
    assert fits.outcome == Outcome.COMPLETE
    over = await run_group(lease(members=4, prompt=b'{"length": 6}'), runner)
    assert (over.outcome, over.reason) == (Outcome.RETURNED, ReturnReason.TOO_LONG)
    assert "6 tokens, rollout.max_prompt_tokens is 5" in over.detail
    assert len(engine.requests) == 1


async def test_stop_strings_sampling_and_lengths_reach_the_engine_as_they_are():
    engine = await installed_engine()
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.01)
    runner = make_runner(always(), engine, stop=("END", "."), ignore_eos=True, max_new_tokens=7)
    await run_group(lease(sampling=sampling, seeds=(99,), purpose=Purpose.EVAL), runner)  # it returns no sets
    (request,) = engine.requests
    assert (request.stop, request.ignore_eos, request.max_new_tokens) == (("END", "."), True, 7)
    assert (request.sampling, request.seed) == (sampling, 99)


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, "u:hi<end>a:"),
        ({"system_prompt": "be kind"}, "s:be kind<end>u:hi<end>a:"),
        ({"apply_chat_template": False}, "hi"),
    ],
)
async def test_system_prompt_and_chat_template_shape_what_the_engine_reads(options, prompt):
    chat = copy.deepcopy(TOKENIZER)
    chat.chat_template = (
        "{% for m in messages %}{{ m.role[0] + ':' + m.content + '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
    )

    engine = await installed_engine()
    runner = make_runner(always(), engine, renderer=Renderer(chat, **options), max_prompt_tokens=40)
    group = await run_group(lease(), runner)
    assert chat.decode(engine.requests[0].prompt_ids) == prompt
    assert chat.decode(unpack_ids(group.members[0].prompt_ids)) == prompt


# --- the door out -----------------------------------------------------------------------------------------------------


async def test_a_group_that_the_hub_would_refuse_is_handed_back_with_the_rule_it_breaks():
    group, _ = await play_one(always())
    (member,) = group.members
    broken = {
        "is outside the vocabulary": (group, msgspec.structs.replace(LIMITS, vocab_size=5)),
        "has a prompt of 2 tokens, the limit is 1": (group, msgspec.structs.replace(LIMITS, max_prompt_tokens=1)),
        "has 2 action tokens, the limit is 1": (group, msgspec.structs.replace(LIMITS, max_new_tokens=1)),
        "over the limit of 20": (group, msgspec.structs.replace(LIMITS, max_message_bytes=20)),
        "is not in the lease": (_with(group, msgspec.structs.replace(member, index=3)), LIMITS),
        "the reward is inf": (_with(group, msgspec.structs.replace(member, reward=math.inf)), LIMITS),
        "cannot be encoded": (_with(group, msgspec.structs.replace(member, reward=np.float64(1))), LIMITS),
        "Expected `str` of length <= 32": (_with(group, msgspec.structs.replace(member, finish="x" * 33)), LIMITS),
    }
    for complaint, (candidate, limits) in broken.items():
        session = ActorSession("a", 1, engine="fake", max_leases=1, transports=(), software="test")
        session.limits = limits
        session.submit(sendable(candidate, lease(), limits), 0.0)
        back = Decoder(TO_HUB).decode(session.outbox.waiting()[0].frame)
        assert (back.outcome, back.reason, back.members) == (Outcome.RETURNED, ReturnReason.ENV_ERROR, ())
        assert complaint in back.detail


def _with(group, member):
    return msgspec.structs.replace(group, members=(member,))


async def test_equal_prompts_travel_once_and_every_generation_and_step_is_progress():
    events = []

    runner = make_runner(always(), await installed_engine())
    group = await run_group(lease(members=3), runner, on_progress=lambda: events.append(1))
    assert [bool(member.prompt_ids) for member in group.members] == [True, False, False]
    assert len(events) == 3 * 3  # reset, generation, step
    assert json.loads(lease().prompt) == {"id": 0} and group.members[0].versions[0].version == V1.version


# --- what the members of a group share -------------------------------------------------------------------------------


class CountingRenderer(Renderer):
    """Notes what it encodes."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER)
        self.encoded: list[str] = []

    def encode_input(self, text, *, whole):
        self.encoded.append(text)
        return super().encode_input(text, whole=whole)


async def test_members_share_a_rendered_prompt_and_nothing_else():
    records = []

    def reset(record):
        records.append(record)
        record["list"].append("spoiled")  # an environment may do as it likes with its record
        return [ChatMessage("user", "ab" if len(record["list"]) == 2 else "spoiled")]

    renderer = CountingRenderer()
    runner = make_runner(TableTask(lambda action: Step(1.0), reset), await installed_engine(), renderer=renderer)
    group = await run_group(lease(members=4, prompt=b'{"list": ["x"]}'), runner)
    assert renderer.encoded == ["ab"]
    assert len({id(record["list"]) for record in records}) == 4
    assert all(record["list"] == ["x", "spoiled"] for record in records)
    assert unpack_ids(group.members[0].prompt_ids).tolist() == ids_of("ab")
    assert [member.prompt_ids for member in group.members[1:]] == [b""] * 3  # the same as the first
    await run_group(lease(members=2, prompt=b'{"list": ["x"]}'), runner)
    assert renderer.encoded == ["ab", "ab"]  # another group: nothing is kept beyond one


async def test_members_whose_episodes_open_differently_have_prompts_of_their_own():
    openings = iter("abc")

    task = TableTask(lambda action: Step(1.0), lambda record: [ChatMessage("user", next(openings))])
    group = await run_group(lease(members=3), make_runner(task, await installed_engine(), num_threads=1))
    prompts = [unpack_ids(member.prompt_ids).tolist() for member in group.members]
    assert sorted(prompts) == [ids_of(letter) for letter in "abc"]


# --- environments that must be closed --------------------------------------------------------------------------------


class Holding:
    """A task whose environments hold something until they are closed; `open` are those that are not."""

    def __init__(self, step, reset=lambda record: [ChatMessage("user", "hi")], *, awaits: bool = False, **more) -> None:
        self.name, self.open, self.num_closed, self.most = "holding", set(), 0, 0
        task = self

        class Env:
            def __init__(self) -> None:
                task.open.add(self)
                task.most = max(task.most, len(task.open))

            def reset(self, record):
                return reset(record)

            def step(self, action):
                return step(action)

            def close(self):
                task.open.remove(self)
                task.num_closed += 1

        async def close(env):
            task.open.remove(env)
            task.num_closed += 1

        self.env = type("Env", (Env,), {**({"close": close} if awaits else {}), **more})


def raising(value):
    raise ValueError("broken")


@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize(("step", "reset", "status"), [
    (lambda action: Step(1.0), lambda record: [ChatMessage("user", "hi")], MemberStatus.FINISHED),
    (raising, lambda record: [ChatMessage("user", "hi")], MemberStatus.ABORTED),
    (lambda action: Step(1.0), raising, MemberStatus.ABORTED),
])
async def test_an_environment_is_closed_once_however_its_episode_ends(step, reset, status, awaits):
    task = Holding(step, reset, awaits=awaits)
    runner = make_runner(task, await installed_engine())
    member = await runner.play({}, 0, 0, Sampling())
    await runner.close()

    assert (member.status, task.open, task.num_closed) == (status, set(), 1)


async def test_a_canceled_episode_closes_its_environment_and_frees_its_place():
    gate = asyncio.Event()
    task = Holding(lambda action: Step(1.0))
    runner = make_runner(task, await installed_engine(gate=gate, tokens_per_step=1), instances=Instances(1))
    playing = asyncio.create_task(runner.play({}, 0, 0, Sampling()))
    await until(lambda: bool(task.open))
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    gate.set()
    assert (await runner.play({}, 0, 0, Sampling())).status == MemberStatus.FINISHED
    await runner.close()
    assert (task.open, task.num_closed, task.most) == (set(), 2, 1)


async def test_a_close_that_fails_is_said_and_costs_no_answer_and_no_place(caplog):
    task = Holding(lambda action: Step(1.0), close=raising)
    runner = make_runner(task, await installed_engine(), instances=Instances(1))
    members = [await runner.play({}, 0, 0, Sampling()) for _ in range(3)]
    await runner.close()
    assert {member.status for member in members} == {MemberStatus.FINISHED} and runner.num_env_errors == 0
    assert [text for text in caplog.messages if "ValueError: broken" in text and "raising failed" in text]


async def test_environments_that_meet_in_their_group_wait_for_no_place():
    def step_group(env, turns):
        return [Step(float(len(turns))) for _ in turns]

    task = Holding(lambda action: Step(0.0), step_group=step_group)
    runner = make_runner(task, await installed_engine(), instances=Instances(1))
    group = await run_group(lease(members=3), runner)
    await runner.close()
    assert [member.reward for member in group.members] == [3.0, 3.0, 3.0] and task.num_closed == 3


async def test_what_stands_around_an_environment_passes_close_on():
    task = Holding(lambda action: Step(1.0))
    tools = tool_env(task.env(), [], ToolRules(parse=lambda text, tools: [], max_turns=1))
    played = [tools, GymnasiumEnv(task.env(), "game"), AgentEnv(task.env(), None, "agent")]
    for one in played:
        one.close()
    assert (task.open, task.num_closed) == (set(), 3)
    plain = TableTask(lambda action: Step(1.0)).env()
    around = [tool_env(plain, [], tools._rules), GymnasiumEnv(plain, "game"), AgentEnv(plain, None, "agent")]
    assert not any(hasattr(one, "close") for one in around)
