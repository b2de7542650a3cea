"""Every setting has a test that shows its effect: one that this list names, or one marked with the setting.

    @pytest.mark.shows("staleness.eta")
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from streamrl.config.load import settings

UNIT = Path(__file__).parents[1]
LEDGER, HUB, LEARNER, ACTOR, LAUNCH = (
    f"config/test_setting_effects_{name}.py" for name in ("ledger", "hub", "learner", "actor", "launch")
)
OBJECTIVE = "learner/objective/test_objective.py"
DEVICES = "hub/handlers/test_broadcast_handler.py"
KL_OPTIONS = "learner/objective/test_kl_options.py"
KL, KL_CONTROL = "learner/objective/test_kl_training.py", "learner/objective/test_loss_weights.py"
SPLIT_SAMPLING = f"{LEDGER}::test_a_lease_carries_the_sampling_of_its_split"
SPLIT_LIMITS = f"{ACTOR}::test_the_limits_of_a_turn_are_those_of_its_split"
TRUNCATION = "learner/test_ratio_at_lag_zero.py::test_a_set_has_a_bound_wherever_ids_are_cut_off"
OPTIMIZER = f"{LEARNER}::test_each_setting_of_the_optimizer_and_its_schedule_moves_the_weights"
OPTIMIZERS = "learner/test_optimizers.py"
SIZES = f"{LEARNER}::test_a_tiny_model_has_the_sizes_that_are_set"
WARM = f"{LEARNER}::test_warm_start_and_seed_change_the_weights_that_a_run_starts_from"
LEAD = f"{LEDGER}::test_the_lead_in_groups_follows_batch_eta_and_the_steps_of_the_run"
OTHER_TASK = f"{LEDGER}::test_another_task_or_another_option_of_it_gives_other_prompts"
FILTERS = f"{LEDGER}::test_each_filter_drops_its_groups"
READS = f"{ACTOR}::test_system_prompt_and_chat_template_change_what_the_model_reads"
BROKEN = f"{ACTOR}::test_a_broken_environment_is_dropped_or_gets_the_floor"
DIRECTORY = f"{LEARNER}::test_name_root_and_dir_choose_the_run_directory"
DEVICE = f"{LEARNER}::test_the_learner_takes_the_device_and_the_threads_that_are_set"
TRACKER = f"{LEARNER}::test_the_tracker_is_opened_only_if_enabled_with_its_project_and_mode"
OWN_TRACKER = f"{LEARNER}::test_a_users_own_tracker_is_opened_with_its_options"
EVALS = f"{HUB}::test_evaluations_are_requested_as_often_and_as_large_as_set"
TRAVEL = f"{HUB}::test_weights_are_sent_in_the_type_and_bucket_size_that_are_set"
SCORES = "learner/objective/test_rewards.py"
CREDIT, GUARDS = "learner/objective/test_advantages.py", "learner/objective/test_masks.py"
CRITIC = "learner/test_critic.py::test_each_setting_of_the_critic_moves_its_values"
SIBLINGS = f"{CREDIT}::test_a_weighted_baseline_listens_to_siblings_that_the_policy_still_would_say"
VTRACE = f"{OBJECTIVE}::test_vtrace_reads_its_decay_and_both_caps"
CLIP = f"{OBJECTIVE}::test_ppo_clip_has_no_gradient_outside_the_clip_on_the_harmful_side"
VETO = f"{OBJECTIVE}::test_the_veto_removes_whole_trajectories_and_leaves_the_denominator"
BONUS = f"{KL_CONTROL}::test_low_entropy_raises_the_bonus_and_high_entropy_lowers_it_and_lets_it_rest"
WIDER = f"{KL_CONTROL}::test_low_entropy_widens_the_upper_clip_within_its_bounds"

CONTROL = "learner/test_staleness_control.py"
ADAPTIVE = {
    "enabled": "test_disabled_it_measures_and_changes_nothing",
    "rule": "test_goodput_climbs_to_the_lead_with_the_most_effective_groups_a_second",
    "min_eta": "test_a_stricter_target_gives_a_shorter_lead_inside_the_bounds_that_are_set",
    "max_eta": "test_a_stricter_target_gives_a_shorter_lead_inside_the_bounds_that_are_set",
    "ess_target": "test_a_stricter_target_gives_a_shorter_lead_inside_the_bounds_that_are_set",
    "m2_target": "test_off_policy_masking_goes_on_while_drift_at_the_mean_lag_is_over_its_budget",
    "half_life_steps": "test_a_short_memory_follows_a_change_of_drift_sooner",
    "num_trial_steps": "test_the_length_of_a_trial_is_the_one_that_is_set",
    "breaker": "test_without_the_breaker_trouble_changes_nothing",
    "group_spread": "test_the_spread_of_a_group_is_limited_by_drift_only_if_asked_for",
}

SHOWN_BY = {
    "trainer.num_steps": LEAD,
    "trainer.eval_only": f"{HUB}::test_an_evaluation_only_run_has_no_steps",
    "run.name": DIRECTORY,
    "run.root": DIRECTORY,
    "run.dir": DIRECTORY,
    "run.seed": f"{LEDGER}::test_the_seed_of_the_run_decides_what_members_sample",
    "run.device": DEVICE,
    "run.num_threads": DEVICE,
    "run.shutdown_s": f"{LAUNCH}::test_a_learner_that_ignores_termination_is_killed_after_the_time_set",
    "data.shuffle": f"{LEDGER}::test_without_shuffling_prompts_come_in_order_and_the_seed_decides_the_shuffled_order",
    "data.apply_chat_template": READS,
    "data.system_prompt": READS,
    "env.name": OTHER_TASK,
    "env.path": OTHER_TASK,
    "env.options": OTHER_TASK,
    "env.max_turns": f"{ACTOR}::test_an_endless_episode_has_the_most_turns_allowed",
    "env.step_timeout_s": f"{ACTOR}::test_a_step_may_take_as_long_as_set",
    "env.num_threads": f"{ACTOR}::test_so_many_environments_run_at_once",
    "env.on_error": BROKEN,
    "env.reward_floor": BROKEN,
    "rollout.num_prompts_per_step": LEAD,
    "rollout.num_responses_per_prompt": f"{LEDGER}::test_the_group_size_is_the_number_of_members_of_a_lease",
    "rollout.max_prompt_tokens": f"{ACTOR}::test_a_prompt_over_the_limit_is_refused",
    **{
        f"rollout.{split}.sampling.{name}": shown_by
        for split in ("train", "test")
        for name, shown_by in {
            "temperature": SPLIT_SAMPLING, "max_new_tokens": SPLIT_LIMITS, "stop": SPLIT_LIMITS,
            "ignore_eos": SPLIT_LIMITS,
        }.items()
    },
    **{f"rollout.train.sampling.{name}": TRUNCATION for name in ("top_p", "top_k", "min_p")},
    **{f"rollout.test.sampling.{name}": SPLIT_SAMPLING for name in ("top_p", "top_k", "min_p")},
    "rollout.group_policy": f"{LEDGER}::test_the_group_policy_decides_which_members_are_leased_again",
    "rollout.num_min_members": f"{LEDGER}::test_a_partial_group_is_held_if_it_has_enough_members",
    "filter.zero_std": FILTERS,
    "filter.min_std": FILTERS,
    "filter.accuracy_range": FILTERS,
    "staleness.eta": LEAD,
    "staleness.num_lookahead_groups": f"{LEDGER}::test_the_window_limits_how_many_groups_overtake_an_unfinished_one",
    "staleness.max_lag": f"{LEDGER}::test_max_lag_decides_whether_an_old_group_is_trained",
    "staleness.mode": f"{LEDGER}::test_the_mode_decides_what_happens_to_an_old_group",
    **{f"staleness.adaptive.{name}": f"{CONTROL}::{shown_by}" for name, shown_by in ADAPTIVE.items()},
    "staleness.hard_max_lag": f"{LEDGER}::test_the_mode_decides_what_happens_to_an_old_group",
    "staleness.on_stale": f"{LEDGER}::test_on_stale_decides_whether_an_old_group_is_made_again",
    "advantage.estimator": f"{OBJECTIVE}::test_reinforce_plus_plus_whitens_returns_over_the_tokens_of_the_batch",
    "advantage.baseline": f"{OBJECTIVE}::test_dr_grpo_is_mean_baseline_no_scale_and_a_constant_normalizer",
    "advantage.scale": f"{OBJECTIVE}::test_a_scale_divides_the_advantages",
    "advantage.lam": VTRACE,
    "advantage.rho_bar": VTRACE,
    "advantage.c_bar": VTRACE,
    "advantage.whiten": f"{CREDIT}::test_whitening_gives_all_tokens_of_the_batch_mean_zero_and_spread_one",
    "advantage.gamma": f"{CREDIT}::test_gamma_discounts_tokens_or_only_the_ends_of_turns",
    "advantage.discount": f"{CREDIT}::test_gamma_discounts_tokens_or_only_the_ends_of_turns",
    "advantage.rho_bar_ess_target": f"{CREDIT}::test_rho_bar_can_follow_the_effective_sample_size",
    "advantage.rho_bar_pg": f"{CREDIT}::test_rho_bar_pg_multiplies_the_own_ratio_into_the_advantage",
    "advantage.segment": f"{CREDIT}::test_segment_length_changes_the_advantages",
    "advantage.segment_tokens": f"{CREDIT}::test_segment_length_changes_the_advantages",
    "advantage.weight_cap": SIBLINGS,
    "advantage.min_ess": SIBLINGS,
    "advantage.options": f"{CREDIT}::test_an_estimators_own_constants_reach_it",
    "critic.kind": CRITIC,
    "critic.model_path": "learner/test_critic.py::test_a_critic_model_may_start_from_another_checkpoint",
    "critic.num_steps": CRITIC,
    "critic.num_warmup_steps": (
        "../flow/test_critic.py::test_only_the_critic_learns_in_its_warm_up_and_a_resumed_run_has_it_back"
    ),
    "critic.clip": "learner/test_critic.py::test_the_clip_bounds_how_far_a_value_is_pulled",
    **{f"critic.optimizer.{name}": CRITIC for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "max_grad_norm")},
    "critic.optimizer.name": CRITIC,
    "critic.optimizer.options": CRITIC,
    "loss.options": f"{GUARDS}::test_a_surrogates_own_constants_reach_it",
    "loss.anchor": f"{GUARDS}::test_an_averaged_anchor_clips_against_the_average_and_not_against_mu",
    "loss.ewma_decay": f"{GUARDS}::test_after_every_step_the_average_moves_as_far_as_its_decay_lets_it",
    "loss.correction": f"{GUARDS}::test_a_bypass_weight_is_the_truncated_sequence_ratio_on_every_token",
    "loss.veto_stat": f"{GUARDS}::test_the_veto_looks_at_any_ratio_or_at_their_mean",
    "filter.truncated": f"{SCORES}::test_truncated_trajectories_can_leave_the_loss_and_stay_in_the_baseline",
    "overlong.cache_ratio": f"{SCORES}::test_the_overlong_penalty_grows_over_the_last_tokens_that_are_allowed",
    "overlong.scale": f"{SCORES}::test_the_overlong_penalty_grows_over_the_last_tokens_that_are_allowed",
    "objectives.combine": f"{SCORES}::test_a_weighted_sum_replaces_the_reward_and_negative_weights_punish",
    "objectives.components": f"{SCORES}::test_a_weighted_sum_replaces_the_reward_and_negative_weights_punish",
    "objectives.ideal": f"{SCORES}::test_tchebycheff_aims_at_the_given_point_or_the_best_so_far",
    "objectives.reference_point": (
        f"{SCORES}::test_hypervolume_gives_a_little_to_answers_that_cover_what_others_do_not"
    ),
    "objectives.bonus": f"{SCORES}::test_pareto_takes_a_little_from_answers_that_are_dominated_in_their_group",
    "objectives.archive_size": f"{SCORES}::test_a_full_archive_drops_where_the_front_is_crowded",
    "loss.opsm_delta": f"{GUARDS}::test_sequence_masking_spares_good_trajectories_and_can_wait_for_drift",
    "loss.opsm_when": f"{GUARDS}::test_sequence_masking_spares_good_trajectories_and_can_wait_for_drift",
    "loss.zscore_bound": f"{GUARDS}::test_each_guard_removes_its_tokens_and_says_so",
    "loss.surrogate": f"{OBJECTIVE}::test_truncated_importance_sampling_by_hand",
    "loss.clip_low": CLIP,
    "loss.clip_high": CLIP,
    "loss.dual_clip": f"{LEARNER}::test_the_dual_clip_ends_the_gradient_of_bad_tokens_that_became_far_too_likely",
    "loss.cap": f"{OBJECTIVE}::test_a_cap_reaches_the_surrogate",
    "loss.veto_low": VETO,
    "loss.veto_high": VETO,
    "loss.entropy_coef": f"{OBJECTIVE}::test_the_entropy_bonus_rewards_every_token_alike",
    "loss.behavior_penalty": f"{OBJECTIVE}::test_the_behavior_penalty_adds_the_squared_log_ratio",
    "loss.avg_level": f"{OBJECTIVE}::test_the_averaging_level_decides_what_a_token_weighs",
    "loss.allow_uncorrected": (
        f"{OBJECTIVE}::test_uncorrected_reinforce_is_the_negative_control_that_ignores_the_ratio"
    ),
    "kl.mode": f"{KL}::test_a_larger_weight_keeps_the_policy_nearer_to_the_reference",
    "kl.coef": f"{KL}::test_a_larger_weight_keeps_the_policy_nearer_to_the_reference",
    "kl.cap": f"{KL}::test_the_cap_bounds_the_weight_of_the_kl_term_alone",
    "kl.allow_biased": f"{KL_OPTIONS}::test_a_loss_for_samples_of_the_policy_itself_needs_fresh_data",
    "kl.controller": f"{KL_CONTROL}::test_a_kl_above_the_target_raises_the_weight_and_one_below_lowers_it",
    "kl.options": f"{KL_CONTROL}::test_every_knob_of_a_controller_counts",
    "reference.model_path": f"{KL}::test_the_reference_is_the_start_of_the_run_unless_another_model_is_given",
    "reference.sync_every_steps": f"{KL}::test_a_synced_reference_follows_the_policy_as_often_as_set",
    "entropy.target": BONUS,
    "entropy.adapt": WIDER,
    "entropy.step": BONUS,
    "entropy.low": BONUS,
    "entropy.high": BONUS,
    "constraint.kl_limit": f"{KL}::test_a_limit_on_the_kl_pulls_back_a_policy_that_went_too_far",
    "constraint.entropy_min": f"{KL}::test_a_least_entropy_is_defended",
    "constraint.method": f"{KL_CONTROL}::test_a_pid_multiplier_answers_at_once_and_reads_its_gains",
    "constraint.options": f"{KL_CONTROL}::test_a_pid_multiplier_answers_at_once_and_reads_its_gains",
    "constraint.one_sided": (
        f"{KL_CONTROL}::test_a_one_sided_constraint_keeps_its_multiplier_but_is_silent_while_it_holds"
    ),
    "policy.model_path": (
        f"{LEARNER}::test_a_run_starts_from_the_checkpoint_it_is_given_unless_a_tiny_model_is_asked_for"
    ),
    "policy.dtype": f"{LEARNER}::test_half_precision_changes_the_scores_and_not_the_master_weights",
    "policy.gradient_checkpointing": "learner/test_packed_scoring.py::test_gradient_checkpointing_changes_no_gradient",
    "policy.optimizer.name": f"{OPTIMIZERS}::test_every_optimizer_moves_the_weights_in_its_own_way",
    "policy.optimizer.options": f"{OPTIMIZERS}::test_the_constants_of_an_optimizer_reach_it",
    "policy.optimizer.lr": OPTIMIZER,
    "policy.optimizer.beta1": OPTIMIZER,
    "policy.optimizer.beta2": OPTIMIZER,
    "policy.optimizer.eps": OPTIMIZER,
    "policy.optimizer.weight_decay": OPTIMIZER,
    "policy.optimizer.max_grad_norm": OPTIMIZER,
    "policy.scheduler.name": OPTIMIZER,
    "policy.scheduler.warmup_ratio": OPTIMIZER,
    "policy.scheduler.min_lr": OPTIMIZER,
    "policy.scheduler.ess_rule": f"{CONTROL}::test_the_rate_is_scaled_by_the_ess_of_the_batch",
    "policy.scheduler.ess_floor": f"{CONTROL}::test_the_floor_of_the_rate_is_the_one_that_is_set",
    "policy.tiny.enabled": (
        f"{LEARNER}::test_a_run_starts_from_the_checkpoint_it_is_given_unless_a_tiny_model_is_asked_for"
    ),
    "policy.tiny.hidden_size": SIZES,
    "policy.tiny.num_layers": SIZES,
    "policy.tiny.num_heads": SIZES,
    "policy.tiny.num_warm_start_steps": WARM,
    "policy.tiny.warm_start_until": (
        "learner/test_tiny_model.py::test_the_error_phase_brings_a_good_model_down_to_what_was_asked_for"
    ),
    "policy.tiny.warm_start_lr": WARM,
    "policy.tiny.cache_dir": f"{LEARNER}::test_made_models_are_cached_and_reused",
    "learner.max_tokens_per_device": f"{LEARNER}::test_the_token_budget_sets_how_many_passes_a_batch_takes",
    "learner.logprob_chunk_tokens": (
        "learner/test_logprobs.py::test_no_tensor_larger_than_a_chunk_of_logits_is_ever_made"
    ),
    "learner.rank_timeout_s": f"{LEARNER}::test_a_rank_that_waits_alone_gives_up_after_the_time_set",
    "learner.stall_report_s": f"{HUB}::test_a_wait_is_reported_only_after_the_time_set",
    "learner.stall_fail_s": f"{HUB}::test_a_stalled_run_fails_with_the_reason_unless_the_wait_is_unlimited",
    "actors.engine": f"{ACTOR}::test_the_engine_is_the_one_that_is_named",
    "actors.num_concurrent": (
        f"{ACTOR}::test_concurrency_is_the_engines_and_sets_how_many_groups_are_held"
    ),
    "actors.device": f"{ACTOR}::test_the_engine_uses_the_device_that_is_set",
    "actors.dtype": f"{ACTOR}::test_half_precision_halves_the_cache",
    "actors.num_threads": f"{ACTOR}::test_the_engine_computes_with_the_threads_that_are_set",
    "actors.on_install": f"{ACTOR}::test_on_install_chooses_the_engines_policy",
    "actors.vllm": f"{ACTOR}::test_vllm_gets_the_arguments_that_are_set_and_refuses_reserved_ones",
    "actors.actor_id": f"{ACTOR}::test_an_actor_takes_the_id_that_is_set",
    "actors.give_up_after_s": "transport/test_session.py::test_it_gives_up_only_when_told_to",
    "actors.relay": f"{ACTOR}::test_an_actor_asks_the_relay_that_is_set_before_the_learner",
    "actors.share_weights": f"{ACTOR}::test_actors_of_one_host_pull_a_version_once_if_they_share",
    "actors.transports": f"{ACTOR}::test_weights_come_by_a_transport_that_this_actor_may_use",
    "hub.bind": f"{HUB}::test_the_hub_listens_at_the_address_that_is_set_and_publishes_it",
    "hub.weights_port": f"{HUB}::test_weights_are_served_at_the_port_that_is_set",
    "hub.advertise": f"{HUB}::test_weights_are_offered_at_the_advertised_host",
    "hub.heartbeat_s": (
        f"{LEDGER}::test_the_heartbeat_sets_the_interval_of_an_actor_and_its_deadline_for_the_hub"
    ),
    "hub.dead_after_s": f"{LEDGER}::test_a_silent_actor_is_dead_after_the_time_set",
    "hub.lease_ttl_s": f"{LEDGER}::test_a_lease_without_progress_expires_after_the_time_set",
    "hub.num_max_attempts": f"{LEDGER}::test_a_group_is_dropped_after_so_many_failures",
    "hub.group_deadline_s": f"{LEDGER}::test_before_its_deadline_a_partial_group_waits_for_its_missing_members",
    "publish.dtype": TRAVEL,
    "publish.when": (
        f"{CONTROL}::test_on_drift_a_version_is_published_once_a_quarter_of_the_budget_is_spent_or_half_the_lead"
    ),
    "publish.bucket_bytes": TRAVEL,
    "publish.transports": f"{DEVICES}::test_weights_are_offered_in_the_ways_and_the_order_that_are_set",
    "publish.nccl_init_deadline_s": f"{DEVICES}::test_a_broadcaster_that_says_nothing_is_replaced_after_the_time_set",
    "publish.nccl_bucket_deadline_s": f"{DEVICES}::test_members_are_told_the_deadlines_that_are_set",
    "publish.num_keep_versions": f"{HUB}::test_so_many_published_versions_stay_available",
    "publish.max_bytes_per_s": f"{HUB}::test_a_bandwidth_cap_makes_actors_wait",
    "publish.delta_max_ratio": f"{HUB}::test_a_remote_actor_gets_what_changed_if_that_is_little_enough",
    "publish.probe_every": "learner/test_probe.py::test_versions_are_probed_as_often_as_set_and_first_of_all",
    "publish.probe_tolerance": f"{HUB}::test_an_actor_whose_probe_is_beyond_the_tolerance_gets_no_leases",
    "checkpoint.resume": "config/test_config.py::test_run_directories_count_up_and_resume_takes_the_newest",
    "checkpoint.export_hf": "../flow/test_launch.py::test_a_launched_run_trains_and_leaves_a_report_and_a_model",
    "checkpoint.num_keep": "learner/test_checkpoint.py::test_only_the_newest_few_stay_and_drafts_go",
    "eval.every_steps": EVALS,
    "eval.num_samples": EVALS,
    "tracking.project": TRACKER,
    "tracking.trackers": OWN_TRACKER,
    "tracking.options": OWN_TRACKER,
    "tracking.wandb.enabled": TRACKER,
    "tracking.wandb.mode": TRACKER,
    "launch.num_actors": f"{LAUNCH}::test_launch_starts_so_many_actors_and_passes_them_their_own_settings",
    "launch.num_learner_ranks": f"{LAUNCH}::test_launch_starts_so_many_learner_ranks",
    "launch.num_max_restarts": f"{LAUNCH}::test_a_crashing_actor_is_restarted_as_often_as_set",
}


@cache
def marked() -> frozenset[str]:
    """Settings that tests below this directory are marked with."""
    marks = [
        mark for path in UNIT.rglob("test_*.py") for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for mark in node.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.shows"
    ]
    return frozenset(ast.literal_eval(name) for mark in marks for name in mark.args)


@cache
def named_tests(file: str) -> frozenset[str]:
    """Names of the test functions of a file below this directory."""
    tree = ast.parse((UNIT / file).read_text())
    return frozenset(
        node.name for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )


def test_the_list_and_the_marks_name_every_setting_and_no_other():
    assert SHOWN_BY.keys() | marked() == {name for name, _, _, _ in settings()}
    assert not SHOWN_BY.keys() & marked()


@pytest.mark.parametrize("shown_by", sorted(set(SHOWN_BY.values())))
def test_the_test_that_shows_it_exists(shown_by):
    file, _, name = shown_by.partition("::")
    assert name in named_tests(file), f"{file} has no test {name}"
