"""Audits with a real engine: what it sampled with a version agrees with it, long after the policy moved on."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from actors.episode import EpisodeRunner
from actors.render import Renderer
from actors.rollout import run_group
from actors.settings import episode_rules
from learner.audit.audit import Audit
from learner.data.trajectories import read_groups
from learner.model.policy import load_policy
from learner.objective.statistics import Agreements
from learner.ranks.mesh import Ranks
from streamrl.config.load import load_config
from streamrl.config.rules import largest_max_lag
from streamrl.messages import GroupOrigin, Sampling
from streamrl.messages.codec import encode
from streamrl.messages.seeding import draw_gaps, member_seed, uniforms
from tests.unit.actors.fakes import lease
from tests.unit.engines.tiny_models import character_tokenizer, engine_for, qwen3
from tests.unit.learner.test_ratio_at_lag_zero import two_turns

SEED, VERSION, FULL = 5, 1, Sampling()
CONFIG = ("experiment=quickstart", "env.max_turns=2", "rollout.train.sampling.max_new_tokens=24", f"run.seed={SEED}")


def config_of(share: float = 1.0):
    return load_config([*CONFIG, f"trust.audit_share={share}"])


def sample(path, dtype: torch.dtype = torch.float32, sampling: Sampling = FULL):
    """(model directory, groups that a real engine with these weights sampled, as version 1)."""
    config, model, tokenizer = config_of(), qwen3().to(dtype), character_tokenizer()

    async def rollout():
        async with engine_for(model, tokenizer) as engine:
            rules, groups = episode_rules(config, config.rollout.train.sampling), []
            for number in range(24):
                runner = EpisodeRunner(two_turns(), engine, Renderer(tokenizer), rules)
                leased = lease(number, seeds=(member_seed(SEED, number, 0),), sampling=sampling)
                groups.append(await run_group(leased, runner))
                runner.executor.close()
            return groups

    groups = asyncio.run(rollout())
    model.save_pretrained(path)
    return path, groups


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    return sample(tmp_path_factory.mktemp("model"))


def rows_of(groups):
    origins = [GroupOrigin("a", number) for number in range(len(groups))]
    return read_groups(list(map(encode, groups)), origins)


@torch.no_grad()
def move_on(policy) -> None:
    for parameter in policy.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))


def audit_of(policy, config, *, redraws: bool = True) -> Audit:
    return Audit(
        policy, Ranks(), nullcontext, share=config.trust.audit_share, seed=config.run.seed,
        max_lag=largest_max_lag(config), max_tokens=config.learner.max_tokens_per_device, redraws=redraws,
    )


def audited(path, groups, *, share: float = 1.0, kept: int = VERSION, redraws: bool = True):
    """Sums over what a policy that has moved on since finds: tokens, mean difference, tokens drawn, others."""
    policy, rows = load_policy(path), rows_of(groups)
    audit = audit_of(policy, config_of(share), redraws=redraws)
    audit.published(kept)
    move_on(policy)
    before = [parameter.clone() for parameter in policy.parameters()]
    agreements = Agreements(rows)
    audit.score(rows, agreements)
    assert all(torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))
    found = agreements.take(Ranks())
    assert all((one.actor_id, one.lag) == ("a", 0) for one in found)
    num_tokens = sum(one.num_tokens for one in found)
    difference = sum(one.difference * one.num_tokens for one in found) / max(1, num_tokens)
    return num_tokens, difference, sum(one.num_drawn for one in found), sum(one.num_other for one in found)


def test_an_honest_actor_agrees_with_the_version_that_it_names(sampled):
    rows = rows_of(sampled[1])
    num_tokens, difference, num_drawn, num_other = audited(*sampled)
    assert num_tokens == sum(row.num_action_tokens for row in rows) > 256
    assert difference < 1e-4
    assert num_drawn == sum(int((row.turns[row.mask] == 0).sum()) for row in rows) < num_tokens
    assert num_other == 0


def test_tokens_of_truncated_sampling_agree_and_are_drawn_again_within_their_sets(tmp_path):
    sampling = Sampling(top_p=0.8, top_k=40, min_p=0.01)
    num_tokens, difference, num_drawn, num_other = audited(*sample(tmp_path, sampling=sampling))
    assert num_tokens > 256 and difference < 1e-4
    assert num_drawn > 256 and num_other == 0


def test_an_engine_in_bfloat16_stays_far_within_the_limits(tmp_path):
    num_tokens, difference, num_drawn, num_other = audited(*sample(tmp_path, torch.bfloat16))
    assert num_tokens > 256 and 0.0 < difference < 0.02  # publish.probe_tolerance is 0.1
    assert num_other < 0.01 * num_drawn


def test_wrong_logprobs_and_draws_of_other_seeds_are_found(sampled):
    path, groups = sampled

    def shifted(member):
        return msgspec.structs.replace(
            member, logprobs=(np.frombuffer(member.logprobs, "<f4") - 0.5 * (np.frombuffer(member.logprobs, "<f4") < 0))
            .astype("<f4").tobytes(),
        )

    lies = [msgspec.structs.replace(group, members=tuple(map(shifted, group.members))) for group in groups]
    assert audited(path, lies)[1] == pytest.approx(0.5, abs=1e-3)

    others = [msgspec.structs.replace(group, group_id=group.group_id + 1000) for group in groups]
    _, difference, num_drawn, num_other = audited(path, others)
    assert difference < 1e-4 and num_other > 0.3 * num_drawn
    assert audited(path, others, redraws=False)[2:] == (0, 0)


def test_an_audit_keeps_the_signed_mismatch_of_each_token(sampled):
    path, groups = sampled
    policy = load_policy(path)
    rows = [replace(row, logprobs=row.logprobs - np.float32(0.25) * row.mask) for row in rows_of(groups)]
    audit = audit_of(policy, config_of())
    audit.published(VERSION)
    move_on(policy)
    agreements = Agreements(rows)
    audit.score(rows, agreements)

    assert sorted(agreements.mismatches) == list(range(len(rows)))
    for place, row in enumerate(rows):
        found = agreements.mismatches[place][:row.num_action_tokens]
        torch.testing.assert_close(found, torch.full_like(found, 0.25), atol=1e-3, rtol=0)


def test_a_learner_in_trouble_says_nothing_of_its_actors(sampled):
    rows = rows_of(sampled[1])
    agreements = Agreements(rows)
    agreements.add(rows[0], 0, 5, float("nan"))
    agreements.add(rows[1], 0, 5, 1.0)
    assert [(one.num_tokens, one.difference) for one in agreements.take(Ranks())] == [(5, 0.2)]


@pytest.mark.shows("trust.audit_share")
def test_only_a_version_that_is_kept_is_audited(sampled):
    assert audited(*sampled, share=0.0)[0] == 0
    assert audited(*sampled, kept=VERSION - 1)[0] == 0
    assert audited(*sampled, share=1.0)[0] > 0


def test_a_version_is_kept_until_nothing_of_it_can_be_trained(sampled):
    path, groups = sampled
    config = load_config([*CONFIG, "trust.audit_share=1", "staleness.eta=1", "staleness.num_lookahead_groups=0"])
    audit, agreements, rows = audit_of(load_policy(path), config), Agreements(rows_of(groups)), rows_of(groups)
    for version, found in ((VERSION, True), (VERSION + 1, True), (VERSION + 2, False)):
        audit.published(version)
        agreements = Agreements(rows)
        audit.score(rows, agreements)
        assert bool(agreements.take(Ranks())) == found


def test_the_gap_is_the_distance_to_the_part_of_the_token():
    below, probs = np.array([0.2, 0.2, 0.2]), np.array([0.3, 0.3, 0.3])
    assert draw_gaps(np.array([0.1, 0.2, 0.75]), below, probs) == pytest.approx([0.1, 0.0, 0.25])
    # a draw as an engine makes it always lies inside
    random = np.random.default_rng(0)
    mass = random.dirichlet(np.ones(9), size=500)
    drawn_at = uniforms(np.arange(500, dtype=np.uint64), np.full(500, 3, dtype=np.uint64))
    tokens = (mass.cumsum(1) > drawn_at[:, None]).argmax(1)
    starts = np.array([row[:token].sum() for row, token in zip(mass, tokens, strict=True)])
    assert draw_gaps(drawn_at, starts, mass[np.arange(500), tokens]).max() < 1e-12
