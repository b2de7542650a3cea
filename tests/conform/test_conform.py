"""The examination of an actor: that of examples/ passes, and each fault fails under the name of its requirement."""

import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from examples.foreign_actor import Actor
from streamrl.config.load import load_config
from streamrl.config.schema import Config
from streamrl.errors import ConfigError
from tests.conform.__main__ import RUN, parse, settings_of
from tests.conform.actor_process import Command
from tests.conform.exam import Examination
from tests.conform.faulty_actors import FAULTS
from tests.conform.requirements import REQUIREMENTS, Findings
from tests.conform.weights import Model

ROOT = Path(__file__).parents[2]
FOREIGN = ROOT / "examples" / "foreign_actor.py"
MODEL = Model([("embed", "float32", (250, 4)), ("head", "float32", (4, 250))], bytes(range(250)) * 32, b"\x80")
PATIENCE_S = 20.0


class InThread:
    """An actor of this process: ended by its own flag, not by signals."""

    stops_by_signal = False

    def __init__(self, kind: type[Actor]) -> None:
        self.kind, self.address = kind, ""
        self._actor: Actor | None = None
        self._thread: threading.Thread | None = None

    def start(self, number: int, num_starts: int) -> None:
        self._actor = self.kind(self.address)
        self._thread = threading.Thread(target=self._actor.run, name=self.kind.__name__, daemon=True)
        self._thread.start()

    def end(self, signal_number: int) -> None:
        assert self._actor is not None and self._thread is not None
        self._actor.done = True
        self._thread.join(timeout=30)

    def ended(self) -> bool | None:
        assert self._thread is not None
        return not self._thread.is_alive()


def examination(path: Path, config: Config, actor: InThread | Command, **options) -> Examination:
    return Examination(settings_of(config, path, MODEL, vocab_size=64), MODEL, actor, **options)


def run_config() -> Config:
    return load_config([*RUN, "hub.bind=tcp://127.0.0.1:0"])


def examined(path: Path, config: Config, kind: type[Actor]) -> Findings:
    actor = InThread(kind)
    exam = examination(path, config, actor, patience_s=15.0, first_install_s=15.0, fail_fast=True)
    actor.address = exam.hub.endpoint
    try:
        return exam.run()
    finally:
        exam.close()


@pytest.fixture(scope="module")
def all_examined(tmp_path_factory) -> dict[type[Actor], Future[Findings]]:
    """All faulty actors, many at once, each at a hub of its own: they mostly wait. Each ends with its first failure."""
    zmq.Context.instance()
    config = run_config()
    with ThreadPoolExecutor(14) as pool:
        return {kind: pool.submit(examined, tmp_path_factory.mktemp("fault"), config, kind) for kind in FAULTS}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "name"), FAULTS.items(), ids=lambda one: getattr(one, "__name__", one))
def test_a_fault_fails_under_the_name_of_its_requirement(all_examined, kind, name):
    findings = all_examined[kind].result()
    assert list(findings.failures)[:1] == [name], "\n".join(findings.lines())
    assert not findings.passed


def test_each_requirement_has_a_fault_that_it_names():
    assert set(FAULTS.values()) == REQUIREMENTS.keys() - {"hello"}


@pytest.mark.timeout(300)
def test_a_foreign_actor_without_our_code_passes_as_a_process(tmp_path):
    actor = Command([])
    exam = examination(tmp_path, run_config(), actor, patience_s=PATIENCE_S)
    actor.words = [sys.executable, str(FOREIGN), exam.hub.endpoint]
    try:
        findings = exam.run()
    finally:
        exam.close()
    assert findings.passed, "\n".join(findings.lines())
    assert findings.shown == REQUIREMENTS.keys(), "\n".join(findings.lines())


def test_the_foreign_actor_is_short_and_imports_nothing_of_ours():
    text = FOREIGN.read_text()
    assert len(text.splitlines()) <= 200
    code = f"import sys, runpy; runpy.run_path({str(FOREIGN)!r}); print(*{{one.split('.')[0] for one in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "zmq" in done.stdout.split() and not {"streamrl", "actors", "learner", "envs"} & set(done.stdout.split())


def test_words_of_the_command():
    words = parse(["tcp://127.0.0.1:7000", "--patience", "5", "env.name=x", "--", "python", "actor.py", "a=b"])
    assert (words.address, words.settings, words.command, words.patience_s) == (
        "tcp://127.0.0.1:7000", ["env.name=x"], ["python", "actor.py", "a=b"], 5.0,
    )
    for wrong in (["localhost:5"], ["tcp://a:1", "tcp://b:2"], ["--patience"], ["--patience", "long"]):
        with pytest.raises(ConfigError):
            parse(wrong)
