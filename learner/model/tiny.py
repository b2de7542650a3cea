"""A language model small enough for one CPU core: one character per token, random weights, a short supervised start.

`prepare_tiny_model` is what the quickstart calls. It writes an ordinary Hugging Face checkpoint (config.json,
model.safetensors, tokenizer files), so that nothing downstream knows that the model is a toy.

The start trains on the task, then on answers with errors, so that there is work to do. One reward a sequence carries
too few bits to teach a model the half of an algorithm that it does not know. A model that knows it and errs is like
what large models bring to reinforcement learning: right answers are among its samples, and the reward has to make them
likely. So the second phase trains on answers whose letters move to the next letter of the alphabet at random, until the
greedy answer is right only as often as asked for.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from learner.data.dialogues import Dialogue, task_dialogues
from streamrl.environment import Task
from streamrl.errors import ConfigError

log = logging.getLogger("streamrl.learner")

Progress = Callable[[str], None]
Row = tuple[list[int], list[bool]]
"""Token ids and whether each is trained on."""

TRAINED_SHARE = 0.98
"""The first phase ends early at this share of exact answers, as a mean over eight fresh batches."""
ERROR_PROBABILITY = 0.6
"""Per letter. Above one half, so that the greedy answer must go wrong if this went on for long."""
MAX_ERROR_STEPS = 200
ERROR_LR_SCALE = 0.1
"""A share of the first phase's learning rate: the skill must survive the second."""
NUM_HELD_OUT = 256
MAX_BATCH_CHARACTERS = 1 << 14
"""The most in a batch, which holds fewer texts if they are long; padding counts."""
TOLD_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Steps of both phases, the last loss of the first in nats a token, and greedy exact match at the end."""

    num_steps: int
    num_error_steps: int
    loss: float
    exact_match: float


def warm_start(
    model_dir: Path | str, dialogues: Sequence[Dialogue], *, num_steps: int, lr: float = 4e-3, batch_size: int = 64,
    stop_at: float = 0.3, seed: int = 0, num_threads: int = 1, progress: Progress = lambda _: None,
) -> WarmStart:
    """Train the checkpoint in place on texts; the loss has the model's tokens only.

    Args:
        dialogues: prompt, answer and perhaps more turns of both sides; the model has the last. They are
            taken in order, read again from the start when they run out; the last 256, or a fifth, are held out.
        num_steps: most steps of the first phase.
        lr: of AdamW, after 20 steps of warm-up; falls to zero over the second half of `num_steps`.
        stop_at: held-out greedy exact match to end with; 1.0 leaves the second phase out.
        num_threads: of torch, for the time of this call.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, trust_remote_code=False)
        trainer = WarmStartTrainer(model, tokenizer, dialogues, batch_size, progress)
        steps, loss = trainer.fit(num_steps, lr)
        error_steps = trainer.inject_errors(lr * ERROR_LR_SCALE, stop_at, random.Random(seed))
        result = WarmStart(steps, error_steps, loss, trainer.exact_match())
    finally:
        torch.set_num_threads(threads_before)
    save_model(model, model_dir)
    progress(f"warm start: done after {steps} steps and {error_steps} with injected errors, exact match "
             f"{result.exact_match:.2f}")
    if result.exact_match == 0.0 and num_steps:
        log.warning("the tiny model gives none of %d held-out answers: it is made for tasks of short texts, and may "
                    "earn no reward here; train a pretrained one with policy.model_path", len(trainer.held_out))
    return result


def save_model(model: Any, out_dir: Path | str) -> None:
    """`save_pretrained`, which would write nothing on any rank but the first: each machine has a copy of its own."""
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    model.save_pretrained(out_dir)


