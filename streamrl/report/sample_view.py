"""`streamrl samples`: prints samples of a run as text; which ones, in which order, and what one looks like."""

from __future__ import annotations

import argparse
import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from streamrl.errors import ConfigError
from streamrl.metrics.samples import TRAINED, Sample, read_samples
from streamrl.metrics.text import compact

ORDERS: dict[str, Callable[[Sample], float]] = {
    "time": lambda one: one.step, "reward": lambda one: one.reward, "lag": lambda one: one.lag,
    "length": lambda one: one.num_tokens,
}
KINDS = ("train", "eval")


@dataclass(slots=True)
class Query:
    """A selection of samples and their order: the largest of `sort` first, or the smallest if `reverse`."""

    kind: str | None = None
    step: int | None = None
    sort: str = "time"
    reverse: bool = False
    search: str = ""

    def of(self, samples: Sequence[Sample]) -> list[Sample]:
        """Select the samples asked for; equal ones in the order of the file."""
        word = self.search.casefold()
        found = [
            one for one in samples
            if self.kind in (None, one.kind) and self.step in (None, one.step)
            and (word in one.prompt.casefold() or word in _said(one).casefold())
        ]
        return sorted(found, key=ORDERS[self.sort], reverse=not self.reverse)

    def __str__(self) -> str:
        parts = [f"kind {self.kind}"] * (self.kind is not None) + [f"step {self.step}"] * (self.step is not None)
        return ", ".join([*parts, *([f"with {self.search!r}"] if self.search else [])]) or "any"


def samples(words: list[str]) -> int:
    """Print the samples that are asked for. Raises ConfigError: no such run or sample."""
    parser = argparse.ArgumentParser(
        prog="streamrl samples", description="Print prompts and answers of a run, newest first.",
        epilog="To page and search, with colors: FORCE_COLOR=1 streamrl samples RUN_DIR -n 0 | less -R. The color of a "
        "token compares the policy with its actor: green is likelier now, red less likely.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--kind", choices=KINDS, help="only those of training, or of evaluations")
    parser.add_argument("--step", type=int, help="only those of this step, or of the evaluation of this version")
    parser.add_argument("--sort", choices=ORDERS, help="newest (time), best, oldest data or longest first")
    parser.add_argument("--worst", action="store_true", help="reverse the order; alone, the lowest reward first")
    parser.add_argument("--search", metavar="WORD", default="", help="only those whose prompt or answer contains it")
    parser.add_argument("-n", type=int, default=10, metavar="N", help="how many to print (10); 0 prints all")
    given = parser.parse_args(words)
    sort = given.sort or ("reward" if given.worst else "time")
    found = find(samples_of(given.run_dir), Query(given.kind, given.step, sort, given.worst, given.search))
    shown, console = found[: given.n or None], Console()
    for one in map(rendered, shown):
        if console.is_terminal:
            console.print(one, soft_wrap=True)
        else:
            print(one.plain)
    if len(shown) < len(found):
        print(f"{len(shown)} of {len(found)} samples; -n 0 prints all")
    return 0


def samples_of(run_dir: Path) -> list[Sample]:
    """All samples of a run. Raises ConfigError: it is no run, or none of its samples are kept."""
    samples = read_samples(run_dir)
    if samples:
        return samples
    if not (run_dir / "config.yaml").exists():
        raise ConfigError(f"{run_dir} is no run directory: name one such as runs/quickstart-001")
    raise ConfigError(
        f"{run_dir} has no samples: they come with its first evaluation and its first step; if it has done these, "
        "samples.num_per_step and samples.num_per_eval were 0: raise them"
    )


def find(samples: Sequence[Sample], query: Query) -> list[Sample]:
    """Select the samples asked for, at least one. Raises ConfigError: there is none."""
    found = query.of(samples)
    if found:
        return found
    kinds = [kind for kind in KINDS if any(one.kind == kind for one in samples)]
    steps = sorted({one.step for one in samples})
    raise ConfigError(
        f"none of the {len(samples)} samples matches ({query}): the run has {' and '.join(kinds)} samples "
        f"of steps {steps[0]} to {steps[-1]}; samples.num_per_step and samples.num_per_eval set how many are kept"
    )


# --- one sample -------------------------------------------------------------------------------------------------------


def rendered(sample: Sample) -> Text:
    """A headline, the prompt and the answer; tokens are colored by their importance ratio where it is known."""
    text = Text()
    text.append(headline(sample) + "\n", style="bold")
    if sample.parts:
        parts = "  ".join(f"{visible(name)} {compact(part)}" for name, part in sample.parts.items())
        text.append(f"parts: {parts}\n", style="dim")
    _block(text, "prompt", Text(visible(sample.prompt)))
    if sample.messages:
        for turn in sample.messages:
            reward = f" (reward {compact(turn.reward)})" if turn.reward else ""
            _block(text, turn.role + reward, Text(visible(turn.content)))
    else:
        _block(text, "answer", _colored(sample))
    if sample.expected:
        _block(text, "expected", Text(visible(sample.expected)))
    return text


def headline(sample: Sample) -> str:
    """All numbers of a sample in one line."""
    what = f"{'version' if sample.kind == 'eval' else 'step'} {sample.step}"
    parts = [f"{sample.kind} {visible(sample.dataset)}".strip(), what, f"reward {compact(sample.reward)}"]
    if sample.score != sample.reward:
        parts.append(f"score {compact(sample.score)}")
    if sample.kind == "train":
        parts.append(f"lag {sample.lag} (version {sample.version})")
    if sample.advantage is not None:
        parts.append(f"advantage {compact(sample.advantage)}")
    parts.append(f"{sample.num_tokens} tokens{', cut short' if sample.truncated else ''}")
    if sample.kind == "train":
        parts.append(f"group {sample.group} member {sample.member}")
    parts += [f"record {sample.record}", visible(sample.actor)]
    if sample.kind == "train" and sample.fate != TRAINED:
        parts.append(f"not trained on: {visible(sample.fate)}")
    return "  ".join(part for part in parts if part)


def visible(text: str) -> str:
    """The text with control characters as symbols: what a model says must not steer a terminal."""
    return "".join(char if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf") else _symbol(char)
                   for char in text)


def _symbol(char: str) -> str:
    code = ord(char)
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else f"<U+{code:04X}>"


def _said(sample: Sample) -> str:
    return "\n".join(turn.content for turn in sample.messages) if sample.messages else sample.answer


def _block(text: Text, title: str, content: Text) -> None:
    text.append(f"--- {title}\n", style="dim")
    text.append_text(content)
    text.append("\n")


def _colored(sample: Sample) -> Text:
    tokens = sample.tokens
    if tokens is None:
        return Text(visible(sample.answer))
    text = Text()
    for piece, ratio in zip(tokens.texts, tokens.ratios, strict=True):
        text.append(visible(piece), style=ratio_style(ratio))
    if len(tokens.ids) < sample.num_tokens:
        text.append(visible(sample.answer[len("".join(tokens.texts)) :]))
    return text


def ratio_style(ratio: float | None) -> str:
    """Green where the token has become more likely since it was sampled, red where less likely."""
    if ratio is None or not math.isfinite(ratio):
        return ""
    distance = abs(math.log(max(ratio, 1e-6)))
    if distance < 0.05:
        return ""
    color = "green" if ratio > 1 else "red"
    return color if distance < 0.25 else f"bold {color}" if distance < 1.0 else f"reverse {color}"
