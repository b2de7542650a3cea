"""The terminal view, read back from a recording console, and the plain lines without a terminal."""

import io
import json
import sys
import threading
from contextlib import closing

import pytest
from rich.console import Console

from streamrl.metrics.sinks import JsonlSink
from streamrl.metrics.text import time_left
from streamrl.report.live.panel import DRAWN_WHOLE, NUM_ACTOR_ROWS, NUM_LOG_LINES, NUM_WHOLE_ROWS, ViewState, render
from streamrl.report.live.view import NUM_SAID, QUIET_S, LiveView, LogReader, Tail, worth_reading


def text_of(state, width=100, height=40):
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(render(state, height, width))
    return console.export_text()


def row(step, **more):
    return {"step": step, "run/wall_s": 2.0 * step, "reward/mean": 0.1 * step, "time/step_s": 2.0, "time/wait_s": 0.5,
            "lag/token_mean": 0.75, "lag/head_max": 2, "throughput/train_tokens_per_s": 1500.0,
            "throughput/generate_tokens_per_s": 25000.0, "policy/loss": 0.01, "entropy/mean": 0.3, "kl/value": 0.002,
            "policy/grad_norm": 0.4, **more}


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
    assert "0.2 → 0.7  best 0.9 at step 5" in text
    assert "mean 0.75  max 2  bound 2" in text
    assert "loss 0.01  entropy 0.3  KL 0.002  gradient 0.4" in text
    assert "1500 trained  25k generated" in text
    assert "25% of its time" in text
    assert "9 being generated  5 wait for training  2 actors connected" in text
    assert "failures" not in text
    assert "▁" in text and "█" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["│", "a1", "syncing", "7", "0", "4.0s", "ago", "│"] in lines


def test_with_three_actors_and_everything_measured_nothing_is_cut_off_at_80_by_24():
    state = ViewState(name="quick-003", about="string.reverse, tiny model (2 layers of width 64)")
    state.update({**STATUS, "counters": {**STATUS["counters"], "num_episodes_failed": 3.0},
                  "actors": [[f"actor-{i}", "running", "1:9", 800.0, 0.2] for i in range(3)]})
    for step in range(1, 41):
        state.update(row(step, **({"eval/score": 0.9, "ess/token": 0.99} if step % 5 == 0 else {})))
    for i in range(9):
        state.log(f"08:26:3{i} learner  evaluation of version {i}: 0.995 over 200 prompts " + "x" * 90)

    lines = text_of(state, width=80, height=23).splitlines()

    assert len(lines) <= 23 and all(len(line) == 80 for line in lines)
    assert lines[0].startswith("╭") and lines[-1].startswith("╰") and "string.reverse" in lines[-1]
    assert sum("actor-" in line for line in lines) == 3 and "3 episodes failed" in lines[3], "the first of the numbers"
    assert "08:26:38" in "".join(lines), "the newest line of the logs"
    assert not any("…" in line for line in lines if "learner  evaluation" not in line)


def test_the_panel_fits_every_height_and_its_width_with_many_actors():
    state = ViewState(name="r")
    state.update({**STATUS, "actors": [[f"a{i}", "running", "0:1", 1.0, 0.1] for i in range(NUM_ACTOR_ROWS + 5)]})
    state.update(row(1))
    for i in range(20):
        state.log(f"08:26:{i + 10} learner  line")

    shown = {height: text_of(state, width=200, height=height).splitlines() for height in range(6, 51)}

    assert all(len(lines) <= height and len(lines[0].rstrip()) == 120 for height, lines in shown.items())
    large = shown[50]
    assert sum(not line.strip("│ ") for line in large) == 2, "before the actors and before the logs"
    assert sum("learner  line" in line for line in large) == 10
    assert any(f"a{NUM_ACTOR_ROWS - 1} " in line for line in large) and any("and 5 more" in line for line in large)
    assert not any(f"a{NUM_ACTOR_ROWS} " in line for line in large)


def test_a_wait_is_named_only_once_it_is_long_or_before_the_first_step():
    state = ViewState(name="r", now=100.0)
    state.update({**STATUS, "waiting_for": "the first actor", "actors": []})
    text = text_of(state)
    assert "step 0/40" in text and "left" not in text and "waiting: the first actor" in text

    state.update(row(1))
    state.update({**STATUS, "waiting_for": "3 of 16 groups have arrived"})
    state.now = 102.0
    assert state.phase == "training"
    state.now = 104.0
    assert state.phase == "waiting: 3 of 16 groups have arrived"
    state.update(row(2))
    assert state.phase == "training"


