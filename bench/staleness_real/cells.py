"""The cells of the experiment: every arm at every rate and seed, at lag 0 and at the forced lag, and in which order.

One run is a cell. The order makes every interruption useful: the first seed covers all cells; from then on the rate
that is best so far of every arm and lag comes first, for one seed after the other, and the other rates last.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

ETA = 24
NUM_STEPS = 100
EVERY = 10
"""Steps between evaluations."""
LAGS = (ETA, 0)
RATES = (3e-4, 1e-3, 1e-4)
"""The quickstart's own first, then about three times as large and as small."""
SEEDS = (1, 2, 3, 4, 5)

_PLAIN = ("advantage.baseline=leave_one_out", "loss.dual_clip=null", "loss.veto_low=null", "loss.veto_high=null")
_CLIP = (*_PLAIN, "loss.surrogate=ppo_clip")

ARMS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "uncorrected": ("algorithm=uncorrected",),
    "tis": ("algorithm=uncorrected", "loss.allow_uncorrected=false", "loss.surrogate=tis", "loss.cap=2.0"),
    "clip": ("algorithm=dr_grpo", *_CLIP, "loss.clip_high=0.28", "loss.avg_level=token-mean"),
    "clip_veto": ("algorithm=dr_grpo", *_CLIP, "loss.clip_high=0.28", "loss.avg_level=token-mean",
                  "loss.veto_low=1e-4", "loss.veto_high=100.0"),
    "clip_dual": ("algorithm=dr_grpo", *_CLIP, "loss.clip_high=0.28", "loss.avg_level=token-mean",
                  "loss.dual_clip=3.0"),
    "decoupled": ("algorithm=areal", "advantage.baseline=leave_one_out", "advantage.scale=none",
                  "loss.anchor=loglinear", "learner.num_minibatches=1"),
    "vtrace_critic": ("algorithm=impala",),
    "stream_default": ("algorithm=stream_default",),
})
"""Overrides of each arm. All but the last two share the leave-one-out baseline and the token mean; nothing is tuned
but the rate."""

_CONTROL = ("algorithm=vtrace", "loss.opsm_delta=null")
# As many answers as 16 groups of 8.
_SINGLE = ("rollout.num_responses_per_prompt=1", "rollout.num_prompts_per_step=128")
_UNGUARDED = ("loss.dual_clip=null", "loss.veto_low=null", "loss.veto_high=null")
CRITIC_ARMS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "impala": ARMS["vtrace_critic"],
    "vtrace": ("algorithm=vtrace",),
    "retrace": ("algorithm=retrace",),
    "vtrace_unmasked": _CONTROL,
    "vtrace_random_mask": (*_CONTROL, "loss.surrogate=bench.staleness_real.controls:random_mask"),
    "vtrace_positive_only": (*_CONTROL, "loss.surrogate=bench.staleness_real.controls:positive_only"),
    "sao": ("algorithm=sao", *_SINGLE),
    "oapl": ("algorithm=oapl",),
    "flash_reinforce": ("algorithm=flash_reinforce", *_SINGLE),
    "trajectory_balance": ("algorithm=trajectory_balance",),
    "single_rollout": ("algorithm=single_rollout", *_SINGLE),
    "gae": ("algorithm=retrace", "advantage.estimator=gae", "advantage.lam=0.95"),
    "vtrace_critic_free": ("algorithm=stream_default", *_UNGUARDED, "loss.surrogate=reinforce",
                           "advantage.estimator=vtrace_critic_free", "advantage.rho_bar_pg=1.0", "loss.opsm_delta=0.05",
                           "loss.opsm_when=always"),
})
"""Arms that only run if they are asked for by name."""

AGE_ARMS = ("uncorrected", "tis", "stream_default", "vtrace", "retrace", "sao", "oapl", "flash_reinforce",
            "trajectory_balance")
AGE_LAGS = (0, 16, 64, 256)
AGE_RATES = RATES[::2]
"""The experiment on the age of data (`--ages`): rules with and without a ratio, at lags of every size."""

SUMS = "bench/staleness_real/sums.yaml"
"""Settings of the experiment on the precision of rollouts (`--precision`)."""

MEANING: Mapping[str, str] = MappingProxyType({
    "uncorrected": "REINFORCE, no importance ratio (negative control)",
    "tis": "token ratio, truncated at 2",
    "clip": "PPO clip on the behavior policy, 0.2 and 0.28",
    "clip_veto": "the same, trajectories with a ratio outside 1e-4 to 100 dropped",
    "clip_dual": "the same without veto, negative advantages capped at 3 (dual clip)",
    "decoupled": "decoupled PPO, the proximal policy log-linear between behavior and current policy",
    "vtrace_critic": "recipe `impala`: V-trace with a critic, policy gradient with truncated ratios",
    "stream_default": "recipe: PPO clip on the behavior policy, dual clip, veto, OPSM, sqrt-ESS step size",
    "impala": "the recipe, with a critic whose targets are normalized",
    "vtrace": "recipe: V-trace, OPSM at 0.05, eight critic steps at 3e-3, sqrt-ESS step size",
    "retrace": "recipe: Retrace inside clip and dual clip, critic and step size as in `vtrace`",
    "vtrace_unmasked": "`vtrace` without OPSM",
    "vtrace_random_mask": "`vtrace`, as many tokens dropped at random as OPSM would",
    "vtrace_positive_only": "`vtrace` without OPSM, positive advantages only",
    "sao": "recipe: one answer a prompt, V-trace with a critic, whitened, inside clip and dual clip",
    "single_rollout": "recipe: one answer a prompt, the batch's other answers as baseline",
    "oapl": "recipe: a squared regression of the advantage on the log-ratio, no ratio",
    "flash_reinforce": "recipe: one answer a prompt, a detached ratio, no answer that the policy has left",
    "trajectory_balance": "recipe: trajectory balance, no ratio, the reference bounds the step",
    "gae": "`retrace` with GAE at 0.95 as its estimator",
    "vtrace_critic_free": "`vtrace` with the suffix product and the group's other answers in place of the critic",
})


