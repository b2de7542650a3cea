"""Places that a model has for the tokens of one sequence."""

from __future__ import annotations

from pathlib import Path


def num_positions(model_dir: str | Path) -> int | None:
    """The longest sequence that the model in a folder was made for; None if no configuration there says so.

    Beyond it learned positions do not exist, and rotary ones were never trained. An engine of a user's own may have a
    folder that transformers does not read.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):
        return None
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(found) if found else None
