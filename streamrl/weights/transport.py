"""Transports by name: how the hub offers a version over one, and how an actor receives it.

`streamrl.messages.TRANSPORTS` leads from a name to its `Transport`, and one entry there adds one of ours. A setting
(`publish.transports`, `actors.transports`) may also name a user's own as `package.module:attribute`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import zmq

from streamrl.errors import ConfigError
from streamrl.extension import import_attribute, resolve
from streamrl.messages import TRANSPORTS, InstallSource, Layout, Limits, Manifest, Offer, VersionRef
from streamrl.weights.document import Document


@dataclass(frozen=True, slots=True)
class Published:
    """The newest version, as the hub has it.

    Attributes:
        path: its document on the hub's host, in the form of `streamrl.weights.document`; never written again.
        endpoint: of the hub's weight socket.
        parent: the version from which a delta can be pulled there; None without one.
    """

    manifest: Manifest
    layout: Layout
    path: str
    endpoint: str
    parent: VersionRef | None = None

    @property
    def nbytes(self) -> int:
        return sum(self.layout.bucket_bytes)


Brought = tuple[Document, float, float]
"""(document, transfer_s, verify_s)"""


class Receiver(Protocol):
    """Fetches one document that was offered; `source` says how it came, in INSTALLED and in the metrics."""

    source: InstallSource

    def receive(self, manifest: Manifest, layout: Layout, *, cancelled: threading.Event, deadline: float) -> Brought:
        """Fetch until `deadline`, on the monotonic clock.

        Raises:
            NotAvailable: the document cannot be had over this transport from here.
            Superseded: `cancelled` was set. WeightsError: the bytes are wrong.
        """
        ...


class ActorSide(Protocol):
    """The part of its actor that a receiver may use (`streamrl.weights.source.WeightSource`)."""

    context: zmq.Context
    pull_token: bytes
    limits: Limits

    def zmq_receiver(self, offer: Offer) -> Receiver: ...


@dataclass(frozen=True, slots=True)
class Transport:
    """One transport of weights.

    Attributes:
        offer: hub side, once for every version, in the hub's thread: it must not wait. None, or an OSError, leaves this
            transport out. The hub puts the transport's name into the offer.
        receiver: actor side, once for every fetch. None for those from GPU to GPU, whose receivers share a state that
            an actor keeps (`actors.weights.device`), and whose offers the hub makes for each actor alone.
        require: raises ConfigError where the learner's device cannot use it.
    """

    offer: Callable[[Published], Offer | None] = lambda published: None
    receiver: Callable[[Offer, ActorSide], Receiver] | None = None
    require: Callable[[str], None] = lambda device: None

    @property
    def on_device(self) -> bool:
        """Whether it moves bytes from GPU to GPU."""
        return self.receiver is None


def load_transport(name: str, *, setting: str) -> Transport:
    """The transport that a setting names. Raises ConfigError if there is none, or it is no `Transport`."""
    found: object = resolve(name, TRANSPORTS, setting=setting)
    if name in TRANSPORTS:
        found = import_attribute(TRANSPORTS[name], setting=setting)
    if not isinstance(found, Transport):
        raise ConfigError(f"{setting}={name} is {type(found).__name__}: it must be a {__name__}.Transport")
    return found


def device_transports(names: Iterable[str], *, setting: str) -> list[str]:
    """Select the transports that need a GPU on both sides."""
    return [name for name in names if load_transport(name, setting=setting).on_device]
