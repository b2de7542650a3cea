"""A trajectory of several sequences: each token is computed in its own, and credit runs through all of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.data.packing import pack
from learner.data.trajectories import Trajectory, read_groups
from learner.model.critic import build_critic
from learner.model.policy import load_policy
from learner.ranks.mesh import Ranks
from streamrl.algorithms import reward_to_go
from streamrl.config.schema import AdvantageConfig, CriticConfig, LossConfig
from streamrl.messages import SequenceStart
from streamrl.messages.codec import pack_ids
from tests.kit.learning import VOCAB, OneBatch, batch, make_objective, plan_of
from tests.unit.learner.test_trajectories import frame, member

VERSION = 5
PLAIN = LossConfig(surrogate="tis", cap=2.0, veto_low=None, veto_high=None)


def rewritten(seed: int = 0) -> Trajectory:
    """Three sequences: two turns with an observation between them, one turn, one turn that begins with a context token.

    Rewards of 0.5, 0.25, 0 and 1 stand on the last tokens of the turns.
    """
    rng = np.random.default_rng(seed)
    mask = np.array([1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1], dtype=bool)
    turns = np.array([0, 0, 0, 0, 0, 1, 1, 2, 2, 0, 3, 3, 3])
    rewards = np.zeros(13, dtype=np.float32)
    rewards[[2, 6, 12]] = 0.5, 0.25, 1.0
    return Trajectory(
        group_id=0, index=0, prompt_ids=rng.integers(0, VOCAB, 4).astype(np.int32),
        token_ids=rng.integers(0, VOCAB, 13).astype(np.int32),
        logprobs=np.where(mask, rng.normal(-3.9, 0.4, 13), 0.0).astype(np.float32), mask=mask,
        versions=np.where(mask, np.where(np.arange(13) < 6, 4, 5), -1), rewards=rewards, turns=np.where(mask, turns, 0),
        reward=1.75, num_turns=4, scores={"score": 1.0}, temperature=0.7, truncated=False,
        later=((7, rng.integers(0, VOCAB, 6).astype(np.int32)), (9, rng.integers(0, VOCAB, 3).astype(np.int32))),
    )


def apart(row: Trajectory) -> list[Trajectory]:
    """Its sequences as trajectories of their own."""
    return [
        replace(row, prompt_ids=piece.prompt_ids, later=(), **{
            name: getattr(row, name)[piece.start : piece.end]
            for name in ("token_ids", "logprobs", "mask", "versions", "rewards", "turns")
        })
        for piece in row.pieces
    ]


def by_the_book(model, row: Trajectory) -> torch.Tensor:
    """Log-probs of all action tokens in order: each sequence through the model alone."""
    found = []
    for one in apart(row):
        full = torch.tensor([*one.prompt_ids.tolist(), *one.token_ids.tolist()])
        logprobs = (model(input_ids=full[None]).logits[0, :-1] / row.temperature).log_softmax(-1)
        places = torch.from_numpy(one.mask).nonzero().squeeze(1) + len(one.prompt_ids)
        found.append(logprobs[places - 1].gather(-1, full[places][:, None]).squeeze(-1))
    return torch.cat(found)


# --- what arrives and how it is packed -------------------------------------------------------------------------------


def test_sequences_of_a_frame_become_pieces_with_their_own_prompts():
    (row,) = read_groups([frame(member(sequences=(SequenceStart(3, pack_ids([20, 21])),)))])

    found = [(one.prompt_ids.tolist(), one.start, one.end) for one in row.pieces]
    assert found == [([1, 2, 3], 0, 3), ([20, 21], 3, 7)]
    assert (row.num_tokens, row.num_action_tokens) == (3 + 2 + 7, 5)


def test_each_sequence_is_packed_with_positions_and_attention_of_its_own():
    row = rewritten()
    (micro,) = pack([row], 100)

    assert micro.packing.lengths == (4 + 6, 6 + 1, 3 + 3)  # each up to its last action token, which predicts nothing
    assert micro.positions.tolist() == [*range(10), *range(7), *range(6)]
    assert micro.mask.shape == (1, 10) and micro.trajectory_ids == (0,)
    assert micro.targets.tolist() == row.token_ids[row.mask].tolist()
    assert micro.score_index.tolist() == [3, 4, 5, 8, 9, 15, 16, 20, 21, 22]
    assert micro.turns[0].tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3, 3]


# --- the same gradients as the sequences alone -----------------------------------------------------------------------


def test_gradients_are_those_of_the_sequences_trained_apart_with_the_same_advantages(checkpoints):
    """The literal sum: weight of the row x truncated ratio x advantage of the trajectory x log-prob, sequence by
    sequence through the unpacked model; each sampled token once."""
    rows = [*batch(2, 4, temperature=0.7)]
    rows[1] = replace(rewritten(), group_id=0, index=1)
    rows[6] = replace(rewritten(1), group_id=1, index=2, rewards=np.zeros(13, np.float32), reward=0.0)
    policy = load_policy(checkpoints["qwen3-tied"], chunk_tokens=5)
    plain = AutoModelForCausalLM.from_pretrained(
        checkpoints["qwen3-tied"], attn_implementation="eager", dtype=torch.float32
    )
    made = make_objective(AdvantageConfig(estimator="group"), PLAIN)
    one = OneBatch(made, rows, plan_of(rows), version=VERSION)
    for micro in pack(rows, 60):  # some hold one trajectory, some several
        logprobs, entropy = policy(
            micro.tokens, micro.positions, micro.packing, micro.score_index, micro.targets, micro.temperatures
        )
        one.loss(micro, logprobs, entropy).backward()
    stats = one.finish().flush(0)

    rewards = torch.tensor([row.reward for row in rows]).view(2, 4)
    advantages = (rewards - (rewards.sum(1, keepdim=True) - rewards) / 3).flatten()  # one for each trajectory
    num_tokens = sum(row.num_action_tokens for row in rows)
    for row, advantage in zip(rows, advantages.tolist(), strict=True):
        logprobs = by_the_book(plain, row)
        ratio = (logprobs.detach() - torch.from_numpy(row.logprobs[row.mask])).exp().clamp(max=2.0)
        (-(ratio * advantage * logprobs).sum() / num_tokens).backward()

    theirs = dict(plain.named_parameters())
    for name, parameter in policy.model.named_parameters():
        top = max(1.0, float(theirs[name].grad.abs().max()))
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=1e-5 * top, rtol=1e-3)
    assert stats["rollout/sequences_per_trajectory"] == (6 + 3 + 3) / 8
    assert stats["policy/num_tokens"] == num_tokens


# --- turn rewards and values across the boundary ---------------------------------------------------------------------


def literal_vtrace(ratios, rewards, values, after, *, gamma, lam, bar=1.0):
    """Espeholt et al. 2018, eq. 1, token by token from the end; `after` is the value of the state after the last."""
    advantages, targets = [0.0] * len(values), [0.0] * len(values)
    next_value = next_target = after
    for t in reversed(range(len(values))):
        delta = min(bar, ratios[t]) * (rewards[t] + gamma * next_value - values[t])
        targets[t] = values[t] + delta + gamma * lam * min(bar, ratios[t]) * (next_target - next_value)
        advantages[t] = rewards[t] + gamma * next_target - values[t]
        next_value, next_target = values[t], targets[t]
    return advantages, targets


@pytest.mark.parametrize("truncated", [False, True])
def test_vtrace_runs_through_all_sequences_with_values_of_the_states_that_the_model_was_in(checkpoints, truncated):
    """The state after the last action of a sequence is the prompt of the next one: that is whose value follows it."""
    policy = load_policy(checkpoints["qwen3-tied"])
    plain = AutoModelForCausalLM.from_pretrained(
        checkpoints["qwen3-tied"], attn_implementation="eager", dtype=torch.float32
    )
    rows = [replace(rewritten(seed), index=seed, truncated=truncated) for seed in range(2)]
    advantage = AdvantageConfig(estimator="vtrace", baseline="none", gamma=0.9, lam=0.8)
    made = make_objective(advantage, PLAIN)
    critic = build_critic(
        CriticConfig(), "vtrace", policy, checkpoints["qwen3-tied"], num_steps=1, dtype=torch.float32, ranks=Ranks()
    )
    torch.manual_seed(0)
    torch.nn.init.normal_(critic.module.outer.weight, std=0.5)
    taken = OneBatch(made, rows, plan_of(rows), version=VERSION)
    micros = pack(rows, 40, bootstrap=True)
    taken.score(policy, micros, critic=critic)

    assert len(micros) == 2
    for micro, row in zip(micros, rows, strict=True):
        values, states = [], None
        for one in apart(row):
            full = torch.tensor([*one.prompt_ids.tolist(), *one.token_ids.tolist()])
            states = critic.module(plain.model(input_ids=full[None]).last_hidden_state[0])[:, 0].tolist()
            values += [states[place + len(one.prompt_ids) - 1] for place in np.flatnonzero(one.mask)]
        ratios = (by_the_book(plain, row) - torch.from_numpy(row.logprobs[row.mask])).exp().tolist()
        rewards = row.rewards[row.mask].tolist()
        after = states[-1] if truncated else 0.0
        advantages, targets = literal_vtrace(ratios, rewards, values, after, gamma=0.9, lam=0.8)

        torch.testing.assert_close(taken.plan.advantages[micro.trajectory_ids].advantages[0], torch.tensor(advantages))
        torch.testing.assert_close(taken.plan.critic_targets(micro).targets[0], torch.tensor(targets))


def test_without_a_critic_turn_rewards_reach_every_earlier_token_of_the_trajectory():
    """`reward_to_go` of turn rewards: what a later sequence earned counts for the tokens of earlier ones."""
    row = rewritten()
    (micro,) = pack([row], 100)

    assert reward_to_go(micro.rewards, micro.mask)[0].tolist() == [1.75] * 3 + [1.25] * 2 + [1.0] * 5


@pytest.mark.parametrize(
    ("avg_level", "expected"),
    [("token-mean", [10 / 14, 4 / 14]), ("seq-mean-token-mean", [0.5, 0.5]), ("seq-mean-token-sum", [5.0, 2.0])],
)
def test_averages_over_sequences_count_a_trajectory_once(avg_level, expected):
    """The sum of the weights of a trajectory's tokens: its sequences are not rows of their own."""
    rows = [rewritten(), replace(apart(rewritten())[0], index=1)]
    rows[1] = replace(rows[1], mask=np.array([1, 1, 1, 0, 0, 1, 0], dtype=bool))
    made = make_objective(AdvantageConfig(estimator="group"), replace(PLAIN, avg_level=avg_level))
    one = OneBatch(made, rows, plan_of(rows), version=VERSION)

    weights = [float(one.plan.tensors.weights[place]) * row.num_action_tokens for place, row in enumerate(rows)]
    assert weights == pytest.approx(expected)
