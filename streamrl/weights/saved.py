"""The weights in a run's checkpoints, for readers that are no learner: one version, each tensor whole.

A checkpoint is `ckpt-<version>/`: a manifest with the digest of every file, and a safetensors file of each rank whose
header says where in the whole tensor each block begins (`learner.checkpoint` writes them). That of a run that trains
an adapter holds its factors alone; the manifest says to which base they belong.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from streamrl.errors import CheckpointError

PREFIX = "model/model."
"""Before the name of a parameter of the policy's model."""
_FACTOR = ".default.weight"
"""The end of a factor's name in a checkpoint, where peft has put the adapter's."""
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
# Files are digested piece by piece: a whole one may not fit in memory.
_PIECE = 1 << 22


class SavedAdapter(NamedTuple):
    """The manifest's fields on an adapter: the folder of its base, its scale, and how the base was quantized."""

    base: Path
    base_digest: str
    scale: float
    quantized: str


def saved_versions(run_dir: Path | str) -> list[int]:
    """Versions that the run's checkpoints hold, ascending."""
    found = (path.parent.name.removeprefix("ckpt-") for path in Path(run_dir).glob("ckpt-*/manifest.json"))
    return sorted(int(name) for name in found if name.isdigit())


def saved_adapter(run_dir: Path | str, version: int) -> SavedAdapter | None:
    """The adapter that a checkpoint holds; None if it holds every weight. Raises CheckpointError as `read_version`."""
    try:
        one = _manifest(Path(run_dir) / f"ckpt-{version:08d}").get("extra", {}).get("adapter")
        return one and SavedAdapter(
            Path(one["base"]), one["base_digest"], one["alpha"] / one["rank"], one.get("base_quantization", "none")
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the manifest of version {version} in {run_dir} cannot be read: {error!r}") from error


def weights_digest(model_dir: Path) -> str:
    """xxh3-128 over a model's files of weights, in the order of their names."""
    state = xxhash.xxh3_128()
    for path in sorted(path for pattern in _WEIGHT_FILES for path in model_dir.glob(pattern)):
        with open(path, "rb") as file:
            while piece := file.read(_PIECE):
                state.update(piece)
    return state.hexdigest()


def read_version(run_dir: Path | str, version: int) -> Iterator[tuple[str, Tensor]]:
    """(parameter, tensor) of a saved version of the policy, under the names of its model; of an adapter its factors.

    Raises:
        CheckpointError: no such checkpoint, or a file of it is damaged.
    """
    folder = Path(run_dir) / f"ckpt-{version:08d}"
    files = [safe_open(path, framework="pt") for path in _checked_files(folder)]
    blocks: dict[str, list[tuple[int, list[int]]]] = {}  # key -> (file, where its block begins)
    wholes: dict[str, list[int]] = {}
    for number, file in enumerate(files):
        for key, box in json.loads(file.metadata()["boxes"]).items():
            if key.startswith(PREFIX):
                blocks.setdefault(key, []).append((number, box["offset"]))
                wholes[key] = box["whole"]
    if not blocks:
        raise CheckpointError(f"{folder} holds no weights of a policy: take a checkpoint of this release.")
    for key, parts in blocks.items():
        name = key.removeprefix(PREFIX)
        name = name.removesuffix(_FACTOR) + ".weight" if name.endswith(_FACTOR) else name
        yield name, _joined(key, wholes[key], [(files[n].get_tensor(key), at) for n, at in parts])


def _joined(key: str, whole: list[int], parts: list[tuple[Tensor, list[int]]]) -> Tensor:
    if len(parts) == 1 and list(parts[0][0].shape) == whole:
        return parts[0][0]
    out, filled = torch.empty(whole, dtype=parts[0][0].dtype), 0
    for part, offset in parts:
        out[tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))] = part
        filled += part.numel()
    # Blocks of ranks never overlap, so the count of numbers shows whether one is missing.
    if filled != math.prod(whole):
        raise CheckpointError(
            f"{key!r}: the files hold {filled} of its {math.prod(whole)} numbers, take another version"
        )
    return out


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        body = json.loads((folder / "manifest.json").read_bytes())["body"]
        assert isinstance(body["files"], dict)
        return body
    except (OSError, ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
        raise CheckpointError(f"{folder} is not a complete checkpoint, take another version: {error}") from error


def _checked_files(folder: Path) -> list[Path]:
    """The files of all ranks, their digests compared with the manifest's."""
    # Before a tensor is read: safetensors maps a file, and a damaged one would be noticed only as wrong numbers.
    entries = _manifest(folder)["files"]
    paths = [folder / name for name in sorted(entries) if name.endswith(".safetensors")]
    for path in paths:
        if not path.is_file() or _hexdigest(path) != entries[path.name]["xxh3_128"]:
            raise CheckpointError(f"{path} is missing or damaged: its digest is not the manifest's")
    return paths


def _hexdigest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
