"""Names of versions of a run: by number, or by what its evaluations say."""

import json
from pathlib import Path

import pytest

from learner.replay.at import list_versions
from streamrl.errors import ConfigError
from streamrl.stream.rebuilt import named_version


def write_evaluations(run_dir: Path, rows: list[tuple[int, str, float]]) -> None:
    """Add lines to a run's `evaluations.jsonl`: version, set, score."""
    with (run_dir / "evaluations.jsonl").open("a") as file:
        for version, dataset, score in rows:
            file.write(json.dumps({"version": version, "dataset": dataset, "score": score}) + "\n")


@pytest.fixture
def run_dir(tmp_path) -> Path:
    (tmp_path / "config.yaml").touch()
    return tmp_path


OWN = [(0, "", 0.2), (10, "", 0.7), (20, "", 0.7), (30, "", 0.6)]
SETS = [(0, "easy", 0.4), (0, "hard", 0.4), (10, "easy", 0.9), (10, "hard", 0.1), (20, "easy", 0.8), (20, "hard", 0.3)]


@pytest.mark.parametrize(("rows", "name", "version"), [
    (OWN, "best", 10), (OWN, "20", 20), (OWN + [(30, "", 0.8)], "best", 30),  # evaluated again after a restart
    (SETS, "best", 20), (SETS, "best:easy", 10), (SETS, "best:hard", 0),
    (SETS + [(30, "easy", 1.0)], "best", 20),  # of which one set is not known yet
    (OWN + SETS, "best", 10),
])
def test_the_best_version_is_that_of_the_own_set_of_a_named_one_or_of_the_mean(run_dir, rows, name, version):
    write_evaluations(run_dir, rows)

    assert named_version(f"{run_dir}@{name}") == (run_dir, version)


@pytest.mark.parametrize("row", ["[1]", '{"version": 50}', '{"version": "x", "dataset": [], "score": null}', "{"])
def test_a_line_that_is_no_evaluation_is_left_out(row, run_dir):
    (run_dir / "evaluations.jsonl").write_text(f"{row}\n")
    write_evaluations(run_dir, OWN)
    assert named_version(f"{run_dir}@best") == (run_dir, 10)


@pytest.mark.parametrize(("rows", "name", "message"), [
    ([], "best", "@best needs an evaluation, and .* has none: give a version by its number"),
    (SETS, "best:hrad", "needs an evaluation on hrad, and .* has none; it has those of easy, hard: give"),
    (OWN, "best:hard", "has none; it has those of its own set: give"),
])
def test_a_run_without_that_evaluation_has_no_best_version(run_dir, rows, name, message):
    write_evaluations(run_dir, rows)
    with pytest.raises(ConfigError, match=message):
        named_version(f"{run_dir}@{name}")


def test_what_is_no_version_of_a_run_is_left_to_others(run_dir):
    (run_dir / "model@best").mkdir()

    assert named_version(f"{run_dir / 'model'}@best") is None
    assert named_version(f"{run_dir}@newest") is None
    assert named_version("owner/model@best") is None


def test_rebuilt_versions_are_listed_with_what_they_take(run_dir, capsys):
    (run_dir / "run.json").write_text("{}")
    (run_dir / "metrics.jsonl").touch()
    assert list_versions(str(run_dir)) == 0 and "has no rebuilt version" in capsys.readouterr().out
    for name in ("10", "9", ".9.tmp-1"):
        (run_dir / "versions" / name).mkdir(parents=True)
        (run_dir / "versions" / name / "model.safetensors").write_bytes(bytes(int(name.strip(".")[0]) * 100_000))
    (run_dir / "versions" / "9" / "replayed.json").write_text('{"compared": "equal"}')
    assert list_versions(f"{run_dir}@9") == 0
    lines = capsys.readouterr().out.splitlines()
    named = [line.removeprefix(f"{run_dir}/versions/") for line in lines[:2]]
    assert named == ["9: 0.9 MB, equal", "10: 0.1 MB, not whole"]
    assert len(lines) == 3 and "rebuilt when it is asked for" in lines[2]
