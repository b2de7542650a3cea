"""A weight socket: one thread, one ROUTER, chunks out of the documents that a `ChunkServer` holds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from streamrl.errors import WireError
from streamrl.messages import TO_WEIGHTS, Pull
from streamrl.messages.codec import Decoder, encode
from streamrl.weights.pull.chunk_server import ChunkServer

log = logging.getLogger("streamrl.weights")

POLL_MS = 100
MAX_PULL_BYTES = 4096


class ChunkSocket:
    """Serves PULLs in a thread of its own, because bulk must not delay a heartbeat.

    Args:
        socket: a bound ROUTER; used by the thread alone once it has started, closed by `close`.

    Attributes:
        num_bytes_served: payload bytes that left, over all pullers.
    """

    def __init__(self, socket: zmq.Socket) -> None:
        self.num_bytes_served = 0
        self._socket = socket
        self._chunks: ChunkServer | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def serve(self, chunks: ChunkServer) -> None:
        """Answer from this one from now on; until the first call nobody is answered."""
        with self._lock:
            self._chunks = chunks

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is answered meanwhile: for whoever changes the documents."""
        with self._lock:
            yield

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._socket.close(linger=0)

    def _run(self) -> None:
        """Answers come first; a delta is encoded bucket by bucket, while nobody waits for an answer."""
        decoder = Decoder(TO_WEIGHTS, max_bytes=MAX_PULL_BYTES)
        while not self._stopping.is_set():
            with self._lock:
                job = self._chunks.next_job() if self._chunks is not None else None
            if self._socket.poll(POLL_MS if job is None else 0):
                self._answer_one(decoder)
            elif job is not None:
                job.step()  # outside the lock: whoever adds a document must not wait for it

    def _answer_one(self, decoder: Decoder) -> None:
        routing_id, *frames = self._socket.recv_multipart()
        try:
            pull = decoder.decode(frames[0])
            assert isinstance(pull, Pull)
            with self._lock:
                if self._chunks is None:
                    return
                chunk, payload = self._chunks.answer(pull)
        except (WireError, IndexError) as error:
            log.warning("refused a pull: %s", error)
            return
        self.num_bytes_served += len(payload)  # before they leave: whoever has them may look at the number
        try:
            self._socket.send_multipart([routing_id, encode(chunk), payload], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # the puller is gone or slow: it asks again
            self.num_bytes_served -= len(payload)
            log.debug("a chunk was not sent: %s", error)
