"""Files that drive the generation themselves: the actor's engine answers them, and records what it read and sampled."""

import json

import pytest

from actors.rollout import run_group, sendable
from envs.check import check_task
from envs.registry import load_task
from envs.tools.environment import ToolRules, tool_env
from streamrl.errors import TaskError
from streamrl.messages import Limits, MemberStatus, Outcome, ReturnReason, Sampling, Turn
from tests.kit.loops import run
from tests.unit.actors.fakes import installed_engine, lease, make_runner
from tests.unit.actors.test_rewritten_history import TOKENIZER, Renderer, ids, replies, sequences
from tests.unit.envs.adapters.test_interfaces import EXAMPLES, task_for

LIMITS = Limits(vocab_size=64, max_prompt_tokens=40, max_new_tokens=400, max_sequences=8)
START = "<start>u:q<end><start>a:"
RECORD = {"prompt": "q", "answer": "7"}


def play(task, *texts, record=None, **rules):
    """The group of an episode in which the model says these texts, one a call, and what it read in each."""
    found = []

    async def work():
        engine = await installed_engine(replies(*texts))
        options = {"max_prompt_tokens": 40, "max_new_tokens": 40, "max_turns": 5, **rules}
        runner = make_runner(task, engine, renderer=Renderer(TOKENIZER), **options)
        one = lease(prompt=json.dumps(record or task.record("train", 0)).encode())
        group = await run_group(one, runner)
        assert sendable(group, one, LIMITS) is group
        assert runner.executor.slow(-1.0)[0] == 0  # nothing is left on the clock
        found.extend([group, [TOKENIZER.decode(request.prompt_ids) for request in engine.requests], engine.requests])

    run(work)
    return found


def member_of(group):
    assert group.outcome == Outcome.COMPLETE, group.detail
    return group.members[0]


@pytest.fixture
def write(tmp_path):
    """A task of a file with this rollout."""
    def write(body, head="async def rollout(record, client):", record=RECORD):
        path = tmp_path / "loop.py"
        lines = "".join(f"    {line}\n" for line in body.strip("\n").splitlines())
        path.write_text(f"from streamrl import *\nfrom streamrl.errors import *\nimport asyncio, time\n{head}\n{lines}")
        return task_for(path, record)

    return write


# --- rollout(record, client) -----------------------------------------------------------------------------------------


TWO_TURNS = """
messages = [{"role": "user", "content": record["prompt"]}]
first = await client.generate(messages)
client.reward(0.25)
messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "u"}]
second = await client.generate(messages)
return {"reward": float(record["answer"] in second.text), "brief": float(len(second.token_ids))}
"""


def test_a_rollout_of_ones_own_is_recorded_as_it_was_sampled(write):
    group, read, requests = play(write(TWO_TURNS), "x<end>", "7<end>")
    member = member_of(group)

    assert sequences(member) == [f"{START}|x<end><start>u:u<end><start>a:7<end>"]
    assert read == [START, f"{START}x<end><start>u:u<end><start>a:"]
    assert member.turns == (Turn(0, 2, 0.25, finish="stop"), Turn(10, 12, 1.0, finish="stop"))
    assert member.scores == {"score": 1.25, "brief": 2.0} and member.status == MemberStatus.FINISHED
    assert len({request.seed for request in requests}) == 2


def test_a_history_that_the_template_rewrites_gives_sequences_here_too(write):
    member = member_of(play(write(TWO_TURNS), "<think>a</think>x<end>", "7<end>")[0])

    assert sequences(member) == [
        f"{START}|<think>a</think>x<end>", f"{START}x<end><start>u:u<end><start>a:|7<end>"
    ]


def test_plain_functions_wait_for_the_engine_in_a_thread_of_their_own(write):
    task = write(TWO_TURNS.replace("await ", ""), "def rollout(record, client):")
    assert sequences(member_of(play(task, "x<end>", "7<end>")[0])) == [f"{START}|x<end><start>u:u<end><start>a:7<end>"]


def test_a_class_and_other_names_of_the_record_will_do(write):
    body = "    return (await client.generate(sample['prompt'])).text == 'x'"
    head = "class Loop:\n    async def rollout(self, client, sample):"
    member = member_of(play(write(body, head), "x")[0])
    assert (sequences(member), member.reward) == (["q|x"], 1.0)


