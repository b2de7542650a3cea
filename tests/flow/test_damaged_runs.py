"""Every reader of a run directory at every file of a run that is damaged in every way: an answer or one sentence.

One real run of three steps is recorded for the whole matrix; each cell damages one file of a copy of it.
"""

import asyncio
import contextlib
import io
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import streamrl
from actors.local_policy import local_config, open_policy
from bench.log_damage import DamagedLog
from learner.checkpoint.checkpoint import find_resume_state
from learner.ranks.mesh import Ranks
from learner.record.pareto import ParetoArchive
from learner.setup.hub import same_address
from streamrl.cli import report
from streamrl.config.load import load_config
from streamrl.config.schema import Config
from streamrl.errors import StreamrlError, one_sentence
from streamrl.metrics.ranking import Objective
from streamrl.metrics.samples import SampleFile
from streamrl.metrics.sinks import JsonlSink
from streamrl.report.compare import write_comparison
from streamrl.report.index import write_index
from streamrl.report.live.view import LiveView
from streamrl.report.report import write_report
from streamrl.report.sample_view import samples
from streamrl.sweep.job import is_done
from streamrl.verbs.resume import command_of
from streamrl.verbs.runs import find_run
from streamrl.verbs.status import status
from tests.flow.forked_process import ForkedPopen
from tests.flow.processes import ROOT, RunHarness, finished


@pytest.fixture(scope="session")
def recorded(tmp_path_factory, fork_server) -> Path:
    """A folder of runs: one real run of three steps, whose every file is damaged in turn, and a good one beside it."""
    folder = tmp_path_factory.mktemp("recorded")
    harness = RunHarness(folder, ForkedPopen)
    harness.run_dir = folder / "runs" / "bad-001"
    try:
        run = harness.launch("trainer.num_steps=3", "launch.num_actors=1", "checkpoint.every_steps=1")
        assert harness.finish(run, 400) == 0, harness.logs()
    finally:
        harness.close()
    (harness.run_dir / "pareto.json").write_text('{"members": [{"version": 1.0, "a": 0.5, "b": 0.5}]}\n')
    (harness.run_dir / "notes.md").write_text("tried again\n")
    shutil.copytree(harness.run_dir, folder / "runs" / "good-001")
    return folder / "runs"


@cache
def quickstart() -> Config:
    return load_config(["experiment=quickstart", "checkpoint.resume=true"])


def resumed(run: Path) -> None:
    """Reads as a resumed learner does, in its order."""
    same_address("tcp://127.0.0.1:0", run, resume=True)
    found = find_resume_state(run, Ranks(), resume=True)
    step = found.version
    JsonlSink(run / "metrics.jsonl", resume_step=step).log_metrics(step + 1, {"reward/mean": 0.5})
    SampleFile(run, max_bytes=1 << 20, resume_step=step)
    ParetoArchive(run / "pareto.json", {"a": 1.0, "b": 1.0}, size=4, reference={})


def live(run: Path) -> None:
    view = LiveView(run)
    view.poll()


READERS: dict[str, Callable[[Path], object]] = {
    "status": lambda run: status([str(run)]),
    "report": write_report,
    "report RUN": lambda run: report([str(run)]),
    "index": lambda run: write_index(run.parent, reports=True),
    "compare": lambda run: write_comparison([run, run.with_name("good-001")], run.parent / "all.html", Objective()),
    "samples": lambda run: samples([str(run)]),
    "resume": lambda run: command_of(find_run(str(run)), []),
    "resumed learner": resumed,
    "live view": live,
    "sweep": is_done,
}
SOME: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "load_run": (streamrl.load_run, ("metrics.jsonl", "summary.json", "config.json", "status.json", "run.json")),
    "launch RUN/config.yaml": (lambda run: load_config([str(run / "config.yaml")]), ("config.yaml",)),
    "eval RUN": (lambda run: opened(str(run)), ("config.yaml", "model/")),
    "chat RUN --version 3": (lambda run: opened(f"{run}@3"), ("ckpt-", "assets")),
}
"""Those that take longer, with the files that they read."""


def opened(source: str) -> None:
    """The model of a run, or of a version of it, as `streamrl eval` and `streamrl chat` load it."""
    async def load() -> None:
        policy = await open_policy(local_config(source, ["actors.num_threads=1"]))
        await policy.engine.close()

    asyncio.run(load())


