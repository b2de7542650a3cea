"""LoRA: peft's low-rank layers inside the policy, and the policy's tensors apart as base and adapter.

Everything but the factors is frozen, so gradients, optimizer states, checkpoints and published versions hold the
factors alone. Names are those of the checkpoint: peft puts `.base_layer` behind an adapted layer's name, and
`base_tensors` takes it away again. peft is imported where it is used: that takes two seconds.

QLoRA: the frozen linear layers in 4 or 8 bits, by bitsandbytes. Actors get the weights that the learner computes with,
which are the dequantized ones: a quantized base changes no ratio. On a GPU the layers of `int8` also round their
inputs, which actors do not.

A frozen policy (`FrozenAdapter`) is another adapter on the same base, so no second copy of the weights. The reference
of a KL term starts as the base alone: an adapter whose second factors are 0 adds exactly 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from learner.checkpoint.shards import reshard
from learner.data.packing import MicroBatch
from learner.model.networks import FrozenPolicy
from learner.model.policy import Policy, policy_parameters, policy_tensors
from learner.ranks.mesh import Ranks, local_part
from streamrl.config.schema import LoraBase, LoraConfig, LoraInit
from streamrl.errors import ConfigError, install_extra
from streamrl.extension import did_you_mean
from streamrl.weights.adapter import adapted_layers
from streamrl.weights.saved import weights_digest

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig

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


class Dequantized:
    """A quantized weight in full precision, made whole on demand."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.shape = torch.Size((layer.out_features, layer.in_features))

    def full_tensor(self) -> Tensor:
        """[out, in] in the type that the layer computes with."""
        from peft.utils.integrations import dequantize_bnb_weight

        return dequantize_bnb_weight(self._layer.weight, state=getattr(self._layer, "state", None))


def check_quantization(how: LoraBase) -> None:
    """Raise ConfigError without bitsandbytes."""
    if how is not LoraBase.none and find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"policy.lora.base_quantization={how.name} needs the package bitsandbytes: {install_extra('qlora')}, "
            "or leave it at none."
        )


def quantize(policy: Policy, how: LoraBase, dtype: torch.dtype) -> None:
    """Put every linear layer but the output layer into `how`; before adapters are added.

    Args:
        dtype: of the computation.
    """
    check_quantization(how)
    head = policy.model.get_output_embeddings()
    for name, layer in list(policy.model.named_modules()):
        if type(layer) is nn.Linear and layer is not head:
            parent, _, own = name.rpartition(".")
            setattr(policy.model.get_submodule(parent), own, _quantized(layer, how, dtype))
    policy.is_loaded_in_4bit = how is LoraBase.nf4  # peft chooses its layers by these
    policy.is_loaded_in_8bit = how is LoraBase.int8


def _quantized(layer: nn.Linear, how: LoraBase, dtype: torch.dtype) -> nn.Module:
    import bitsandbytes

    weight, sizes = layer.weight.detach(), (layer.in_features, layer.out_features, layer.bias is not None)
    if how is LoraBase.nf4:
        made = bitsandbytes.nn.Linear4bit(*sizes, compute_dtype=dtype, quant_type="nf4")
        made.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=made)
    else:
        made = bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=0.0)
        made.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    made.bias = layer.bias
    return made.to(weight.device)  # which quantizes


def dequantized(module: nn.Module) -> dict[int, Dequantized]:
    """Id of a quantized weight -> its dequantized form."""
    return {
        id(layer.weight): Dequantized(layer) for layer in module.modules()
        if isinstance(layer, nn.Linear) and not layer.weight.is_floating_point()
    }


ADAPTER = "default"  # peft's name for the only one
UP_FACTOR = f".lora_B.{ADAPTER}."  # in the names of the factors that are 0 at the start
_FACTOR = f".{ADAPTER}.weight"


def scale_of(config: LoraConfig) -> float:
    """The factor of the low-rank product."""
    assert config.rank is not None
    return config.alpha / config.rank


