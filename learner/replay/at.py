"""streamrl at RUN@N [--out DIR] [--without GROUPS]: the model that a run had at a version, rebuilt from its log."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from learner.replay.opened import OpenedRun, group_ids, join_ranks, notifier, open_run, require_groups
from learner.setup.trainer import save_policy
from streamrl.commands import say, status_of
from streamrl.errors import ControlError
from streamrl.messages.printable import start_log
from streamrl.metrics.files import read_object
from streamrl.run_dirs import find_run_dir
from streamrl.stream.history import History
from streamrl.stream.rebuilt import FOLDER, NOTE, cached, named_version, starts_of


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="streamrl at", description="Rebuild the model that a run had at a version, as a Hugging Face checkpoint.",
        epilog="It begins at the nearest checkpoint and trains the batches of the log from there on, which gives the "
        "same bits on a CPU in float32; it compares them with the digests in the log and says so.",
    )
    parser.add_argument("version", metavar="RUN@N", help="a version of a run, such as runs/quickstart-001@137 or @best")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"instead of RUN/{FOLDER}/N")
    parser.add_argument(
        "--without", type=group_ids, default=frozenset(), metavar="GROUP[,GROUP]",
        help="train without these groups; needs --out",
    )
    parser.add_argument("--list", action="store_true", help="name the versions of RUN that lie there, with their sizes")
    parser.add_argument(
        "allow", nargs="*", default=[], metavar="actors.allow=[NAME]", help="code that another user's run may use"
    )
    given = parser.parse_intermixed_args()
    if odd := [word for word in given.allow if not word.startswith("actors.allow=")]:
        parser.error(f"{odd[0]}: a version is rebuilt with the run's own settings; actors.allow= alone may be given")
    if given.list:
        return list_versions(given.version)
    start_log("at", level="WARNING")
    disable_progress_bar()
    return at(given.version, given.out, given.without, given.allow)


def at(
    name: str, out: Path | None = None, without: frozenset[int] = frozenset(), allow: Sequence[str] = ()
) -> int:
    """Rebuild a version and print where it lies; the exit status."""
    found = named_version(name)
    if found is None:
        raise ControlError(f"{name}: give a run directory and a version, such as runs/quickstart-001@137")
    run_dir, version = found
    if out is not None and out.exists():
        raise ControlError(f"--out {out} exists: give a folder that does not")
    if out is None and (known := cached(run_dir, version)) is not None:
        say(f"{known}: {read_object(known / NOTE).get('compared')}")
        return 0
    if out is None and without:
        raise ControlError("--without makes another model than the run's: say with --out where it is to lie")
    join_ranks(run_dir, "learner.replay.at", allow)
    folder = out or run_dir / FOLDER / str(version)
    run = open_run(run_dir, allow, at_most=_begin_before(run_dir, version, without))
    compared = rebuild(run, version, folder, without)
    if run.ranks.rank == 0:
        say(f"{folder}: {compared}")
    return 0


def _begin_before(run_dir: Path, version: int, groups: frozenset[int]) -> int:
    """The newest version from which all these groups are still to be trained, at most `version`."""
    batches = History.read(run_dir).batches if groups else []
    return min([version, *(one.cut.version for one in batches if any(row.group_id in groups for row in one.cut.plan))])


def list_versions(name: str) -> int:
    """Print the versions of a run that were rebuilt, and what they take on the disk; the exit status."""
    found = (find_run_dir(name.partition("@")[0]) / FOLDER).glob("*")
    folders = sorted((one for one in found if one.name.isdigit()), key=lambda one: int(one.name))
    for folder in folders:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        say(f"{folder}: {size / 1e6:,.1f} MB, {read_object(folder / NOTE).get('compared', 'not whole')}")
    say("each can be removed, and is rebuilt when it is asked for" if folders else f"{name} has no rebuilt version")
    return 0


def rebuild(run: OpenedRun, version: int, folder: Path, without: frozenset[int] = frozenset()) -> str:
    """Write the model of a version to a folder; how it compares with the run's, "equal" or a sentence. Collective.

    Raises ControlError: the log does not lead to it.
    """
    notify = notifier(run.ranks)
    starts, batches, steps = starts_of(run.run_dir), run.batches(upto=version), run.trainer.settings.steps_per_batch
    reached = max((one.cut.version + steps for one in run.batches()), default=run.version)
    if version % steps or version > reached:
        every = f", in steps of {steps}, the optimizer steps of a batch" if steps > 1 else ""
        raise ControlError(f"{run.run_dir} has no version {version}: its log leads to version {reached}{every}")
    require_groups(batches, without)
    notify(f"{run.run_dir}: {len(batches)} batches from version {run.version} to {version}")
    for number, one in enumerate(run.train(upto=version, compare=False, without=without), start=1):
        notify(f"  batch {number} of {len(batches)}  version {one.version}")
    if run.version != version:
        raise ControlError(f"the log of {run.run_dir} leads to version {run.version} only, not to {version}")
    compared = f"trained without groups {', '.join(map(str, sorted(without)))}" if without else _compared(run)
    note = {"version": version, "starts": starts, "compared": compared}
    _write(run, folder, note)
    return compared


def _write(run: OpenedRun, folder: Path, note: dict[str, Any]) -> None:
    """The model of now, with the adapter if it trains one, in one step; a collective call."""
    draft = folder.parent / f".{folder.name}.tmp-{secrets.token_hex(4)}"
    try:
        model = save_policy(run.config, run.trainer, run.model_dir, draft / "model")
        if run.ranks.rank:
            return
        (model / NOTE).write_text(json.dumps(note) + "\n")
        shutil.rmtree(folder, ignore_errors=True)  # of another start of the run
        os.replace(model, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _compared(run: OpenedRun) -> str:
    difference = run.difference()
    if difference is None:
        return "not compared: the run did not publish this version"
    if not difference:
        return "equal"
    other = run.other_environment()
    return f"close to the run's weights, not equal: {difference}" + (f" ({'; '.join(other)})" if other else "")


if __name__ == "__main__":
    sys.exit(status_of(main))
