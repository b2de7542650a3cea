"""The model as the scheduler sees it: tokens in, logits of the wanted positions out.

Running sequences attend over the slot cache, prompts over themselves. The cache is one tensor a layer, one row a slot;
on a CPU it takes memory as its places are written. Rows 0..n-1 belong to the n running sequences, so a decode step
reads a plain slice. Values behind a row's length are left over from earlier sequences; masks keep them out.

A forward pass is packed: one row of tokens, first the next token of every running sequence, then whole prompts; prompts
of one length that follow each other attend in one call. All of a decoder layer but attention works token by token, so
any architecture that calls its attention through transformers' interface works unchanged. A `PassView`, passed through
the model as `slot_view`, knows which tokens belong together. What a layer hides beside later tokens (a window, chunks)
comes from the model's own mask rule (`streamrl.architectures.attention`).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from actors.engines.native.graphs import Capture, CudaCapture, DecodeGraphs
from actors.engines.native.lean import LeanPass, hooks_of, why_plain
from actors.engines.native.weights import AdapterSets, checkpoint_tensors
from streamrl.architectures.attention import MaskRule, attend, carry, check_extras, register, rule_of
from streamrl.errors import EngineError
from streamrl.messages import VersionRef
from streamrl.weights.gpu.pinned import upload

ATTENTION_NAME = "streamrl_slots"


class LayerShape(NamedTuple):
    """The shape of one attention layer's cache entry per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros; on a CPU its pages take memory when they are first written.

    Room is made for every slot at the longest sequence, which few answers reach: for 64 slots of 4,096 tokens and a
    model of 135 million parameters that is 12 GB.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class PromptRows(NamedTuple):
    """The cache rows of the prompts that are read together; made once a pass, for all layers."""

    rows: slice | Tensor
    sources: Tensor | None  # int64 [rows] the prompt of each; None: rows beside each other, as many for each prompt

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], device: torch.device) -> PromptRows:
        """The rows of these prompts, as `SlotCache.put_prompts` takes them."""
        flat = [row for own in rows for row in own]
        beside = flat == list(range(flat[0], flat[0] + len(flat)))
        if beside and all(len(own) == len(rows[0]) for own in rows):
            return cls(slice(flat[0], flat[0] + len(flat)), None)
        sources = [number for number, own in enumerate(rows) for _ in own]
        return cls(*(upload(torch.tensor(numbers), device) for numbers in (flat, sources)))


class SlotCache:
    """keys[layer] is [slots, kv_heads, max_tokens, key_dim]; values[layer] the same with value_dim."""

    def __init__(
        self, layers: Sequence[LayerShape], slots: int, max_tokens: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = tuple(layers)
        self.slots = slots
        self.max_tokens = max_tokens
        self._dtype, self._device = dtype, device
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.allocate()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def allocate(self) -> None:
        """Take memory, unless it is there."""
        if self.keys:
            return

        def rows(kv_heads: int, dim: int) -> Tensor:
            shape = (self.slots, kv_heads, self.max_tokens, dim)
            return _zeros(shape, self._dtype, self._device)

        # Outside inference mode: the cache is written for as long as it lives.
        with torch.inference_mode(False):
            self.keys = [rows(shape.kv_heads, shape.key_dim) for shape in self.layers]
            self.values = [rows(shape.kv_heads, shape.value_dim) for shape in self.layers]

    def release(self) -> None:
        """Give the memory back, until `allocate`."""
        self.keys, self.values = [], []

    def put_tokens(self, layer: int, index: Tensor, key: Tensor, value: Tensor) -> None:
        """Store one token per row. index [n * kv_heads] from `token_index`; key and value [n, kv_heads, dim]."""
        shape = self.layers[layer]
        self.keys[layer].view(-1, shape.key_dim).index_copy_(0, index, key.reshape(-1, shape.key_dim))
        self.values[layer].view(-1, shape.value_dim).index_copy_(0, index, value.reshape(-1, shape.value_dim))

    def token_index(self, kv_heads: int, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """Indices of the tokens at `positions` [n] of `rows`, None for 0.., in a layer seen as [rows * heads * tokens].
        """
        lanes = torch.arange(positions.shape[0] * kv_heads, device=positions.device)
        if rows is not None:
            lanes.remainder_(kv_heads).add_(rows.mul(kv_heads).repeat_interleave(kv_heads))
        return lanes.mul_(self.max_tokens).add_(positions.repeat_interleave(kv_heads))

    def put_prompts(self, layer: int, where: PromptRows, key: Tensor, value: Tensor) -> None:
        """Store prompts of one length from the start of their rows; key, value [prompts, kv_heads, tokens, dim]."""
        for cache, new in ((self.keys[layer], key), (self.values[layer], value)):
            places = cache[:, :, : new.shape[2]]
            if where.sources is None:
                places[where.rows].unflatten(0, (len(new), -1)).copy_(new[:, None])
            else:
                places.index_copy_(0, where.rows, new.index_select(0, where.sources))

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], num_tokens: int) -> None:
        """Copy the first `num_tokens` of some rows into others, none of which is a source."""
        if not sources:
            return
        read, written = (upload(torch.tensor(rows), self.keys[0].device) for rows in (sources, targets))
        for tensor in (*self.keys, *self.values):
            places = tensor[:, :, :num_tokens]
            places.index_copy_(0, written, places.index_select(0, read))

    def scrub(self, lengths: Sequence[int]) -> None:
        """Zero everything that no running row (0..len(lengths)-1) owns: a masked NaN still spoils a weighted sum."""
        for tensor in (*self.keys, *self.values):
            for row, length in enumerate(lengths):
                tensor[row, :, length:] = 0
            tensor[len(lengths) :] = 0


