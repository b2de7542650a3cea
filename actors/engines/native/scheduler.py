"""Continuous batching: a forward pass decodes one token of every running sequence and reads the prompts that join.

Rows 0..n-1 of the cache are the running sequences; a sequence that ends gives its row to the last one. Members of a
group share a prompt: those that wait together are read once, and one that comes later copies the cache of a running
sibling, as long as the weights that read it are still the installed ones.

On a GPU the host is one pass behind: the tokens of a pass go into the next one on the device, and the host reads them
while that runs. A sequence whose end is found so late has drawn one token too many, which is passed over.

Stop strings: tokens and text do not line up (a token may hold half a character, a stop string may span tokens, some
decoders drop a leading space), so the tail is decoded again with every token and only what it adds is searched.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.engines.base import GenerateRequest, Generation, VersionSpan
from actors.engines.native.forward import Forward, Prompt
from actors.engines.native.sampling import SamplingPlan, draw, make_plan
from actors.engines.native.transfers import Arrival
from streamrl.errors import EngineError, RequestError
from streamrl.messages import VersionRef
from streamrl.messages.seeding import uniforms
from streamrl.weights.gpu.pinned import upload

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


class _Flight(NamedTuple):
    """A pass whose tokens the host has not read yet."""

    rows: list[Sequence]
    sets: Mapping[int, np.ndarray]
    arrival: Arrival


class Scheduler:
    """All state of the running batch. Belongs to one thread; `step` runs one forward pass.

    Args:
        pinning: sequences end with the adapter that they began with.
        ahead: launch each pass before the tokens of the last one are read; None: on a GPU. Drawn sets are read at once.
    """

    def __init__(
        self,
        forward: Forward,
        max_num_seqs: int,
        prefill_tokens: int,
        *,
        pinning: bool = False,
        ahead: bool | None = None,
    ) -> None:
        self.forward = forward
        self.max_num_seqs = max_num_seqs
        self.ref: VersionRef | None = None
        self.admitting = True  # False while an install waits for the running sequences to end
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.tokens_total = self.prefill_tokens_total = self.steps_total = self.nonfinite_total = 0
        self._prefill_tokens, self._pinning = prefill_tokens, pinning
        self._ahead = forward.device.type == "cuda" if ahead is None else ahead
        self._flight: _Flight | None = None
        self._cached = np.zeros(max_num_seqs, dtype=np.int64)  # tokens in the cache, per row
        # Of each row, on the device, the token that is sampled but not yet in the cache.
        self._last = torch.empty(0, dtype=torch.int64, device=forward.device)
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
        n, cached = len(self.running), self._cached.copy()
        try:
            launched = self._launch(n)
        except Exception as error:  # of a model's code, or of a device
            self._cached = cached
            self._drop_failed(n, error)
            return
        self.catch_up()
        self._flight = launched
        if not (self._ahead and self.running):
            self.catch_up()

    def catch_up(self) -> None:
        """Read the tokens of the last pass. Before weights change: each is of the version that serves until now."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._read(flight)

    def _launch(self, n: int) -> _Flight:
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
        logits = self.forward.run(self._last[:n], positions, longest, prompts, versions)
        self._cached[:n] += 1
        self.steps_total += 1
        self.prefill_tokens_total += sum(len(prompt) for _, prompt in fresh)
        if joined:
            logits = self._with_joined(logits, n, joined, fresh)
        return self._draw(logits)

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
        logits = torch.cat([logits, *earlier]) if earlier else logits
        return logits.index_select(0, upload(torch.tensor(rows), logits.device))

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
        self.catch_up()
        self.forward.score([0, 0], 1, 1.0, self.ref)
        if len(joined) > 1:
            self.waiting.extendleft(reversed(joined))
            self._num_alone = len(joined)
            for sequence in joined:
                sequence.marks.clear()
            return
        failed = joined or list(self.running)
        if not joined:
            self._remove(list(range(len(failed))))
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

    def _draw(self, logits: Tensor) -> _Flight:
        """Sample one token for every row: logits [n, vocab]."""
        n = len(self.running)
        if self._plan is None:
            self._plan = make_plan([sequence.request.sampling for sequence in self.running], self.forward.device)
        # The new token's place in the whole sequence: the next turn of the same episode draws other numbers.
        drawn = draw(logits, self._plan, uniforms(self._seeds[:n], self._cached[:n].astype(np.uint64)))
        flight = _Flight(list(self.running), drawn.sets, Arrival(drawn.tokens, drawn.logprobs))
        self._last = drawn.tokens
        return flight

    def _read(self, flight: _Flight) -> None:
        """Give each sequence its token of a pass, and release those that have ended."""
        row_of = {sequence: row for row, sequence in enumerate(self.running)}
        tokens, logprobs = flight.arrival.read()
        ended: dict[int, str | Exception | None] = {}
        for place, (sequence, token, logprob) in enumerate(zip(flight.rows, tokens, logprobs, strict=True)):
            if sequence not in row_of:  # the pass was launched before its end was known
                continue
            self.tokens_total += 1
            finish: str | Exception | None = None
            if math.isfinite(logprob):
                try:
                    finish = sequence.add(token, logprob, flight.sets.get(place))
                except Exception as error:  # of the tokenizer, which looks for the request's own stop strings
                    finish = error
                if finish is None:
                    continue
            ended[row_of[sequence]] = finish
        rows = sorted(ended)
        sequences = [self.running[row] for row in rows]
        if rows:
            self._remove(rows)
        for row, sequence in zip(rows, sequences, strict=True):
            self._release(sequence, ended[row])
        if not all(map(math.isfinite, logprobs)):  # also of a token too many
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
            # As far as the old rows were written: by a token too many perhaps with what is not finite.
            self.forward.cache.copy_rows(moved, places, int(self._cached[moved + places].max()))
            for column in (self._cached, self._seeds):
                column[places] = column[moved]
            written, read = (upload(torch.tensor(numbers), self._last.device) for numbers in (places, moved))
            self._last.index_copy_(0, written, self._last.index_select(0, read))
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
        self._flight = None
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
        no_ids, no_positions = self._last[:0], torch.empty(0, dtype=torch.int64)
        while texts:
            batch = [texts.pop()]
            num_tokens = len(batch[0][0])
            while texts and num_tokens + len(texts[-1][0]) <= self._prefill_tokens:
                num_tokens += len(texts[-1][0])
                batch.append(texts.pop())
            self.prefill_tokens_total += num_tokens
            prompts = [Prompt(ids, rows) for ids, rows in batch]
            self.forward.run(no_ids, no_positions, 0, prompts, [self.ref] * len(batch))
