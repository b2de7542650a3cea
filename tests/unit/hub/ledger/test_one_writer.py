"""Durable tables change in `apply` alone: what a verb wrote by itself, a restart would lose."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import learner.hub
from learner.hub.ledger.tables.groups import GroupRecord

HUB = Path(learner.hub.__file__ or "").parent
VOLATILE = {"lease", "first_granted_at", "num_failures"}
FIELDS = set(GroupRecord.__struct_fields__) - VOLATILE
WRITERS = {
    "groups": {"add", "move", "settle"}, "versions": {"published", "advance"}, "lag": {"set_bounds"},
    "in_flight": {"append", "popleft", "clear", "extend"},
    **dict.fromkeys(("members", "frames", "deliveries", "sequences", "grants"),
                    {"update", "append", "pop", "clear", "extend", "setdefault"}),
}
COUNTED = {
    "num_members_accepted", "num_tokens_accepted", "num_members_aborted", "num_groups_accepted", "num_groups_partial",
    "num_groups_completed", "num_groups_zero_std", "num_groups_filtered", "num_groups_dropped", "num_groups_trained",
    "num_groups_quarantined", "num_tokens_discarded",
}
"""Counts that follow from records."""
MAY_WRITE = {
    "ledger/apply.py", "ledger/tables/groups.py", "ledger/tables/versions.py",
    "ledger/tables/evals.py",  # evaluations are forgotten with the hub
}


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def writes(source: str) -> Iterator[str]:
    """Yield each statement that changes a durable table."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in WRITERS.get(_name(node.func.value), ()) and _name(node.func.value) != "self":
                yield ast.unparse(node)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) else ():
            for one in target.elts if isinstance(target, ast.Tuple) else (target,):
                held = one.value if isinstance(one, ast.Subscript) else one
                if isinstance(held, ast.Attribute) and _name(held.value) not in ("self", "actor"):
                    if held.attr in FIELDS:
                        yield ast.unparse(node)
                if isinstance(one, ast.Subscript) and isinstance(one.slice, ast.Constant) and _name(held) == "counts":
                    if one.slice.value in COUNTED:
                        yield ast.unparse(node)


@pytest.mark.parametrize("statement", [
    "record.state = state", "record.members[0] = one", "record.frames, record.lease = ([], None)",
    "self.groups.move(record, state)", "ledger.versions.advance()", "self.counts['num_groups_dropped'] += 1",
    "record.frames.append(frame)", "self.state.in_flight.popleft()", "record.next_attempt += 1",
])
def test_a_write_is_seen(statement):
    assert list(writes(statement)) == [statement]


def test_only_apply_changes_a_durable_table():
    found = {
        f"{path.relative_to(HUB)}: {statement}"
        for path in HUB.rglob("*.py") if str(path.relative_to(HUB)) not in MAY_WRITE
        for statement in writes(path.read_text())
    }

    assert not found, "commit a record instead, which `apply` does also after a crash:\n" + "\n".join(sorted(found))
