"""The model as the scheduler sees it: tokens in, logits of the wanted positions out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actors.engines.native.adapters import AdapterSets
from actors.engines.native.attention import PassView, Prompt, SlotCache
from actors.engines.native.weight_sets import checkpoint_tensors
from streamrl.architectures.masks import carry
from streamrl.errors import EngineError
from streamrl.messages import VersionRef

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
    """Runs one causal language model over a slot cache of its own. All methods belong to one thread."""

    def __init__(
        self, model: torch.nn.Module, slots: int, max_tokens: int, adapters: AdapterSets | None = None
    ) -> None:
        self.adapters = adapters
        self._model = model.eval()
        self.device = next(iter(checkpoint_tensors(model).values())).device
        self.vocab_size = model.get_input_embeddings().weight.shape[0]
        # Only the wanted positions go through the output head. A hook picks them, so that the model's own scaling or
        # capping of logits still happens.
        self._wanted: Tensor | None = None
        head = model.get_output_embeddings()
        head.register_forward_pre_hook(self._keep_wanted)
        if type(head) is torch.nn.Linear and head.weight.dtype.itemsize == 2:
            head.forward = partial(wide_logits, head)
        self.cache = self._probe(slots, max_tokens)

    def _keep_wanted(self, module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        return None if self._wanted is None else (args[0][:, self._wanted],)

    @torch.inference_mode()
    def _probe(self, slots: int, max_tokens: int) -> SlotCache:
        """One token through the model: every layer must call our attention, and what it stores sizes the cache."""
        zero = torch.zeros(1, dtype=torch.int64)
        view = PassView(None, _NONE.to(self.device), 0, [Prompt([0])])
        self._call(zero, zero, view, None)
        config: Any = self._model.config.get_text_config()
        if len(view.shapes) < config.num_hidden_layers:
            raise EngineError(
                f"the native engine cannot run {type(self._model).__name__}: of {config.num_hidden_layers} layers "
                f"only {len(view.shapes)} use the attention interface (recurrent and linear-attention layers do not)"
            )
        # Outside inference mode: the cache is written for as long as the engine lives.
        with torch.inference_mode(False):
            dtype = self._model.get_input_embeddings().weight.dtype
            return SlotCache(view.shapes, slots, max_tokens, dtype=dtype, device=self.device)

    def run(
        self, ids: Tensor, positions: Tensor, longest: int, prompts: Sequence[Prompt],
        versions: Sequence[VersionRef] = (),
    ) -> Tensor:
        """One pass: the next token of rows 0..n-1 and whole prompts.

        Args:
            ids, positions: [n] int64 on the host: each running row's newest token, and how many are cached before it.
            longest: cached tokens of the longest row after this pass; 0 if n is 0.
            prompts: read from their start; their keys and values go to the rows they name.
            versions: the adapter of each row, then of each prompt; not used without adapters.
        Returns:
            logits [n + prompts, vocab]: after each row's token, then after each prompt's last one.
        """
        n = ids.shape[0]
        span = min(-(-longest // _SPAN_STEP) * _SPAN_STEP, self.cache.max_tokens)
        if self.adapters is not None:
            self.adapters.route(versions, [1] * n + [len(prompt.ids) for prompt in prompts])
        decode_positions, wanted = positions.to(self.device), None
        if prompts:
            lengths = [len(prompt.ids) for prompt in prompts]
            ids = torch.cat([ids, torch.tensor([token for prompt in prompts for token in prompt.ids])])
            positions = torch.cat([positions, torch.tensor([place for size in lengths for place in range(size)])])
            ends = torch.tensor(lengths).cumsum(0) + (n - 1)
            wanted = torch.cat([torch.arange(n), ends]).to(self.device)
        return self._call(ids, positions, PassView(self.cache, decode_positions, span, prompts), wanted)

    def score(self, ids: list[int], start: int, temperature: float, version: VersionRef | None = None) -> list[float]:
        """Log-probs of ids[start:] given what stands before each, at this temperature. Needs 1 <= start."""
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
        self._wanted = wanted
        tokens = ids[None].to(self.device)
        with carry(view):
            return self._model(
                input_ids=tokens, position_ids=positions[None].to(self.device), use_cache=False, slot_view=view,
                # Ones, and not None: transformers would add to the rule what tells packed rows apart.
                attention_mask=torch.ones_like(tokens),
            ).logits[0]
