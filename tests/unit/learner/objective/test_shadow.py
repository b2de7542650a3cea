"""Shadow algorithms against float64 transcriptions of their papers' losses, and which of them a run can answer for."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.data.packing import pack
from learner.objective.objective import Objective
from learner.objective.shadow import Shadow
from learner.objective.statistics import StepStatistics
from learner.objective.token_batch import PassOutputs
from learner.setup.shadows import make_shadows
from streamrl.config.composition import group_files
from streamrl.config.load import algorithm_preset
from streamrl.config.schema import AdvantageConfig, ConstraintConfig, KlConfig, LossConfig
from streamrl.errors import ConfigError
from tests.kit.learning import OneBatch, batch, plan_of

VERSION = 9
MAX_TOKENS = 16


def in_use(advantage: AdvantageConfig | None = None, loss: LossConfig | None = None, **options) -> Objective:
    """By default the run's algorithm is `rloo` without its KL: one truncated ratio a token."""
    preset = algorithm_preset("rloo")
    advantage, loss = advantage or preset.advantage, loss or preset.loss
    return Objective(advantage, loss, max_new_tokens=MAX_TOKENS, max_lag=9, **options)


def shadows_of(names, objective: Objective, *, num_minibatches: int = 1) -> tuple[Shadow, ...]:
    return make_shadows(
        names, objective, KlConfig(), ConstraintConfig(), max_lag=9, num_minibatches=num_minibatches
    )


def rows_and_policy():
    """Trajectories with lags from 0 to 7, and log-probs of a policy that moved away from what is recorded."""
    rows, generator = batch(4, 4, seed=3, version=VERSION, max_lag=7), torch.Generator().manual_seed(3)
    noise = [torch.randn(row.num_action_tokens, generator=generator) for row in rows]
    return rows, [torch.from_numpy(row.logprobs[row.mask]) + 0.35 * x for row, x in zip(rows, noise, strict=True)]


def measured(names, objective: Objective, *, max_tokens: int = 1000) -> dict:
    rows, policy = rows_and_policy()
    one = OneBatch(objective, rows, plan_of(rows, version=VERSION), version=VERSION)
    one.statistics = StepStatistics(one.plan, one.ranks, shadows_of(names, objective))
    micro_batches = [
        (micro, torch.cat([policy[i] for i in micro.trajectory_ids])) for micro in pack(rows, max_tokens)
    ]
    if objective.needs:
        for micro, logprobs in micro_batches:
            one.observe(micro, PassOutputs(policy=micro.padded(logprobs)))
        one.close_observation()
    for micro, logprobs in micro_batches:
        one.loss(micro, logprobs, torch.ones_like(logprobs))
    return one.finish().flush(1)


# --- losses written down once more, a trajectory at a time, in float64 ------------------------------------------------


def scores(rows, row) -> np.ndarray:
    return np.array([other.reward for other in rows if other.group_id == row.group_id])


def leave_one_out(rows, row) -> float:
    siblings = scores(rows, row)
    return row.reward - (siblings.sum() - row.reward) / (len(siblings) - 1)


def normalized(rows, row) -> float:
    siblings = scores(rows, row)
    return (row.reward - siblings.mean()) / (siblings.std(ddof=1) + 1e-6)


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


def rloo(rows, policy: list[Tensor]) -> Tensor:
    """Leave-one-out, token ratios truncated at 2 and held constant, summed over an answer."""
    return sum(
        -(ratio(row, x).detach().clamp(max=2.0) * leave_one_out(rows, row) * x).sum() / len(rows)
        for row, x in zip(rows, policy, strict=True)
    )


def grpo(rows, policy: list[Tensor]) -> Tensor:
    """arXiv:2402.03300, eq. 3 without its KL: a clip of 0.2, a mean over an answer's tokens, then over answers."""
    return sum(
        clipped(ratio(row, x), normalized(rows, row), 0.8, 1.2).mean() / len(rows)
        for row, x in zip(rows, policy, strict=True)
    )


