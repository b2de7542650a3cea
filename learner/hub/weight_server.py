"""The hub's weight socket: which documents it serves, what is offered to actors, and how their installs go."""

from __future__ import annotations

import secrets
from pathlib import Path

import xxhash
import zmq

from learner.hub.settings import HubSettings
from streamrl.messages import Installed, InstallSource, Layout, Manifest, Offer, Publish, VersionRef
from streamrl.transport.sockets import bind, bound_endpoint, hub_router
from streamrl.weights.delta.encoding import word_bytes_of
from streamrl.weights.pull.chunk_server import ChunkServer
from streamrl.weights.pull.chunk_socket import MAX_PULL_BYTES, ChunkSocket
from streamrl.weights.shm.transport import shm_offer


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
        router = hub_router(context, max_message_bytes=MAX_PULL_BYTES, receive_hwm=64)
        bind_host = settings.bind.removeprefix("tcp://").rpartition(":")[0]
        bind(router, f"tcp://{bind_host}:{settings.weights_port}", "hub.weights_port")
        port = bound_endpoint(router).rpartition(":")[2]
        self.endpoint = f"tcp://{host}:{port}"
        self.socket = ChunkSocket(router)

    def start(self) -> None:
        self.socket.start()

    def publish(self, message: Publish, now: float) -> None:
        """A new version is complete on disk: serve it; old ones retire."""
        with self.socket.held():
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
        self.socket.serve(self._chunks)

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
        """Bytes that were pulled, and means over all installs of the run so far."""
        served = {"num_bytes_pulled": float(self.socket.num_bytes_served)}
        if not self._num_installs:
            return served
        sums = dict(self._sums)
        num_visible, visible_s = sums.pop("num_visible", 0.0), sums.pop("visible_s", 0.0)
        found = served | {f"mean_{name}": total / self._num_installs for name, total in sums.items()}
        return {**found, "mean_visible_s": visible_s / num_visible} if num_visible else found

    def close(self) -> None:
        self.socket.close()
