"""Benchmark lines: every field is there, comparisons read "times better", and nothing names the machine."""

import getpass
import json
import platform
from pathlib import Path

import pytest

import bench.record
from bench.record import exit_status, record

FIELDS = {
    "schema", "name", "value", "unit", "better", "baseline", "ratio", "goal", "stats", "samples", "params", "bound",
    "kind", "seed", "seconds", "command", "started", "env",
}  # fmt: skip


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(bench.record, "RESULTS", tmp_path)
    return tmp_path


def baseline(value: float) -> dict:
    return {"name": "x", "value": value, "unit": "u", "source": "here", "version": "1", "measured_here": True}


@pytest.mark.parametrize(("better", "ratio"), [("lower", 0.5), ("higher", 2.0)])
def test_a_ratio_says_how_many_times_better(better, ratio):
    assert record("area.metric.variant", 8.0, "u", better, [8.0], {}, baseline(4.0))["ratio"] == ratio


def test_a_line_has_every_field_and_is_printed_and_kept(results, capsys):
    line = record("area.metric.variant", 2.0, "ms", "lower", [1.0, 2.0, 4.0], {"threads": 1})
    (path,) = results.glob("area/*.jsonl")
    assert set(line) == FIELDS
    assert json.loads(path.read_text()) == json.loads(capsys.readouterr().out) == line
    assert line["stats"] == {"n": 3, "median": 2.0, "iqr": [1.5, 3.0], "min": 1.0, "max": 4.0, "ci95": None}


def test_a_missed_goal_fails_only_a_checked_run():
    met = record("a.b.c", 2.0, "u", "lower", [2.0], {}, goal={"id": "P1", "op": "<=", "value": 2.0})
    missed = record("a.b.c", 2.0, "u", "higher", [2.0], {}, goal={"id": "P2", "op": ">=", "value": 3.0})
    assert (met["goal"]["met"], missed["goal"]["met"]) == (True, False)
    assert [exit_status([met], True), exit_status([met, missed], False), exit_status([met, missed], True)] == [0, 0, 1]


def test_a_line_names_no_host_user_or_path():
    line = record("a.b.c", 2.0, "u", "lower", [2.0], {})
    words = {word.strip('",:[]{}') for word in json.dumps(line["env"]).split()}
    assert platform.node() not in words and getpass.getuser() not in words
    assert str(Path.home()) not in json.dumps(line)