def slot_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *,
    slot_view: PassView | None = None, scaling: float | None = None, **extra: Any,
) -> tuple[Tensor, None]:
    """The registered attention implementation: ([1, tokens, heads, dim], None). Raises EngineError for unknown options.

    query is [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim].
    """
    slot_view = slot_view or getattr(attention_mask, "carried", None)
    if slot_view is None:
        raise EngineError("this model belongs to a NativeEngine, which alone can run it: build another one to call it")
    try:
        rule, extras = rule_of(module, attention_mask), check_extras(module, extra)
    except ValueError as error:
        raise EngineError(f"the native engine cannot run this model: {error}") from error
    return slot_view.attend(query, key, value, rule, {"scaling": scaling, **extras}), None


AttentionInterface.register(ATTENTION_NAME, slot_attention)
register(ATTENTION_NAME)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens that are read from their start, and the cache rows that get their keys and values."""

    ids: Sequence[int]
    rows: Sequence[int] = ()


class PassView:
    """Attention within one packed pass: n decode tokens (cache rows 0..n-1), then the prompts in order."""

    def __init__(
        self,
        cache: SlotCache | None,
        positions: Tensor,
        span: int,
        prompts: Sequence[Prompt],
        targets: Tensor | None = None,
    ) -> None:
        """positions [n]: cache places of the decode tokens; span: cached places that they attend to.

        targets: [n] the rows that the decode tokens are stored in, None for their own.
        """
        self.shapes: list[LayerShape] = []  # what each attention call of the pass stores per token, in their order
        self._cache, self._positions, self._span, self._targets = cache, positions, span, targets
        alike = [list(found) for _, found in groupby(prompts, key=lambda prompt: len(prompt.ids))]
        self._batches = [(len(found), len(found[0].ids), self._rows_of(found)) for found in alike]
        self._masks: dict[MaskRule, Tensor] = {}
        self._indices: dict[int, Tensor] = {}

    def _rows_of(self, prompts: Sequence[Prompt]) -> PromptRows | None:
        rows = [prompt.rows for prompt in prompts]
        return PromptRows.from_rows(rows, self._positions.device) if any(rows) else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: MaskRule, options: Mapping[str, Any]) -> Tensor:
        """Compute one attention call; every pass makes the same calls in the same order, so each has its own cache.

        `options` are `scaling` and what else `streamrl.architectures.attention.attend` takes.
        """
        # Token-major: [tokens, heads, dim], which is how the projections lie in memory.
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return self.attend_tokens(query, key, value, rule, options)[None]

    def attend_tokens(
        self, query: Tensor, key: Tensor, value: Tensor, rule: MaskRule, options: Mapping[str, Any]
    ) -> Tensor:
        """Compute an attention call of tensors [tokens, heads, dim]."""
        call = len(self.shapes)
        self.shapes.append(LayerShape(key.shape[1], key.shape[2], value.shape[2]))
        start, parts = self._positions.shape[0], []
        if start:
            parts.append(self._decode(call, query[:start], key[:start], value[:start], rule, options))
        for num_prompts, length, rows in self._batches:
            end = start + num_prompts * length
            whole = (tensor[start:end].unflatten(0, (num_prompts, length)) for tensor in (query, key, value))
            parts.append(self._read(call, rows, *whole, rule, options))
            start = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(
        self, call: int, query: Tensor, key: Tensor, value: Tensor, rule: MaskRule, options: Mapping[str, Any]
    ) -> Tensor:
        """Store one token per row; each attends to its row up to and including itself."""
        n, kv_heads = key.shape[:2]
        if kv_heads not in self._indices:
            self._indices[kv_heads] = self._cache.token_index(kv_heads, self._positions, self._targets)
        self._cache.put_tokens(call, self._indices[kv_heads], key, value)
        # The query heads that share a key head become query positions: no key is repeated in memory.
        out = attend(
            query.reshape(n, kv_heads, -1, query.shape[-1]),
            self._cache.keys[call][:n, :, : self._span],
            self._cache.values[call][:n, :, : self._span],
            mask=self._mask(rule, query.dtype), **options,
        )
        return out.reshape(n, query.shape[1], -1)

    def _read(
        self, call: int, rows: PromptRows | None, query: Tensor, key: Tensor, value: Tensor, rule: MaskRule,
        options: Mapping[str, Any],
    ) -> Tensor:  # fmt: skip
        """Store prompts [prompts, length, heads, dim]; a token attends to those before it in its prompt and itself."""
        length = query.shape[1]
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        if rows is not None:
            self._cache.put_prompts(call, rows, key, value)
        mask = None if rule.is_causal(length) else rule.square(length, query.device)
        return attend(query, key, value, mask=mask, **options).transpose(1, 2).flatten(0, 1)

    def _mask(self, rule: MaskRule, dtype: torch.dtype) -> Tensor:
        """Additive [n, 1, 1, span]; additive because a boolean one would be converted in every layer."""
        if rule not in self._masks:
            places = torch.arange(self._span, device=self._positions.device)
            hidden = ~rule.visible(self._positions[:, None], places[None, :])
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._masks[rule] = mask[:, None, None]
        return self._masks[rule]


_SPAN_STEP = 32  # cached places are read in multiples of this, so that shapes repeat
_SCORE_CHUNK = 256
_NONE = torch.empty(0, dtype=torch.int64)


def wide_logits(head: torch.nn.Linear, hidden: Tensor) -> Tensor:
    """Logits in float32 of an output layer in half precision, as the learner computes them.

    Rounded to half they would be up to 0.06 off at a size of 16 to 32, and so would log-probs.
    """
    if hidden.is_cuda:
        logits = torch.mm(hidden.flatten(0, -2), head.weight.T, out_dtype=torch.float32)
    else:
        logits = hidden.flatten(0, -2).float() @ head.weight.float().T
    if head.bias is not None:
        logits = logits + head.bias
    return logits.view(*hidden.shape[:-1], -1)


class Forward:
    """Runs one causal language model over a slot cache of its own. All methods belong to one thread.

    Args:
        capture: captures decode passes; None: as CUDA graphs on such a device, and not at all elsewhere.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        slots: int,
        max_tokens: int,
        adapters: AdapterSets | None = None,
        *,
        int8: bool = False,
        capture: Capture | None = None,
    ) -> None:
        self.adapters = adapters
        self._model = model.eval()
        weights = list(checkpoint_tensors(model).values())
        self.device = weights[0].device
        self.lean: LeanPass | None = None
        """The pass without modules; None leaves all of them to the model's own code."""
        self.vocab_size = model.get_input_embeddings().weight.shape[0]
        # Only the wanted positions go through the output head. A hook picks them, so that the model's own scaling or
        # capping of logits still happens.
        self._wanted: Tensor | None = None
        head = model.get_output_embeddings()
        head.register_forward_pre_hook(self._keep_wanted)
        if type(head) is torch.nn.Linear and head.weight.dtype.itemsize == 2:
            head.forward = partial(wide_logits, head)
        if capture is None and self.device.type == "cuda":
            capture = CudaCapture(self.device)
        self.graphs: DecodeGraphs | None = None
        """Decode steps without launches; None on a CPU, and with adapters, which are chosen anew for each pass."""
        if capture is not None and adapters is None:
            self.graphs = DecodeGraphs(self._decode, capture, weights, slots=slots, max_tokens=max_tokens)
        self._hooks = hooks_of(model)
        self.cache = self._probe(slots if self.graphs is None else slots + 1, max_tokens)
        if why_plain(model) is None:
            self.lean = LeanPass(model, max_tokens, int8=int8)

    def _keep_wanted(self, module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        return None if self._wanted is None else (args[0][:, self._wanted],)

    @torch.inference_mode()
    def _probe(self, slots: int, max_tokens: int) -> SlotCache:
        """Pass one token through: every layer must call our attention, and the stored shapes size the cache."""
        zero = torch.zeros(1, dtype=torch.int64)
        view = PassView(None, _NONE.to(self.device), 0, [Prompt([0])])
        self._call(zero, zero, view, None)
        config: Any = self._model.config.get_text_config()
        if len(view.shapes) < config.num_hidden_layers:
            raise EngineError(
                f"the native engine cannot run {type(self._model).__name__}: of {config.num_hidden_layers} layers "
                f"only {len(view.shapes)} use the attention interface (recurrent and linear-attention layers do not)"
            )
        dtype = self._model.get_input_embeddings().weight.dtype
        return SlotCache(view.shapes, slots, max_tokens, dtype=dtype, device=self.device)

    def run(
        self, ids: Tensor, positions: Tensor, longest: int, prompts: Sequence[Prompt],
        versions: Sequence[VersionRef] = (),
    ) -> Tensor:
        """One pass: the next token of rows 0..n-1 and whole prompts.

        Args:
            ids: [n] int64 on the device: each running row's newest token, which the host need not know.
            positions: [n] int64 on the host: how many are cached before it.
            longest: cached tokens of the longest row after this pass; 0 if n is 0.
            prompts: read from their start; their keys and values go to the rows they name.
            versions: the adapter of each row, then of each prompt; not used without adapters.
        Returns:
            logits [n + prompts, vocab]: after each row's token, then after each prompt's last one. Those of a graph
                stay until the next pass.
        """
        n = ids.shape[0]
        if self.graphs is not None and n and not prompts and self.graphs.refused is None and not any(self._hooks):
            logits = self.graphs.run(ids, positions, longest, None if self.lean is None else self.lean.in_use)
            if logits is not None:
                return logits
        span = min(-(-longest // _SPAN_STEP) * _SPAN_STEP, self.cache.max_tokens)
        if self.adapters is not None:
            self.adapters.route(versions, [1] * n + [len(prompt.ids) for prompt in prompts])
        wanted = None
        if prompts:
            lengths = [len(prompt.ids) for prompt in prompts]
            read = torch.tensor([token for prompt in prompts for token in prompt.ids])
            ids = torch.cat([ids, upload(read, self.device)])
            positions = torch.cat([positions, torch.tensor([place for size in lengths for place in range(size)])])
            ends = torch.tensor(lengths).cumsum(0) + (n - 1)
            wanted = upload(torch.cat([torch.arange(n), ends]), self.device)
        positions = upload(positions, self.device)
        return self._call(ids, positions, PassView(self.cache, positions[:n], span, prompts), wanted)

    def _decode(self, ids: Tensor, positions: Tensor, targets: Tensor, span: int) -> Tensor:
        """Logits of a pass without prompts, as `DecodeGraphs` captures it: all tensors are on the device."""
        return self._call(ids, positions, PassView(self.cache, positions, span, [], targets), None)

    def score(self, ids: list[int], start: int, temperature: float, version: VersionRef | None = None) -> list[float]:
        """Log-probs of ids[start:] given all ids before each, at this temperature. Needs 1 <= start."""
        tokens, out = torch.tensor(ids), []
        if self.adapters is not None and version is not None:
            self.adapters.route([version], [len(ids)])
        for first in range(start, len(ids), _SCORE_CHUNK):
            end = min(first + _SCORE_CHUNK, len(ids))
            view = PassView(None, _NONE.to(self.device), 0, [Prompt(ids[: end - 1])])
            wanted = torch.arange(first - 1, end - 1, device=self.device)
            logits = self._call(tokens[: end - 1], torch.arange(end - 1), view, wanted).float() / temperature
            picked = torch.log_softmax(logits, dim=-1).gather(-1, tokens[first:end, None].to(self.device))
            out += picked[:, 0].tolist()
        return out

    def _call(self, ids: Tensor, positions: Tensor, view: PassView, wanted: Tensor | None) -> Tensor:
        """ids, positions [tokens]; wanted: the tokens whose logits [wanted, vocab] are returned, None for all."""
        if self.lean is not None and self.lean.applies:
            return self.lean(ids, positions, view, wanted)
        self._wanted = wanted
        tokens = ids[None].to(self.device)
        with carry(view):
            return self._model(
                input_ids=tokens, position_ids=positions[None].to(self.device), use_cache=False, slot_view=view,
                # Ones, and not None: transformers would add to the rule what tells packed rows apart.
                attention_mask=torch.ones_like(tokens),
            ).logits[0]