@pytest.mark.parametrize("again", ["messages.append(answer.choices[0].message)", """
calls = [{"id": c.id, "type": c.type, "function": vars_of(c.function)} for c in answer.choices[0].message.tool_calls]
messages.append({"role": "assistant", "content": None, "tool_calls": calls})"""])
def test_the_form_of_model_servers_with_tools(write, again):
    task = write(f"""
vars_of = lambda f: {{"name": f.name, "arguments": f.arguments}}
messages = [{{"role": "user", "content": [{{"type": "text", "text": "q"}}]}}]
tools = [{{"type": "function", "function": {{"name": "f", "parameters": {{}}}}}}]
create = client.chat.completions.create
answer = await create(model="any", messages=messages, tools=tools, max_tokens=60, temperature=1.0)
call = answer.choices[0].message.tool_calls[0]
{again.strip()}
messages.append({{"role": "tool", "tool_call_id": call.id, "content": call.function.arguments[-2]}})
answer = await client.chat.completions.create(messages=messages, tools=tools)
return answer.choices[0].finish_reason == "stop" and answer.usage["completion_tokens"] == 2
""")
    call = '<tool_call>{"name": "f", "arguments": {"a": 3}}</tool_call>'
    group, read, _ = play(task, f"{call}<end>", "x<end>", max_new_tokens=80)
    member = member_of(group)
    assert sequences(member) == [f"{START}|{call}<end><start>t:3<end><start>a:x<end>"]
    assert member.reward == 1.0 and read[1] == f"{START}{call}<end><start>t:3<end><start>a:"


def test_token_ids_and_texts_may_be_sent_as_well(write):
    member = member_of(play(write("""
first = await client.generate(client.tokenizer.encode("ab", add_special_tokens=False))
second = await client.generate("ab" + first.text + "d")
third = await client.generate("other")
return 1.0
"""), "c", "e", "f")[0])
    assert sequences(member) == ["ab|cde", "other|f"]
    assert member.mask == ((0, 1), (2, 3), (3, 4)) and len(member.turns) == 3


def test_calls_at_once_from_one_input_are_sequences_of_one_trajectory(write):
    member = member_of(play(write("""
await asyncio.gather(*(client.generate("ab") for _ in range(3)))
await client.generate("ab")
return 1.0
"""), "x", "y", "z", "w")[0])
    assert sorted(sequences(member)) == ["ab|w", "ab|x", "ab|y", "ab|z"]  # every token once


def test_a_call_that_is_not_trained_on_may_sample_otherwise_and_leaves_no_trace(write):
    group, read, requests = play(write("""
summary = await client.generate("sum", train=False, temperature=0.0, max_new_tokens=3)
await client.generate(summary.text)
return 1.0
"""), "abc", "x")
    assert sequences(member_of(group)) == ["abc|x"]
    assert requests[0].sampling == Sampling(temperature=0.0) and requests[0].max_new_tokens == 3


def test_only_calls_that_are_trained_on_are_held_to_the_length_of_prompts(write):
    group, _, _ = play(write("""
await client.generate("ab" * 30, train=False, max_new_tokens=3)
await client.generate("ab")
return 1.0
"""), "abc", "x", max_tokens=200)
    assert sequences(member_of(group)) == ["ab|x"]


# --- what is refused, and what ends an episode -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("await client.generate('q', temperature=0.5)", r"temperature=0.5, and the run samples with temperature=1.0"),
        ("await client.generate('q', n=2)", "does not take n: it takes tools"),
        ("await client.generate([])", r"got the prompt \[\]"),
        ("await client.generate([{'role': 'robot', 'content': 'x'}])", "a message has a role of system, user"),
        ("await client.generate('q', max_new_tokens=0)", "max_new_tokens=0, expected a positive integer"),
        ("await client.chat.completions.create(messages=['q'], n=4)", "got n=4: here it can only be 1"),
        ("await client.chat.completions.create(messages=['q'], logit_bias={5: 1})", "here it can only be {}"),
        ("await client.generate('q'); return 'high'", "returned the text 'high'"),
        ("await client.generate('q')", "returned None"),
        ("client.reward(float('nan'))", "client.reward got nan"),
        ("await client.generate('q'); raise KeyError('x')", "KeyError: 'x'"),
        ("return 1.0", "no generation had a token"),
    ],
)
def test_mistakes_of_a_loop_cost_the_member_and_are_named(write, body, complaint):
    group = play(write(body), "x")[0]
    assert group.reason == ReturnReason.ENV_ERROR
    with pytest.raises(AssertionError, match=complaint):
        assert not group.detail, group.detail


def test_env_on_error_floor_trains_what_was_sampled_before_the_failure(write):
    member = member_of(play(write("await client.generate('q'); client.reward(3.0); 1 / 0"), "x", error_floor=-1.0)[0])
    assert (member.reward, member.scores["env_error"], sequences(member)) == (-1.0, 1.0, ["q|x"])