def peft_config(config: LoraConfig, targets: Sequence[str], *, model_path: str | None = None) -> PeftConfig:
    """The settings as peft has them, with an adapter for these names of layers.

    Args:
        model_path: written into an exported adapter.
    """
    from peft import LoraConfig as PeftConfig
    from peft import TaskType

    return PeftConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=list(targets),
        exclude_modules=list(config.exclude) or None,
        init_lora_weights="gaussian" if config.init is LoraInit.gaussian else True,
        task_type=TaskType.CAUSAL_LM, base_model_name_or_path=model_path,
    )


def add_adapter(policy: Policy, config: LoraConfig, *, seed: int, dtype: torch.dtype = torch.float32) -> None:
    """Freeze the policy and give its layers factors, the same on every rank; before it is sharded.

    Its weights may be yet to be loaded, unless they are to be quantized.

    Args:
        dtype: of the computation.
    Raises:
        ConfigError: names that are no layers of this model, or layers that the scoring does not call.
    """
    from peft import inject_adapter_in_model

    policy.requires_grad_(False)
    if config.base_quantization is not LoraBase.none:
        quantize(policy, config.base_quantization, dtype)
    names = [f"model.{name}" for name in chosen_layers(policy.model, config)]
    layers = [policy.get_submodule(name) for name in names]
    with torch.random.fork_rng(devices=[]), _on_the_host(layers):
        torch.manual_seed(seed)
        # Into the policy: for a mixture of transformers peft would read names of layers as those of its experts.
        inject_adapter_in_model(peft_config(replace(config, exclude=[]), names), policy, adapter_name=ADAPTER)
    for parameter in policy.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)  # FSDP2 would cast it in every pass: masters serve no update


