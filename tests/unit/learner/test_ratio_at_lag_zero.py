"""What an actor samples under any training setting, the learner scores alike: importance ratios at lag 0 are 1."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields

import pytest
import torch

from actors.episode import EpisodeRunner
from actors.render import Renderer
from actors.rollout import run_group
from actors.settings import episode_rules
from learner.data.packing import pack
from learner.data.trajectories import TrajectoryReader
from learner.hub_client.settings import wire_sampling
from learner.model.policy import load_policy
from streamrl.config.load import load_config
from streamrl.config.schema import SamplingConfig
from streamrl.environment import ChatMessage, Step
from streamrl.errors import ConfigError
from streamrl.messages.codec import encode
from tests.unit.actors.fakes import TableTask, lease
from tests.unit.engines.tiny_models import VOCAB, character_tokenizer, engine_for, llama, qwen3

ALLOWED = {
    "temperature": ("0.5", "0.7", "1.0", "1.6"), "max_new_tokens": ("3",), "stop": ("[a,3]",), "ignore_eos": ("true",),
}
REFUSED = {"top_p": ("0.9", "0.99"), "top_k": ("1", "4"), "min_p": ("0.01", "0.2")}


def test_every_sampling_setting_is_either_exact_or_refused():
    assert ALLOWED.keys() | REFUSED.keys() == {field.name for field in fields(SamplingConfig)}


def two_turns() -> TableTask:
    """The first answer gets a reply, the second ends the episode: observations stand between sampled tokens."""
    replies = [Step(0.5, done=False, messages=[ChatMessage("user", "more")]), Step(1.0)]
    return TableTask(lambda action: replies.pop(0))


@pytest.mark.parametrize("make", [qwen3, llama])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ALLOWED.items() for value in values])
def test_the_ratio_at_lag_0_is_1(tmp_path, make, name, value):
    config = load_config([
        "experiment=quickstart", "env.max_turns=2", "rollout.train.sampling.max_new_tokens=24",
        f"rollout.train.sampling.{name}={value}",
    ])
    sampling, model, tokenizer = config.rollout.train.sampling, make(), character_tokenizer()

    async def rollout():
        async with engine_for(model, tokenizer) as engine:
            rules = episode_rules(config, sampling)
            groups = []
            for number in range(4):
                runner = EpisodeRunner(two_turns(), engine, Renderer(tokenizer), rules)
                leased = lease(number, sampling=wire_sampling(sampling))
                groups.append(await run_group(leased, runner))
                runner.executor.close()
            return groups

    groups = asyncio.run(rollout())
    model.save_pretrained(tmp_path)
    policy, rows = load_policy(tmp_path), TrajectoryReader(vocab_size=VOCAB).read(list(map(encode, groups)), version=1)
    assert len(rows) == 4 and any(row.num_turns == 2 for row in rows)
    for micro in pack(rows, 256):
        scored, _ = policy(
            micro.tokens, micro.positions, micro.packing, micro.score_index, micro.targets, micro.temperatures
        )
        scores = micro.padded(scored.detach())
        for place, index in enumerate(micro.trajectory_ids):
            row = rows[index]
            log_ratio = scores[place][micro.mask[place]] - torch.from_numpy(row.logprobs[row.mask])
            torch.testing.assert_close(log_ratio.exp(), torch.ones_like(log_ratio), atol=1e-3, rtol=0)
            assert float(log_ratio.sum().exp()) == pytest.approx(1.0, abs=1e-3), "of the whole sequence, too"


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_truncated_sampling_is_refused_for_training_only(name, value):
    with pytest.raises(ConfigError, match=re.escape(f"rollout.train.sampling.{name}={value} ")) as caught:
        load_config(["experiment=quickstart", f"rollout.train.sampling.{name}={value}"])
    assert "ratios would differ from 1 even at lag 0" in str(caught.value)
    assert "rollout.train.sampling.temperature instead" in str(caught.value)

    config = load_config(["experiment=quickstart", f"rollout.test.sampling.{name}={value}"])
    assert str(getattr(config.rollout.test.sampling, name)) == value
