"""`streamrl stream`: which records it prints, and what it exports, of a small log."""

import json
import sys

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from actors.recorded import main as recorded_main
from envs.registry import task_of
from learner.replay.__main__ import main as replay_main
from learner.replay.what_if import main as what_if_main
from streamrl.config.load import load_config, to_yaml
from streamrl.errors import ControlError
from streamrl.messages import FINISHED_AT, Group, Outcome, PlanRow, ReturnReason, Sampling
from streamrl.messages.codec import encode
from streamrl.named_code import sign
from streamrl.stream.export import export, last_line
from streamrl.stream.history import History, LoggedGroup, Wanted, rows
from streamrl.stream.records import BatchCut, GroupArrived, GroupMoved, RunStarted, StepTaken
from streamrl.stream.writer import LogWriter
from streamrl.verbs.bundle import contents
from streamrl.verbs.stream import stream
from tests.unit.hub.factories import member


def arrived(group_id: int, actor: str, version: int, rewards: tuple[float, ...], refused: str = "") -> GroupArrived:
    group = Group(
        incarnation=1, seq=group_id, group_id=group_id, attempt=0, outcome=Outcome.COMPLETE, reason=ReturnReason.NONE,
        detail="", sampling=Sampling(), stats={FINISHED_AT: 1e9 + group_id} if group_id < 4 else {},
        members=tuple(member(place, [(1, version)], reward=reward) for place, reward in enumerate(rewards)),
    )
    frame = b"" if refused else bytes(encode(group))
    return GroupArrived(actor, 1, group_id, group_id, 10 + group_id, frame, refused)


@pytest.fixture
def run_dir(tmp_path):
    """Group 1 is trained, 2 dropped, 3 refused, 4 accepted and no more."""
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    writer = LogWriter(tmp_path)
    for record in (
        RunStarted("a-run", 1, 1, 0, json.dumps({"policy": {"model_path": "models/m"}}), {}),
        arrived(1, "actor-1", 0, (0.0, 1.0)), arrived(2, "actor-2", 1, (1.0, 1.0)),
        arrived(3, "actor-2", 0, (), "too old"), arrived(4, "actor-1", 2, (0.25,)), GroupMoved(2, 5, "equal rewards"),
        BatchCut(0, (PlanRow(1, 0, 0, 4, 1, 0.0, 0), PlanRow(1, 1, 0, 4, 1, 1.0, 0)), (2,), (0,)),
        StepTaken(1, False),
    ):
        writer.append(record)
    writer.close()
    return tmp_path


def found(run_dir, **wanted) -> list[int]:
    return [one.arrived.group_id for _, one in rows(run_dir, Wanted(**wanted)) if isinstance(one, LoggedGroup)]


def test_groups_are_told_by_what_became_of_them(run_dir):
    told = {one.arrived.group_id: one for _, one in rows(run_dir, Wanted()) if isinstance(one, LoggedGroup)}
    assert {key: one.outcome for key, one in told.items()} == {1: "accepted", 2: "dropped", 3: "stale", 4: "accepted"}
    assert (told[1].trained_at, told[1].reward, told[4].trained_at) == (0, 0.5, -1)
    assert told[2].reason == "equal rewards" and told[3].reward is None


@pytest.mark.parametrize(("wanted", "groups"), [
    ({"actor": "actor-2"}, [2, 3]), ({"outcome": "stale"}, [3]), ({"versions": (1, 2)}, [2, 4]),
    ({"rewards": (0.0, 0.5)}, [1, 4]), ({"actor": "actor-1", "versions": (2, 9)}, [4]),
])
def test_filters_select_groups(run_dir, wanted, groups):
    assert found(run_dir, **wanted) == groups


