"""`reward.model.path`: a tiny classifier made here scores in a process of its own, which ends with the task."""

import asyncio
import json
import random
import shutil
from collections import defaultdict

import psutil
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from actors.reward_model.scorer import BatchingScorer, RewardScorer
from actors.rollout import run_group
from envs.check import check_task
from envs.registry import task_of
from envs.rewards.local_model import check_checkpoint
from streamrl.architectures.miniature import miniature_config
from streamrl.config.load import load_config
from streamrl.environment import HasSetUp
from streamrl.errors import ConfigError, StreamrlError
from tests.unit.actors.fakes import TOKENIZER, VOCAB, installed_engine, lease, make_runner, says

RECORD = {"question": "how are you?", "answer": "well"}
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 48, "pad_token_id": 0,
}  # fmt: skip
CHATS = [
    [{"role": "user", "content": "how are you?"}, {"role": "assistant", "content": content}]
    for content in ("well", "not so well today", "")
]


def save(path, kind=LlamaForSequenceClassification, **options) -> str:
    torch.manual_seed(0)
    kind(LlamaConfig(**SHAPE, **options)).save_pretrained(path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer, eos_token="<end>")
    tokenizer.save_pretrained(path)  # without a token that pads, as many have none
    return str(path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("models") / "rm", num_labels=1)


def by_hand(checkpoint: str, chat) -> float:
    """The last 48 tokens of the text, through the model alone."""
    text = "\n\n".join(f"{one['role']}: {one['content']}" for one in chat)
    ids = torch.tensor([TOKENIZER(text)["input_ids"][-48:]])
    model = LlamaForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(model(input_ids=ids).logits[0, 0])


def test_a_batch_gets_the_scores_of_its_members_and_long_ones_keep_their_end(checkpoint):
    scorer = RewardScorer(checkpoint, "cpu")
    long = [{"role": "user", "content": "x" * 70}, {"role": "assistant", "content": "well"}]
    expected = [by_hand(checkpoint, chat) for chat in (*CHATS, long)]

    assert scorer.score([*CHATS, long]) == pytest.approx(expected, abs=1e-5)
    assert BatchingScorer(scorer).ask(CHATS[1]).result(60) == pytest.approx(expected[1], abs=1e-5)
    assert len(set(expected)) == 4


def test_equal_conversations_have_equal_scores_in_whatever_batches_they_come(checkpoint):
    """Rounding depends on the rest of a pass; divided by its own spread it would train equal answers apart."""
    draw, scorer, seen = random.Random(4), RewardScorer(checkpoint, "cpu"), defaultdict(set)
    for _ in range(60):
        said = ["".join(draw.choices("aehlosuwy ", k=draw.choice([1, 2, 30]))) for _ in range(4)]
        chats = [[CHATS[0][0], {"role": "assistant", "content": one}] for one in (*said, "well", "so")]
        for chat, score in zip(chats, scorer.score(chats), strict=True):
            seen[chat[1]["content"]].add(score)
    assert len(seen) > 100 and all(len(scores) == 1 for scores in seen.values())
    assert max(seen["well"]) == pytest.approx(by_hand(checkpoint, CHATS[0]), abs=1e-5)


def test_the_scores_that_are_remembered_are_bounded(checkpoint, monkeypatch):
    monkeypatch.setattr("actors.reward_model.scorer.MAX_KNOWN", 2)
    scorer = RewardScorer(checkpoint, "cpu")
    assert len({*map(tuple, (scorer.score([*CHATS, CHATS[0]]) for _ in range(2)))}) == 1 and len(scorer._known) == 2


def test_a_batch_is_padded_with_the_token_that_the_part_for_texts_knows(checkpoint, tmp_path):
    """Gemma 3 has a configuration for it alone: another token would be taken for the answer's end."""
    folder = str(shutil.copytree(checkpoint, tmp_path / "model"))
    config = miniature_config(AutoConfig.for_model("gemma3"))
    config.num_labels = 1
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    scorer = RewardScorer(folder, "cpu")

    assert scorer.score(CHATS) == pytest.approx([scorer.score([chat])[0] for chat in CHATS], abs=1e-5)


