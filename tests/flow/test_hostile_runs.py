"""Every command at a run directory and a bundle of somebody else: nothing that they name is imported or sent."""

import json
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from streamrl.cli import commands
from streamrl.config.load import load_config, to_plain
from streamrl.stream.archive import pack
from streamrl.stream.records import RunStarted
from streamrl.stream.writer import LogWriter
from tests.flow.forked_process import ForkedPopen
from tests.flow.processes import finished

SECRET = "hunter2"
EVIL = """open({mark!r}, "a").write("ran")
def run(*args, **options): raise RuntimeError("called")
"""
NAMED = (
    "env.name=evil:run", "advantage.estimator=evil:run", "loss.surrogate=evil:run", "loss.correction=evil:run",
    "policy.optimizer.name=evil:run", "policy.scheduler.name=evil:run", "actors.engine=evil:run",
    "actors.transports=['evil:run',zmq]", "publish.transports=['evil:run',zmq]", "tracking.trackers=['evil:run']",
    "actors.allow=['evil:run']", "reward.judge.url=http://127.0.0.1:{port}/v1", "reward.judge.api_key_env=SECRET",
    "distill.teacher=http://127.0.0.1:{port}/v1", "env.agent_command='touch {mark}'",
    "actors.endpoint.admin_key_env=SECRET", "env.options.command='touch {mark}'",
)
"""Settings of somebody else's run that name code, a program, an address and keys, and allow themselves the code."""
REFUSED: dict[str, list[list[str]]] = {
    "launch": [["RUN/config.yaml"], ["-m", "RUN/config.yaml", "staleness.eta=0,1"]],
    "debug": [["RUN/config.yaml"]],
    "learner": [
        ["RUN/config.yaml"], ["--check", "RUN/config.yaml"], ["--check", "experiment=quickstart", "MODEL", "FROM"],
        ["--check", "experiment=quickstart", "MODEL", "distill.teacher=RUN@1"],
    ],
    "sft": [["RUN/config.yaml"]], "dpo": [["RUN/config.yaml"]], "train-reward-model": [["RUN/config.yaml"]],
    "slurm": [["RUN/config.yaml"]],
    "eval": [["RUN"], ["RUN@1"], ["RUN@best"], ["RUN/model", "RUN/config.yaml"]], "chat": [["RUN"], ["RUN@1"]],
    "serve": [["RUN", "--port", "0"], ["RUN@1", "--port", "0"]],
    "replay": [["RUN"], ["RUN", "--rewards"]], "at": [["RUN@1"], ["RUN@1", "--out", "elsewhere"]],
    "what-if": [["RUN", "policy.optimizer.lr=1e-5"]], "bisect": [["RUN"]], "blame": [["RUN", "0..1"]],
    "resume": [["RUN"]], "push": [["RUN@1", "me/theirs"], ["RUN@best", "me/theirs"]],
    "verify": [["BUNDLE", "--level", "reward"], ["BUNDLE", "--level", "step,loss,draw"]],
}
"""Command -> the ways in which it would use the settings of a run or a bundle."""
READ: dict[str, list[list[str]]] = {
    "bundle": [["RUN"], ["RUN", "--with-model"]], "stream": [["RUN"], ["RUN", "--export", "out.json"]],
    "status": [["RUN"]], "scale": [["RUN", "2"]], "drain": [["RUN", "a"]], "report": [["RUN"]], "samples": [["RUN"]],
    "verify": [["BUNDLE", "--level", "hash"]], "fit": [["RUN"], ["RUN/config.json"]], "reward-model": [["RUN"]],
    "push": [["RUN", "me/theirs"]],
}
"""Command -> the ways in which it reads their files, and uses no setting."""
NEITHER = {"settings", "tasks", "keys", "join", "relay", "actor"}
"""Commands that take no run and no bundle; an actor's settings come from its hub (tests/unit/test_named_code.py)."""


@dataclass
class Theirs:
    """A run directory and a bundle of somebody else, in a folder with code of theirs; and what would tell of a use."""

    folder: Path
    listener: socket.socket
    run_dir: Path
    bundle: Path
    mark: Path

    def does(self, command: str, words: list[str]) -> tuple[int, str]:
        """Exit status and output of a command at them; nothing of them was used."""
        paths = {"RUN": str(self.run_dir), "BUNDLE": str(self.bundle), "MODEL": f"policy.tiny.cache_dir={self.folder}",
                 "FROM": f"policy.model_path={self.run_dir}@1"}
        line = [paths.get(word, word.replace("RUN", str(self.run_dir))) for word in words]
        done = finished(
            [sys.executable, "-m", "tests.fakes.command_line", command, *line], self.folder, ForkedPopen,
            deadline_s=120,
        )
        return done.returncode, done.stdout + done.stderr

    def assert_unused(self, said: str) -> None:
        assert not self.mark.exists() and SECRET not in said and "Traceback" not in said, said
        with pytest.raises(BlockingIOError):
            self.listener.accept()


