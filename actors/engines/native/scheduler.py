"""Continuous batching: a forward pass decodes one token of every running sequence and reads the prompts that join.

Rows 0..n-1 of the cache are the running sequences; a sequence that ends gives its row to the last one. Members of a
group share a prompt: those that wait together are read once, and one that comes later copies the cache of a running
sibling, as long as the weights that read it are still the installed ones.

Stop strings: tokens and text do not line up (a token may hold half a character, a stop string may span tokens, some
decoders drop a leading space), so the tail is decoded again with every token and only what it adds is searched.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.engines.base import GenerateRequest, Generation, VersionSpan
from actors.engines.native.forward import Forward, Prompt
from actors.engines.native.sampling import SamplingPlan, draw, make_plan
from streamrl.errors import EngineError, RequestError
from streamrl.messages import VersionRef
from streamrl.messages.seeding import uniforms

Decode = Callable[[Sequence[int]], str]
_BROKEN = "\ufffd"  # what decoders show for bytes that are not yet a whole character
_WINDOW_TOKENS = 16
_OVERLAP_TOKENS = 6


def decoder(tokenizer: Any) -> Decode:
    """The tokenizer's plain decode, special tokens shown, so that a stop string may be one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda ids: backend.decode(list(ids), skip_special_tokens=False)
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


class StopMatcher:
    """Fed one token at a time; `feed` is True at the first token after which the text contains a stop string."""

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self._stop = tuple(stop)
        self._decode = decode
        self._reach = max(len(text) for text in stop) - 1  # characters of the past that a match can begin in
        self._ids: list[int] = []
        self._first = 0  # the window is ids[first:]
        self._seen = ""  # text of the window so far, unfinished characters left out
        self._past = ""  # the last `reach` characters of all text already searched

    def feed(self, token: int) -> bool:
        self._ids.append(token)
        window = self._decode(self._ids[self._first :])
        if not window.startswith(self._seen):
            # This decoder rewrites earlier text: fall back to the whole of it, searched from the start.
            self._first, self._seen, self._past = 0, "", ""
            window = self._decode(self._ids)
        fresh = window[len(self._seen) :]
        text = self._past + fresh
        if any(stop in text for stop in self._stop):
            return True
        settled = fresh.rstrip(_BROKEN)
        self._seen += settled
        self._past = (self._past + settled)[-self._reach :] if self._reach else ""
        if len(self._ids) - self._first >= _WINDOW_TOKENS:
            self._slide()
        return False

    def _slide(self) -> None:
        """Forget the front of the window, unless that would cut a character in two at either end."""
        first = len(self._ids) - _OVERLAP_TOKENS
        seen = self._decode(self._ids[first:])
        if seen and _BROKEN not in seen:
            self._first, self._seen = first, seen


Deliver = Callable[[Generation | BaseException], None]
_Key = tuple[VersionRef | None, tuple[int, ...]]


