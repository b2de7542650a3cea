"""A trajectory is a graph of sequences: agents that speak in turns, and forks of a conversation."""

import asyncio
import json
from types import SimpleNamespace

import msgspec
import pytest

from actors.engines.base import Generation, VersionSpan
from actors.recorded import RecordedEngine
from actors.rollout import run_group, sendable
from actors.trajectory.transcript import Transcript
from streamrl.errors import EngineError
from streamrl.messages import Sampling, VersionRef
from streamrl.messages.codec import unpack_ids, unpack_logprobs
from tests.kit.loops import run, until
from tests.unit.actors.fakes import installed_engine, lease, make_runner
from tests.unit.actors.test_rewritten_history import TOKENIZER, Renderer, ids, replies, sequences
from tests.unit.envs.adapters.test_interaction_loops import LIMITS, RECORD, member_of, play, write  # noqa: F401

HEAD = """
def talk(name):
    return [{"role": "user", "content": name}]

async def speak(client, messages, more=""):
    if more:
        messages.append({"role": "user", "content": more})
    answer = (await client.chat.completions.create(messages=messages)).choices[0].message
    messages.append({"role": "assistant", "content": answer.content})

async def rollout(record, client):"""


def test_a_parent_and_its_subagent_alternate_and_are_two_sequences(write):  # noqa: F811
    task = write("""
a, b = talk("a"), talk("b")
await speak(client, a)
await speak(client, b)
client.reward(0.5)
await speak(client, a, "c")
await speak(client, b, "d")
client.reward(0.25)
return 1.0
""", HEAD)
    group, read, requests = play(task, "1<end>", "2<end>", "3<end>", "4<end>")
    member = member_of(group)

    first, second = "<start>u:a<end><start>a:", "<start>u:b<end><start>a:"
    assert sequences(member) == [
        f"{first}|1<end><start>u:c<end><start>a:3<end>", f"{second}|2<end><start>u:d<end><start>a:4<end>"
    ]
    assert read == [
        first, second, f"{first}1<end><start>u:c<end><start>a:", f"{second}2<end><start>u:d<end><start>a:"
    ]
    # Each reward is on the turn that earned it, and the outcome counts once.
    assert [(turn.start, turn.end, turn.reward) for turn in member.turns] == [
        (0, 2, 0.0), (10, 12, 0.0), (12, 14, 0.5), (22, 24, 1.25)
    ]
    assert member.reward == 1.75 and len({request.seed for request in requests}) == 4
    # A replay asks in the order of then, which is not that of the record.
    recorded = RecordedEngine(member, member.prompt_ids)
    run(lambda: says_again(recorded, requests, ["1<end>", "2<end>", "3<end>", "4<end>"]))


async def says_again(engine, requests, texts):
    for request, text in zip(requests, texts, strict=True):
        assert TOKENIZER.decode((await engine.generate(request)).token_ids) == text
    with pytest.raises(EngineError, match="it goes on after turn"):
        await engine.generate(requests[0])


def test_the_outcome_is_on_the_turn_that_no_other_follows(write):  # noqa: F811
    task = write("""
a, b = talk("a"), talk("b")
await speak(client, a)
await speak(client, b)
await speak(client, a, "c")
return 1.0
""", HEAD)
    member = member_of(play(task, "1<end>", "2<end>", "3<end>")[0])

    assert [sequence[-6:] for sequence in sequences(member)] == ["3<end>", "2<end>"]
    assert [turn.reward for turn in member.turns] == [0.0, 0.0, 1.0]  # estimators that look back see all of them


def test_a_fork_reads_the_tokens_that_were_sampled_and_trains_none_of_them_twice(write):  # noqa: F811
    """The second branch goes back behind a turn: its text is compared with the sequence as it stood there."""
    task = write("""
a = talk("a")
await speak(client, a)
fork = list(a)
await speak(client, a, "c")
await speak(client, fork, "d")
return 1.0
""", HEAD)
    group, _, requests = play(task, "<end>", "3<end>", "4<end>")
    member = member_of(group)

    assert sequences(member) == [
        "<start>u:a<end><start>a:|<end><start>u:c<end><start>a:3<end>",
        "<start>u:a<end><start>a:<end><start>u:d<end><start>a:|4<end>",
    ]
    sampled = [list(unpack_ids(member.token_ids))[start:end] for start, end in member.mask]
    assert len(sampled) == 3 and sum(map(len, sampled)) == 5
    first = list(requests[0].prompt_ids) + sampled[0]
    assert [list(one.prompt_ids)[: len(first)] for one in requests[1:]] == [first, first]


def test_tokens_that_a_tokenizer_would_write_otherwise_stay_in_a_fork(write):  # noqa: F811
    """<pad> is decoded to nothing, so only the recorded ids hold it; every log-prob is that of its token."""
    task = write("""
a = talk("a")
await speak(client, a)
fork = list(a)
await speak(client, a, "c")
await speak(client, fork, "d")
return 1.0
""", HEAD)
    group, _, requests = play(task, "x<pad><end>", "3<end>", "4<end>")
    member = member_of(group)

    assert [0 in request.prompt_ids for request in requests] == [False, True, True]
    logprobs = unpack_logprobs(member.logprobs)
    on = {place for start, end in member.mask for place in range(start, end)}
    assert all((logprobs[place] != 0.0) == (place in on) for place in range(len(logprobs)))
    assert sum(span.end - span.start for span in member.versions) == len(on)


