"""The harness of the experiment in the real system: cells, their order, the pace, and what is read from a run."""

from pathlib import Path

import torch

from bench.staleness_real.__main__ import waiting_cells
from bench.staleness_real.cells import AGE_ARMS, AGE_LAGS, ARMS, CRITIC_ARMS, ETA, LAGS, Cell, age_cells, all_cells
from bench.staleness_real.controls import positive_only, random_mask
from bench.staleness_real.precision import precision_cells
from bench.staleness_real.run_cell import rollout
from bench.staleness_real.tables import tables
from learner.objective.options import check_settings
from streamrl.config.load import load_config
from streamrl.config.rules import steps_per_batch
from streamrl.metrics.run_record import RunRecord


def result(arm="clip", lag=ETA, rate=3e-4, seed=1, area=0.5, end=0.6, valid=True):
    return {"arm": arm, "lag": lag, "rate": rate, "seed": seed, "num_steps": 100, "area": area, "end": end,
            "mean_lag": 20.0, "settled_lag": 23.5, "wall_s": 30.0, "valid": valid, "means": {"drift/m2": 0.1}}


def test_each_arm_is_a_run_of_its_own_at_the_forced_lag():
    arms = [load_config(Cell(arm, ETA, 1e-3, 3).overrides()) for arm in ARMS]
    for one in arms:
        assert (one.staleness.force, one.filter.zero_std) == (ETA, False)
        assert (one.policy.optimizer.lr, one.run.seed) == (1e-3, 3)
        assert steps_per_batch(one) == 1
        assert sum((one.loss, one.advantage) == (other.loss, other.advantage) for other in arms) == 1
    fresh = load_config(Cell("clip", 0, 1e-3, 3).overrides())
    assert fresh.staleness.force == 0 and LAGS == (ETA, 0)


def test_arms_with_a_critic_are_asked_for_by_name():
    for arm in CRITIC_ARMS:
        config = load_config(Cell(arm, ETA, 1e-3, 3).overrides())
        check_settings(config.advantage, config.loss, max_lag=ETA)
    assert {cell.arm for cell in all_cells(arms=["retrace"])} == {"retrace"}
    assert not {cell.arm for cell in all_cells()} & set(CRITIC_ARMS)


def test_the_cells_of_ages_train_long_enough_for_their_lag_with_equally_many_answers():
    cells = age_cells()
    assert len(set(cells)) == len(AGE_ARMS) * len(AGE_LAGS) * 2 * 5
    for cell in cells[::5]:
        config = load_config(cell.overrides())
        check_settings(config.advantage, config.loss, max_lag=cell.lag)
        assert config.staleness.force == cell.lag and config.trainer.num_steps >= max(100, 4 * cell.lag)
        assert config.rollout.num_prompts_per_step * config.rollout.num_responses_per_prompt == 128


def test_a_cell_that_has_a_valid_line_or_was_tried_twice_does_not_wait():
    cells = [Cell("clip", ETA, 3e-4, seed) for seed in (1, 2, 3)]
    lines = [result(seed=1), result(seed=2, valid=False), *[result(seed=3, valid=False)] * 2]
    assert waiting_cells(cells, lines) == [cells[1]]
    assert waiting_cells(cells, []) == cells
    tiny, real = (Cell("clip", ETA, 3e-4, 1, experiment=name).overrides() for name in ("quickstart", "smollm2"))
    assert "launch.in_process=true" in tiny and "launch.in_process=true" not in real


def test_the_cells_of_precision_differ_in_what_their_table_shows_alone(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])
    cells = precision_cells()
    assert len({cell.name for cell in cells}) == len(cells) == (2 * 2 * 3 - 1) * 3
    for cell in cells[:11]:
        config = load_config(cell.overrides())
        check_settings(config.advantage, config.loss, max_lag=cell.lag)
        assert (config.actors.weights.value, config.staleness.force) == (cell.weights, cell.lag)
        assert config.trainer.num_steps >= 4 * cell.lag and config.eval.every_steps == config.trainer.num_steps // 2
    more = {"experiment": cells[0].experiment, "start": 0.5,
            "rollout": {"mismatch_first": 0.02, "tokens_per_busy_s": 80.0}}
    lines = [result("tis", 16, seed=seed, end=end) | more | {"weights": weights}
             for seed, end, weights in ((1, 0.5, "int8"), (2, 0.7, "int8"), (1, 0.6, "full"))]
    assert "| 16 | full | 0.50 (1) | 0.60 (1) | 0.50 (1) | 0.02 |  | 0.1 |  | 80 |" in tables(lines)
    assert "| 16 | int8 | 0.50 ± 0.00 (2) | 0.60 ± 0.14 (2) |" in tables(lines)


def test_a_run_tells_the_engines_disagreement_and_its_speed_while_it_had_work():
    rows = [{"step": step, "drift/mismatch": step / 100, "hub/actor_s": 10.0 * step, "hub/actor_idle_s": 5.0 * step,
             "hub/tokens_generated": 200.0 * step} for step in range(1, 17)]
    whole = rollout(RunRecord(rows, name="run"))
    assert whole == {"mismatch_first": 0.01, "mismatch_last": 0.155, "tokens_per_busy_s": 40.0}
    assert rollout(RunRecord([{"step": 1, "drift/mismatch": 0.5}, {"step": 16}], name="run")) == {"mismatch_first": 0.5}


def test_the_control_arms_drop_at_random_or_keep_what_is_positive():
    mask, advantages = torch.ones(8, 50, dtype=torch.bool), torch.randn(8, 50)
    policy = torch.full((8, 50), -2.0, requires_grad=True)
    given = {"policy_logprobs": policy, "behavior_logprobs": torch.full((8, 50), -1.0), "advantages": advantages,
             "mask": mask}
    kept = random_mask(given).losses != 0
    assert int((~kept).sum()) == int((advantages < 0).sum())  # every trajectory has drifted by 1 nat
    assert bool((~kept & (advantages > 0)).any())
    assert torch.equal(positive_only(given).losses != 0, advantages > 0)


def test_a_lag_that_is_not_the_forced_one_is_told_and_left_out():
    cell = Cell("clip", ETA, 3e-4, 1)
    assert cell.lag_is_right({"settled_lag": 24.0}) and not cell.lag_is_right({"settled_lag": 23.9})
    assert not Cell("clip", 0, 3e-4, 1).lag_is_right({"settled_lag": 0.01})
    text = tables([result(), result(seed=2, end=0.9), result(seed=3, end=0.0, valid=False)])
    ages = tables([result(lag=lag, rate=rate, end=1 - lag / 512) for lag in (0, 64, 256) for rate in (1e-4, 3e-4)])
    assert "| lag 64: end | area | rate | lag 256: end |" in ages and "| 0.88 (1) | 0.88 (1) | 0.50 (1) |" in ages
    assert "0.75 ± 0.21 (2)" in text and "2 runs" in text and "1 more runs were left out" in text
