"""Samples in the report: best, worst and random trajectories of the first and last third, evaluations side by side.

Everything in a sample is output of a model or an environment: it is escaped, cut to a length, and never more than text.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from html import escape

from streamrl.metrics.samples import TRAINED, Sample
from streamrl.metrics.text import compact

NUM_RANDOM = 2
NUM_EVALUATED = 4
MAX_CHARACTERS = 4000
"""The limit for a prompt, an answer or a turn; the whole stands in samples.jsonl."""
MAX_TOKENS = 600
SHADES = (0.05, 0.2, 0.5, 1.0)
"""Absolute log-ratios from which a token is colored, ever darker."""

Picked = list[tuple[str, Sample]]


def samples_html(samples: Sequence[Sample]) -> str:
    """The section's content; empty without samples."""
    parts = []
    for title, picked in [*phases(samples), *evaluations(samples)]:
        cards = "".join(card(label, sample) for label, sample in picked)
        parts.append(f'<h3>{escape(title)}</h3><div class="samples">{cards}</div>')
    if any(sample.tokens and any(ratio is not None for ratio in sample.tokens.ratios) for sample in samples):
        parts.insert(0, '<p class="soft">The color of a token is its importance ratio: its probability under the '
                        'trained policy over that with which it was sampled. <span class="scale"></span> orange has '
                        "become less likely, blue more likely.</p>")
    return "".join(parts)


def phases(samples: Sequence[Sample]) -> list[tuple[str, Picked]]:
    """(title, picked samples) of the first and the last third of the steps; of all, if they are less than three."""
    trained = [sample for sample in samples if sample.kind == "train"]
    if not trained:
        return []
    first, last = min(sample.step for sample in trained), max(sample.step for sample in trained)
    third = (last - first + 1) // 3
    if not third:
        return [(f"Training, steps {first} to {last}", pick(trained))]
    begin = [sample for sample in trained if sample.step < first + third]
    end = [sample for sample in trained if sample.step > last - third]
    return [(f"Training, steps {first} to {first + third - 1}", pick(begin)),
            (f"Training, steps {last - third + 1} to {last}", pick(end))]


def pick(samples: Sequence[Sample]) -> Picked:
    """The best, the worst, and some others at random, always the same ones; equal rewards are drawn among, too."""
    order = random.Random(0).sample(list(samples), len(samples))
    ranked = sorted(order, key=lambda sample: sample.reward)
    picked: Picked = [("best", ranked[-1])] + ([("worst", ranked[0])] if len(ranked) > 1 else [])
    chosen = [sample for _, sample in picked]
    others = [sample for sample in order if not any(sample is one for one in chosen)]
    return [*picked, *(("random", sample) for sample in others[:NUM_RANDOM])]


def evaluations(samples: Sequence[Sample]) -> list[tuple[str, Picked]]:
    """The same held-out prompts in the first and in the last evaluation, next to each other."""
    evaluated = [sample for sample in samples if sample.kind == "eval"]
    steps = sorted({sample.step for sample in evaluated})
    if not steps:
        return []
    ends = steps[:1] if len(steps) == 1 else [steps[0], steps[-1]]
    by_prompt: dict[tuple[str, int], dict[int, Sample]] = {}
    for sample in evaluated:
        if sample.step in ends:
            by_prompt.setdefault((sample.dataset, sample.record), {}).setdefault(sample.step, sample)
    picked = [(f"version {step}", found[step]) for found in list(by_prompt.values())[:NUM_EVALUATED] for step in ends
              if step in found]
    return [("Evaluation, the first and the last" if len(ends) > 1 else "Evaluation", picked)]


def card(label: str, sample: Sample) -> str:
    """One trajectory: what is known of it, the prompt, and what came after."""
    facts = [f"reward {compact(sample.reward)}"]
    facts += [f"score {compact(sample.score)}"] if sample.score != sample.reward else []
    facts += [f"{name} {compact(value)}" for name, value in list(sample.parts.items())[:6]]
    facts += [f"step {sample.step}", f"lag {sample.lag}"] if sample.kind == "train" else []
    facts += [f"advantage {compact(sample.advantage, 2)}"] if sample.advantage is not None else []
    plural = "" if sample.num_tokens == 1 else "s"
    facts += [f"{sample.num_tokens} token{plural}" + (", cut short" if sample.truncated else "")]
    facts += [f"not trained on: {sample.fate}"] if sample.kind == "train" and sample.fate != TRAINED else []
    facts += [f"set {sample.dataset}"] if sample.dataset else []
    expected = f'<div class="said prompt">expected: {text(sample.expected)}</div>' if sample.expected else ""
    head = "".join(f"<span>{text(fact, 80)}</span>" for fact in facts)
    return (f'<article class="sample"><header><b>{escape(label)}</b>{head}</header>'
            f'<div class="said prompt">{text(sample.prompt)}</div><div class="said">{said(sample)}</div>'
            f"{expected}</article>")


def said(sample: Sample) -> str:
    """All after the prompt: token by token where the tokens were kept, else by turns."""
    tokens = sample.tokens
    if tokens is None or not tokens.texts:
        turns = [(turn.role, turn.content) for turn in sample.messages] or [("assistant", sample.answer)]
        return "".join(f'<span class="{"spoken" if role == "assistant" else "observed"}">{text(content)}</span>\n'
                       for role, content in turns).rstrip("\n")
    contexts = dict(zip(tokens.starts, (t.content for t in sample.messages if t.role == "context"), strict=False))
    shown = list(zip(tokens.texts, tokens.ratios, tokens.versions, strict=False))[:MAX_TOKENS]
    out, run, run_css = [], "", ""
    for place, (token, ratio, version) in enumerate(shown):
        if place in contexts:
            out.append(_plain(run, run_css))
            out.append(f'<div class="observed">history rewritten:\n{text(contexts[place])}</div>')
            run = run_css = ""
        css = "observed" if version < 0 else shade(ratio)
        if css and ratio is not None:
            out.append(_plain(run, run_css))
            out.append(f'<mark class="{css}" title="ratio {compact(ratio)}, version {version}">{text(token)}</mark>')
            run = run_css = ""
        elif css != run_css:
            out.append(_plain(run, run_css))
            run, run_css = token, css
        else:
            run += token
    out.append(_plain(run, run_css))
    left = max(len(tokens.texts) - MAX_TOKENS, sample.num_tokens - len(tokens.texts))
    return "".join(out) + (f' <span class="observed">… and {left} more tokens</span>' if left > 0 else "")


def _plain(run: str, css: str) -> str:
    """Tokens without a color as one text."""
    return (f'<span class="{css}">{escape(run)}</span>' if css else escape(run)) if run else ""


def shade(ratio: float | None) -> str:
    """The class of a token: l1 to l4 if it has become less likely, h1 to h4 if more, "" if hardly changed."""
    if ratio is None or not ratio > 0 or not math.isfinite(ratio):
        return ""
    distance = math.log(ratio)
    step = sum(abs(distance) >= edge for edge in SHADES)
    return f"{'h' if distance > 0 else 'l'}{step}" if step else ""


def text(found: str, limit: int = MAX_CHARACTERS) -> str:
    """Escaped, its end cut off if it is long, and without what UTF-8 cannot write."""
    found = found.encode("utf-8", "replace").decode("utf-8")
    cut = f" … and {len(found) - limit} more characters" if len(found) > limit else ""
    return escape(found[:limit] + cut)
