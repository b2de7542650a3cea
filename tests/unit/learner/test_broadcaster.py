"""The broadcaster's loop: the hub hears every second that it is alive, unless it really hangs."""

import os
import tempfile
import threading
from collections.abc import Iterator

import pytest
import zmq

from learner.broadcaster.service import BroadcasterService
from streamrl.messages import (
    RANK_TO_HUB,
    BroadcastDocument,
    BroadcastReport,
    BroadcastStage,
    Message,
    Shutdown,
    VersionRef,
)
from streamrl.messages.codec import Decoder, encode
from streamrl.weights.manifest import DIGEST_FOLD128, bucket_digest, make_layout, make_manifest
from tests.unit.weights.fold_reference import fold128_numpy


class Hub:
    """The hub's end of the line, and a broadcaster without a GPU in a thread."""

    def __init__(self, context: zmq.Context, endpoint: str) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.RCVTIMEO, 15_000)
        self._socket.bind(endpoint)
        self._decoder = Decoder(RANK_TO_HUB)
        self._route = b""
        service = BroadcasterService(
            context, endpoint, broadcaster=None, slots=None, init_deadline_s=20, bucket_deadline_s=10, pinned=False
        )
        self._thread = threading.Thread(target=service.run, args=(lambda: False,), daemon=True)
        self._thread.start()

    def hear(self) -> Message:
        self._route, frame = self._socket.recv_multipart()
        return self._decoder.decode(frame)

    def say(self, message: Message) -> None:
        self._socket.send_multipart([self._route, encode(message)])

    def close(self) -> None:
        self.say(Shutdown("the test ends", True))
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def hub() -> Iterator[Hub]:
    context = zmq.Context()
    with tempfile.TemporaryDirectory(prefix="broadcaster-") as folder:
        one = Hub(context, f"ipc://{folder}/ranks")
        one.hear()  # BroadcastUp
        yield one
        one.close()
        context.destroy(linger=0)


def alive(message: Message) -> bool:
    return isinstance(message, BroadcastReport) and message.stage == BroadcastStage.ALIVE


def test_a_broadcaster_without_work_says_that_it_is_alive(hub):
    assert alive(hub.hear()) and alive(hub.hear())


def test_a_document_that_takes_long_to_read_is_no_silence(hub, tmp_path):
    """The hub would end a broadcaster for it, and the next one, and the one after that."""
    layout = make_layout([("w", "uint8", (10,))], 10)
    manifest = make_manifest(layout, VersionRef(1, 1), None, [bucket_digest(bytes(10))])
    folds = make_manifest(layout, VersionRef(1, 1), None, [fold128_numpy(bytes(10))], DIGEST_FOLD128)
    path = tmp_path / "endless"
    os.mkfifo(path)  # a reader that opens it waits for a writer

    hub.say(BroadcastDocument(manifest, folds, str(path), layout))
    try:
        assert all(alive(hub.hear()) for _ in range(4))
    finally:
        os.close(os.open(path, os.O_WRONLY))  # it was no document: the broadcaster says so and goes on
    while alive(said := hub.hear()):
        pass
    assert said.stage == BroadcastStage.LOADED and said.error and said.ref == manifest.ref
    assert alive(hub.hear())
