"""streamrl verify BUNDLE: whether a run was as its bundle says."""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from streamrl.commands import DIFFERS, EQUAL, NOT_COMPARABLE, status_of
from streamrl.config.load import load_run_config
from streamrl.errors import ConfigError, ControlError, WireError
from streamrl.messages.printable import printable, printable_lines, start_log
from streamrl.parent_watch import program
from streamrl.stream.archive import BundleError, require_bundle, sha256_of, unpack
from streamrl.stream.history import History
from streamrl.stream.records import LogError

if TYPE_CHECKING:  # torch is imported once the words and the file are known to be good
    from learner.replay.retraining import Findings, Retraining

LEVELS = ("hash", "reward", "step", "loss", "draw")
NOTIFY_S = 5.0
LISTED = 5
"""Disagreements of a level that are printed."""
EPILOG = """levels:
  hash    every byte against the manifest; log, versions, metrics, evaluations and summary against each other
  reward  the task's reward of every recorded answer, computed again
  step    random batches trained again, from the beginning or the nearest checkpoint on: every version on the way and
          all that training measured, bit by bit
  loss    tokens of random groups under the version that sampled them: recorded log-probs
  draw    the same tokens drawn again from their seeds (actors.engine=native)

exit status: 0 every level agrees, 1 one disagrees, 2 an error, 3 one could not be checked here"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a level: an exit status, and a sentence."""

    status: int
    text: str
    listed: Sequence[str] = ()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="streamrl verify", description="Check a run against its bundle (streamrl bundle RUN).",
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--level", default="hash,reward", metavar="NAMES", help="hash,reward by default; or all")
    parser.add_argument("--num", type=int, default=3, metavar="K", help="batches to train again (default: 3)")
    parser.add_argument("--seed", type=int, default=None, metavar="S", help="of what is chosen; by default a new one")
    parser.add_argument("--digest", default="", metavar="HEX", help="that `streamrl bundle` printed")
    parser.add_argument("words", nargs="*", default=[], metavar="key=value",
                        help="settings that replace the run's own, such as env.path=task.py where the file is here, "
                        "and code that it may use, such as actors.allow=[NAME]")
    given = parser.parse_intermixed_args()
    levels = LEVELS if given.level == "all" else tuple(given.level.split(","))
    if unknown := [name for name in levels if name not in LEVELS]:
        parser.error(f"--level {unknown[0]}: choose from {', '.join(LEVELS)}, all")
    if given.num < 1:
        parser.error(f"--num {given.num}: at least 1")
    start_log("verify", level="WARNING")
    require_bundle(given.bundle)
    with tempfile.TemporaryDirectory(prefix="streamrl-verify-") as folder:
        seed = secrets.randbits(32) if given.seed is None else given.seed
        return verify(given.bundle, Path(folder), levels, given.words, num=given.num, seed=seed,
                      digest=given.digest)


def verify(
    path: Path, folder: Path, levels: Sequence[str], words: Sequence[str], *, num: int, seed: int, digest: str = ""
) -> int:
    """Unpack a bundle into an empty folder, check it at each level, print what was found; the exit status.

    Raises ConfigError: a level would use code, secrets or addresses that the bundle names and the words do not.
    """
    try:
        manifest, found = unpack(path, folder)
    except BundleError as error:
        return _print_outcome("hash", Outcome(DIFFERS, str(error)))
    print(printable(f"{path}: run {manifest.get('run_id')}, sha256 of its manifest {found}"), flush=True)
    if digest and digest != found:
        return _print_outcome("hash", Outcome(DIFFERS, f"its manifest has not the digest that was given, {digest}"))
    statuses = [_print_outcome("hash", _hash(folder, manifest))] if "hash" in levels else []
    if max(statuses, default=EQUAL) == DIFFERS:
        print("the other levels are not checked: they would be about records that contradict each other")
        return DIFFERS
    if {*levels} - {"hash"}:
        words = [*_words(folder, words, manifest), *words]
        load_run_config(folder, words)
    if "reward" in levels:
        statuses.append(_print_outcome("reward", _rewards(folder, words)))
    if {"step", "loss", "draw"} & set(levels):
        statuses += _trained_again(folder, levels, words, num=num, seed=seed)
    return next((one for one in (DIFFERS, NOT_COMPARABLE) if one in statuses), EQUAL)


def _print_outcome(level: str, outcome: Outcome) -> int:
    said = {EQUAL: "agrees", DIFFERS: "DISAGREES", NOT_COMPARABLE: "not checked"}[outcome.status]
    print(f"{level:<8}{said}: {printable_lines(outcome.text)}")
    for line in outcome.listed[:LISTED]:
        print(f"          {printable_lines(line)}")
    if len(outcome.listed) > LISTED:
        print(f"          and {len(outcome.listed) - LISTED} more")
    sys.stdout.flush()
    return outcome.status


def _hash(folder: Path, manifest: dict[str, Any]) -> Outcome:
    from learner.replay.consistency import compare_records

    try:
        found = compare_records(folder)
    except (LogError, WireError) as error:
        return Outcome(DIFFERS, str(error))
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:  # edited
        return Outcome(DIFFERS, f"a record is not as streamrl writes it ({type(error).__name__}: {error})")
    did = (
        f"{len(manifest['files'])} files, {found.num_versions} versions, {found.num_rewards} trajectories, "
        f"{found.num_rows} rows of metrics, {found.num_evaluations} evaluations"
    )
    if found.disagreements:
        return Outcome(DIFFERS, f"records contradict each other ({did})", found.disagreements)
    return Outcome(EQUAL, f"{did}; what only training can tell is for step, the report's text is not read")


