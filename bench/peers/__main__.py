"""Samples and trained tokens a second beside TRL's GRPOTrainer: same model, prompts, reward, batch, rate and cores.

    ours        streamrl launch, asynchronous (staleness.eta=2): one learner and two actors, one thread each
    ours_sync   the same with staleness.eta=0 and no lookahead: every token has lag 0
    trl         TRL's GRPOTrainer with Hugging Face's own generation, on 2 threads, the tiny model on 1 too;
                the faster one is compared

Runs alternate, the first steps of each are left out, medians of the repeats are compared. Everything
is float32, without KL, at temperature 1. TRL runs in an environment of its own: `make .venv-oracles/.installed`.

Run: make peers, or python -m bench.peers --peer .venv-oracles/bin/python [--case quickstart] [--repeats 5] [--quick]
     python -m bench.peers --case sums --beside run.num_threads=2      ours beside ours with other settings
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.peers import ours
from bench.peers.cases import CASES, Case, write_inputs
from bench.record import exit_status, record, shared_arguments

HERE = Path(__file__).parent
TRL_VERSION = "1.16"
GOALS = {"quickstart": ("samples", 2.0), "sums": ("tokens", 5.0), "long_prompt": ("tokens", 8.0),
         "length_tail": ("tokens", 1.8)}


def main() -> int:
    parser = shared_arguments(__doc__ or "")
    parser.add_argument("--peer", default=".venv-oracles/bin/python", help="Python of the environment that has TRL")
    parser.add_argument("--case", action="append", choices=list(CASES), help="one of the workloads; all if not given")
    parser.add_argument("--beside", action="append", default=[], metavar="WORDS",
                        help="in place of the others, ours with these settings besides")
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    lines = []
    for name in arguments.case or list(CASES):
        case = CASES[name]
        if arguments.quick:
            case = replace(case, num_steps=case.num_dropped_steps + 2)
        repeats = 1 if arguments.quick else arguments.repeats
        lines += measure(case, arguments.peer, repeats, arguments.seed, arguments.beside)
    return exit_status(lines, arguments.check)


def measure(case: Case, peer: str, repeats: int, seed: int, beside: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Runs all systems on one workload, in turns; or ours alone, without and with each of these settings."""
    rates: dict[str, list[dict[str, float]]] = {}
    failures: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        model = tiny_model(root) if case.model == "tiny" else str(Path(case.model).resolve())
        for repeat in range(repeats):
            folder = root / f"inputs-{repeat}"
            write_inputs(case, folder, seed + repeat)
            systems = {
                "ours": lambda f=folder, r=repeat: ours.run(
                    case, f, model, seed + r, eta=2, run_dir=root / f"ours-{r}"),
                "ours_sync": lambda f=folder, r=repeat: ours.run(
                    case, f, model, seed + r, eta=0, run_dir=root / f"sync-{r}"),
            } | {
                f"trl_{n}_thread{'s' * (n > 1)}": lambda f=folder, r=repeat, n=n: trl(case, f, model, seed + r, peer, n)
                for n in case.peer_threads
            }
            if beside:
                systems = {"ours": systems["ours"]} | {
                    f"ours with {words}": lambda f=folder, r=repeat, w=words, n=number: ours.run(
                        case, f, model, seed + r, eta=2, run_dir=root / f"beside-{n}-{r}", words=tuple(w.split()))
                    for number, words in enumerate(beside)
                }
            for name, run in systems.items():
                try:
                    rates.setdefault(name, []).append(rate(run(), case.num_dropped_steps))
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    failures[name] = failures.get(name, 0) + 1
                    print(f"{case.name} {name} failed: {error}", file=sys.stderr)
                    continue
                print(f"{case.name} {repeat} {name} {rates[name][-1]}", file=sys.stderr, flush=True)
    return report(case, rates, failures, seed)


def report(
    case: Case, rates: dict[str, list[dict[str, float]]], failures: dict[str, int], seed: int
) -> list[dict[str, Any]]:
    """One line for each system and unit; ours against the better of TRL's, or without one against `ours_sync`."""
    which, goal = GOALS[case.name]
    lines = []
    for unit in ("samples", "tokens"):
        medians = {name: median(one[unit] for one in found) for name, found in rates.items()}
        beside = any(name.startswith("ours with") for name in rates)
        prefix = "ours with" if beside else "trl" if case.peer_threads else "ours_sync"
        peers = {name: value for name, value in medians.items() if name.startswith(prefix)}
        best = max(peers, key=lambda name: peers[name], default=None)
        for name, value in medians.items():
            is_ours = name in ("ours", "ours_sync")
            lines.append(record(
                f"peers.{case.name}.{name}.{unit}_per_s", value, f"{unit}/s", "higher",
                [one[unit] for one in rates[name]], params(case) | {"num_failed": failures.get(name, 0)},
                baseline={
                    "name": best, "value": peers[best], "unit": f"{unit}/s", "source": "this run",
                    "version": TRL_VERSION if best.startswith("trl") else "same", "measured_here": True,
                } if is_ours and best and name != best else None,
                goal={"id": f"{goal}x", "op": ">=", "value": goal * peers[best]}
                if name == "ours" and unit == which and best and not beside else None,
                seed=seed,
            ))
    return lines


def params(case: Case) -> dict[str, Any]:
    """Settings of both systems."""
    names = ("num_groups", "group_size", "max_new_tokens", "learning_rate", "num_steps", "num_dropped_steps",
             "micro_batch")
    return {name: getattr(case, name) for name in names} | {"model": Path(case.model).name, "dtype": "float32"}


def rate(run: dict[str, Any], num_dropped: int) -> dict[str, float]:
    """Per second, over the steps that count. Tokens are those of the answers."""
    seconds = sum(run["seconds"][num_dropped:])
    counted = len(run["seconds"]) - num_dropped
    return {"samples": counted * run["samples"] / seconds, "tokens": sum(run["tokens"][num_dropped:]) / seconds}


def trl(case: Case, folder: Path, model: str, seed: int, peer: str, num_threads: int) -> dict[str, Any]:
    """One run in the peer's environment. Raises RuntimeError with the end of what it printed."""
    settings = folder / f"trl-{num_threads}.json"
    settings.write_text(json.dumps(params(case) | {
        "folder": str(folder), "model": model, "seed": seed, "num_threads": num_threads,
    }))
    environment = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [peer, str(HERE / "trl_run.py"), str(settings)], capture_output=True, text=True, timeout=1800, env=environment,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def tiny_model(root: Path) -> str:
    """The quickstart's model after its supervised start, as a checkpoint directory."""
    from envs.registry import load_task
    from learner.model.paths import model_directory
    from learner.ranks.mesh import Ranks
    from streamrl.config.load import load_config

    config = load_config(["experiment=quickstart", f"policy.tiny.cache_dir={root / 'models'}"])
    return str(model_directory(
        config.policy, load_task(config.env.name), Ranks(), seed=config.run.seed,
        max_positions=config.learner.max_tokens_per_device,
    ))


if __name__ == "__main__":
    sys.exit(main())
