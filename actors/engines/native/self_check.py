"""Check before an engine serves: its packed passes over a cache must equal transformers' own eager code.

The comparison runs on a miniature of the architecture (`streamrl.architectures.miniature`): rows beyond its window, its
chunks and its original length, read in part as prompts and continued token by token, all in shared passes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from actors.engines.native.forward import ATTENTION_NAME, Forward, Prompt
from streamrl.architectures.miniature import ConfigKey, build_miniature, check_rows, rows_for
from streamrl.architectures.refusals import why_refused
from streamrl.architectures.rope import fix_rope, original_length
from streamrl.errors import EngineError

log = logging.getLogger("streamrl.actor")

MOST_DIFFERENCE = 1e-3  # of a log-prob, in float32; measured about 1e-6
_DECODED = 9  # tokens of each row that come one at a time: more than the window of a miniature


def prepare(model: torch.nn.Module, max_tokens: int) -> None:
    """Refuse a model that the engine would run wrong, and fix the frequencies of one that changes them with length.

    Raises EngineError, with the reason.
    """
    if (reason := why_refused(model)) is not None:
        raise EngineError(f"the native engine cannot run {type(model).__name__}: {reason}")
    try:
        fix_rope(model, max_tokens)
    except ValueError as error:
        raise EngineError(f"the native engine cannot run {type(model).__name__}: {error}") from error
    limit = original_length(model.config.get_text_config())
    check_architecture(ConfigKey(model.config), limit is not None and max_tokens > limit)


@cache
@torch.inference_mode()
def check_architecture(key: ConfigKey, long: bool) -> None:
    """Compare once for each configuration; `long`: the run is beyond the length where the frequencies change."""
    try:
        with torch.inference_mode(False):
            model = build_miniature(key.config)
    except Exception as error:  # foreign code on sizes that it never saw
        log.warning("no small copy of %s can be made (%s): the engine runs it unchecked", key.name, error)
        return
    lengths, max_tokens = rows_for(model.config.get_text_config(), long=long)
    rows = check_rows(model.get_output_embeddings().weight.shape[0], lengths)
    expected = [model(input_ids=row[None], use_cache=False).logits[0].log_softmax(-1) for row in rows]
    try:
        fix_rope(model, max_tokens)
        model.set_attn_implementation(ATTENTION_NAME)
        got = _in_shared_passes(Forward(model, len(rows), max(lengths)), rows)
    except (EngineError, ValueError, TypeError, RuntimeError, AttributeError, IndexError, KeyError) as error:
        raise EngineError(f"the native engine cannot run {key.name}: {error}") from error
    difference = max(
        float((mine - theirs[-len(mine):]).abs().max()) for mine, theirs in zip(got, expected, strict=True)
    )
    if not difference <= MOST_DIFFERENCE:
        raise EngineError(
            f"the native engine cannot run {key.name}: its log-probs differ from those of eager transformers by "
            f"{difference:.2g} nats (most allowed {MOST_DIFFERENCE}); take actors.engine=vllm, or a model of a family "
            "that docs/models.md lists as exact"
        )


def _in_shared_passes(forward: Forward, rows: Sequence[Tensor]) -> list[Tensor]:
    """Log-probs [tokens, vocabulary] after the last tokens of each row: its prompt's last, then token by token."""
    decoded = min(_DECODED, *(len(row) - 1 for row in rows))
    cached = torch.tensor([len(row) - decoded for row in rows])
    none = torch.empty(0, dtype=torch.int64)
    prompts = [Prompt(row[:size].tolist(), [place]) for place, (row, size) in enumerate(zip(rows, cached, strict=True))]
    passes = [forward.run(none, none, 0, prompts)]
    for step in range(decoded):
        ids = torch.stack([row[size + step] for row, size in zip(rows, cached, strict=True)])
        passes.append(forward.run(ids, cached + step, int(cached.max()) + step + 1, []))
    return list(torch.stack(passes, 1).float().log_softmax(-1))
