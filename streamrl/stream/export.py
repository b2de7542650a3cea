"""The answers of a log for other tools: a table in Parquet, trajectories in ATIF (Agent Trajectory Interchange Format).

Texts are decoded where the run's tokenizer is at hand; token ids, log-probs and versions are always exact.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import msgspec

from streamrl.errors import ControlError, install_extra
from streamrl.messages import Member, MemberStatus
from streamrl.messages.codec import unpack_ids, unpack_logprobs
from streamrl.stream.history import LoggedGroup
from streamrl.version import __version__

ATIF = "ATIF-v1.7"
MAX_LINE = 60
"""Characters of a prompt's line in a table."""
_ROLES = ("system", "user", "assistant", "tool", "developer")
ROWS = 1024
"""Answers of one row group, which are in memory at once."""
_CONFIGS = ("generation_config.json", "config.json")
Text = Callable[[Sequence[int]], str]


def export(
    groups: Iterable[LoggedGroup],
    out: Path,
    *,
    run_id: str,
    model: str,
    text: Text | None,
    rewards: tuple[float, float] = (-math.inf, math.inf),
    known: Mapping[int, str | None] = {},
) -> int:
    """Write the answers of the groups, and return their number; without one nothing is written.

    Args:
        out: FILE.parquet, FILE.json (a list of trajectories), or a folder that gets a file for each trajectory.
        text: decodes token ids; None where there is no tokenizer.
        rewards: the smallest and the largest reward of an answer.
        known: the own answers of records, by their numbers.
    Raises:
        ControlError: another kind of file, or a library is missing.
    """
    if out.suffix not in (".parquet", ".json", ""):
        raise ControlError(f"--export {out}: give FILE.parquet, FILE.json, or a folder for one file a trajectory")
    low, high = rewards
    found = ((group, member) for group in groups for member in group.members if low <= member.reward <= high)
    if (first := next(found, None)) is None:
        return 0
    answers = chain([first], found)
    if out.suffix == ".parquet":
        return _parquet((row(group, member, text, known) for group, member in answers), out)
    documents = (
        trajectory(group, member, run_id=run_id, model=model, text=text, known=known) for group, member in answers
    )
    return _list(documents, out) if out.suffix else _files(documents, out)


def row(group: LoggedGroup, member: Member, text: Text | None, known: Mapping[int, str | None] = {}) -> dict[str, Any]:
    """One answer as a row of a table."""
    prompt, tokens = _ids(group.prompt_ids(member)), _ids(member.token_ids)
    versions = [-1] * len(tokens)
    for span in member.versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    arrived = group.arrived
    return {
        "sequence": group.sequence, "group_id": arrived.group_id, "member": member.index, "actor": arrived.actor_id,
        "prompt_index": arrived.prompt_index, "expected": known.get(arrived.prompt_index),
        "finished_at": group.finished_at, "outcome": group.outcome, "reason": group.reason,
        "trained_at": group.trained_at, "reward": member.reward, "scores": json.dumps(member.scores),
        "finish": member.finish, "truncated": member.status == MemberStatus.TRUNCATED,
        "temperature": (member.sampling or group.group.sampling).temperature if group.group else 0.0,
        "num_turns": len(member.turns),
        "turn_rewards": [turn.reward for turn in member.turns], "turn_finishes": [one.finish for one in member.turns],
        "num_sequences": 1 + len(member.sequences), "agents": list(member.agents),
        "prompt": text(prompt) if text else None, "answer": _said(text, tokens) if text else None,
        "prompt_ids": prompt, "token_ids": tokens,
        "logprobs": unpack_logprobs(member.logprobs).tolist(), "versions": versions,
    }


def trajectory(
    group: LoggedGroup, member: Member, *, run_id: str, model: str, text: Text | None,
    known: Mapping[int, str | None],
) -> dict[str, Any]:
    """One answer as a document of ATIF: the prompt, and every turn with what the environment said after it."""
    prompt, tokens = _ids(group.prompt_ids(member)), _ids(member.token_ids)
    said = text or (lambda ids: "")
    logprobs, arrived = unpack_logprobs(member.logprobs).tolist(), group.arrived
    steps: list[dict[str, Any]] = [{"step_id": 1, "source": "user", "message": said(prompt)}]
    num_read = 0
    for turn, (start, end, following) in zip(member.turns, _turns(member, len(tokens)), strict=True):
        read = _context(member, prompt, tokens, start)
        num_read += len(read)
        step: dict[str, Any] = {
            "step_id": len(steps) + 1, "source": "agent", "message": _said(said, tokens[start:end]),
            "metrics": {
                "prompt_tokens": len(read), "completion_tokens": end - start, "prompt_token_ids": read,
                "completion_token_ids": tokens[start:end], "logprobs": logprobs[start:end],
            },
            "extra": {"reward": turn.reward, "score": turn.score, "finish": turn.finish},
        }
        if following > end:
            step["observation"] = {"results": [{"content": said(tokens[end:following])}]}
        steps.append(step)
    return {
        "schema_version": ATIF, "session_id": run_id,
        "trajectory_id": f"{run_id}-{group.sequence}-{member.index}",
        "agent": {"name": "streamrl", "version": __version__, "model_name": model}, "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": num_read, "total_completion_tokens": sum(e - s for s, e in member.mask),
            "total_steps": len(steps),
        },
        "extra": {
            "reward": member.reward, "scores": dict(member.scores), "finish": member.finish,
            "group_id": arrived.group_id, "member": member.index, "actor": arrived.actor_id,
            "prompt_index": arrived.prompt_index, "expected": known.get(arrived.prompt_index),
            "finished_at": group.finished_at, "outcome": group.outcome, "trained_at": group.trained_at,
            "versions": [[span.version, span.start, span.end] for span in member.versions],
        },
    }


