"""The forms in which checkpoints come, each made of one tiny model; under torchrun, what two ranks read of every one.

    READ       form -> how a folder is changed to it; every reader must see what plain transformers does
    REFUSED    form -> the same, and what the refusal says
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from learner.data.layout import make_layout
from learner.model.policy import Policy, load_policy
from learner.ranks.mesh import Ranks
from streamrl.errors import ConfigError
from tests.kit.learning import VOCAB, tiny_checkpoint

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
LETTERS, END, STOP, PAD = "abcdefghijklmnopqrstuvwxyz ?\n12", "<end>", "<stop>", "<pad>"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PROJECTION = "model.layers.0.mlp.up_proj.weight"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)
BLOCK = 16
ROWS = [torch.arange(3, 3 + n) % VOCAB for n in (17, 5, 11)]

Change = Callable[[Path], None]


def tokenizer(*, template: str | None = TEMPLATE, special: bool = True, more: Sequence[str] = ()) -> object:
    """One of characters, whose end of turn may be an added token that is not special."""
    core = Tokenizer(models.WordLevel({letter: at for at, letter in enumerate(LETTERS)}, unk_token="a"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", behavior="isolated"), decoders.Fuse()
    core.add_special_tokens([AddedToken(PAD, special=True), AddedToken(STOP, special=True)])
    core.add_tokens([AddedToken(END, special=False, normalized=False), *more])
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END if special else STOP)
    made.chat_template = template
    return made


def start(folder: Path, *, tied: bool = True) -> Path:
    tiny_checkpoint(folder, tied=tied)
    tokenizer().save_pretrained(folder)
    return folder


def settings(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(folder / FILE)), folder / FILE, metadata={"format": "pt"})


def other(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(0).contiguous()


def sharded(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / FILE).unlink()
    model.save_pretrained(folder, max_shard_size="12KB")
    assert (folder / INDEX).is_file() and not (folder / FILE).is_file()


def index_beside(folder: Path) -> None:
    """An index of shards with other weights, as of an earlier upload."""
    theirs = {name: other(one) for name, one in load_file(folder / FILE).items()}
    save_file(theirs, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(theirs, "model-00001-of-00001.safetensors")}))


def named(folder: Path) -> None:
    """The configuration names the file; the usual one beside it is another."""
    (folder / "theirs.safetensors").write_bytes((folder / FILE).read_bytes())
    tensors(folder, lambda found: {name: other(one) for name, one in found.items()})
    settings(folder, transformers_weights="theirs.safetensors")


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / FILE), folder / "pytorch_model.bin")
    (folder / FILE).unlink()


def untied(folder: Path) -> None:
    tensors(folder, lambda found: {**found, HEAD: other(found[EMBEDDING])})
    settings(folder, tie_word_embeddings=False)


def head_alone(folder: Path) -> None:
    tensors(folder, lambda found: {HEAD if name == EMBEDDING else name: one for name, one in found.items()})


def several_ends(folder: Path) -> None:
    ends = {"eos_token_id": [tokenizer().convert_tokens_to_ids(token) for token in (END, STOP)]}
    (folder / "generation_config.json").write_text(json.dumps(ends))


def end_not_special(folder: Path) -> None:
    tokenizer(special=False).save_pretrained(folder)
    several_ends(folder)


def fp8(folder: Path, *, declared: bool = True) -> None:
    """Blocks of codes with a scale each, as DeepSeek and Qwen publish them."""
    def quantized(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = dict(found)
        for name, weight in found.items():
            if weight.dim() == 2 and "proj" in name:
                blocks = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
                scale = blocks.abs().amax((1, 3), keepdim=True) / 448
                made[name] = (blocks / scale).to(torch.float8_e4m3fn).view(weight.shape)
                made[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
        return made

    tensors(folder, quantized)
    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    if declared:
        settings(folder, quantization_config=how)


def packed(**declared: object) -> Change:
    """Codes in the place of a weight, and what the configuration says of them."""
    def change(folder: Path) -> None:
        def codes(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            weight = found.pop(PROJECTION)
            name = PROJECTION.replace("weight", "qweight")
            return {**found, name: weight.int()[:, ::8].contiguous(), name.replace("qweight", "scales"): weight[:, :1]}

        tensors(folder, lambda found: {name: one.contiguous() for name, one in codes(found).items()})
        if declared:
            settings(folder, quantization_config=declared)

    return change


def adapter(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).save_pretrained(folder)


def adapter_alone(folder: Path) -> None:
    adapter(folder)
    (folder / FILE).unlink()
    (folder / "config.json").unlink()


def shard_missing(folder: Path) -> None:
    sharded(folder)
    next(folder.glob("model-00002-*")).unlink()


def cut_short(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-100])


def pages_of_an_error(folder: Path) -> None:
    (folder / FILE).write_text("<html>404 Not Found</html>")


def pickle_of(content: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / FILE).unlink()
        (folder / "pytorch_model.bin").write_bytes(content)

    return change


def without(name: str, **values: object) -> Change:
    def change(folder: Path) -> None:
        tensors(folder, lambda found: {key: one for key, one in found.items() if key != name})
        settings(folder, **values)

    return change


READ: dict[str, Change] = {
    "single": lambda folder: None, "sharded": sharded, "index beside the file": index_beside, "named": named,
    "pickled": pickled, "untied": untied, "head alone": head_alone,
    "names of the decoder": lambda folder: tensors(
        folder, lambda found: {name.removeprefix("model."): one for name, one in found.items()}
    ),
    "tied, and equal in the files": lambda folder: tensors(
        folder, lambda found: {**found, HEAD: found[EMBEDDING].clone()}
    ),
    "bfloat16": lambda folder: tensors(folder, lambda found: {name: one.bfloat16() for name, one in found.items()}),
    "several ends": several_ends, "an end that is not special": end_not_special,
    "no chat template": lambda folder: tokenizer(template=None).save_pretrained(folder),
    "placeholders beyond the rows": lambda folder: with_placeholder(folder),
}
REFUSED: dict[str, tuple[Change, str]] = {
    "tied in the configuration only": (
        lambda folder: tensors(folder, lambda found: {**found, HEAD: other(found[EMBEDDING])}),
        "ties lm_head.weight to model.embed_tokens.weight .* tie_word_embeddings to false",
    ),
    "adapter beside": (adapter, "an adapter .* next to full weights"),
    "adapter alone": (adapter_alone, "is an adapter in peft's format, not a whole model"),
    "FP8 blocks": (fp8, r"quantized weights \(fp8\)"),
    "FP8 blocks that the configuration does not tell": (
        lambda folder: fp8(folder, declared=False), r"quantized weights \(F8_E4M3, as model\S+ is stored\)"
    ),
    "GPTQ": (packed(quant_method="gptq", bits=4, group_size=8), r"quantized weights \(gptq\)"),
    "GPTQ that the configuration does not tell": (packed(), r"quantized weights \(I32, as \S+qweight is stored\)"),
    "AWQ": (packed(quant_method="awq", bits=4, group_size=8), r"quantized weights \(awq\)"),
    "compressed-tensors": (packed(quant_method="compressed-tensors", config_groups={}), r"\(compressed-tensors\)"),
    "bitsandbytes": (packed(quant_method="bitsandbytes", load_in_4bit=True), r"\(bitsandbytes\)"),
    "bitsandbytes of old": (packed(load_in_8bit=True), r"\(8 bits\)"),
    "MXFP4": (packed(quant_method="mxfp4"), r"\(mxfp4\)"),
    "no weights": (lambda folder: (folder / FILE).unlink(), "holds no weights"),
    "a shard missing": (shard_missing, r"model-00002-of-\S+ is not there, .* restore"),
    "cut short": (cut_short, "is cut short"),
    "no file of weights": (pages_of_an_error, "is no safetensors file"),
}
MADE_UP: dict[str, tuple[Change, str]] = {
    "no output layer": (without("none", tie_word_embeddings=False), "lacks 1 weights of its model, as lm_head.weight"),
    "a weight missing": (without(PROJECTION), "lacks 1 weights of its model, as model.layers.0.mlp.up_proj.weight"),
    "an empty pickle": (pickle_of(b""), "cannot be loaded, restore its files"),
    "a pointer for a pickle": (pickle_of(b"version https://git-lfs.github.com/spec/v1\n"), "cannot be loaded, restore"),
    "a pickle of other things": (pickle_of(b"\x80\x04\x8c\x02os\x8c\x06system\x93."), "cannot be loaded, restore"),
    "impossible ways to generate": (
        lambda folder: (folder / "generation_config.json").write_text('{"num_return_sequences": 3}'), "cannot be load",
    ),
}
"""Refused once the model is loaded: plain transformers would make these weights up, or cannot load them."""


def with_placeholder(folder: Path) -> None:
    """An image's placeholder beyond the model's rows, as some text models of a multimodal family have."""
    made = tokenizer(more=[f"<unused{n}>" for n in range(VOCAB - len(tokenizer()))])
    made.add_special_tokens({"extra_special_tokens": []})
    made._set_model_specific_special_tokens({"image_token": "<image>"})
    made.add_tokens([AddedToken("<image>", special=True)])
    assert made.convert_tokens_to_ids("<image>") == VOCAB
    made.save_pretrained(folder)


def make_all(work: Path) -> dict[str, Path]:
    """Every form in a folder of its own."""
    changes = READ | {form: change for form, (change, _) in (REFUSED | MADE_UP).items()}
    folders = {}
    for number, (form, change) in enumerate(changes.items()):
        folders[form] = start(work / f"form-{number:02d}")
        change(folders[form])
    return folders


def logprobs(policy: Policy) -> torch.Tensor:
    """Log-probs of every token of ROWS but each row's first, in one packed pass."""
    ends = torch.tensor([len(row) for row in ROWS]).cumsum(0)
    index = torch.cat([torch.arange(int(end) - len(row), int(end) - 1) for row, end in zip(ROWS, ends, strict=True)])
    targets = torch.cat([row[1:] for row in ROWS])
    with torch.no_grad():
        return policy(
            torch.cat(ROWS), torch.cat([torch.arange(len(row)) for row in ROWS]),
            make_layout([len(row) for row in ROWS], [-1] * len(ROWS)), index, targets, torch.ones(len(targets)),
        )[0]


def expected(folder: Path) -> torch.Tensor:
    """The same by plain transformers, row by row."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return torch.cat([
            model(row[None]).logits[0, :-1].log_softmax(-1).gather(-1, row[1:, None])[:, 0] for row in ROWS
        ])


def outcome(folder: Path, ranks: Ranks) -> list[float] | str:
    """Log-probs, or what the refusal says."""
    try:
        return logprobs(load_policy(folder, ranks=ranks)).tolist()
    except ConfigError as error:
        return str(error)


def main(work: Path) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.start("cpu", timeout_s=60)
    found = {folder.name: outcome(folder, ranks) for folder in sorted(work.glob("form-*"))}
    (work / f"rank-{ranks.rank}.json").write_text(json.dumps(found))
    ranks.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
