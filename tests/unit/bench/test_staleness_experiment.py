"""The staleness experiment does what it says: lags are exact, curves repeat, arms pair, members do not touch."""

import json
from dataclasses import replace

import pytest
import torch

from bench.staleness import arms, summary
from bench.staleness.__main__ import collect, write
from bench.staleness.adaptive import Driver, StepChange
from bench.staleness.history import History
from bench.staleness.parts import Job, execute
from bench.staleness.policy import Shape, generate, split
from bench.staleness.report import comparison
from bench.staleness.simulate import Member, Plan, sample, sampling_ticks, train
from bench.staleness.task import Luck, Task

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
