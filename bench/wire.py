"""How many bytes does a token cost on the wire, and how long do encoding, decoding and checking take?

One trajectory of N tokens as a GROUP frame, preamble and digest included, next to the same contents as lists of
numbers. Both are decoded back and compared before any clock starts.

Run: python -m bench.wire [--quick]
"""

from __future__ import annotations

import sys
import timeit
from typing import Any

import msgspec
import numpy as np

from bench.record import exit_status, record, shared_arguments
from streamrl.messages import TO_HUB, Group, Limits, Member, Sampling, Span, Turn
from streamrl.messages.codec import Decoder, encode, pack_ids, pack_logprobs, unpack_ids
from streamrl.messages.validate import check_group

SIZES = (1_000, 4_096, 32_768)


class ListMember(msgspec.Struct, array_like=True):
    """The obvious form: one MessagePack number per token and field."""

    token_ids: list[int]
    logprobs: list[float]
    mask: list[bool]
    versions: list[int]


def contents(num_tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 150_000, num_tokens, dtype=np.int32), -rng.exponential(0.7, num_tokens).astype(np.float32)


def make_group(num_tokens: int, members: int, seed: int) -> Group:
    made = []
    for index in range(members):
        ids, logprobs = contents(num_tokens, seed + index)
        half = num_tokens // 2
        made.append(Member(
            index=index, status=0, prompt_ids=pack_ids(ids[:16]) if index == 0 else b"", token_ids=pack_ids(ids),
            logprobs=pack_logprobs(logprobs), mask=((0, num_tokens),),
            versions=(Span(1, 7, 0, half), Span(1, 8, half, num_tokens)), turns=(Turn(0, num_tokens, 1.0),),
            reward=1.0,
            scores={"score": 1.0}, finish="stop",
        ))
    return Group(1 << 50, 9, 12, 0, 0, 0, "", Sampling(), tuple(made), {"generate_s": 0.5})


def microseconds(call: Any, number: int, repeats: int) -> list[float]:
    return [seconds / number * 1e6 for seconds in timeit.repeat(call, number=number, repeat=repeats)]


def measure(num_tokens: int, members: int, repeats: int, seed: int) -> list[dict[str, Any]]:
    group = make_group(num_tokens, members, seed)
    frame = bytes(encode(group))
    decoder = Decoder(TO_HUB)
    assert decoder.decode(frame) == group
    number = max(10, 2_000_000 // (num_tokens * members))
    params = {"num_tokens": num_tokens, "group_size": members}
    label = f"t{num_tokens}.g{members}"
    per_token = len(frame) / (num_tokens * members)
    goal = {"id": "P1", "op": "<=", "value": 8.3} if num_tokens == 1_000 else None
    lines = [record(f"wire.bytes_per_token.{label}", per_token, "B/token", "lower", [per_token], params, goal=goal)]
    encoding = microseconds(lambda: encode(group), number, repeats)
    decoding = microseconds(lambda: decoder.decode(frame), number, repeats)
    both = [a + b for a, b in zip(encoding, decoding, strict=True)]
    lists = list_form(group)
    value = sorted(both)[len(both) // 2]
    goal = {"id": "P2", "op": "<=", "value": 5.0} if label == "t1000.g1" else None
    lines.append(record(
        f"wire.encode_decode_us.{label}", value, "us", "lower", both, params, goal=goal,
        baseline=measure_lists(lists, number=max(5, number // 20), repeats=repeats),
    ))
    limits = Limits(vocab_size=150_000)
    checking = microseconds(lambda: check_group(group, limits, range(members)), max(5, number // 4), repeats)
    lines.append(record(
        f"wire.check_us.{label}", sorted(checking)[len(checking) // 2], "us", "lower", checking, params,
    ))
    return lines


def list_form(group: Group) -> list[ListMember]:
    out = []
    for member in group.members:
        ids = unpack_ids(member.token_ids)
        versions = [span.version for span in member.versions for _ in range(span.start, span.end)]
        logprobs = np.frombuffer(member.logprobs, "<f4").tolist()
        out.append(ListMember(ids.tolist(), logprobs, [True] * len(ids), versions))
    return out


def measure_lists(members: list[ListMember], *, number: int, repeats: int) -> dict[str, Any]:
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[ListMember])
    data = encoder.encode(members)
    assert decoder.decode(data) == members
    samples = [
        a + b for a, b in zip(
            microseconds(lambda: encoder.encode(members), number, repeats),
            microseconds(lambda: decoder.decode(data), number, repeats), strict=True,
        )
    ]
    return {"name": "MessagePack lists, encode + decode", "value": sorted(samples)[len(samples) // 2], "unit": "us",
            "source": "this bench", "version": msgspec.__version__, "measured_here": True}


def main() -> int:
    arguments = shared_arguments(__doc__ or "").parse_args()
    sizes = SIZES[:1] if arguments.quick else SIZES
    lines = []
    for num_tokens in sizes:
        for members in (1, 16):
            lines += measure(num_tokens, members, arguments.repeats, arguments.seed)
    return exit_status(lines, arguments.check)


if __name__ == "__main__":
    sys.exit(main())
