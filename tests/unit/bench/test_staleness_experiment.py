"""The staleness experiment does what it says: lags are exact, curves repeat, arms pair, members do not touch."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from bench.pieces import token_logprobs
from bench.staleness import arms, summary
from bench.staleness.__main__ import collect, write
from bench.staleness.adaptive import Driver, LagControl, StepChange
from bench.staleness.history import History
from bench.staleness.learner import Experience, Learner
from bench.staleness.optimizer import BETAS, EPS, MAX_GRAD_NORM, MemberAdam
from bench.staleness.parts import Job, execute, jobs
from bench.staleness.policy import Shape, features, forward, generate, initial_parameters, shifted, split
from bench.staleness.report import comparison
from bench.staleness.simulate import Member, Plan, sample, sampling_ticks, train
from bench.staleness.task import Luck, Task, scores

SMALL = Task(num_tokens=4, num_prompts=3, group_size=4, num_eval_prompts=8)
SHAPE = Shape(SMALL.num_tokens, hidden=32)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_parameters(count: int, shape: Shape = SHAPE) -> torch.Tensor:
    """Parameters whose head is not zero, so that policies differ."""
    return 0.5 * torch.randn(count, shape.num_parameters, generator=torch.Generator().manual_seed(3))


def test_every_arm_carries_exactly_one_ratio_and_only_the_negative_control_carries_none():
    for arm in arms.ARMS.values():
        arms.check(arm, max_lag=64)

    disguised = replace(arms.ARMS["none"], name="another")
    with pytest.raises(ValueError, match="nothing applies the whole ratio"):
        arms.check(disguised, max_lag=64)
    doubled = replace(arms.ARMS["vtrace_critic_free"], surrogate="tis", anchor="behavior")
    with pytest.raises(ValueError, match="more than once"):
        arms.check(doubled, max_lag=64)


def test_stream_default_and_impala_are_the_recipes_of_the_config_group():
    impala = arms.Arm("impala", "vtrace", "none", rho_bar_pg=1.0, critic=True, num_critic_steps=2,
                      surrogate="reinforce", anchor="none")
    default = arms.Arm(
        "stream_default", knobs={"eps_low": 0.2, "eps_high": 0.28, "dual_clip": 3.0}, veto_low=1e-4, veto_high=100.0,
        opsm_delta=0.5, opsm_drift_only=True, filter_zero_std=True, lr_rule="sqrt",
    )
    assert arms.ARMS["impala"] == impala == arms.recipe("impala")
    assert arms.ARMS["stream_default"] == default == arms.recipe("stream_default")
    assert set(arms.MEANING) == set(arms.ARMS)


def test_generation_with_a_cache_records_the_log_probs_of_a_full_forward_pass():
    weights = split(SHAPE, random_parameters(2))
    prompts, noise = Luck(SMALL, [5, 6]).training()

    tokens, logprobs = generate(SHAPE, lambda _: weights, prompts, noise)

    logits = forward(SHAPE, weights, features(SHAPE, prompts, shifted(tokens)))
    again = token_logprobs(logits.flatten(0, 1), tokens.flatten(0, 1)).view_as(logprobs)
    assert logprobs.std() > 0.1
    torch.testing.assert_close(logprobs, again, rtol=1e-5, atol=1e-5)


def test_sampled_digits_follow_the_softmax():
    weights = split(SHAPE, random_parameters(1))
    prompts = torch.zeros(1, 20_000, SMALL.num_tokens, dtype=torch.int64)
    exponential = torch.empty(1, 20_000, SMALL.num_tokens, 5).exponential_(generator=torch.Generator().manual_seed(0))

    tokens, logprobs = generate(SHAPE, lambda _: weights, prompts, -exponential.log())

    first = tokens[0, :, 0]
    for digit in first.unique():
        chosen = first == digit
        assert float(chosen.float().mean()) == pytest.approx(float(logprobs[0, chosen, 0][0].exp()), abs=0.02)


def test_tokens_are_sampled_from_exactly_the_version_that_the_lag_asks_for():
    lags, now = torch.tensor([0, 2, 5]), 5
    history = History(6, random_parameters(3))
    snapshots = [random_parameters(3) + 0.3 * tick * torch.ones(3, 1) for tick in range(now + 1)]
    for tick, snapshot in enumerate(snapshots):
        history.push(snapshot, torch.full((3,), tick))

    found = sample(SHAPE, history, Luck(SMALL, [0, 1, 2]), sampling_ticks(now, lags, 4, mixed=False), step=now)

    stale = torch.stack([snapshots[now - int(lag)][member] for member, lag in enumerate(lags)])
    prompts, noise = Luck(SMALL, [0, 1, 2]).training()
    tokens, logprobs = generate(SHAPE, lambda _: split(SHAPE, stale), prompts, noise)
    assert torch.equal(found.tokens, tokens) and torch.equal(found.behavior_logprobs, logprobs)
    assert torch.equal(found.lags, lags[:, None].expand(3, 4))


def test_mixed_versions_record_each_token_under_its_own_weights():
    history = History(9, random_parameters(1))
    snapshots = [random_parameters(1) * (1.0 + 0.4 * tick) for tick in range(9)]
    for tick, snapshot in enumerate(snapshots):
        history.push(snapshot, torch.tensor([tick]))
    ticks = sampling_ticks(8, torch.tensor([8]), 4, mixed=True)
    assert ticks.tolist() == [[0, 2, 4, 6]]

    recorded = sample(SHAPE, history, Luck(SMALL, [0]), ticks, step=8)
    wrong = sample(SHAPE, history, Luck(SMALL, [0]), ticks, step=8, denominator="first")

    assert recorded.lags.tolist() == [[8, 6, 4, 2]]
    assert torch.equal(recorded.tokens, wrong.tokens)
    first, rest = (recorded.behavior_logprobs - wrong.behavior_logprobs).abs().split([1, 3], dim=-1)
    assert float(first.max()) < 1e-5 and float(rest.max()) > 0.05


def test_before_a_lag_is_reached_the_first_version_samples():
    assert sampling_ticks(3, torch.tensor([0, 2, 64]), 2, mixed=False).tolist() == [[3, 3], [1, 1], [0, 0]]


def test_a_version_that_is_no_longer_kept_is_refused():
    history = History(3, random_parameters(1))
    for tick in range(5):
        history.push(random_parameters(1), torch.tensor([tick]))

    with pytest.raises(AssertionError, match="outside the 2 to 4"):
        history.weights_at(torch.tensor([1]))


def test_the_same_plan_gives_bit_identical_curves():
    members = tuple(Member(lag, 1e-2, seed) for lag in (0, 3) for seed in (0, 1))
    plan = Plan("stream_default", members, 20, task=SMALL, eval_every=5)

    assert train(plan) == train(plan)


@pytest.mark.parametrize("name", sorted(arms.ARMS))
def test_a_member_learns_the_same_alone_as_in_company(name):
    wanted = Member(2, 3e-3, 1)
    plan = Plan(name, (Member(0, 1e-2, 0), wanted, Member(4, 1e-3, 1)), 6, task=SMALL, eval_every=6)

    together = train(plan)[1]
    alone = train(replace(plan, members=(wanted,)))[0]

    assert together.m2 == pytest.approx(alone.m2, rel=1e-3, abs=1e-7)
    assert together.entropies == pytest.approx(alone.entropies, rel=1e-4)


def test_on_fresh_data_the_corrections_of_the_token_change_nothing():
    def first_update(name: str) -> torch.Tensor:
        learner = Learner(arms.ARMS[name], SMALL, SHAPE, [0], [1e-3])
        history = History(1, learner.parameters.detach())
        history.push(learner.parameters.detach(), torch.tensor([0]))
        learner.update(sample(SHAPE, history, Luck(SMALL, [0]), torch.zeros(1, 4, dtype=torch.int64), step=0))
        return learner.parameters.detach()

    plain = first_update("none")
    start = Learner(arms.ARMS["none"], SMALL, SHAPE, [0], [1e-3]).parameters.detach()
    assert not torch.equal(plain, start)
    for name in ("token_tis", "seq_tis", "dppo_tv", "icepop", "decoupled_ppo", "m2po", "vespo", "vtrace_critic_free"):
        torch.testing.assert_close(first_update(name), plain, rtol=1e-4, atol=1e-6, msg=name)


def test_a_batch_whose_groups_teach_nothing_makes_no_step():
    learner = Learner(arms.ARMS["stream_default"], SMALL, SHAPE, [0, 1], [1e-2, 1e-2])
    before = learner.parameters.detach().clone()
    history = History(1, before)
    history.push(before, torch.tensor([0, 0]))
    batch = sample(SHAPE, history, Luck(SMALL, [0, 1]), torch.zeros(2, 4, dtype=torch.int64), step=0)
    answers = (batch.prompts + batch.prompts.flip(-1)) % 5
    tokens = torch.stack([answers[0], batch.tokens[1]])  # the first member is right everywhere
    assert float(scores(batch.prompts, tokens)[0].mean()) == 1.0

    learner.update(Experience(batch.prompts, tokens, batch.behavior_logprobs, batch.lags))

    assert torch.equal(learner.parameters[0], before[0])
    assert not torch.equal(learner.parameters[1], before[1])


def test_each_member_follows_adam_with_its_own_clip_and_rate():
    generator = torch.Generator().manual_seed(0)
    start, lrs = torch.randn(2, 7, generator=generator), torch.tensor([1e-2, 1e-3])
    stacked = start.clone()
    references = [torch.nn.Parameter(row.clone()) for row in start]
    optimizers = [
        torch.optim.Adam([p], lr=float(lr), betas=BETAS, eps=EPS) for p, lr in zip(references, lrs, strict=True)
    ]
    adam = MemberAdam(stacked)
    for step in range(5):
        gradient = torch.randn(2, 7, generator=generator) * torch.tensor([[3.0], [0.1]])
        active = torch.tensor([True, step != 2])
        adam.step(stacked, gradient, lrs, active)
        for member, (parameter, optimizer) in enumerate(zip(references, optimizers, strict=True)):
            if active[member]:
                parameter.grad = gradient[member].clone()
                torch.nn.utils.clip_grad_norm_([parameter], MAX_GRAD_NORM)
                optimizer.step()

    torch.testing.assert_close(stacked, torch.stack([p.detach() for p in references]), rtol=1e-5, atol=1e-7)


def test_seeds_decide_prompts_and_luck_whatever_the_company():
    alone, company = Luck(SMALL, [4]).training(), Luck(SMALL, [9, 4, 4]).training()

    assert torch.equal(alone[0][0], company[0][1]) and torch.equal(alone[1][0], company[1][2])
    assert not torch.equal(company[0][0], company[0][1])
    assert torch.equal(initial_parameters(SHAPE, torch.Generator().manual_seed(4)),
                       initial_parameters(SHAPE, torch.Generator().manual_seed(4)))  # fmt: skip


def test_more_drift_than_the_ess_target_allows_lowers_the_lag_bound():
    def bound_after(spread: float) -> int:
        control, generator = LagControl(), torch.Generator().manual_seed(0)
        for _ in range(300):
            ell = spread * torch.randn(16, 6, generator=generator)
            control.observe(ell, torch.full((16, 6), 48), ess=float(torch.exp(torch.tensor(-6 * spread**2))),
                            step_scale=1.0, norm=1.0, lag=48)  # fmt: skip
        return control.bound

    assert bound_after(0.01) == 64
    assert bound_after(0.6) < 40


def test_a_draining_breaker_lets_only_fresh_batches_through_until_the_queue_is_young():
    control = LagControl()
    control.observe(torch.randn(8, 6), torch.full((8, 6), 48), ess=0.05, step_scale=0.1, norm=1.0, lag=48)
    assert (control.breaker.mode, control.bound) == ("drain", 1)

    control.idle(20)
    assert control.bound == 1
    control.idle(1)
    assert control.breaker.mode == "cautious" and control.bound > 1


@pytest.mark.timeout(300)
def test_at_lag_32_stream_default_learns_the_task_and_the_uncorrected_arm_does_not():
    def final_scores(arm: str, lags: tuple[int, ...]) -> list[float]:
        members = tuple(Member(lag, 3e-3, 0) for lag in lags)
        curves = train(Plan(arm, members, 500, task=Task(num_tokens=4), eval_every=25))
        return [summary.final(curve.scores) for curve in curves]

    fresh, stale = final_scores("none", (0, 32))
    (corrected,) = final_scores("stream_default", (32,))

    # Calibrated once, on one seed: none 1.00 and 0.45; chance is 0.2.
    assert fresh > 0.9 and stale < 0.65 * fresh
    assert corrected > 0.8


def test_all_jobs_together_cover_every_arm_at_every_lag_with_three_seeds_and_one_learning_rate():
    members = [(job.plan.arm, member) for job in jobs() if job.part == "A" for member in job.plan.members]

    wanted = {(arm, lag, seed) for arm in arms.ARMS for lag in (0, 1, 4, 8, 16, 32, 64) for seed in range(3)}
    assert sorted((arm, m.lag, m.seed) for arm, m in members) == sorted(wanted)
    assert {m.lr for _, m in members} == {3e-3}
    assert len({job.name for job in jobs()}) == len(jobs())


def small_jobs() -> list[Job]:
    def plan(arm: str, lags: tuple[int, ...], lr: float = 3e-3, **more) -> Plan:
        members = tuple(Member(lag, lr, seed) for lag in lags for seed in (0, 1))
        return Plan(arm, members, 10, task=SMALL, eval_every=5, **more)

    drivers = tuple(Driver(bound, 3e-3, 0) for bound in (None, 8, "adaptive"))
    found = [Job(f"A-{arm}", "A", plan(arm, (0, 2, 3))) for arm in arms.ARMS]
    found += [Job("B", "B", plan("none", (2,), mixed=True)), Job("C", "C", plan("none", (0, 2), lr=1e-3))]
    return [*found, Job("D", "D", StepChange("token_tis", drivers, num_ticks=60, low=1, high=9, task=SMALL,
                                              eval_every=10))]  # fmt: skip


def test_jobs_become_tables_charts_and_a_comparison_that_can_fail(tmp_path):
    wanted = small_jobs()
    for job in wanted:
        (tmp_path / f"{job.name}.json").write_text(json.dumps(execute(job)))

    results = collect(wanted, tmp_path, wall_s=1.0, workers=1)
    write(results, tmp_path, eval_every=5)

    stored = json.loads((tmp_path / "results.json").read_text())
    text = (tmp_path / "tables.md").read_text()
    assert all(f"`{arm}`" in text for arm in arms.ARMS)
    assert len(list(tmp_path.glob("*.svg"))) == 7
    assert (tmp_path / "step_change_lag.svg").read_text().startswith("<svg xmlns")
    assert comparison(results["parts"], stored["parts"])[-1].endswith("bit-identical, reproduced")
    for record in stored["parts"]["A"]:
        record["final"] += 0.5 if record["arm"] == "m2po" else 0.0
    assert comparison(results["parts"], stored["parts"])[-1].endswith("3 cells differ by more than their spread")
    driven = {record["bound"]: record for record in results["parts"]["D"]}
    assert max(driven[None]["lags"]) == 9 and max(driven[8]["lags"]) == 8
    assert driven[None]["num_updates"] == 60 > driven[8]["num_updates"]


def test_kept_and_collapsed_shares_are_measured_against_lag_0():
    records = [
        {"arm": arm, "lag": lag, "seed": seed, "final": value}
        for arm, lag, values in (("a", 0, (0.9, 1.0)), ("a", 8, (0.8, 0.3)), ("b", 0, (0.5, 0.5)), ("b", 8, (0.4, 0.6)))
        for seed, value in enumerate(values)
    ]

    assert summary.kept_share(records, "a", 8) == pytest.approx(0.55 / 0.95)
    assert summary.kept_share(records, "a", 8, chance=0.2) == pytest.approx(0.35 / 0.75)
    assert summary.collapsed_share(records, "a", 8) == 0.5  # 0.3 is below half of 0.95
    assert summary.collapsed_share(records, "b", 8) == 0.5
