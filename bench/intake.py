"""What does a learner rank spend on its share of a batch before it computes, and does that grow with the ranks?

    receive   from the request to the decoded share: the hub's cut, the socket, the message
    read      GROUP frames to trajectories, checked
    pack      trajectories to micro-batches of at most 16,384 tokens
    bytes     of the share's message; `others`: of GROUP frames in it that another rank trains on, which must be 0

A real hub process cuts batches of groups of 16 trajectories of 1,000 tokens, which a fleet of actors sends it over TCP.
Each rank is a process with a connection of its own; all ask at once, while the actors have nothing to do. Nothing is
trained, and the number that ranks agree on between reading and packing is not counted. Processor time is that of the
rank's training thread, which does all of this. The ranks share this machine's cores, and their wall times with it.

Run: python -m bench.intake [--quick]
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.plane.run_hub import Plane, Sizes
from bench.record import exit_status, record, shared_arguments
from learner.data.packing import pack_minibatches
from learner.data.trajectories import read_groups
from learner.hub_client.link import HubLink
from learner.ranks.mesh import Ranks
from streamrl.messages.codec import encode

SHARES = ((1, 16), (2, 32), (4, 64), (1, 64), (2, 64))
"""(ranks, groups of a batch): a share of 16 groups for 1, 2 and 4 ranks, and a batch of 64 over them."""
MAX_TOKENS = 16_384
PATIENCE_S = 60.0

Step = dict[str, float]


class Clock:
    """Milliseconds of each part: `<part>_ms` by the wall, `<part>_cpu_ms` of this thread's processor time."""

    def __init__(self) -> None:
        self.found: Step = {}
        self._last = time.perf_counter(), time.thread_time()

    def lap(self, part: str) -> None:
        now = time.perf_counter(), time.thread_time()
        self.found[f"{part}_ms"], self.found[f"{part}_cpu_ms"] = (
            1e3 * (new - old) for new, old in zip(now, self._last, strict=True)
        )
        self._last = now


def take_share(link: HubLink, rank: int, version: int) -> Step:
    """One batch, as the training thread of a rank takes it."""
    clock = Clock()
    share = link.next_batch(version)
    assert share is not None
    clock.lap("receive")
    rows = read_groups(share.groups, share.origins)
    clock.lap("read")
    (micro_batches,) = pack_minibatches(rows, share.plan, MAX_TOKENS, Ranks())
    clock.lap("pack")
    mine = {row.group_id for row in share.plan if row.rank == rank}
    others = sum(len(frame) for frame in share.groups if read_groups([frame])[0].group_id not in mine)
    assert sum(one.num_scored for one in micro_batches) == sum(row.num_action_tokens for row in rows)
    return {
        **clock.found, "bytes": len(encode(share)), "frame_bytes": sum(map(len, share.groups)), "others": others,
        "trajectories": len(rows), "rank": rank,
    }


def rank_process(commands: Connection, endpoint: str, rank: int, world: int) -> None:
    """A rank other than 0, from the first version it is told to the end of its commands."""
    link = HubLink(
        endpoint, rank=rank, world=world, version=0, check_hub=lambda: None, stop_requested=lambda: False,
        stall_report_s=1e9, stall_fail_s=0,
    )
    commands.send("up")
    while (version := commands.recv()) is not None:
        commands.send(take_share(link, rank, version))
    link.close()