def test_a_resumed_run_drops_the_steps_that_it_repeats_and_a_row_without_a_step_is_none():
    state = ViewState()
    for step in (1, 2, 3, 4, 5, 3):
        state.update(row(step))
    state.update({"step": 3, "eval/score": 0.5})

    assert [r["step"] for r in state.rows] == [1, 2, 3, 3] and "reward" in text_of(state)


def test_a_long_run_keeps_what_is_drawn_and_looks_as_if_everything_were_kept(monkeypatch):
    def fed(num_whole_rows):
        monkeypatch.setattr("streamrl.report.live.panel.NUM_WHOLE_ROWS", num_whole_rows)
        state = ViewState()
        for step in range(2000):
            more = {f"metric/{number}": float(number) for number in range(300)} | {"eval/score": step / 2000} | {
                "lag/head_max": 3 if step == 7 else 2}
            state.update(row(step, **more) if step % 3 else {"step": step, **more})
        state.update({"state": "training", "total_steps": 4000})
        return state

    kept, everything = fed(NUM_WHOLE_ROWS), fed(10_000)

    assert text_of(kept) == text_of(everything) and kept.phase == everything.phase
    assert sum(map(len, kept.rows)) <= len(DRAWN_WHOLE) * 2000 + NUM_WHOLE_ROWS * 320


def test_lines_that_were_printed_are_not_kept_without_end(tmp_path):
    (tmp_path / "logs").mkdir()
    view = LiveView(tmp_path, Console(file=io.StringIO()))
    log = tmp_path / "logs" / "hub.log"
    for number in range(20):
        with log.open("a") as file:
            file.writelines(f"12:00:00 hub  line {number} {line}\n" for line in range(100))
        view.print_news()

    assert len(view._said) == NUM_SAID and len(view.state.log_lines) == NUM_LOG_LINES


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
    assert lines[1].endswith("generate 25k tok/s  4s left")
    assert "\x1b" not in out.getvalue()


def test_without_a_terminal_there_is_at_most_one_line_of_steps_a_second_and_every_evaluation(tmp_path):
    out, now = io.StringIO(), [0.0]
    view = LiveView(tmp_path, console=Console(file=out, force_terminal=False), clock=lambda: now[0])

    with closing(JsonlSink(tmp_path / "metrics.jsonl")) as sink:
        for step in range(1, 31):  # ten a second
            now[0] = step / 10
            sink.log_metrics(step, row(step, **({"eval/score": 0.5} if step == 15 else {})))
            view.print_news()
        sink.log_metrics(31, row(31))
        view.print_news()
        view.print_news(ended=True)

    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1", "11", "15", "25", "31"]


def test_the_time_left_is_of_one_start_of_the_learner_and_never_below_a_second():
    """A restart takes minutes, which are no step: after it the first step alone tells nothing."""
    state = ViewState()
    state.update({**STATUS, "total_steps": 1000})
    for step in range(1, 6):
        state.update({**row(step), "run/epoch": 1.0})
    assert state.time_left_s == 995 * 2.0

    state.update({**row(6), "run/epoch": 2.0, "run/wall_s": 400.0})
    assert state.time_left_s is None
    state.update({**row(7), "run/epoch": 2.0, "run/wall_s": 401.0})
    assert state.time_left_s == 993 * 1.0
    assert [time_left(s) for s in (0.02, 4.4, 59.0, 61.0)] == ["1s left", "4s left", "59s left", "1m01s left"]


def test_after_a_resume_only_the_repeated_steps_are_new(tmp_path):
    view = LiveView(tmp_path)
    path = tmp_path / "metrics.jsonl"
    with closing(JsonlSink(path)) as sink:
        for step in (1, 2, 3, 4):
            sink.log_metrics(step, row(step))
    assert len(view.poll()[0]) == 4

    with closing(JsonlSink(path, resume_step=2)) as sink:
        sink.log_metrics(3, row(3, **{"run/epoch": 1}))

    assert [r["step"] for r in view.poll()[0]] == [3]
    assert [r["step"] for r in view.state.rows] == [1, 2, 3]


def test_on_a_terminal_the_last_frame_holds_the_last_step_and_log_line_task_and_model(tmp_path, finished):
    (tmp_path / "config.json").write_text(json.dumps({"env": {"name": "math"}, "policy": {"model_path": "a/b/Qwen"}}))
    (tmp_path / "status.json").write_text(json.dumps(STATUS))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(12)) + "\n")
    out = io.StringIO()
    view = LiveView(tmp_path, console=Console(file=out, force_terminal=True, width=100))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a1.log").write_text("08:25:56 actor    hub silent, keeping 3 groups\n")

    view.run(finished)

    for shown in ("step 12/40", "hub silent, keeping 3 groups", "math, b/Qwen"):
        assert shown in out.getvalue()


