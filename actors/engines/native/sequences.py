"""One sequence on its way through the native engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from actors.engines.base import GenerateRequest, Generation, VersionSpan
from actors.engines.native.stopping import StopMatcher
from streamrl.messages import VersionRef

Deliver = Callable[[Generation | BaseException], None]


@dataclass(eq=False, slots=True)
class Sequence:
    """A request, what it has produced, and which weights produced it. Compared by identity."""

    request: GenerateRequest
    prompt: tuple[int, ...]
    deliver: Deliver
    eos_ids: frozenset[int]  # empty when the request ignores them
    matcher: StopMatcher | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    marks: list[tuple[VersionRef, int]] = field(default_factory=list)  # (version, first token it sampled)

    def mark(self, ref: VersionRef) -> None:
        """From the next token on, `ref` samples."""
        self.marks.append((ref, len(self.token_ids)))

    def add(self, token: int, logprob: float) -> str | None:
        """Append a sampled token; returns why the sequence ends, or None."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.eos_ids or (self.matcher is not None and self.matcher.feed(token)):
            return "stop"
        return "length" if len(self.token_ids) >= self.request.max_new_tokens else None

    def generation(self, finish: str) -> Generation:
        return Generation(self.token_ids, self.logprobs, self.spans(), finish)

    def spans(self) -> list[VersionSpan]:
        """Every token in exactly one span; a version that sampled nothing here has none."""
        ends = [start for _, start in self.marks[1:]] + [len(self.token_ids)]
        return [
            VersionSpan(ref, start, end)
            for (ref, start), end in zip(self.marks, ends, strict=True)
            if end > start
        ]
