"""Batches that cannot be trained on, and checkpoints that cannot be written: told, counted, and tried again."""

from types import SimpleNamespace

import msgspec
import pytest

from learner.checkpoint.checkpoint import find_checkpoint, save_checkpoint
from learner.checkpoint.saving import Checkpoints, SaveRetries
from learner.model.gradients import BatchResult, StepResult
from learner.model.optimizer import make_optimizer
from learner.model.policy import load_policy
from learner.objective.rewards import RewardRules
from learner.ranks.activity import Activity
from learner.ranks.clock import StepClock
from learner.ranks.mesh import Ranks
from learner.sources.hub import HubSource
from learner.sources.skipped import SkippedSteps, why_skipped
from streamrl.config.schema import ObjectivesConfig, OptimizerConfig, OverlongConfig
from streamrl.errors import CheckpointError, StreamrlError
from streamrl.messages import BatchShare, Group, Outcome, PlanRow, ReturnReason, Sampling, Turn
from streamrl.messages.codec import encode, pack_ids, pack_logprobs
from tests.kit.system import full_disk
from tests.unit.config.setting_harness import config_of
from tests.unit.hub.factories import member

GOOD = StepResult(1.0, False, 1e-3)
BAD = StepResult(float("nan"), True, 1e-3)


def share(group_id: int, *, scores: dict[str, float] | None = None, num_seen: int = 1, **changes) -> BatchShare:
    """A batch of one group with one trajectory: three tokens of a prompt, an action and so many observations."""
    one = msgspec.structs.replace(
        member(0, [(1, 0)], scores=scores or {"score": 1.0}), token_ids=pack_ids([4] + [5] * num_seen),
        logprobs=pack_logprobs([-0.5] + [0.0] * num_seen), turns=(Turn(0, 1 + num_seen, 1.0),),
    )
    group = Group(
        incarnation=1, seq=1, group_id=group_id, attempt=0, outcome=Outcome.COMPLETE, reason=ReturnReason.NONE,
        detail="", sampling=Sampling(), members=(one,), stats={},
    )
    row = PlanRow(group_id, 0, 0, 4 + num_seen, 1, 1.0, 0)
    frames = changes.pop("groups", (bytes(encode(group)),))
    return BatchShare(0, (row,), frames, **changes)


class FakeHub:
    """Hands out these shares, then a stop; notes what is reported as trained."""

    def __init__(self, *shares: BatchShare) -> None:
        self.shares, self.told = list(shares), []

    def next_batch(self, version: int) -> BatchShare | None:
        return self.shares.pop(0) if self.shares else None

    def trained(self, version: int, *, skipped: bool, reason: str = "", trained: bool = True) -> None:
        assert not trained, "the log must not say that this batch was trained"
        self.told.append((version, skipped, reason))


def source_of(tmp_path, hub: FakeHub, *words: str) -> HubSource:
    """The source of a lone learner."""
    learner = config_of("learner.max_tokens_per_device=1088", *words).learner
    rules = RewardRules(
        ObjectivesConfig(combine="weighted_sum", components={"score": 1.0}), OverlongConfig(), max_tokens=16
    )
    return HubSource(
        hub, Ranks(), StepClock(Activity()), SkippedSteps(tmp_path, limit=learner.num_max_skipped_steps),
        max_tokens=learner.max_tokens_per_device, rules=rules,
    )


def test_a_batch_that_cannot_be_trained_is_set_aside_with_its_cause_and_the_next_one_is_taken(tmp_path):
    bad = (
        share(1, num_seen=1100), share(2, scores={"style": 1.0}), share(3, groups=(b"SRLM torn",)),
        msgspec.structs.replace(share(4), plan=()),
    )
    hub = FakeHub(*bad, share(5))

    taken = source_of(tmp_path, hub).next_batch(0)

    assert [row.group_id for row in taken.rows] == [5] == [row.group_id for row in taken.plan]
    assert [(version, skipped) for version, skipped, _ in hub.told] == [(0, True)] * 4
    for (_, _, cause), words in zip(
        hub.told, ("1104 tokens, more than learner.max_tokens_per_device=1088", "no score ['score']",
                   "shorter than the 16-byte preamble", "not in the plan"), strict=True,
    ):
        assert words in cause


@pytest.mark.shows("learner.num_max_skipped_steps")
def test_batches_that_go_on_failing_end_the_run_with_the_cause(tmp_path):
    def num_taken(limit: int) -> int:
        hub = FakeHub(*(share(number, scores={"style": 1.0}) for number in range(20)))
        source = source_of(tmp_path, hub, f"learner.num_max_skipped_steps={limit}")
        if limit:
            with pytest.raises(StreamrlError, match=r"skipped.*num_max_skipped_steps.*no score \['score'\]"):
                source.next_batch(0)
        else:
            assert source.next_batch(0) is None
        return 20 - len(hub.shares)

    assert [num_taken(limit) for limit in (3, 12, 0)] == [3, 12, 20]


