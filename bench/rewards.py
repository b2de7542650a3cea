"""Do slow rewards keep an actor's engine from being full?

A real worker, with its leases, episodes, threads and reward processes, plays `--concurrent` episodes at once. Two sides
are fakes and say so: the engine takes the same time for every step whatever its batch, as a GPU nearly does, and has no
model; the hub grants at once what the actor says it has room for. Lengths of answers are lognormal (sigma 0.8).

    occupancy   sequences that were in the engine, of those that it has room for, over the measured time
    none        a plain reward that returns at once: what the others are compared with
    async       `async def`, awaits --reward-ms
    thread      a plain function that waits --reward-ms, as for a service
    workers     reward.type=math with worker processes that take --reward-ms for a comparison (a fake, it sleeps)

Run: python -m bench.rewards [--quick] [--check]
"""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from actors.engines.base import EngineStats, GenerateRequest, Generation, InstallTimes, VersionSpan
from actors.env_calls.inline import InlineCalls
from actors.episode import EpisodeRunner
from actors.load import LoadMeter
from actors.render import Renderer
from actors.runtime import ActorRuntime
from actors.settings import episode_rules, max_leases
from actors.worker import Worker
from bench.record import exit_status, record, shared_arguments
from envs.registry import task_of
from envs.rewards import answers
from envs.rewards.workers import WorkerPool
from streamrl.config.load import load_config
from streamrl.errors import EngineError
from streamrl.messages import Group, Lease, Leases, Limits, Outcome, Sampling, VersionRef, Welcome
from streamrl.transport.session import Deliver, LinkClosed, Progress

VERSION = VersionRef(1, 1)
GROUP, VOCAB, HEARTBEAT_S, SIGMA = 8, 128, 1.0, 0.8
GOAL = 0.95
REWARDS = {
    "none": "def reward_fn(completion):\n    return 1.0\n",
    "async": "import asyncio\nasync def reward_fn(completion):\n    await asyncio.sleep({0})\n    return 1.0\n",
    "thread": "import time\ndef reward_fn(completion):\n    time.sleep({0})\n    return 1.0\n",
}
MODES = (*REWARDS, "workers")


