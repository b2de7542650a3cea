"""The words of a sweep: which settings vary over which values, and hydra's names for our settings."""

from __future__ import annotations

import pytest

from streamrl.config.hydra_words import own_words, read_command_line
from streamrl.config.load import load_config
from streamrl.errors import ConfigError
from streamrl.sweep.words import Axis, parse_sweep

QUICK = "experiment=quickstart"


def test_a_grid_has_every_combination_of_the_listed_values():
    words = parse_sweep([QUICK, "staleness.eta=0,4", "algorithm=stream_default,dr_grpo"])

    assert words.fixed == (QUICK,)
    assert words.grid() == [
        ("staleness.eta=0", "algorithm=stream_default"), ("staleness.eta=0", "algorithm=dr_grpo"),
        ("staleness.eta=4", "algorithm=stream_default"), ("staleness.eta=4", "algorithm=dr_grpo"),
    ]


def test_every_job_is_composed_from_its_own_words():
    words = parse_sweep(["experiment=quickstart,smollm2", "policy.model_path=a,b", "env.path=my_task.py"])
    configs = [load_config([*words.fixed, *swept]) for swept in words.grid()]

    assert [(config.policy.model_path, config.policy.tiny.enabled, config.env.options) for config in configs] == [
        (path, False, {}) for path in ("a", "b", "a", "b")
    ]


@pytest.mark.parametrize(
    ("word", "axis"),
    [
        ("policy.optimizer.lr=interval(1e-4,1e-2)", Axis((), 1e-4, 1e-2)),
        ("policy.optimizer.lr=tag(log,interval(1e-4,1e-2))", Axis((), 1e-4, 1e-2, log=True)),
        ("staleness.eta=interval(0,4)", Axis((), 0, 4)),
        ("staleness.eta=range(0,6,2)", Axis(("0", "2", "4"), 0, 4, 2)),
        ("policy.optimizer.lr=range(0,1,0.5)", Axis(("0.0", "0.5"), 0.0, 0.5, 0.5)),
        ("policy.optimizer.lr=range(-1,1.5)", Axis(("-1.0", "0.0", "1.0"), -1.0, 1.0, 1)),
        ("policy.optimizer.lr=range(1,-1,-0.5)", Axis(("1.0", "0.5", "0.0", "-0.5"), -0.5, 1.0, 0.5)),
        ("env.options.size=3,4", Axis(("3", "4"))),
        ("staleness.mode=choice(drop,wait)", Axis(("drop", "wait"))),
    ],
)
def test_the_ways_to_say_what_varies(word, axis):
    found = parse_sweep([QUICK, word]).axes[word.partition("=")[0]]

    assert found == axis
    assert type(found.low) is type(axis.low), "a count is drawn from whole numbers"


def test_a_glob_lists_the_files_of_its_group():
    assert "grpo" in parse_sweep(["algorithm=glob(*)"]).axes["algorithm"].values


@pytest.mark.parametrize("word", ["env.options.names=[a,b]", "run.name='a,b'", "env.options={a: 1, b: 2}"])
def test_a_comma_inside_of_a_value_is_no_sweep(word):
    assert parse_sweep([word]).axes == {}


def test_names_of_hydras_sweeper_and_launcher_are_understood():
    words = parse_sweep(own_words([
        QUICK, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=7", "hydra.sweeper.direction=minimize",
        "hydra.launcher.n_jobs=3", "hydra.sweep.dir=there",
    ]))

    sweep = load_config(words.fixed).sweep
    assert (sweep.sampler, sweep.num_trials, sweep.direction.name, sweep.num_parallel, sweep.dir) == (
        "tpe", 7, "minimize", 3, "there"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hydra.sweeper.max_failure_rate=0.5"], "`hydra.sweeper.max_failure_rate` is not used here"),
        (["policy.optimizer.lr=interval(1,"], r"`policy.optimizer.lr=interval\(1,` cannot be read"),
        (["policy.optimizer.lr=interval(3,1)"], "from its smaller end to its larger one, not 3.0 to 1.0"),
        (["policy.optimizer.lr=tag(log,interval(0,1))"], "from its smaller end above 0"),
        (["policy.optimizer.lr=interval(0,inf)"], "from its smaller end to its larger one, not 0.0 to inf"),
        (["policy.optimizer.lr=range(1,1)"], "this range holds no value"),
        (["staleness.max_lag=interval(1.2,1.8)"], "no whole number lies from 1.2 to 1.8"),
        (["policy.optimizer.learning_rte=1,2"], "did you mean"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_sweep(words)


def test_a_grid_lists_an_interval_only_where_it_is_told_how_finely():
    rates = parse_sweep(["policy.optimizer.lr=tag(log,interval(1e-4,1e-2))", "staleness.eta=interval(0,5)"])
    with pytest.raises(ConfigError, match=r"add sweep.num_grid_points=5 .* or hydra/sweeper=optuna"):
        rates.grid()
    listed = rates.grid(points=4)

    assert len(listed) == 16
    assert sorted({float(lr.partition("=")[2]) for lr, _ in listed}) == pytest.approx(
        [1e-4, 10 ** (-4 + 2 / 3), 10 ** (-4 + 4 / 3), 1e-2])
    assert [eta for _, eta in listed[:4]] == [f"staleness.eta={value}" for value in (0, 2, 3, 5)]
    assert len(parse_sweep(["staleness.eta=interval(0,2)"]).grid(points=9)) == 3, "each whole number once"


def test_a_shipped_space_gives_its_ranges_but_for_what_is_typed():
    words = parse_sweep(["experiment=quickstart", "algorithm=ppo", "search=ppo", "kl.coef=0.5"])

    assert words.fixed == ("experiment=quickstart", "algorithm=ppo", "kl.coef=0.5")
    assert words.axes["policy.optimizer.lr"] == Axis((), 1e-6, 1e-3, log=True)
    assert words.axes["loss.clip_low"] == Axis((), 0.1, 0.5)
    estimators = words.axes["advantage.estimator"].values
    assert len(words.axes) == 9 and estimators == ("gae", "vtrace", "retrace_v", "td_lambda", "n_step")
    lowest, highest = (
        [f"{key}={axis.ends[end]}" for key, axis in words.axes.items()] for end in (0, -1)
    )
    for swept in (lowest, highest, *([*highest, f"advantage.estimator={name}"] for name in estimators)):
        config = load_config([*words.fixed, *swept])
        assert config.kl.coef == 0.5 and config.critic.clip in (0.1, 1.0)


def test_a_space_of_ones_own_is_checked_and_a_single_run_has_none(tmp_path):
    (tmp_path / "search").mkdir()
    own = f"hydra.searchpath=['{tmp_path}']"
    (tmp_path / "search" / "mine.yaml").write_text("hydra: {sweeper: {params: {staleness.eta: '0,4'}}}")
    (tmp_path / "search" / "odd.yaml").write_text("staleness: {eta: 4}")
    assert parse_sweep([QUICK, own, "search=mine"]).axes == {"staleness.eta": Axis(("0", "4"))}
    for words, message in (([own, "search=odd"], "search=odd holds staleness: write what varies"),
                           (["search=pppo"], "search=pppo is unknown. Did you mean ppo")):
        with pytest.raises(ConfigError, match=message):
            parse_sweep(words)
    with pytest.raises(ConfigError, match="`search=ppo` is of a sweep: use it with streamrl launch -m"):
        read_command_line(["search=ppo"])
