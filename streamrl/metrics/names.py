"""Every metric: its key, unit, how it is reduced over micro-batches and ranks, and what it means in one sentence.

A key that is not here cannot be logged, so this list, and the page generated from it, stays complete. Families end
in `/*` and hold the keys whose last part comes from data: a task's reward parts, the hub's counters, refusal reasons.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

ARRIVED = "arrived_"
"""Prefix of the hub's sums over what arrived: a row of metrics holds the means of its step, not the sums."""


class Reduction(Enum):
    """The reduction of one step's values to one number; all but `last` work on sums and counts, never on means."""

    mean = "mean"  # sum of value * weight over sum of weight
    sum = "sum"
    max = "max"
    last = "last"  # the newest value; of several ranks, the lowest rank's
    std = "std"  # population standard deviation, from count, sum and sum of squares
    ess = "ess"  # (sum w)^2 / (n * sum w^2), the normalized effective sample size
    histogram = "histogram"  # count per integer bin
    mean_by_bin = "mean by bin"  # weighted mean per integer bin
    percentile = "percentile"  # derived from a histogram when the step ends; cannot be added to


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the list; `key` ends in `/*` for a family.

    `needs` names the condition in `NEEDS` under which a run writes it; empty: every run does.
    """

    key: str
    unit: str
    reduction: Reduction
    meaning: str
    needs: str = ""


def section(*rows: tuple[str, ...], needs: str = "") -> list[Metric]:
    """Rows of key, unit, reduction, meaning and perhaps a condition; `needs` is that of the rows without one."""
    return [
        Metric(key, unit, Reduction(reduction), meaning, condition[0] if condition else needs)
        for key, unit, reduction, meaning, *condition in rows
    ]


NEEDS = {
    "eval": "`eval.num_samples` > 0",
    "responses": "`eval.num_responses` > 1",
    "archive": "evaluation, and two or more `objectives.components`",
    "hypervolume": "the same, and `objectives.reference_point` of two to four",
    "audit": "`trust.audit_share` > 0, in steps with audited tokens",
    "siblings": "`rollout.num_responses_per_prompt` > 1",
    "reweight": "`staleness.mode=reweight`",
    "mask_old": "`staleness.mode=mask_old_tokens`",
    "sets": "`rollout.train.sampling.top_p`, `top_k` or `min_p`",
    "trace": "an estimator with token traces",
    "critic": "an estimator with a critic",
    "rho_bar": "`advantage.rho_bar_ess_target`",
    "veto": "`loss.veto_low`, `loss.veto_high` or `loss.veto_kl`",
    "opsm": "`loss.opsm_delta`",
    "zscore": "`loss.zscore_bound`",
    "correction": "`loss.correction`",
    "gradient_cosine": "`learner.gradient_cosine`",
    "stop_kl": "`learner.stop_kl`",
    "kl": "`kl.mode`",
    "reference": "`kl.mode` or `constraint.kl_limit`",
    "distill": "`distill.teacher`",
    "supervised": "`streamrl sft`, `dpo` or `train-reward-model`; not all of them",
    "entropy_bonus": "`loss.entropy_coef` > 0 or `entropy.adapt=coef`",
    "clip_high": "`entropy.adapt=clip_high`",
    "shadow": "`shadow.algorithms`",
    "gpu": "a learner on a GPU",
    "gpu_transport": "`nccl` or `ipc` in `publish.transports`",
}
"""Conditions on the settings of a run, in words; tests/contract/conditions.py has them as code, for launched runs."""

_OF_HUB = section(
    ("hub/num_actors", "actors", "last", "Connected actors."),
    ("hub/num_groups_queued", "groups", "last", "Finished groups that wait to be trained on."),
    ("hub/num_leases_open", "leases", "last", "Leases at the actors now."),
    ("hub/num_groups_leased", "groups", "last", "Leases granted since the hub began."),
    ("hub/num_groups_accepted", "groups", "last", "Groups accepted since the hub began."),
    ("hub/num_groups_trained", "groups", "last", "Groups trained on since the hub began."),
    ("hub/num_groups_stale", "groups", "last", "Groups refused for their lag since the hub began."),
    ("hub/num_duplicates_dropped", "groups", "last", "Repeated deliveries dropped since the hub began."),
    ("hub/num_leases_reissued", "leases", "last", "Leases given to another actor since the hub began."),
    ("hub/num_leases_retried", "leases", "last", "Of those, because episodes failed in their environment."),
    ("hub/num_episodes_failed", "episodes", "last", "Episodes that failed in their environment, in either split."),
    ("hub/sandbox_level", "level", "last", "Lowest sandbox level of any actor; 0: no programs ran."),
    ("hub/num_actor_restarts", "actors", "last", "New incarnations of known actors since the hub began."),
    ("hub/num_installs", "installs", "last", "Versions that actors made live since the hub began."),
    ("hub/num_install_failures", "installs", "last", "Versions that actors refused since the hub began."),
    ("hub/num_installs_shm", "installs", "last", "Of those, by shared memory."),
    ("hub/num_installs_zmq", "installs", "last", "Of those, by a full pull."),
    ("hub/num_installs_zmq_delta", "installs", "last", "Of those, by a pull of what had changed."),
    ("hub/num_installs_nccl", "installs", "last", "Of those, by broadcast between GPUs."),
    ("hub/num_installs_ipc", "installs", "last", "Of those, through IPC buffers on the learner's GPU."),
    ("hub/num_installs_other", "installs", "last", "Of those, over a transport of the user's own."),
    ("hub/num_installs_same", "installs", "last", "Of those, without a transfer: the actor had the bytes."),
    ("hub/num_bytes_pulled", "bytes", "last", "Bytes of weights and model files served by the weight socket."),
    ("hub/num_probes", "probes", "last", "Comparisons of engines with the published weights since the hub began."),
    ("hub/num_probe_failures", "probes", "last", "Comparisons that failed and put the actor in quarantine."),
    ("hub/num_quarantined", "actors", "last", "Actors without leases because their engine failed its last probe."),
    ("hub/probe_mean_difference", "nats", "last", "Worst mean log-prob difference from the learner, last probe."),
    ("hub/probe_largest_difference", "nats", "last", "Worst actor's largest log-prob difference, last probe."),
    ("hub/num_shut_out", "actors", "last", "Actors shut out for what they delivered, since the hub began."),
    ("hub/num_groups_distrusted", "groups", "last", "Their groups that were generated again, since the run began."),
    ("hub/num_tokens_audited", "tokens", "last", "Tokens scored by the version that they name, since the hub began."),
    ("hub/num_tokens_redrawn", "tokens", "last", "Of those, tokens compared with what their seeds draw."),
    ("hub/audit_mean_difference", "nats", "last", "Of them, the mean |log-ratio|; the worst of the actors now there."),
    ("hub/tokens_generated", "tokens", "last", "Action tokens generated by all actors since the hub began."),
    ("hub/eta", "batches", "last", "Allowed lead of generation, as the hub grants it."),
    ("hub/max_lag", "steps", "last", "Bound on the head lag, as the hub applies it."),
    ("hub/num_groups_drawn", "groups", "last", "Groups drawn from the stream of prompts since the run began."),
    ("hub/num_groups_ready", "groups", "last", "Groups that wait for an actor."),
    ("hub/num_groups_in_batch", "groups", "last", "Groups in the batch that is trained on now."),
    ("hub/num_groups_completed", "groups", "last", "Groups with all members, before filters, since the run began."),
    ("hub/num_groups_zero_std", "groups", "last", "Of those, groups of several whose rewards are all equal."),
    ("hub/num_groups_filtered", "groups", "last", "Of those, groups that a filter dropped."),
    ("hub/num_groups_dropped", "groups", "last", "Groups that ended untrained, for any reason, since the run began."),
    ("hub/num_groups_partial", "groups", "last", "Groups taken with members missing, since the run began."),
    ("hub/num_groups_overdue", "groups", "last", "Attempts ended by hub.group_deadline_s, since the run began."),
    ("hub/num_groups_quarantined", "groups", "last", "Groups of steps that were not finite, since the run began."),
    ("hub/num_lag_violations", "trajectories", "last", "Trajectories trained beyond the bound; 0, or it is a bug."),
    ("hub/num_members_accepted", "trajectories", "last", "Trajectories accepted since the run began."),
    ("hub/num_members_aborted", "trajectories", "last", "Trajectories without a result since the run began."),
    ("hub/num_tokens_accepted", "tokens", "last", "Action tokens accepted since the run began."),
    ("hub/num_tokens_stale", "tokens", "last", "Action tokens refused for their lag since the run began."),
    ("hub/num_tokens_discarded", "tokens", "last", "Accepted action tokens thrown away since the run began."),
    ("hub/num_repeats", "groups", "last", "Messages sent again and answered again since the run began."),
    ("hub/num_evictions", "actors", "last", "Actors cut off since the run began."),
    ("hub/num_evictions_for_strikes", "actors", "last", "Actors cut off for wrong messages since the hub began."),
    ("hub/num_leases_expired", "leases", "last", "Leases that made no progress, since the run began."),
    ("hub/num_leases_lost", "leases", "last", "Leases that their actor no longer knew, since the run began."),
    ("hub/num_groups_refused_on_resume", "groups", "last", "Groups of checkpoints that could not be trained any more."),
    ("hub/lost_on_crash", "leases", "last", "Leases of a learner before this one, whose actor did not come back."),
    ("hub/num_eval_leases", "leases", "last", "Evaluation leases granted since the run began."),
    ("hub/num_eval_groups", "prompts", "last", "Evaluation prompts answered since the run began."),
    ("hub/num_eval_discarded", "answers", "last", "Answers that another version than the pinned one had a part in."),
    ("hub/num_evals_started_again", "evaluations", "last", "Evaluations whose pinned version no actor had any more."),
    ("hub/num_rejected_duplicate", "groups", "last", "Groups refused since the run began: delivered before."),
    ("hub/num_rejected_stale", "groups", "last", "The same: too old."),
    ("hub/num_rejected_version", "groups", "last", "The same: sampled by a version off the surviving history."),
    ("hub/num_rejected_fenced", "groups", "last", "The same: from a process that has been replaced."),
    ("hub/num_rejected_malformed", "groups", "last", "The same: breaks a rule of the protocol."),
    ("hub/num_rejected_no_lease", "groups", "last", "The same: without a lease."),
    ("hub/num_rejected_oversize", "groups", "last", "The same: too large."),
    ("hub/num_rejected_finished", "groups", "last", "The same: the group has ended."),
    ("hub/num_connections_ended", "connections", "last", "Connections that did not say who they are, and were ended."),
    ("hub/num_sends_refused", "messages", "last", "Messages dropped because an actor reads too slowly."),
    ("hub/num_sends_unreachable", "messages", "last", "Messages dropped because an actor was gone."),
    ("hub/num_failed_publishes", "versions", "last", "Versions that could not be published."),
    ("hub/mean_transfer_s", "s", "last", "Transfer of a version to an actor, mean over all installs."),
    ("hub/mean_verify_s", "s", "last", "Checking the digests of a version, mean over all installs."),
    ("hub/actor_s", "s", "last", "Time of all actors together, from when each was ready, since the hub began."),
    ("hub/actor_idle_s", "s", "last", "Of that, time in which an actor's engine had no sequence to run."),
    ("hub/actor_starved_s", "s", "last", "Of that, time in which an actor had no episode: it waited for leases."),
    ("hub/actor_paused_s", "s", "last", "Of hub/actor_s, time in which an install kept an engine from generating."),
    ("hub/episode_generation_s", "s", "last", "Time of all episodes together in the engines since the hub began."),
    ("hub/episode_environment_s", "s", "last", "The same in their environments, waiting for a thread included."),
    ("hub/actor_cpu_percent", "%", "last", "CPU use of the busiest actor's host."),
    ("hub/actor_memory_percent", "%", "last", "Memory in use on the fullest actor's host."),
    ("hub/actor_rss_bytes", "bytes", "last", "Resident memory of the largest actor."),
    ("hub/actor_gpu_percent", "%", "last", "Use of the busiest actor's GPU in the last ten seconds; 0 without one."),
    ("hub/actor_gpu_used_bytes", "bytes", "last", "Memory in use on the fullest GPU of an actor; 0 without one."),
    ("hub/actor_given_back_bytes", "bytes", "last", "Most that an engine gave back for this turn; 0 without turns."),
    ("hub/env_step_p95_s", "s", "last", "95th percentile of an actor's recent environment steps; the slowest actor."),
) + section(
    ("hub/num_nccl_epochs", "epochs", "last", "Communicators formed and tested since the hub began."),
    ("hub/num_nccl_broadcasts", "versions", "last", "Versions broadcast to a whole communicator."),
    ("hub/num_nccl_given_up", "versions", "last", "Versions to be broadcast that every member pulled instead."),
    ("hub/num_sender_restarts", "processes", "last", "Broadcaster processes that died or hung and were replaced."),
    ("hub/num_abandoned_threads", "threads", "last", "Actors' threads that are stuck in a call of NCCL now."),
    needs="gpu_transport",
) + section(
    ("hub/*", "count", "last", "Errors and refusals, counted by kind from the first on."),
)
SECTIONS: dict[str, list[Metric]] = {
    "Run": section(
        ("run/version", "steps", "last", "Optimizer steps done after this step."),
        ("run/epoch", "restarts", "last", "Learner epoch: how often this run was resumed."),
        ("run/wall_s", "s", "last", "Wall time since the run began, resumed parts included."),
        ("run/trained_tokens", "tokens", "last", "Action tokens trained on since the run began."),
    ),
    "Reward and advantage": section(
        ("reward/mean", "reward", "mean", "Reward of a trajectory that came in this step, before any filter."),
        ("reward/std", "reward", "std", "Spread of these rewards."),
        ("reward/num", "trajectories", "sum", "Trajectories that came in this step: one step may have 1, another 255."),
        ("reward/recent", "reward", "last", "Mean reward of the last 256 trajectories that came, or of all so far."),
        ("score/recent", "score", "last", "Mean score of these."),
        ("score/mean", "score", "mean", "Score of a trajectory that came in this step, before any filter."),
        ("group/zero_std_fraction", "fraction", "mean", "Completed groups with equal rewards, before any filter."),
        ("reward/trained", "reward", "mean", "Reward of a trajectory of the trained batch, after all filters."),
        ("score/trained", "score", "mean", "Score of a trajectory of the trained batch, after all filters."),
        ("group/zero_std_trained", "fraction", "mean", "Groups of the trained batch whose rewards are all equal.",
         "siblings"),
        ("group/alone_fraction", "fraction", "mean",
         "Trajectories that are alone in their group, compared with the whole batch; with `advantage.by=agent` the "
         "same of each agent, compared with itself elsewhere in the batch."),
        ("group/filtered_fraction", "fraction", "mean", "Dropped by a filter, of the groups trained, filtered, too old "
                                                        "or failed in this step."),
        ("group/stale_fraction", "fraction", "mean", "Refused because of their lag, of the same groups."),
        ("group/failed_fraction", "fraction", "mean", "With an episode that failed, of the same groups."),
        ("advantage/mean", "reward", "mean", "Advantage of a trained token."),
        ("advantage/std", "reward", "std", "Spread of the advantages of trained tokens."),
        ("reward/*", "reward", "mean", "A named part of the reward, as the task reports it, of the trained batch."),
        ("arrived/*", "reward", "mean", "The same of trajectories that came in this step, before any filter."),
    ),
    "Trajectories": section(
        ("rollout/response_tokens/train", "tokens", "mean", "Action tokens of a trained trajectory."),
        ("rollout/length_clip_ratio/train", "fraction", "mean", "Trained trajectories cut by a length or turn limit."),
        ("rollout/num_turns/train", "turns", "mean", "Turns of a trained trajectory."),
        ("rollout/temperature", "temperature", "mean", "Of a trajectory that came in this step, before any filter."),
        ("rollout/set_size", "tokens", "mean", "Tokens that top_p, top_k and min_p left to draw a token from.", "sets"),
        ("rollout/set_size_max", "tokens", "max", "The most of them; at `max_kept` this bound cuts too.", "sets"),
        ("rollout/sequences_per_trajectory", "sequences", "mean",
         "Sequences of a trained trajectory; more than one where the history was rewritten."),
    ),
    "Evaluation": section(
        ("eval/score", "score", "last", "Mean score over the held-out prompts and their answers."),
        ("eval/score_stderr", "score", "last", "Standard error of this mean, over prompts."),
        ("eval/pass_at_1", "fraction", "last", "Chance that one answer is right (`eval.solved_score`).", "responses"),
        ("eval/pass_at_1_stderr", "fraction", "last", "Its standard error, over prompts.", "responses"),
        ("eval/pass_at_k", "fraction", "last", "Chance that one of `eval.num_responses` answers is.", "responses"),
        ("eval/pass_at_k_stderr", "fraction", "last", "Its standard error, over prompts.", "responses"),
        ("eval/maj_at_k", "score", "last", "Score of the most frequent of these answers.", "responses"),
        ("eval/maj_at_k_stderr", "score", "last", "Its standard error, over prompts.", "responses"),
        ("eval_parts/*", "score", "last", "A named part of the reward or score, as the task reports it."),
        ("eval/reward", "reward", "last", "Mean reward over the held-out prompts."),
        ("eval/response_tokens", "tokens", "last", "Mean length of the answers."),
        ("eval/truncated_fraction", "fraction", "last", "Answers cut by a length or turn limit."),
        ("eval/num_turns", "turns", "last", "Mean number of turns of an answer's episode."),
        ("eval/num_prompts", "prompts", "last", "Held-out prompts of this evaluation."),
        ("eval/version", "steps", "last", "Version that answered; with `eval.pin=false` the oldest that could."),
        ("eval/*/*", "as above", "last", "The keys above, of a set of `eval.datasets` by its name: `eval/NAME/score`.",
         ""),
        ("objective/archive_size", "evaluations", "last", "Evaluations on the Pareto front.", "archive"),
        ("objective/*", "score", "last", "Best, worst and mean of a component on the front, as NAME_best and so on.",
         "archive"),
        ("objective/hypervolume", "volume", "last", "Volume that the front covers.", "hypervolume"),
        needs="eval",
    ),
    "Lag": section(
        ("lag/head_mean", "steps", "mean", "Head lag of a trajectory: the lag of its oldest token."),
        ("lag/token_mean", "steps", "mean", "Version at training minus the version that sampled the token."),
        ("lag/span", "steps", "mean", "Newest minus oldest version within one trajectory."),
        ("lag/queue", "steps", "mean", "Part of the head lag that passed after the trajectory was finished."),
        ("lag/flight", "steps", "mean", "Part of the head lag that passed while it was generated."),
        ("lag/group_spread", "steps", "mean", "Largest minus smallest head lag within one group."),
        ("lag/head_groups", "groups", "mean", "Head lag counted in groups consumed since the oldest token."),
        ("lag/head_max", "steps", "max", "Largest head lag in the batch; the lag bound is about this number."),
        ("lag/token_max", "steps", "max", "Largest lag of a trained token."),
        ("lag/head", "trajectories", "histogram", "Trajectories by head lag."),
        ("lag/token", "tokens", "histogram", "Trained tokens by lag."),
        ("lag/token_p50", "steps", "percentile", "Median lag of the trained tokens."),
        ("lag/token_p99", "steps", "percentile", "99th percentile of the lag of the trained tokens."),
        ("lag/weight", "factor", "mean", "Factor on token losses for their lag.", "reweight"),
    ),
    "Off-policy statistics and control": section(
        ("ess/token", "fraction", "ess", "Effective sample size of the token ratios, 1 on policy."),
        ("ess/token_clipped", "fraction", "ess", "The same with ratios cut at 2."),
        ("ess/sequence", "fraction", "ess", "Effective sample size of the whole-trajectory ratios."),
        ("ess/sequence_clipped", "fraction", "ess", "The same with ratios cut at the cap."),
        ("ess/kept_fraction", "fraction", "mean", "Tokens that entered the effective sample size."),
        ("ratio/mean_token", "ratio", "mean", "Policy over recorded behavior probability per token; near 1."),
        ("ratio/mean_sequence", "ratio", "mean", "The same per trajectory; near 1."),
        ("ratio/share_truncated", "fraction", "mean", "Token ratios above the cap."),
        ("ratio/share_at_bound", "fraction", "mean", "Log-ratios at the numerical clamp; should be 0."),
        ("drift/m2", "nats^2", "mean", "Mean squared log-ratio per token."),
        ("drift/k1", "nats", "mean", "KL estimate k1 of policy and behavior, per token."),
        ("drift/k3", "nats", "mean", "KL estimate k3 of policy and behavior, per token."),
        ("drift/mismatch", "nats^2", "mean", "Mean squared log-ratio at lag 0: the engines' disagreement."),
        ("drift/audited_engine", "nats^2", "mean", "Mean squared log-ratio of audited tokens, between the version "
                                                   "that sampled and the record.", "audit"),
        ("drift/audited_policy", "nats^2", "mean", "The same of the policy to the version that sampled.", "audit"),
        ("clip/positive", "fraction", "mean", "Clipped share of the tokens with a positive advantage."),
        ("clip/negative", "fraction", "mean", "Clipped share of the tokens with a negative advantage."),
        ("ratio/max", "ratio", "max", "Largest token ratio of the batch."),
        ("drift/m2_by_lag", "nats^2", "mean by bin", "Mean squared log-ratio per token, for each lag."),
        ("drift/exponent", "power", "last", "Fitted p of m2 = s0 + a * lag^p."),
        ("drift/oscillation", "fraction", "last", "How far m2 at the current lag is below its peak; high: overshoot."),
        ("lr/scale", "factor", "last", "Factor on the learning rate from the staleness control."),
        ("control/eta", "batches", "last", "Current allowed lead of generation over training."),
        ("control/max_lag", "steps", "last", "Current bound on the head lag."),
        ("control/mode", "state", "last", "Circuit breaker: 0 normal, 1 cautious, 2 drain."),
    ) + section(
        ("trace/length", "tokens", "mean", "Effective length of the traces."),
        ("trace/fraction", "fraction", "mean", "Trace length over (T + 1) / 2, its value without any cut."),
        ("keep/veto", "fraction", "mean", "Tokens removed by the ratio veto.", "veto"),
        ("keep/opsm", "fraction", "mean", "Tokens removed by off-policy sequence masking.", "opsm"),
        ("keep/zscore", "fraction", "mean", "Harmful tokens whose lag does not explain their log-ratio.", "zscore"),
        ("keep/rejected", "fraction", "mean", "Tokens removed by rejection rules.", "correction"),
        ("keep/lag", "fraction", "mean", "Tokens masked because of their lag.", "mask_old"),
        ("control/rho_bar", "ratio", "last", "Cap of V-trace's ratio, chosen for its ESS.", "rho_bar"),
        needs="trace",
    ),
    "Training": section(
        ("policy/loss", "loss", "mean", "Policy loss per trained token."),
        ("policy/clip_fraction", "fraction", "mean", "Tokens whose gradient the trust region removed."),
        ("entropy/mean", "nats", "mean", "Entropy of the policy, per token."),
        ("length/consumed", "tokens", "mean", "Action tokens of a trajectory trained on."),
        ("length/dispatched", "tokens", "mean", "Action tokens of a trajectory that came back, trained on or not."),
        ("length/dispatched_truncated_fraction", "fraction", "mean", "Of those that came back, cut by a limit."),
        ("length/truncated_fraction", "fraction", "mean", "Trained trajectories cut by a limit."),
        ("policy/grad_norm", "norm", "last", "Global gradient norm before clipping."),
        ("policy/grad_cosine", "cosine", "last", "Cosine of the gradient to that of the optimizer step before; of a "
                                                 "batch of several steps, their mean.", "gradient_cosine"),
        ("policy/lr", "rate", "last", "Learning rate of the policy."),
        ("constraint/*", "multiplier", "last", "Multiplier of a named constraint; NAME_satisfied is 1 if it "
                                                "holds, NAME_violation by how much this step breaks it, "
                                                "NAME_violation_mean and NAME_num_violations of the run so far."),
        ("policy/num_tokens", "tokens", "sum", "Action tokens trained on in this step."),
        ("policy/num_trajectories", "trajectories", "sum", "Trajectories trained on in this step."),
        ("policy/num_groups", "groups", "sum", "Groups trained on in this step."),
        ("policy/left_out_fraction", "fraction", "mean", "Action tokens without a pass, because they cannot move a "
                                                         "gradient (`learner.skip_zero_advantage`): ratios, drift, "
                                                         "ESS and entropy are of the others."),
        ("policy/shared_fraction", "fraction", "mean", "Tokens without a pass of their own, because another answer to "
                                                       "the same prompt, or another prompt, begins with them "
                                                       "(`learner.share_prompts`)."),
        ("policy/num_microbatches", "micro-batches", "sum", "Micro-batches of this step, over all ranks."),
        ("policy/num_split_microbatches", "splits", "sum", "Micro-batches that did not fit into memory, split in two."),
        ("policy/num_skipped_steps", "steps", "sum", "1 if the step was skipped for a non-finite loss or gradient."),
        ("policy/num_steps_left_out", "steps", "sum", "Optimizer steps that `learner.stop_kl` left out.", "stop_kl"),
    ) + section(
        ("kl/value", "nats", "mean", "KL to the reference model, per token."),
        ("kl/clamped_fraction", "fraction", "mean", "Tokens whose reference log-ratio was clamped."),
        ("kl/coef", "coefficient", "last", "Weight of the KL term.", "kl"),
        ("entropy/coef", "coefficient", "last", "Weight of the entropy bonus.", "entropy_bonus"),
        ("clip/high", "ratio", "last", "Upper clip distance, if an entropy target moves it.", "clip_high"),
        needs="reference",
    ) + section(
        ("distill/kl", "nats", "mean", "KL to the teacher, per token."),
        ("distill/clamped_fraction", "fraction", "mean", "Tokens whose log-ratio to the teacher was clamped."),
        needs="distill",
    ) + section(
        ("critic/loss", "loss", "mean", "Value loss, averaged by `critic.avg_level`."),
        ("critic/grad_norm", "norm", "last", "Global gradient norm of the critic before clipping."),
        ("critic/lr", "rate", "last", "Learning rate of the critic."),
        ("critic/explained_variance", "fraction", "last", "Share of the targets' variance that the critic explains."),
        ("critic/value_error", "reward^2", "last", "Mean squared distance of the values from their targets."),
        ("critic/return_variance", "reward^2", "last", "Variance of the recorded returns."),
        ("critic/clip_fraction", "fraction", "last", "Values that moved further than `critic.clip` in the update."),
        ("critic/return_explained_variance", "fraction", "last", "The same of the variance of the recorded returns."),
        needs="critic",
    ),
    "Supervised training": section(
        ("supervised/loss", "loss", "last", "Loss of the step's records: per token (SFT) or per pair."),
        ("supervised/held_out_loss", "loss", "last", "The same of the held-out records."),
        ("supervised/accuracy", "fraction", "last", "Pairs whose chosen answer has the greater reward."),
        ("supervised/held_out_accuracy", "fraction", "last", "The same of the held-out pairs."),
        ("supervised/chosen_reward", "reward", "last", "Reward of a chosen answer; of DPO, beta times its log-ratio."),
        ("supervised/rejected_reward", "reward", "last", "The same of a rejected answer."),
        ("supervised/margin", "reward", "last", "Their difference."),
        ("supervised/num_dropped", "records", "last", "Records of the step that leave nothing to train on."),
        needs="supervised",
    ),
    "Shadow algorithms": section(
        ("shadow/grad_norm", "norm", "last", "Norm of the gradient of the policy loss with respect to the log-probs of "
                                             "tokens, of the algorithm in use, at the first optimizer step."),
        ("shadow/cosine", "cosine", "last", "Cosine of this gradient to that of the algorithm in use; 1 for itself."),
        ("shadow/kept_fraction", "fraction", "last", "Tokens that no mask removes."),
        ("shadow/clip_fraction", "fraction", "last", "Tokens whose gradient the trust region removes or bounds."),
        ("shadow/grad_norm_by_lag", "norm", "mean by bin", "The same by lag; a bin holds lags up to the next one's."),
        ("shadow/cosine_by_lag", "cosine", "mean by bin", "The same by lag."),
        ("shadow/kept_fraction_by_lag", "fraction", "mean by bin", "The same by lag."),
        ("shadow/clip_fraction_by_lag", "fraction", "mean by bin", "The same by lag."),
        ("shadow/*/*", "as above", "last", "The keys above, of an algorithm of `shadow.algorithms`: "
                                           "`shadow/NAME/cosine`."),
        needs="shadow",
    ),
    "Time": section(
        ("time/step_s", "s", "max", "The whole step, waiting included; the slowest rank."),
        ("time/wait_s", "s", "max", "The learner waited for a batch."),
        ("time/pack_s", "s", "max", "Decoding and packing of the batch."),
        ("time/score_s", "s", "max", "The scoring pass before the first gradient, for losses that need one."),
        ("time/forward_backward_s", "s", "max", "Forward and backward passes of the policy."),
        ("time/optimizer_s", "s", "max", "Gradient clipping and the optimizer step."),
        ("time/critic_s", "s", "max", "Update of the critic."),
        ("time/publish_s", "s", "max", "Wait for the new version: writing it, or copying it to be written later."),
        ("time/checkpoint_s", "s", "max", "The part of saving that blocked the loop."),
        ("time/eval_s", "s", "max", "Evaluation that blocked the loop."),
        ("time/install_s", "s", "mean", "An actor's time from announcement to live weights."),
        ("time/install_pause_s", "s", "mean", "The part of an install in which the actor generated nothing."),
        ("time/visible_s", "s", "mean", "From the end of publishing until an actor generates with the version."),
        ("time/learner_idle_fraction", "fraction", "last", "Waiting share of the learner's step."),
        ("time/actor_idle_fraction", "fraction", "last", "Share of time in which an engine had no sequence to run."),
        ("time/actor_starved_fraction", "fraction", "last", "Share of time in which an actor had no lease to work on."),
        ("time/actor_install_fraction", "fraction", "last", "Share of time in which an install paused an engine."),
        ("time/environment_fraction", "fraction", "last", "Share of the episodes' time that passed in environments."),
    ),
    "Throughput": section(
        ("throughput/train_tokens_per_s", "tokens/s", "last", "Action tokens trained on per second of this step."),
        ("throughput/generate_tokens_per_s", "tokens/s", "last", "Action tokens generated per second by all actors."),
        ("throughput/trajectories_per_s", "trajectories/s", "last", "Trajectories trained on per second of this step."),
        ("throughput/published_bytes", "bytes", "last", "Size of the newest published version."),
        ("throughput/wire_bytes_per_token", "bytes/token", "last", "Bytes on the wire for an action token."),
        ("actors/*", "tokens/s", "last", "Action tokens per second of an actor, by its id; of the first 32."),
    ),
    "Hub": _OF_HUB,
    "Dropped": section(
        ("dropped/stale", "groups", "sum", "Beyond the lag bound."),
        ("dropped/version", "groups", "sum", "Sampled by a version that is not on the surviving history."),
        ("dropped/zero_std", "groups", "sum", "All rewards equal."),
        ("dropped/accuracy", "groups", "sum", "Mean score outside the accuracy filter."),
        ("dropped/overlong", "groups", "sum", "Prompts longer than rollout.max_prompt_tokens."),
        ("dropped/nonfinite_logprob", "groups", "sum", "A recorded log-probability was not finite."),
        ("dropped/duplicate", "groups", "sum", "Delivered more than once."),
        ("dropped/cancelled", "groups", "sum", "Cancelled in flight because of their lag."),
        ("dropped/*", "count", "sum", "Dropped in this step for another named reason."),
    ),
    "Process": section(
        ("system/cpu_percent", "%", "max", "CPU use of the learner's host."),
        ("system/learner_cpu_percent", "%", "max", "CPU use of a learner rank; 100 is one core."),
        ("system/memory_percent", "%", "max", "Memory in use on the learner's host."),
        ("system/rss_bytes", "bytes", "max", "Resident memory of a learner rank."),
        ("meter/num_nonfinite", "values", "sum", "Values refused by the meter because they were not finite."),
    ) + section(
        ("system/gpu_reserved_bytes", "bytes", "max", "Reserved GPU memory per rank."),
        ("system/gpu_allocated_bytes", "bytes", "max", "Peak allocated GPU memory of a rank in this step."),
        ("system/gpu_percent", "%", "max", "Use of a learner rank's GPU in the last ten seconds."),
        needs="gpu",
    ),
}
METRICS: dict[str, Metric] = {metric.key: metric for rows in SECTIONS.values() for metric in rows}

_LAST_PART = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


def lookup(key: str) -> Metric:
    """The metric that `key` names: itself, or the family that it belongs to.

    Raises:
        KeyError: no such metric. This is a programming error: add it to `streamrl/metrics/names.py`.
    """
    found = METRICS.get(key)
    if found is not None:
        return found
    head, _, last = key.partition("/")
    family = METRICS.get(f"{head}/*")
    if family is not None and _LAST_PART.fullmatch(last):
        return family
    name, _, last = last.partition("/")
    family = METRICS.get(f"{head}/*/*")
    if family is not None and _LAST_PART.fullmatch(name) and f"{head}/{last}" in METRICS:
        return replace(family, reduction=METRICS[f"{head}/{last}"].reduction)
    raise KeyError(f"Unknown metric {key!r}: add it to streamrl/metrics/names.py with unit, reduction and meaning.")


def member(family: str, name: str) -> str:
    """The key of `name`, a text from data, in `family`: `member("reward", "format ok")` is `reward/format_ok`.

    Raises:
        KeyError: there is no such family.
    """
    if f"{family}/*" not in METRICS:
        known = ", ".join(key[:-2] for key in METRICS if key.count("*") == 1)
        raise KeyError(f"{family!r} is not a family of metrics; choose from {known}.")
    return f"{family}/{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:64] or 'unnamed'}"


def of_set(key: str, dataset: str) -> str:
    """The key of a named one: `eval/score` is `eval/gsm8k/score` of the set gsm8k; of the run's own it stays."""
    head, _, last = key.partition("/")
    return f"{head}/{dataset}/{last}" if dataset else key


