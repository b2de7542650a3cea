"""Fixtures: one tiny checkpoint of each kind per session."""

import pytest
import torch

from tests.kit.learning import tiny_checkpoint

KINDS = {
    "qwen3-tied": ("qwen3", True), "qwen3": ("qwen3", False), "llama-tied": ("llama", True),
    "mistral": ("mistral", False), "gpt2": ("gpt2", True),
}


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """kind -> directory of a Hugging Face checkpoint."""
    return {
        kind: tiny_checkpoint(tmp_path_factory.mktemp(kind), architecture, tied=tied)
        for kind, (architecture, tied) in KINDS.items()
    }
