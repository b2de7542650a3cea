"""`streamrl.Trainer` as a notebook cell uses it: three batches of recorded groups, and the model that comes out."""

import errno
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import streamrl
from streamrl.errors import ConfigError, WireError
from streamrl.messages.codec import encode
from tests.kit.learning import tiny_checkpoint

pytestmark = pytest.mark.timeout(120)
PROMPT, GOOD, BAD = [5, 6, 7], [11, 12, 13], [21, 22, 23]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def logprobs(folder, answer: list[int]) -> list[float]:
    """Of an answer, by plain transformers."""
    with torch.no_grad():
        scores = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([PROMPT + answer])).logits[0].log_softmax(-1)
    return [float(scores[len(PROMPT) - 1 + place, token]) for place, token in enumerate(answer)]


def test_three_batches_raise_the_probability_of_the_paid_answer(model, tmp_path):
    answers = [(GOOD, logprobs(model, GOOD), 1.0), (BAD, logprobs(model, BAD), 0.0)]
    trainer = streamrl.Trainer(
        model, algorithm="grpo", policy__optimizer__lr=0.003, trainer__num_steps=3, policy__scheduler__name="constant"
    )

    measured = [trainer.train([streamrl.recorded_group(1, PROMPT, answers)]) for _ in range(3)]

    saved = trainer.save(tmp_path / "trained")
    assert trainer.version == 3 and all(math.isfinite(one["policy/grad_norm"]) for one in measured)
    assert measured[0]["policy/num_trajectories"] == 2 and measured[2]["lag/token_max"] == 2
    assert sum(logprobs(saved, GOOD)) > sum(logprobs(model, GOOD)) + 0.01
    assert sum(logprobs(saved, BAD)) < sum(logprobs(model, BAD))


@pytest.mark.parametrize("settings", [{}, {"policy__lora__rank": 2}])
def test_saving_touches_nothing_but_the_folder_that_is_named(settings, model, tmp_path, monkeypatch):
    trainer = streamrl.Trainer(model, **settings)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "own.py").write_text("not ours")
    for name in ("one", "two", "one", "only"):
        saved = trainer.save(tmp_path / name)
        assert (saved / "adapter" / "adapter_model.safetensors").exists() == bool(settings)
        assert logprobs(saved, GOOD) == pytest.approx(logprobs(model, GOOD))

    def full(*_, **__) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(OSError, match="No space"):
        trainer.save(tmp_path / "two")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "one", "only", "two"]
    assert [path.name for path in (tmp_path / "adapter").iterdir()] == ["own.py"]


@pytest.mark.parametrize("scalar", [np.float32, np.float64, torch.tensor, bool])
def test_a_group_takes_scalars_and_arrays_of_numpy_and_torch(scalar):
    answers = [(np.array(GOOD), torch.tensor([-1.0] * 3), scalar(1.0)), (BAD, np.full(3, -1.0), scalar(0.0))]
    group = streamrl.recorded_group(
        np.int64(1), torch.tensor(PROMPT), answers, version=np.int32(0), temperature=scalar(1.0)
    )
    plain = streamrl.recorded_group(1, PROMPT, [(GOOD, [-1.0] * 3, 1.0), (BAD, [-1.0] * 3, 0.0)])
    assert encode(group) == encode(plain)


def test_what_it_cannot_train_on_is_said(model, tmp_path):
    trainer = streamrl.Trainer(model)
    with pytest.raises(WireError, match="training is at 0"):
        trainer.train([streamrl.recorded_group(1, PROMPT, [(GOOD, [-1.0] * 3, 1.0)], version=4)])
    with pytest.raises(WireError, match=r"id 9999 is outside the vocabulary"):
        trainer.train([streamrl.recorded_group(1, PROMPT, [([9999], [-1.0], 1.0)])])
    with pytest.raises(WireError, match="no trajectory"):
        trainer.train([])
    with pytest.raises(ConfigError, match="did you mean"):
        streamrl.Trainer(model, policy__optimizer__learning_rte=1.0)
    with pytest.raises(ConfigError, match="no such folder"):
        streamrl.Trainer(tmp_path / "nothing")