class WarmStartTrainer:
    """Both phases over one model."""

    def __init__(
        self, model: Any, tokenizer: Any, dialogues: Sequence[Dialogue], batch_size: int, progress: Progress
    ) -> None:
        widest = max(map(_width, dialogues))
        num_held_out = min(NUM_HELD_OUT, max(1, len(dialogues) // 5), max(16, 4 * MAX_BATCH_CHARACTERS // widest))
        self.model, self.tokenizer, self.progress = model, tokenizer, progress
        self.dialogues = dialogues[:-num_held_out] or dialogues
        self.held_out = [self.encode(dialogue) for dialogue in dialogues[-num_held_out:]]
        self.letters = sorted({letter for dialogue in dialogues for answer in dialogue[1::2] for letter in answer})
        self.batch_size, self.position = batch_size, 0

    def fit(self, num_steps: int, lr: float) -> tuple[int, float]:
        """Steps done and the last loss."""
        optimizer = self.optimizer(lr)
        recent: list[float] = []
        loss, step, told_at = 0.0, 0, time.monotonic()
        for step in range(1, num_steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, step / 20, 2 * (num_steps - step + 1) / num_steps)
            # Scored before it is learned from, so a batch that was not read before is an honest test.
            loss, exact = self.step(optimizer, [self.encode(dialogue) for dialogue in self.next_dialogues()])
            recent = [*recent[-7:], exact]
            share = sum(recent) / len(recent)
            if step % 50 == 0 or time.monotonic() - told_at > TOLD_EVERY_S:
                told_at = time.monotonic()
                self.progress(f"warm start: step {step} of {num_steps}, loss {loss:.3f}, exact match {share:.2f}")
            if len(recent) == 8 and share >= TRAINED_SHARE:
                break
        return step, loss

    def inject_errors(self, lr: float, stop_at: float, rng: random.Random) -> int:
        """Steps done until the held-out exact match is no more than `stop_at`."""
        if stop_at < 1:
            self.progress(f"warm start: injecting errors until exact match is about {stop_at:.2f}")
        optimizer = self.optimizer(lr)
        for step in range(MAX_ERROR_STEPS):
            if self.exact_match() <= stop_at:
                return step
            corrupted = [self.corrupt(dialogue, rng) for dialogue in self.next_dialogues()]
            self.step(optimizer, [self.encode(dialogue) for dialogue in corrupted])
        return MAX_ERROR_STEPS

    def corrupt(self, dialogue: Dialogue, rng: random.Random) -> Dialogue:
        return tuple(self.corrupt_answer(text, rng) if i % 2 else text for i, text in enumerate(dialogue))

    def corrupt_answer(self, answer: str, rng: random.Random) -> str:
        following = dict(zip(self.letters, [*self.letters[1:], self.letters[0]], strict=True))
        return "".join(following[letter] if rng.random() < ERROR_PROBABILITY else letter for letter in answer)

    def optimizer(self, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, optimizer: torch.optim.Optimizer, rows: list[Row]) -> tuple[float, float]:
        logits, labels = self.forward(rows)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach()), _exact_share(logits, labels)

    @torch.no_grad()
    def exact_match(self) -> float:
        return _exact_share(*self.forward(self.held_out))

    def forward(self, rows: list[Row]) -> tuple[Tensor, Tensor]:
        """Logits [B, T-1, A] and labels [B, T-1], -100 on padding and on the other side's tokens."""
        width = max(len(ids) for ids, _ in rows)
        input_ids = torch.full((len(rows), width), self.tokenizer.pad_token_id)
        labels = torch.full((len(rows), width), -100)
        for row, (ids, trained) in enumerate(rows):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            labels[row, : len(ids)] = torch.where(torch.tensor(trained), torch.tensor(ids), -100)
        # Right padding needs no attention mask: no position with a label looks ahead.
        return self.model(input_ids=input_ids, use_cache=False).logits[:, :-1], labels[:, 1:]

    def next_dialogues(self) -> list[Dialogue]:
        chosen: list[Dialogue] = []
        width = 0
        while len(chosen) < self.batch_size:
            dialogue = self.dialogues[(self.position + len(chosen)) % len(self.dialogues)]
            width = max(width, _width(dialogue))
            if chosen and width * (len(chosen) + 1) > MAX_BATCH_CHARACTERS:
                break
            chosen.append(dialogue)
        self.position += len(chosen)
        return chosen

    def encode(self, dialogue: Dialogue) -> Row:
        ids: list[int] = []
        trained: list[bool] = []
        for position, text in enumerate(dialogue):
            if position % 2:
                part = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
            else:  # the tiny model's template renders each message by itself
                message = [{"role": "user", "content": text}]
                opened = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
                part = self.tokenizer.encode(opened, add_special_tokens=False)
            ids += part
            trained += [position % 2 == 1] * len(part)
        return ids, trained


def _width(dialogue: Dialogue) -> int:
    return sum(len(str(text)) for text in dialogue) + 1


def _exact_share(logits: Tensor, labels: Tensor) -> float:
    """Share of rows whose greedy answer is right: all their argmax tokens are, under teacher forcing."""
    right = (logits.argmax(-1) == labels) | (labels == -100)
    return float(right.all(-1).float().mean())


PAD, EOS, SEPARATOR, UNKNOWN = "<pad>", "<eos>", "<sep>", "<unk>"
MAX_VOCABULARY = 1024
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}" + EOS + "{% else %}" + SEPARATOR + "{% endif %}{% endfor %}"
)
"""A user message ends with the separator, an assistant message with end-of-sequence: every prefix of a
conversation renders to a prefix of its text."""

FORMAT = 2
"""Part of the cache digest: raise it when the same arguments would make another model."""
ARCHITECTURES = {"qwen3": Qwen3Config, "llama": LlamaConfig}