def test_calls_at_the_same_time_are_branches(write):  # noqa: F811
    task = write("""
a = talk("a")
await asyncio.gather(*(client.generate(a) for _ in range(3)))
return 1.0
""", HEAD)
    member = member_of(play(task, "1<end>", "2<end>", "3<end>")[0])
    prompt = "<start>u:a<end><start>a:"
    assert sequences(member) == [f"{prompt}|1<end>", f"{prompt}|2<end>", f"{prompt}|3<end>"]


@pytest.mark.parametrize("read", [[5, 6], [7]])
def test_what_was_read_before_any_word_of_the_model_counts_only_if_it_goes_on(read):
    transcript = Transcript()
    transcript.begin([5])
    transcript.add_turn(read, Generation([9], [-1.0], [VersionSpan(VersionRef(1, 1), 0, 1)], "stop"))
    assert transcript.num_tokens == len(read) + 1


PARALLEL = """
same = [{"role": "user", "content": "q"}]
first = [await client.generate(same)] if record["fork"] else []
fork = [*same, {"role": "assistant", "content": first[0].text}, {"role": "user", "content": "u"}] if first else same
said = await asyncio.gather(*(client.generate(fork) for _ in range(3)), return_exceptions=True)
full = [one for one in said if isinstance(one, EpisodeFullError)]
assert len(full) == sum(isinstance(one, Exception) for one in said), said
return {"reward": 1.0, "full": float(len(full))}
"""


@pytest.mark.parametrize("fork", [False, True])
def test_calls_at_the_same_time_have_the_room_that_they_have_one_after_the_other(write, fork):  # noqa: F811
    """A trajectory of more tokens than a learner takes costs the whole lease."""
    task, found = write(PARALLEL, record={**RECORD, "fork": fork}), []

    async def work(max_tokens: int, num_at_once: int | None) -> None:
        limits = msgspec.structs.replace(LIMITS, max_trajectory_tokens=max_tokens)
        engine = await installed_engine(lambda *_: ids("x" * 39 + "<end>"), tokens_per_step=num_at_once)
        rules = {"max_prompt_tokens": 40, "max_new_tokens": 40, "max_turns": 5, "max_tokens": max_tokens}
        one = lease(prompt=json.dumps(task.record("train", 0)).encode())
        group = await run_group(one, make_runner(task, engine, renderer=Renderer(TOKENIZER), **rules))
        assert sendable(group, one, limits) is group, group.detail
        found.append((sequences(member_of(group)), member_of(group).scores))

    for max_tokens in range(64, 264, 10):
        found.clear()
        run(lambda: work(max_tokens, None))  # noqa: B023, each call ends before the next one begins
        run(lambda: work(max_tokens, 1))  # noqa: B023
        assert found[0] == found[1], max_tokens


async def test_short_answers_at_the_same_time_are_not_cut_for_one_another():
    """Room that others might take is waited for, not taken away."""
    gate, one = asyncio.Event(), [{"role": "user", "content": "q"}]
    engine = await installed_engine(replies("1<end>", "2<end>"), gate=gate)
    runner = make_runner(None, engine, renderer=Renderer(TOKENIZER), max_new_tokens=40, max_turns=5, max_tokens=80)
    clock = SimpleNamespace(pause=lambda: None, resume=lambda: None)
    client = runner._client(Transcript(), clock, 0, Sampling(), lambda: None)
    calls = [asyncio.ensure_future(client.generate(one)) for _ in range(2)]
    await until(lambda: engine.requests)
    gate.set()
    assert [(await call).text for call in calls] == ["1", "2"]
    assert [request.max_new_tokens for request in engine.requests] == [40, 40]


@pytest.mark.parametrize("said", ["4<end>", "4<pad><end>", "4"])
@pytest.mark.parametrize(("more", "follows"), [
    ([("a", "42"), ("u", "u")], "42<end><start>u:u<end><start>a:"), ([("a", "4 or")], "4 or"),
    ([("a", "4")], "4"), ([("a", "4"), ("u", "u")], "4<end><start>u:u<end><start>a:"),
])
def test_an_answer_that_comes_back_with_more_in_it_is_read_as_it_is_now(write, said, more, follows):  # noqa: F811
    """Nothing of a message stands behind the end of its turn."""
    roles = {"a": "assistant", "u": "user"}
    messages = [{"role": "user", "content": "a"}, *({"role": roles[one], "content": text} for one, text in more)]
    task = write(f"await speak(client, talk('a'))\nawait client.generate({messages})\nreturn 1.0", HEAD)
    _, read, _ = play(task, said, "5<end>")

    assert read[1].replace("<pad>", "") == f"<start>u:a<end><start>a:{follows}"
