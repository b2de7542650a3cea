"""The watchdog of the learner's process group: whom it names, what it waits for, and when it says nothing."""

import os

import pytest

from learner.hub.liveness.ranks import NO_BETTER_CAUSE_S, RankWatch, process_state
from streamrl.messages import RankBeat
from streamrl.processes import host_id

SILENT_S = 20.0


class FakeProcesses(dict):
    """States of processes by id, as /proc would tell them."""

    def __call__(self, pid: int) -> str:
        return self.get(pid, "S")


def beat(rank: int, phase: str = "forward_backward", *, world: int = 2, host: str | None = None, **fields) -> RankBeat:
    return RankBeat(rank, world, 100 + rank, host or host_id(), phase, 1.5, **fields)


def watching(processes: FakeProcesses, *beats: RankBeat, now: float = 0.0) -> RankWatch:
    watch = RankWatch(SILENT_S, process_state=processes)
    for one in beats:
        watch.beat(b"route-%d" % one.rank, one, now)
    return watch


def pass_time(watch: RankWatch, until: float, *beats: RankBeat):
    """Tick once a second, with these beats; the first finding, and when it came."""
    for second in range(1, int(until) + 1):
        for one in beats:
            watch.beat(b"route-%d" % one.rank, one, float(second))
        if (finding := watch.check(float(second))) is not None:
            return finding, second
    return None, until


def test_ranks_that_beat_are_left_alone():
    watch = watching(FakeProcesses(), beat(0), beat(1))

    assert pass_time(watch, 100, beat(0), beat(1)) == (None, 100)


def test_a_stopped_rank_is_named_with_what_it_did_and_who_waits_for_it():
    processes = FakeProcesses({101: "T"})
    watch = watching(processes, beat(0), beat(1, "pack"))

    finding, second = pass_time(watch, 60, beat(0, "pack", collective="all_reduce", num_collectives=4))

    assert second == SILENT_S + 1 and finding.lost and finding.kill == (101,)
    assert finding.cause == (
        "learner rank 1 (process 101) has been silent for 21 s and is stopped (SIGSTOP); it was in pack; "
        "rank 0 waits in all_reduce (pack)"
    )
    assert watch.check(61.0) is None, "one finding"
    assert watch.routes() == [b"route-0", b"route-1"]


@pytest.mark.parametrize("state", ["", "Z"])
def test_a_killed_rank_of_this_machine_is_noticed_at_once(state):
    processes = FakeProcesses()
    watch = watching(processes, beat(0), beat(1))
    assert watch.check(0.1) is None

    processes[101] = state

    finding = watch.check(0.2)
    assert finding.lost and finding.kill == () and "learner rank 1 (process 101) was killed" in finding.cause


def test_a_process_elsewhere_is_judged_by_its_silence_alone_and_not_killed_from_here():
    elsewhere = beat(1, host="node7/4026531836")
    watch = watching(FakeProcesses({101: ""}), beat(0), elsewhere)
    assert watch.check(0.1) is None

    finding, _ = pass_time(watch, 60, beat(0))

    assert finding.kill == () and "learner rank 1 (process 101 on node7) has been silent" in finding.cause


def test_a_rank_that_fails_by_itself_ends_the_group_and_a_new_start_would_not_help():
    watch = watching(FakeProcesses(), beat(0), beat(1, failed="RuntimeError: out of memory"))

    finding = watch.check(0.1)

    assert not finding.lost
    assert finding.cause == "learner rank 1 failed in forward_backward: RuntimeError: out of memory"


def test_an_error_from_a_collective_waits_for_a_better_cause():
    processes = FakeProcesses()
    torn = beat(0, "pack", failed="RuntimeError: [gloo] Connection closed by peer", in_group=True)
    watch = watching(processes, beat(1))
    watch.beat(b"route-0", torn, 0.0)
    assert watch.check(0.1) is None

    alone, second = pass_time(watch, 10, beat(1))

    assert second > NO_BETTER_CAUSE_S and alone.lost and "Connection closed by peer" in alone.cause
    killed = watching(processes, torn, beat(1))
    processes[101] = ""
    assert "learner rank 1 (process 101) was killed" in killed.check(0.1).cause


def test_a_rank_that_announced_its_end_is_not_missed():
    watch = watching(FakeProcesses({101: ""}), beat(0), beat(1, closing=True))

    assert pass_time(watch, 100, beat(0)) == (None, 100)
    assert watch.routes() == [b"route-0"]


def test_a_lone_learner_is_described_but_never_ended():
    watch = watching(FakeProcesses(), beat(0, world=1))

    assert pass_time(watch, 100) == (None, 100)
    assert watch.sentences(100.0, "")[0][0] == "learner"


def test_a_hub_that_stood_still_itself_does_not_blame_the_ranks():
    watch = watching(FakeProcesses(), beat(0), beat(1))
    assert watch.check(1.0) is None

    assert watch.check(500.0) is None, "the machine slept"
    assert watch.check(500.5) is None


def test_the_death_of_rank_zero_is_told_apart_from_its_orderly_end():
    assert watching(FakeProcesses(), beat(0, world=1, closing=True)).learner_gone(1.0) is None
    assert watching(FakeProcesses()).learner_gone(1.0) is None, "it never got as far as a beat"

    finding = watching(FakeProcesses(), beat(0, "optimizer", world=1)).learner_gone(1.0)

    assert finding.lost and finding.cause == "the learner (process 100) was killed while in optimizer"


def test_every_rank_has_a_sentence_that_says_for_whom_it_waits():
    watch = watching(
        FakeProcesses(), beat(0, "pack", collective="all_reduce", collective_s=2.0, num_collectives=7),
        beat(1, "wait", num_collectives=6), beat(2, "optimizer", num_collectives=7),
    )

    told = dict(watch.sentences(0.5, "3 of 8 groups have arrived"))

    assert told["learner rank 0"] == "waits for rank 1 in all_reduce (pack), 2.0 s so far"
    assert told["learner rank 1"] == "waits for a batch, 1.5 s so far: 3 of 8 groups have arrived"
    assert told["learner rank 2"] == "is in optimizer, 1.5 s so far"
    assert "has been silent for 9 s; it was in optimizer" in dict(watch.sentences(9.0, ""))["learner rank 2"]


def test_the_state_of_real_processes_is_read():
    assert process_state(os.getpid()) in "RS" and process_state(2**22 + 1) == ""