def run_text(run_dir: Path, *, special: bool = True) -> Text | None:
    """Decoder by the first tokenizer of the run that can be read; None if none can.

    Args:
        special: special tokens are shown.
    """
    from tokenizers import Tokenizer  # transformers brings it, without torch

    files = _model_files(run_dir)
    for name, data in files:
        if name == "tokenizer.json":
            try:
                return TokenText(Tokenizer.from_buffer(data), _ends(files), special=special)
            except Exception:  # what that library raises has no class of its own
                continue
    return None


class TokenText:
    """Decodes token ids.

    Attributes:
        ends: tokens that may end an answer, which are no part of its text.
    """

    def __init__(self, tokenizer: Any, ends: Iterable[int] = (), *, special: bool = True) -> None:
        self._tokenizer, self._special = tokenizer, special
        known = (token for token, kind in tokenizer.get_added_tokens_decoder().items() if kind.special)
        self.ends = frozenset([*ends, *known])

    def __call__(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=not self._special)


def _said(text: Text, tokens: Sequence[int]) -> str:
    """The text of a turn of the model, without the token that ends it: who trains on it writes that token again."""
    ended = tokens and tokens[-1] in getattr(text, "ends", ())
    return text(tokens[:-1] if ended else tokens)


def _model_files(run_dir: Path) -> list[tuple[str, bytes]]:
    """Name and content of the tokenizers and configurations that the run has."""
    found: list[tuple[str, bytes]] = []
    if (assets := run_dir / "assets.msgpack").exists():
        with suppress(msgspec.MsgspecError):
            found += msgspec.msgpack.decode(assets.read_bytes(), type=dict[str, bytes]).items()
    for name in ("tokenizer.json", *_CONFIGS):
        if (path := run_dir / "model" / name).exists():
            found.append((name, path.read_bytes()))
    return found


def _ends(files: Iterable[tuple[str, bytes]]) -> Iterator[int]:
    """The tokens that the model's configurations name as ends."""
    for name, data in files:
        if name in _CONFIGS:
            with suppress(ValueError):
                found = json.loads(data).get("eos_token_id")
                yield from (one for one in (found if isinstance(found, list) else [found]) if isinstance(one, int))


def last_line(prompt: str) -> str:
    """The last line of a prompt that says something: what a system message says is the same for all."""
    lines = [line.strip() for line in prompt.splitlines()]
    said = [line for line in lines if line and line not in _ROLES]
    line = said[-1] if said else ""
    return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}..."


def _ids(data: bytes) -> list[int]:
    return unpack_ids(data).tolist()


def _turns(member: Member, num_tokens: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, where the next turn's input ends in it) of each turn."""
    starts = [turn.start for turn in member.turns] + [num_tokens]
    for turn, (_, following) in zip(member.turns, pairwise(starts), strict=True):
        yield turn.start, turn.end, following


def _context(member: Member, prompt: list[int], tokens: list[int], start: int) -> list[int]:
    """The tokens that the model read before `start`: of its own sequence, where the history was rewritten."""
    for one in reversed(member.sequences):
        if one.start <= start:
            return [*_ids(one.prompt_ids), *tokens[one.start : start]]
    return [*prompt, *tokens[:start]]


def _parquet(answers: Iterable[dict[str, Any]], out: Path) -> int:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise ControlError(
            f"Parquet needs {error.name}; install it with {install_extra('data')}, or "
            "export FILE.json, which needs nothing"
        ) from error
    integers, numbers, words = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.string()
    kinds = {
        "sequence": pa.int64(), "group_id": pa.int64(), "member": pa.int32(), "actor": words,
        "prompt_index": pa.int64(), "expected": words, "finished_at": pa.float64(), "outcome": words, "reason": words,
        "trained_at": pa.int64(),
        "reward": pa.float64(), "scores": words, "finish": words, "truncated": pa.bool_(), "temperature": pa.float64(),
        "num_turns": pa.int32(), "turn_rewards": pa.list_(pa.float64()), "turn_finishes": pa.list_(words),
        "num_sequences": pa.int32(), "agents": pa.list_(words),
        "prompt": words, "answer": words, "prompt_ids": integers,
        "token_ids": integers, "logprobs": numbers, "versions": pa.list_(pa.int64()),
    }
    schema, num = pa.schema(list(kinds.items())), 0
    with _draft(out) as draft, pq.ParquetWriter(draft, schema) as writer:
        left = iter(answers)
        while some := list(islice(left, ROWS)):
            writer.write_table(pa.Table.from_pylist(some, schema=schema))
            num += len(some)
    return num


def _list(documents: Iterable[dict[str, Any]], out: Path) -> int:
    num = 0
    with _draft(out) as draft, draft.open("w", encoding="utf-8") as file:
        for num, one in enumerate(documents, start=1):
            file.write(f"{'[' if num == 1 else ','}\n{json.dumps(one)}")
        file.write("\n]\n")
    return num


def _files(documents: Iterable[dict[str, Any]], folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    num = 0
    for one in documents:
        name = re.sub(r"[^\w.-]", "-", one["trajectory_id"])
        (folder / f"{name}.json").write_text(json.dumps(one) + "\n")
        num += 1
    return num


@contextmanager
def _draft(out: Path) -> Iterator[Path]:
    """A file that becomes `out` if the block ends well, and else is gone."""
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    try:
        yield draft
        os.replace(draft, out)
    finally:
        draft.unlink(missing_ok=True)
