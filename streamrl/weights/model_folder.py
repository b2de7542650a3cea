"""A Hugging Face checkpoint on disk: one rule for which files hold its weights, and what is refused before a run.

Every reader takes what plain transformers takes. Where one of ours would take something else (the codes of quantized
weights for weights, a tensor that the configuration says is another one), or transformers would make weights up, the
folder is refused with a sentence that says what to do. Files are looked at by their headers alone.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from streamrl.errors import ConfigError, in_one_line

if TYPE_CHECKING:
    import torch

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHT_FILES = (SINGLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Where transformers looks for weights, in this order."""
ADAPTER = "adapter_config.json"
_MOST_HEADER_BYTES = 100_000_000  # the limit of safetensors itself

_QUANTIZED_NAMES = re.compile(
    r"(\.qweight|\.qzeros|\.g_idx|\.SCB|weight_packed|weight_scale|weight_scale_inv|weight_zero_point"
    r"|\.weight\.(absmax|quant_map|nested_absmax|quant_state\..*))$"
)
"""Tensors that stand beside codes, or hold them, in the formats that write no `quantization_config`."""
_PLAIN_TYPES = frozenset(("F64", "F32", "F16", "BF16"))
_NO_CODES = frozenset(("I64", "I32", "I16", "BOOL"))  # of counts and masks among the buffers

_OF_OTHER_MEDIA = re.compile(r"image|video|vision|audio|^(boi|eoi|boa|eoa)_")
"""Names under which a multimodal tokenizer keeps its placeholders."""


class StoredTensor(NamedTuple):
    """A tensor by the header of its file: its type in the words of safetensors."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """Whether its numbers are weights as they are."""
        return self.dtype in _PLAIN_TYPES

    @property
    def holds_codes(self) -> bool:
        """Whether it is a matrix of fewer than 16 bits a number."""
        return not self.is_plain and self.dtype not in _NO_CODES and len(self.shape) > 1


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor by its name in the safetensors files that transformers would read; none where it reads others.

    A single file wins over an index beside it.

    Raises:
        ConfigError: an index or a file that cannot be read, is cut short or is not there.
    """
    named = _config_of(folder).get("transformers_weights")
    first = named if isinstance(named, str) else next((name for name in WEIGHT_FILES if (folder / name).is_file()), "")
    if not first.endswith((".safetensors", ".safetensors.index.json")):
        return {}
    if first.endswith(".safetensors"):
        return _header(folder / first)
    try:
        places = json.loads((folder / first).read_text())["weight_map"]
        files = {name: _header(folder / name) for name in sorted(set(places.values()))}
        return {tensor: files[name][tensor] for tensor, name in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{folder / first} cannot be read, or names a tensor that its file does not hold ({in_one_line(error)}): "
            "restore the checkpoint."
        ) from error


def _header(path: Path) -> dict[str, StoredTensor]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(length)) if length < min(size, _MOST_HEADER_BYTES) else None
        found = {
            name: StoredTensor(path, entry["dtype"], tuple(entry["shape"]))
            for name, entry in entries.items() if name != "__metadata__"
        }
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0) <= size
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is not there, and the checkpoint's index names it: restore the file.") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{path} is no safetensors file ({in_one_line(error)}): restore it.") from error
    if not whole:
        raise ConfigError(f"{path} is cut short, at {size:,} bytes: restore it.")
    return found


def check_folder(folder: Path | str, *, said: str = "", needs_weights: bool = True) -> None:
    """Raise ConfigError for a folder of which some reader would take another model than transformers does.

    Args:
        said: the folder with the setting that names it, for the message.
        needs_weights: refuse a folder with a configuration and without weights too.
    """
    folder = Path(folder)
    said = said or f"policy.model_path={folder}"
    check_adapter(folder, said=said)
    if how := quantization_of(folder):
        raise ConfigError(f"{said} {refusal_of(how)}")
    if needs_weights and (folder / "config.json").is_file() and not _has_weights(folder):
        raise ConfigError(f"{said} holds no weights: give a checkpoint with one of {', '.join(WEIGHT_FILES)}.")


def check_adapter(folder: Path, *, said: str) -> None:
    """Raise ConfigError for a folder with an adapter in it, beside whole weights or alone."""
    if not (folder / ADAPTER).is_file():
        return
    raise ConfigError(
        f"{said} holds an adapter ({ADAPTER}) next to full weights, to which transformers would add it: take {ADAPTER} "
        "and the adapter's weights out of the folder, or merge them into the whole (docs/models.md)."
        if _has_weights(folder) else
        f"{said} is an adapter in peft's format, not a whole model: give the folder of a model that it is merged into "
        "(docs/models.md)."
    )


def _has_weights(folder: Path) -> bool:
    named = _config_of(folder).get("transformers_weights")
    return any((folder / name).is_file() for name in ((named,) if isinstance(named, str) else WEIGHT_FILES))