def test_without_a_terminal_every_phase_of_the_start_has_a_line(tmp_path, finished):
    out, now = io.StringIO(), [0.0]
    view = LiveView(tmp_path, console=Console(file=out, force_terminal=False), clock=lambda: now[0])
    log = tmp_path / "logs" / "learner.log"
    log.parent.mkdir()
    log.write_text("08:25:41 learner  tiny model: 2 layers\nLoading weights: 100%|####| 24/24\n")
    view.run(finished)
    with log.open("a") as file:
        file.write("08:25:49 learner  hub listens at tcp://127.0.0.1:1\n08:25:50 learner  evaluating version 0\n")
    view.run(finished)
    now[0] = QUIET_S + 1
    view.run(finished)
    (tmp_path / "status.json").write_text(json.dumps({**STATUS, "waiting_for": "an actor"}))
    now[0] = 2 * QUIET_S + 3
    view.run(finished)
    (tmp_path / "status.json").write_text(json.dumps({**STATUS, "learner": "is in forward_backward, 9.0 s so far"}))
    now[0] = 3 * QUIET_S + 5
    view.run(finished)

    lines = out.getvalue().splitlines()
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(1)) + "\n")
    view.run(finished)
    now[0] = 1000.0
    view.run(finished)
    assert len(out.getvalue().splitlines()) == len(lines) + 1, "the first step ends the reminders"
    assert lines[:2] == ["08:25:41 learner  tiny model: 2 layers", "08:25:50 learner  evaluating version 0"]
    assert [line[9:] for line in lines[2:]] == [
        "still starting (16s since the start)", "waiting: an actor (33s since the start)",
        "the learner is in forward_backward, 9.0 s so far (50s since the start)"]


def test_logs_of_an_earlier_part_and_routine_lines_are_left_out(tmp_path):
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "learner.log"
    log.write_text("08:00:00 learner  of the part before\n")
    reader = LogReader(tmp_path)
    with log.open("a") as file:
        file.write("09:00:00 learner  resuming from ckpt-00000025\nstep 26/40  reward 0.5\n")

    (tmp_path / "logs" / "actor-1.log").write_text("09:00:01 actor    leaving (SIGTERM)\n")

    assert reader.news() == ["09:00:00 learner  resuming from ckpt-00000025", "09:00:01 actor-1  leaving (SIGTERM)"]
    assert not worth_reading("08:25:57 actor    installed version 1:0 by SHM, paused 0.1 ms")
    assert not worth_reading("Traceback (most recent call last):")


@pytest.mark.parametrize("name", ["logs/launch.log", "logs/mine.log", "nohup.log"])
def test_what_the_display_prints_is_not_read_back_from_a_log_of_the_run(tmp_path, capfd, name):
    log, own = tmp_path / "logs" / "learner.log", tmp_path / name
    log.parent.mkdir()
    if own.name == "launch.log":  # by its name: of a sweep's run the parent process writes it
        own.touch()
    else:  # directed there by the user
        own.symlink_to("/proc/self/fd/2")
    view = LiveView(tmp_path, console=Console(file=sys.stderr, width=100))
    log.write_text("12:00:00 learner  evaluating\n")
    for _ in range(3):
        view.print_news()
        said = capfd.readouterr().err if own.name == "launch.log" else own.read_text()
        if own.name == "launch.log":
            with own.open("a") as file:
                file.write(said)
            said = own.read_text()

    assert said.count("evaluating") == 1


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("in_log", ["never", "before", "with it"])
def test_a_notice_is_printed_once_wherever_it_stands_and_those_of_an_earlier_part_are_not(
        tmp_path, finished, terminal, in_log):
    status, log = tmp_path / "status.json", tmp_path / "logs" / "learner.log"
    status.write_text(json.dumps({**STATUS, "notices": ["11:59:59 old"]}))
    log.parent.mkdir()
    out = io.StringIO()
    view = LiveView(tmp_path, console=Console(file=out, force_terminal=terminal, width=100))

    if in_log != "never":
        log.write_text("12:00:00 hub      an episode failed: why\n")
    if in_log == "before" and not terminal:
        view.print_news()
    status.write_text(json.dumps({**STATUS, "notices": ["11:59:59 old", "12:00:00 an episode failed: why"]}))
    view.run(finished)
    view.run(finished)

    assert out.getvalue().count("an episode failed: why") == 1 and "old" not in out.getvalue()