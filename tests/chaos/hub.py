"""The real hub process of a chaos run: `learner.hub.__main__` in a forked child, whose functions are observed."""

import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import learner.hub.__main__ as program
from learner.hub.context.settings import HubSettings, write_settings
from learner.hub.ledger import apply as transitions
from learner.hub.ledger.accept import Acceptance, AcceptResult
from learner.hub.ledger.cut import LagProof
from learner.hub.ledger.membership import JoinResult, Membership
from learner.hub.ledger.state import State
from learner.hub.ledger.tables.groups import GroupRecord
from streamrl import parent_watch
from streamrl.errors import StreamrlError
from streamrl.messages import EVAL_BIT, Group, Hello
from tests.chaos import crash_points, disk
from tests.chaos.history import History
from tests.chaos.mutants import MUTANTS
from tests.chaos.processes import ChaosSpec


class ForkedHub:
    """As `HubProcess`, but forked from this process, whose imports it so inherits: a restart takes no seconds."""

    def __init__(self, spec: ChaosSpec, settings: HubSettings) -> None:
        path = Path(settings.run_dir) / "hub_settings.json"
        write_settings(settings, path)
        read_end, self._write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._write_end)
            _run(spec, path, read_end)
        os.close(read_end)
        (spec.folder / "hub.pid").write_text(str(self.pid))
        self._status: int | None = None

    def check(self) -> None:
        """Raises StreamrlError if the hub has ended."""
        if self._ended(os.WNOHANG):
            raise StreamrlError(f"the hub process ended with status {self._status}")

    def wait(self) -> None:
        self._ended(0)

    def _ended(self, options: int) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self.pid, options)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status is not None


def _run(spec: ChaosSpec, path: Path, read_end: int) -> None:
    """The child: never returns."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(read_end, 0)
        os.closerange(3, 1024)  # with them the learner's locks, which must end with the learner
        disk.journal_log(spec.disk_journal)
        os.environ[parent_watch.VARIABLE] = "stdin"
        spec.log_to("hub")
        LagProof.frames_every = 1
        history = History(spec.history, "hub")
        observe(history)
        if spec.mutant:
            MUTANTS[spec.mutant]("hub")
        crash_points.arm("hub", spec.armed, history)
        sys.argv = ["learner.hub", str(path)]
        code = program.main()
    except BaseException:
        logging.getLogger("streamrl.hub").exception("the hub failed")
    finally:
        os._exit(code)


def observe(history: History) -> None:
    """Record who is welcomed and what becomes of every group."""
    hello, accept, discard, drop = Membership.hello, Acceptance.accept, transitions._discard, transitions._drop

    def observed_hello(self: Membership, actor_id: str, message: Hello, now: float) -> JoinResult:
        result = hello(self, actor_id, message, now)
        if result.stop is None:
            history.add("welcome", actor=actor_id, inc=message.incarnation)
        return result

    def observed_accept(self: Acceptance, actor_id: str, group: Group, *rest: Any) -> AcceptResult:
        began = time.monotonic()  # a group that ends as it arrives is recorded as dropped meanwhile
        result = accept(self, actor_id, group, *rest)
        if not group.group_id & EVAL_BIT and result.kind != "no_link":
            history.add("accept", t=began, actor=actor_id, inc=group.incarnation, seq=group.seq, group=group.group_id,
                        kind=result.kind, reason=result.reason.name)
        return result

    def observed_discard(state: State, record: GroupRecord) -> None:
        if record.deliveries:
            history.add("discard", group=record.group_id,
                        deliveries=[[one.incarnation, one.seq] for one in record.deliveries])
        discard(state, record)

    def observed_drop(state: State, record: GroupRecord, reason: str) -> None:
        history.add("drop", group=record.group_id, reason=reason)
        drop(state, record, reason)

    Membership.hello, Acceptance.accept = observed_hello, observed_accept
    transitions._discard, transitions._drop = observed_discard, observed_drop
