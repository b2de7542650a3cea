"""The load of `bench.plane`: what its actors send is what real ones would."""

import pytest

from bench.plane.fleet import VOCAB_SIZE, Fleet
from streamrl.messages import TO_HUB, Group, Lease, Limits, Purpose, Sampling, VersionRef
from streamrl.messages.codec import Decoder, encode
from streamrl.messages.validate import check_group


@pytest.mark.parametrize(("seq", "group_id", "attempt"), [(1, 0, 0), (127, 128, 1), (300, 1 << 40, 65_535)])
def test_a_frame_from_prepared_bytes_is_the_encoded_group(seq, group_id, attempt):
    fleet = Fleet("tcp://127.0.0.1:9", num_actors=0, group_size=3, num_tokens=100, max_leases=2)
    lease = Lease(
        group_id=group_id, attempt=attempt, prompt_index=5, pass_index=0, prompt=b"{}", members=(0, 1, 2),
        seeds=(1, 2, 3), min_version=VersionRef(1, 2), sampling=Sampling(), ttl_s=1.0, purpose=Purpose.TRAIN,
    )
    first, last = VersionRef(1, 2), VersionRef(1, 3)

    frames = [fleet.frame(7, seq, lease, first, last) for _ in range(2)]  # the second from the bytes of the first

    assert frames[0] == frames[1]
    group = Decoder(TO_HUB).decode(frames[0])
    assert isinstance(group, Group) and bytes(encode(group)) == frames[0]
    assert (group.incarnation, group.seq, group.group_id, group.attempt) == (7, seq, group_id, attempt)
    limits = Limits(vocab_size=VOCAB_SIZE, max_new_tokens=100)
    assert [one.all_versions for one in check_group(group, limits, range(3))] == [(first, last)] * 3