@contextmanager
def _on_the_host(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, weights that are yet to be loaded are on the host, where they take no memory.

    peft moves a layer's factors to where its weight is: without a device their values would be lost.
    """
    weights = [layer.weight for layer in layers]
    for layer, weight in zip(layers, weights, strict=True):
        if weight.is_meta:
            stand_in = torch.zeros(()).expand(weight.shape)
            layer.weight = nn.Parameter(stand_in, requires_grad=False)
    try:
        yield
    finally:
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight = weight


def chosen_layers(model: Any, config: LoraConfig) -> list[str]:
    """Names of the layers that get an adapter: linear ones, but for the output layer.

    The experts of a mixture are one tensor a layer, and its router is no linear layer: they stay frozen.

    Raises:
        ConfigError: a name that is no such layer's, or none is left.
    """
    head = model.get_output_embeddings()
    modules = {name: module for name, module in model.named_modules() if name}
    # A class of the architecture's own, as of a router, may compute more than a product; some routers read a layer's
    # weight without calling it.
    plain = [
        name for name, module in modules.items()
        if isinstance(module, nn.Linear) and module is not head
        and not type(module).__module__.startswith("transformers.")
        and "Router" not in type(model.get_submodule(name.rpartition(".")[0])).__name__
    ]
    if not plain:
        kinds = sorted({type(module).__name__ for module in modules.values() if hasattr(module, "weight")})
        raise ConfigError(
            "policy.lora.rank: this model has no linear layer beside the output layer, and actors add adapters to no "
            f"other ({', '.join(kinds)}): leave policy.lora.rank=null to train every weight."
        )
    everything = config.target_modules == ["all-linear"]
    for one in () if everything else config.target_modules:
        if not any(_ends_with(name, one) for name in plain):
            raise _no_such_layer("target_modules", one, model, modules, plain)
    for one in config.exclude:
        around = [name for name in modules if _ends_with(name, one)]
        holds = any(name.startswith(f"{other}.") for name in plain for other in around)
        if not any(_ends_with(name, one) for name in plain) and (holds or not around):
            raise _no_such_layer("exclude", one, model, modules, plain)  # what holds none has no adapter anyway
    chosen = [
        name for name in plain
        if (everything or any(_ends_with(name, one) for one in config.target_modules))
        and not any(_ends_with(name, one) for one in config.exclude)
    ]
    if not chosen:
        raise ConfigError(
            f"policy.lora.exclude={config.exclude} leaves no layer of policy.lora.target_modules="
            f"{config.target_modules}: remove a name of it."
        )
    return chosen


def _no_such_layer(
    setting: str, given: str, model: Any, modules: Mapping[str, nn.Module], plain: Sequence[str]
) -> ConfigError:
    """The error about a name that chooses no layer, with those that do."""
    found = next((module for name, module in modules.items() if _ends_with(name, given)), None)
    what = "no layer" if found is None else f"no linear layer ({type(found).__name__})"
    if found is not None and found in (model.get_input_embeddings(), model.get_output_embeddings()):
        what = "the embedding or the output layer"
    ends = sorted({name.rpartition(".")[2] for name in plain})
    return ConfigError(
        f"policy.lora.{setting}: {given!r} is {what} of this model: use ends of its linear layers' names, which are "
        f"{', '.join(ends)}.{did_you_mean(given, ends)}{_of_experts(modules)}"
    )


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _of_experts(modules: Mapping[str, nn.Module]) -> str:
    """A sentence on a mixture's experts, if the model has any."""
    has = any(name.endswith(".experts") and not isinstance(one, nn.ModuleList) for name, one in modules.items())
    return " The experts are one tensor a layer and stay frozen: train every weight to train them." if has else ""


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
    # "all-linear" would be the experts too, for peft and a mixture of transformers.
    ends = sorted({layer.rpartition(".")[2] for layer in adapted_layers(adapter)})
    targets = ends if config.target_modules == ["all-linear"] else config.target_modules
    written = peft_config(config, targets, model_path=model_path)
    for name in ("target_modules", "exclude_modules"):  # sets, whose order is another one in each process
        setattr(written, name, sorted(getattr(written, name) or ()) or None)
    written.save_pretrained(str(folder))
    tensors = {f"base_model.model.{name}": factor for name, factor in adapter.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


def describe(policy: Policy, config: LoraConfig, lr: float) -> str:
    """One line for the log."""
    count = {trained: sum(p.numel() for p in policy.parameters() if p.requires_grad is trained)
             for trained in (True, False)}
    experts = _of_experts(dict(policy.model.named_modules()))
    share = count[True] / max(1, sum(count.values()))
    return (
        f"LoRA: rank {config.rank} on {len(adapter_layers(policy))} layers, {count[True]:,} trained weights "
        f"({share:.2%} of all), learning rate {lr * config.lr_scale:g} = {config.lr_scale:g} x policy.optimizer.lr"
        f"{'.' * bool(experts)}{experts}"
    )


class FrozenAdapter(FrozenPolicy):
    """Factors of its own, put in the place of the policy's while it scores.

    Args:
        policy: shared with the run; it is trained on meanwhile.
        off: start as the base alone, not as the policy.
    """

    def __init__(self, policy: Policy, *, name: str, off: bool) -> None:
        self.name, self._policy = name, policy
        self._own = {
            key: parameter.detach().clone() for key, parameter in policy.named_parameters() if parameter.requires_grad
        }
        for key, factor in self._own.items():
            if off and UP_FACTOR in key:
                factor.zero_()

    @torch.no_grad()
    def score(self, batch: MicroBatch) -> Tensor:
        with self._in_place():
            return super().score(batch)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((f"frozen/{self.name}/{key}", factor) for key, factor in self._own.items())

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        pairs = list(self._pairs(self._policy))
        theirs = [other.clone() for _, other in pairs]
        for mine, other in pairs:
            other.copy_(mine)
        try:
            yield
        finally:
            reshard(self._policy)
            for (_, other), before in zip(pairs, theirs, strict=True):
                other.copy_(before)

    def _pairs(self, source: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        reshard(source)
        theirs = dict(source.named_parameters())
        for key, factor in self._own.items():
            mine, other = local_part(factor), local_part(theirs[key].detach())
            if mine.numel():
                yield mine, other
