"""`streamrl stream`: what a run's log holds, one line per record; or its answers in a file for other tools."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from streamrl.commands import parser_of, say
from streamrl.errors import ControlError
from streamrl.messages.codec import unpack_ids
from streamrl.messages.printable import printable
from streamrl.named_code import is_own
from streamrl.run_dirs import find_run_dir, has_learner
from streamrl.stream.export import Text, export, run_text
from streamrl.stream.history import OUTCOMES, LoggedGroup, Wanted, rows
from streamrl.stream.records import (
    BatchCut,
    CheckpointSaved,
    Evaluated,
    GroupArrived,
    GroupMoved,
    Record,
    RunStarted,
    RunStopped,
    StepTaken,
    VersionPublished,
)
from streamrl.stream.segments import ANYWHERE, read_records
from streamrl.stream.writer import repair
from streamrl.verbs.runs import find_run

KINDS: dict[str, type] = {
    "run": RunStarted, "group": LoggedGroup, "moved": GroupMoved, "batch": BatchCut, "step": StepTaken,
    "version": VersionPublished, "evaluation": Evaluated, "checkpoint": CheckpointSaved, "stop": RunStopped,
}
STATES = {0: "ready", 1: "leased", 2: "held", 5: "dropped"}
TELL_EVERY = 10_000
NOTHING = 1
"""The exit status if no record matches."""
MAX_NAMED = 8


def stream(words: list[str]) -> int:
    """Print the records that are asked for, or export the answers of the groups."""
    given = _parser().parse_args(words)
    run_dir = given.run
    if given.repair:
        return _repair(run_dir)
    wanted = Wanted(
        versions=_range("--version", given.version, int), actor=given.actor, outcome=given.outcome,
        rewards=_range("--reward", given.reward, float),
    )
    of_groups = bool(given.actor or given.outcome or given.reward)
    kinds = tuple(KINDS[one] for one in given.kind) or tuple(
        cls for name, cls in KINDS.items() if (name == "group" if of_groups else name != "moved")
    )
    if given.export:
        return _export(run_dir, wanted, Path(given.export), _range("--answer-reward", given.answer_reward, float))
    if given.answer_reward:
        raise ControlError("--answer-reward chooses among the answers of an export: give --export FILE.parquet too")
    text, found = _decoder(run_dir) if given.text else None, False
    for sequence, record in rows(run_dir, wanted):
        if isinstance(record, kinds) and _within(record, wanted.versions):
            found = True
            print(printable(f"{sequence:8d}  {line(record)}"))
            if text is not None and isinstance(record, LoggedGroup):
                say(_texts(record, text))
    if not found:
        say(_what_there_is(run_dir, kinds), error=True)
    return 0 if found else NOTHING


def _decoder(run_dir: Path) -> Text:
    """Raises ControlError: no tokenizer is at hand."""
    if (text := run_text(run_dir)) is None:
        raise ControlError(f"--text: no tokenizer of {run_dir} was found (assets.msgpack): copy the whole directory")
    return text


def _texts(one: LoggedGroup, text: Text) -> str:
    """The prompt of a group, and each answer."""
    members = one.members
    blocks = [("prompt", one.prompt_ids(members[0]))] if members else []
    blocks += [(f"answer {member.index}, reward {member.reward:.4g}", member.token_ids) for member in members]
    lines = []
    for name, ids in blocks:
        lines += [f"          --- {name}", *(f"          {row}" for row in text(unpack_ids(ids).tolist()).splitlines())]
    return "\n".join(lines)


def _what_there_is(run_dir: Path, kinds: tuple[type, ...]) -> str:
    """The sentence where no record matches."""
    if LoggedGroup not in kinds:
        return f"no record of {run_dir} is of that kind and version: without options it prints all"
    groups = [one for _, one in rows(run_dir, Wanted()) if isinstance(one, LoggedGroup)]
    actors = sorted({one.arrived.actor_id for one in groups})
    rewards = [one.reward for one in groups if one.reward is not None]
    between = f"; their mean rewards lie between {min(rewards):.4g} and {max(rewards):.4g}" if rewards else ""
    names = ", ".join(actors[:MAX_NAMED]) + (", ..." if len(actors) > MAX_NAMED else "")
    return f"0 of {len(groups)} groups match: their actors are {names or 'none'}{between}"


def _repair(run_dir: Path) -> int:
    """Cut a damaged log, and say what is left. Raises ControlError: somebody may write it."""
    if find_run(str(run_dir)).has_hub or has_learner(run_dir):
        raise ControlError(f"{run_dir} is running, and its log is written: stop it first, with streamrl stop {run_dir}")
    done = repair(run_dir)
    if done is None:
        print(f"the log of {run_dir} has no damage: nothing was changed")
        return 0
    print(printable(f"it was damaged: {done.why}"))
    for path in done.kept:
        print(printable(f"kept: {path}"))
    print(
        f"{done.last} is its last record now. streamrl resume {run_dir} goes on from the newest checkpoint and the "
        "batches after it in the log; the removed part is no longer read"
    )
    return 0


def line(record: Record | LoggedGroup) -> str:
    """One record in a line."""
    match record:
        case LoggedGroup(arrived=one):
            return f"group       {one.group_id} of {one.actor_id}, prompt {one.prompt_index}: {_fate(record)}"
        case RunStarted(start=start, run_id=run_id, version=version, learner_epoch=epoch):
            return f"run         {run_id}, start {start}, epoch {epoch}, from version {version} on"
        case GroupMoved(group_id=group_id, state=state, reason=reason, actor_id=actor):
            return f"moved       {group_id} {STATES.get(state, state)} {actor or reason}".rstrip()
        case BatchCut(version=version, plan=plan):
            groups = len({row.group_id for row in plan})
            return f"batch       for version {version}: {groups} groups, {len(plan)} answers"
        case StepTaken(skipped=True, reason=reason):
            return f"step        skipped: {reason}"
        case StepTaken(version=version, grad_norm=norm, seconds=seconds, reason=reason):
            partly = f", {reason}" if reason else ""
            return f"step        to version {version}: gradient norm {norm:.4g}, {seconds:.2f} s{partly}"
        case VersionPublished(manifest=manifest):
            ref = manifest.ref
            return f"version     {ref.version} of epoch {ref.learner_epoch}, root digest {manifest.root.hex()}"
        case Evaluated(version=version, dataset=dataset, score=score, prompt_scores=scores):
            named = f"{dataset} " if dataset else ""
            return f"evaluation  {named}of version {version}: {score:.4g}, {len(scores)} prompts"
        case CheckpointSaved(version=version):
            return f"checkpoint  of version {version}"
        case RunStopped(reason=reason):
            return f"stop        {reason}"
        case _:
            return type(record).__name__


def _fate(one: LoggedGroup) -> str:
    outcome = one.outcome + (f" ({one.reason})" if one.reason else "")
    if one.reward is None or one.versions is None:
        return outcome if one.group is not None else f"{outcome}, not kept"
    trained = f", trained at {one.trained_at}" if one.trained_at >= 0 else ""
    first, last = one.versions
    span = f"version {first}" if first == last else f"versions {first}..{last}"
    return f"{outcome}, {len(one.members)} answers, mean reward {one.reward:.4g}, {span}{trained}"


def _within(record: Record | LoggedGroup, versions: tuple[int, int] | None) -> bool:
    """Whether a record is of one of these versions; of groups that is known already."""
    if versions is None or isinstance(record, LoggedGroup):
        return True
    version = record.manifest.ref.version if isinstance(record, VersionPublished) else getattr(record, "version", None)
    return version is not None and versions[0] <= version <= versions[1]


def _export(run_dir: Path, wanted: Wanted, out: Path, rewards: tuple[float, float] | None) -> int:
    text = run_text(run_dir)
    if text is None:
        print("no tokenizer was found: printing token ids without texts", file=sys.stderr)
    start = next((one for _, one in read_records(run_dir, complete_from=ANYWHERE) if isinstance(one, RunStarted)), None)
    num = export(
        _selected(run_dir, wanted), out, run_id=start.run_id if start else run_dir.resolve().name,
        model=_model_of(start), text=text, rewards=rewards or (-math.inf, math.inf), known=_known_answers(run_dir),
    )
    if not num:
        print("no answers match; nothing written", file=sys.stderr)
        return NOTHING
    print(f"{num} answers in {out}")
    return 0


def _known_answers(run_dir: Path) -> dict[int, str | None]:
    """The own answers of the records, by their numbers, from a process that makes the task; it says why it cannot."""
    if not is_own(run_dir / "config.yaml"):  # somebody else's could name any file of this machine
        return {}
    arrived = (one for _, one in read_records(run_dir, complete_from=ANYWHERE) if isinstance(one, GroupArrived))
    numbers = sorted({one.prompt_index for one in arrived})
    command = [sys.executable, "-m", "envs.expected", str(run_dir)]
    done = subprocess.run(command, input=json.dumps(numbers), stdout=subprocess.PIPE, text=True)
    return {} if done.returncode else dict(zip(numbers, json.loads(done.stdout), strict=True))


def _model_of(start: RunStarted | None) -> str:
    """The name of the model that the run trained, as far as its log tells."""
    try:
        named = json.loads(start.settings)["policy"]["model_path"] if start is not None else None
    except (ValueError, KeyError, TypeError, RecursionError):
        named = None
    return Path(named).name if isinstance(named, str) and named else "tiny"


def _selected(run_dir: Path, wanted: Wanted) -> Iterator[LoggedGroup]:
    """The wanted groups with an answer; tells now and then how far it is."""
    num = 0
    for sequence, one in rows(run_dir, wanted):
        if sequence % TELL_EVERY == 0:
            print(f"record {sequence}, {num} groups", file=sys.stderr, flush=True)
        if isinstance(one, LoggedGroup) and one.members:
            num += 1
            yield one


def _range(option: str, word: str | None, kind: type) -> tuple | None:
    """A..B, A.., ..B or one number."""
    if word is None:
        return None
    first, dots, last = word.partition("..")
    try:
        low = kind(first) if first else -math.inf
        high = (kind(last) if last else math.inf) if dots else low
        if (first or last) and low <= high:
            return low, high
    except ValueError:
        pass
    raise ControlError(f"{option} {word}: give two numbers, the smaller first, as 20..40, or one; 20.. has no end")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "stream", "Print what a run's log holds, one line per record, or export the answers of its groups.",
        find=find_run_dir, usage="streamrl stream RUN [option ...]",
        epilog="An option on groups (--actor, --outcome, --reward) leaves out all other records. The exit status is 1 "
        "if no record matches.",
    )
    parser.add_argument("--version", metavar="A..B", help="of these versions; of groups: that sampled a token")
    parser.add_argument("--actor", metavar="ID", help="groups of this actor")
    parser.add_argument("--outcome", choices=OUTCOMES, help="groups that ended so; stale ones were refused")
    parser.add_argument("--reward", metavar="MIN..MAX", help="groups with a mean reward between these, or of "
                        "just this one; --reward=-1..0")
    parser.add_argument("--text", action="store_true", help="print the prompt and the answers of each group, too")
    parser.add_argument(
        "--kind", action="append", default=[], choices=KINDS, metavar="KIND",
        help=f"only this kind, may be given again: {', '.join(KINDS)}; all but moved if none is given",
    )
    parser.add_argument(
        "--export", metavar="FILE", help="write the answers: FILE.parquet, FILE.json (a list of ATIF-v1.7 "
        "trajectories), or a folder that gets a file for each trajectory",
    )
    parser.add_argument("--answer-reward", metavar="MIN..MAX", help="export only answers whose own reward lies between "
                        "these; 0.9.. has no end")
    parser.add_argument(
        "--repair", action="store_true", help="cut a damaged log at the damage; the removed part stays next to it, and "
        "is no longer read",
    )
    return parser

