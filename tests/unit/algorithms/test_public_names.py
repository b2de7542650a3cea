"""The public face of `streamrl.algorithms`: which names there are, and that each one can be reached."""

import ast
import inspect
import math
import re
from pathlib import Path

import streamrl.algorithms as alg

from .catalog import PUBLIC_NAMES

ROOT = Path(__file__).parents[3]

PROMISED = """
ANCHORS BreakerState CORRECTION_PRESETS ClipBounds ConstraintState Correction CorrectionSpec DriftBins DriftFit
DriftModel ESTIMATORS GoodputState KlState LagBound LagSummary Moments Returns SURROGATES SegmentReturns
SequenceStats TokenLoss aggregate aggregation_weights aipo apply_correction behavior_penalty broadcast_rows
check_pairing cispo clip_from_budget clip_high_update clipped_is constraint_penalty crowding_distance decoupled_ppo
domination_count dppo_kl dppo_tv dueling_q entropy_coef_update
fit_drift gae gdpo_advantages geo_keep gmpo flash_reinforce goodput group_advantages group_mean grpo_advantages
gspo hypervolume hypervolume_contributions k3_keep kl_doubling kl_estimate kl_exponential kl_horizon
kl_linear kl_log_integral kl_loss kl_pid kl_schedule kl_shaped_rewards lag_for_ess lag_keep lag_summary lag_weights
lagrangian_update leave_one_out log_ratios loglinear_proximal lr_scale m2po minpro mis
moments n_step normalize_weights oapl opob opsm_keep optimal_advantages oscillation
overlong_penalty pid_lagrangian_update
place_terminal ppo_clip predict_m2 reinforce reinforce_pp_advantages 
retrace_q retrace_v reward_to_go rho_bar_for_ess sapo score_square_norms seq_mis_keep seq_tis
seq_tis_weights sequence_stats should_publish split_by_lag spread_budget step_breaker step_goodput step_lag_bound
tchebycheff td_lambda tis tis_weights token_lags token_log_ratios topr trace_length
update_drift value_loss vespo veto_keep vtrace vtrace_critic_free vtrace_segments weighted_sum whiten zscore_keep
""".split()


def test_the_promised_names_are_importable_and_listed_once():
    assert set(PROMISED) <= set(PUBLIC_NAMES)
    assert len(PUBLIC_NAMES) == len(set(PUBLIC_NAMES))
    assert [name for name in PUBLIC_NAMES if not hasattr(alg, name)] == []


DEFAULTS = {
    "gae": {"gamma": 1.0, "lam": 1.0}, "td_lambda": {"gamma": 1.0, "lam": 1.0},
    "vtrace": {"gamma": 1.0, "lam": 1.0, "rho_bar": 1.0, "c_bar": 1.0, "trace_temperature": 1.0, "leak": 1.0},
    "retrace_v": {"gamma": 1.0, "lam": 1.0}, "retrace_q": {"gamma": 1.0, "lam": 1.0},
    "vtrace_critic_free": {"lam": 1.0, "rho_bar": 1.0, "c_bar": 1.0}, "reward_to_go": {"gamma": 1.0},
    "trace_length": {"lam": 1.0, "c_bar": 1.0, "trace_temperature": 1.0, "leak": 1.0},
    "reinforce_pp_advantages": {"gamma": 1.0},
    "grpo_advantages": {"eps": 1e-6}, "tis_weights": {"cap": 2.0, "floor": 0.0}, "seq_tis_weights": {"cap": 2.0},
    "k3_keep": {"bound": 0.01}, "opsm_keep": {"delta": 0.5}, "ppo_clip": {"eps_low": 0.2, "eps_high": 0.2},
    "decoupled_ppo": {"eps_low": 0.2, "eps_high": 0.2, "cap": 2.0}, "tis": {"cap": 2.0, "floor": 0.0},
    "cispo": {"cap": 5.0, "floor": 0.0}, "dppo_tv": {"bound_low": 0.2, "bound_high": 0.2, "cap": 20.0},
    "behavior_penalty": {"tau": 0.001}, "kl_linear": {"target": 0.01, "factor": 0.5, "low": 0.001, "high": 10.0},
    "entropy_coef_update": {"step": 0.005, "low": 0.0, "high": 1.0},
    "clip_high_update": {"step": 0.005, "low": 0.2, "high": 0.5}, "lagrangian_update": {"lr": 0.01, "high": math.inf},
    "rho_bar_for_ess": {"ess_target": 0.5, "low": 1.0, "high": 10.0}, "step_goodput": {"num_steps": 20, "t_bound": 2.0},
    "zscore_keep": {"z_bound": 2.5, "log_bound": 1.6094379},
}
"""Knobs that a call from Python may leave out; those of a run come from the settings."""


def test_knobs_that_are_left_out_have_the_published_values():
    found = {
        name: {
            knob: one.default for knob, one in inspect.signature(getattr(alg, name)).parameters.items()
            if isinstance(one.default, float | int) and not isinstance(one.default, bool)
        } for name in DEFAULTS
    }
    assert found == DEFAULTS


def read_names(path: Path) -> set[str]:
    """Names that a module imports, reads after it has defined them, or takes from a module that it imports."""
    imported, found, taken = set(), set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            imported |= {name for alias in node.names for name in (alias.name, alias.asname) if name is not None}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            taken.add((node.value.id, node.attr))
    return imported | found | {attribute for owner, attribute in taken if owner in imported}


def test_every_public_name_is_used_by_the_product_or_documented():
    product = [path for room in ("streamrl", "learner", "actors") for path in (ROOT / room).rglob("*.py")]
    used = set().union(*map(read_names, product))
    documented = set(re.findall(r"`([A-Za-z_0-9]+)`", (ROOT / "docs" / "formulas.md").read_text()))

    assert [name for name in PUBLIC_NAMES if name not in used | documented] == []