def _words(folder: Path, words: Sequence[str], manifest: dict[str, Any]) -> list[str]:
    """Settings for what is elsewhere here. Raises ControlError: a file of the task is missing, or is another one."""
    made = []
    if (folder / "start_model").is_dir() and not any(word.startswith("policy.model_path=") for word in words):
        made += [f"policy.model_path={folder / 'start_model'}", "policy.tokenizer_path=null"]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    inputs = manifest.get("inputs", {})
    for setting, entry in inputs.items() if isinstance(inputs, dict) else ():
        if not isinstance(entry, dict) or not {type(entry.get(key)) for key in ("path", "sha256")} <= {str}:
            raise ControlError(f"the manifest has no file and digest for {setting!r}: take the bundle as published")
        path = Path(given.get(setting, entry["path"]))
        if not path.is_file():
            raise ControlError(
                f"{path} is not here, of which the run read {setting}: a bundle holds no code and no data set. Get "
                f"the file with sha256 {entry['sha256'] or 'unknown'}, and add {setting}=FILE"
            )
        if entry["sha256"] and sha256_of(path) != entry["sha256"]:
            raise ControlError(
                f"{path} is not the file that the run read ({setting}, sha256 {entry['sha256']}): add {setting}=FILE "
                "with the right one"
            )
    return made


def _rewards(folder: Path, words: Sequence[str]) -> Outcome:
    """The environment, played again on the recorded answers by `streamrl replay --rewards`, a process of its own."""
    try:
        History.read(folder)
    except LogError as error:
        return Outcome(DIFFERS, str(error))
    notify, equal = _Progress("rewards"), 0
    differing: list[str] = []
    unchecked: list[str] = []
    command = [*program("actors.recorded"), str(folder), "--rewards", "--json", *words]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as playing:
        assert playing.stdout is not None
        for line in playing.stdout:
            batch = json.loads(line)
            equal += batch["num_equal"]
            differing += batch["differing"]
            unchecked += batch["unchecked"]
            notify(f"{equal + len(differing) + len(unchecked)}")
    num, status = equal + len(differing), DIFFERS if differing else NOT_COMPARABLE if unchecked else EQUAL
    if playing.returncode != status:
        raise ControlError(f"the rewards could not be computed again (exit status {playing.returncode}): see above")
    text = {
        EQUAL: f"{num} rewards are those that the task gives; `loss` checks who wrote the answers",
        DIFFERS: f"{len(differing)} of {num} rewards are not the task's",
        NOT_COMPARABLE: f"{len(unchecked)} of {num + len(unchecked)} rewards, the others agree",
    }
    return Outcome(status, text[status], differing or unchecked)


def _trained_again(folder: Path, levels: Sequence[str], words: list[str], *, num: int, seed: int) -> list[int]:
    """The levels that need weights share one replay."""
    from learner.replay.retraining import Retraining

    again = Retraining(folder, words, _Progress("replay"))
    try:
        again.check(num, Random(seed), steps="step" in levels, answers=bool({"loss", "draw"} & set(levels)))
    except (LogError, WireError) as error:
        return [_print_outcome("step", Outcome(DIFFERS, f"the log cannot be trained again: {error}"))]
    statuses = []
    if "step" in levels:
        statuses.append(_print_outcome("step", _step(again, seed)))
    if "loss" in levels:
        text = f"{again.loss.num} tokens, the largest mean difference of a group is {again.loss.largest:.2g} nats"
        statuses.append(_print_outcome("loss", _outcome(again.loss, f"{text} (--seed {seed})")))
    if "draw" in levels:
        statuses.append(_print_outcome("draw", _draw(again, seed)))
    return statuses


def _step(again: Retraining, seed: int) -> Outcome:
    which = f"the batches for versions {', '.join(map(str, again.batches))} (--seed {seed})"
    if again.step.disagreements and again.other:
        return Outcome(
            NOT_COMPARABLE, f"weights differ, but so does this machine ({which})",
            [*again.other, *again.step.disagreements],
        )
    return _outcome(again.step, f"{again.step.num} versions bit by bit, up to {which}")


def _draw(again: Retraining, seed: int) -> Outcome:
    if not again.draws_by_seed:
        return Outcome(NOT_COMPARABLE, "this engine's draws do not follow from seeds: loss looks at the same tokens")
    return _outcome(again.draw, f"{again.draw.num} tokens of first turns (--seed {seed})")


def _outcome(found: Findings, text: str) -> Outcome:
    if found.disagreements:
        return Outcome(DIFFERS, text, found.disagreements)
    if not found.num:
        return Outcome(NOT_COMPARABLE, f"nothing was found to check: {text}")
    return Outcome(EQUAL, text)


class _Progress:
    """A line on standard error now and then."""

    def __init__(self, what: str) -> None:
        self._what, self._at = what, time.monotonic() + NOTIFY_S

    def __call__(self, text: str) -> None:
        if time.monotonic() >= self._at:
            self._at = time.monotonic() + NOTIFY_S
            print(f"  {self._what}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(status_of(main))
