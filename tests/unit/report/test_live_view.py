"""The terminal view, read back from a recording console, and the plain lines without a terminal."""

import io
import json
import threading
from contextlib import closing

import pytest
from rich.console import Console

from streamrl.metrics.sinks import JsonlSink
from streamrl.report.live_view import NUM_ACTOR_ROWS, LiveView, Tail, ViewState


def text_of(state):
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print(state.render())
    return console.export_text()


def row(step, **more):
    return {"step": step, "run/wall_s": 2.0 * step, "reward/mean": 0.1 * step, "time/step_s": 2.0, "time/wait_s": 0.5,
            "lag/token_mean": 0.75, "lag/head_max": 2, "throughput/train_tokens_per_s": 1500.0,
            "throughput/generate_tokens_per_s": 25000.0, **more}


STATUS = {"run_id": "quick-5498d179", "state": "training", "total_steps": 40, "max_lag": 2, "waiting_for": "",
          "counters": {"num_groups_queued": 5.0, "num_leases_open": 9.0, "num_actors": 2.0},
          "actors": [["a0", "running", "0:9", 800.0, 0.2], ["a1", "syncing", "0:7", 0.0, 4.0]]}


def test_the_display_shows_progress_learning_lag_speed_and_actors():
    state = ViewState(name="quick-003")
    state.update(STATUS)
    for step in range(1, 11):
        state.update(row(step, **({"eval/score": [0.2, 0.9, 0.7][step // 5]} if step % 5 == 0 or step == 1 else {})))

    text = text_of(state)

    assert "quick-5498d179" not in text, "a run has one name, its directory's"
    assert "quick-003" in text and "step 10/40" in text and "1m00s left" in text  # 30 steps of 2 s
    assert "first 0.2  last 0.7  best 0.9" in text
    assert "mean 0.75  max 2  bound 2" in text
    assert "1500 trained  25k generated" in text
    assert "25% of its time" in text
    assert "5 queued  9 leased" in text and "2 alive" in text
    assert "▁" in text and "█" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["│", "a1", "syncing", "0:7", "0", "4.0s", "ago", "│"] in lines


def test_before_the_first_step_the_display_names_what_the_run_waits_for():
    state = ViewState(name="r")
    state.update({**STATUS, "state": "waiting", "waiting_for": "the first actor", "actors": []})

    text = text_of(state)

    assert "step 0/40" in text and "- left" in text
    assert "waiting: waits for the first actor" in text


def test_a_resumed_run_drops_the_steps_that_it_repeats():
    state = ViewState()
    for step in (1, 2, 3, 4, 5, 3):
        state.update(row(step))

    assert [r["step"] for r in state.rows] == [1, 2, 3]


def test_many_actors_are_cut_to_a_screenful_and_counted():
    state = ViewState()
    state.update({**STATUS, "actors": [[f"a{i}", "running", "0:1", 1.0, 0.1] for i in range(NUM_ACTOR_ROWS + 5)]})

    text = text_of(state)

    assert f"a{NUM_ACTOR_ROWS - 1} " in text and f"a{NUM_ACTOR_ROWS} " not in text
    assert "and 5 more" in text


def test_tail_gives_whole_lines_once_and_starts_over_when_the_file_is_replaced(tmp_path):
    path = tmp_path / "x"
    tail = Tail(path)
    assert tail.lines() == []

    path.write_text("one\ntwo\nthr")
    assert tail.lines() == ["one", "two"]
    with path.open("a") as file:
        file.write("ee\n")
    assert tail.lines() == ["three"]
    assert tail.lines() == []

    (tmp_path / "y").write_text("new\n")
    (tmp_path / "y").replace(path)
    assert tail.lines() == ["new"]


@pytest.fixture
def finished():
    event = threading.Event()
    event.set()
    return event


def test_without_a_terminal_each_new_step_is_one_plain_line(tmp_path, finished):
    (tmp_path / "status.json").write_text(json.dumps({**STATUS, "total_steps": 4}))
    out = io.StringIO()
    view = LiveView(tmp_path, console=Console(file=out, force_terminal=False, width=40))

    with closing(JsonlSink(tmp_path / "metrics.jsonl")) as sink:
        sink.log_metrics(1, row(1))
        view.run(finished)
        sink.log_metrics(2, row(2))
        view.run(finished)

    lines = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/4", "step 2/4"]
    assert lines[1].endswith("generate 25k tok/s  eta 4.0s")
    assert "\x1b" not in out.getvalue()


def test_after_a_resume_only_the_repeated_steps_are_new(tmp_path):
    view = LiveView(tmp_path)
    path = tmp_path / "metrics.jsonl"
    with closing(JsonlSink(path)) as sink:
        for step in (1, 2, 3, 4):
            sink.log_metrics(step, row(step))
    assert len(view.poll()) == 4

    with closing(JsonlSink(path, resume_step=2)) as sink:
        sink.log_metrics(3, row(3, **{"run/epoch": 1}))

    assert [r["step"] for r in view.poll()] == [3]
    assert [r["step"] for r in view.state.rows] == [1, 2, 3]


def test_on_a_terminal_the_last_frame_holds_the_last_step_and_log_line(tmp_path, finished):
    (tmp_path / "status.json").write_text(json.dumps(STATUS))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(12)) + "\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a1.log").write_text("hub silent, keeping 3 groups\n")
    out = io.StringIO()

    LiveView(tmp_path, console=Console(file=out, force_terminal=True, width=100)).run(finished)

    assert "step 12/40" in out.getvalue()
    assert "a1: hub silent, keeping 3 groups" in out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_notices_of_the_hub_are_printed_once_and_those_of_an_earlier_part_are_not(tmp_path, finished, terminal):
    status = tmp_path / "status.json"
    status.write_text(json.dumps({**STATUS, "notices": ["11:59:59 old"]}))
    out = io.StringIO()
    view = LiveView(tmp_path, console=Console(file=out, force_terminal=terminal, width=100))

    status.write_text(json.dumps({**STATUS, "notices": ["11:59:59 old", "12:00:00 an episode failed: why"]}))
    view.run(finished)
    view.run(finished)

    assert out.getvalue().count("an episode failed: why") == 1 and "old" not in out.getvalue()
