"""The memory estimate of `streamrl fit`, against measured memory; and the table of docs/fit.md.

    python -m bench.fit                 every model x variant x ranks: resident memory of a real rank, and the estimate
    python -m bench.fit --table         what fits: Qwen3 on 1 to 16 GPUs of 24, 80 and 141 GB, as Markdown
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.record import record, shared_arguments
from learner.fit.estimate import GIB, job_of, rank_memory
from learner.fit.models import PUBLISHED, config_of_model
from learner.fit.proposal import METHODS, Machine, Planner
from tests.unit.learner.fit_measured import LENGTH, MODELS, VARIANTS, config_for, measured, model_config

CONTEXT = 8192
SHORT = dict(zip(METHODS, ("full", "full, 8-bit moments", "full, moments offloaded", "LoRA", "QLoRA"), strict=True))


def measure(names: list[str], worlds: tuple[int, ...]) -> float:
    """The largest relative error."""
    worst = 0.0
    with tempfile.TemporaryDirectory() as made:
        found = [  # a process for each model: what one has made is no part of the next one's memory
            one for name in names for one in measured(Path(made), [name], list(VARIANTS), list(worlds), timeout_s=3600)
        ]
    for one in found:
        config = config_for(one["variant"], one["ranks"])
        estimate = rank_memory(job_of(config, longest=LENGTH, on_gpu=False), model_config(one["model"]))
        error = estimate.total / one["bytes"] - 1
        worst = max(worst, abs(error))
        record(
            f"fit.error.{one['model']}.{one['variant']}.{one['ranks']}", error, "share", "lower", [error],
            {**one, "estimate": estimate.total, "phase": estimate.phase},
        )
    return worst


def table() -> None:
    """Print a row a model and number of GPUs."""
    print("| model | GPUs | 24 GB | 80 GB | 141 GB |\n|---|---:|---|---|---|")
    for name in PUBLISHED:
        planner = Planner(name, config_of_model(name), ())
        for gpus in (1, 4, 8, 16):
            cells = [cell(planner, Machine(gpus, memory * 1e9, CONTEXT)) for memory in (24, 80, 141)]
            print(f"| {name.partition('/')[2]} | {gpus} | {' | '.join(cells)} |", flush=True)


def cell(planner: Planner, machine: Machine) -> str:
    found = planner.propose(machine)
    if not found.fits:
        return "no"
    actors = f"{found.actors} x {found.engine.tensor_parallel}" if found.engine.tensor_parallel > 1 else found.actors
    recomputes = ", recomputed" if "policy.gradient_checkpointing=true" in found.words else ""
    return f"{SHORT[found.method]}{recomputes}: {found.ranks} + {actors}, {found.rank.total / GIB:.0f} GiB"


def main() -> int:
    parser = shared_arguments(__doc__.partition("\n")[0])
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        table()
        return 0
    worst = measure(list(MODELS)[:1] if given.quick else list(MODELS), (1,) if given.quick else (1, 2, 4))
    print(f"largest error {worst:.1%}")
    return int(given.check and worst > 0.1)


if __name__ == "__main__":
    raise SystemExit(main())
