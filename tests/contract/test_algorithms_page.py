"""docs/algorithms.md and docs/formulas.md: settings work as written, names are complete, numbers are the functions'."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import streamrl.algorithms as algorithms
from learner.hub_client.settings import answer_limit
from learner.objective.options import (
    AVG_LEVELS,
    BASELINES,
    CONTROLLERS,
    MODES,
    SCALES,
    check_regularizers,
    check_settings,
)
from learner.objective.rewards import METHODS, RewardRules
from streamrl.algorithms import CORRECTION_PRESETS, ESTIMATORS, SURROGATES
from streamrl.config.catalog import open_mappings, setting_names
from streamrl.config.load import from_plain, load_config, to_plain
from streamrl.config.rules import largest_max_lag
from streamrl.config.schema import AdaptiveRule, Config, ConstraintMethod, EntropyAdapt, StalenessMode

ROOT = Path(__file__).parents[2]
PAGE = "".join((ROOT / "docs" / name).read_text() for name in ("algorithms.md", "formulas.md"))
RECIPES = sorted(path.stem for path in (ROOT / "configs" / "algorithm").glob("*.yaml"))
SPANS = sorted(set(re.findall(r"`([^`\n]+)`", PAGE)))
SETTINGS = [span for span in SPANS if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)*=\S+( [a-z_]+(\.[a-z_0-9]+)*=\S+)*", span)
            and span not in ("algorithm=NAME", "trace=geometric")]


@cache
def defaults() -> dict[str, Any]:
    """The settings without an algorithm."""
    return to_plain(load_config(["policy.model_path=somewhere"]))  # composing reads no model


@cache
def recipe(name: str) -> Config:
    return load_config(["policy.model_path=somewhere", f"algorithm={name}"])


def refused_or_not(words: list[str]) -> Config:
    """The config of these words, after every check that a learner makes before it loads a model."""
    if words[0].startswith("algorithm="):
        return recipe(words[0].removeprefix("algorithm="))
    config = from_plain(defaults(), words)
    lag = largest_max_lag(config)
    check_settings(config.advantage, config.loss, max_lag=lag)
    check_regularizers(config.kl, config.reference, config.entropy, config.constraint, config.loss, max_lag=lag)
    RewardRules(config.objectives, config.overlong, max_tokens=answer_limit(config))
    return config


def test_every_setting_on_the_page_works_as_it_is_written():
    assert len(SETTINGS) > 90
    refused = {}
    for span in SETTINGS:
        try:
            refused_or_not(span.split())
        except Exception as error:
            refused[span] = str(error)
    assert refused == {}


def test_every_dotted_name_of_a_section_is_a_setting():
    known, free = setting_names(), open_mappings()
    sections = "|".join(sorted({name.partition(".")[0] for name in known}))
    prose = re.sub(r"\S+\.(?:md|py|json)", "", PAGE)
    named = set(re.findall(rf"(?<![\w./])((?:{sections})\.[a-z_]+(?:\.[a-z_]+)*)", prose))
    assert len(named) > 40
    assert {name for name in named if name not in known and not name.startswith(free)} == set()


def test_the_combinations_that_it_calls_refused_are_refused():
    lines = re.findall(r"^    (\S+=\S+(?: \S+=\S+)*) +refused: .+$", PAGE, re.M)
    assert len(lines) == 3
    for line in lines:
        with pytest.raises(Exception, match="belongs to|more than once|nothing applies"):
            refused_or_not(line.split())


NAMES = {
    "estimators": ESTIMATORS, "surrogates": SURROGATES, "corrections": CORRECTION_PRESETS,
    "anchors": algorithms.ANCHORS, "presets": RECIPES, "KL modes": set(MODES) - {"off"},
    "KL controllers": [*CONTROLLERS, "schedule"], "objectives": set(METHODS) - {"reward"},
}


def test_every_name_has_its_place_on_the_page():
    assert [(kind, name) for kind, names in NAMES.items() for name in names if name not in SPANS] == []


def test_every_choice_is_used_in_a_setting_on_the_page():
    words = {word for span in SETTINGS for word in span.split()}
    choices = {
        "advantage.estimator": ESTIMATORS, "advantage.baseline": BASELINES, "advantage.scale": SCALES,
        "loss.avg_level": AVG_LEVELS, "loss.anchor": algorithms.ANCHORS, "kl.controller": ["constant", *CONTROLLERS],
        "objectives.combine": set(METHODS) - {"reward"}, "staleness.mode": [mode.value for mode in StalenessMode],
        "staleness.adaptive.rule": [rule.value for rule in AdaptiveRule],
        "constraint.method": [method.value for method in ConstraintMethod],
        "entropy.adapt": [way.value for way in EntropyAdapt if way is not EntropyAdapt.none],
        "loss.surrogate": set(SURROGATES) - {"mis"},  # its setting is shown under its other name
    }
    said = {f"advantage.estimator={name}" for name in ("group", "gae")} | words
    assert [f"{key}={name}" for key, names in choices.items() for name in names if f"{key}={name}" not in said] == []


@pytest.mark.parametrize("name", RECIPES)
def test_the_table_of_presets_says_what_the_files_say(name):
    row = re.search(rf"^\| `{name}` \| `(\w+)`, ([^|]+?) \| `(\w+)` \| (\d+) \|", PAGE, re.M)
    assert row is not None
    config = recipe(name)
    baselines = {"leave one out": "leave_one_out", "mean": "group_mean", "mean and std": "group_mean",
                 "critic": "none", "none": "none", "batch": "batch",
                 "mean and batch std": "group_mean", "optimal baseline": "opob"}
    scales = {"mean and std": "std", "mean and batch std": "batch_std"}
    assert (row[1], row[3], int(row[4])) == (
        config.advantage.estimator, config.loss.surrogate, config.staleness.eta
    )
    assert (baselines[row[2]], scales.get(row[2], "none")) == (config.advantage.baseline, config.advantage.scale)


# --- the worked example ---------------------------------------------------------------------------------------------


def printed(label: str) -> torch.Tensor:
    """The three numbers of a line of the worked example, [1, 3]."""
    line = re.search(rf"^    {re.escape(label)} +(-?[\d.]+) +(-?[\d.]+) +(-?[\d.]+)$", PAGE, re.M)
    assert line is not None, f"no line {label!r} in the worked example"
    return torch.tensor([[float(number) for number in line.groups()]], dtype=torch.float64)


MASK, END = torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, dtype=torch.float64)


def recorded() -> tuple[torch.Tensor, ...]:
    """behavior log-probs, policy log-probs, rewards, values, mask: as the functions take them."""
    return printed("mu").log(), printed("pi").log(), printed("reward r"), printed("value V"), MASK


def same(result: torch.Tensor, label: str) -> None:
    torch.testing.assert_close(result, printed(label), rtol=0, atol=1e-9)


def test_the_worked_example_is_what_the_functions_give():
    behavior, policy, rewards, values, mask = recorded()
    ratio = algorithms.log_ratios(behavior, policy, mask).exp()
    returns = algorithms.vtrace(*recorded(), bootstrap_values=END)
    same(ratio, "rho = pi / mu")
    same(ratio.clamp(max=1.0), "rhohat = c = min(1, rho)")
    following = torch.cat([values[:, 1:], END[:, None]], dim=1)
    same(ratio.clamp(max=1.0) * (rewards + following - values), "delta")
    same(returns.targets - values, "e, from the right")
    same(returns.targets, "v = V + e")
    same(returns.advantages, "A")
    same(algorithms.gae(rewards, values, mask, bootstrap_values=END).advantages, "A of GAE, lam 1")
    same(algorithms.vtrace(*recorded(), bootstrap_values=END, rho_bar_pg=1.0).advantages, "A with rho_bar_pg = 1")
    loss = algorithms.ppo_clip(behavior, policy, returns.advantages, mask, eps_low=0.2, eps_high=0.28)
    same(loss.losses, "ppo_clip loss, 0.2 / 0.28")
    assert loss.clipped.tolist() == [[True, False, False]]
    score, half = rewards.sum(1), torch.full((1,), 0.5, dtype=torch.float64)
    same(algorithms.vtrace_critic_free(behavior, policy, score, half, mask), "critic-free A, b = 0.5")


def test_the_lines_about_lam_show_that_only_the_advantages_of_the_relatives_differ():
    _, _, _, values, _ = recorded()
    returns = algorithms.vtrace(*recorded(), bootstrap_values=END, lam=0.5)
    retraced = algorithms.retrace_v(*recorded(), bootstrap_values=END, lam=0.5)
    same(returns.targets, "lam = 0.5: v")
    same(returns.advantages, "lam = 0.5: A")
    same(retraced.advantages, "lam = 0.5: A of retrace_v")
    same(values + printed("rhohat = c = min(1, rho)") * retraced.advantages, "lam = 0.5: v")


def test_the_prose_about_the_example_holds():
    same_sum = -0.10 + 0.5 * 0.60
    assert printed("e, from the right")[0, 1] == pytest.approx(same_sum)
    assert printed("A of GAE, lam 1")[0, 0] == 0.5 and printed("A")[0, 0] == 0.3
