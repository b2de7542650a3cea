"""The policy as an ordinary Hugging Face checkpoint, for anything that is not streamrl."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from learner.mesh import Ranks
from learner.model.policy import Policy

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


@torch.no_grad()
def export_model(policy: Policy, model_dir_source: Path | str, out_dir: Path | str, ranks: Ranks | None = None) -> Path:
    """Write weights and config of the policy, and every other small file (tokenizer, templates) of its first model.

    A collective call: tensors are gathered one at a time and kept in host memory by rank 0, which writes. An existing
    `out_dir` is replaced in one step when the new one is complete.
    """
    out_dir, source = Path(out_dir), Path(model_dir_source)
    ranks = ranks or Ranks()
    weights = {}
    for name, parameter in policy.model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if ranks.rank == 0:
            weights[name] = whole.detach().to("cpu", copy=True)
    if ranks.rank == 0:
        draft = out_dir.with_name(f"{out_dir.name}.tmp-{secrets.token_hex(4)}")
        draft.mkdir(parents=True)
        for path in source.iterdir():
            if path.is_file() and not path.name.endswith(_WEIGHTS):
                shutil.copyfile(path, draft / path.name)
        policy.model.save_pretrained(draft, state_dict=weights)
        old = out_dir.with_name(f"{out_dir.name}.old-{secrets.token_hex(4)}")
        if out_dir.exists():
            os.replace(out_dir, old)
        os.replace(draft, out_dir)
        shutil.rmtree(old, ignore_errors=True)
    ranks.barrier()
    return out_dir