def num_rows(config: Mapping[str, Any]) -> int:
    """The size of the vocabulary by a config.json: rows of the embeddings of its text part.

    Raises ConfigError: it does not say, and transformers knows no such model.
    """
    text = config.get("text_config")
    size = (text if isinstance(text, Mapping) else config).get("vocab_size")
    if size is not None:
        return int(size)
    from transformers import AutoConfig

    try:  # it may say only what differs from its architecture's defaults, as that of Gemma 3 does
        return int(AutoConfig.for_model(**config).get_text_config().vocab_size)
    except Exception as error:  # of a class of transformers, which checks the whole configuration
        raise ConfigError(
            f"config.json tells no vocab_size, and transformers has none for it ({in_one_line(error)}): add it there."
        ) from error


def quantization_of(folder: Path) -> str:
    """How the weights of a folder are quantized, in a word; "" if they are not. Raises ConfigError: unreadable files.

    The configuration says it; some tools write quantized tensors and leave it out.
    """
    if (how := declared_quantization(_config_of(folder))) is not None:
        return how
    stored = stored_tensors(folder)
    codes = (name for name, one in stored.items() if one.holds_codes and name.endswith(("weight", "_blocks")))
    beside = (name for name in stored if _QUANTIZED_NAMES.search(name))
    found = next(chain(codes, beside), None)
    return "" if found is None else f"{stored[found].dtype}, as {found} is stored"


def declared_quantization(config: Mapping[str, Any]) -> str | None:
    """The method that a config.json says its weights are quantized by; None without one."""
    parts = (config, config.get("text_config") or {})
    for given in (part.get(key) for part in parts for key in ("quantization_config", "compression_config")):
        if given:
            bits = next((f"{size} bits" for size in (4, 8) if given.get(f"load_in_{size}bit")), "unnamed")
            return str(given.get("quant_method") or bits)
    return None


def refusal_of(how: str) -> str:
    """The end of a sentence about weights that are quantized so."""
    return (
        f"holds quantized weights ({how}), and learner and actors need them in float32, bfloat16 or float16: take the "
        "checkpoint that it was quantized from, or write one of its weights as docs/models.md says."
    )


def check_vocabulary(tokenizer: Any, num_rows: int, *, said: str) -> None:
    """Raise ConfigError if text could become an id that the model has no row for.

    Not counted are a multimodal tokenizer's placeholders of images and sounds, which texts do not have: some models of
    text alone come with them.

    Args:
        said: the setting and the folder, for the message.
    """
    placeholders = {token for name, token in tokenizer.special_tokens_map.items() if _OF_OTHER_MEDIA.search(name)}
    beyond = sorted(
        (number, token) for token, number in tokenizer.get_vocab().items()
        if number >= num_rows and token not in placeholders
    )
    if beyond:
        number, token = beyond[0]
        raise ConfigError(
            f"{said}: its tokenizer has {len(beyond)} tokens that its model has no row for, the first {token!r} with "
            f"id {number} of {num_rows} rows: resize the model's embeddings (resize_token_embeddings) and save both, "
            "or take the tokenizer that the model came with."
        )


def read_whole(
    folder: Path, dtype: torch.dtype, *, said: str, attention: str | None = None, needs_head: bool = True
) -> Any:
    """The whole model as transformers loads it, in host memory; no code from the folder is run.

    Args:
        said: the setting and the folder, for messages.
        needs_head: also refuse a checkpoint without an output layer.
    Raises:
        ConfigError: transformers cannot load it, would make weights up, or unties what the configuration ties.
    """
    from transformers import AutoModelForCausalLM

    chosen = {} if attention is None else {"attn_implementation": attention}
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True, **chosen
        )
    except Exception as error:  # of any reader: a .bin file may hold anything
        raise ConfigError(
            f"{said} cannot be loaded, restore its files or take another: {in_one_line(error)}"
        ) from error
    check_loaded(model, found, said=said, needs_head=needs_head)
    return model


def check_loaded(model: Any, found: Mapping[str, Any], *, said: str, needs_head: bool = True) -> None:
    """Raise ConfigError for a loaded model with random weights, or with two tensors where its configuration has one.

    Args:
        found: the loading info of transformers.
    """
    head = {id(parameter) for parameter in model.get_output_embeddings().parameters()}
    missing = [
        name for name, parameter in model.named_parameters()
        if name in found["missing_keys"] and (needs_head or id(parameter) not in head)
    ]
    if missing:
        raise ConfigError(
            f"{said} lacks {len(missing)} weights of its model, as {missing[0]}, which transformers would make up: "
            "restore the checkpoint, or set its config.json right."
        )
    for one, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter_or_buffer(one) is not model.get_parameter_or_buffer(other):
            raise ConfigError(untied(said, one, other))


def untied(said: str, one: str, other: str) -> str:
    """The sentence about two tensors that a configuration says are one."""
    return (
        f"{said}: its config.json ties {one} to {other} (tie_word_embeddings), and its files hold two that differ: set "
        f"tie_word_embeddings to false in config.json to train both, or take {one} out of the files."
    )


def _config_of(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):  # what loads the model says what is wrong with it
        return {}
    return found if isinstance(found, dict) else {}
