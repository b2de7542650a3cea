"""The small files that an actor needs beside the weights: configuration, tokenizer, chat template.

They travel as one MessagePack map of name to bytes. The list of names is closed: no weights, no code, no paths but
that of a tokenizer's further templates. It has every file that a tokenizer of transformers may be read from.
"""

from __future__ import annotations

import fnmatch
from pathlib import Path

import msgspec

from streamrl.errors import WeightsError

TEMPLATES = "additional_chat_templates"
"""The folder of a tokenizer's additional templates, such as the one for prompts with tools."""
ASSET_NAMES = (
    "config.json", "tokenizer*.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja",
    "merges.txt", "vocab.json", "vocab.txt", "added_tokens.json", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "tiktoken.model", "tekken.json", f"{TEMPLATES}/*.jinja",
)
# Far above any tokenizer; it bounds the memory that a peer's WELCOME can make an actor take.
MAX_ASSETS_BYTES = 256 << 20

_DECODER = msgspec.msgpack.Decoder(dict[str, bytes])


def pack_assets(model_dir: str | Path) -> bytes:
    """The assets of a model directory, in name order; WeightsError without config.json or over 256 MiB."""
    folder = Path(model_dir)
    named = ((path.relative_to(folder).as_posix(), path) for at in ("*", f"{TEMPLATES}/*") for path in folder.glob(at))
    files = {name: path for name, path in sorted(named) if path.is_file() and _allowed(name)}
    if "config.json" not in files:
        raise WeightsError(f"{model_dir} has no config.json: it is not a model directory")
    if (size := sum(path.stat().st_size for path in files.values())) > MAX_ASSETS_BYTES:
        raise WeightsError(f"the assets of {model_dir} are {size} bytes, over the limit of {MAX_ASSETS_BYTES}")
    return msgspec.msgpack.encode({name: path.read_bytes() for name, path in files.items()})


def unpack_assets(data: bytes, target_dir: str | Path) -> list[Path]:
    """Write the assets into `target_dir` and return the files; WeightsError, and none, if one may not travel."""
    # All names are checked before the first file is written, so a refused map leaves nothing behind.
    if len(data) > MAX_ASSETS_BYTES:
        raise WeightsError(f"the assets are {len(data)} bytes, over the limit of {MAX_ASSETS_BYTES}")
    try:
        assets = _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WeightsError(f"the assets are no map of names to bytes: {error}") from error
    for name in assets:
        if not _allowed(name):
            raise WeightsError(f"asset {name!r} is refused: only {', '.join(ASSET_NAMES)} may travel")
    target = Path(target_dir)
    target.mkdir(parents=True, exist_ok=True)
    for name, content in assets.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(content)
    return [target / name for name in assets]


def _allowed(name: str) -> bool:
    # `*` of a pattern matches a slash too, so separators are refused first: a name must stay in its folder.
    own = name.removeprefix(f"{TEMPLATES}/")
    plain = not any(char in own for char in "/\\\0") and len(name) <= 128
    return plain and any(fnmatch.fnmatchcase(name, pattern) for pattern in ASSET_NAMES)