class FakeGpuEngine:
    """Steps of a fixed duration in a thread of its own; a sequence ends after as many as its seed says."""

    name = "fake-gpu"

    def __init__(self, slots: int, step_s: float, mean_tokens: int) -> None:
        self.max_num_seqs, self.installed = slots, VERSION
        self._step_s, self._mean = step_s, mean_tokens
        self._lock, self._closed = threading.Lock(), False
        self._ends: list[tuple[int, int, asyncio.Future[None]]] = []
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self.step = self._count = self.tokens = 0
        self.occupied: list[int] = []  # sequences in each step
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True).start()

    async def generate(self, request: GenerateRequest) -> Generation:
        rng = random.Random(request.seed)
        length = min(request.max_new_tokens, max(1, int(self._mean * 0.73 * rng.lognormvariate(0.0, SIGMA))))
        done = self._loop.create_future()
        with self._lock:
            self._waiting.append((length, done))
        await done
        ids = [2 + (request.seed + n) % (VOCAB - 2) for n in range(length)]
        return Generation(ids, [-1.0] * length, [VersionSpan(VERSION, 0, length)], "stop")

    def _run(self) -> None:
        due = time.perf_counter()
        while not self._closed:
            due = max(due + self._step_s, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
            ended = []
            with self._lock:
                while self._waiting and len(self._ends) < self.max_num_seqs:
                    length, done = self._waiting.pop(0)
                    self._count += 1
                    heapq.heappush(self._ends, (self.step + length, self._count, done))
                self.step += 1
                self.tokens += len(self._ends)
                self.occupied.append(len(self._ends))
                while self._ends and self._ends[0][0] <= self.step:
                    ended.append(heapq.heappop(self._ends)[2])
            if ended:
                with suppress(RuntimeError):  # the loop is closed: the measurement is over
                    self._loop.call_soon_threadsafe(_settle, ended)

    async def install(self, tensors: Mapping[str, Any], ref: VersionRef) -> InstallTimes:
        raise EngineError("this fake has no weights")

    def stats(self) -> EngineStats:
        return EngineStats(
            tokens_total=self.tokens, steps_total=self.step, running=len(self._ends), waiting=len(self._waiting)
        )

    async def close(self) -> None:
        self._closed = True


def _settle(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


class FakeHub:
    """The worker's end of a link whose hub always has prompts: grants what the last heartbeat said is free."""

    endpoint = "fake"

    def __init__(self) -> None:
        self.events: asyncio.Queue[Deliver | LinkClosed] = asyncio.Queue()
        self.num_groups = self.num_returned = self._next = self._free = 0
        self._progress = Progress()
        self._job: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._job = asyncio.ensure_future(self._heartbeats())

    def update(self, progress: Progress) -> None:
        self._progress = progress

    def send_group(self, group: Group) -> None:
        self.num_groups += group.outcome == Outcome.COMPLETE
        self.num_returned += group.outcome != Outcome.COMPLETE
        self._free += 1
        self._grant()

    def close(self) -> None:
        if self._job is not None:
            self._job.cancel()

    async def _heartbeats(self) -> None:
        while True:
            self._free = self._progress.free
            self._grant()
            await asyncio.sleep(HEARTBEAT_S)

    def _grant(self) -> None:
        room = min(self._free, self._progress.max_leases - len(self._progress.held))
        if room > 0:
            self._free -= room
            self.events.put_nowait(Deliver(Leases(tuple(self._lease() for _ in range(room)), ())))

    def _lease(self) -> Lease:
        number, self._next = self._next, self._next + 1
        prompt = json.dumps({"question": f"{number % 97} + 1 = ?", "answer": str(number % 97 + 1)}).encode()
        members = tuple(range(GROUP))
        seeds = tuple(number * GROUP + member for member in members)
        return Lease(number, 0, number, 0, prompt, members, seeds, VERSION, Sampling(), 600.0)


def tokenizer() -> Any:
    """One token for each character, as the quickstart's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<end>": 1, **{chr(32 + place): place + 2 for place in range(VOCAB - 2)}}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


def config_of(mode: str, args: Any, folder: Path) -> Any:
    (folder / "train.jsonl").write_text('{"question": "1 + 1 = ?", "answer": "2"}\n')
    words = [
        "experiment=quickstart", f"data.path={folder}/train.jsonl", "data.test_ratio=0",
        "data.apply_chat_template=false", f"actors.num_concurrent={args.concurrent}",
        f"rollout.train.sampling.max_new_tokens={8 * args.mean_tokens}",
        f"learner.max_tokens_per_device={9 * args.mean_tokens + 300}",
    ]
    if mode == "workers":
        os.environ["SLEEP_S"] = str(args.reward_ms / 1e3)
        return load_config([*words, "reward.type=math", f"reward.num_workers={args.workers}"])
    (folder / "reward.py").write_text(REWARDS[mode].format(args.reward_ms / 1e3))
    return load_config([*words, f"env.path={folder}/reward.py"])


async def play(mode: str, args: Any, folder: Path) -> dict[str, float]:
    """Occupancy, tokens and episodes per second, after a warm-up of the mean length of an answer."""
    config = config_of(mode, args, folder)
    config.env.num_threads = args.threads
    engine = FakeGpuEngine(args.concurrent, args.step_ms / 1e3, args.mean_tokens)
    task, sampling = task_of(config), config.rollout.train.sampling
    renderer, load = Renderer(tokenizer(), apply_chat_template=False), LoadMeter()
    runner = EpisodeRunner(
        task, engine, renderer, episode_rules(config, sampling, task), num_threads=config.env.num_threads, load=load,
        inline=InlineCalls(),
    )
    runtime = ActorRuntime(
        engine, NoInstaller(), runner, runner, set_welcome=lambda welcome: None,
        max_leases=max_leases(args.concurrent, GROUP), load=load, group_size=None if args.whole_groups else GROUP,
    )
    hub = FakeHub()
    worker = Worker(hub, lambda welcome: runtime)
    life = asyncio.ensure_future(worker.run())
    hub.events.put_nowait(Deliver(welcome()))
    await asyncio.sleep(args.warm_s)
    steps, tokens, groups, began = len(engine.occupied), engine.tokens, hub.num_groups, time.perf_counter()
    await asyncio.sleep(args.measure_s)
    seconds = time.perf_counter() - began
    part = engine.occupied[steps:]
    found = {
        "occupancy": sum(part) / len(part) / args.concurrent, "tokens_per_s": (engine.tokens - tokens) / seconds,
        "episodes_per_s": (hub.num_groups - groups) * GROUP / seconds, "step_ms": seconds / len(part) * 1e3,
    }
    assert hub.num_returned == 0, "a lease was handed back"
    hub.events.put_nowait(LinkClosed(0, "measured"))
    await life
    return found


class NoInstaller:
    """The engine has its version from the start."""

    def close(self) -> None:
        pass


@contextmanager
def slow_workers() -> Iterator[None]:
    """Comparisons of mathematical answers are made by the sleeping processes inside."""
    with patch.object(answers, "WorkerPool", lambda _, num, limit_s: WorkerPool("bench.sleeping_worker", num, limit_s)):
        yield


def welcome() -> Welcome:
    return Welcome(
        protocol=1, run_id="bench", learner_epoch=1, version=VERSION.version, lineage=(), task=b"{}", layout=None,
        limits=Limits(vocab_size=VOCAB), manifest=None, offers=(), pull_token=bytes(16), assets_nbytes=0,
        assets_digest=bytes(16), settled_upto=0, settled=(), durable_upto=0, durable=(), held=(),
    )


def main() -> int:
    parser = shared_arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--concurrent", type=int, default=1000)
    parser.add_argument("--reward-ms", type=float, default=100.0)
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--mean-tokens", type=int, default=300)
    parser.add_argument("--workers", type=int, default=32, help="processes of the mode `workers`")
    parser.add_argument("--threads", type=int, help="env.num_threads")
    parser.add_argument("--whole-groups", action="store_true", help="only a whole group that ends makes room for one")
    parser.add_argument("--warm-s", type=float, default=20.0)
    parser.add_argument("--measure-s", type=float, default=20.0)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.set_defaults(repeats=1)
    args = parser.parse_args()
    if args.quick:
        args.concurrent, args.mean_tokens, args.warm_s, args.measure_s, args.workers = 100, 60, 4.0, 4.0, 8
    logging.disable(logging.INFO)
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in args.modes}
    for _ in range(args.repeats):
        for mode in args.modes:
            with tempfile.TemporaryDirectory() as folder, slow_workers():
                found[mode].append(asyncio.run(play(mode, args, Path(folder))))
                print(mode, found[mode][-1], file=sys.stderr, flush=True)
    return exit_status([line for mode in args.modes for line in _record(mode, found, args)], args.check)


def _record(mode: str, found: Mapping[str, list[dict[str, float]]], args: Any) -> list[dict[str, Any]]:
    params = {key: getattr(args, key) for key in (
        "concurrent", "reward_ms", "step_ms", "mean_tokens", "workers", "threads", "whole_groups", "warm_s",
        "measure_s",
    )}  # fmt: skip
    params |= {"group": GROUP, "length_sigma": SIGMA, "engine": "fake, fixed step time", "mode": mode}
    params["medians"] = {key: _median(found[mode], key) for key in found[mode][0]}
    baseline, goal = None, None
    if mode != "none" and "none" in found:
        none = _median(found["none"], "occupancy")
        baseline = {"name": "rewards.occupancy.none", "value": none, "unit": "share", "source": "this run",
                    "version": "", "measured_here": True}
        goal = {"id": "R4", "op": ">=", "value": GOAL * none}
    samples = [one["occupancy"] for one in found[mode]]
    value = _median(found[mode], "occupancy")
    return [record(f"rewards.occupancy.{mode}", value, "share", "higher", samples, params, baseline, goal, seed=0)]


def _median(found: list[dict[str, float]], key: str) -> float:
    values = sorted(one[key] for one in found)
    return values[len(values) // 2]


if __name__ == "__main__":
    sys.exit(main())
