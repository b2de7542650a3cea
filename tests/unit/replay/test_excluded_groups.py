"""Groups that a replay leaves out are named as numbers, and must be in its batches."""

from argparse import ArgumentTypeError

import pytest

from learner.replay.opened import group_ids, require_groups
from streamrl.errors import ControlError
from streamrl.messages import PlanRow
from streamrl.stream.history import LoggedBatch
from streamrl.stream.records import BatchCut


def test_groups_are_numbers_that_the_batches_hold():
    plan = tuple(PlanRow(group, 0, 0, 9, 4, 1.0, 0) for group in (3, 5))
    batches = [LoggedBatch(7, BatchCut(0, plan, (), (0,)))]

    require_groups(batches, group_ids("3,5"))

    with pytest.raises(ControlError, match="holds group 4"):
        require_groups(batches, group_ids("4,3"))
    with pytest.raises(ArgumentTypeError, match="no list of group numbers"):
        group_ids("all")