def _only_with(metric: Metric) -> str:
    return f" Only with {NEEDS[metric.needs]}." if metric.needs else ""


def markdown_page() -> str:
    """The page `metrics.md` of the site."""
    parts = [
        "# All metrics\n",
        "Every line of `metrics.jsonl` is one object: `step`, and the keys below that were measured in that step. This",
        "page is made from `streamrl/metrics/names.py` (`python -m streamrl.metrics.names`). Start with",
        "[five of them](report.md#five-metrics-to-watch).\n",
        "Means are sums over counts, reduced over all micro-batches and ranks before the division. Values that are not",
        "finite are left out and counted in `meter/num_nonfinite`. Histograms are objects from bin to count. Keys that",
        "end in `/*` are families: the task, the settings or the hub say what `*` stands for. A run writes every",
        "key of this page, except those that name the settings they need; a line leaves out what its step did not",
        "measure.\n",
        "Each line also goes to the trackers of `tracking.trackers`: `wandb`, or your own as `package.module:factory`,",
        "a function that takes a `streamrl.metrics.sinks.TrackedRun` and returns a `Sink`.",
    ]
    for title, rows in SECTIONS.items():
        parts += [f"\n## {title}\n", "| key | unit | reduction | meaning |", "|---|---|---|---|"]
        parts += [f"| `{m.key}` | {m.unit} | {m.reduction.value} | {m.meaning}{_only_with(m)} |" for m in rows]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(markdown_page(), end="")
