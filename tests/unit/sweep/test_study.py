"""The search: what is proposed, pruned and remembered, with the real Optuna."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from streamrl.config.schema import Pruner, SweepConfig, SweepDirection
from streamrl.errors import ConfigError
from streamrl.sweep.study import Search, check_search
from streamrl.sweep.words import Axis

LR = {"policy.optimizer.lr": Axis((), 1e-5, 1e-2, log=True)}


def search(directory, axes=LR, **settings) -> Search:
    return Search(directory, axes, SweepConfig(sampler="tpe", **settings), seed=1)


def lr_of(words: tuple[str, ...]) -> float:
    return float(words[0].partition("=")[2])


def play(search: Search) -> list[float]:
    """Do all trials; 1e-3 is the best learning rate."""
    tried = []
    while (trial := search.next()) is not None:
        tried.append(lr_of(trial[1]))
        search.report_end(trial[0], -abs(math.log10(tried[-1]) + 3.0), pruned=False)
    return tried


@pytest.mark.shows("sweep.num_trials")
def test_a_search_does_as_many_trials_as_set_and_draws_them_from_the_range(tmp_path):
    tried = play(search(tmp_path, num_trials=7))

    assert len(set(tried)) == 7 and all(1e-5 <= lr <= 1e-2 for lr in tried)


@pytest.mark.shows("sweep.num_startup_trials")
def test_after_its_random_trials_the_search_goes_where_the_good_ones_were(tmp_path):
    def mean_miss(num_startup_trials: int, name: str) -> float:
        (tmp_path / name).mkdir()
        tried = play(search(tmp_path / name, num_trials=40, num_startup_trials=num_startup_trials))
        return sum(abs(math.log10(lr) + 3.0) for lr in tried[20:]) / 20

    assert mean_miss(5, "guided") < 0.6 * mean_miss(40, "random")


def test_every_kind_of_axis_gives_its_values(tmp_path):
    axes = {"a": Axis(("x", "y")), "b": Axis(("0", "4"), 0, 8, 4), "c": Axis((), 1, 64, log=True)}
    drawn = search(tmp_path, axes, num_trials=1).next()[1]

    values = dict(word.split("=") for word in drawn)
    assert values["a"] in "xy" and values["b"] in ("0", "4", "8") and 1 <= int(values["c"]) <= 64


@pytest.mark.shows("sweep.pruner")
def test_a_trial_behind_the_others_is_pruned_unless_that_is_turned_off(tmp_path):
    def pruned(name: str, pruner: Pruner) -> list[bool]:
        (tmp_path / name).mkdir()
        study = search(tmp_path / name, num_startup_trials=1, pruner=pruner)
        first, second, third = (study.next()[0] for _ in range(3))
        assert not study.should_prune(first, 10, 0.5)
        study.report_end(first, 0.9, pruned=False)
        return [study.should_prune(second, 10, 0.6), study.should_prune(third, 10, 0.4)]

    assert pruned("median", Pruner.median) == [False, True]
    assert pruned("none", Pruner.none) == [False, False]


def test_successive_halving_keeps_the_best_quarter(tmp_path):
    study = search(tmp_path, pruner=Pruner.asha)
    kept = []
    for score in (0.9, 0.1, 0.2, 0.3, 0.05):
        number = study.next()[0]
        kept.append(not any(study.should_prune(number, step, score) for step in range(1, 9)))
        study.report_end(number, score, pruned=not kept[-1])
    assert kept[0] and not kept[-1]


@pytest.mark.shows("sweep.direction")
def test_the_direction_decides_who_is_behind(tmp_path):
    study = search(tmp_path, num_startup_trials=1, direction=SweepDirection.minimize)
    first, second, third = (study.next()[0] for _ in range(3))
    study.should_prune(first, 10, 0.5)
    study.report_end(first, 0.9, pruned=False)
    assert study.should_prune(second, 10, 0.6) and not study.should_prune(third, 10, 0.4)


def test_another_process_goes_on_with_the_trials_that_are_left(tmp_path):
    before = search(tmp_path, num_trials=4)
    done, interrupted = before.next(), before.next()
    before.should_prune(interrupted[0], 10, 0.5)
    before.report_end(done[0], 1.0, pruned=False)

    after = search(tmp_path, num_trials=4)
    assert after.next() == interrupted
    assert not after.should_prune(interrupted[0], 10, 0.5), "a resumed run repeats steps"
    fresh = [after.next(), after.next()]
    assert [trial[0] for trial in fresh] == [2, 3] and after.next() is None
    assert len({done[1], interrupted[1], fresh[0][1], fresh[1][1]}) == 4, "random draws are not repeated"


@pytest.mark.parametrize("axes", [{"b": Axis(("x", "y"))}, {"a": Axis(("x", "z"))}])
def test_a_search_does_not_go_on_with_other_values(tmp_path, axes):
    before = search(tmp_path, {"a": Axis(("x", "y"))})
    before.report_end(before.next()[0], 0.5, pruned=False)

    with pytest.raises(ConfigError, match="holds a search of other settings or values"):
        search(tmp_path, axes).next()


@pytest.mark.parametrize("low", [0, -2, 0.0, -0.5])
def test_a_range_by_order_of_magnitude_begins_above_zero(tmp_path, low):
    with pytest.raises(ConfigError, match=r"a is searched by order of magnitude from .*: begin above 0"):
        search(tmp_path, {"a": Axis((str(low), "4"), low, type(low)(4), 1, log=True)})


def test_a_search_goes_on_in_a_directory_that_got_another_name(tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()
    before = search(tmp_path / "old", num_trials=2)
    number, words = before.next()
    before.report_end(number, 0.5, pruned=False)
    (tmp_path / "old").rename(tmp_path / "new")
    monkeypatch.chdir(tmp_path / "new")

    for directory in (tmp_path / "new", Path(), Path("../new/.")):
        after = search(directory, num_trials=2)
        assert [(one.number, one.value) for one in after._study.get_trials()] == [(0, 0.5)]
    number, others = after.next()
    assert number == 1 and others != words and after.next() is None


def test_a_search_does_not_go_on_in_the_other_direction(tmp_path):
    search(tmp_path)
    with pytest.raises(ConfigError, match=r"sweep\.direction=maximize, not minimize: give the same one"):
        search(tmp_path, direction=SweepDirection.minimize)


@pytest.mark.shows("sweep.sampler")
def test_a_sampler_of_ones_own_and_an_unknown_one(tmp_path):
    own = SweepConfig(sampler="tests.fakes.samplers:listed_order", num_trials=3)
    check_search(own)
    study = Search(tmp_path, {"a": Axis(("x", "y", "z"))}, own, seed=1)
    assert [study.next()[1] for _ in range(3)] == [("a=x",), ("a=y",), ("a=z",)]

    with pytest.raises(ConfigError, match="sweep.sampler=tpr is unknown. Did you mean tpe"):
        check_search(SweepConfig(sampler="tpr"))


def test_without_optuna_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"sweep.sampler=tpe needs Optuna; .*pip install 'streamrl\[search\]'"):
        check_search(SweepConfig(sampler="tpe"))
    check_search(SweepConfig(sampler="grid"))