def test_skipped_steps_end_the_run_if_too_many_are_among_good_ones(tmp_path):
    skipped = SkippedSteps(tmp_path, limit=4)
    for _ in range(10):  # now and then one, as mixed precision has them
        skipped.stepped(BatchResult((BAD,)))
        skipped.stepped(BatchResult((GOOD,)))

    with pytest.raises(StreamrlError, match="in 2 of its 3 steps. Look at .* streamrl stream .*, then resume"):
        for _ in range(8):  # 2 of 3, as rewards beyond reason bring them
            skipped.stepped(BatchResult((BAD, BAD, GOOD)))

    assert (why_skipped(BatchResult((GOOD,))), why_skipped(BatchResult((BAD,)))) == ("", "gradients are not finite")


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["shard", "manifest", "latest"])
def test_a_checkpoint_that_cannot_be_written_is_an_error_of_its_own_and_leaves_no_draft(checkpoints, tmp_path, where):
    policy = load_policy(checkpoints["qwen3-tied"])
    optimizer = make_optimizer(policy, OptimizerConfig(lr=1e-3))

    def save(version: int) -> None:
        extra = {"filling": "x" * 2_000_000 if where == "manifest" and version == 1 else ""}
        save_checkpoint(tmp_path, version, policy, optimizer, Ranks(), extra=extra, blobs={}, num_keep=2)

    save(0)
    if where == "latest":
        (tmp_path / "LATEST.tmp").symlink_to("/dev/full")
        with pytest.raises(CheckpointError, match="version 1 was not saved"):
            save(1)
        (tmp_path / "LATEST.tmp").unlink()
    else:
        room = full_disk(20_000 if where == "shard" else 1_000_000)
        with room, pytest.raises(CheckpointError, match="version 1 was not saved"):
            save(1)

    assert not list(tmp_path.glob("ckpt.tmp-*"))
    assert find_checkpoint(tmp_path).version == 0
    save(2)
    assert find_checkpoint(tmp_path).version == 2


def test_a_checkpoint_that_failed_is_tried_again_at_growing_distances():
    retries, tried = SaveRetries(20), []
    for second in range(20):
        if retries.due(lambda: second) or second == 2:  # noqa: B023
            tried.append(second)
            if len(tried) < 4:
                retries.failed(CheckpointError("disk full"), second)
            else:
                retries.begun(succeeded=True)

    assert tried == [2, 3, 5, 9]


@pytest.mark.shows("checkpoint.grace_s")
@pytest.mark.parametrize("step_s", [0.05, 1.0, 45.0])
def test_checkpoints_may_fail_for_seconds_however_short_a_step_is(step_s):
    retries, now, num = SaveRetries(config_of("checkpoint.grace_s=60").checkpoint.grace_s), 0.0, 0

    with pytest.raises(CheckpointError, match="disk full; none could be written for .*grace_s=60.*the run ends"):
        while now < 1000.0:
            if num == 0 or retries.due(lambda: now):  # noqa: B023
                retries.failed(CheckpointError("disk full"), now)
                num += 1
            now += step_s

    assert 60.0 <= now < 60.0 + 2 * step_s, "neither before nor long after"
    assert num < 9, "a large checkpoint is not tried at every step"


def test_the_grace_begins_again_with_a_checkpoint_that_is_written():
    retries = SaveRetries(10.0)
    for failed_at in (0.0, 9.0, 100.0, 109.0):
        retries.failed(CheckpointError("disk full"), failed_at)
        if failed_at == 9.0:
            retries.begun(succeeded=False)
            assert not retries.pending
            retries.begun(succeeded=True)
    with pytest.raises(CheckpointError, match="the run ends"):
        SaveRetries(0.0).failed(CheckpointError("disk full"), 5.0)


class FullFor:
    """Stands in for `Saving`: fails so often, then writes."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures, self.version, self.durable = num_failures, -1, -1

    def save(self, version: int, tensors: object, extra: object) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise CheckpointError("disk full")
        self.version = self.durable = version

    def settle(self) -> None:
        pass


@pytest.mark.parametrize("last", [False, True])
def test_only_the_last_checkpoint_is_waited_for(monkeypatch, last):
    config = config_of()
    saving, clock = FullFor(3), [0.0]
    time = SimpleNamespace(sleep=lambda s: clock.append(clock.pop() + s), monotonic=lambda: clock[0])
    monkeypatch.setattr("learner.checkpoint.saving.time", time)  # not the real module: threads of other tests sleep too
    checkpoints = Checkpoints(
        saving, SaveRetries(config.checkpoint.grace_s), Ranks(), StepClock(Activity()), every_s=0.0,
        every_steps=0, steps_per_batch=1, tensors=lambda: (), remembered=dict,
    )

    checkpoints.save(7, last=last)

    assert (saving.durable == 7, clock) == ((True, [1.0 + 2.0 + 4.0]) if last else (False, [0.0]))


@pytest.mark.shows("checkpoint.every_minutes")
@pytest.mark.shows("checkpoint.every_steps")
@pytest.mark.parametrize(
    ("words", "saved"),
    [
        ((), [4]), (("checkpoint.every_minutes=0",), []), (("checkpoint.every_minutes=3",), [2, 3, 4, 5, 6]),
        (("checkpoint.every_minutes=0", "checkpoint.every_steps=3"), [3, 6]), (("checkpoint.every_steps=3",), [3, 6]),
    ],
)
def test_checkpoints_come_by_the_clock_by_the_steps_or_by_both(monkeypatch, words, saved):
    """Steps of three minutes: ten minutes have passed after the fourth."""
    config, clock, found = config_of(*words), [0.0], []
    monkeypatch.setattr("learner.checkpoint.saving.time.monotonic", lambda: clock[0])
    saving = FullFor(0)
    saving.save = lambda version, tensors, extra: (found.append(version), setattr(saving, "version", version))
    checkpoints = Checkpoints(
        saving, SaveRetries(config.checkpoint.grace_s), Ranks(), StepClock(Activity()),
        every_s=60.0 * config.checkpoint.every_minutes, every_steps=config.checkpoint.every_steps, steps_per_batch=1,
        tensors=lambda: (), remembered=dict,
    )

    for step in range(1, 7):
        clock[0] += 170.0 if step == 1 else 180.0
        checkpoints.save_if_due(step)

    assert found == saved
