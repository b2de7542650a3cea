"""Group advantages and baselines against verl.

Its scores are the sums of token rewards; groups are an array of ids. A group of one row has mean 0 and std 1 there and
the statistics of the whole batch here, so no group is that small in these batches.
"""

import pytest
import torch

import streamrl.algorithms as alg

from .compare import agree, batches

GAMMA = 0.9


def given(rows):
    """What verl takes: token rewards (those at masked positions removed), its mask and group ids."""
    rewards = torch.where(rows.mask, rows.rewards, 0.0)
    return rewards, rows.mask.double(), rows.group_ids.numpy()


def on_tokens(per_row, rows):
    return alg.broadcast_rows(per_row, rows.mask)


def test_grpo_agrees_with_verl_with_and_without_std(verl):
    for rows in batches():
        rewards, mask, index = given(rows)
        scores = rewards.sum(1)

        scaled, _ = verl.compute_grpo_outcome_advantage(rewards, mask, index, 1e-6, True)
        centered, _ = verl.compute_grpo_outcome_advantage(rewards, mask, index, 1e-6, False)

        agree(on_tokens(alg.grpo_advantages(scores, rows.group_ids, eps=1e-6), rows), scaled)
        dr_grpo = alg.group_advantages(scores, rows.group_ids, baseline="group_mean")
        agree(on_tokens(dr_grpo, rows), centered)


def test_rloo_agrees_with_both_of_verl(verl):
    for rows in batches():
        rewards, mask, index = given(rows)
        ours = on_tokens(alg.group_advantages(rewards.sum(1), rows.group_ids), rows)

        agree(ours, verl.compute_rloo_outcome_advantage(rewards, mask, index)[0])
        agree(ours, verl.compute_rloo_vectorized_outcome_advantage(rewards, mask, index)[0])


def test_reinforce_plus_plus_agrees_with_verl(verl, verl_config):
    """Its whitening is `rsqrt(var + 1e-8)` of a mean over the token count plus 1e-8."""
    config = verl_config.AlgoConfig(gamma=GAMMA)
    for rows in batches():
        rewards, mask, _ = given(rows)
        advantages, returns = verl.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config=config)

        agree(alg.reward_to_go(rewards, rows.mask, gamma=GAMMA), returns)
        agree(alg.reinforce_pp_advantages(rewards, rows.mask, gamma=GAMMA), advantages, 1e-7)


def test_reinforce_plus_plus_with_baseline_agrees_with_verl(verl):
    for rows in batches():
        rewards, mask, index = given(rows)
        theirs, _ = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, index)

        centered = alg.group_advantages(rewards.sum(1), rows.group_ids, baseline="group_mean")
        ours = alg.whiten(on_tokens(centered, rows), rows.mask)

        agree(ours, theirs, 1e-7)


def test_gdpo_agrees_with_verl_where_rows_have_one_token(verl, verl_config):
    """It whitens over tokens, so that long rows count more, and we over rows: the same for rows of one token.

    It reads the components as float32 and divides by a std of its own precision: 1e-6.
    """
    config = verl_config.AlgoConfig(gdpo_reward_keys=["right", "short"], gdpo_reward_weights=[1.0, 0.5])
    for rows in batches():
        components = torch.stack([rows.scores, rows.baselines], dim=1).float()
        num_rows = len(components)
        ones = torch.ones(num_rows, 1)
        theirs, _ = verl.compute_gdpo_outcome_advantage(
            ones, ones, rows.group_ids.numpy(), config=config,
            non_tensor_batch={"right": components[:, 0].numpy(), "short": components[:, 1].numpy()},
            batch={"prompts": torch.zeros(num_rows, 2), "attention_mask": torch.ones(num_rows, 3, dtype=torch.long)},
        )  # fmt: skip

        ours = alg.gdpo_advantages(components, rows.group_ids, torch.tensor([1.0, 0.5]))

        agree(ours, theirs[:, 0], 1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_optimal_baseline_agrees_with_verl_at_the_last_token_of_equally_long_rows(verl, weighted):
    """verl's baseline is per token, over the score norms summed so far: at the last token they are complete, and the
    reward to go is the score if the reward is terminal. It includes row i itself.
    """
    generator = torch.Generator().manual_seed(0)
    for rows in batches():
        num_rows, width = rows.mask.shape
        mask = torch.ones_like(rows.mask)
        probs = torch.rand(num_rows, width, 6, generator=generator, dtype=torch.float64).softmax(-1)
        weights = rows.scores.exp() if weighted else torch.ones_like(rows.scores)
        rewards = alg.place_terminal(rows.baselines, mask)
        theirs, _ = verl.compute_optimal_token_baseline_advantage(
            rewards, mask.double(), rows.group_ids.numpy(), probs[..., 0].log(), probs.square().sum(-1),
            weights[:, None].expand(mask.shape),
        )  # fmt: skip

        norms = alg.score_square_norms(probs[..., 0], probs.square().sum(-1), mask)
        baseline = alg.opob(rows.baselines, rows.group_ids, weights, norms, leave_one_out=False)

        agree(rows.baselines - baseline, theirs[:, -1], 1e-7)
