"""The scripted engine generates what a function says, waits at a gate, and counts like a real one."""

import asyncio

import pytest

from actors.engines.base import VersionSpan
from streamrl.errors import EngineError
from tests.fakes.scripted_engine import ScriptedEngine
from tests.unit.engines.tiny_models import V1, V2, request, run


async def test_replies_depend_on_prompt_and_seed_alone():
    engine = ScriptedEngine(num_tokens=6)
    await engine.install({}, V1)
    first, again, other = await asyncio.gather(
        *(engine.generate(request([1, 2], 20, seed=seed)) for seed in (3, 3, 4))
    )
    assert first == again and first.token_ids != other.token_ids
    assert (len(first.token_ids), first.finish, first.spans) == (6, "stop", [VersionSpan(V1, 0, 6)])


async def test_max_new_tokens_cuts_the_reply():
    engine = ScriptedEngine(lambda prompt, seed, version: [7] * 50)
    await engine.install({}, V1)
    done = await engine.generate(request([1], 9))
    assert (done.token_ids, done.finish) == ([7] * 9, "length")


async def test_nothing_is_said_before_the_first_install():
    engine = ScriptedEngine()
    task = asyncio.create_task(engine.generate(request([1], 4)))
    await asyncio.sleep(0)
    assert not task.done() and engine.stats().waiting == 1
    await engine.install({}, V1)
    assert (await task).spans == [VersionSpan(V1, 0, 4)]


def test_a_sequence_that_lives_through_an_install_has_two_spans():
    async def work():
        gate = asyncio.Event()
        gate.set()
        said: list[int] = []

        def reply(prompt, seed, version):
            said.append(version.version)
            if len(said) == 2:
                gate.clear()
            return [version.version] * 6

        engine = ScriptedEngine(reply, tokens_per_step=2, gate=gate)
        await engine.install({}, V1)
        task = asyncio.create_task(engine.generate(request([1], 9)))
        while len(said) < 2:
            await asyncio.sleep(0)
        await engine.install({"w": 1}, V2)
        gate.set()

        done = await task
        assert done.token_ids == [1, 1, 1, 1, 2, 2]
        assert done.spans == [VersionSpan(V1, 0, 4), VersionSpan(V2, 4, 6)]
        assert (engine.installs, engine.tensors) == ([V1, V2], {"w": 1})

    run(work)


async def test_a_cancelled_sequence_gives_its_place_back():
    gate = asyncio.Event()
    engine = ScriptedEngine(max_num_seqs=1, gate=gate)
    await engine.install({}, V1)
    first = asyncio.create_task(engine.generate(request([1], 4)))
    second = asyncio.create_task(engine.generate(request([2], 4)))
    await asyncio.sleep(0)
    first.cancel()
    gate.set()
    assert len((await second).token_ids) == 4
    assert engine.stats().running == 0


async def test_closing_ends_the_requests_that_wait_for_weights():
    engine = ScriptedEngine()
    waiting = asyncio.create_task(engine.generate(request([1], 4)))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await waiting
