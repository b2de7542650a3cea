"""Every form of a checkpoint: learner, ranks and engine read what plain transformers does, or refuse it."""

import asyncio
import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from actors.local_policy import find_model, local_config, open_policy
from envs.rewards.local_model import check_checkpoint
from learner.fit.models import config_of_model
from learner.model.config_file import policy_vocab_size
from learner.model.policy import load_policy
from learner.ranks.mesh import Ranks
from learner.setup.preflight import check_folders, check_models
from learner.supervised.__main__ import train
from streamrl.config.load import load_config
from streamrl.errors import ConfigError
from streamrl.weights.model_folder import num_rows, stored_tensors
from tests.docs.extract import extract
from tests.kit.each import each
from tests.unit.learner import checkpoint_forms as forms
from tests.unit.learner.checkpoint_forms import MADE_UP, READ, REFUSED, ROWS
from tests.unit.learner.test_two_ranks import launch

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    return forms.make_all(tmp_path_factory.mktemp("forms"))


@pytest.fixture(scope="module")
def sharded():
    ranks = Ranks.start("cpu", sharded=True)
    yield ranks
    ranks.close()


def preflight(folder: Path) -> list[str]:
    """Run a launch's checks of the model's files, which precede the run directory; returns what it told."""
    told: list[str] = []
    config = load_config([f"policy.model_path={folder}"])
    check_models(config, told.append)
    check_folders(config, told.append)
    return told


async def of_engine(folder: Path) -> torch.Tensor:
    """Log-probs of ROWS by the native engine, as `streamrl chat` and `streamrl eval` start it."""
    short = ["rollout.max_prompt_tokens=64", "rollout.train.sampling.max_new_tokens=32"]
    policy = await open_policy(local_config(str(folder), ["actors.device=cpu", *short]))
    try:
        scored = [await policy.engine.score(row.tolist(), start=1, temperature=1.0) for row in ROWS]
    finally:
        await policy.engine.close()
    return torch.tensor([one for row in scored for one in row])


@pytest.mark.parametrize("form", READ)
def test_every_reader_reads_what_plain_transformers_does(made, sharded, form):
    folder = made[form]
    expected = forms.expected(folder)

    preflight(folder)
    for found in (
        forms.logprobs(load_policy(folder)), forms.logprobs(load_policy(folder, ranks=sharded)),
        asyncio.run(of_engine(folder)),
    ):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("form", REFUSED | MADE_UP)
def test_what_they_would_read_otherwise_is_refused_by_each_in_one_sentence(made, sharded, form):
    folder, (_, said) = made[form], (REFUSED | MADE_UP)[form]

    def refused(read) -> None:
        with pytest.raises(ConfigError) as error:
            read()
        text = str(error.value)
        assert re.search(said, text) and "\n" not in text and str(folder) in text

    if form in REFUSED:
        refused(lambda: preflight(folder))
    refused(lambda: asyncio.run(of_engine(folder)))
    if form != "adapter alone":  # has no configuration: found before
        refused(lambda: load_policy(folder, ranks=sharded))


def test_two_ranks_read_and_refuse_the_same(made, fork_server):
    work = next(iter(made.values())).parent
    launch(2, forms, work)
    first, second = (json.loads((work / f"rank-{rank}.json").read_text()) for rank in (0, 1))

    for form in READ:
        for found in (first, second):
            read = torch.tensor(found[made[form].name])
            torch.testing.assert_close(read, forms.expected(made[form]), atol=2e-5, rtol=0, msg=form)
    for form, (_, said) in (REFUSED | MADE_UP).items():
        if form != "adapter alone":  # has no configuration: found before
            assert re.search(said, str(first[made[form].name])), form
            assert isinstance(second[made[form].name], str), form  # or that rank 0 has said it


def test_a_file_wins_over_an_index_and_the_user_is_told(made):
    told = preflight(made["index beside the file"])
    assert any("the former is read" in line for line in told) and not preflight(made["sharded"])


