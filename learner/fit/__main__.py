"""streamrl fit MODEL [--gpus N] [--memory 80GB] [--context TOKENS] [key=value ...]: which settings fit which GPUs."""

from __future__ import annotations

import argparse
import re
import sys
from functools import partial
from typing import TYPE_CHECKING

from learner.fit.models import PUBLISHED, config_of_model, model_path, values_of_model
from streamrl.commands import parsed, status_of
from streamrl.config.overrides import check_names

if TYPE_CHECKING:  # torch is imported once the words are known to be good
    from learner.fit.proposal import Machine, Planner, Proposal

GIB = 1 << 30
_UNITS = {"": 10**9, "GB": 10**9, "GIB": GIB}


def main() -> int:
    """Print what fits; 1 if nothing does."""
    parser = argparse.ArgumentParser(
        prog="streamrl fit", description="Which settings fit a model on GPUs that need not be here.",
        epilog="A step of the learner is made on tensors without memory, and its peak counted by kind; no GPU is used. "
        "Settings that you give are kept. The exit status is 1 if nothing fits.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder with a config.json, that file, a name of the model "
                        f"hub, or without one {', '.join(PUBLISHED)}")
    parser.add_argument("--gpus", type=_count, default=8, metavar="N", help="of learner and actors together (8)")
    parser.add_argument("--memory", type=memory_bytes, default="80GB", metavar="SIZE", help="of each (80GB)")
    parser.add_argument("--context", type=_count, default=8192, metavar="TOKENS",
                        help="of the longest prompt and answer (8192)")
    given = parsed(parser, words="settings that are kept")
    check_names(given.words)
    values_of_model(given.model)
    from transformers.utils import logging as transformers_logging

    from learner.fit.proposal import Machine, Planner

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    machine = Machine(given.gpus, given.memory, given.context)
    notify = partial(print, file=sys.stderr, flush=True)
    planner = Planner(model_path(given.model), config_of_model(given.model), given.words, notify)
    found = planner.propose(machine)
    print("\n".join(lines(given.model, planner, machine, found)))
    return 0 if found.fits else 1


def lines(name: str, planner: Planner, machine: Machine, found: Proposal) -> list[str]:
    """The printed lines."""
    from learner.fit.estimate import WORKING

    rank, engine = found.rank, found.engine
    shown = [
        f"{name}: {planner.parameters / 1e9:.2f} billion parameters; {machine.gpus} x {machine.memory / GIB:.1f} GiB, "
        f"sequences of {machine.context:,} tokens",
        "",
        f"{'fits' if found.fits else 'DOES NOT FIT; this comes nearest'}: training {found.method}",
        "",
        f"each of {found.ranks} learner ranks, at its peak in the {rank.phase}:",
        *(f"  {nbytes / GIB:8.1f} GiB  {kind}" for kind, nbytes in sorted(rank.kinds.items(), key=lambda i: -i[1])),
        f"  {rank.total / GIB:8.1f} GiB  together, of {machine.memory / GIB:.1f}",
        "",
        f"each GPU of {found.actors} actors with {engine.tensor_parallel} (what the learner leaves on one GPU):",
        f"  {engine.weights / GIB:8.1f} GiB  weights",
        f"  {WORKING / GIB:8.1f} GiB  passes and CUDA graphs (assumed)",
        *[f"  {engine.graphs / GIB:8.1f} GiB  graphs of decode steps"] * bool(engine.graphs),
        f"  {engine.room / GIB:8.1f} GiB  keys and values: {engine.sequences(machine.context)} sequences of "
        f"{machine.context:,} tokens, {engine.per_token / 1024:.0f} KiB a token",
        "",
        "the host:",
        f"  {3 * found.weights / GIB:8.1f} GiB  shared memory for versions",
        *[f"  {found.ranks * rank.offloaded / GIB:8.1f} GiB  moments of the ranks"] * bool(rank.offloaded),
        f"  {found.ranks * rank.checkpoint / GIB:8.1f} GiB  copies of the ranks for a checkpoint",
        f"  {found.version / 1e9:8.2f} GB   move with every version",
        "",
        f"streamrl launch {' '.join(found.words)}",
    ]
    if not found.fits:
        shown[-1] = "Take more or larger GPUs, a shorter --context, or a smaller model."
    return shown


def memory_bytes(text: str) -> float:
    """Bytes of `80GB`, `80GiB` or `80`, which are GB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GIB|)", text.upper())
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 80GB or 80GiB")
    return float(found[1]) * _UNITS[found[2]]


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(status_of(main))
