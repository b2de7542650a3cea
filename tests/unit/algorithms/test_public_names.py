"""The public face of `streamrl.algorithms`: which names there are, and that each one can be reached."""

from __future__ import annotations

import ast
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
fit_drift gae gdpo_advantages geo_keep gmpo goodput group_advantages group_mean grpo_advantages
gspo hypervolume hypervolume_contributions k3_keep kl_doubling kl_estimate kl_exponential kl_horizon
kl_linear kl_log_integral kl_loss kl_pid kl_schedule kl_shaped_rewards lag_for_ess lag_keep lag_summary lag_weights
lagrangian_update leave_one_out log_ratios loglinear_proximal lr_scale m2po minpro mis
moments n_step normalize_weights opob opsm_keep oscillation overlong_penalty pid_lagrangian_update
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