def vespo(rows, policy: list[Tensor]) -> Tensor:
    """arXiv:2602.10693 with the advantages and the average over answers of the run, which is rloo."""
    total = torch.zeros((), dtype=torch.float64)
    for row, x in zip(rows, policy, strict=True):
        advantage, s = leave_one_out(rows, row), float((x - recorded(row)).sum().detach())
        k, lam = (3.0, 2.0) if advantage < 0 else (2.0, 3.0)
        total = total - math.exp(lam + k * s - lam * math.exp(s)) * advantage * x.sum() / len(rows)
    return total


def extreme_lag(rows, policy: list[Tensor]) -> Tensor:
    """M2PO, arXiv:2510.01161: a clip whose harmful tokens spend a second moment of 0.04, found by bisection; a veto."""
    answers = [
        (x, ratio(row, x), leave_one_out(rows, row)) for row, x in zip(rows, policy, strict=True)
        if ((ratio(row, x) >= 1e-4) & (ratio(row, x) <= 100.0)).all()
    ]
    harmful = torch.cat([r.log()[(r.log() * a) > 0] for _, r, a in answers]).detach().square()
    low, high = 0.0, 100.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float(harmful.clamp(max=middle**2).mean()) <= 0.04 else (low, middle)
    num_tokens = sum(row.num_action_tokens for row in rows)
    edges = min(math.exp(-low), 0.7), max(math.exp(low), 1.5)
    return sum(clipped(r, a, *edges).sum() / num_tokens for _, r, a in answers)


def recorded(row) -> Tensor:
    return torch.from_numpy(row.logprobs[row.mask]).double()


def ratio(row, policy: Tensor) -> Tensor:
    return (policy - recorded(row)).exp()