@dataclass(eq=False, slots=True)
class Sequence:
    """A request, its tokens so far, and the weights that produced them. Compared by identity."""

    request: GenerateRequest
    prompt: tuple[int, ...]
    deliver: Deliver
    eos_ids: frozenset[int]  # empty when the request ignores them
    matcher: StopMatcher | None
    version: VersionRef | None = None  # the weights that it ends with; None: whatever is installed
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sets: list[np.ndarray] = field(default_factory=list)  # none where the whole distribution is drawn from
    marks: list[tuple[VersionRef, int]] = field(default_factory=list)  # (version, first token it sampled)

    @property
    def key(self) -> _Key:
        """The key of the prompt cache: sequences with equal keys share an entry."""
        return self.version, self.prompt

    def mark(self, ref: VersionRef) -> None:
        """Record `ref` as the version that samples from the next token on."""
        self.marks.append((ref, len(self.token_ids)))

    def add(self, token: int, logprob: float, drawn_from: np.ndarray | None) -> str | None:
        """Append a sampled token; returns why the sequence ends, or None."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if drawn_from is not None and self.request.wants_sets:
            self.sets.append(drawn_from)
        if token in self.eos_ids or (self.matcher is not None and self.matcher.feed(token)):
            return "stop"
        return "length" if len(self.token_ids) >= self.request.max_new_tokens else None

    def generation(self, finish: str) -> Generation:
        """Every token is in exactly one span; a version that sampled nothing here has none."""
        ends = [start for _, start in self.marks[1:]] + [len(self.token_ids)]
        marks = zip(self.marks, ends, strict=True)
        spans = [VersionSpan(ref, start, end) for (ref, start), end in marks if end > start]
        return Generation(self.token_ids, self.logprobs, spans, finish, self.sets or None)


@dataclass(slots=True)
class _SharedPrompt:
    """A prompt that weights which still serve have read, and the running sequences whose rows begin with it."""

    logits: Tensor  # [vocab], after its last token
    members: set[Sequence]


class Scheduler:
    """All state of the running batch. Belongs to one thread; `step` runs one forward pass.

    Args:
        pinning: sequences end with the adapter that they began with.
    """

    def __init__(self, forward: Forward, max_num_seqs: int, prefill_tokens: int, *, pinning: bool = False) -> None:
        self.forward = forward
        self.max_num_seqs = max_num_seqs
        self.ref: VersionRef | None = None
        self.admitting = True  # False while an install waits for the running sequences to end
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.tokens_total = self.prefill_tokens_total = self.steps_total = self.nonfinite_total = 0
        self._prefill_tokens, self._pinning = prefill_tokens, pinning
        self._cached = np.zeros(max_num_seqs, dtype=np.int64)  # tokens in the cache, per row
        self._last = np.zeros(max_num_seqs, dtype=np.int64)  # the token that is sampled but not yet in the cache
        self._seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        self._plan: SamplingPlan | None = None  # None: the rows have changed since it was made
        self._shared: dict[_Key, _SharedPrompt] = {}
        self._joined: list[Sequence] = []  # of the present pass
        self._num_alone = 0  # sequences that join one at a time, after they failed together

    @property
    def can_admit(self) -> bool:
        return bool(self.waiting) and len(self.running) < self.max_num_seqs and self.admitting and self.ref is not None

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self.can_admit

    def step(self) -> None:
        """Run one forward pass: the next token of everything that runs, and the prompts of those that can join.

        What fails with sequences that join fails them alone, if the model still works without them.
        """
        n, cached, sampled = len(self.running), self._cached.copy(), self.tokens_total
        try:
            self._pass(n)
        except Exception as error:  # of a model's code, of a tokenizer, or of a device
            if self.tokens_total != sampled:  # half of the rows may have their token
                raise
            self._cached = cached
            self._drop_failed(n, error)

    def _pass(self, n: int) -> None:
        self._joined = []
        fresh = self._take_waiting()
        joined = self._joined
        self._copy_siblings(joined)
        for row, sequence in enumerate(joined, n):
            self._seat(sequence, row)
        positions = torch.from_numpy(self._cached[:n].copy())
        longest = int(positions.max()) + 1 if n else 0
        readers: dict[_Key, list[int]] = {key: [] for key in fresh}
        for row, sequence in enumerate(joined, n):
            readers.get(sequence.key, []).append(row)
        prompts = [Prompt(key[1], rows) for key, rows in readers.items()]
        versions = [key[0] or self.ref for key in (*(sequence.key for sequence in self.running[:n]), *fresh)]
        logits = self.forward.run(torch.from_numpy(self._last[:n]), positions, longest, prompts, versions)
        self._cached[:n] += 1
        self.steps_total += 1
        self.prefill_tokens_total += sum(len(prompt) for _, prompt in fresh)
        if joined:
            logits = self._with_joined(logits, n, joined, fresh)
        self._advance(logits)

    def _with_joined(self, logits: Tensor, n: int, joined: list[Sequence], fresh: list[_Key]) -> Tensor:
        """A row for each running sequence, of one for each of the n that ran before and for each prompt that was read.

        What each prompt led to is kept for members of its group that are still to come.
        """
        read = zip(fresh, logits[n:], strict=True)
        self._shared |= {key: _SharedPrompt(row.clone(), set()) for key, row in read}
        row_of = {key: row for row, key in enumerate(fresh, n)}
        earlier: list[Tensor] = []  # read by an earlier pass
        rows = list(range(n))
        for sequence in joined:
            key = sequence.key
            if key not in row_of:
                row_of[key] = len(logits) + len(earlier)
                earlier.append(self._shared[key].logits[None])
            rows.append(row_of[key])
            self._shared[key].members.add(sequence)
        return (torch.cat([logits, *earlier]) if earlier else logits)[rows]

    # --- admission ---------------------------------------------------------------------------------------------

    def _take_waiting(self) -> list[_Key]:
        """Join waiting sequences in order, as many as have room and one pass should read; returns prompts to read."""
        joined = self._joined
        fresh: dict[_Key, None] = {}
        num_tokens = 0
        while self.can_admit and len(self.running) + len(joined) < self.max_num_seqs:
            if self._num_alone and joined:
                break
            first = self.waiting[0]
            if self._pinning:
                wanted = first.request.version
                first.version = wanted if self.forward.adapters.has(wanted) else self.ref
            if first.key not in self._shared and first.key not in fresh:
                num_tokens += len(first.prompt)
                if fresh and num_tokens > self._prefill_tokens:
                    break
                fresh[first.key] = None
            joined.append(self.waiting.popleft())
        # By length: prompts of one length are read together, into rows that lie beside each other.
        joined.sort(key=lambda sequence: len(sequence.prompt))
        self._num_alone = max(0, self._num_alone - len(joined))
        return sorted(fresh, key=lambda key: len(key[1]))

    def _drop_failed(self, n: int, error: Exception) -> None:
        """Fail the sequences that joined in a pass that failed, and without any all those that ran.

        Several that joined together are tried again one at a time. Raises the error again if the model fails without
        any of them: then it is the engine that is broken.
        """
        joined = self._joined
        del self.running[n:]
        self._plan = None
        self._shared = {key: one for key, one in self._shared.items() if one.members - set(joined)}
        for shared in self._shared.values():
            shared.members -= set(joined)
        self.forward.score([0, 0], 1, 1.0, self.ref)
        if len(joined) > 1:
            self.waiting.extendleft(reversed(joined))
            self._num_alone = len(joined)
            for sequence in joined:
                sequence.marks.clear()
            return
        failed = joined or list(self.running)
        if not joined:
            self._remove(list(range(n)))
        for sequence in failed:
            sequence.deliver(EngineError(
                f"a pass failed with this request, of {len(sequence.prompt)} prompt tokens, and the engine goes on: "
                f"{type(error).__name__}: {error}"
            ))

    def _copy_siblings(self, joined: list[Sequence]) -> None:
        """Copy the cache of a running sibling to the rows that these will get, where one has read their prompt."""
        rows = enumerate(joined, len(self.running))
        late = [(row, sequence) for row, sequence in rows if sequence.key in self._shared]
        siblings = [self.running.index(next(iter(self._shared[sequence.key].members))) for _, sequence in late]
        longest = max((len(sequence.prompt) for _, sequence in late), default=0)
        self.forward.cache.copy_rows(siblings, [row for row, _ in late], longest)

    def _seat(self, sequence: Sequence, row: int) -> None:
        """Give a sequence its row of the cache."""
        self.running.append(sequence)
        self._plan = None
        sequence.mark(sequence.version or self.ref)
        self._cached[row] = len(sequence.prompt)
        self._seeds[row] = sequence.request.seed & 0xFFFF_FFFF_FFFF_FFFF

    # --- decoding ----------------------------------------------------------------------------------------------

    def _advance(self, logits: Tensor) -> None:
        """Sample one token for every row (logits [n, vocab]) and release the rows that have ended."""
        n = len(self.running)
        if self._plan is None:
            self._plan = make_plan([sequence.request.sampling for sequence in self.running], self.forward.device)
        # The new token's place in the whole sequence: the next turn of the same episode draws other numbers.
        drawn = draw(logits, self._plan, uniforms(self._seeds[:n], self._cached[:n].astype(np.uint64)))
        self._last[:n], logprobs = drawn.on_host()
        self.tokens_total += n
        ended: list[tuple[int, str | Exception | None]] = []
        for row, (token, logprob) in enumerate(zip(self._last[:n].tolist(), logprobs, strict=True)):
            if not math.isfinite(logprob):
                ended.append((row, None))
                continue
            try:
                finish = self.running[row].add(token, logprob, drawn.sets.get(row))
            except Exception as error:  # of the tokenizer, which looks for the request's own stop strings
                finish = error
            if finish is not None:
                ended.append((row, finish))
        if not ended:
            return
        sequences = [self.running[row] for row, _ in ended]
        self._remove([row for row, _ in ended])
        for sequence, (_, finish) in zip(sequences, ended, strict=True):
            self._release(sequence, finish)
        if any(finish is None for _, finish in ended):
            self.forward.cache.scrub(self._cached[: len(self.running)].tolist())

    def _release(self, sequence: Sequence, finish: str | Exception | None) -> None:
        if isinstance(finish, Exception):
            error = RequestError(f"the stop strings of this request cannot be looked for: {finish!r:.200}")
            error.__cause__ = finish
            sequence.deliver(error)
            return
        if finish is not None:
            sequence.deliver(sequence.generation(finish))
            return
        self.nonfinite_total += 1
        sequence.deliver(EngineError(
            f"weights {sequence.marks[-1][0]} gave a log-prob that is not finite after {len(sequence.token_ids)} new "
            f"tokens on a prompt of {len(sequence.prompt)}; nothing was returned"
        ))

    def _remove(self, rows: list[int]) -> None:
        """Take the sequences of these rows, ascending, out; the last rows move into their places and stay compact."""
        left = len(self.running) - len(rows)
        gone = set(rows)
        places = [row for row in rows if row < left]
        moved = [row for row in range(left, len(self.running)) if row not in gone]
        if moved:
            self.forward.cache.copy_rows(moved, places, int(self._cached[moved].max()))
            for column in (self._cached, self._last, self._seeds):
                column[places] = column[moved]
        ended = [self.running[row] for row in rows]
        for place, row in zip(places, moved, strict=True):
            self.running[place] = self.running[row]
        del self.running[left:]
        self._plan = None
        for sequence in ended:
            shared = self._shared.get(sequence.key)
            if shared is not None:
                shared.members.discard(sequence)
                if not shared.members:
                    del self._shared[sequence.key]

    # --- from outside, between two steps -----------------------------------------------------------------------

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence, running or waiting; nothing is delivered."""
        if sequence in self.running:
            self._remove([self.running.index(sequence)])
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def clear(self) -> None:
        """Drop every sequence, when the engine ends."""
        self.running.clear()
        self.waiting.clear()
        self._shared.clear()

    def new_version(self, ref: VersionRef, *, recompute: bool) -> None:
        """The weights have just changed; running sequences go on, on their old cache or a recomputed one.

        With `pinning` they go on with their own weights, and only later ones get these.
        """
        self.ref = ref
        if self._pinning:
            return
        self._shared.clear()
        for sequence in self.running:
            sequence.mark(ref)
        if recompute and self.running:
            self._recompute()

    @property
    def versions_in_use(self) -> set[VersionRef | None]:
        """The versions that running sequences are pinned to; None where one is not pinned."""
        return {sequence.version for sequence in self.running}

    def _recompute(self) -> None:
        """Read every running sequence again, up to the token that is sampled but not cached yet."""
        texts = [
            ([*sequence.prompt, *sequence.token_ids][: self._cached[row]], [row])
            for row, sequence in enumerate(self.running)
        ]
        none = torch.empty(0, dtype=torch.int64)
        while texts:
            batch = [texts.pop()]
            num_tokens = len(batch[0][0])
            while texts and num_tokens + len(texts[-1][0]) <= self._prefill_tokens:
                num_tokens += len(texts[-1][0])
                batch.append(texts.pop())
            self.prefill_tokens_total += num_tokens
            self.forward.run(none, none, 0, [Prompt(ids, rows) for ids, rows in batch], [self.ref] * len(batch))
