"""The result of one family: exact, refused at the start by name, failed, or not built."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import peft  # noqa: F401  # so that forks have it
import torch
import transformers

from bench.families.cases import NotBuilt, refusal, save_tiny
from bench.families.way import Difference, Refused, Way
from streamrl.architectures.miniature import HEAD_DIM

HEAD_DIMS = {"native": HEAD_DIM, "vllm": 32}
"""vLLM has no attention for smaller heads on a CPU."""
_MOST_CHARS = 500


def warm() -> None:
    """Do once what every fork would do again; without a thread, which a fork would miss."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("streamrl").setLevel(logging.ERROR)


def examine(family: str, folder: Path, engine: str) -> dict[str, Any]:
    """The line of one family but for its name: result, reason, and what was measured."""
    if reason := refusal(family):
        return {"result": "refused", "reason": reason.removeprefix(f"{family} ").partition("; take")[0]}
    found: dict[str, Any] = {"result": "exact", "reason": "", "embeddings": []}
    reasons = []
    for name in ("tied", "untied"):
        work = folder / name
        work.mkdir()
        try:
            counts = save_tiny(
                family, work / "model", tied=name == "tied", head_dim=HEAD_DIMS[engine],
                mixed_windows=engine == "native",
            )
            first = not found["embeddings"]
            # vLLM starts in half a minute, so it only serves whole models.
            went = Way(family, work / "model", work, engine, all_of_it=first and engine == "native").go()
            found |= counts | went if first else {}
            found["embeddings"].append(name)
        except NotBuilt as error:
            reasons.append(text_of(error))
        except Refused as error:
            if not found["embeddings"]:
                return {"result": "refused", "reason": text_of(error)}
        except Difference as error:
            return {"result": "failed", "reason": f"{name}: {text_of(error)}"}
    return found if found["embeddings"] else {"result": "not proved", "reason": reasons[0]}


def text_of(error: Exception) -> str:
    """Its text in one line."""
    return " ".join(str(error).split())[:_MOST_CHARS]
