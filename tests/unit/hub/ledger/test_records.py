"""Records that cannot be leased: passed over without a lease, and a run that has no others ends and says why."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.hub.ledger.grant import LEASES_PER_MESSAGE, MAX_PASSED_OVER, in_messages
from learner.hub.ledger.ledger import Ledger
from learner.hub.ledger.tables.prompts import NUM_FIRST, PromptStream
from learner.hub.setup import record_of
from streamrl.errors import DataChangedError, TaskError
from streamrl.messages import TO_ACTOR, Lease, Leases, Limits, Sampling, VersionRef
from streamrl.messages.actors import MAX_RECORD_BYTES
from streamrl.messages.codec import Decoder, encode
from tests.unit.hub.factories import STEADY, joined, ledger_arguments, publish, settings, train


def ledger_of(num_records: int, record: Callable[[int], bytes], **changes: object) -> Ledger:
    prompts = PromptStream(num_records, seed=7, record=record, shuffle=False)
    ledger = Ledger(settings(**changes), **ledger_arguments(prompts=prompts))
    publish(ledger, VersionRef(1, 0))
    return ledger


def bad(index: int) -> bytes:
    raise TaskError(f"record {index}: broken")


@STEADY
@given(st.sets(st.integers(0, 9), max_size=9))
def test_bad_records_cost_no_lease_and_the_good_ones_come_in_order(broken: set[int]):
    ledger = ledger_of(10, lambda index: bad(index) if index in broken else b"%d" % index)
    told: list[str] = []
    ledger.prompts.tell = told.append
    actor = joined(ledger, "a1", slots=4)
    seen: list[int] = []
    while len(seen) < 20:
        for lease in actor.ask():
            assert lease.prompt == b"%d" % lease.prompt_index
            seen.append(lease.prompt_index)
            actor.finish(lease)
        train(ledger)
        actor.install(ledger.version)
        ledger.check()

    good = [index for index in range(10) if index not in broken]
    assert seen == (good * 20)[: len(seen)] and ledger.prompts.fatal == ""
    assert ledger.counters()["num_groups_dropped"] == len(told) and (not told) == (not broken)


@pytest.mark.parametrize(("num_good", "num_bad"), [(0, NUM_FIRST), (1, 2 * MAX_PASSED_OVER + 5)])
def test_a_pass_without_a_good_record_ends_the_run_and_says_why(num_good: int, num_bad: int):
    """Where there has been no good one, long before: a task may have any number of records."""
    reads = iter(range(num_good))
    num_records = 2 * MAX_PASSED_OVER + 5
    ledger = ledger_of(num_records, lambda index: b"{}" if next(reads, None) is not None else bad(index))
    actor = joined(ledger)
    actor.beat()
    num_leases = num_grants = 0
    while not ledger.prompts.fatal:
        num_leases += len(ledger.grant("a1", 0.0))
        num_grants += 1
        ledger.check()

    assert num_leases == num_good and num_grants == -(-num_bad // MAX_PASSED_OVER), "the hub works in between"
    assert ledger.prompts.fatal.startswith(f"{num_bad} records in a row were skipped, so the run stops: ")
    assert ledger.prompts.fatal.endswith(f"record {(num_good + num_bad - 1) % num_records}: broken")
    drawn = ledger.groups.next_id
    assert ledger.grant("a1", 0.0) == [] and ledger.groups.next_id == drawn, "nothing more is burnt"


def test_a_file_that_was_changed_ends_the_run_at_once():
    def record(index: int) -> bytes:
        if index == 3:
            raise DataChangedError("train.jsonl, record 4: the file was changed while the run used it")
        return b"{}"

    ledger = ledger_of(1000, record)
    actor = joined(ledger, "a1", slots=6)

    assert len(actor.ask()) == 3
    assert ledger.prompts.fatal == "the run stops: train.jsonl, record 4: the file was changed while the run used it"


class LongTask:
    """A task of one's own, whose records no reader of files has seen."""

    def num_records(self, split: str) -> int:
        return 2

    def record(self, split: str, index: int) -> dict[str, str]:
        return {"prompt": "1 + 1", "context": "x" * (MAX_RECORD_BYTES - 34 + index)}


def test_a_record_is_as_long_as_a_lease_allows_and_one_byte_more_is_named_with_its_field():
    longest = record_of(LongTask(), "train", 0)
    lease = Lease(0, 0, 0, 0, longest, (0,), (0,), VersionRef(1, 0), Sampling(), 1.0)
    frame = encode(Leases((lease,)))

    assert len(longest) == MAX_RECORD_BYTES
    assert Decoder(TO_ACTOR).decode(frame).grants[0].prompt == longest
    with pytest.raises(TaskError, match=r"^record 2: it has 1,048,577 bytes as JSON, [\d,]+ of them in field 'con"):
        record_of(LongTask(), "train", 1)


@pytest.mark.parametrize("sizes", [[MAX_RECORD_BYTES] * 200, [0] * 200, [MAX_RECORD_BYTES, 1] * 40, [], [0] * 64])
def test_leases_go_out_in_messages_that_an_actor_can_read(sizes: list[int]):
    leases = [
        Lease(number, 0, 0, 0, b"x" * size, (0,), (0,), VersionRef(1, 0), Sampling(), 1.0)
        for number, size in enumerate(sizes)
    ]
    parts = in_messages(leases)
    decoder = Decoder(TO_ACTOR, Limits().max_message_bytes)

    assert [lease for part in parts for lease in decoder.decode(encode(Leases(part))).grants] == leases
    assert len(parts) >= len(leases) / LEASES_PER_MESSAGE and all(parts)
