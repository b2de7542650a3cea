"""Offers in order: whatever goes wrong on one way, the next one is tried, and what ends this process ends the fetch."""

from __future__ import annotations

import errno

import pytest
import torch
import zmq

from streamrl.errors import EngineError, WeightsError
from streamrl.messages import InstallSource, Offer
from streamrl.weights.gpu.nccl import CommunicatorStuck
from streamrl.weights.pull.chunk_server import ChunkServer
from streamrl.weights.transport import WeightSource

pytestmark = pytest.mark.timeout(60)


class Fails:
    """A way that ends with this error, whatever is asked of it."""

    source = InstallSource.IPC

    def __init__(self, error: Exception) -> None:
        self.error = error

    def receive(self, *_, **__):
        raise self.error


@pytest.fixture
def published(serve, publish, layout, token):
    """(manifest, offers, body) of a version that is offered inside a GPU and from afar."""
    manifest, path, body = publish(layout, 1)
    server = ChunkServer(pull_token=token)
    server.add(manifest, path, layout)
    return manifest, (Offer("ipc", "ipc:///slots", len(body)), Offer("zmq", serve(server).endpoint, len(body))), body


OUT_OF = [
    torch.OutOfMemoryError("CUDA out of memory"), OSError(errno.ENOMEM, "no memory to map it"), MemoryError(),
    zmq.ZMQError(errno.EMFILE), RuntimeError("CUDA error: an illegal memory access was encountered"),
]


@pytest.mark.parametrize("error", OUT_OF, ids=lambda error: type(error).__name__)
def test_a_way_that_has_no_memory_or_descriptors_left_is_followed_by_the_next(published, layout, context, token, error):
    manifest, offers, body = published
    one = WeightSource(context, pull_token=token)
    one.factories["ipc"] = lambda offer: Fails(error)

    fetched = one.fetch(manifest, offers, layout)

    assert fetched.source == InstallSource.ZMQ and bytes(fetched.document.view(0, len(body))) == body


def test_when_every_way_runs_out_of_something_all_of_it_is_said_as_one_weights_error(published, layout, token):
    manifest, offers, _ = published
    full = zmq.Context()
    full.set(zmq.MAX_SOCKETS, 1)
    only = full.socket(zmq.PAIR)  # from here on this context has no socket left to give
    one = WeightSource(full, pull_token=token)
    one.factories["ipc"] = lambda offer: Fails(torch.OutOfMemoryError("CUDA out of memory"))
    try:
        with pytest.raises(WeightsError, match="(?s)ipc: .*CUDA out of memory.*zmq: .*Too many open files"):
            one.fetch(manifest, offers, layout)
        with pytest.raises(WeightsError, match="Too many open files"):
            one.fetch_assets(offers[-1:], 10, bytes(16))
    finally:
        only.close()
        full.destroy(linger=0)


def test_a_process_that_has_to_end_is_not_kept_alive_by_another_way(published, layout, context, token):
    manifest, offers, _ = published
    one = WeightSource(context, pull_token=token)
    one.factories["ipc"] = lambda offer: Fails(CommunicatorStuck("a call can neither return nor be ended"))

    with pytest.raises(EngineError, match="neither return"):
        one.fetch(manifest, offers, layout)