class RankProcesses:
    """Ranks 1 to N - 1; rank 0 is the plane's own link, in this process."""

    def __init__(self, endpoint: str, world: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes = []
        for rank in range(1, world):
            mine, its = spawn.Pipe()
            spawn.Process(target=rank_process, args=(its, endpoint, rank, world), daemon=True).start()
            self._pipes.append(mine)
        for pipe in self._pipes:
            pipe.recv()

    def start(self, version: int | None) -> None:
        for pipe in self._pipes:
            pipe.send(version)

    def results(self) -> list[Step]:
        return [pipe.recv() for pipe in self._pipes]


def wait_until_idle(plane: Plane) -> None:
    """Until the lead is used up: all that may be generated is held, and the actors have nothing to do."""
    until = time.monotonic() + PATIENCE_S
    while True:
        counters = plane.counters()
        if not counters["num_leases_open"] and not counters["num_groups_ready"] and counters["num_groups_queued"]:
            return
        if time.monotonic() > until:
            raise TimeoutError(f"the actors are still at work after {PATIENCE_S:g} s: {counters}")
        time.sleep(0.02)


def processor_ns(pid: int) -> int:
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in Path(f"/proc/{pid}/task").iterdir())


def measure(num_ranks: int, num_groups: int, repeats: int) -> tuple[list[list[Step]], list[float]]:
    """Every rank's steps, and the hub's milliseconds of processor time for each cut."""
    steps, hub = [], []
    with Plane(Sizes(num_groups, num_ranks=num_ranks)) as plane:
        others = RankProcesses(plane.rank_endpoint, num_ranks)
        plane.start_fleet()
        plane.wait_for_actors()
        for _ in range(repeats + 1):
            wait_until_idle(plane)
            before = processor_ns(plane.hub_pid)
            others.start(plane.version)
            mine = take_share(plane.link, 0, plane.version)
            steps.append([mine, *others.results()])
            hub.append((processor_ns(plane.hub_pid) - before) / 1e6)
            plane.version += 1
            plane.link.trained(plane.version, skipped=False)
            plane.publish()
        others.start(None)
    return steps[1:], hub[1:]  # the first step warms up


def report(
    num_ranks: int, num_groups: int, steps: list[list[Step]], hub: list[float], seed: int
) -> list[dict[str, Any]]:
    def middle(key: str, ranks: slice) -> float:
        return statistics.median(one[key] for step in steps for one in step[ranks])

    where = f"r{num_ranks}.b{num_groups}"
    parts = [f"{part}_{clock}" for part in ("receive", "read", "pack") for clock in ("ms", "cpu_ms")]
    params = {
        "num_ranks": num_ranks, "num_groups": num_groups, "group_size": 16, "num_tokens": 1000,
        "share_trajectories": middle("trajectories", slice(None)), "max_tokens": MAX_TOKENS,
        "median_of_ranks": {key: round(middle(key, slice(None)), 2) for key in parts},
        "rank_0": {key: round(middle(key, slice(1)), 2) for key in parts},
        "hub_cpu_ms": round(statistics.median(hub), 2),
        "plan_bytes": middle("bytes", slice(None)) - middle("frame_bytes", slice(None)),
    }
    spent = [sum(one[f"{part}_cpu_ms"] for part in ("receive", "read", "pack")) for step in steps for one in step]
    bytes_each = [one["bytes"] for step in steps for one in step]
    others = [step[0]["others"] for step in steps]
    return [
        record(f"intake.cpu_ms_per_step.{where}", statistics.median(spent), "ms", "lower", spent, params, seed=seed),
        record(f"intake.bytes_per_step.{where}", statistics.median(bytes_each), "B", "lower", bytes_each, params,
               seed=seed),
        record(
            f"intake.rank_0_bytes_of_others.{where}", max(others), "B", "lower", others, params, seed=seed,
            goal={"id": "intake", "op": "<=", "value": 0},
        ),
    ]


def main() -> int:
    arguments = shared_arguments(__doc__ or "").parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    lines = []
    for num_ranks, num_groups in SHARES[:2] if arguments.quick else SHARES:
        steps, hub = measure(num_ranks, num_groups, 3 if arguments.quick else 3 * arguments.repeats)
        lines += report(num_ranks, num_groups, steps, hub, arguments.seed)
    return exit_status(lines, arguments.check)


if __name__ == "__main__":
    sys.exit(main())
