"""How small is a delta, and how fast is it made and applied? Part of `bench.weights`.

bfloat16 words, one in a hundred replaced by a random one, in buckets as they travel; encoding includes the search for
what changed and the compression, applying includes copying the base and the digest of the result. Both run in one
thread, and the clock is the CPU time of the process: what one core gives.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from bench.record import record
from streamrl.weights.delta import apply, encode
from streamrl.weights.manifest import bucket_digest

BUCKET_BYTES = 16 << 20


def changed_words(old: np.ndarray, part: float, rng: np.random.Generator) -> np.ndarray:
    new = old.copy()
    chosen = rng.random(len(new)) < part
    new[chosen] = rng.integers(0, 65536, int(chosen.sum()))
    return new


def delta_lines(mib: int, repeats: int, seed: int, part: float = 0.01) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    old_words = rng.integers(0, 65536, (mib << 20) // 2, dtype=np.uint16)
    old, new = (memoryview(words.tobytes()) for words in (old_words, changed_words(old_words, part, rng)))
    starts = range(0, len(old), BUCKET_BYTES)
    buckets = [(old[start : start + BUCKET_BYTES], new[start : start + BUCKET_BYTES]) for start in starts]
    digests = [(bucket_digest(before), bucket_digest(after)) for before, after in buckets]
    target = memoryview(bytearray(len(old)))
    sizes, encoding, applying = [], [], []
    for _ in range(repeats):
        started = time.process_time()
        payloads = [
            encode(before, after, 2, base_digest=base, target_digest=goal)
            for (before, after), (base, goal) in zip(buckets, digests, strict=True)
        ]
        encoding.append(len(old) / (time.process_time() - started) / 1e9)
        started = time.process_time()
        for payload, (before, _), (base, goal), start in zip(payloads, buckets, digests, starts, strict=True):
            assert payload is not None
            room = target[start : start + len(before)]
            apply(payload, before, room, base_digest=base, target_digest=goal)
        applying.append(1000 * (time.process_time() - started))
        sizes.append(100 * sum(len(payload or b"") for payload in payloads) / len(old))
    assert bytes(target) == bytes(new), "the delta does not lead to the new bytes"
    params = {"mib": mib, "dtype": "bfloat16", "changed": part, "bucket_mib": BUCKET_BYTES >> 20, "zstd_level": 1}
    params |= {"clock": "cpu time"}
    results = (
        ("weights.delta_percent", sizes, "%", "lower", {"id": "P10", "op": "<=", "value": 2.2}),
        ("weights.delta_encode_gb_s", encoding, "GB/s", "higher", {"id": "P10", "op": ">=", "value": 1.0}),
        ("weights.delta_apply_ms", applying, "ms", "lower", None),
    )
    return [
        record(name, statistics.median(values), unit, better, values, params, goal=goal, seed=seed)
        for name, values, unit, better, goal in results
    ]
