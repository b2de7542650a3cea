"""The frozen weights under an adapter: published once, and told apart from others by a digest of their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from learner.ranks.mesh import Ranks
from streamrl.config.schema import LoraConfig
from streamrl.errors import ConfigError
from streamrl.weights.saved import weights_digest


@dataclass(frozen=True, slots=True)
class AdapterOf:
    """The base that an adapter belongs to, as its checkpoints name it."""

    rank: int
    alpha: float
    base: str
    base_digest: str
    target_modules: tuple[str, ...] = ("all-linear",)
    exclude: tuple[str, ...] = ()
    base_quantization: str = "none"

    def to_plain(self) -> dict[str, Any]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def describe_adapter(config: LoraConfig, model_dir: Path, ranks: Ranks) -> AdapterOf | None:
    """None if every weight is trained. The digest reads all files of weights, on rank 0; "" elsewhere."""
    if config.rank is None:
        return None
    return AdapterOf(
        config.rank, config.alpha, str(model_dir.resolve()), weights_digest(model_dir) if ranks.rank == 0 else "",
        tuple(sorted(config.target_modules)), tuple(sorted(config.exclude)), config.base_quantization.name,
    )


def check_resumed(saved: Mapping[str, Any] | None, now: AdapterOf | None, ranks: Ranks) -> None:
    """Refuse to go on with other adapters, or over another base; a collective call.

    Args:
        saved: `AdapterOf.to_plain` of the checkpoint; None if it holds every weight.
    Raises:
        ConfigError: on every rank.
    """
    problem = _difference(saved, now) if ranks.rank == 0 else ""
    if ranks.maximum(float(bool(problem))):
        raise ConfigError(problem or "rank 0 found another adapter or base in the checkpoint")


def _difference(saved: Mapping[str, Any] | None, now: AdapterOf | None) -> str:
    if saved is None or now is None:
        if (saved is None) is (now is None):
            return ""
        return (
            f"the checkpoint holds an adapter of rank {saved['rank']}, and policy.lora.rank is not set: set "
            f"policy.lora.rank={saved['rank']}" if saved is not None else
            f"policy.lora.rank={now.rank}, but the checkpoint holds all weights: leave policy.lora.rank=null, or start "
            "a new run"
        )
    mine = now.to_plain()
    for name in ("rank", "alpha", "target_modules", "exclude", "base_quantization"):
        if saved.get(name, mine[name]) != mine[name]:  # absent from a checkpoint that is older than the field
            return (
                f"policy.lora.{name}={_words(mine[name])}, but the checkpoint's adapter was trained with "
                f"{_words(saved[name])}: set policy.lora.{name}={_words(saved[name])}, or start a new run"
            )
    if saved["base_digest"] != now.base_digest:
        return (
            f"the checkpoint's adapter belongs to the weights of {saved['base']} (digest {saved['base_digest'][:8]}), "
            f"those in {now.base} are others ({now.base_digest[:8]}): set policy.model_path to the former"
        )
    return ""


def _words(value: Any) -> str:
    """The value as a command line writes it."""
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)
