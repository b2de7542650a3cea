"""The pictures of the README show the committed records: their points, and the words beside them."""

import re
from pathlib import Path
from statistics import median

import pytest

from bench import figures

ROOT = Path(__file__).parents[3]


def test_the_points_are_means_of_the_recorded_runs():
    title, rate, paths = figures.AGES[0]
    found = figures.scores_by_lag(figures.records(paths), rate)
    uncorrected = [one["end"] for one in figures.records(paths)
                   if (one["arm"], one["lag"], one["rate"], one["valid"]) == ("uncorrected", 64, 3e-4, True)]
    assert len(uncorrected) == 5 and found["uncorrected"][64].mean == pytest.approx(sum(uncorrected) / 5)
    assert list(found["vtrace"]) == [0, 16, 64, 256]
    assert found["uncorrected"][0] == found["stream_default"][0], "without old data they are one run"


def test_the_ratios_beside_trl_are_those_of_the_readme():
    text = (ROOT / "README.md").read_text()
    for (_, path), words in zip(figures.PEERS, ("{:.1f} times on", "{:.1f} times those of TRL"), strict=True):
        systems = figures.rates_of_peers(figures.records([path]))
        assert median(systems["trl"]) == pytest.approx(1.0)
        assert words.format(median(systems["ours"])) in re.sub(r"\s+", " ", text)


def test_both_pictures_are_drawn(tmp_path):
    assert figures.main(["--out", str(tmp_path)]) == 0
    ages, peers = ((tmp_path / name).read_text() for name in ("score_by_age.svg", "beside_trl.svg"))
    assert "no correction" in ages and "SmolLM2-135M, sums" in ages
    assert "samples per second, TRL = 1" in peers and "streamrl, synchronous" in peers
