"""The forward pass of Llama, Qwen2 and Qwen3 without a call of their modules.

A pass of a small model is mostly Python: modules, the interfaces of attention and masks, rotations computed again. Here
it is a list of tensor operations over weights that are looked up when a version is installed. Matrices that read the
same input lie below each other in memory (`matrices.lay_below`) and are one product. `why_plain` alone decides which
models get this pass; all others keep transformers' own code, which is also what tests compare it with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers.activations import SiLUActivation

from actors.engines.native.matrices import Product, lay_below, product
from actors.engines.native.weights import checkpoint_tensors
from streamrl.architectures.attention import CAUSAL, MaskRule
from streamrl.architectures.rope import depends_on_length

FAMILIES = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_PARTS = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU, SiLUActivation)  # and the classes of the family's module


class Attends(Protocol):
    """The attention of one pass: `forward.PassView`."""

    def attend_tokens(self, query: Tensor, key: Tensor, value: Tensor, rule: MaskRule, options: Any) -> Tensor: ...


def why_plain(model: nn.Module) -> str | None:
    """Tell why a model keeps transformers' own pass; None: it gets the lean one."""
    if type(model) not in FAMILIES:
        return f"{type(model).__name__} is none of the families"
    for name, module in model.named_modules():
        if type(module).__module__ != type(model).__module__ and type(module) not in _PARTS:
            return f"{name} is a {type(module).__name__}, which is no part of the family"
        if "forward" in vars(module):
            return f"{name} has a forward of its own"
    strange = {(str(one.dtype), one.device.type) for one in model.parameters()} - {("torch.float32", "cpu")}
    if strange:
        return f"weights of {strange}: only float32 on a CPU is measured"
    kinds = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"layers of {kinds}"
    if any(hooks_of(model)):
        return "hooks in its modules, which adapters have"
    rotary = model.model.rotary_emb
    if depends_on_length(rotary.rope_type):
        return f"rotations ({rotary.rope_type}) that depend on the length of a pass"
    if 2 * rotary.inv_freq.shape[0] != model.model.layers[0].self_attn.head_dim:
        return "rotations of a part of each head"
    return None


class _Layer(NamedTuple):
    """A decoder layer's weights, ready for use."""

    norm: Tensor
    heads: Product  # query, key and value
    head_norms: Tensor | None  # [query and key heads, dim]
    out: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product


class Ready(NamedTuple):
    """The weights of a version, ready for use."""

    embedding: Tensor
    layers: list[_Layer]
    norm: Tensor
    head: Product


_HEADS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


