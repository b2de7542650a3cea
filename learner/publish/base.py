"""The frozen weights under an adapter, published once for the life of the learner."""

from __future__ import annotations

import torch

from learner.model.adapter.lora import base_tensors, scale_of
from learner.model.policy import Policy
from learner.publish.publisher import Publisher
from learner.ranks.mesh import Ranks
from streamrl.config.schema import LoraConfig
from streamrl.errors import WeightsError
from streamrl.messages import Base
from streamrl.weights.adapter import BASE_REF
from streamrl.weights.shm.transport import ShmPublisher


def publish_base(
    policy: Policy, lora: LoraConfig, *, wire_dtype: torch.dtype, bucket_bytes: int, ranks: Ranks,
    shm: ShmPublisher | None,
) -> tuple[Base, str] | None:
    """Stage the frozen weights for as long as the learner lives; a collective call.

    Returns:
        what to announce, and the document's path; None on ranks other than 0.
    Raises:
        WeightsError: no room.
    """
    publisher = Publisher(
        list(base_tensors(policy)), wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, shm=shm,
        ranks=ranks, for_good=True,
    )
    try:
        published = publisher.publish(BASE_REF)
    except WeightsError as error:
        raise WeightsError(f"the base of policy.lora.rank={lora.rank}: {error}") from error
    if published is None:
        return None
    return Base(published.manifest, publisher.layout, scale_of(lora)), str(published.path)
