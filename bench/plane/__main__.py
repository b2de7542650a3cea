"""How many trajectories of 1,000 tokens does one hub acknowledge a second, from 16 to 4,096 actors?

    ledger      cost a group in the ledger alone, by number of actors
    hub         acknowledged, deduplicated, version-checked trajectories a second through sockets; also with CURVE
    bare        the same frames through a DEALER/ROUTER loop that decodes and acknowledges, and does nothing else
    pipe        what PUSH/PULL loses when its reader is killed
    reconnect   all actors join a hub that was started again: seconds, and groups that never got an answer
    soak        resident memory of the hub over time

Hub, trainer and all actors share this machine: with two cores the actors take about as much of it as the hub.

Run: python -m bench.plane [--quick] [--only hub,bare] [--sizes 16,1024] [--soak-s 600]
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from typing import Any

from bench.plane.baselines import bare_loop, pipe_losses
from bench.plane.ledger_cost import cost
from bench.plane.run_hub import Plane, Sizes
from bench.record import exit_status, record, shared_arguments

PARTS = ("ledger", "hub", "bare", "pipe", "reconnect")
SIZES = (16, 64, 256, 1024, 4096)
GOALS = {(1024, False): 12_000, (4096, False): 10_000, (1024, True): 7_000}


def ledger_lines(sizes: tuple[int, ...], repeats: int, num_groups: int) -> list[dict[str, Any]]:
    lines, smallest = [], 0.0
    for num_actors in sizes:
        found = [cost(num_actors, num_groups) for _ in range(repeats)]
        samples = [one["group_us"] for one in found]
        value = statistics.median(samples)
        smallest = smallest or value
        middle = found[samples.index(sorted(samples)[len(samples) // 2])]
        goal = {"id": "flat", "op": "<=", "value": 1.5 * smallest} if num_actors > sizes[0] else None
        lines.append(record(
            f"plane.ledger_us_per_group.n{num_actors}", value, "us", "lower", samples,
            {"num_actors": num_actors, **{key: round(part, 2) for key, part in middle.items()}}, goal=goal,
        ))
    return lines


def hub_line(sizes: Sizes, seconds: float, repeats: int, baseline: float | None) -> dict[str, Any]:
    with Plane(sizes) as plane:
        plane.start_fleet()
        joined_s = plane.wait_for_actors()
        plane.train(min(3.0, seconds))  # until every actor has had its first leases
        samples, busy = [], []
        before = plane.counters()
        for _ in range(repeats):
            cpu, began = plane.hub_cpu_s(), time.monotonic()
            num, spent = plane.train(seconds)
            samples.append(num / spent)
            busy.append((plane.hub_cpu_s() - cpu) / (time.monotonic() - began))
        after = plane.counters()
        fleet = plane.fleet_report()
        moved = {key: after[key] - before.get(key, 0.0) for key in after if after[key] != before.get(key, 0.0)}
        params = {
            "num_actors": sizes.num_actors, "group_size": sizes.group_size, "num_tokens": sizes.num_tokens,
            "curve": sizes.curve, "groups_per_batch": sizes.groups_per_batch, "eta": sizes.eta,
            "hub_cpu": round(statistics.median(busy), 2),
            "per_hub_cpu_s": round(statistics.median(one / cpu for one, cpu in zip(samples, busy, strict=True))),
            "hub_memory_mib": plane.hub_memory_bytes() >> 20,
            "joined_s": round(joined_s, 2), "evictions": after["num_evictions"], "repeats": after["num_repeats"],
            "lag_violations": after["num_lag_violations"], "accepted": moved.get("num_members_accepted", 0.0),
            "fleet_cpu_s": fleet["cpu_s"], "refused_sends": fleet.get("refused", 0),
        }
    goal = GOALS.get((sizes.num_actors, sizes.curve)) if sizes.group_size == 16 else None
    name = f"plane.trajectories_per_s.n{sizes.num_actors}.g{sizes.group_size}" + (".curve" if sizes.curve else "")
    return record(
        name, statistics.median(samples), "1/s", "higher", samples, params,
        goal={"id": "plane", "op": ">=", "value": goal} if goal else None,
        baseline=None if baseline is None else {
            "name": "DEALER/ROUTER loop that decodes", "value": baseline, "unit": "1/s", "source": "this bench",
            "version": "", "measured_here": True},
    )


def bare_line(num_actors: int, seconds: float, repeats: int, *, decode: bool) -> dict[str, Any]:
    samples = [bare_loop(num_actors, 16, 1000, 2, seconds, decode=decode) for _ in range(repeats)]
    return record(
        f"plane.bare_trajectories_per_s.n{num_actors}" + (".decoded" if decode else ""), statistics.median(samples),
        "1/s", "higher", samples, {"num_actors": num_actors, "group_size": 16, "num_tokens": 1000, "decode": decode},
    )


def reconnect_lines(num_actors: int) -> list[dict[str, Any]]:
    """A hub that ends and starts again with its ledger, under load."""
    with Plane(Sizes(num_actors, group_size=2, num_tokens=100, durable=True)) as plane:
        plane.start_fleet()
        plane.wait_for_actors()
        plane.train(3.0)
        first, before = plane.fleet_report()["joined"], plane.counters()
        began = time.monotonic()
        plane.restart_hub()
        up_s = time.monotonic() - began
        while plane.fleet_report()["joined"] < first + num_actors and time.monotonic() - began < 120:
            plane.link.poll()
            time.sleep(0.02)
        seconds = time.monotonic() - began
        plane.train(5.0)
        deadline = time.monotonic() + 30
        while (left := plane.fleet_report()["unsettled"]) > num_actors // 50 and time.monotonic() < deadline:
            plane.train(0.5)
        after = plane.counters()
        names = ("lost_on_crash", "num_evictions", "num_leases_reissued", "num_leases_lost", "num_duplicates_dropped",
                 "num_repeats", "num_lag_violations", "num_groups_trained")
        params = {
            "num_actors": num_actors, "hub_up_s": round(up_s, 2), "actors_with_an_unanswered_group": left,
            "evictions_before": before["num_evictions"], **{name: after[name] - before[name] for name in names},
        }
    lost = params["lost_on_crash"]
    return [
        record(f"plane.reconnect_s.n{num_actors}", seconds, "s", "lower", [seconds], params,
               goal={"id": "R12", "op": "<=", "value": 15.0}),
        record(f"plane.reconnect_lost.n{num_actors}", lost, "groups", "lower", [lost], params,
               goal={"id": "R12", "op": "<=", "value": 0.0}),
    ]


def soak_line(seconds: float, num_actors: int = 64) -> dict[str, Any]:
    """Growth of the hub's resident memory from the first tenth of the time to the last."""
    with Plane(Sizes(num_actors)) as plane:
        plane.start_fleet()
        plane.wait_for_actors()
        samples = []
        for _ in range(40):
            plane.train(seconds / 40)
            samples.append(plane.hub_memory_bytes() / (1 << 20))
        params = {"num_actors": num_actors, "seconds": seconds, "trajectories": plane.counters()[
            "num_members_accepted"]}
    tenth = len(samples) // 10
    slope = (statistics.median(samples[-tenth:]) - statistics.median(samples[tenth : 2 * tenth])) / (
        0.8 * seconds / 60)
    return record("plane.memory_mib_per_minute", slope, "MiB/min", "lower", samples, params,
                  goal={"id": "R11", "op": "<=", "value": 1.0})


