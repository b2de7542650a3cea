"""Check before training: packed scoring must equal transformers' own eager code, one row at a time.

Two models are compared. The model itself, on a few short rows with its real weights: that covers its output layer. And
a miniature of its architecture, on rows beyond its window, its chunks and its original length, which are shrunk with
it: that covers what shows only in long rows, at no cost that grows with the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from learner.model.attention.packed import ATTENTION, decoder_of
from learner.model.scoring.logprobs import LogitRule, measure_logit_rule
from streamrl.architectures.miniature import ConfigKey, build_miniature, check_rows, rows_for
from streamrl.architectures.refusals import why_refused
from streamrl.architectures.rope import fix_rope, original_length

log = logging.getLogger("streamrl.learner")

MOST_DIFFERENCE = 1e-3  # of a log-prob, in float32, between packed and eager scoring; measured about 1e-6
_SHORT = (17, 5, 11)

Score = Callable[[Any, LogitRule, Sequence[Tensor]], Tensor]
"""(model, rule, rows) to the log-prob of every token but each row's first, all rows in one packed pass."""


class NotExact(ValueError):
    """Packed scoring of this model would not give its own log-probs; the text says why."""


@torch.no_grad()
def prepare(model: Any, score: Score, *, max_tokens: int | None) -> LogitRule:
    """Check a model whose attention is `packed_attention`, and measure its `LogitRule`.

    Args:
        max_tokens: of the run's longest sequence, which decides between the frequencies of longrope; None: within the
            original length. The model gets these frequencies.
    Raises:
        NotExact: the architecture is refused, or it fails a comparison.
    """
    config = model.config.get_text_config()
    if (reason := why_refused(model)) is not None:
        raise NotExact(reason)
    _fix(model, max_tokens)
    limit = original_length(config)
    long = limit is not None and max_tokens is not None and max_tokens > limit
    _check_miniature(ConfigKey(model.config), score, long)
    longest = getattr(config, "max_position_embeddings", None) or max(_SHORT)
    return compare(model, score, check_rows(_vocabulary(model), tuple(min(n, longest) for n in _SHORT)))


@torch.no_grad()
def why_not_shared(model: Any, score: Score, *, max_tokens: int | None) -> str:
    """Why this architecture cannot score rows whose common beginning is packed once; empty if it can.

    Args:
        model: one that `prepare` has accepted.
        score: packs the beginning of the rows once.
    """
    config = model.config.get_text_config()
    limit = original_length(config)
    long = limit is not None and max_tokens is not None and max_tokens > limit
    try:
        checked = _check_miniature(ConfigKey(model.config), score, long, common=True)
    except NotExact as error:
        return str(error)
    return "" if checked else "no small copy of it can be made to check that"


def compare(model: Any, score: Score, rows: Sequence[Tensor], *, before: Callable[[], None] | None = None) -> LogitRule:
    """Score rows eagerly, each alone, and packed. Returns the rule of the logits; NotExact if they differ.

    `before` is called between the two.
    """
    model.set_attn_implementation("eager")
    try:
        states, logits = zip(*(_eager(model, row) for row in rows), strict=True)
    finally:
        model.set_attn_implementation(ATTENTION)
    if before is not None:
        before()
    try:
        rule = measure_logit_rule(
            states, logits, model.get_output_embeddings(),
            cap=getattr(model.config.get_text_config(), "final_logit_softcapping", None),
        )
        packed = score(model, rule, rows)
    except (ValueError, TypeError, RuntimeError, AttributeError, IndexError, KeyError) as error:
        raise NotExact(f"packed scoring cannot run it: {error}") from error
    expected = torch.cat([
        row_logits[:-1].log_softmax(-1).gather(-1, row[1:, None]).squeeze(-1)
        for row, row_logits in zip(rows, logits, strict=True)
    ])
    difference = float((packed - expected).abs().max())
    if not difference <= MOST_DIFFERENCE:
        raise NotExact(
            f"packed log-probs differ from those of eager transformers, row by row, by {difference:.2g} nats (most "
            f"allowed {MOST_DIFFERENCE}) on rows of {[len(row) for row in rows]} tokens: it mixes packed rows, or "
            "hides tokens by other means than its attention mask"
        )
    return rule


def _eager(model: Any, row: Tensor) -> tuple[Tensor, Tensor]:
    """Last hidden states and logits of one row."""
    seen: list[Any] = []
    handle = decoder_of(model).register_forward_hook(lambda _module, _args, output: seen.append(output))
    try:
        output = model(input_ids=row[None], use_cache=False)
    finally:
        handle.remove()
    return seen[-1].last_hidden_state[0].float(), output.logits[0].float()


def _fix(model: Any, max_tokens: int | None) -> None:
    try:
        fix_rope(model, max_tokens)
    except ValueError as error:
        raise NotExact(str(error)) from error


@cache
def _check_miniature(key: ConfigKey, score: Score, long: bool, common: bool = False) -> bool:
    """Compare a miniature; False if there is none.

    Args:
        long: the run is beyond the original length, where the frequencies change.
        common: the rows begin alike.
    """
    try:
        model = build_miniature(key.config)
    except Exception as error:  # foreign code on sizes that it never saw
        log.warning(
            "no small copy of %s can be made (%s): its packed scoring is checked on short rows only",
            key.name, error,
        )
        return False
    lengths, max_tokens = rows_for(model.config.get_text_config(), long=long)
    rows = check_rows(_vocabulary(model), lengths)
    if common:
        for row in rows[1:]:
            row[: min(lengths) - 2] = rows[0][: min(lengths) - 2]
    compare(model, score, rows, before=lambda: _fix(model, max_tokens))
    return True


def _vocabulary(model: Any) -> int:
    return int(model.get_output_embeddings().weight.shape[0])