FOREVER = """
text = "q"
while True:
    text += (await client.generate(text)).text + "."
    client.reward(0.5)
"""


@pytest.mark.parametrize("rules", [{"max_turns": 2}, {"max_tokens": 5}])
def test_a_loop_without_an_end_is_cut_with_what_it_earned(write, rules, caplog):
    member = member_of(play(write(FOREVER), "x", "y", "z", **rules)[0])
    assert sequences(member) == ["q|x.y"]
    assert (member.status, member.reward, member.scores["score"]) == (MemberStatus.TRUNCATED, 1.0, 1.0)
    (line,) = caplog.messages
    assert "an interaction loop was cut" in line and ("env.max_turns=2 turns" in line or "has no room" in line)


def test_a_loop_that_looks_or_catches_ends_as_it_wants(write):
    looks = write("while client.num_turns_left:\n    await client.generate('q')\nreturn 1.0")
    member = member_of(play(looks, "x", "y", max_turns=2)[0])
    assert (member.status, member.reward, len(member.sequences)) == (MemberStatus.FINISHED, 1.0, 1)
    catches = write(f"try:{FOREVER.replace(chr(10), chr(10) + '    ')}\nexcept EpisodeFullError:\n    return 0.125")
    assert member_of(play(catches, "x", "y", max_turns=2)[0]).reward == 1.125


def test_a_first_prompt_that_is_too_long_hands_the_lease_back_whatever_the_loop_catches(write):
    group = play(write("try:\n    await client.generate('q' * 41)\nexcept Exception:\n    pass\nreturn 1.0"))[0]
    assert group.reason == ReturnReason.TOO_LONG


def test_the_time_limit_counts_what_the_loop_does_and_not_the_engine(write):
    """The engine waits for a gate that opens only after the limit has passed."""
    import asyncio

    task = write("await client.generate('q')\nawait asyncio.sleep(0)\nreturn 1.0")

    async def work():
        gate = asyncio.Event()
        engine = await installed_engine(lambda *_: ids("x"), gate=gate)
        runner = make_runner(task, engine, renderer=Renderer(TOKENIZER), step_timeout_s=0.05)
        asyncio.get_running_loop().call_later(0.2, gate.set)
        group = await run_group(lease(prompt=json.dumps(RECORD).encode()), runner)
        assert member_of(group).reward == 1.0 and runner.executor.num_hung_calls == 0

    run(work)
    asks_again = "while True:\n    try:\n        await client.generate('q')\n    except Exception:\n        pass"
    for sleeps in ("await asyncio.sleep(60)", "await client.generate('q')\nawait asyncio.sleep(60)", asks_again):
        group = play(write(sleeps), "x", step_timeout_s=0.05, max_turns=1)[0]
        assert "RolloutEnv.rollout ran for more than env.step_timeout_s=0.05" in group.detail


@pytest.mark.parametrize("plain", [False, True])
async def test_a_canceled_episode_ends_its_sequence_in_the_engine(write, plain):
    import asyncio

    head = "def rollout(record, client):"
    body = "client.generate('q')\nreturn 1.0"
    task = write(body, head) if plain else write(f"await {body}", f"async {head}")

    gate = asyncio.Event()
    engine = await installed_engine(lambda *_: ids("x"), gate=gate)
    runner = make_runner(task, engine, renderer=Renderer(TOKENIZER))
    playing = asyncio.ensure_future(run_group(lease(prompt=json.dumps(RECORD).encode()), runner))
    while not engine.stats().running:
        await asyncio.sleep(0.001)
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    while engine.stats().running:
        await asyncio.sleep(0.001)
    assert runner.executor.slow(-1.0)[0] == 0


def test_tools_of_ours_are_not_put_around_a_loop_and_the_check_at_the_start_passes_it(write, tmp_path):
    task = write(TWO_TURNS)
    check_task(load_task("", path=str(tmp_path / "loop.py")))
    with pytest.raises(TaskError, match="drives the generation and calls tools itself"):
        tool_env(task.env(), [], ToolRules(lambda text, tools: [], 3))


def test_without_records_a_loop_gets_seeds(write, tmp_path):
    write("return (await client.generate(str(record['seed']))).text == 'x'")
    task = load_task("", path=str(tmp_path / "loop.py"))
    assert sequences(member_of(play(task, "x")[0])) == ["0|x"]


# --- RL2: generate(config, tokenizer, router_url, sample) ------------------------------------------------------------


