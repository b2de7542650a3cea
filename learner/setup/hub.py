"""The hub of a run: its process, which rank 0 starts, and every rank's connection to it."""

from __future__ import annotations

import json
import logging
import math
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from learner.hub.context.settings import HubSettings
from learner.hub_client.endpoint import RankDoor, RankEndpoint, agree
from learner.hub_client.link import HubLink
from learner.hub_client.process import HubProcess
from learner.hub_client.thread import HubThread
from learner.loop.run import Run
from learner.ranks.beats import RankBeats
from learner.ranks.mesh import Ranks
from learner.ranks.stop_flag import StopFlag
from learner.setup.preflight import unguarded_settings
from streamrl.config.load import to_plain
from streamrl.config.rules import largest_max_lag, lead, lookahead
from streamrl.config.schema import LearnerConfig
from streamrl.metrics.files import read_object
from streamrl.named_code import words_for_actors

log = logging.getLogger("streamrl.learner")


@dataclass(frozen=True, slots=True)
class StartedHub:
    """A hub that starts in a process of its own, or a thread of this one, where ranks reach it, and their heartbeats.

    Rank 0 alone has its `process`.
    """

    process: HubProcess | HubThread | None
    endpoint: RankEndpoint
    beats: RankBeats

    def link(
        self, learner: LearnerConfig, ranks: Ranks, stop: StopFlag, *, version: int, stall_fail_s: float
    ) -> HubLink:
        """This rank's connection; a hub in this process may be silent, as in a debugger, for as long as it is there."""
        patience_s = math.inf if isinstance(self.process, HubThread) else learner.rank_silent_s
        return HubLink(
            self.endpoint.address, key=self.endpoint.key, rank=ranks.rank, world=ranks.mesh.world, version=version,
            check_hub=self.process.check if self.process else lambda: None, stop_requested=stop,
            stall_report_s=learner.stall_report_s, stall_fail_s=stall_fail_s,
            rank_silent_s=patience_s or learner.rank_timeout_s,
        )


def start_hub(
    settings_at: Callable[[str], HubSettings], run_dir: Path, start: int, ranks: Ranks, undo: ExitStack, *,
    silent_s: float, in_process: bool = False,
) -> StartedHub:
    """Start the hub on rank 0, and this rank's heartbeats; a collective call.

    Args:
        settings_at: the hub's settings, by the address at which it listens for ranks.
        undo: ends them if something fails before the run is whole.
        silent_s: after which a rank without heartbeats is dead.
        in_process: start it as a thread.
    """
    process, door = None, RankDoor.make() if ranks.rank == 0 else None
    if door is not None:  # the hub imports and binds while the networks load here
        settings = settings_at(door.bind)
        process = HubThread(settings) if in_process else HubProcess(settings, door.keys)
        undo.callback(process.abandon)
    endpoint = agree(ranks, lambda: door.endpoint(run_dir, start, process.check))
    beats = undo.enter_context(RankBeats(endpoint.address, ranks, silent_s=silent_s, key=endpoint.key))
    return StartedHub(process, endpoint, beats)


def announce(run: Run) -> None:
    """Log where actors connect, and how old data may get."""
    connect = json.loads((run.run_dir / "hub.json").read_text())["connect"]
    rollout, staleness, steps = run.config.rollout, run.config.staleness, run.trainer.settings.steps_per_batch
    how = " at first" if staleness.adaptive.enabled else "" if staleness.force is None else " (forced)"
    key = ["actors.key=FILE"] if run.config.hub.keys else []
    words = shlex.join([f"connect={connect}", *key, *words_for_actors(to_plain(run.config))])
    log.info("hub listens at %s: start actors with  streamrl actor %s", connect, words)
    log.info(
        "run %s (id %s), epoch %d, step %d of %d; B=%d groups x G=%d%s, eta=%d%s, window=%d: head lag is at most %d",
        run.run_dir.name, run.run_id, run.learner_epoch, run.step, run.config.trainer.num_steps,
        rollout.num_prompts_per_step, rollout.num_responses_per_prompt,
        f", {steps} optimizer steps a batch" if steps > 1 else "", lead(run.config),
        how, lookahead(run.config), largest_max_lag(run.config),
    )
    if warning := unguarded_settings(run.config):
        log.warning("%s", warning)


def same_address(bind: str, run_dir: Path, *, resume: bool) -> str:
    """A resumed learner that may take any port takes its predecessor's, which its actors will retry.

    The host stays that of the settings: a run directory does not decide where this machine listens.
    """
    port = str(read_object(run_dir / "hub.json").get("connect", "")).rpartition(":")[2]
    return bind[:-1] + port if resume and bind.endswith(":0") and port.isdecimal() else bind
