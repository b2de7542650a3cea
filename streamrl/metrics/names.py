"""Every metric: its key, unit, how it is reduced over micro-batches and ranks, and what it means in one sentence.

A key that is not here cannot be logged, so this list, and the page generated from it, stays complete. Families end
in `/*` and hold the keys whose last part comes from data: a task's reward parts, the hub's counters, refusal reasons.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Reduction(Enum):
    """How values of one step become one number; all but `last` work on sums and counts, never on means."""

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
    """One row of the list; `key` ends in `/*` for a family."""

    key: str
    unit: str
    reduction: Reduction
    meaning: str


def _section(*rows: tuple[str, str, str, str]) -> list[Metric]:
    return [Metric(key, unit, Reduction(reduction), meaning) for key, unit, reduction, meaning in rows]


def _by_split(*rows: tuple[str, str, str]) -> list[Metric]:
    """Means of (key, unit, meaning), each once of training and once of evaluation."""
    splits = (("train", "training"), ("test", "evaluation"))
    return [
        Metric(f"{key}/{split}", unit, Reduction.mean, f"{meaning}, in {name}.")
        for key, unit, meaning in rows for split, name in splits
    ]


SECTIONS: dict[str, list[Metric]] = {
    "Run": _section(
        ("run/version", "steps", "last", "Optimizer steps done after this step."),
        ("run/epoch", "restarts", "last", "Learner epoch: how often this run was resumed."),
        ("run/wall_s", "s", "last", "Wall time since the run began, resumed parts included."),
        ("run/trained_tokens", "tokens", "last", "Action tokens trained on since the run began."),
    ),
    "Reward and advantage": _section(
        ("reward/mean", "reward", "mean", "Reward of a trajectory, before filters."),
        ("advantage/mean", "reward", "mean", "Advantage of a trained token."),
        ("group/zero_std_fraction", "fraction", "mean", "Groups whose rewards are all equal, before filters."),
        ("reward/std", "reward", "std", "Spread of the trajectories' rewards, before filters."),
        ("advantage/std", "reward", "std", "Spread of the advantages of trained tokens."),
        ("reward/*", "reward", "mean", "A named part of the reward, as the task reports it."),
    ),
    "Trajectories": _by_split(
        ("rollout/response_tokens", "tokens", "Action tokens of a trajectory"),
        ("rollout/length_clip_ratio", "fraction", "Trajectories cut by a length or turn limit"),
        ("rollout/num_turns", "turns", "Turns of a trajectory"),
        ("rollout/reward", "reward", "Reward of a trajectory"),
        ("rollout/score", "score", "Score of a trajectory, which only measures"),
        ("rollout/filtered_ratio", "fraction", "Groups removed by filters"),
    ),
    "Evaluation": _section(
        ("eval/score", "score", "last", "Mean score over the held-out prompts."),
        ("eval/reward", "reward", "last", "Mean reward over the held-out prompts."),
        ("eval/response_tokens", "tokens", "last", "Mean length of the answers."),
        ("eval/truncated_fraction", "fraction", "last", "Answers cut by a length or turn limit."),
        ("eval/num_prompts", "prompts", "last", "Held-out prompts of this evaluation."),
        ("objective/archive_size", "evaluations", "last", "Evaluations on the Pareto front."),
        ("objective/hypervolume", "volume", "last", "Volume that the front covers above objectives.reference_point."),
        ("eval/version", "steps", "last", "Version that the evaluation asked for."),
    ),
    "Lag": _section(
        ("lag/head_mean", "steps", "mean", "Head lag of a trajectory: the lag of its oldest token."),
        ("lag/token_mean", "steps", "mean", "Version at training minus the version that sampled the token."),
        ("lag/span", "steps", "mean", "Newest minus oldest version within one trajectory."),
        ("lag/queue", "steps", "mean", "Part of the head lag that passed after the trajectory was finished."),
        ("lag/flight", "steps", "mean", "Part of the head lag that passed while it was generated."),
        ("lag/group_spread", "steps", "mean", "Largest minus smallest head lag within one group."),
        ("lag/weight", "factor", "mean", "Factor on token losses for their lag, under staleness.mode=reweight."),
        ("lag/head_groups", "groups", "mean", "Head lag counted in groups consumed since the oldest token."),
        ("lag/head_max", "steps", "max", "Largest head lag in the batch; the lag bound is about this number."),
        ("lag/token_max", "steps", "max", "Largest lag of a trained token."),
        ("lag/head", "trajectories", "histogram", "Trajectories by head lag."),
        ("lag/token", "tokens", "histogram", "Trained tokens by lag."),
        ("lag/token_p50", "steps", "percentile", "Median lag of the trained tokens."),
        ("lag/token_p99", "steps", "percentile", "99th percentile of the lag of the trained tokens."),
    ),
    "Off-policy statistics and control": _section(
        ("ess/token", "fraction", "ess", "Effective sample size of the token ratios, 1 on policy."),
        ("ess/sequence", "fraction", "ess", "Effective sample size of the whole-trajectory ratios."),
        ("ess/sequence_clipped", "fraction", "ess", "The same with ratios cut at the cap."),
        ("ess/kept_fraction", "fraction", "mean", "Tokens that entered the effective sample size."),
        ("ratio/mean_token", "ratio", "mean", "Policy over recorded behavior probability of a token; near 1."),
        ("ratio/mean_sequence", "ratio", "mean", "The same of a whole trajectory; near 1."),
        ("ratio/share_truncated", "fraction", "mean", "Token ratios above the cap."),
        ("ratio/share_at_bound", "fraction", "mean", "Log-ratios at the numerical clamp; should be 0."),
        ("drift/m2", "nats^2", "mean", "Mean squared log-ratio of a token."),
        ("drift/k1", "nats", "mean", "KL estimate k1 of policy and behavior, per token."),
        ("drift/k3", "nats", "mean", "KL estimate k3 of policy and behavior, per token."),
        ("drift/mismatch", "nats^2", "mean", "Mean squared log-ratio at lag 0: the engines' disagreement."),
        ("trace/length", "tokens", "mean", "Effective length of the traces."),
        ("trace/fraction", "fraction", "mean", "Trace length over (T + 1) / 2, its value without any cut."),
        ("keep/veto", "fraction", "mean", "Tokens removed by the ratio veto."),
        ("keep/opsm", "fraction", "mean", "Tokens removed by off-policy sequence masking."),
        ("keep/zscore", "fraction", "mean", "Harmful tokens removed: their lag does not explain their log-ratio."),
        ("keep/rejected", "fraction", "mean", "Tokens removed by rejection rules."),
        ("keep/lag", "fraction", "mean", "Tokens masked because of their lag."),
        ("clip/positive", "fraction", "mean", "Clipped share of the tokens with a positive advantage."),
        ("clip/negative", "fraction", "mean", "Clipped share of the tokens with a negative advantage."),
        ("ratio/max", "ratio", "max", "Largest token ratio of the batch."),
        ("drift/m2_by_lag", "nats^2", "mean by bin", "Mean squared log-ratio of a token, for each lag."),
        ("drift/exponent", "power", "last", "Fitted p of m2 = s0 + a * lag^p."),
        ("drift/oscillation", "fraction", "last", "How far m2 at the current lag is below its peak; high: overshoot."),
        ("lr/scale", "factor", "last", "Factor on the learning rate from the staleness control."),
        ("control/eta", "batches", "last", "Current allowed lead of generation over training."),
        ("control/max_lag", "steps", "last", "Current bound on the head lag."),
        ("control/rho_bar", "ratio", "last", "Cap of V-trace's ratio, when it follows the effective sample size."),
        ("control/mode", "state", "last", "Circuit breaker: 0 normal, 1 cautious, 2 drain."),
    ),
    "Training": _section(
        ("policy/loss", "loss", "mean", "Policy loss per trained token."),
        ("policy/clip_fraction", "fraction", "mean", "Tokens whose gradient the trust region removed."),
        ("kl/value", "nats", "mean", "KL to the reference model, per token."),
        ("kl/clamped_fraction", "fraction", "mean", "Tokens whose reference log-ratio was clamped."),
        ("entropy/mean", "nats", "mean", "Entropy of the policy, per token."),
        ("critic/loss", "loss", "mean", "Value loss per token."),
        ("length/consumed", "tokens", "mean", "Action tokens of a trajectory trained on."),
        ("length/dispatched", "tokens", "mean", "Action tokens of a trajectory that came back, trained on or not."),
        ("length/truncated_fraction", "fraction", "mean", "Trained trajectories cut by a limit."),
        ("policy/grad_norm", "norm", "last", "Global gradient norm before clipping."),
        ("policy/lr", "rate", "last", "Learning rate of the policy."),
        ("critic/grad_norm", "norm", "last", "Global gradient norm of the critic before clipping."),
        ("critic/explained_variance", "fraction", "last", "Share of the targets' variance that the critic explains."),
        ("kl/coef", "coefficient", "last", "Weight of the KL term."),
        ("entropy/coef", "coefficient", "last", "Weight of the entropy bonus."),
        ("clip/high", "ratio", "last", "Upper clip distance, if an entropy target moves it."),
        ("constraint/*", "multiplier", "last", "Multiplier of a named constraint."),
        ("policy/num_tokens", "tokens", "sum", "Action tokens trained on in this step."),
        ("policy/num_trajectories", "trajectories", "sum", "Trajectories trained on in this step."),
        ("policy/num_groups", "groups", "sum", "Groups trained on in this step."),
        ("policy/num_microbatches", "micro-batches", "sum", "Micro-batches of this step, over all ranks."),
        ("policy/num_skipped_steps", "steps", "sum", "1 if the step was skipped for a non-finite loss or gradient."),
    ),
    "Time": _section(
        ("time/step_s", "s", "max", "The whole step, waiting included; the slowest rank."),
        ("time/wait_s", "s", "max", "The learner waited for a batch."),
        ("time/pack_s", "s", "max", "Decoding and packing of the batch."),
        ("time/logprobs_s", "s", "max", "Log-probabilities of the anchor or the reference."),
        ("time/score_s", "s", "max", "The scoring pass before the first gradient, for losses that need one."),
        ("time/advantages_s", "s", "max", "Advantages and targets."),
        ("time/forward_backward_s", "s", "max", "Forward and backward passes of the policy."),
        ("time/optimizer_s", "s", "max", "Gradient clipping and the optimizer step."),
        ("time/critic_s", "s", "max", "Update of the critic."),
        ("time/publish_s", "s", "max", "Gathering, digesting and announcing the new version."),
        ("time/checkpoint_s", "s", "max", "The part of saving that blocked the loop."),
        ("time/eval_s", "s", "max", "Evaluation that blocked the loop."),
        ("time/install_s", "s", "mean", "An actor's time from announcement to live weights."),
        ("time/install_pause_s", "s", "mean", "The part of an install in which the actor generated nothing."),
        ("time/visible_s", "s", "mean", "From the end of publishing until an actor generates with the version."),
        ("time/learner_idle_fraction", "fraction", "last", "Waiting share of the learner's step."),
        ("time/actor_idle_fraction", "fraction", "last", "Share of the actors' sequence slots without work."),
    ),
    "Throughput": _section(
        ("throughput/train_tokens_per_s", "tokens/s", "last", "Action tokens trained on per second of this step."),
        ("throughput/generate_tokens_per_s", "tokens/s", "last", "Action tokens generated per second by all actors."),
        ("throughput/trajectories_per_s", "trajectories/s", "last", "Trajectories trained on per second of this step."),
        ("throughput/wire_bytes_per_token", "bytes/token", "last", "Bytes of incoming groups over action tokens."),
    ),
    "Hub": _section(
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
        ("hub/num_nccl_epochs", "epochs", "last", "Communicators formed and tested since the hub began."),
        ("hub/num_nccl_broadcasts", "versions", "last", "Versions broadcast to a whole communicator."),
        ("hub/num_nccl_reformations", "epochs", "last", "Epochs that failed and had a successor for the same version."),
        ("hub/num_nccl_given_up", "versions", "last", "Versions to be broadcast that every member pulled instead."),
        ("hub/num_sender_restarts", "processes", "last", "Broadcaster processes that died or hung and were replaced."),
        ("hub/num_abandoned_threads", "threads", "last", "Actors' threads that are stuck in a call of NCCL now."),
        ("hub/num_bytes_pulled", "bytes", "last", "Bytes of weights and model files served by the weight socket."),
        ("hub/num_probes", "probes", "last", "Comparisons of engines with the published weights since the hub began."),
        ("hub/num_probe_failures", "probes", "last", "Comparisons that failed and put the actor in quarantine."),
        ("hub/num_quarantined", "actors", "last", "Actors without leases because their engine failed its last probe."),
        ("hub/probe_mean_difference", "nats", "last", "Worst mean log-prob difference from the learner, last probe."),
        ("hub/probe_largest_difference", "nats", "last", "Worst actor's largest log-prob difference, last probe."),
        ("hub/tokens_generated", "tokens", "last", "Action tokens generated by all actors since the hub began."),
        ("hub/*", "count", "last", "Any other counter of the hub, under its own name."),
    ),
    "Dropped": _section(
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
    "Process": _section(
        ("system/cpu_percent", "%", "last", "CPU use of the learner's host."),
        ("system/gpu_reserved_bytes", "bytes", "last", "Reserved accelerator memory of rank 0."),
        ("system/rss_bytes", "bytes", "max", "Resident memory of a learner rank."),
        ("system/gpu_allocated_bytes", "bytes", "max", "Peak allocated accelerator memory of a rank."),
        ("meter/num_nonfinite", "values", "sum", "Values refused by the meter because they were not finite."),
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
    raise KeyError(f"Unknown metric {key!r}: add it to streamrl/metrics/names.py with unit, reduction and meaning.")


def member(family: str, name: str) -> str:
    """The key of `name`, a text from data, in `family`: `member("reward", "format ok")` is `reward/format_ok`.

    Raises:
        KeyError: there is no such family.
    """
    if f"{family}/*" not in METRICS:
        known = ", ".join(key[:-2] for key in METRICS if key.endswith("/*"))
        raise KeyError(f"{family!r} is not a family of metrics; there are: {known}.")
    return f"{family}/{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:64] or 'unnamed'}"


def markdown_page() -> str:
    """The page `docs/metrics.md`."""
    parts = [
        "# Metrics\n",
        "Every line of `metrics.jsonl` is one object: `step`, and the keys below that were measured in that step. This",
        "page is generated from `streamrl/metrics/names.py` by `python -m streamrl.metrics.names`.\n",
        "Means are sums over counts, reduced over all micro-batches and ranks before the division. Values that are not",
        "finite are left out and counted in `meter/num_nonfinite`. Histograms are objects from bin to count. Keys that",
        "end in `/*` are families: the last part comes from the task or the hub.\n",
        "Each line also goes to the trackers of `tracking.trackers`: `wandb`, or your own as `package.module:factory`,",
        "a function that takes a `streamrl.metrics.sinks.TrackedRun` and returns a `Sink`.",
    ]
    for title, rows in SECTIONS.items():
        parts += [f"\n## {title}\n", "| key | unit | reduction | meaning |", "|---|---|---|---|"]
        parts += [f"| `{m.key}` | {m.unit} | {m.reduction.value} | {m.meaning} |" for m in rows]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(markdown_page(), end="")
