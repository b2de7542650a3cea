"""The `streamrl` command: what it prints, and its exit codes."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from envs.catalog import entries, lines
from streamrl import cli
from streamrl.config.aliases import ALIASES
from streamrl.config.catalog import nearest_setting, settings
from streamrl.errors import ConfigError
from streamrl.verbs import actors


@pytest.fixture
def streamrl(monkeypatch, capsys):
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["streamrl", *words])
        code = cli.main()
        return code, *capsys.readouterr()

    return run


def test_settings_stand_under_their_sections(streamrl):
    code, out, _ = streamrl("settings", "optimizer")

    lines = out.splitlines()
    assert code == 0 and "critic" in lines and "policy" in lines and "hub" not in lines
    assert lines.index("critic") < lines.index("policy")
    assert lines.index("policy") < lines.index(next(line for line in lines if "  policy.optimizer.lr=1e-06" in line))


def test_common_settings_are_few(streamrl):
    code, out, _ = streamrl("settings", "--common")

    assert code == 0 and "policy.optimizer.lr=" in out and "policy.model_path=" in out
    assert 10 <= out.count("=") <= 25
    assert streamrl("settings", "--common", "actors")[1].count("=") == 2


def test_a_word_that_no_setting_has_leads_to_the_nearest(streamrl):
    code, out, err = streamrl("settings", "learning_rate")

    assert (code, out) == (2, "")
    assert err == "No setting contains learning_rate: did you mean `policy.optimizer.lr`?\n"


def misspelled(word: str) -> list[str]:
    """Without a letter, with one twice, with two exchanged."""
    at = len(word) // 2
    return [word[:at] + word[at + 1 :], word[:at] + word[at] + word[at:],
            word[: at - 1] + word[at] + word[at - 1] + word[at + 1 :]]  # fmt: skip


def alike(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, one).ratio()


def test_a_misspelled_word_of_a_key_leads_to_a_setting_with_that_word():
    words = {name.rpartition(".")[2] for name, *_ in settings()} | ALIASES.keys()
    offenders = {}
    for word in sorted(words):
        for typed in misspelled(word) if len(word) > 6 else []:  # a short word has many neighbors
            said = nearest_setting(typed)
            found = re.search(r"did you mean `(.+)`\?", said)
            meant = found[1] if found else ""
            names = {meant, meant.rpartition(".")[2], *(name for name, ours in ALIASES.items() if ours == meant)}
            if word not in names and max(alike(typed, name) for name in names) < alike(typed, word):
                offenders[typed] = said
    assert offenders == {}


def test_a_misspelled_word_of_a_task_leads_to_a_task_with_that_word():
    words = {one.name.rpartition(".")[2] for one in entries() if "NAME" not in one.name}
    offenders = {}
    for word in sorted(words):
        for typed in misspelled(word) if len(word) > 5 else []:
            with pytest.raises(ConfigError) as refused:
                lines([typed])
            meant = re.search(r"Did you mean (.+)\?", str(refused.value))
            found = {one for split in (r"[\s.]+", r"[\s._]+") for one in re.split(split, meant[1] if meant else "")}
            if max(alike(typed, one) for one in found) < alike(typed, word):
                offenders[typed] = str(refused.value)
    assert offenders == {}


def test_tasks_are_listed_with_their_options():
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "streamrl.cli", "tasks", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    found = run("GSM8K")
    assert found.returncode == 0 and found.stdout.startswith("gsm8k\n") and "reward.type=math" in found.stdout
    unknown = run("gsm9k")
    assert (unknown.returncode, unknown.stdout) == (2, "") and "Did you mean gsm8k?" in unknown.stderr


@pytest.mark.parametrize("command", [
    "launch", "settings", "tasks", "report", "relay", "status", "scale", "drain", "resume",
])
def test_every_command_has_help(streamrl, command):
    code, out, _ = streamrl(command, "--help")

    assert code == 0 and f"streamrl {command} " in out


@pytest.mark.parametrize(("command", "lacks"), [
    ("fit", "MODEL"), ("serve", "MODEL_OR_RUN"), ("at", "RUN@N"), ("resume", "RUN"),
])
def test_only_what_is_missing_is_named_as_missing(command, lacks, tmp_path, python_env):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "streamrl.cli", command], cwd=tmp_path, env=python_env, capture_output=True,
        text=True, timeout=60,
    )
    missing = done.stderr.rpartition("arguments are required: ")[2].strip()
    assert done.returncode == 2 and missing.split(", ")[0] == lacks and "key=value" not in missing
    assert "actors.allow" not in missing


def test_a_report_of_nothing_says_what_is_missing(streamrl):
    code, _, err = streamrl("report", "runs/none")

    assert code == 2
    assert err.startswith("error: runs/none/metrics.jsonl does not exist: runs/none is not a run directory")


@pytest.mark.parametrize("words", ["settings", "--help", "launch --help", "--version", "samples --help"])
def test_a_reader_that_closes_the_pipe_early_is_no_error(python_env, words):
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([sys.executable, "-m", "streamrl.cli", *words.split()], env=python_env, stdout=writes,
                          stderr=subprocess.PIPE, timeout=60)
    os.close(writes)

    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_the_letters_of_a_text_gets_escapes(python_env, make_run, encoding):
    told = [make_run(f"run-{number}", overrides=[f"run.name=日本{number}"]) for number in range(2)]
    done = subprocess.run([sys.executable, "-m", "streamrl.cli", "report", *told], capture_output=True, timeout=60,
                          env=python_env | {"PYTHONIOENCODING": encoding})

    assert (done.returncode, done.stderr) == (0, b"") and b"name=\\u65e5\\u672c1" in done.stdout


def test_a_level_of_the_log_that_is_none_is_told(python_env):
    done = subprocess.run([sys.executable, "-m", "streamrl.cli", "actor", "connect=nowhere"], capture_output=True,
                          env=python_env | {"STREAMRL_LOG": "loud"}, text=True, timeout=60)

    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "STREAMRL_LOG=LOUD is no level" in done.stderr and "give one address" in done.stderr


@pytest.mark.parametrize(("command", "usage"), [("learner", "learner [key=value"), ("actor", "connect=tcp://HOST:PORT")])
def test_no_folder_of_the_user_shadows_a_program(tmp_path, python_env, command, usage):
    for name in ("actors", "configs", "envs", "learner", "streamrl"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('shadowed')\n")

    done = subprocess.run(  # as the console script does: without the working directory on the path
        [sys.executable, "-P", "-m", "streamrl.cli", command, "--help"], cwd=tmp_path, env=python_env,
        capture_output=True, text=True, timeout=60,
    )

    assert (done.returncode, done.stderr) == (0, "") and usage in done.stdout


def test_no_folder_of_the_user_shadows_the_settings_of_a_script(tmp_path, python_env):
    for name in ("actors", "configs", "envs", "learner"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('shadowed')\n")
    script = tmp_path / "train.py"  # its folder comes first on the import path
    script.write_text(
        "from streamrl.config.load import load_config\nprint(load_config(['experiment=quickstart']).run.name)"
    )

    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=python_env, capture_output=True, text=True,
                          timeout=60)

    assert (done.returncode, done.stdout, done.stderr) == (0, "quickstart\n", "")


def test_a_sweep_reports_combinations_that_cannot_run(streamrl, here):
    (here / "learner" / "__main__.py").write_text("import sys\nprint('no such thing')\nsys.exit(2)")

    code, out, err = streamrl("launch", "-m", "experiment=quickstart", "staleness.eta=0,1", "hydra.sweep.dir=sweep")

    assert code == 1 and out.count("=== job") == 2
    assert err.count("\nerror: no such thing\n") + err.startswith("error: no such thing\n") == 2
    assert "not finished    sweep/0-staleness.eta-0: status 2: error: no such thing\n" in err
    left = sorted(path.name for path in (here / "sweep" / "0-staleness.eta-0").iterdir())
    assert left == ["failure.txt", "logs", "overrides.yaml"], "what it was to be and why it failed; no run"


KILLED_LEARNER = """
import os, signal, sys
from pathlib import Path