def test_the_template_of_a_reward_model_shows_the_tools_of_each_conversation(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    template = "{% for t in tools or [] %}{{ t.name }} {% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    scorer = RewardScorer(str(folder), "cpu")
    asked = [(CHATS[0], [{"name": "how"}]), (CHATS[0], []), (CHATS[1], [{"name": "so"}])]

    with_tools = [scorer.score([chat], [tools])[0] for chat, tools in asked]
    assert with_tools[1] == pytest.approx(scorer.score([CHATS[0]])[0], abs=1e-6) and len(set(with_tools)) == 3
    batching = BatchingScorer(scorer)
    answers = [batching.ask(chat, tools) for chat, tools in asked]
    assert [one.result(60) for one in answers] == pytest.approx(with_tools, abs=1e-5)


def test_a_bad_conversation_costs_its_batch_and_not_the_scorer(checkpoint):
    scorer = BatchingScorer(RewardScorer(checkpoint, "cpu"))
    with pytest.raises(KeyError, match="content"):
        scorer.ask([{"role": "user"}]).result(60)
    assert isinstance(scorer.ask(CHATS[0]).result(60), float)


def test_what_is_no_reward_model_is_refused_before_it_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match=r"reward.model.path=.*two has 2 labels: give a model with one"):
        check_checkpoint(save(tmp_path / "two", num_labels=2))
    with pytest.raises(ConfigError, match="holds LlamaForCausalLM: give a reward model, a sequence classifier"):
        check_checkpoint(save(tmp_path / "policy", LlamaForCausalLM))
    with pytest.raises(ConfigError, match="must be the folder of a checkpoint"):
        check_checkpoint(str(tmp_path / "gone"))
    with pytest.raises(StreamrlError, match="has 2 labels"):
        RewardScorer(str(tmp_path / "two"), "cpu")
    with pytest.raises(StreamrlError, match=r"lacks score.weight: it is not a trained reward model"):
        RewardScorer(save(tmp_path / "head", LlamaForCausalLM, num_labels=1), "cpu")


@pytest.mark.parametrize("words", [[], ["reward.model.path=a", "reward.model.url=http://b"]])
def test_a_folder_or_an_address_is_needed(tmp_path, words):
    (tmp_path / "train.jsonl").write_text(json.dumps(RECORD))
    with pytest.raises(ConfigError, match="give its folder, reward.model.path=DIR, or the address of a service"):
        task_of(load_config(
            ["experiment=quickstart", f"data.path={tmp_path}/train.jsonl", "reward.type=model", *words]
        ))


def reward_task(tmp_path, checkpoint, *words):
    (tmp_path / "train.jsonl").write_text(json.dumps(RECORD))
    common = ["experiment=quickstart", f"data.path={tmp_path}/train.jsonl", "data.test_ratio=0"]
    return task_of(load_config([*common, "reward.weights={length: 0.0, model: 2.0}", *words,
                                f"reward.model.path={checkpoint}"]))


@pytest.mark.shows("reward.model.path")
def test_an_actor_scores_with_a_process_that_is_replaced_when_it_dies_and_ends_with_the_task(
    tmp_path, checkpoint, caplog
):
    caplog.set_level("INFO", logger="streamrl.actor")
    task = reward_task(tmp_path, checkpoint, "reward.model.device=cpu")
    check_task(task)
    assert not children(), "the check at the start loads nothing"
    assert isinstance(task, HasSetUp)
    task.set_up()
    loading, loaded = [one.message for one in caplog.records if str(checkpoint) in one.message]
    assert "starting the reward model" in loading and "is loaded, after" in loaded

    async def play(**rules: float) -> list[float]:
        runner = make_runner(task, await installed_engine(says("well")), max_prompt_tokens=32, **rules)
        group = await run_group(lease(members=3, prompt=json.dumps(RECORD).encode()), runner)
        assert all(one.scores["model"] == one.scores["reward_model"] for one in group.members), group.detail
        return [one.reward for one in group.members]

    (first,) = children()
    assert asyncio.run(play()) == pytest.approx([2 * by_hand(checkpoint, CHATS[0])] * 3, abs=1e-4)
    first.kill()
    first.wait(10)
    # Loading takes longer than a step may: no call hangs that waits for it.
    assert asyncio.run(play(step_timeout_s=3.0)) == pytest.approx([2 * by_hand(checkpoint, CHATS[0])] * 3, abs=1e-4)
    (second,) = children()
    task.tear_down()
    assert not second.is_running() and not children()


def children() -> list[psutil.Process]:
    found = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]  # of other tests
    return [one for one in found if "actors.reward_model" in one.cmdline()]


@pytest.mark.shows("reward.model.device")
def test_a_device_that_is_not_there_is_said(tmp_path, checkpoint):
    task = reward_task(tmp_path, checkpoint, "reward.model.device=nowhere")
    with pytest.raises(ConfigError, match="ended with status 2: error: the device nowhere cannot be used"):
        task.set_up()
