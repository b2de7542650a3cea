"""Evaluations stand at the version that they measure, not at the step at which they arrived."""

import json

import pytest

from streamrl.metrics.run_record import read_run
from streamrl.report.headline import tiles
from streamrl.report.live.panel import ViewState, _evaluation
from streamrl.report.report import evaluation_curves


@pytest.fixture(params=[1, 4])
def late(request, tmp_path):
    """Rows of a run with so many optimizer steps a batch, whose evaluations came three steps late."""
    spb, root = request.param, tmp_path / "run"
    root.mkdir()
    rows = [{"step": step, "run/version": float(spb * step), "reward/mean": 0.1, "time/step_s": 1.0}
            for step in range(1, 31)]
    for step, score in ((0, 0.1), (10, 0.9), (20, 0.5)):
        rows[step + 2] |= {"eval/score": score, "eval/version": float(spb * step), "eval/hard/score": score / 2,
                           "eval/hard/version": float(spb * step)}
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_run(root)


def test_every_reader_has_them_at_their_version(late):
    assert [row["step"] for row in late.rows if "eval/score" in row] == [3, 13, 23], "the data keeps the step"

    assert late.series("eval/score")[0] == late.series("eval/hard/score")[0] == [0, 10, 20]
    assert late.evaluations()[0] == [0, 10, 20]
    assert list(evaluation_curves(late)[0].xs) == [0, 10, 20]
    assert "best 0.9 at step 10" in tiles(late)
    assert "best 0.9 at step 10" in _evaluation(ViewState(rows=late.rows))[1].plain
    assert late.series("reward/mean")[0] == list(range(1, 31)), "nothing else moves"
