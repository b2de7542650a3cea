"""LoRA: peft's low-rank layers inside the policy, and the policy's tensors apart as base and adapter.

Everything but the factors is frozen, so gradients, optimizer states, checkpoints and published versions hold the
factors alone. Names are those of the checkpoint: peft puts `.base_layer` behind an adapted layer's name, and
`base_tensors` takes it away again. peft is imported where it is used: that takes two seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from learner.model.adapter.quantize import Dequantized, dequantized, quantize
from learner.model.parameters import policy_parameters, policy_tensors
from learner.model.policy import Policy
from streamrl.config.schema import LoraBase, LoraConfig, LoraInit
from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig

ADAPTER = "default"  # peft's name for the only one
UP_FACTOR = f".lora_B.{ADAPTER}."  # in the names of the factors that are 0 at the start
_FACTOR = f".{ADAPTER}.weight"


def scale_of(config: LoraConfig) -> float:
    """The factor of the low-rank product."""
    assert config.rank is not None
    return config.alpha / config.rank


def peft_config(config: LoraConfig, *, model_path: str | None = None) -> PeftConfig:
    """The settings as peft has them; `model_path` is written into an exported adapter."""
    from peft import LoraConfig as PeftConfig
    from peft import TaskType

    targets: Any = config.target_modules
    return PeftConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        exclude_modules=list(config.exclude) or None,
        init_lora_weights="gaussian" if config.init is LoraInit.gaussian else True,
        task_type=TaskType.CAUSAL_LM, base_model_name_or_path=model_path,
    )


def add_adapter(policy: Policy, config: LoraConfig, *, seed: int, dtype: torch.dtype = torch.float32) -> None:
    """Freeze the policy and give its layers factors, the same on every rank; before it is sharded.

    Args:
        dtype: of the computation.
    Raises:
        ConfigError: names that are no layers of this model, or layers that the scoring does not call.
    """
    from peft import inject_adapter_in_model

    policy.requires_grad_(False)
    if config.base_quantization is not LoraBase.none:
        quantize(policy, config.base_quantization, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(peft_config(config), policy.model, adapter_name=ADAPTER)
        except ValueError as error:
            raise ConfigError(
                f"policy.lora.target_modules={config.target_modules} with policy.lora.exclude={config.exclude} choose "
                f"no layers of this model: set them to ends of its layers' names, or leave both alone. peft: {error}"
            ) from error
    adapted = adapter_layers(policy)
    if any(end in adapted for end in (policy.model.get_input_embeddings(), policy.model.get_output_embeddings())):
        raise ConfigError(
            f"policy.lora.target_modules={config.target_modules} names the embedding or the output layer: tokens are "
            "scored with the output layer's own weight. Set it to linear layers of the decoder, or to [all-linear]."
        )
    strange = next((part for part in adapted if not isinstance(part.get_base_layer(), nn.Linear)), None)
    if strange is not None:
        raise ConfigError(
            f"policy.lora: a {type(strange.get_base_layer()).__name__} layer of this model keeps its weight in a form "
            "that actors cannot add an adapter to: leave it out with policy.lora.exclude, or train every weight."
        )
    for parameter in policy.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)  # FSDP2 would cast it in every pass: masters serve no update


def adapter_layers(module: nn.Module) -> list[Any]:
    """peft's layers with an adapter."""
    from peft.tuners.lora import LoraLayer

    return [part for part in module.modules() if isinstance(part, LoraLayer)]


def adapter_parameters(policy: Policy) -> list[tuple[str, nn.Parameter]]:
    """(name in a published version, parameter) of every factor, in module order."""
    return [
        (name.removesuffix(_FACTOR) + ".weight", parameter)
        for name, parameter in policy_parameters(policy.model) if parameter.requires_grad
    ]


def base_tensors(policy: Policy) -> Iterator[tuple[str, Tensor | Dequantized]]:
    """(checkpoint name, tensor) of every frozen weight, in module order, of tied ones the first; and saved buffers."""
    known = dequantized(policy)
    for name, tensor in policy_tensors(policy.model):
        if not tensor.requires_grad:
            yield name.replace(".base_layer.", "."), known.get(id(tensor), tensor)


def save_adapter(adapter: Mapping[str, Tensor], config: LoraConfig, folder: Path, *, model_path: str) -> None:
    """An adapter as `peft.PeftModel.from_pretrained` reads it."""
    peft_config(config, model_path=model_path).save_pretrained(str(folder))
    tensors = {f"base_model.model.{name}": factor for name, factor in adapter.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


def describe(policy: Policy, config: LoraConfig, lr: float) -> str:
    """One line for the log."""
    count = {trained: sum(p.numel() for p in policy.parameters() if p.requires_grad is trained)
             for trained in (True, False)}
    share = count[True] / max(1, sum(count.values()))
    return (
        f"LoRA: rank {config.rank} on {len(adapter_layers(policy))} layers, {count[True]:,} trained weights "
        f"({share:.2%} of all), learning rate {lr * config.lr_scale:g} = {config.lr_scale:g} x policy.optimizer.lr"
    )