def test_the_command_prints_a_line_for_each_record(run_dir, capsys):
    assert stream([str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and "trained at 0" in lines[1] and "moved" not in "".join(lines)
    stream([str(run_dir), "--kind", "batch"])
    assert capsys.readouterr().out.split(maxsplit=1)[1] == "batch       for version 0: 1 groups, 2 answers\n"
    stream([str(run_dir), "--reward", "0.2..0.3"])
    assert capsys.readouterr().out.count("group  ") == 1


def test_a_range_that_is_none_and_a_run_without_a_log_are_refused(run_dir, tmp_path):
    with pytest.raises(ControlError, match=r"--version 5\.\.3: give two numbers"):
        stream([str(run_dir), "--version", "5..3"])
    for path in (run_dir / "stream").iterdir():
        path.unlink()
    with pytest.raises(Exception, match="has no log"):
        stream([str(run_dir)])


def test_answers_are_exported_as_trajectories_with_exact_tokens(run_dir):
    out = run_dir / "out.json"
    groups = [one for _, one in rows(run_dir, Wanted()) if isinstance(one, LoggedGroup)]
    assert export(groups, out, run_id="a-run", model="m", text=lambda ids: " ".join(map(str, ids))) == 5
    first = json.loads(out.read_text())[0]
    assert first["schema_version"] == "ATIF-v1.7" and [step["step_id"] for step in first["steps"]] == [1, 2]
    user, agent = first["steps"]
    assert (user["source"], user["message"], agent["source"], agent["message"]) == ("user", "1 2 3", "agent", "4 5")
    assert agent["metrics"]["prompt_token_ids"] == [1, 2, 3] and agent["metrics"]["logprobs"] == [-0.5, 0.0]
    assert first["extra"]["trained_at"] == 0 and not list(run_dir.glob("out.json.tmp*"))
    with pytest.raises(ControlError, match="give FILE.parquet, FILE.json"):
        export(groups, run_dir / "out.csv", run_id="a-run", model="m", text=None)


def test_an_export_of_an_own_run_has_the_records_answers_and_times(run_dir, capfd):
    config = load_config(["experiment=quickstart"])
    (run_dir / "config.yaml").write_text(to_yaml(config))
    stream([str(run_dir), "--export", str(run_dir / "of_nobody.json")])
    sign(run_dir / "config.yaml")
    stream([str(run_dir), "--export", str(run_dir / "own.json")])
    of_nobody, own = (json.loads((run_dir / f"{name}.json").read_text()) for name in ("of_nobody", "own"))

    task = task_of(config)
    right = {number: task.target(task.record("train", number)) for number in (11, 12, 14)}
    assert [(one["extra"]["expected"], one["extra"]["finished_at"]) for one in own] == [
        (right[11], 1e9 + 1), (right[11], 1e9 + 1), (right[12], 1e9 + 2), (right[12], 1e9 + 2), (right[14], None),
    ]
    assert {one["extra"]["expected"] for one in of_nobody} == {None}, "its settings may name any file"

    (run_dir / "config.yaml").write_text(to_yaml(load_config(["experiment=quickstart", "env.path=gone.py"])))
    sign(run_dir / "config.yaml")
    assert stream([str(run_dir), "--export", str(run_dir / "gone.json")]) == 0
    assert json.loads((run_dir / "gone.json").read_text())[0]["extra"]["expected"] is None
    assert "gone.py" in capfd.readouterr().err


def test_parquet_has_a_row_for_each_answer(run_dir, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert stream([str(run_dir), "--outcome", "accepted", "--export", str(run_dir / "out.parquet")]) == 0
    table = parquet.read_table(run_dir / "out.parquet").to_pylist()
    answers = [(row["group_id"], row["member"], row["reward"]) for row in table]
    assert answers == [(1, 0, 0.0), (1, 1, 1.0), (4, 0, 0.25)]
    assert table[2]["versions"] == [2, -1] and table[0]["prompt"] is None
    assert "no tokenizer was found" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["new/out.parquet", "new/out.json", "new"])
def test_an_export_that_nothing_matches_writes_nothing(out, run_dir, capsys):
    assert stream([str(run_dir), "--actor", "actor-9", "--export", str(run_dir / out)]) == 1
    assert not (run_dir / "new").exists() and "no answers match; nothing written\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["summary.json", "report.html", "evals/e.json"])
def test_a_bundle_of_somebody_elses_run_follows_no_link_out_of_it(name, run_dir, tmp_path_factory, monkeypatch):
    secret = tmp_path_factory.mktemp("home") / "key"
    monkeypatch.setenv("XDG_STATE_HOME", str(secret.parent))
    secret.write_text("hunter2")
    (run_dir / "config.yaml").write_text(to_yaml(load_config(["experiment=quickstart"])))
    (run_dir / "evals").mkdir()
    (run_dir / name).symlink_to(secret)
    with pytest.raises(ControlError, match=f"its {name} is a link to {secret}"):
        contents(run_dir, with_model=False, with_checkpoints=False)

    sign(run_dir / "config.yaml")
    assert name in contents(run_dir, with_model=False, with_checkpoints=False)[0]


def test_options_that_nothing_matches_say_what_there_is(run_dir, capsys):
    assert stream([str(run_dir), "--reward", "0.9"]) == 1
    assert capsys.readouterr().err == (
        "0 of 4 groups match: their actors are actor-1, actor-2; their mean rewards lie between 0.25 and 1\n"
    )
    assert stream([str(run_dir), "--actor", "actor-9"]) == 1
    assert "their actors are actor-1, actor-2" in capsys.readouterr().err
    assert stream([str(run_dir), "--kind", "checkpoint"]) == 1
    assert "no record of" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["sft", "dpo", "train-reward-model"])
def test_a_run_that_keeps_no_log_says_so(verb, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{"command": f"streamrl {verb} data.path=x.jsonl"}]}))
    with pytest.raises(ControlError, match=f"keeps no log: a run of streamrl {verb} has none"):
        stream([str(tmp_path)])


def test_the_texts_of_groups_are_printed_and_steer_no_terminal(run_dir, capsys):
    with pytest.raises(ControlError, match="no tokenizer of .* was found"):
        stream([str(run_dir), "--text"])
    tokenizer = Tokenizer(WordLevel({f"w{number}\x1b[2J": number for number in range(64)}, "w0\x1b[2J"))
    (run_dir / "model").mkdir()
    (run_dir / "model" / "tokenizer.json").write_text(tokenizer.to_str())

    assert stream([str(run_dir), "--actor", "actor-1", "--text"]) == 0
    said = capsys.readouterr().out
    assert said.count("--- prompt") == 2 and said.count("--- answer 0, reward 0") == 2 and "\x1b" not in said
    assert "w1\\x1b[2J" in said


def test_the_line_of_a_prompt_is_its_last_that_says_something():
    assert last_line("system\nBe brief.\nuser\nWhat is 2+3?\n\nassistant\n") == "What is 2+3?"
    assert last_line("\n") == "" and len(last_line("x" * 500)) == 63


@pytest.mark.parametrize(("first", "last", "message"), [
    (9, None, "from 9 on: its log has those for 0 to 0"), (0, 0, "from 0 on and before 0"), (1, 7, "from 1 on"),
])
def test_batches_that_are_not_there_are_refused(run_dir, first, last, message):
    assert len(History.read(run_dir).trained(0, 1)) == 1
    with pytest.raises(ControlError, match=f"no batch of .* is for a version {message}"):
        History.read(run_dir).trained(first, last)


@pytest.mark.parametrize("command", [replay_main, what_if_main, recorded_main])
def test_a_range_that_ends_before_it_begins_is_no_range(command, run_dir, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", str(run_dir), "--from", "5", "--to", "3"])
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 2 and "--from 5 --to 3: no batch lies between them" in capsys.readouterr().err