def cuts(data: bytes) -> Iterator[bytes]:
    """Torn at every byte of a short last line, and at some of a long one."""
    begin = data.rstrip(b"\n").rfind(b"\n") + 1
    step = max(1, (len(data) - begin) // 6)
    for at in sorted({*range(begin, len(data), step), len(data) - 2, len(data) - 1} & set(range(len(data)))):
        yield data[:at]


def damages(path: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """(name, what makes it so) of every damage of a file."""
    data = path.read_bytes()
    first, _, rest = data.partition(b"\n")
    contents = {f"cut at {len(content)}": content for content in cuts(data)} | {
        "torn in the middle": first[: len(first) // 2] + rest, "empty": b"",
        "random bytes": bytes(range(255, -1, -1)) * 9 + b"\n\x00{",
    }
    for how, content in contents.items():
        yield how, lambda p, content=content: p.write_bytes(content)
    yield "missing", lambda _: None
    yield "a directory", lambda p: p.mkdir()
    yield "unreadable", lambda p: p.symlink_to("/proc/self/mem")  # an I/O error, for root, too
    yield "a loop of links", lambda p: p.symlink_to(p.name)


FILES = (
    "metrics.jsonl", "samples.jsonl", "summary.json", "status.json", "config.json", "EPOCH", "LATEST", "run_id",
    "ckpt-00000003/manifest.json", "model/tokenizer.json",
)


def complaint(read: Callable[[Path], object], run: Path, *, only_ours: bool) -> str:
    """What is wrong with how a reader took a damaged run; "" if it answered or said one sentence."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            read(run)
    except StreamrlError as error:
        return "" if str(error) else repr(error)
    except OSError as error:  # commands say these in words, too
        return repr(error) if only_ours or not one_sentence(error) else ""
    except Exception as error:
        return repr(error)[:300]
    return ""


@pytest.mark.parametrize("name", FILES)
def test_every_reader_answers_or_says_one_sentence(recorded, tmp_path, monkeypatch, name):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    readers = READERS | {what: read for what, (read, files) in SOME.items() if name.startswith(files)}
    failures = []
    for number, (how, damage) in enumerate(damages(recorded / "bad-001" / name)):
        shutil.copytree(recorded, tmp_path / str(number), copy_function=os.link)  # no reader writes in place
        run = tmp_path / str(number) / "bad-001"
        (run / name).unlink()
        damage(run / name)
        for what, read in readers.items():
            if wrong := complaint(read, run, only_ours=what == "load_run"):
                failures.append((how, what, wrong))
        shutil.rmtree(tmp_path / str(number))
    assert failures == []


def test_a_damaged_log_is_read_whole_or_refused_by_name_and_nothing_of_it_is_deleted(recorded, tmp_path, monkeypatch):
    log, chance = DamagedLog(recorded / "good-001", tmp_path / "run"), random.Random(3)
    for _ in range(300):
        log.flip(chance)
        log.cut(chance)
    assert log.violations == [] and log.counts["refused by name"] > 300
    monkeypatch.setattr("streamrl.stream.segments._refuse_damage", lambda *_: None)  # as a reader that trusts any end
    for _ in range(20):
        log.flip(chance)
    assert log.violations


def test_a_run_of_empty_files_a_read_only_one_and_none_at_all(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "runs")
    run = tmp_path / "runs" / "bad-001"
    for path in run.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    every = READERS | {what: read for what, (read, _) in SOME.items()}
    assert {what: wrong for what, read in every.items() if (wrong := complaint(read, run, only_ours=False))} == {}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status([str(run)])
    assert "finished" not in said.getvalue()
    gone = tmp_path / "runs" / "gone-001"
    assert {what: wrong for what, read in READERS.items() if (wrong := complaint(read, gone, only_ours=False))} == {}


def test_a_file_that_cannot_be_written_is_one_sentence_of_the_command(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "runs")
    run = tmp_path / "runs" / "bad-001"
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    (run / "evals").write_text("")  # no folder can be made there
    for words in (["report", str(run)], ["eval", str(run), "eval.num_samples=1"]):
        done = finished([sys.executable, "-m", "streamrl.cli", *words], ROOT, ForkedPopen)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert "cannot be read or written" in done.stderr.splitlines()[-1]
