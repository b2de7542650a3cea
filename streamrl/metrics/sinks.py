"""Destinations of a step's numbers. One `FanOut` holds all sinks; a failing sink is reported and never stops a run."""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from streamrl.metrics.files import append_lines, parse_json, read_lines, write_atomic
from streamrl.metrics.names import Reduction, lookup
from streamrl.metrics.samples import Sample
from streamrl.metrics.text import compact, time_left

log = logging.getLogger(__name__)

LARGEST = 1e300
"""A metric's values are less, and never NaN: sums of larger ones are infinite."""
MAX_BINS = 512
"""The most that a histogram of wandb may have."""
MAX_WAITING = 10_000
"""Calls that may wait for the server of a tracker; later ones are lost, and counted."""
Row = Mapping[str, Any]
"""The result of `Meter.flush`: numbers, and histograms as dict of bin to count."""


def storable(row: Row) -> dict[str, Any]:
    """The row without values that no reader takes: one of them would cost the others of its step."""
    return {key: value for key, value in row.items() if all(map(_is_number, _numbers_of(value)))}


def _numbers_of(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else (value,)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST


def dense_histogram(bins: Mapping[int, float]) -> tuple[list[float], list[int]]:
    """Counts and edges as numpy has them: bin k is from k to k + 1, and absent bins are zeros.

    Of more bins than wandb takes, neighbors become one: with the sum of their counts, or the mean of means (floats).
    """
    low, high = min(bins, default=0), max(bins, default=0)
    width = (high - low) // MAX_BINS + 1
    found: list[list[float]] = [[] for _ in range((high - low) // width + 1)]
    for k, value in bins.items():
        found[(k - low) // width].append(value)
    values = [fmean(some) if some and isinstance(some[0], float) else sum(some) for some in found]
    return values, [low + width * place for place in range(len(found) + 1)]


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every setting of a configuration as plain values."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run, as the factory of a tracker gets it.

    Attributes:
        resume_step: the step after which a resumed run continues; None for a new run.
        settings: the section `tracking` of the configuration as plain values; `settings["options"]` is free.
    """

    run_id: str
    run_dir: Path
    project: str
    resume_step: int | None
    settings: Mapping[str, Any]


class Sink:
    """A destination of the run's numbers. A sink overrides the methods that it needs; the others do nothing."""

    waits = False
    """Calls wait for a server: they are made in a thread of their own, in order, and hold up no step."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """The resolved configuration as plain values, once, before the first metrics."""

    def log_metrics(self, step: int, metrics: Row) -> None:
        """One step."""

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Some trajectories to be read, at a step whose metrics were logged."""

    def log_artifact(self, path: Path) -> None:
        """A file or a folder of the run directory that is done, such as the trained model in model/."""

    def where(self) -> str:
        """The command that opens the record, or where it is; empty if there is nothing to say."""
        return ""

    def close(self) -> None:
        """No more calls follow."""


class FanOut(Sink):
    """All sinks as one. A member that raises is logged with its traceback the first time, then only counted."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self.num_failures: dict[str, int] = {}
        self._lines = {id(sink): _Line(partial(self._now, sink)) for sink in sinks if getattr(sink, "waits", False)}

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._each("log_config", config)

    def log_metrics(self, step: int, metrics: Row) -> None:
        self._each("log_metrics", step, metrics)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._each("log_samples", step, samples)

    def log_artifact(self, path: Path) -> None:
        self._each("log_artifact", path)

    def places(self) -> list[str]:
        """The places that the members' `where` names, without empty ones."""
        return [place for place in self._each("where") if place]

    def close(self) -> None:
        self._each("close")
        for line in self._lines.values():
            line.join()
        for where, count in self.num_failures.items():
            log.warning("%s failed %d times in this run; its record is incomplete.", where, count)

    def _each(self, method: str, *args: Any) -> list[Any]:
        answers = []
        for sink in self._sinks:
            line = None if method == "where" else self._lines.get(id(sink))
            function = getattr(sink, method) if line is None else partial(line.put, method)
            answers += self._call(sink, method, function, *args)
        return answers

    def _now(self, sink: Sink, method: str, *args: Any) -> list[Any]:
        return self._call(sink, method, getattr(sink, method), *args)

    def _call(self, sink: Sink, method: str, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The answer; none of one that raised."""
        try:
            return [function(*args)]
        except Exception:  # third-party trackers raise what they like; a plot is never worth a training run
            where = f"{type(sink).__name__}.{method}"
            self.num_failures[where] = self.num_failures.get(where, 0) + 1
            if self.num_failures[where] == 1:
                log.warning("%s failed; training goes on without it.", where, exc_info=True)
            return []


class _Line:
    """The calls of one sink, in order, in a thread of its own. `close`, the last, is made in any case.

    Args:
        call: makes one, by its method; returns nothing if it failed.
    """

    def __init__(self, call: Callable[..., list[Any]]) -> None:
        self._call = call
        self._waiting: queue.Queue[tuple[Any, ...]] = queue.Queue(MAX_WAITING)
        self._closes = False
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    def put(self, method: str, *args: Any) -> None:
        """Raise queue.Full if too many wait."""
        self._closes = method == "close"
        self._waiting.put((method, *args), block=self._closes)

    def join(self) -> None:
        """Wait for `close`, and for those before it while they are answered: each would wait for the same server."""
        self._thread.join()

    def _work(self) -> None:
        method, gives_up = "", False
        while method != "close":
            method, *args = self._waiting.get()
            if not gives_up or method == "close":
                gives_up = not self._call(method, *args) and self._closes


class JsonlSink(Sink):
    """`metrics.jsonl` with one object per step, on disk line by line in case of a kill, and `config.json` beside it.

    Args:
        path: the file; its directory is made.
        resume_step: the step that the checkpoint holds. Lines of later steps, which will be done again, and damaged
            ones are dropped. None keeps every whole line.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            kept = [line for line, row in read_lines(self.path, parse_row)
                    if resume_step is None or row["step"] <= resume_step]
            write_atomic(self.path, b"".join(kept))

    def log_config(self, config: Mapping[str, Any]) -> None:
        write_atomic(self.path.with_name("config.json"), json.dumps(config, indent=2, default=str) + "\n")

    def log_metrics(self, step: int, metrics: Row) -> None:
        append_lines(self.path, json.dumps({"step": step, **metrics}).encode() + b"\n")


def parse_row(line: str | bytes) -> dict[str, Any]:
    """One line of `metrics.jsonl`, histogram bins as integers. Raises ValueError: no JSON object with a `step`."""
    row = parse_json(line)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError("no object with a step")
    for key, value in row.items():
        if (bins := _has_bins(key)) is not None and isinstance(value, dict) != bins:
            raise ValueError(f"{key[:80]} is {'a' if bins else 'no'} histogram")
        if not all(map(_is_number, _numbers_of(value))):
            raise ValueError(f"{key[:80]} is no number")
    return {key: {int(k): n for k, n in value.items()} if isinstance(value, dict) else value
            for key, value in row.items() if not isinstance(value, dict) or _has_bins(key)}


@cache
def _has_bins(key: str) -> bool | None:
    """Tell whether a metric is a histogram; None for one of another release."""
    with suppress(KeyError):
        return lookup(key).reduction in (Reduction.histogram, Reduction.mean_by_bin)
    return None


class ConsoleSink(Sink):
    """One plain line a step.

    Args:
        total_steps: of the whole run, for the share done and the time left; None leaves both out.
        stream: where lines go; None is standard error, looked up at each line.
        clock: seconds, monotonic.
    """

    def __init__(self, total_steps: int | None = None, stream: TextIO | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._stream, self._clock = total_steps, stream, clock
        self._start: tuple[int, float] | None = None

    def log_metrics(self, step: int, metrics: Row) -> None:
        now = self._clock()
        first_step, first_s = self._start = self._start or (step, now)
        left_s = None
        if self._total is not None and step > first_step:
            left_s = (now - first_s) / (step - first_step) * (self._total - step)
        line = plain_line({"step": step, **metrics}, self._total, left_s)
        print(line, file=self._stream or sys.stderr, flush=True)


def plain_line(row: Row, total_steps: int | None = None, left_s: float | None = None) -> str:
    """A step as one line: step, reward, evaluation, lag mean/max, tokens/s of both sides, actors, time left.

    The version is shown only where it is not the step's number. What the row does not hold is left out, and of the row
    after the last step, which brings the last evaluation, everything else.
    """
    parts = [f"step {row['step']}" + (f"/{total_steps}" if total_steps is not None else "")]

    def add(label: str, key: str, suffix: str = "") -> None:
        if key in row:
            parts.append(f"{label} {compact(row[key])}{suffix}")

    if row.get("run/version", row["step"]) != row["step"]:
        add("version", "run/version")
    # Nothing may have come in this step, or a single answer.
    add("reward", next((key for key in ("reward/recent", "reward/mean") if key in row), "reward/trained"))
    add("eval", "eval/score")
    for name in ("loss", "held_out_loss", "accuracy"):
        add(name.replace("_", "-"), f"supervised/{name}")
    if "eval/score" in row and "time/step_s" not in row and not {"reward/mean", "reward/trained"} & set(row):
        return "  ".join(parts)
    if "lag/token_mean" in row or "lag/head_max" in row:
        lag_max = row.get("lag/head_max", row.get("lag/token_max"))
        parts.append(f"lag {compact(row.get('lag/token_mean'), 2)}/{compact(lag_max)}")
    add("train", "throughput/train_tokens_per_s", " tok/s")
    add("generate", "throughput/generate_tokens_per_s", " tok/s")
    add("actors", "hub/num_actors")
    if left_s:
        parts.append(time_left(left_s))
    return "  ".join(parts)
