"""The config.json of a model's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError
from streamrl.weights.model_folder import check_adapter, num_rows

SMOLLM2 = "smollm2-135m"  # the folder of experiment=smollm2


def model_config(directory: str | Path, *, setting: str) -> dict[str, Any]:
    """config.json of a checkpoint. Raises ConfigError."""
    if not Path(directory).exists():
        made = "run `make smollm2`, which makes it, or " if Path(directory).name == SMOLLM2 else ""
        raise ConfigError(
            f"{setting}={directory}: no such folder (looked in {Path.cwd()}): {made}give a local Hugging Face "
            "checkpoint directory, or a name of the model hub."
        )
    check_adapter(Path(directory), said=f"{setting}={directory}")
    try:
        found = json.loads((Path(directory) / "config.json").read_text())
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"{setting}={directory} holds no config.json: give a local Hugging Face checkpoint directory, or a name of "
            "the model hub."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{setting}={directory}: its config.json cannot be read: {error}") from error
    return found


def policy_vocab_size(model_dir: str | Path) -> int:
    """The vocabulary's size from config.json, without loading the model: the hub checks token ids against it."""
    config = model_config(model_dir, setting="policy.model_path")
    return num_rows(config)
