"""A finished run in one line, for the README of a project that trained with it."""

from __future__ import annotations

from statistics import median

from streamrl.metrics.run_record import RunRecord
from streamrl.metrics.text import compact, duration
from streamrl.report import headline

GIB = 1 << 30
GPU_BYTES = ("hub/actor_gpu_used_bytes", "system/gpu_allocated_bytes")
"""Peak memory: all that is in use on the GPU of an actor; else what the learner allocated alone."""
HOST_BYTES = ("system/rss_bytes", "hub/actor_rss_bytes")


def readme_line(record: RunRecord, hardware: str) -> str:
    """Model, hardware, tokens a second, seconds to the best evaluation, peak memory; what is not known is left out.

    Rates are medians over the steps after the first, whose kernels and graphs are still made.
    """
    generated, trained = (
        _usual(record, f"throughput/{name}_tokens_per_s")
        for name in ("generate", "train")
    )
    model = headline.model(record)
    parts = [
        f"{model} on {hardware}: {generated} tokens/s generated, {trained} trained",
        *_score(record),
    ]
    on_gpu = max(_peak(record, name) for name in GPU_BYTES)
    on_host = sum(_peak(record, name) for name in HOST_BYTES)
    gib = (on_gpu or on_host) / GIB
    where = "" if on_gpu else " of the host"
    parts.append(f"peak memory {gib:.1f} GiB{where}")
    return "; ".join(parts)


def _score(record: RunRecord) -> list[str]:
    rows = [row for row in record.rows if "eval/score" in row]
    if not rows:
        return []
    best = max(rows, key=lambda row: row["eval/score"])  # the first of equal ones
    first = compact(rows[0]["eval/score"])
    score = compact(best["eval/score"])
    seconds = duration(best.get("run/wall_s"))
    task = headline.task(record)
    last = compact(rows[-1]["eval/score"])
    ended = "" if last == score else f", {last} at the end"
    return [f"{task} from {first} to {score} in {seconds}{ended}"]


def _peak(record: RunRecord, name: str) -> float:
    values = record.series(name)[1]
    return max(values, default=0.0)


def _usual(record: RunRecord, name: str) -> str:
    values = record.series(name)[1]
    later = values[1:] or values
    return compact(median(later)) if later else "-"
