"""The small files that an actor needs beside the weights: configuration, tokenizer, chat template.

They travel as one MessagePack map of name to bytes. The list of names is closed: no weights, no code, no paths.
"""

from __future__ import annotations

import fnmatch
from pathlib import Path

import msgspec

from streamrl.errors import WeightsError

ASSET_NAMES = (
    "config.json", "tokenizer*.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja",
    "merges.txt", "vocab.json",
)
# Far above any tokenizer; it bounds the memory that a peer's WELCOME can make an actor take.
MAX_ASSETS_BYTES = 256 << 20

_DECODER = msgspec.msgpack.Decoder(dict[str, bytes])


def pack_assets(model_dir: str | Path) -> bytes:
    """The assets of a model directory, in name order; WeightsError without config.json or over 256 MiB."""
    files = sorted(path for path in Path(model_dir).iterdir() if path.is_file() and _allowed(path.name))
    if "config.json" not in [path.name for path in files]:
        raise WeightsError(f"{model_dir} has no config.json: it is not a model directory")
    if (size := sum(path.stat().st_size for path in files)) > MAX_ASSETS_BYTES:
        raise WeightsError(f"the assets of {model_dir} are {size} bytes, over the limit of {MAX_ASSETS_BYTES}")
    return msgspec.msgpack.encode({path.name: path.read_bytes() for path in files})


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
        (target / name).write_bytes(content)
    return [target / name for name in assets]


def _allowed(name: str) -> bool:
    # `*` of a pattern matches a slash too, so separators are refused first: a name must stay in its folder.
    plain = not any(char in name for char in "/\\\0") and len(name) <= 128
    return plain and any(fnmatch.fnmatchcase(name, pattern) for pattern in ASSET_NAMES)
