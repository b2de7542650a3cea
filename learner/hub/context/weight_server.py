"""The hub's side of weights: which versions it serves, how installs go, and which actors' weights can be trusted.

    root     in INSTALLED, HELLO and every heartbeat; if it is not what was published for that version: no leases
    probe    an engine that does not compute with what was published is in quarantine: no leases until it passes one
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash
import zmq

from learner.hub.context.settings import HubSettings
from streamrl.errors import WeightsError
from streamrl.messages import Base, Installed, InstallSource, Layout, Manifest, Offer, Probed, Publish, VersionRef
from streamrl.messages.validate import sound
from streamrl.transport.authentication import Authenticator
from streamrl.transport.peers import LogLimit
from streamrl.transport.sockets import bind, bound_endpoint, hub_router
from streamrl.weights.pull.chunk_server import MAX_PULL_BYTES, ChunkServer, ChunkSocket
from streamrl.weights.transport import Published, Transport, load_transport

log = logging.getLogger("streamrl.hub")

NUM_KNOWN_ROOTS = 64
MOST_NATS = 1e6
TIMES = ("transfer_s", "verify_s", "pause_s", "install_s")


@dataclass(slots=True)
class WeightHealth:
    """The health of one incarnation of an actor."""

    incarnation: int
    wrong: VersionRef | None = None  # it named another root for this version
    failed: str = ""  # why it is in quarantine
    needs_score: bool = False  # only log-probs within the tolerance end it
    linked: bool = True
    mean: float = 0.0
    largest: float = 0.0


class WeightHealthTable:
    """The health of all actors.

    Args:
        root_of: the root published for a version; None if the hub does not know it (any more).
        tolerance: largest mean absolute difference of the probe's log-probs, in nats.
    """

    def __init__(self, root_of: Callable[[VersionRef], bytes | None], tolerance: float) -> None:
        self._root_of, self._tolerance = root_of, tolerance
        self._health: dict[str, WeightHealth] = {}
        self._num_probes = self._num_failures = 0
        self._limited_log = LogLimit(log)

    def _of(self, actor_id: str, incarnation: int) -> WeightHealth:
        found = self._health.get(actor_id)
        if found is None or found.incarnation != incarnation:  # a new process starts with no record
            found = self._health[actor_id] = WeightHealth(incarnation)
        found.linked = True
        return found

    def away(self, actor_id: str) -> None:
        """Leave an actor that has no connection out of the metrics; the same process may come back."""
        if actor_id in self._health:
            self._health[actor_id].linked = False

    def forget(self, actor_id: str) -> None:
        """Forget an actor that left the run."""
        self._health.pop(actor_id, None)

    def quarantined(self, actor_id: str, incarnation: int) -> bool:
        return bool(self._of(actor_id, incarnation).failed)

    def wrong_root(self, actor_id: str, incarnation: int, ref: VersionRef, root: bytes) -> bool:
        """Return whether it serves other bytes under this version than were published; logged the first time.

        Args:
            root: b"" if the message had none: its last one holds.
        """
        health, published = self._of(actor_id, incarnation), self._root_of(ref)
        if not root or published is None:
            return health.wrong == ref
        if root == published:
            health.wrong = None if health.wrong == ref else health.wrong
            return False
        if health.wrong != ref:
            health.wrong = ref
            self._limited_log.error("%s serves %s with root %s, published was %s: it gets no leases until it installs "
                                    "again", actor_id, ref, root.hex()[:8], published.hex()[:8])
        return True

    def usable(self, actor_id: str, incarnation: int, ref: VersionRef, root: bytes) -> bool:
        """Return whether leases may rely on what this actor reports to serve."""
        wrong = self.wrong_root(actor_id, incarnation, ref, root)
        return not wrong and not self.quarantined(actor_id, incarnation)

    def probed(self, actor_id: str, incarnation: int, ref: VersionRef, probe: Probed) -> bool:
        """Record the outcome of a probe; False if the actor is in quarantine now."""
        health = self._of(actor_id, incarnation)
        scored = probe.mean is not None and probe.largest is not None
        far = scored and not probe.mean <= self._tolerance  # a NaN is far, too
        self._num_probes += 1
        if scored:  # what is no distance, as a NaN, shows as the largest that there is
            health.mean, health.largest = (
                max(0.0, one if one <= MOST_NATS else MOST_NATS) for one in (probe.mean, probe.largest)
            )
        if probe.failed or far:
            health.failed = probe.failed or f"probe differs by {probe.mean:.3g} nats, allowed {self._tolerance:g}"
            health.needs_score = health.needs_score or far
            self._num_failures += 1
            self._limited_log.error("QUARANTINE: %s does not compute with version %s as published: %s. Its leases are "
                                    "reissued and it gets none until it passes a probe", actor_id, ref, health.failed)
        elif health.failed and (scored or not health.needs_score):
            self._limited_log.warning("%s passes its probe at version %s: it is out of quarantine", actor_id, ref)
            health.failed, health.needs_score = "", False
        return not health.failed

    def metrics(self) -> dict[str, float]:
        """Report counters, and the worst of the last probes of the actors that are there."""
        linked = [health for health in self._health.values() if health.linked]
        return {
            "num_probes": float(self._num_probes),
            "num_probe_failures": float(self._num_failures),
            "num_quarantined": float(sum(bool(health.failed) for health in linked)),
            "probe_mean_difference": max((health.mean for health in linked), default=0.0),
            "probe_largest_difference": max((health.largest for health in linked), default=0.0),
        }


class WeightServer:
    """Serves published versions to every process that has this hub's token, and a key where keys are asked for."""

    def __init__(
        self, context: zmq.Context, settings: HubSettings, host: str, authenticator: Authenticator | None = None
    ) -> None:
        self.pull_token = secrets.token_bytes(16)
        self.layout: Layout | None = None
        self.manifest: Manifest | None = None
        self.base: Base | None = None
        self.assets = b""
        self.assets_digest = bytes(16)
        self._roots: dict[VersionRef, bytes] = {}
        self.health = WeightHealthTable(self._roots.get, settings.publish.probe_tolerance)
        self._settings = settings
        self._published_at = 0.0
        self._transports = {
            name: load_transport(name, setting="publish.transports") for name in settings.publish.transports
        }
        self._offers: list[Offer] = []
        self._sums: Counter[str] = Counter()
        self._chunks: ChunkServer | None = None
        router = hub_router(context, max_message_bytes=MAX_PULL_BYTES, receive_hwm=64)
        if authenticator is not None:
            authenticator.protect(router)
        bind_host = settings.bind.removeprefix("tcp://").rpartition(":")[0]
        bind(router, f"tcp://{bind_host}:{settings.hub.weights_port}", "hub.weights_port")
        port = bound_endpoint(router).rpartition(":")[2]
        self.endpoint = f"tcp://{host}:{port}"
        self.socket = ChunkSocket(router, authenticator)

    def publish(self, message: Publish, now: float) -> None:
        """Serve a new version, which is complete on disk; old ones retire."""
        if message.layout is not None:
            self._prepare(message.layout, Path(message.assets_path).read_bytes())
            self.base = None if message.base is None else self._serve_base(message.base, message.base_path)
        manifest, layout, chunks = message.manifest, self.layout, self._chunks
        if chunks is None or layout is None:
            raise WeightsError("the first Publish must carry the layout, and this one has none")
        with self.socket.lock:
            chunks.add(manifest, message.path, layout)
        self.socket.serve(chunks)
        self.manifest, self._published_at = manifest, now
        self._roots[manifest.ref] = manifest.root
        while len(self._roots) > NUM_KNOWN_ROOTS:
            self._roots.pop(next(iter(self._roots)))
        self._offers = self._make_offers(
            Published(manifest, layout, message.path, self.endpoint, chunks.deltas.parent_of(manifest.ref))
        )

    def _prepare(self, layout: Layout, assets: bytes) -> None:
        """Set up what all versions share, which the first one tells."""
        options = self._settings.publish
        self.layout, self.assets, self.assets_digest = layout, assets, xxhash.xxh3_128_digest(assets)
        self._chunks = ChunkServer(
            pull_token=self.pull_token, assets=assets, keep_versions=options.num_keep_versions,
            max_chunk_bytes=self._settings.limits.chunk_bytes, bytes_per_s=float(options.max_bytes_per_s) or None,
            delta_max_ratio=options.delta_max_ratio,
        )

    def _serve_base(self, base: Base, path: str) -> Base:
        """Serve what all versions are adapters of, over the transports that reach an actor at any time."""
        assert self._chunks is not None
        with self.socket.lock:
            self._chunks.add_base(base.manifest, path, base.layout)
        return msgspec.structs.replace(base, offers=tuple(self._make_offers(
            Published(base.manifest, base.layout, path, self.endpoint)
        )))

    def _make_offers(self, published: Published) -> list[Offer]:
        made = [(name, _offer(name, transport, published)) for name, transport in self._transports.items()]
        return [msgspec.structs.replace(offer, transport=name) for name, offer in made if offer is not None]

    def offers(self) -> tuple[Offer, ...]:
        """List transports of the current version, best first; an actor takes the first that it can verify."""
        assert self.manifest is not None and self._chunks is not None
        parent = self._chunks.deltas.parent_of(self.manifest.ref)  # None once the delta turned out too large
        return tuple(
            offer if offer.parent is None else msgspec.structs.replace(offer, parent=parent) for offer in self._offers
        )

    def count_install(self, message: Installed, now: float) -> None:
        self._sums.update(sound({name: getattr(message, name) for name in TIMES}), num_installs=1)
        newest = self.manifest is not None and message.target == self.manifest.ref
        if newest and message.source != InstallSource.SAME:  # SAME may be a second look at it, much later
            self._sums.update(visible_s=now - self._published_at, num_visible=1)

    def metrics(self) -> dict[str, float]:
        """Report bytes that were pulled, means over all installs of the run so far, and the probes."""
        sums = self._sums
        found = {"num_bytes_pulled": float(self.socket.num_bytes_served), **self.health.metrics()}
        if sums["num_installs"]:
            found |= {f"mean_{name}": sums[name] / sums["num_installs"] for name in TIMES}
        if sums["num_visible"]:
            found["mean_visible_s"] = sums["visible_s"] / sums["num_visible"]
        return found


def _offer(name: str, transport: Transport, published: Published) -> Offer | None:
    """Make the transport's offer; None, logged, if it cannot: another transport brings this version."""
    try:
        return transport.offer(published)
    except OSError as error:
        log.info("version %s is not offered over %s: %s", published.manifest.ref, name, error)
    except Exception:
        log.exception("version %s is not offered over %s", published.manifest.ref, name)
    return None