if sys.argv[1:2] == ["--check"]:
    sys.exit(0)
run = Path(next(word for word in sys.argv if word.startswith("run.dir=")).removeprefix("run.dir="))
(run / "metrics.jsonl").write_text('{"step": 7, "reward/mean": 0.5}\\n')
(run / "LATEST").touch()
print("08:00:00 learner  its last words\\nstep 7/200  reward 0.5", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_a_report_the_way_to_go_on_and_its_place_in_the_index(streamrl, here):
    (here / "learner" / "__main__.py").write_text(KILLED_LEARNER)

    code, out, err = streamrl("launch", "experiment=quickstart", "run.name=mine")

    assert code == -9
    assert "its last words\nResume from its newest checkpoint with:\n" in err, "no lines of steps"
    assert err.rstrip().endswith("\n  streamrl resume mine-001")
    assert out.splitlines()[-1].split() == ["report", "runs/mine-001/report.html"]
    report = (here / "runs" / "mine-001" / "report.html").read_text()
    assert "ended without a summary" in report
    assert "<dd>streamrl launch experiment=quickstart run.name=mine</dd>" in report
    assert "mine-001/report.html" in (here / "runs" / "index.html").read_text()


def test_a_run_in_a_directory_of_its_own_writes_nothing_beside_it(streamrl, here):
    (here / "learner" / "__main__.py").write_text(KILLED_LEARNER)

    streamrl("launch", "experiment=quickstart", "run.dir=own/run")

    assert (here / "own" / "run" / "report.html").exists() and not (here / "own" / "index.html").exists()


def test_a_report_of_a_run_brings_the_index_up_to_date(streamrl, make_run, tmp_path):
    run = make_run("one")
    assert streamrl("report", str(tmp_path))[0] == 0
    make_run("two")

    code, out, _ = streamrl("report", str(tmp_path / "two"))

    assert code == 0 and out.strip() == str(tmp_path / "two" / "report.html")
    assert "two/report.html" in (tmp_path / "index.html").read_text()
    assert "../two/report.html" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("num", "said"),
    [(0, "a0 has no leases and leaves"), (1, "a0 finishes 1 lease within 60 s, takes no more and leaves"),
     (3, "a0 finishes 3 leases within 60 s, takes no more and leaves")],
)
def test_an_actor_without_leases_is_not_said_to_finish_any(monkeypatch, capsys, num, said):
    monkeypatch.setattr(actors, "find_run", lambda word: SimpleNamespace(require_hub=dict))
    monkeypatch.setattr(actors, "ask", lambda *where, **request: {"num_leases": num})

    assert actors.drain(["run", "a0"]) == 0
    assert capsys.readouterr().out.strip() == said