def slopes(loss: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """Gradient of every action token's log-prob, and its lag."""
    rows, policy = rows_and_policy()
    leaves = [x.double().requires_grad_() for x in policy]
    loss(rows, leaves).backward()
    lags = torch.cat([torch.from_numpy(VERSION - row.versions[row.mask]) for row in rows])
    return torch.cat([torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]), lags


@pytest.mark.parametrize("max_tokens", [1000, 40])
@pytest.mark.parametrize(
    ("name", "loss"), [("grpo", grpo), ("vespo", vespo), ("extreme_lag", extreme_lag), ("rloo", rloo)]
)
def test_norm_and_cosine_are_those_of_a_literal_transcription_however_the_batch_is_split(name, loss, max_tokens):
    row = measured(["dapo", name], in_use(), max_tokens=max_tokens)

    (mine, lags), (used, _) = slopes(loss), slopes(rloo)
    assert row[f"shadow/{name}/grad_norm"] == pytest.approx(float(mine.norm()), rel=1e-5)
    assert row["shadow/grad_norm"] == pytest.approx(float(used.norm()), rel=1e-5)
    assert row[f"shadow/{name}/cosine"] == pytest.approx(float(mine @ used / mine.norm() / used.norm()), rel=1e-5)
    edges = [0, 1, 2, 4, 8, 16]
    ages = {low: (lags >= low) & (lags < high) for low, high in zip(edges, edges[1:], strict=False)}
    found = {low: float(mine[chosen].norm()) for low, chosen in ages.items() if chosen.any()}
    assert len(found) > 1 and row[f"shadow/{name}/grad_norm_by_lag"] == pytest.approx(found, rel=1e-5)
    assert row[f"shadow/{name}/cosine_by_lag"] == pytest.approx({
        low: float(mine[chosen] @ used[chosen] / mine[chosen].norm() / used[chosen].norm())
        for low, chosen in ages.items() if chosen.any()
    }, rel=1e-5)


def test_what_a_filter_masks_is_masked_for_an_algorithm_with_another_mean_too():
    row = measured(["grpo"], in_use(group_mask=lambda rows, plan, ranks: torch.tensor([r.group_id != 1 for r in plan])))

    def of_the_others(rows, policy):
        return grpo(*zip(*((row, x) for row, x in zip(rows, policy, strict=True) if row.group_id != 1), strict=True))

    assert row["shadow/grpo/grad_norm"] == pytest.approx(float(slopes(of_the_others)[0].norm()), rel=1e-5)


@pytest.mark.parametrize("name", ["rloo", "grpo", "stream_default", "extreme_lag", "reinforce_pp", "areal", "prime"])
def test_the_algorithm_in_use_has_cosine_1_to_itself_and_the_same_norm(name):
    preset = algorithm_preset(name)
    row = measured([name], in_use(preset.advantage, preset.loss))

    assert row[f"shadow/{name}/cosine"] == pytest.approx(1.0, abs=1e-12)
    assert row[f"shadow/{name}/grad_norm"] == row["shadow/grad_norm"] > 0


def test_kept_and_clipped_tokens_are_those_of_each_algorithms_masks_and_clip():
    rows, policy = rows_and_policy()
    preset = algorithm_preset("dapo")
    tight = Objective(preset.advantage, LossConfig(veto_low=0.5, veto_high=2.0, dual_clip=None), max_new_tokens=16,
                      max_lag=9)
    row = measured(["dapo", "mis"], tight)

    ratios = [ratio(one, x.double()) for one, x in zip(rows, policy, strict=True)]
    kept = [((r >= 0.5) & (r <= 2.0)).all().expand(len(r)) for r in ratios]
    advantages = [torch.full_like(r, normalized(rows, one)) for one, r in zip(rows, ratios, strict=True)]
    r, a = torch.cat(ratios), torch.cat(advantages)
    assert row["shadow/kept_fraction"] == row["shadow/mis/kept_fraction"]
    assert row["shadow/mis/kept_fraction"] == pytest.approx(float(torch.cat(kept).double().mean()))
    assert row["shadow/dapo/kept_fraction"] == 1
    gone = ((a > 0) & (r > 1.28)) | ((a < 0) & (r < 0.8))
    assert row["shadow/dapo/clip_fraction"] == pytest.approx(float(gone.double().mean()))
    assert row["shadow/kept_fraction"] < 1 and row["shadow/dapo/clip_fraction"] > 0
    assert row["shadow/mis/clip_fraction"] == pytest.approx(float(((r < 0.5) | (r > 5.0)).double().mean()))


def test_a_surrogate_by_its_name_has_its_own_constants_and_the_advantages_of_the_run():
    (gspo, m2po, kl) = shadows_of(["gspo", "m2po", "dppo_kl"], in_use(loss=LossConfig(cap=None, clip_high=0.28)))

    assert gspo.options == {"eps_low": 3e-4, "eps_high": 4e-4}
    assert gspo.objective.loss.avg_level == "seq-mean-token-mean"  # the only one that it is defined for
    assert m2po.options == {"budget": 0.04, "floor_low": 0.3, "floor_high": 0.5}
    assert (kl.options["bound_low"], kl.options["bound_high"]) == (0.2, 0.28)  # its function names none
    assert gspo.objective.advantage == m2po.objective.advantage == in_use().advantage


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["ppo"], "shadow.algorithms=ppo needs .*values, and this run trains no such critic"),
        (["low_bias"], "needs the gradient norms of advantage.baseline=opob"),
        (["gpro"], "shadow.algorithms=gpro is unknown: choose presets .*Did you mean .*grpo"),
        (["grpo", "grpo"], "names one twice"),
        (["reinforce"], "shadow.algorithms=reinforce cannot be compared here, leave it out: .*allow_uncorrected"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(names, said):
    with pytest.raises(ConfigError, match=said):
        shadows_of(names, in_use())


def test_what_is_fitted_to_a_batch_needs_all_of_it_before_the_first_optimizer_step():
    objective = in_use(steps_per_batch=2)

    assert len(shadows_of(["grpo"], objective, num_minibatches=2)) == 1
    with pytest.raises(ConfigError, match="extreme_lag needs the whole batch .*learner.num_minibatches=1"):
        shadows_of(["extreme_lag"], objective, num_minibatches=2)


@pytest.mark.parametrize("name", sorted(group_files("algorithm")))
def test_every_preset_is_measured_or_refused_with_its_reason(name):
    try:
        shadows_of([name], in_use())
    except ConfigError as error:
        assert name in ("impala", "low_bias", "ppo", "retrace", "sao", "sao_gae", "vtrace")
        assert f"shadow.algorithms={name}" in str(error)
        return
    assert measured([name], in_use())[f"shadow/{name}/grad_norm"] > 0
