"""Precision of rollouts by correction by lag: does a ratio to the recorded log-probs make up for int8 weights?

SmolLM2 on sums. The engine records the log-probs of the model that it computes with, and the learner is in float32: at
lag 0 a ratio corrects the rounding alone, at a larger lag both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from bench.staleness.summary import by
from bench.staleness_real.cells import MEANING, SEEDS, SUMS, Cell

ARMS = ("uncorrected", "tis", "vtrace")
NUM_STEPS = {0: 24, 16: 64}
"""Optimizer steps by lag: data of lag 16 are all there are from step 16 on, a quarter of the run."""
WEIGHTS = ("full", "int8")
RATE, NUM_SEEDS = 1e-5, 3
"""Half of the experiment's rate for a quarter of its answers: at the whole rate fresh data lose 0.18 in 24 steps."""


def precision_cells() -> list[Cell]:
    """The cells of `--precision`.

    On fresh float32 data every ratio is 1 to five digits and the truncated one does the update of no ratio: one run.
    """
    return [
        Cell(arm, lag, RATE, seed, NUM_STEPS[lag], SUMS, weights)
        for seed, lag, weights, arm in product(SEEDS[:NUM_SEEDS], NUM_STEPS, WEIGHTS, ARMS)
        if (arm, lag, weights) != ("tis", 0, "full")
    ]


def precision_table(results: Sequence[Mapping[str, Any]]) -> str:
    """The valid cells as Markdown: mean over seeds, standard deviation, and in brackets how many."""
    valid = [one for one in results if one["valid"]]
    header = ["correction", "lag", "weights", "start", "end", "area", "mismatch, first step", "last steps", "m2", "ESS",
              "tok/s"]
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for arm, lag, weights in product(ARMS, NUM_STEPS, WEIGHTS):
        of = [one for one in valid if (one["arm"], one["lag"], one["weights"]) == (arm, lag, weights)]
        if of:
            shown = [f"{by(of, 'arm', value=key)[arm]} ({len(of)})" for key in ("start", "end", "area")]
            figures = [_mean(one["rollout"].get(key) for one in of)
                       for key in ("mismatch_first", "mismatch_last")]
            figures += [_mean(one["means"].get(key) for one in of) for key in ("drift/m2", "ess/token")]
            figures.append(_mean(one["rollout"].get("tokens_per_busy_s") for one in of))
            lines.append("| " + " | ".join([MEANING[arm], str(lag), weights, *shown, *figures]) + " |")
    return "\n".join(lines) + "\n"


def _mean(values: Any) -> str:
    found = [value for value in values if value is not None]
    return f"{sum(found) / len(found):.3g}" if found else ""
