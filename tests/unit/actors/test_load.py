"""Where an actor's time goes: idle, starved, in environments, and how long their steps take."""

import asyncio
import os
from contextlib import ExitStack

import pytest

from actors.load import LoadMeter, UseMeter
from actors.rollout import run_group
from actors.runtime import ActorRuntime
from streamrl.environment import Step
from tests.fakes.scripted_engine import ScriptedEngine
from tests.kit.loops import run
from tests.unit.actors.fakes import TableTask, always, installed_engine, lease, make_runner


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


def test_time_counts_as_starved_idle_or_generating_and_episodes_count_each():
    clock = Clock()
    load = LoadMeter(clock)
    clock.passes(1.0)  # no episode: starved, hence idle
    with load.in_environment():
        clock.passes(2.0)  # idle, not starved
        with load.generating(), load.generating():
            clock.passes(4.0)  # two sequences, one environment
        clock.passes(8.0)
    clock.passes(16.0)
    load.paused(0.5)

    found = load.numbers()

    assert (found["up_s"], found["starved_s"], found["idle_s"]) == (31.0, 17.0, 27.0)
    assert (found["generation_s"], found["environment_s"], found["paused_s"]) == (8.0, 14.0, 0.5)


def test_places_that_are_empty_while_others_are_scored_are_room_for_more_groups():
    """An engine of 8 places, groups of 4: three leases, up to nine while their members are not in the engine."""
    load = LoadMeter()
    runtime = ActorRuntime(
        ScriptedEngine(max_num_seqs=8), None, None, None, set_welcome=print, max_leases=3, load=load, group_size=4,
    )  # type: ignore[arg-type]
    assert [runtime.num_free_leases(held) for held in (0, 3, 7, 8, 9, 12)] == [3, 2, 2, 1, 0, 0]
    with ExitStack() as episodes:
        for _ in range(8):
            episodes.enter_context(load.playing())
        assert [runtime.num_free_leases(held) for held in (2, 3)] == [1, 0]
        for _ in range(5):  # five wait for their rewards: one group fits
            episodes.enter_context(load.off_engine())
        assert [runtime.num_free_leases(held) for held in (2, 3, 9)] == [1, 1, 0]
    runtime.group_size = None
    assert [runtime.num_free_leases(held) for held in (2, 3)] == [1, 0]


def test_an_episode_is_off_the_engine_while_it_is_scored():
    seen = []

    async def work():
        task = TableTask(lambda action: seen.append(runner.load.num_for_engine) or Step(1.0))
        runner = make_runner(task, await installed_engine())
        await run_group(lease(members=1), runner)
        assert runner.load.num_for_engine == 0

    run(work)
    assert seen == [0]


def test_a_failed_call_ends_its_time_too():
    clock = Clock()
    load = LoadMeter(clock)
    with pytest.raises(ValueError), load.stepping():
        clock.passes(1.0)
        raise ValueError
    clock.passes(1.0)

    assert load.numbers()["environment_s"] == 1.0 and load.numbers()["env_step_p95_s"] == 1.0


def test_the_percentile_is_of_recent_steps_alone():
    clock = Clock()
    load = LoadMeter(clock)
    for seconds in [*[9.0] * 300, *[1.0] * 240, *[2.0] * 16]:
        with load.stepping():
            clock.passes(seconds)
    assert load.numbers()["env_step_p95_s"] == 2.0
    with load.in_environment():  # a reset
        clock.passes(50.0)
    assert load.numbers()["env_step_p95_s"] == 2.0


async def test_an_episode_fills_the_meter_from_its_engine_and_its_environment():
    runner = make_runner(always(reward=1.0), await installed_engine())
    before = runner.load.numbers()
    await run_group(lease(), runner)
    after = runner.load.numbers()
    assert before["generation_s"] == before["environment_s"] == before["env_step_p95_s"] == 0.0
    assert after["generation_s"] > 0.0 and after["environment_s"] > after["env_step_p95_s"] > 0.0
    await asyncio.sleep(0)
    assert runner.load.numbers()["generation_s"] == after["generation_s"]


def test_the_use_of_host_and_gpu_is_measured_without_a_context_on_the_gpu(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    known, used = r"0, GPU-a, 1, 1\n1, GPU-b, 1, 1\n", r"40, 1000\n95, 2000\n"
    smi.write_text(f"#!/bin/sh\ncase $1 in --id=0,1) printf '{used}';; *) printf '{known}';; esac\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    meter = UseMeter()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(meter.watch(), 3))
    assert (meter.numbers["gpu_percent"], meter.numbers["gpu_used_bytes"]) == (95.0, 2000 * 2**20)
    assert meter.numbers["rss_bytes"] > 1e7 and 0.0 <= meter.numbers["host_cpu_percent"] <= 100.0
    assert 0.0 < meter.numbers["host_memory_percent"] < 100.0
