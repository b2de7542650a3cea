"""streamrl replay RUN [--from N] [--to N] [key=value ...]: train the run's log again, and compare every version.

With --rewards it trains nothing, and is `actors.recorded`.
"""

from __future__ import annotations

import sys
from collections import Counter

from learner.replay.opened import OpenedRun, group_ids, join_ranks, notifier, open_run, require_groups
from streamrl.commands import DIFFERS, EQUAL, NOT_COMPARABLE, parsed, parser_of, status_of
from streamrl.run_dirs import find_run_dir
from streamrl.stream.history import History


def main() -> int:
    parser = parser_of(
        "replay", "Train a run's log again, without hub and actors, and compare its versions with the original ones.",
        find=find_run_dir, between=True,
        usage="streamrl replay RUN [--from N] [--to N] [--without GROUPS | --rewards] [key=value ...]",
        epilog="Exit status: 0 all equal, 1 a version differs, 2 an error, 3 not comparable (see what it prints).",
    )
    parser.add_argument(
        "--without", type=group_ids, default=frozenset(), metavar="GROUP[,GROUP]",
        help="leave these groups out of their batches; the versions after them differ",
    )
    parser.add_argument(
        "--rewards", action="store_true", help="train nothing: run the reward function again on the recorded answers"
    )
    given = parsed(parser)
    join_ranks(given.run, "learner.replay", given.words)
    History.read(given.run).trained(given.first, given.last)  # what is asked for is there, before it is loaded
    run = open_run(given.run, given.words, at_most=given.first)
    return replay(run, last=given.last, without=given.without)


def replay(run: OpenedRun, *, last: int | None, without: frozenset[int] = frozenset()) -> int:
    """Print, on rank 0, each version and how it compares; the exit status."""
    notify = notifier(run.ranks)
    begin, batches = run.version, run.batches(upto=last)
    require_groups(batches, without)
    other = run.other_environment()
    notify(f"{run.run_dir}: {len(batches)} batches from version {begin} on")
    for line in other:
        notify(f"  not as it was: {line}")
    counts: Counter[str] = Counter()
    first_difference = ""
    for number, one in enumerate(run.train(upto=last, without=without), start=1):
        counts["equal"] += sum(not text for text in one.versions.values())
        counts["compared"] += len(one.versions)
        texts = [text for text in one.versions.values() if text]
        first_difference = first_difference or next(iter(texts), "")
        said = texts[0] if texts else "equal" if one.versions else "was not published"
        notify(f"  batch {number} of {len(batches)}  version {one.version}  {said}")
    notify(f"{counts['equal']} of {counts['compared']} versions equal")
    if not first_difference:
        return EQUAL
    if without:
        notify(f"{first_difference}, the first after a batch that lacks a group")
        return EQUAL
    if other:
        notify(f"not comparable: {first_difference}, and {'; '.join(other)}")
        return NOT_COMPARABLE
    notify(f"differs: {first_difference}")
    return DIFFERS


if __name__ == "__main__":
    sys.exit(status_of(main))
