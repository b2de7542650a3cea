"""Statistics of an evaluation with one or more answers for each prompt.

The error of each mean is that over prompts: the answers to one prompt are not independent of each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts and its standard error; NaN where there are too few."""

    value: float
    stderr: float
    num_prompts: int

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.stderr:.3f}" if self.num_prompts > 1 else f"{self.value:.3f}"


def average(scores: Sequence[Sequence[float]]) -> Estimate:
    """avg@k: the mean score. `scores` holds those of each prompt's answers; a prompt without any is left out."""
    return _estimate([fmean(one) for one in scores if one])


def pass_at(k: int, scores: Sequence[Sequence[float]], solved: float = 1.0) -> Estimate:
    """pass@k: the chance that at least one of k answers scores `solved` or more.

    The unbiased estimate from n answers of which c are right, 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374, eq. 1).
    Prompts with fewer than k answers are left out.
    """
    return _estimate([
        1.0 - math.comb(sum(score < solved for score in one), k) / math.comb(len(one), k)
        for one in scores if len(one) >= k > 0
    ])


def majority(scores: Sequence[Sequence[float]], answers: Sequence[Sequence[str]]) -> Estimate:
    """maj@k: the score of each prompt's most frequent answer; of several equally frequent ones their mean.

    `answers` holds the final answers in the order of `scores`; equal texts are equal answers.
    """
    values = []
    for some_scores, some_answers in zip(scores, answers, strict=True):
        if some_scores:
            counts = Counter(some_answers)
            most = max(counts.values())
            best = {answer for answer, count in counts.items() if count == most}
            pairs = zip(some_answers, some_scores, strict=True)  # equal ones may differ in a score for their form
            values.append(fmean(score for answer, score in pairs if answer in best))
    return _estimate(values)


def estimates(
    scores: Sequence[Sequence[float]], answers: Sequence[Sequence[str]], *, num_responses: int, solved: float
) -> dict[str, Estimate]:
    """avg@k, and with several answers to each prompt pass@1, pass@2, pass@4 ... pass@k and maj@k, by these names."""
    found = {f"avg@{num_responses}": average(scores)}
    if num_responses > 1:
        found |= {f"pass@{n}": pass_at(n, scores, solved) for n in powers_of_two(num_responses)}
        found[f"maj@{num_responses}"] = majority(scores, answers)
    return found


def powers_of_two(num_responses: int) -> list[int]:
    """The k for which pass@k is reported: 1, 2, 4 ... and the number of answers itself."""
    below = [1 << n for n in range(num_responses.bit_length()) if 1 << n < num_responses]
    return [*below, num_responses]


def _estimate(values: Sequence[float]) -> Estimate:
    if not values:
        return Estimate(math.nan, math.nan, 0)
    mean, count = fmean(values), len(values)
    if count < 2:
        return Estimate(mean, math.nan, count)
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, math.sqrt(variance / count), count)
