"""What an actor samples under any training setting, the learner scores alike: importance ratios at lag 0 are 1."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from actors.episode import EpisodeRunner
from actors.render import Renderer
from actors.rollout import run_group
from actors.settings import episode_rules
from learner.data.packing import pack
from learner.data.trajectories import TrajectoryReader
from learner.hub_client.settings import train_sampling
from learner.model.policy import load_policy
from streamrl.config.load import load_config
from streamrl.config.schema import SamplingConfig
from streamrl.environment import ChatMessage, Step
from streamrl.errors import ConfigError
from streamrl.messages import Outcome, Purpose, ReturnReason, Sampling
from streamrl.messages.codec import encode
from tests.unit.actors.fakes import TableTask, lease
from tests.unit.engines.tiny_models import VOCAB, character_tokenizer, engine_for, llama, qwen3

SETTINGS = {
    "temperature": ("0.5", "0.7", "1.0", "1.6"), "max_new_tokens": ("3",), "stop": ("[a,3]",), "ignore_eos": ("true",),
    "top_p": ("0.9",), "top_k": ("4",), "min_p": ("0.1",),
    "max_kept": ("5 rollout.train.sampling.top_p=0.9",),
}


def test_every_sampling_setting_is_tried():
    assert SETTINGS.keys() == {field.name for field in fields(SamplingConfig)}


def two_turns() -> TableTask:
    """The first answer gets a reply, the second ends the episode: observations stand between sampled tokens."""
    replies = [Step(0.5, done=False, messages=[ChatMessage("user", "more")]), Step(1.0)]
    return TableTask(lambda action: replies.pop(0))


@pytest.mark.parametrize("make", [qwen3, llama])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SETTINGS.items() for value in values])
def test_the_ratio_at_lag_0_is_1(tmp_path, make, name, value):
    config = load_config([
        "experiment=quickstart", "env.max_turns=2", "rollout.train.sampling.max_new_tokens=24",
        *f"rollout.train.sampling.{name}={value}".split(),
    ])
    sampling, model, tokenizer = config.rollout.train.sampling, make(), character_tokenizer()

    async def rollout():
        async with engine_for(model, tokenizer) as engine:
            rules = episode_rules(config, sampling)
            groups = []
            for number in range(4):
                runner = EpisodeRunner(two_turns(), engine, Renderer(tokenizer), rules)
                leased = lease(number, sampling=train_sampling(sampling))
                groups.append(await run_group(leased, runner))
                runner.executor.close()
            return groups

    groups = asyncio.run(rollout())
    model.save_pretrained(tmp_path)
    policy, rows = load_policy(tmp_path), TrajectoryReader(vocab_size=VOCAB).read(list(map(encode, groups)), version=1)
    assert len(rows) == 4 and any(row.num_turns == 2 for row in rows)
    for micro in pack(rows, 256):
        scored, _ = policy(
            micro.tokens, micro.positions, micro.packing, micro.score_index, micro.targets, micro.temperatures,
            sets=micro.sets,
        )
        scores = micro.padded(scored.detach())
        for place, index in enumerate(micro.trajectory_ids):
            row = rows[index]
            log_ratio = scores[place][micro.mask[place]] - torch.from_numpy(row.logprobs[row.mask])
            torch.testing.assert_close(log_ratio.exp(), torch.ones_like(log_ratio), atol=1e-3, rtol=0)
            assert float(log_ratio.sum().exp()) == pytest.approx(1.0, abs=1e-3), "of the whole sequence, too"


@pytest.mark.shows("rollout.train.sampling.max_kept")
def test_a_set_has_a_bound_wherever_ids_are_cut_off():
    def leased(*words: str) -> tuple[float, int, float]:
        config = load_config(["experiment=quickstart", *(f"rollout.train.sampling.{word}" for word in words)])
        one = train_sampling(config.rollout.train.sampling)
        return one.top_p, one.top_k, one.min_p

    assert leased("max_kept=7") == (1.0, -1, 0.0), "nothing is cut off"
    assert leased("max_kept=7", "top_p=0.9") == (0.9, 7, 0.0)
    assert leased("max_kept=7", "min_p=0.1") == (1.0, 7, 0.1)
    assert leased("max_kept=7", "min_p=0.1", "top_k=4") == (1.0, 4, 0.1)
    with pytest.raises(ConfigError, match=r"sampling.top_k=8 is above rollout.train.sampling.max_kept=7"):
        leased("max_kept=7", "top_k=8")


@pytest.mark.parametrize("word", ["top_p=0.9", "top_k=4", "min_p=0.1"])
def test_vllm_is_refused_for_training_with_sets_and_allowed_for_evaluation(word):
    with pytest.raises(ConfigError, match=re.escape(f"rollout.train.sampling.{word} with actors.engine=vllm")):
        load_config(["experiment=quickstart", "actors.engine=vllm", f"rollout.train.sampling.{word}"])
    load_config(["experiment=quickstart", "actors.engine=vllm", f"rollout.test.sampling.{word}"])


def test_an_engine_that_returns_no_sets_hands_a_training_lease_back():
    config = load_config(["experiment=quickstart"])
    mine = SimpleNamespace(name="mine", max_num_seqs=1)  # a user's engine, which is not asked for anything
    rules = episode_rules(config, config.rollout.train.sampling)
    runner = EpisodeRunner(two_turns(), mine, Renderer(character_tokenizer()), rules)
    group = asyncio.run(run_group(lease(1, sampling=Sampling(top_k=4)), runner))
    assert (group.outcome, group.reason) == (Outcome.RETURNED, ReturnReason.ENGINE_ERROR)
    assert "mine does not say which ids" in group.detail


def test_the_sets_of_an_evaluation_stay_at_the_actor():
    config, tokenizer = load_config(["experiment=quickstart"]), character_tokenizer()

    async def played(purpose: Purpose):
        async with engine_for(qwen3(), tokenizer) as engine:
            rules = episode_rules(config, config.rollout.train.sampling)
            runner = EpisodeRunner(TableTask(lambda action: Step(1.0)), engine, Renderer(tokenizer), rules)
            return await run_group(lease(1, sampling=Sampling(top_k=4), purpose=purpose), runner)

    trained, evaluated = (asyncio.run(played(purpose)).members[0] for purpose in (Purpose.TRAIN, Purpose.EVAL))
    assert trained.token_ids == evaluated.token_ids
    assert len(trained.sets) == 10 * (len(trained.token_ids) // 4) and evaluated.sets == b""
