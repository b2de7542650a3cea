"""Installation of a version in an engine: as a whole model, as an adapter beside its base, or merged with it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from actors.engines.base import Engine, InstallTimes, TakesAdapters
from streamrl.messages import Base, InstallSource, VersionRef
from streamrl.weights.adapter import merged
from streamrl.weights.document import Document
from streamrl.weights.manifest import same_weights
from streamrl.weights.transport import FetchedVersion


@dataclass(slots=True)
class HeldBase:
    """The base that an actor fetched; `loaded` once the engine has it."""

    document: Document
    scale: float
    loaded: bool = False
    damaged: bool = False

    def serves(self, base: Base) -> bool:
        """Whether it is the base that the hub names."""
        same = same_weights(self.document.manifest, base.manifest) and self.scale == base.scale
        return same and not self.damaged


async def install_version(engine: Engine, document: Document, ref: VersionRef, base: HeldBase | None) -> InstallTimes:
    """Give the engine this version. Raises: as `Engine.install`."""
    if base is None:
        return await engine.install(document.tensors(), ref)
    if not isinstance(engine, TakesAdapters):
        return await engine.install(dict(merged(base.document.tensors(), document.tensors(), base.scale)), ref)
    if not base.loaded:
        await engine.install_base(base.document.tensors())
        base.loaded = True
    return await engine.install_adapter(document.tensors(), ref)


async def verify_again(fetched: FetchedVersion, base: HeldBase | None) -> None:
    """Digest what has lain in memory while the engine had none, before it wakes with it.

    Raises:
        WeightsError: it is damaged, with the first wrong bucket.
    """
    if fetched.source == InstallSource.SAME:
        await asyncio.to_thread(_digest, fetched.document)
    if base is not None:
        base.loaded, base.damaged = False, True
        await asyncio.to_thread(_digest, base.document)
        base.damaged = False


def _digest(document: Document) -> None:
    body = document.view(0, document.nbytes)
    Document(body, document.manifest, document.layout).verify()