class LeanPass:
    """Runs a model for which `why_plain` is None. All methods but `ready` belong to one thread.

    Args:
        max_tokens: of the longest sequence.
        int8: matrices of layers are those of `matrices.product` in int8; the output layer's is not.
    """

    def __init__(
        self,
        model: nn.Module,
        max_tokens: int,
        *,
        int8: bool = False,
    ) -> None:
        self._int8 = int8
        self._initial = checkpoint_tensors(model)
        self._ready: Ready | None = None
        self._hooks = hooks_of(model)
        config = model.config
        attention = model.model.layers[0].self_attn
        self._shape = (config.hidden_size,)
        self._head_shape = (attention.head_dim,)
        self._eps = config.rms_norm_eps
        self._queries = config.num_attention_heads
        self._keys = config.num_key_value_heads
        self._num_layers = config.num_hidden_layers
        self._options = {"scaling": attention.scaling}
        for layer in model.model.layers:
            for names in (_HEADS, _GATE_UP):
                lay_below([layer.get_submodule(name).weight for name in names])
        self._cos, self._sin = _rotations(model, max_tokens)

    @property
    def applies(self) -> bool:
        """The next pass may be lean unless a hook came later, anywhere in the model: it would not be called."""
        return not any(self._hooks)

    @property
    def in_use(self) -> Ready | None:
        """The weights of the next pass; None before the first one, if nothing was installed."""
        return self._ready

    def ready(self, tensors: Mapping[str, Tensor]) -> Ready:
        """Weights that a pass reads, out of these, named as in a checkpoint; in any thread."""
        embedding = tensors["model.embed_tokens.weight"].data
        head = product([tensors.get("lm_head.weight", embedding)], [])
        layers = [self._layer(tensors, f"model.layers.{number}.") for number in range(self._num_layers)]
        return Ready(embedding, layers, tensors["model.norm.weight"].data, head)

    def _layer(self, tensors: Mapping[str, Tensor], prefix: str) -> _Layer:
        def products(*names: str) -> Product:
            weights = [f"{prefix}{name}.weight" for name in names]
            biases = [f"{prefix}{name}.bias" for name in names]
            return product(
                [tensors[name] for name in weights],
                [tensors[name] for name in biases if name in tensors],
                int8=self._int8,
            )

        def norm(name: str) -> Tensor:
            return tensors[f"{prefix}{name}.weight"].data

        head_norms = None
        if f"{prefix}self_attn.q_norm.weight" in tensors:
            query = norm("self_attn.q_norm")
            key = norm("self_attn.k_norm")
            head_norms = torch.cat([
                query.expand(self._queries, -1),
                key.expand(self._keys, -1),
            ])
        return _Layer(
            norm=norm("input_layernorm"),
            heads=products(*_HEADS),
            head_norms=head_norms,
            out=products("self_attn.o_proj"),
            mlp_norm=norm("post_attention_layernorm"),
            gate_up=products(*_GATE_UP),
            down=products("mlp.down_proj"),
        )

    def use(self, ready: Ready | None) -> None:
        """Take other weights; None drops those there are."""
        self._ready = ready

    def __call__(self, ids: Tensor, positions: Tensor, view: Attends, wanted: Tensor | None) -> Tensor:
        """Logits [wanted, vocab] of the tokens `wanted`, None for all; ids and positions are [tokens]."""
        if self._ready is None:  # nothing was installed yet
            self._ready = self.ready(self._initial)
        embedding, layers, norm, head = self._ready
        hidden = F.embedding(ids, embedding)
        cos = self._cos.index_select(0, positions)
        sin = self._sin.index_select(0, positions)
        for number, layer in enumerate(layers, 1):
            normed = self._normed(hidden, layer.norm)
            mixed = self._attend(layer, normed, cos, sin, view)
            if number == len(layers) and wanted is not None:
                # No later layer reads the others.
                mixed = mixed.index_select(0, wanted)
                hidden = hidden.index_select(0, wanted)
            hidden = layer.out(mixed).add_(hidden)
            normed = self._normed(hidden, layer.mlp_norm)
            gate, up = layer.gate_up(normed).chunk(2, -1)
            inner = F.silu(gate).mul_(up)
            hidden = layer.down(inner).add_(hidden)
        return head(self._normed(hidden, norm))

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return torch.rms_norm(hidden, self._shape, weight, self._eps)

    def _attend(self, layer: _Layer, normed: Tensor, cos: Tensor, sin: Tensor, view: Attends) -> Tensor:
        """Heads of all tokens, before the layer's output matrix: [tokens, heads * dim]."""
        heads = layer.heads(normed).unflatten(-1, (-1, *self._head_shape))
        values_from = self._queries + self._keys
        turned, value = heads[:, :values_from], heads[:, values_from:]
        if layer.head_norms is not None:
            turned = torch.rms_norm(turned, self._head_shape, None, self._eps)
            turned.mul_(layer.head_norms)
        rolled = turned.roll(self._head_shape[0] // 2, -1)
        turned = (turned * cos).addcmul_(rolled, sin)
        query = turned[:, : self._queries]
        key = turned[:, self._queries :]
        mixed = view.attend_tokens(query, key, value, CAUSAL, self._options)
        return mixed.flatten(1)


def _rotations(model: Any, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [max_tokens, 1, dim] of transformers' own rotations, once for every position.

    They turn a head x into x * cos + roll(x, dim / 2) * sin: what `rotate_half` negates is negated in the sines.
    """
    with torch.inference_mode(False), torch.no_grad():
        cos, sin = model.model.rotary_emb(model.model.norm.weight, torch.arange(max_tokens)[None])
    sin[..., : sin.shape[-1] // 2].neg_()
    return cos[0, :, None], sin[0, :, None]


def hooks_of(model: nn.Module) -> list[Any]:
    """Attributes in which modules keep their hooks; the input of the output layer has one of the engine itself."""
    head = model.get_output_embeddings()
    before = [module._forward_pre_hooks for module in model.modules() if module is not head]
    return before + [module._forward_hooks for module in model.modules()]
