"""The model as the scheduler sees it: ids in, logits of the wanted positions out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from actors.engines.attention import DecodeView, ProbeView, PromptView, SlotView
from actors.engines.kv_cache import SlotCache
from actors.engines.weight_sets import checkpoint_tensors
from streamrl.errors import EngineError

_SPAN_STEP = 32  # cached positions are read in multiples of this, so that shapes repeat
_SCORE_CHUNK = 256


class Forward:
    """Runs one causal language model over a slot cache of its own. All methods belong to one thread."""

    def __init__(self, model: torch.nn.Module, slots: int, max_tokens: int) -> None:
        self._model = model.eval()
        first = next(iter(checkpoint_tensors(model).values()))[0]
        self.device, self.vocab_size = first.device, model.get_input_embeddings().weight.shape[0]
        # Only some positions' hidden states go through the output head; this hook picks them, so that whatever the
        # model does to its logits afterwards (scaling, capping) still happens.
        self._wanted: tuple[Tensor, Tensor] | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._keep_wanted)
        self.cache = self._probe(slots, max_tokens)

    def _keep_wanted(self, module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._wanted is None:
            return None
        return (args[0][self._wanted][:, None],)

    def _call(self, ids: Tensor, positions: Tensor, view: SlotView) -> Tensor:
        return self._model(
            input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False, slot_view=view
        ).logits

    @torch.inference_mode()
    def _probe(self, slots: int, max_tokens: int) -> SlotCache:
        """One token through the model: every layer must call our attention, and what it stores sizes the cache."""
        view, zero = ProbeView(), torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self._call(zero, zero, view)
        config: Any = self._model.config.get_text_config()
        if sorted(view.layers) != list(range(config.num_hidden_layers)):
            raise EngineError(
                f"the native engine cannot run {type(self._model).__name__}: of {config.num_hidden_layers} layers "
                f"only {len(view.layers)} use the attention interface (recurrent and linear-attention layers do not)"
            )
        # Outside inference mode: the cache is written for as long as the engine lives.
        with torch.inference_mode(False):
            shapes = [view.layers[layer] for layer in range(config.num_hidden_layers)]
            return SlotCache(shapes, slots, max_tokens, dtype=self._dtype(), device=self.device)

    def _dtype(self) -> torch.dtype:
        return self._model.get_input_embeddings().weight.dtype

    def decode(self, ids: Tensor, positions: Tensor, longest: int) -> Tensor:
        """One token for each of rows 0..n-1: ids, positions [n]; longest: cached tokens of the longest row after this.

        Returns:
            logits [n, vocab] of the next token.
        """
        span = min(-(-longest // _SPAN_STEP) * _SPAN_STEP, self.cache.max_tokens)
        ids, positions = ids.to(self.device), positions.to(self.device)
        return self._call(ids[:, None], positions[:, None], DecodeView(self.cache, positions, span))[:, -1]

    def read(self, prompts: list[list[int]], rows: list[int], source: list[int]) -> Tensor:
        """Read prompts into the cache: row rows[i] gets prompt source[i].

        Returns:
            logits [prompts, vocab] after each prompt's last token.
        """
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for place, prompt in enumerate(prompts):
            ids[place, : len(prompt)] = torch.tensor(prompt)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        view = PromptView(self.cache, torch.tensor(rows, device=self.device), torch.tensor(source, device=self.device))
        return self._prompt_logits(ids, view, (torch.arange(len(prompts), device=self.device), last))

    def score(self, ids: list[int], start: int, temperature: float) -> list[float]:
        """Log-probs of ids[start:] given what stands before each, at this temperature. Needs 1 <= start."""
        tokens = torch.tensor(ids, device=self.device)
        out: list[float] = []
        for first in range(start, len(ids), _SCORE_CHUNK):
            end = min(first + _SCORE_CHUNK, len(ids))
            columns = torch.arange(first - 1, end - 1, device=self.device)
            wanted = (torch.zeros_like(columns), columns)
            logits = self._prompt_logits(tokens[None, : end - 1], PromptView(), wanted).float() / temperature
            logprobs = torch.log_softmax(logits, dim=-1)
            out += logprobs.gather(-1, tokens[first:end, None])[:, 0].tolist()
        return out

    def _prompt_logits(self, ids: Tensor, view: PromptView, wanted: tuple[Tensor, Tensor]) -> Tensor:
        positions = torch.arange(ids.shape[1], device=self.device).expand(ids.shape)
        self._wanted = wanted
        try:
            return self._call(ids.to(self.device), positions, view)[:, -1]
        finally:
            self._wanted = None
