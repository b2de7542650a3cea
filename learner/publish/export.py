"""The policy as an ordinary Hugging Face checkpoint, for anything that is not streamrl; the critic for another run."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from learner.model.adapter.lora import Dequantized, adapter_parameters, base_tensors, save_adapter, scale_of
from learner.model.attention.packed import prefix_in
from learner.model.critic import VALUE_HEAD, Critic
from learner.model.policy import Policy, policy_tensors, travels_as
from learner.ranks.mesh import Ranks
from streamrl.config.schema import DataConfig, LoraConfig
from streamrl.weights.adapter import merged
from streamrl.weights.assets import TEMPLATES

log = logging.getLogger("streamrl.learner")

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


@torch.no_grad()
def export_model(
    policy: Policy, model_dir_source: Path | str, out_dir: Path | str, ranks: Ranks | None = None, *,
    lora: LoraConfig | None = None, adapter_within: bool = False, dtype: torch.dtype = torch.float32,
    chat_template: str | None = None,
) -> Path:
    """Write weights and config of the policy, and every other small file (tokenizer, templates) of its first model.

    A collective call: tensors are cast, gathered one at a time and kept in host memory by rank 0, which writes. An
    existing `out_dir` is replaced in one step when the new one is complete.

    Args:
        dtype: of the weights.
        lora: of a policy with an adapter, which is merged here and also written on its own, in peft's form, to the
            folder `adapter` beside `out_dir`.
        adapter_within: put it into `out_dir`: of what lies beside that, nothing may be ours.
        chat_template: Jinja text in which the policy was prompted, if it was not its first model's own.
    """
    out_dir, source = Path(out_dir), Path(model_dir_source)
    ranks = ranks or Ranks()
    adapter = _gather(adapter_parameters(policy), ranks, torch.float32) if lora is not None else {}
    named = list(base_tensors(policy)) if lora is not None else policy_tensors(policy.model)
    types = {name: travels_as(tensor, dtype) for name, tensor in named}
    weights = _gather(named, ranks, dtype if lora is None else torch.float32)  # rounded once: after it is merged
    if ranks.rank == 0:
        if lora is not None:
            weights = {name: one.to(types[name]) for name, one in merged(weights, adapter, scale_of(lora))}
        with _replacing(out_dir) as draft:
            if lora is not None:
                with _replacing((draft if adapter_within else out_dir.parent) / "adapter") as own:
                    save_adapter(adapter, lora, own, model_path=str(source.resolve()))
            _copy_small_files(source, draft)
            set_chat_template(draft, chat_template)
            policy.model.save_pretrained(draft, state_dict=weights)
            _say_type(draft / "config.json", dtype)  # the model's own parameters are the masters
    ranks.barrier()
    return out_dir


@torch.no_grad()
def export_critic(critic: Critic, model_dir: Path, out_dir: Path, ranks: Ranks) -> Path:
    """Write a critic where `critic.model_path` of another run finds it: value head, and decoder if it has its own.

    A collective call, as `export_model`.

    Args:
        model_dir: the policy's first model, for its tokenizer.
    """
    weights = _gather(policy_tensors(critic.module), ranks, torch.float32)
    if ranks.rank == 0:
        decoder = {name.removeprefix("decoder."): one for name, one in weights.items() if name.startswith("decoder.")}
        head = {name.removeprefix("head."): one for name, one in weights.items() if not name.startswith("decoder.")}
        with _replacing(out_dir) as draft:
            _copy_small_files(model_dir, draft)
            if decoder:
                with torch.device("meta"):  # in the names of a whole model: not all are found without
                    whole = AutoModelForCausalLM.from_config(critic.module.decoder.config)
                prefix = prefix_in(whole, critic.module.decoder)
                whole.save_pretrained(draft, state_dict={f"{prefix}{name}": one for name, one in decoder.items()})
                _say_type(draft / "config.json", torch.float32)
            save_file({**head, "targets": critic.moments}, draft / VALUE_HEAD)
    ranks.barrier()
    return out_dir


def _copy_small_files(source: Path, folder: Path) -> None:
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, folder / path.name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, folder / TEMPLATES, copy_function=shutil.copyfile)


def used_template(data: DataConfig) -> str | None:
    """The chat template of the settings, if prompts are rendered with it."""
    return data.chat_template if data.apply_chat_template else None


def set_chat_template(folder: Path, text: str | None) -> None:
    """Make this the template of a checkpoint, so that all who prompt it do it as in training; None changes nothing."""
    if text is None:
        return
    (folder / "chat_template.json").unlink(missing_ok=True)
    shutil.rmtree(folder / TEMPLATES, ignore_errors=True)
    (folder / "chat_template.jinja").write_text(text)
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        kept = json.loads(settings.read_text())
        kept.pop("chat_template", None)
        settings.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")
    log.info("the exported model has data.chat_template in the place of its own chat template")


def _gather(
    tensors: Iterable[tuple[str, Tensor | Dequantized]], ranks: Ranks, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Whole tensors in host memory, weights in `dtype`, on rank 0; a collective call."""
    found = {}
    for name, tensor in tensors:
        cast = tensor.detach().to(travels_as(tensor, dtype)) if isinstance(tensor, Tensor) else tensor
        whole = cast.full_tensor() if isinstance(cast, DTensor | Dequantized) else cast
        if ranks.rank == 0:
            found[name] = whole.to("cpu", travels_as(tensor, dtype), copy=True)
    return found


def _say_type(path: Path, dtype: torch.dtype) -> None:
    config = json.loads(path.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A draft that takes the folder's place when the block ends well, and is removed if it fails."""
    draft = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
    draft.mkdir(parents=True)
    try:
        yield draft
    except BaseException:  # as on a full disk, where what is left would take the room of the next attempt
        shutil.rmtree(draft, ignore_errors=True)
        raise
    files = [path for path in draft.iterdir() if path.is_file()]
    usual = next(path for path in files if path.suffix == ".json").stat().st_mode
    for path in files:
        path.chmod(usual)  # safetensors 0.8 writes mode 0600 and ignores the umask
    old = folder.with_name(f"{folder.name}.old-{secrets.token_hex(4)}")
    if folder.exists():
        os.replace(folder, old)
    os.replace(draft, folder)
    shutil.rmtree(old, ignore_errors=True)
