"""The weight socket: one thread, one ROUTER, chunks out of the mapped documents. It shares only the document table."""

from __future__ import annotations

import logging
import secrets
import threading
from pathlib import Path

import xxhash
import zmq

from learner.hub.hub_settings import HubSettings
from streamrl.codec import Decoder, encode
from streamrl.errors import WireError
from streamrl.messages import TO_WEIGHTS, Installed, InstallSource, Layout, Manifest, Offer, Publish, Pull, VersionRef
from streamrl.transport.sockets import bind, bound_endpoint, hub_router
from streamrl.weights.chunks import ChunkServer
from streamrl.weights.delta import word_bytes_of
from streamrl.weights.shm import shm_offer

log = logging.getLogger("streamrl.hub")

POLL_MS = 100


class WeightServer:
    """Serves published documents to whoever holds this hub's token."""

    def __init__(self, context: zmq.Context, settings: HubSettings, host: str) -> None:
        self.pull_token = secrets.token_bytes(16)
        self.layout: Layout | None = None
        self.manifest: Manifest | None = None
        self.assets = b""
        self.assets_digest = bytes(16)
        self._settings = settings
        self._path = ""
        self._published_at = 0.0
        self._roots: dict[VersionRef, bytes] = {}
        self._sums: dict[str, float] = {}
        self._num_installs = 0
        self._chunks: ChunkServer | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._socket = hub_router(context, max_message_bytes=4096, receive_hwm=64)
        bind_host = settings.bind.removeprefix("tcp://").rpartition(":")[0]
        bind(self._socket, f"tcp://{bind_host}:{settings.weights_port}", "hub.weights_port")
        port = bound_endpoint(self._socket).rpartition(":")[2]
        self.endpoint = f"tcp://{host}:{port}"
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def publish(self, message: Publish, now: float) -> None:
        """A new version is complete on disk: serve it; old ones retire."""
        with self._lock:
            if message.layout is not None:
                self.layout = message.layout
                self.assets = Path(message.assets_path).read_bytes()
                self.assets_digest = xxhash.xxh3_128_digest(self.assets)
                self._chunks = ChunkServer(
                    pull_token=self.pull_token, assets=self.assets,
                    keep_versions=self._settings.num_keep_versions,
                    max_chunk_bytes=self._settings.limits.chunk_bytes,
                    bytes_per_s=float(self._settings.max_bytes_per_s) or None,
                    delta_max_ratio=self._settings.delta_max_ratio,
                )
            assert self._chunks is not None and self.layout is not None, "the first Publish carries the layout"
            self._chunks.add(
                message.manifest, message.path, self.layout.bucket_bytes, word_bytes=word_bytes_of(self.layout)
            )
            self.manifest, self._path, self._published_at = message.manifest, message.path, now
            self._roots[message.manifest.ref] = message.manifest.root
            while len(self._roots) > 64:
                self._roots.pop(next(iter(self._roots)))

    def root_of(self, ref: VersionRef) -> bytes | None:
        """The root published for this version; None if it is too old to be known."""
        return self._roots.get(ref)

    def offers(self) -> tuple[Offer, ...]:
        """Ways to the current version, best first; an actor takes the first that it can prove."""
        assert self.layout is not None and self.manifest is not None and self._chunks is not None
        parent = self._chunks.delta_parent(self.manifest.ref)
        zmq_offer = Offer("zmq", self.endpoint, sum(self.layout.bucket_bytes), parent=parent)
        try:
            return (shm_offer(self._path), zmq_offer)
        except OSError:
            return (zmq_offer,)

    def count_install(self, message: Installed, now: float) -> None:
        self._num_installs += 1
        names = ("transfer_s", "verify_s", "pause_s", "install_s")
        for name in names:
            self._sums[name] = self._sums.get(name, 0.0) + getattr(message, name)
        newest = self.manifest is not None and message.target == self.manifest.ref
        if newest and message.source != InstallSource.SAME:  # SAME may be a second look at it, much later
            self._sums["visible_s"] = self._sums.get("visible_s", 0.0) + now - self._published_at
            self._sums["num_visible"] = self._sums.get("num_visible", 0.0) + 1

    def metrics(self) -> dict[str, float]:
        """Means over all installs of the run so far."""
        if not self._num_installs:
            return {}
        sums = dict(self._sums)
        num_visible, visible_s = sums.pop("num_visible", 0.0), sums.pop("visible_s", 0.0)
        found = {f"mean_{name}": total / self._num_installs for name, total in sums.items()}
        return {**found, "mean_visible_s": visible_s / num_visible} if num_visible else found

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._socket.close(linger=0)

    def _run(self) -> None:
        """Answers come first; a delta is encoded bucket by bucket, while nobody waits for an answer."""
        decoder = Decoder(TO_WEIGHTS, max_bytes=4096)
        while not self._stopping.is_set():
            with self._lock:
                job = self._chunks.next_job() if self._chunks is not None else None
            if self._socket.poll(POLL_MS if job is None else 0):
                self._answer_one(decoder)
            elif job is not None:
                job.step()  # outside the lock: `publish` must not wait for it

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
        try:
            self._socket.send_multipart([routing_id, encode(chunk), payload], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # the puller is gone or slow: it asks again
            log.debug("a chunk was not sent: %s", error)
