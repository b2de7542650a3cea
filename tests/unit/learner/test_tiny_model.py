"""Tiny models: ordinary checkpoints, a tokenizer that loses nothing, a warm start that ends where it was told to."""

import json
import random
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from envs.tasks.strings import StringTask
from learner.data.dialogues import task_dialogues
from learner.model import tiny
from learner.model.tiny import make_tiny_model, prepare_tiny_model, warm_start
from learner.ranks.mesh import Ranks
from learner.setup.inputs import open_inputs
from streamrl.config.load import load_config
from streamrl.environment import ChatMessage, SingleTurnTask
from streamrl.errors import ConfigError, TaskError

SMALL = {"hidden_size": 32, "num_layers": 1, "num_heads": 2}
SORT = StringTask("sort", alphabet="abcd", min_length=1, max_length=5)


def pairs(task, count):
    records = [task.record("train", i) for i in range(count)]
    return [(record["prompt"], task.target(record)) for record in records]


def greedy_exact_match(model_dir, examples):
    """Slow and plain: one token at a time, one example at a time."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    right = 0
    for prompt, answer in examples:
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
        start = len(ids)
        while ids[-1] != tokenizer.eos_token_id and len(ids) < start + 10:
            with torch.no_grad():
                ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
        right += tokenizer.decode(ids[start:], skip_special_tokens=True) == answer and ids[-1] == tokenizer.eos_token_id
    return right / len(examples)


@pytest.mark.parametrize(("architecture", "model_type"), [("qwen3", "Qwen3ForCausalLM"), ("llama", "LlamaForCausalLM")])
def test_a_tiny_model_is_an_ordinary_float32_checkpoint(tmp_path, architecture, model_type):
    make_tiny_model(tmp_path, characters="ab", architecture=architecture, **SMALL)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)

    assert type(model).__name__ == model_type
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.vocab_size == 6
    assert model.config.rope_parameters["rope_theta"] == 20.0
    assert (model.config.eos_token_id, model.config.pad_token_id) == (1, 0)
    assert {f.name for f in tmp_path.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_the_seed_decides_the_weights_and_the_callers_random_state_is_left_alone(tmp_path):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_tiny_model(tmp_path / name, characters="ab", seed=seed, **SMALL)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")

    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_one_character_is_one_token_and_decoding_gives_the_text_back(tmp_path):
    make_tiny_model(tmp_path, characters="ab \n'é", **SMALL)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    for text in ("ab", " a  b ", "a\n'é'\n", ""):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("?", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_every_prefix_of_a_conversation_renders_to_a_prefix_of_its_text(tmp_path):
    make_tiny_model(tmp_path, characters="abcd", **SMALL)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    turns = [{"role": role, "content": text} for role, text in (("user", "ab"), ("assistant", "c"), ("user", "d"))]
    texts = [
        tokenizer.apply_chat_template(turns[:n], add_generation_prompt=True, tokenize=False) for n in range(1, 4)
    ]

    assert texts == ["ab<sep>", "ab<sep>c<eos>", "ab<sep>c<eos>d<sep>"]
    assert tokenizer.encode(texts[2], add_special_tokens=False) == [4, 5, 2, 6, 1, 7, 2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"characters": "aa"}, "distinct"),
        ({"characters": ""}, "at least one"),
        ({"characters": "".join(map(chr, range(300, 1400)))}, "more than a tiny model's 1024"),
        ({"characters": "ab", "hidden_size": 30, "num_heads": 4}, "multiple of 2 x num_heads=4"),
        ({"characters": "ab", "architecture": "gpt"}, "choose one of qwen3, llama"),
    ],
)
def test_impossible_models_are_refused(tmp_path, arguments, said):
    with pytest.raises(ConfigError, match=said):
        make_tiny_model(tmp_path / "model", **arguments)

    assert not (tmp_path / "model").exists()


def test_the_warm_start_trains_the_task_and_reports_the_true_greedy_accuracy(tmp_path):
    make_tiny_model(tmp_path, characters="abcd", **SMALL)
    examples = pairs(SORT, 2000)

    result = warm_start(tmp_path, examples, num_steps=200, lr=1e-2, batch_size=32, stop_at=1.0)

    assert result.num_error_steps == 0
    assert result.exact_match > 0.9
    assert greedy_exact_match(tmp_path, examples[-256:][:60]) == pytest.approx(result.exact_match, abs=0.1)


@pytest.mark.shows("policy.tiny.warm_start_until")
def test_the_error_phase_brings_a_good_model_down_to_what_was_asked_for(tmp_path):
    make_tiny_model(tmp_path, characters="abcd", **SMALL)
    examples = pairs(SORT, 2000)

    result = warm_start(tmp_path, examples, num_steps=200, lr=1e-2, batch_size=32, stop_at=0.4)

    assert result.num_error_steps > 0
    assert result.exact_match <= 0.4
    assert greedy_exact_match(tmp_path, examples[-256:][:60]) < 0.6


def test_a_prompt_token_earns_no_loss(tmp_path):
    make_tiny_model(tmp_path, characters="abcd", **SMALL)
    confusing = [(prompt, "a") for prompt, _ in pairs(SORT, 500)]  # prompts are random: nothing to learn there

    result = warm_start(tmp_path, confusing, num_steps=60, lr=1e-2, batch_size=32, stop_at=1.0)

    assert result.loss < 0.1  # with the prompts in it, it could not fall below 0.5
    assert result.num_steps < 60


@pytest.mark.parametrize(("length", "largest"), [(3, 32), (600, 27), (20_000, 1)])
def test_a_batch_of_long_texts_holds_fewer_of_them_and_what_learns_nothing_is_told(
    tmp_path, monkeypatch, caplog, length, largest
):
    """A file such as GSM8K has texts of a thousand characters: a step would take seconds."""
    make_tiny_model(tmp_path, characters="abcd", **SMALL)
    rng = random.Random(0)
    dialogues = [("ab", "".join(rng.choices("abcd", k=length))) for _ in range(100)]
    shapes: list[tuple[int, int]] = []

    def forward(self, rows):
        shapes.append((len(rows), max(len(ids) for ids, _ in rows)))
        logits = torch.zeros(len(rows), 2, 8, requires_grad=True) * self.model.lm_head.weight.sum()
        return logits, torch.full((len(rows), 2), 7)

    monkeypatch.setattr(tiny.WarmStartTrainer, "forward", forward)
    result = warm_start(tmp_path, dialogues, num_steps=3, batch_size=32, stop_at=1.0)

    *steps, held_out, _ = shapes
    assert [rows for rows, _ in steps] == [largest] * 3 and held_out[0] <= 20
    assert all(rows * width <= 1.1 * tiny.MAX_BATCH_CHARACTERS or rows == 1 for rows, width in steps)
    assert result.exact_match == 0.0 and "gives none of" in caplog.text and "policy.model_path" in caplog.text


def test_a_warm_start_of_several_turns_trains_every_turn_of_the_model_and_no_other(tmp_path):
    make_tiny_model(tmp_path, characters="abcd", **SMALL)
    rng = random.Random(0)
    said = ["".join(rng.choices("abcd", k=3)) for _ in range(500)]
    dialogues = [("a", "b", observation, "c") for observation in said]  # observations are random

    result = warm_start(tmp_path, dialogues, num_steps=60, lr=1e-2, batch_size=32, stop_at=1.0)

    assert result.loss < 0.1 and result.exact_match == 1.0
    assert greedy_exact_match(tmp_path, [("a", "b")]) == 1.0


def test_the_thread_count_is_put_back_even_after_an_error(tmp_path):
    make_tiny_model(tmp_path, characters="abcd", **SMALL)
    before = torch.get_num_threads()

    with pytest.raises(ValueError, match="text input"):
        warm_start(tmp_path, [("a", 3)] * 8, num_steps=1, num_threads=before + 1)

    assert torch.get_num_threads() == before


def test_a_prepared_model_is_made_once_and_again_when_an_argument_changes(tmp_path):
    said = []
    settings = {**SMALL, "num_warm_start_steps": 3, "progress": said.append}

    first = prepare_tiny_model(tmp_path, SORT, **settings)
    weights = (first / "model.safetensors").stat()
    again = prepare_tiny_model(tmp_path, SORT, **settings)
    other_seed = prepare_tiny_model(tmp_path, SORT, seed=1, **settings)
    other_task = prepare_tiny_model(tmp_path, StringTask("copy", alphabet="abcd"), **settings)

    assert again == first
    assert (first / "model.safetensors").stat().st_mtime_ns == weights.st_mtime_ns
    assert len({first, other_seed, other_task}) == 3
    assert any("reusing" in line for line in said)
    assert json.loads((first / "warm_start.json").read_text())["num_steps"] == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in (first, other_seed, other_task))


def test_without_warm_start_steps_the_model_is_random_and_the_task_needs_no_answers_of_its_own(tmp_path):
    class NoAnswers(SingleTurnTask):
        name = "no_answers"

        def record(self, split, index):
            return {"prompt": "abc"[index % 3]}

        def reward(self, record, completion):
            return 0.0

    path = prepare_tiny_model(tmp_path, NoAnswers(), num_warm_start_steps=0, progress=lambda _: None, **SMALL)

    assert not (path / "warm_start.json").exists()
    assert len(AutoTokenizer.from_pretrained(path)) == 4 + 3
    with pytest.raises(TaskError, match="knows no right answers"):
        prepare_tiny_model(tmp_path, NoAnswers(), num_warm_start_steps=5, **SMALL)


def test_a_task_that_opens_otherwise_than_with_one_user_message_is_refused(tmp_path):
    class TwoMessages(StringTask):
        def messages(self, record):
            return [ChatMessage("system", "be brief"), ChatMessage("user", record["prompt"])]

    with pytest.raises(TaskError, match="drop the system message"):
        prepare_tiny_model(tmp_path, TwoMessages(), **SMALL)


class SortedTask(SingleTurnTask):
    """As of a file whose first half has one answer and whose second half has another."""

    name = "sorted"
    num_train = 500

    def record(self, split, index):
        return {"prompt": "x", "answer": "ab"[index >= 250]}

    def target(self, record):
        return record["answer"]


def test_what_is_held_out_of_a_sorted_file_is_like_the_rest():
    """The exact match of the warm start is then of the same records as the first evaluation."""
    answers = [answer for _, answer in task_dialogues(SortedTask(), 19_200, needs_target=True)]

    assert len(answers) == 500 and sorted(answers) == ["a"] * 250 + ["b"] * 250
    assert 30 < answers[-100:].count("a") < 70
    assert {answer for _, answer in task_dialogues(SortedTask(), 100, needs_target=True)} == {"b"}  # the last of many


def test_a_failed_preparation_leaves_nothing_behind(tmp_path):
    with pytest.raises(ConfigError):
        prepare_tiny_model(tmp_path, SORT, hidden_size=30, num_heads=4, progress=lambda _: None)

    assert list(tmp_path.iterdir()) == []


RESUMED = {  # of letters that the run's own model has, or has not
    "same": ("env.options.alphabet=abcd", ""), "fewer": ("env.options.alphabet=cdb", ""),
    "as many others": ("env.options.alphabet=wxyz", "'wxyz'"), "one more": ("env.options.alphabet=abcde", "'e'"),
    "another task": ("env.name=string.sort", ""), "another seed": ("run.seed=7", ""),
    "another start": ("policy.tiny.num_warm_start_steps=1", ""), "longer": ("learner.max_tokens_per_device=512", ""),
    "wider": ("policy.tiny.hidden_size=32", "policy.tiny.hidden_size=16"),
    "deeper": ("policy.tiny.num_layers=2", "policy.tiny.num_layers=1"),
    "more heads": ("policy.tiny.num_heads=4", "policy.tiny.num_heads=2"),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_keeps_its_own_tiny_model_or_refuses_what_does_not_fit_it(tmp_path, case):
    """Whatever its words are now, and whether or not the cache of tiny models still has it."""
    begun = [
        "experiment=quickstart", f"policy.tiny.cache_dir={tmp_path / 'models'}", "policy.tiny.hidden_size=16",
        "policy.tiny.num_layers=1", "policy.tiny.num_heads=2", "policy.tiny.num_warm_start_steps=0",
        "rollout.max_prompt_tokens=64", "learner.max_tokens_per_device=256", "env.options.alphabet=abcd",
    ]
    first = opened(tmp_path / "run", begun)
    its_own, tokens = load_file(first / "model.safetensors"), (first / "tokenizer.json").read_bytes()
    shutil.rmtree(tmp_path / "models")

    word, refused = RESUMED[case]
    kept = [one for one in begun if one.partition("=")[0] != word.partition("=")[0]]
    words = [*kept, word, "env.options.max_length=7", "checkpoint.resume=true"]
    if refused:
        with pytest.raises(ConfigError, match=re.escape(refused)):
            opened(tmp_path / "run", words)
        return
    now = opened(tmp_path / "run", words)
    assert all(torch.equal(tensor, its_own[name]) for name, tensor in load_file(now / "model.safetensors").items())
    assert (now / "tokenizer.json").read_bytes() == tokens
    positions = AutoConfig.from_pretrained(now).max_position_embeddings
    assert positions == AutoTokenizer.from_pretrained(now).model_max_length == (512 if case == "longer" else 256)


def opened(run_dir, words):
    """The model that a run with these words starts from, as its learner opens it."""
    run_dir.mkdir(exist_ok=True)
    found = open_inputs(load_config(words), run_dir, Ranks())
    found.lock.release()
    return found.model_dir
