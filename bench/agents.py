"""Are sessions of agents lost or trained twice where agents die, answers get lost and an actor is killed?

The agent (`bench.agents_program`) uses the packages openai (chat completions, responses) and anthropic (messages)
against two actors of a small model, over weights installed in flight. A third of the agents die, one answer in twenty
is lost so that the SDK repeats the call, and one actor is killed. Counted from the run's log: trajectories trained,
those trained twice, groups that are missing, and the largest difference of a sampled token's log-prob from the
learner's at the token's version, with the versions trained again from the log.

Run: python -m bench.agents [--sessions 1000] [--engine vllm] [--quick]
"""

from __future__ import annotations

import argparse
import collections
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.record import exit_status, record, shared_arguments
from bench.recovery import last_step, wait

GROUPS, MEMBERS = 8, 5
WORDS = (
    "experiment=quickstart", "env.agent=bench.agents_program:run", "env.max_turns=4", "rollout.max_prompt_tokens=48",
    f"rollout.num_responses_per_prompt={MEMBERS}", "launch.num_actors=2",
    "actors.on_install=recompute",  # else the cache of a token may be of an older version than the token
    "hub.num_max_attempts=100", "filter.zero_std=false", "eval.num_samples=8", "checkpoint.export_hf=false",
    "publish.transports=[zmq]",
)
ENGINES = {
    "native": (),
    # Heads of 32, the least that vLLM has an attention for on a CPU.
    "vllm": ("actors.engine=vllm", "actors.device=cpu", "policy.tiny.num_heads=2"),
}


def main() -> int:
    parser = shared_arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--engine", choices=list(ENGINES), default="native")
    arguments = parser.parse_args()
    steps = 6 if arguments.quick else math.ceil(arguments.sessions / (GROUPS * MEMBERS))
    with tempfile.TemporaryDirectory() as folder:
        found = measured(steps, arguments.seed, Path(folder), arguments.engine)
    bench = "agents" if arguments.engine == "native" else f"agents.{arguments.engine}"
    lines = [
        record(f"{bench}.{name}", float(found[name]), unit, "lower", [float(found[name])], found, seed=arguments.seed,
               goal={"id": name, "op": "<=", "value": limit})
        for name, unit, limit in (("lost", "groups", 0), ("twice", "trajectories", 0), ("mismatch", "nats", 1e-3))
    ]
    return exit_status(lines, arguments.check)


def measured(steps: int, seed: int, folder: Path, engine: str = "native", groups: int = GROUPS) -> dict[str, Any]:
    run_dir, log = folder / "run", folder / "agents.log"
    words = [*WORDS, *ENGINES[engine], f"run.dir={run_dir}", f"run.seed={seed}", f"trainer.num_steps={steps}",
             f"rollout.num_prompts_per_step={groups}"]
    command = [sys.executable, "-m", "streamrl.cli"]
    with subprocess.Popen(
        [*command, "launch", *words], env={**os.environ, "AGENTS_LOG": str(log)}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as launcher:
        try:
            wait(launcher, lambda: last_step(run_dir) >= steps // 3)
            os.kill(_an_actor(launcher.pid), signal.SIGKILL)
            launcher.wait(900)
        finally:
            launcher.send_signal(signal.SIGINT)
    subprocess.run([*command, "stream", run_dir, "--outcome", "accepted", "--export", folder / "a.parquet"], check=True)
    noted = collections.Counter(log.read_text().split())
    return {"steps": steps, **counted(run_dir, folder / "a.parquet", noted, steps * groups)}


def counted(run_dir: Path, answers: Path, noted: collections.Counter[str], num_groups: int) -> dict[str, Any]:
    import pyarrow.parquet as pq

    rows = [row for row in pq.read_table(answers).to_pylist() if row["trained_at"] is not None]
    sampled = [set(row["versions"]) - {-1} for row in rows]
    of_groups = collections.Counter(row["group_id"] for row in rows)
    return {
        "trained": len(rows), "sessions": noted["done"] + noted["died"], "died": noted["died"],
        "answers_lost": noted["dropped"], "actors_killed": 1,
        "twice": len(rows) - len({(row["group_id"], row["member"]) for row in rows}),
        "lost": num_groups - sum(size == MEMBERS for size in of_groups.values()),
        "turns": sorted({row["num_turns"] for row in rows}),
        "sequences": sorted({row["num_sequences"] for row in rows}),
        "calls": {name: noted[name] for name in ("chat", "messages", "responses")},
        "versions": len(set().union(*sampled)), "over_installs": sum(len(one) > 1 for one in sampled),
        "installs_in_flight": len({version for one in sampled for version in one - {min(one)}}),
        **mismatch(run_dir),
    }


def mismatch(run_dir: Path) -> dict[str, Any]:
    """The largest difference of log-probs over all sampled tokens, each at the version that sampled it."""
    import torch

    from learner.data.packing import pack
    from learner.data.trajectories import read_groups
    from learner.replay.opened import open_run
    from streamrl.messages import GroupOrigin

    run = open_run(run_dir, at_most=0)
    history, policy = run.history, run.trainer.networks.policy
    rows = [
        row for batch in history.batches for one in history.arrivals(batch)
        for row in read_groups([one.frame], [GroupOrigin(one.actor_id, one.prompt_index)])
    ]
    sampled = [set(row.versions[row.mask].tolist()) for row in rows]
    largest, num = 0.0, 0
    for version in sorted(set().union(*sampled)):
        compared = [one.versions for one in run.train(upto=version)]
        assert not any(text for one in compared for text in one.values()), compared
        places = [place for place, versions in enumerate(sampled) if version in versions]
        for batch in pack(rows, run.trainer.settings.max_tokens, places=places):
            with torch.no_grad(), run.trainer.with_wire_precision():
                logprobs, _ = policy(batch.tokens, batch.positions, batch.packing, batch.score_index, batch.targets,
                                     batch.temperatures, sets=batch.sets)
            chosen = batch.mask & (batch.versions == version)
            differences = (batch.padded(logprobs) - batch.behavior_logprobs)[chosen].abs()
            largest, num = max(largest, differences.max().item()), num + differences.numel()
    return {"mismatch": largest, "tokens_scored": num, "tokens_sampled": sum(int(row.mask.sum()) for row in rows)}


def _an_actor(launcher: int) -> int:
    """The process of an actor, a child of the launcher."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if "actors" in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
            return int(child)
    raise RuntimeError("the launcher has no actor")


if __name__ == "__main__":
    sys.exit(main())