def make(folder: Path, *words: str, command: str) -> tuple[Path, Path]:
    """A run directory as far as commands look at it before they use its settings, and its bundle."""
    run_dir = folder / "runs" / "theirs-001"
    (run_dir / "model").mkdir(parents=True)
    settings = to_plain(load_config(["experiment=quickstart"]))
    for word in words:
        key, _, value = word.partition("=")
        *sections, last = key.split(".")
        section = settings
        for name in sections:
            section = section[name]
        section[last] = yaml.safe_load(value)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))
    (run_dir / "config.json").write_text(json.dumps(settings))
    (run_dir / "run.json").write_text(json.dumps({"starts": [{"command": command}]}))
    (run_dir / "EPOCH").write_text("1")
    (run_dir / "run_id").write_text("theirs")
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    (run_dir / "evaluations.jsonl").write_text('{"dataset": "", "version": 1, "score": 0.5}\n')
    for name, content in (("config.json", b"{}"), ("model.safetensors", (2).to_bytes(8, "little") + b"{}")):
        (run_dir / "model" / name).write_bytes(content)
    log = LogWriter(run_dir)
    log.append(RunStarted("theirs", 1, 1, 0, json.dumps(settings), {"ranks": "1"}))
    log.close()
    bundle = folder / "theirs.bundle.tar"
    files = {str(file.relative_to(run_dir)): file for file in run_dir.rglob("*") if file.is_file()}
    with bundle.open("wb") as out:
        pack(files, {"format": 1, "run_id": "theirs", "inputs": {}}, out)
    return run_dir, bundle


@pytest.fixture(scope="module")
def theirs(tmp_path_factory, fork_server) -> Iterator[Theirs]:
    folder = tmp_path_factory.mktemp("theirs")
    mark = folder / "mark"
    (folder / "evil.py").write_text(EVIL.format(mark=str(mark)))
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET", SECRET)
        listener.setblocking(False)
        words = [word.format(port=listener.getsockname()[1], mark=mark) for word in NAMED]
        run_dir, bundle = make(folder, *words, command=shlex.join(["streamrl", "launch", *words]))
        yield Theirs(folder, listener, run_dir, bundle, mark)


@pytest.fixture(scope="module")
def referring(tmp_path_factory, theirs) -> Theirs:
    folder = tmp_path_factory.mktemp("referring")
    word = "data.system_prompt=say ${oc.env:SECRET}"
    run_dir, bundle = make(folder, word, command=shlex.join(["streamrl", "launch", "experiment=quickstart", word]))
    return Theirs(folder, theirs.listener, run_dir, bundle, folder / "mark")


def cells(table: dict[str, list[list[str]]]) -> list[object]:
    return [
        pytest.param(command, words, id=" ".join([command, *words])) for command, ways in table.items()
        for words in ways
    ]


def test_every_command_is_either_here_or_takes_neither_run_nor_bundle():
    assert REFUSED.keys() | READ.keys() | NEITHER == commands().keys()


@pytest.mark.parametrize(("command", "words"), cells(REFUSED))
def test_a_command_uses_nothing_that_somebody_elses_run_names(command, words, theirs):
    code, said = theirs.does(command, words)

    theirs.assert_unused(said)
    assert code == 2 and "is not signed as a run of yours, and asks for " in said, said
    (allowed,) = re.findall(r"add ('actors\.allow=\[.*\]')", said)
    names = json.loads(shlex.split(allowed)[0].partition("=")[2])
    assert {"evil:run", "SECRET", f"touch {theirs.mark}"} <= {*names} and "http://127.0.0.1" in allowed, said


@pytest.mark.parametrize(("command", "words"), cells(REFUSED))
def test_a_command_resolves_no_reference_of_somebody_elses_run(command, words, referring):
    code, said = referring.does(command, words)

    referring.assert_unused(said)
    assert code == 2 and "${oc.env:SECRET}" in said, said


@pytest.mark.parametrize(("command", "words"), cells(READ))
@pytest.mark.parametrize("kind", ["theirs", "referring"])
def test_a_command_that_reads_a_run_uses_none_of_its_settings(command, words, kind, request):
    found: Theirs = request.getfixturevalue(kind)
    code, said = found.does(command, words)

    found.assert_unused(said)
    assert code in (0, 1, 2), said


@pytest.mark.parametrize("words", [["launch", "RUN/config.yaml"], ["eval", "RUN"]])
def test_what_the_words_name_is_used(words, theirs, tmp_path):
    folder = tmp_path / "other"
    mark = folder / "mark"
    folder.mkdir()
    (folder / "evil.py").write_text(EVIL.format(mark=str(mark)))
    run_dir, bundle = make(folder, "env.name=evil:run", command="streamrl launch")
    trusted = Theirs(folder, theirs.listener, run_dir, bundle, mark)
    refused, said = trusted.does(words[0], words[1:])
    assert refused == 2 and not mark.exists(), said

    _, said = trusted.does(words[0], [*words[1:], 'actors.allow=["evil:run"]'])
    assert mark.exists() and mark.read_text() == "ran", said


def test_a_command_that_is_no_start_of_a_run_is_not_repeated(theirs, tmp_path):
    folder = tmp_path / "other"
    for command in ("streamrl keys new", "streamrl slurm --submit --setup 'touch mark'", "streamrl launch --x=y",
                    "streamrl launch hydra.searchpath=[.]"):
        run_dir, bundle = make(folder, command=command)
        code, said = Theirs(folder, theirs.listener, run_dir, bundle, folder / "mark").does("resume", ["RUN"])
        assert code == 2 and "is not signed as a run of yours" in said, said
        shutil.rmtree(folder)