def test_generate_of_rl2_runs_on_the_actors_engine():
    task = task_for("rl2_generate.py", {"prompt": "ab", "number": "7"})
    group, read, requests = play(task, "hm", "5", "7<end>")
    member = member_of(group)

    assert sequences(member) == ["ab|hm a number 5 higher 7<end>"] and read[1] == "abhm a number "
    assert [turn.reward for turn in member.turns] == [0.25, 0.25, 1.0] and member.scores["score"] == 1.5
    assert requests[0].max_new_tokens == 40 and requests[0].sampling == Sampling()


def test_states_that_are_no_continuation_are_sequences_as_in_rl2():
    member = member_of(play(task_for("rl2_generate.py", {"prompt": "ab", "number": "7", "fresh": True}), "5", "7")[0])
    assert sequences(member) == ["ab|5", "say higher|7"]
    assert [turn.reward for turn in member.turns] == [0.125, 1.0]


def test_generate_of_rl2_that_finds_no_room_keeps_what_its_turns_earned():
    member = member_of(play(task_for("rl2_generate.py", {"prompt": "ab", "number": "7"}), "1", "2", max_turns=2)[0])
    assert (member.status, member.reward) == (MemberStatus.TRUNCATED, 0.5)


def test_a_file_that_drops_sampled_tokens_is_told_so(tmp_path):
    text = (EXAMPLES / "rl2_generate.py").read_text()
    path = tmp_path / "env.py"
    path.write_text(text.replace("add_llm_response(sample, response)\n", "sample.action_text = response['text']\n"))
    group = play(task_for(path, {"prompt": "ab", "number": "7"}), "7")[0]
    assert "left 0 action tokens in sample.state_dicts, and 1 were sampled" in group.detail


def test_an_endpoint_that_an_actor_does_not_have_is_named(tmp_path):
    path = tmp_path / "env.py"
    path.write_text(
        "from RL2.utils.communication import async_request\n"
        "async def generate(config, tokenizer, router_url, sample):\n"
        "    urls = (await async_request(router_url, 'list_workers', 'GET'))['urls']\n"
        "    models = await async_request(urls[0], 'v1/models', 'GET')\n"
        "    assert models['data'][0]['max_model_len'] == 99\n"
        "    await async_request(router_url, 'parse_function_call', json={})\n"
    )
    assert "asked router_url for 'parse_function_call'" in play(task_for(path, RECORD), max_tokens=99)[0].detail


# --- rl4llm: _run_interaction_loop -----------------------------------------------------------------------------------


def test_an_interaction_loop_of_rl4llm_runs_and_is_scored_by_its_rewards():
    group, read, _ = play(task_for("rl4llm_env.py", RECORD), " x \n<end>", "7<end>")
    member = member_of(group)

    # The loop strips what the model said; the tokens stay as they were sampled.
    assert sequences(member) == [f"{START}| x \n<end><start>u:sure?<end><start>a:7<end>"]
    assert (member.reward, member.scores["accuracy"], len(member.turns)) == (1.0, 1.0, 2)


def test_the_steps_of_the_loop_are_those_of_the_run_and_its_options_those_of_the_environment():
    task = task_for("rl4llm_env.py", RECORD, note="u")
    assert member_of(play(task, "7<end>", max_turns=1)[0]).reward == 1.0
    assert play(task, "x<end>", "7<end>")[1][1].endswith("<start>u:u<end><start>a:")


def test_a_loop_that_is_cut_is_scored_by_what_was_said_before():
    member = member_of(play(task_for("rl4llm_env.py", RECORD), "7<end>", max_tokens=18)[0])
    assert (member.reward, member.status) == (1.0, MemberStatus.TRUNCATED)


def test_a_loop_without_rewards_says_what_is_missing(tmp_path):
    path = tmp_path / "env.py"
    path.write_text(
        "from rl4llm.core.base_env import BaseMDPEnv\nclass E(BaseMDPEnv):\n"
        "    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):\n        return env_state\n"
    )
    with pytest.raises(TaskError, match=r"class E with _run_interaction_loop and no reward: add a class with __call__"):
        task_for(path, RECORD)
    path.write_text(path.read_text() + "def reward_fn(messages, answer): return 1.0\n")
    with pytest.raises(TaskError, match="defines more than one reward or environment: "):
        task_for(path, RECORD)


def test_a_loop_that_leaves_no_answer_is_an_error(tmp_path):
    path = tmp_path / "env.py"
    text = (EXAMPLES / "rl4llm_env.py").read_text()
    path.write_text(text.replace("turn + 1 < self.max_steps", "True").replace("self.max_steps)", "1)"))
    assert "ends with a message of user" in play(task_for(path, RECORD), "x<end>")[0].detail
