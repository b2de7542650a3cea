"""A language model small enough for one CPU core: one character per token, random weights, a short supervised start.

`prepare_tiny_model` is what the quickstart calls. It writes an ordinary Hugging Face checkpoint (config.json,
model.safetensors, tokenizer files), so that nothing downstream knows that the model is a toy.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from learner.data.dialogues import task_dialogues
from learner.model.warm_start import Progress, save_model, warm_start
from streamrl.environment import Task
from streamrl.errors import ConfigError

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