@dataclass(frozen=True, slots=True)
class Cell:
    """A run at the forced lag `lag`, in optimizer steps, with `weights` (full or int8) in the engine."""

    arm: str
    lag: int
    rate: float
    seed: int
    num_steps: int = NUM_STEPS
    experiment: str = "quickstart"
    weights: str = "full"

    @property
    def name(self) -> str:
        """Name for directories."""
        precision = "" if self.weights == "full" else f"-{self.weights}"
        return f"{Path(self.experiment).stem}-{self.arm}-lag{self.lag}-{self.rate:g}-{self.seed}{precision}"

    @property
    def every(self) -> int:
        """Steps between evaluations, of which one of `SUMS` costs as much as a dozen steps."""
        return self.num_steps // 2 if self.experiment == SUMS else max(EVERY, self.num_steps // 32)

    def overrides(self) -> list[str]:
        """The run's settings, apart from its directory."""
        is_file = self.experiment.endswith(".yaml")
        # Int8 is as far from the learner as it is: that is measured here, and no reason to stop the actor.
        more = [] if self.weights == "full" else ["publish.probe_tolerance=1.0"]
        if self.experiment not in (SUMS, "smollm2"):  # a tiny model: the same scores for two thirds of the work
            more.append("launch.in_process=true")
        return [
            self.experiment if is_file else f"experiment={self.experiment}", *{**ARMS, **CRITIC_ARMS}[self.arm],
            f"run.seed={self.seed}",
            f"staleness.force={self.lag}", f"policy.optimizer.lr={self.rate}",
            f"trainer.num_steps={self.num_steps}",
            f"eval.every_steps={self.every}", f"actors.weights={self.weights}", *more, "samples.num_per_step=0",
            "samples.num_per_eval=0", "launch.num_actors=1", "actors.num_concurrent=128", "checkpoint.every_steps=0",
            "checkpoint.export_hf=false", "filter.zero_std=false",
        ]

    def lag_is_right(self, result: Mapping[str, Any]) -> bool:
        """Whether every token of a run had the forced lag once the lead was full."""
        return result["settled_lag"] == self.lag


def all_cells(*, quick: bool = False, arms: Sequence[str] | None = None, num_steps: int = NUM_STEPS,
              experiment: str = "quickstart", lags: Sequence[int] = LAGS,
              rates: Sequence[float] = RATES) -> list[Cell]:
    """Every cell; `quick` keeps the shape of the experiment and nothing of its meaning.

    Args:
        arms: of both tables, these only.
        experiment: of these arms: a name, or a settings file.
        lags, rates: of these arms.
    """
    if arms is not None:
        return [Cell(*values, num_steps, experiment) for values in product(arms, lags, rates, SEEDS)]
    if quick:
        return [Cell(arm, lag, RATES[0], SEEDS[0], 6) for arm in ("uncorrected", "stream_default") for lag in (2, 0)]
    return [
        cell for cell in (Cell(*values) for values in product(ARMS, LAGS, RATES, SEEDS))
        if cell.lag or fresh_arm(cell.arm) == cell.arm or (cell.rate, cell.seed) == (RATES[0], SEEDS[0])
    ]


def age_cells() -> list[Cell]:
    """The cells of `--ages`: at lag k the first k steps train on the start model's data, so a run has at least 4 k."""
    return [Cell(arm, lag, rate, seed, max(NUM_STEPS, 4 * lag))
            for arm, lag, rate, seed in product(AGE_ARMS, AGE_LAGS, AGE_RATES, SEEDS)]


def fresh_arm(arm: str) -> str:
    """The arm whose runs at lag 0 are also this one's.

    There every ratio is 1: no cap, clip or veto acts, and all arms without a critic do the same update. They are run
    once; that the others give the same scores is checked at one rate and seed.
    """
    return arm if arm == "vtrace_critic" or arm in CRITIC_ARMS else "stream_default"


def ordered(cells: Iterable[Cell], results: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """The cells in the order in which they are to be run, given what is known now."""
    rank = _rank_of_rates(results)
    arms, first = [*ARMS, *CRITIC_ARMS], SEEDS[0]

    def key(cell: Cell) -> tuple[float, ...]:
        place = (LAGS.index(cell.lag) if cell.lag in LAGS else cell.lag, arms.index(cell.arm))
        if cell.seed == first:
            return (0, RATES.index(cell.rate) if cell.rate in RATES else 0, 0, *place)
        return (1, rank.get((cell.arm, cell.lag, cell.rate), len(RATES)), cell.seed, *place)

    return sorted(cells, key=key)


def _rank_of_rates(results: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, float], int]:
    """(arm, lag, rate) -> 0 for the rate with the largest mean area so far, 1 for the next."""
    areas: dict[tuple[str, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in results:
        areas[one["arm"], one["lag"]][one["rate"]].append(one["area"])
    return {
        (arm, lag, rate): place
        for (arm, lag), of_rates in areas.items()
        for place, rate in enumerate(sorted(of_rates, key=lambda rate: -statistics.fmean(of_rates[rate])))
    }
