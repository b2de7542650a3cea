"""What an actor samples under any training setting, the learner scores alike: importance ratios at lag 0 are 1."""

import asyncio
from dataclasses import fields
from types import SimpleNamespace

import pytest

from actors.episode import EpisodeRunner
from actors.render import Renderer
from actors.rollout import run_group
from actors.settings import episode_rules
from learner.hub_client.settings import train_sampling
from streamrl.config.load import load_config
from streamrl.config.schema import SamplingConfig
from streamrl.environment import Step
from streamrl.errors import ConfigError
from streamrl.messages import Outcome, Purpose, ReturnReason, Sampling
from tests.unit.actors.fakes import TableTask, lease
from tests.unit.engines.tiny_models import VOCAB, character_tokenizer, engine_for, llama, qwen3
from tests.unit.learner.at_lag_zero import assert_ratios_are_1, generated, two_turns

SETTINGS = {
    "temperature": ("0.5", "0.7", "1.0", "1.6"), "max_new_tokens": ("3",), "stop": ("[a,3]",), "ignore_eos": ("true",),
    "top_p": ("0.9",), "top_k": ("4",), "min_p": ("0.1",),
    "max_kept": ("5 top_p=0.9",),
}


def test_every_sampling_setting_is_tried():
    assert SETTINGS.keys() == {field.name for field in fields(SamplingConfig)}


@pytest.mark.parametrize("make", [qwen3, llama])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SETTINGS.items() for value in values])
def test_the_ratio_at_lag_0_is_1(tmp_path, make, name, value):
    model, tokenizer = make(), character_tokenizer()

    async def rollout():
        async with engine_for(model, tokenizer) as engine:
            return await generated(engine, tokenizer, *f"{name}={value}".split())

    groups = asyncio.run(rollout())
    model.save_pretrained(tmp_path)
    assert_ratios_are_1(groups, tmp_path, VOCAB)


@pytest.mark.shows(
    "rollout.train.sampling.max_kept", "rollout.train.sampling.top_p", "rollout.train.sampling.top_k",
    "rollout.train.sampling.min_p",
)
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


@pytest.mark.shows("rollout.train.sampling.max_kept")
def test_ids_that_vllm_would_hold_in_more_memory_than_an_actor_has_are_refused_with_a_number_that_fits():
    long = ("experiment=quickstart", "actors.engine=vllm", "actors.num_concurrent=64",
            "rollout.train.sampling.max_new_tokens=8192", "learner.max_tokens_per_device=16384")

    def load(*words: str) -> None:
        load_config([*long, *(f"rollout.train.sampling.{word}" for word in words)])

    with pytest.raises(ConfigError, match=r"max_kept=1024 .* would take 63 GB .* set it to 124 or less"):
        load("top_p=0.9")
    with pytest.raises(ConfigError, match=r"top_k=200 .* set it to 124 or less"):
        load("top_k=200", "min_p=0.1")
    load("top_p=0.9", "max_kept=124")
    load("top_k=124")
    load("max_kept=1024")  # nothing is cut off
    with pytest.raises(ConfigError, match=r"top_k=1 .* no number is small enough: have fewer or shorter answers"):
        load_config([*long, "rollout.train.sampling.top_k=1", "actors.num_concurrent=2048"])


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


@pytest.mark.parametrize("trains", [True, False])
def test_an_engine_is_asked_for_sets_where_what_it_samples_is_trained_on(trains):
    config, tokenizer = load_config(["experiment=quickstart"]), character_tokenizer()

    async def sampled():
        async with engine_for(qwen3(), tokenizer) as engine:
            rules = episode_rules(config, config.rollout.train.sampling, trains=trains)
            return await engine.generate(rules.request([3, 4], 5, seed=0, turn=0, sampling=Sampling(top_k=4)))

    assert (asyncio.run(sampled()).sets is not None) == trains
