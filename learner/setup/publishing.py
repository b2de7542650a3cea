"""Parts of publishing: the publisher of the weights, and the base of an adapter."""

from __future__ import annotations

from typing import Any

from learner.checkpoint.run_lock import RunLock
from learner.hub_client.link import HubLink
from learner.model.adapter.lora import adapter_parameters
from learner.model.paths import wire_dtype
from learner.model.policy import Policy, policy_tensors
from learner.publish.publisher import Publisher, publish_base
from learner.publish.publishing import Publishing
from learner.ranks.background import Background
from learner.ranks.mesh import Ranks
from streamrl.config.schema import LoraConfig, PublishConfig
from streamrl.config.schema_system import BesideTraining
from streamrl.weights.shm.transport import ShmPublisher
from streamrl.weights.transport import device_transports


def make_publishing(
    settings: PublishConfig, lora: LoraConfig, policy: Policy, ranks: Ranks, hub: HubLink, *,
    shm: ShmPublisher | None, lock: RunLock | None,
) -> Publishing:
    """This rank's part in publishing the policy, or the adapter on it; a collective call."""
    wire = wire_dtype(settings.dtype, ranks.device)
    publisher = Publisher(
        published_parameters(policy, lora), wire_dtype=wire,
        bucket_bytes=settings.bucket_bytes, shm=shm, ranks=ranks, fence=lock.check if lock else None,
        fold=bool(device_transports(settings.transports, setting="publish.transports")),
    )
    base = None
    if lora.rank:
        base = publish_base(
            policy, lora, wire_dtype=wire, bucket_bytes=settings.bucket_bytes, ranks=ranks, shm=shm
        )
    background = background_of(settings.beside_training, ranks, "publish")
    return Publishing(publisher, hub, ranks, base=base, background=background)


def published_parameters(policy: Policy, lora: LoraConfig) -> list[tuple[str, Any]]:
    """Name and tensor of all that actors get: the policy, or the adapter on it."""
    return adapter_parameters(policy) if lora.rank else policy_tensors(policy.model)


def background_of(wish: BesideTraining, ranks: Ranks, name: str) -> Background[Any] | None:
    """A thread for work in the background, where the setting asks for one here; a collective call."""
    asked = wish is BesideTraining.always or (wish is BesideTraining.auto and ranks.device.type == "cuda")
    return Background(ranks, name) if asked else None