def make_tiny_model(
    out_dir: Path | str, *, characters: str, hidden_size: int = 64, num_layers: int = 2, num_heads: int = 4,
    max_positions: int = 128, rope_theta: float = 20.0, seed: int = 0, architecture: str = "qwen3",
) -> Path:
    """Write a random causal language model and its character tokenizer; returns the directory.

    Args:
        characters: the alphabet; each becomes one token, after four special ones.
        hidden_size: a multiple of 2 x num_heads; the feed-forward part is four times as wide.
        rope_theta: base of the rotary embedding. The usual 10000 is for long texts; with a few dozen positions a small
            base tells neighbors apart, and a reversed string is learned in about half the steps.
        architecture: "qwen3" or "llama".
    Raises:
        ConfigError: a size does not fit, or the vocabulary would exceed 1024 tokens.
    """
    vocabulary = _vocabulary(characters)
    if hidden_size % (2 * num_heads):
        raise ConfigError(f"hidden_size={hidden_size} must be a multiple of 2 x num_heads={num_heads} (rotary halves).")
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture={architecture!r} is unknown: choose one of {', '.join(ARCHITECTURES)}.")
    config = ARCHITECTURES[architecture](
        vocab_size=len(vocabulary), hidden_size=hidden_size, intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=num_heads, num_key_value_heads=num_heads,
        head_dim=hidden_size // num_heads, max_position_embeddings=max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta}, initializer_range=hidden_size**-0.5,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=vocabulary[EOS], pad_token_id=vocabulary[PAD],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save_model(model, out_dir)
    _tokenizer(vocabulary, max_positions).save_pretrained(out_dir)
    return Path(out_dir)


def _vocabulary(characters: str) -> dict[str, int]:
    if len(set(characters)) != len(characters) or not characters:
        raise ConfigError(f"characters must be distinct and at least one, got {characters!r}.")
    tokens = [PAD, EOS, SEPARATOR, UNKNOWN, *characters]
    if len(tokens) > MAX_VOCABULARY:
        raise ConfigError(
            f"{len(characters)} different characters make {len(tokens)} tokens, more than a tiny model's "
            f"{MAX_VOCABULARY}: use policy.model_path, or a task with fewer letters."
        )
    return {token: index for index, token in enumerate(tokens)}


def _tokenizer(vocabulary: Mapping[str, int], max_positions: int) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel(vocab=dict(vocabulary), unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN, additional_special_tokens=[SEPARATOR],
        model_max_length=max_positions, clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def unknown_characters(model_dir: Path, dialogues: Sequence[Dialogue]) -> str:
    """The characters of these texts that a tiny model has no token for."""
    known = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False).get_vocab()
    return "".join(sorted({c for dialogue in dialogues for text in dialogue for c in text} - known.keys()))


def prepare_tiny_model(
    cache_dir: Path | str, task: Task, *, hidden_size: int = 64, num_layers: int = 2, num_heads: int = 4,
    architecture: str = "qwen3", max_positions: int = 128, num_warm_start_steps: int = 300,
    warm_start_lr: float = 4e-3, stop_at: float = 0.3, seed: int = 0, num_threads: int = 1, progress: Progress = print,
) -> Path:
    """Make the tiny model of this task and warm it up, or take the one that the same arguments made before.

    The characters are those of the task's own prompts and answers. Examples are taken from the end of the train split,
    so that a run which reads from the beginning meets new prompts.

    Returns:
        The checkpoint directory, inside `cache_dir`; its name holds a digest of the arguments and of the examples.
    Raises:
        TaskError: the task has no `target` and steps were asked for, or it does not open with one user message.
        ConfigError: a size does not fit.
    """
    sizes = {"hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads,
             "architecture": architecture, "max_positions": max_positions, "seed": seed}
    start = {"num_steps": num_warm_start_steps, "lr": warm_start_lr, "batch_size": 64, "stop_at": stop_at, "seed": seed}
    dialogues = task_dialogues(task, max(512, num_warm_start_steps * 64), needs_target=num_warm_start_steps > 0)
    identity = json.dumps([FORMAT, sizes, start, dialogues[:512]], sort_keys=True)
    digest = blake2b(identity.encode(), digest_size=6).hexdigest()
    final = Path(cache_dir) / f"tiny-{task.name.replace('/', '_').replace(':', '_')}-{digest}"
    if (final / "config.json").exists():
        progress(f"tiny model: reusing {final}")
        return final

    building = final.with_name(f"{final.name}.{os.getpid()}.building")
    try:
        characters = "".join(sorted({c for dialogue in dialogues for text in dialogue for c in text}))
        progress(f"tiny model: {num_layers} layers of width {hidden_size}, {len(characters)} characters -> {final}")
        make_tiny_model(building, characters=characters, **sizes)
        if num_warm_start_steps:
            result = warm_start(building, dialogues, num_threads=num_threads, progress=progress, **start)
            (building / "warm_start.json").write_text(json.dumps(asdict(result)) + "\n")
        try:
            os.replace(building, final)
        except OSError:
            # Another process finished the same model first; a directory that exists is complete.
            if not (final / "config.json").exists():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return final