@pytest.mark.parametrize("form", ["FP8 blocks", "GPTQ", "adapter beside"])
def test_other_commands_refuse_such_a_folder_too(made, form, tmp_path):
    folder, (_, said) = made[form], REFUSED[form]
    path = folder / "config.json"
    before = path.read_text()
    try:
        forms.settings(folder, architectures=["Qwen3ForSequenceClassification"], id2label={"0": "score"})
        for read in (
            lambda: config_of_model(str(folder)), lambda: find_model(str(folder)), lambda: check_checkpoint(str(folder))
        ):
            with pytest.raises(ConfigError, match=said):
                read()
    finally:
        path.write_text(before)


SIZE = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
AS_PUBLISHED = {  # of Gemma 3, but for sizes that are small: parts in configurations of their own
    "model_type": "gemma3", "mm_tokens_per_image": 4,
    "text_config": {**SIZE, "model_type": "gemma3_text", "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8},
    "vision_config": {
        **SIZE, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14, "vision_use_head": False,
    },
}


def test_a_configuration_may_leave_sizes_to_their_defaults(made, tmp_path):
    folder = Path(shutil.copytree(made["single"], tmp_path / "model"))
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(AS_PUBLISHED))).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(AS_PUBLISHED))

    assert preflight(folder) == []
    assert load_policy(folder).vocab_size == policy_vocab_size(folder) == num_rows(AS_PUBLISHED) == 262_208


@each("model_type", ["deepseek_v3", "fuyu", "gemma3", "gpt2", "gpt_oss", "llama4_text", "opt", "qwen3"])
def test_the_rows_are_those_of_the_text_part_whatever_the_configuration_tells(model_type):
    def without_rows(values: object) -> object:
        if not isinstance(values, dict):
            return values
        return {key: without_rows(value) for key, value in values.items() if key != "vocab_size"}

    config = AutoConfig.for_model(model_type)
    told = json.loads(config.to_json_string(use_diff=False))
    assert num_rows(told) == num_rows(without_rows(told)) == config.get_text_config().vocab_size


@pytest.mark.parametrize(
    ("told", "said"), [("[1]", "is no JSON object"), ("{}", "tells no vocab_size"), ('{"model_type": "x"}', "tells no")]
)
def test_a_configuration_of_nothing_known_is_refused_in_a_sentence(tmp_path, told, said):
    (tmp_path / "config.json").write_text(told)
    with pytest.raises(ConfigError, match=said):
        policy_vocab_size(tmp_path)


def test_a_supervised_run_refuses_it_before_it_makes_a_directory(made, tmp_path):
    data = tmp_path / "records.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    words = [f"policy.model_path={made['AWQ']}", f"data.path={data}", f"run.root={tmp_path / 'runs'}"]
    with pytest.raises(ConfigError, match=r"quantized weights \(awq\)"):
        train("sft", words)
    assert not (tmp_path / "runs").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_refused(tmp_path):
    folder = forms.start(tmp_path / "model")
    forms.tokenizer(more=[f"<more{n}>" for n in range(40)]).save_pretrained(folder)
    for read in (lambda: preflight(folder), lambda: asyncio.run(of_engine(folder))):
        with pytest.raises(ConfigError, match=r"has \d+ tokens that its model has no row for, the first '<more\d+>'"):
            read()


def test_the_ways_out_that_the_page_shows_give_the_model_that_transformers_reads(tmp_path, monkeypatch):
    """Blocks of docs/models.md, run as they stand there."""
    blocks = [item.text for item in extract(ROOT / "docs" / "models.md", "models.md") if item.kind == "python"]
    (restore,), (merge,) = ([one for one in blocks if word in one] for word in ("dequantize=True", "merge_and_unload"))
    forms.fp8(forms.start(tmp_path / "models" / "quantized"))
    base = forms.start(tmp_path / "models" / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    adapter = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapter.save_pretrained(tmp_path / "models" / "adapter")
    monkeypatch.chdir(tmp_path)
    exec(restore)
    exec(merge)
    for name, dtype in (("plain", "BF16"), ("merged", "F32")):
        folder = tmp_path / "models" / name
        preflight(folder)
        torch.testing.assert_close(forms.logprobs(load_policy(folder)), forms.expected(folder), atol=2e-5, rtol=0)
        assert {one.dtype for one in stored_tensors(folder).values()} == {dtype}
    whole = AutoModelForCausalLM.from_pretrained(base).state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "plain").state_dict().items():
        torch.testing.assert_close(weight.float(), whole[name], rtol=0.07, atol=0.01)  # what FP8 rounds
