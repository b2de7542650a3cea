"""Groups that a run is trained without."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from streamrl.errors import ControlError
from streamrl.stream.history import LoggedBatch


def group_ids(word: str) -> frozenset[int]:
    """The numbers of `--without 17,18`."""
    try:
        return frozenset(int(one) for one in word.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word} is no list of group numbers: give --without 17,18") from None


def require_groups(batches: Iterable[LoggedBatch], without: frozenset[int]) -> None:
    """Raise ControlError for a group that none of the batches holds."""
    there = {row.group_id for one in batches for row in one.cut.plan} if without else set()
    if missing := sorted(without - there):
        raise ControlError(
            f"--without: no batch that is trained here holds group {missing[0]}; streamrl stream RUN --kind group "
            "lists the groups of a run with the version that each was trained at"
        )
