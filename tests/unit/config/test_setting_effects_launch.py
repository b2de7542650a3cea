"""Settings of `streamrl launch`: the real launcher, with small programs in place of learner and actors."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from pathlib import Path

import pytest

from streamrl.config.devices import placement_of
from streamrl.errors import ConfigError
from streamrl.launch import EXIT_INTERRUPTED, EXIT_NO_ACTORS, Launcher, launch_run
from streamrl.supervise.actors import NUM_SAME_DEATHS
from streamrl.supervise.caller import Caller
from streamrl.supervise.check import check_engine, check_settings
from streamrl.supervise.child import SPINS, last_words
from streamrl.transport.control import ask
from tests.unit.config.setting_harness import config_of

pytestmark = pytest.mark.timeout(60)

NEVER = 999


def launch(here: Path, *words: str) -> int:
    return Launcher(config_of(*words), words, here / "run").run()


def started(here: Path, kind: str) -> list[str]:
    return [path.read_text() for path in sorted(here.glob(f"{kind}-*"))]


@pytest.mark.shows("launch.num_actors")
@pytest.mark.parametrize("num_actors", [1, 3])
def test_launch_starts_so_many_actors_and_passes_them_their_own_settings(here, num_actors):
    (here / "hub-please").write_text(str(num_actors))

    code = launch(here, f"launch.num_actors={num_actors}", "actors.transports=[zmq]", "actors.give_up_after_s=7")

    words = started(here, "actor")
    assert code == 0 and len(words) == num_actors
    for index in range(num_actors):
        assert any(f"actors.actor_id=actor-{index}" in line for line in words)
    assert all("actors.transports=[zmq]" in line and "actors.give_up_after_s=7" in line for line in words)


@pytest.mark.parametrize(
    ("gpus", "learner", "actors"),
    [
        (["4", "5", "7"], "GPUS=4", ["GPUS=5", "GPUS=7"]),
        (["4"], "learner.gpu_memory_share=0.5 GPUS=4", ["actors.gpu_memory_share=0.25 GPUS=4"] * 2),
    ],
)
def test_every_process_gets_its_gpus_and_its_part_of_a_shared_one(here, monkeypatch, gpus, learner, actors):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (here / "hub-please").write_text("2")
    words = ("launch.num_actors=2",)
    config = config_of(*words)

    assert Launcher(config, words, here / "run", placement_of(config, gpus)).run() == 0

    assert started(here, "learner")[0].endswith(learner)
    by_name = sorted(started(here, "actor"), key=lambda line: "actor-1" in line)
    assert all(line.endswith(end) for line, end in zip(by_name, actors, strict=True)), by_name


@pytest.mark.parametrize(
    ("cores", "words", "own", "policy"),
    [
        (2, ["run.num_threads=2"], {}, "PASSIVE"),
        (2, ["run.num_threads=1"], {}, ""),
        (2, ["launch.num_actors=2"], {}, "PASSIVE"),
        (2, ["run.num_threads=0"], {}, "PASSIVE"),  # torch takes all cores
        (8, ["run.num_threads=4", "actors.num_threads=4"], {}, ""),
        (8, ["run.num_threads=4", "actors.num_threads=5"], {}, "PASSIVE"),
        (2, ["run.num_threads=2"], {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
        (2, ["run.num_threads=2"], {"GOMP_SPINCOUNT": "7"}, ""),
    ],
)
def test_with_more_threads_than_cores_no_process_spins_unless_the_user_says_so(
    here, monkeypatch, capsys, cores, words, own, policy
):
    for name in SPINS:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    (here / "hub-please").write_text("1")

    assert launch(here, "launch.num_actors=1", *words) == 0

    plural = "s" * ("launch.num_actors=2" in words)
    assert f"starting {1 + len(plural)} actor{plural}; more join" in capsys.readouterr().out
    told = [path.read_text() for path in here.glob("openmp-*")]
    assert len(told) >= 2 and set(told) == {policy}  # the learner, and every actor


@pytest.mark.shows("launch.num_max_restarts")
@pytest.mark.parametrize("num_max", [0, 1])
def test_a_crashing_actor_is_restarted_as_often_as_set(here, num_max):
    (here / "hub-please").write_text(str(NEVER))
    (here / "mortal").touch()

    code = launch(here, "launch.num_actors=1", f"launch.num_max_restarts={num_max}")

    assert code != 0 and len(started(here, "actor")) == 1 + num_max


def test_the_first_death_of_an_actor_shows_its_last_line(here, caplog):
    (here / "hub-please").write_text(str(NEVER))
    (here / "mortal").touch()

    launch(here, "launch.num_actors=1", "launch.num_max_restarts=1")

    first = caplog.records[0].getMessage()
    assert "actor-0 ended with status 1" in first and "RuntimeError: the reason of the death" in first


def test_an_actor_with_a_configuration_error_is_not_restarted(here, capfd):
    (here / "hub-please").write_text(str(NEVER))
    (here / "mortal").write_text("2")

    code = launch(here, "launch.num_actors=1", "launch.num_max_restarts=5")

    assert code == EXIT_NO_ACTORS and len(started(here, "actor")) == 1
    assert "a configuration error" in capfd.readouterr().err


def test_an_actor_that_dies_of_the_same_words_again_and_again_is_given_up(here, capfd):
    (here / "hub-please").write_text(str(NEVER))
    (here / "mortal").touch()

    code = launch(here, "launch.num_actors=1", "launch.num_max_restarts=20")

    assert code == EXIT_NO_ACTORS and len(started(here, "actor")) == NUM_SAME_DEATHS
    said = capfd.readouterr().err
    assert "given up (the same words 3 times)" in said and "RuntimeError: the reason of the death" in said


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        ("Writing shards: 100%\n10:00:00 learner  no GPU\ntorch.distributed ChildFailedError\nTraceback (most ...\n",
         "  10:00:00 learner  no GPU"),
        ("10:00:00 learner  run\nTraceback (most recent call last):\nKeyError: 1\n",
         "  10:00:00 learner  run\n  Traceback (most recent call last):\n  KeyError: 1"),
        ("Killed\n", "  Killed"),
    ],
)
def test_the_last_words_of_a_process_are_its_own_lines_or_its_traceback(tmp_path, log, shown):
    path = tmp_path / "learner.log"
    path.write_text(log)

    assert last_words(path) == shown


def test_without_actors_the_command_that_starts_one_is_printed(here, capfd):
    (here / "hub-please").write_text("0")
    (here / "patient").touch()

    assert launch(here, "launch.num_actors=0") == 0

    assert "streamrl actor connect=tcp://127.0.0.1:1" in capfd.readouterr().out


def test_vllm_without_vllm_is_refused_before_anything_starts(here, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    words = ["policy.tiny.enabled=true", "actors.engine=vllm", f"run.dir={here / 'run'}"]

    with pytest.raises(ConfigError, match=r"vLLM is not installed here\. Run `make vllm`"):
        launch_run(words)
    assert not (here / "run").exists()
    check_engine(config_of("actors.engine=vllm", "launch.num_actors=0"))  # actors elsewhere may have it


def test_a_key_of_agents_that_is_not_set_is_told_before_anything_is_started(monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    words = ["actors.endpoint.admin_key_env=MY_KEY"]
    with pytest.raises(ConfigError, match="admin_key_env=MY_KEY, but this variable is not set"):
        check_settings(config_of(*words), words, Caller())


@pytest.mark.shows("launch.num_learner_ranks")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_launch_starts_so_many_learner_ranks(here, num_ranks):
    assert launch(here, f"launch.num_learner_ranks={num_ranks}", "staleness.eta=3") == 0

    words = started(here, "learner")
    assert len(words) == num_ranks and all("staleness.eta=3" in line for line in words)


@pytest.mark.shows("run.shutdown_s")
def test_a_learner_that_ignores_termination_is_killed_after_the_time_set(here):
    (here / "stubborn").touch()

    assert launch(here, "run.shutdown_s=0.1") == EXIT_INTERRUPTED
    assert started(here, "learner") and not (here / "survived").exists()


def test_a_learner_whose_hub_runs_may_take_longer_for_its_step_and_its_checkpoint(here):
    (here / "stubborn").touch()
    (here / "hub-runs").touch()

    assert launch(here, "run.shutdown_s=0.1", "launch.num_actors=0") == EXIT_INTERRUPTED
    assert (here / "survived").exists()


@pytest.mark.shows("launch.num_max_learner_restarts")
@pytest.mark.parametrize(
    ("num_max", "num_deaths", "num_lives", "code"), [(0, 9, 1, -9), (1, 9, 2, -9), (2, 2, 3, 0)],
)
def test_a_killed_learner_is_started_again_as_often_as_set(here, capfd, num_max, num_deaths, num_lives, code):
    (here / "hub-please").write_text("1")
    (here / "lethal").write_text(str(num_deaths))

    assert launch(here, "launch.num_actors=1", f"launch.num_max_learner_restarts={num_max}") == code

    lives = started(here, "life")
    assert len(lives) == num_lives and len(started(here, "actor")) == 1, "the actor goes on"
    assert ["checkpoint.resume=true" in words for words in lives] == [False, *[True] * (num_lives - 1)]
    said = capfd.readouterr().err
    again = "The learner is started again, from version 0: there is no checkpoint yet; the batches"
    assert said.count(again) == num_lives - 1
    assert ("killed by SIGKILL" in said) is (num_deaths > 0)


def test_actors_follow_a_learner_that_was_started_again_to_another_address(here):
    (here / "hub-please").write_text("1")
    (here / "moves").touch()
    (here / "lethal").write_text("2")

    assert launch(here, "launch.num_actors=1", "launch.num_max_restarts=0") == 0

    assert len(started(here, "life")) == 3
    addresses = sorted(words.partition(" ")[0] for words in started(here, "actor"))
    assert addresses == [f"connect=tcp://127.0.0.1:{port}" for port in (1, 2, 3)]


def test_a_newer_checkpoint_sets_the_count_of_learner_restarts_back(here):
    (here / "hub-please").write_text("1")
    (here / "saves").touch()
    (here / "lethal").write_text("3")

    assert launch(here, "launch.num_actors=1", "launch.num_max_learner_restarts=1") == 0

    assert len(started(here, "life")) == 4


def test_the_launcher_keeps_as_many_actors_as_it_is_told(here):
    (here / "hub-please").write_text("4")  # it ends with the fourth actor
    answers: list[dict] = []

    def until(condition) -> None:
        deadline = time.monotonic() + 30
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)

    def scale(num: int) -> None:
        noted = json.loads((here / "run" / "launch.json").read_text())
        answers.append(ask(noted, "streamrl launch", verb="scale", num_actors=num))

    def operator() -> None:
        until(lambda: len(started(here, "actor")) == 1)
        scale(3)
        until(lambda: len(started(here, "actor")) == 3)
        scale(1)
        scale(1)
        scale(2)

    thread = threading.Thread(target=operator)
    thread.start()
    assert launch(here, "launch.num_actors=1") == 0
    thread.join()

    assert answers[:3] == [
        {"started": ["actor-1", "actor-2"], "leaving": []}, {"started": [], "leaving": ["actor-1", "actor-2"]},
        {"started": [], "leaving": []},
    ]
    assert len(answers[3]["started"]) == 1 and not (here / "run" / "launch.json").exists()


@pytest.mark.shows("launch.standby_learner")
@pytest.mark.parametrize("stands_by", [False, True])
def test_a_learner_that_stands_by_takes_over_if_one_is_asked_for(here, monkeypatch, stands_by):
    monkeypatch.setattr("streamrl.supervise.learner.STANDBY_AFTER_S", 0.0)
    (here / "hub-please").write_text("1")
    (here / "lethal").write_text("1")
    if stands_by:
        (here / "awaits-standby").touch()

    assert launch(here, "launch.num_actors=1", f"launch.standby_learner={stands_by}") == 0

    first, second = started(here, "life")
    assert not first.startswith("--standby") and second.startswith("--standby") is stands_by
    assert "checkpoint.resume=true" in second