def main() -> int:
    parser = shared_arguments(__doc__ or "")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--sizes", default="")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--soak-s", type=float, default=0.0)
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    sizes = tuple(map(int, arguments.sizes.split(","))) if arguments.sizes else SIZES[:2] if arguments.quick else SIZES
    repeats, seconds = (1, 1.0) if arguments.quick else (min(3, arguments.repeats), arguments.seconds)
    only, lines, bare = arguments.only.split(","), [], {}
    if "ledger" in only:
        lines += ledger_lines(sizes, repeats, 2_000 if arguments.quick else 10_000)
    if "bare" in only:
        for num_actors in (sizes[0], sizes[-1]) if arguments.quick else (64, 1024, 4096):
            lines.append(bare_line(num_actors, seconds, repeats, decode=False))
            lines.append(bare_line(num_actors, seconds, repeats, decode=True))
            bare[num_actors] = lines[-1]["value"]
    if "hub" in only:
        for num_actors in sizes:
            lines.append(hub_line(Sizes(num_actors), seconds, repeats, bare.get(num_actors)))
        for num_actors in [one for one in (64, 1024, 4096) if one in sizes]:
            lines.append(hub_line(Sizes(num_actors, curve=True), seconds, repeats, None))
    if "pipe" in only:
        found = pipe_losses(8, 40_000 if arguments.quick else 120_000, 1 if arguments.quick else 5)
        lines.append(record("plane.pipe_lost", found["lost"], "messages", "lower", [found["lost"]], found))
    if "reconnect" in only:
        lines += reconnect_lines(sizes[-1])
    if arguments.soak_s:
        lines.append(soak_line(arguments.soak_s))
    return exit_status(lines, arguments.check)


if __name__ == "__main__":
    sys.exit(main())
