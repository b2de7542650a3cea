"""Every metric: its key, unit, how it is reduced over micro-batches and ranks, and what it means in one sentence.

A key that is not here cannot be logged, so this list, and the page generated from it, cannot grow stale. Families end
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


def _rows(reduction: Reduction, *rows: tuple[str, str, str]) -> list[Metric]:
    return [Metric(key, unit, reduction, meaning) for key, unit, meaning in rows]


_RUN = _rows(
    Reduction.last,
    ("run/version", "steps", "Optimizer steps done after this step."),
    ("run/epoch", "restarts", "Learner epoch: how often this run was resumed."),
    ("run/wall_s", "s", "Wall time since the run began, resumed parts included."),
    ("run/trained_tokens", "tokens", "Action tokens trained on since the run began."),
)

_REWARD = [
    *_rows(
        Reduction.mean,
        ("reward/mean", "reward", "Reward of a trajectory, before filters."),
        ("advantage/mean", "reward", "Advantage of a trained token."),
        ("group/zero_std_fraction", "fraction", "Groups whose rewards are all equal, before filters."),
    ),
    *_rows(
        Reduction.std,
        ("reward/std", "reward", "Spread of the trajectories' rewards, before filters."),
        ("advantage/std", "reward", "Spread of the advantages of trained tokens."),
    ),
    Metric("reward/*", "reward", Reduction.mean, "A named part of the reward, as the task reports it."),
]

_ROLLOUT_MEANINGS = (
    ("response_tokens", "tokens", "Action tokens of a trajectory"),
    ("length_clip_ratio", "fraction", "Trajectories cut by a length or turn limit"),
    ("num_turns", "turns", "Turns of a trajectory"),
    ("reward", "reward", "Reward of a trajectory"),
    ("score", "score", "Score of a trajectory, which only measures"),
    ("filtered_ratio", "fraction", "Groups removed by filters"),
)
_ROLLOUT = [
    Metric(f"rollout/{name}/{split}", unit, Reduction.mean, f"{meaning}, {words}.")
    for name, unit, meaning in _ROLLOUT_MEANINGS
    for split, words in (("train", "in training"), ("test", "in evaluation"))
]

_EVAL = _rows(
    Reduction.last,
    ("eval/score", "score", "Mean score over the held-out prompts."),
    ("eval/reward", "reward", "Mean reward over the held-out prompts."),
    ("eval/response_tokens", "tokens", "Mean length of the answers."),
    ("eval/truncated_fraction", "fraction", "Answers cut by a length or turn limit."),
    ("eval/num_prompts", "prompts", "Held-out prompts of this evaluation."),
    ("objective/archive_size", "evaluations", "Evaluations on the Pareto front."),
    ("objective/hypervolume", "volume", "Volume that the front covers above objectives.reference_point."),
    ("eval/version", "steps", "Version that the evaluation asked for."),
)

_LAG = [
    *_rows(
        Reduction.mean,
        ("lag/head_mean", "steps", "Head lag of a trajectory: version at training minus its oldest token's version."),
        ("lag/token_mean", "steps", "Version at training minus the version that sampled the token."),
        ("lag/span", "steps", "Newest minus oldest version within one trajectory."),
        ("lag/queue", "steps", "Part of the head lag that passed after the trajectory was finished."),
        ("lag/flight", "steps", "Part of the head lag that passed while it was generated."),
        ("lag/group_spread", "steps", "Largest minus smallest head lag within one group."),
        ("lag/weight", "factor", "Factor on the token losses for their lag; only under staleness.mode=reweight."),
        ("lag/head_groups", "groups", "Head lag counted in groups consumed since the oldest token."),
    ),
    *_rows(
        Reduction.max,
        ("lag/head_max", "steps", "Largest head lag in the batch; the lag bound is about this number."),
        ("lag/token_max", "steps", "Largest lag of a trained token."),
    ),
    *_rows(
        Reduction.histogram,
        ("lag/head", "trajectories", "Trajectories by head lag."),
        ("lag/token", "tokens", "Trained tokens by lag."),
    ),
    *_rows(
        Reduction.percentile,
        ("lag/token_p50", "steps", "Median lag of the trained tokens."),
        ("lag/token_p99", "steps", "99th percentile of the lag of the trained tokens."),
    ),
]

_OFF_POLICY = [
    *_rows(
        Reduction.ess,
        ("ess/token", "fraction", "Effective sample size of the token ratios, 1 on policy."),
        ("ess/sequence", "fraction", "Effective sample size of the whole-trajectory ratios."),
        ("ess/sequence_clipped", "fraction", "The same with ratios cut at the cap."),
    ),
    *_rows(
        Reduction.mean,
        ("ess/kept_fraction", "fraction", "Tokens that entered the effective sample size."),
        ("ratio/mean_token", "ratio", "Policy over recorded behavior probability of a token; near 1."),
        ("ratio/mean_sequence", "ratio", "The same of a whole trajectory; near 1."),
        ("ratio/share_truncated", "fraction", "Token ratios above the cap."),
        ("ratio/share_at_bound", "fraction", "Log-ratios at the numerical clamp; should be 0."),
        ("drift/m2", "nats^2", "Mean squared log-ratio of a token."),
        ("drift/k1", "nats", "KL estimate k1 of policy and behavior, per token."),
        ("drift/k3", "nats", "KL estimate k3 of policy and behavior, per token."),
        ("drift/mismatch", "nats^2", "Mean squared log-ratio at lag 0: the engines' disagreement."),
        ("trace/length", "tokens", "Effective length of the traces."),
        ("trace/fraction", "fraction", "Trace length over (T + 1) / 2, its value without any cut."),
        ("keep/veto", "fraction", "Tokens removed by the ratio veto."),
        ("keep/opsm", "fraction", "Tokens removed by off-policy sequence masking."),
        ("keep/zscore", "fraction", "Harmful tokens removed because their lag does not explain their log-ratio."),
        ("keep/rejected", "fraction", "Tokens removed by rejection rules."),
        ("keep/lag", "fraction", "Tokens masked because of their lag."),
        ("clip/positive", "fraction", "Clipped share of the tokens with a positive advantage."),
        ("clip/negative", "fraction", "Clipped share of the tokens with a negative advantage."),
    ),
    Metric("ratio/max", "ratio", Reduction.max, "Largest token ratio of the batch."),
    Metric("drift/m2_by_lag", "nats^2", Reduction.mean_by_bin, "Mean squared log-ratio of a token, for each lag."),
    *_rows(
        Reduction.last,
        ("drift/exponent", "power", "Fitted p of m2 = s0 + a * lag^p."),
        ("drift/oscillation", "fraction", "How far m2 at the current lag dips below its peak; high: over-shooting."),
        ("lr/scale", "factor", "Factor on the learning rate from the staleness control."),
        ("control/eta", "batches", "Current allowed lead of generation over training."),
        ("control/max_lag", "steps", "Current bound on the head lag."),
        ("control/rho_bar", "ratio", "Cap of V-trace's ratio, when it follows the effective sample size."),
        ("control/mode", "state", "Circuit breaker: 0 normal, 1 cautious, 2 drain."),
    ),
]

_TRAINING = [
    *_rows(
        Reduction.mean,
        ("policy/loss", "loss", "Policy loss per trained token."),
        ("policy/clip_fraction", "fraction", "Tokens whose gradient the trust region removed."),
        ("kl/value", "nats", "KL to the reference model, per token."),
        ("kl/clamped_fraction", "fraction", "Tokens whose reference log-ratio was clamped."),
        ("entropy/mean", "nats", "Entropy of the policy, per token."),
        ("critic/loss", "loss", "Value loss per token."),
        ("length/consumed", "tokens", "Action tokens of a trajectory trained on."),
        ("length/dispatched", "tokens", "Action tokens of a trajectory that came back, trained on or not."),
        ("length/truncated_fraction", "fraction", "Trained trajectories cut by a limit."),
    ),
    *_rows(
        Reduction.last,
        ("policy/grad_norm", "norm", "Global gradient norm before clipping."),
        ("policy/lr", "rate", "Learning rate of the policy."),
        ("critic/grad_norm", "norm", "Global gradient norm of the critic before clipping."),
        ("critic/explained_variance", "fraction", "Share of the targets' variance that the critic explains."),
        ("kl/coef", "coefficient", "Weight of the KL term."),
        ("entropy/coef", "coefficient", "Weight of the entropy bonus."),
        ("clip/high", "ratio", "Upper clip distance, if an entropy target moves it."),
    ),
    Metric("constraint/*", "multiplier", Reduction.last, "Multiplier of a named constraint."),
    *_rows(
        Reduction.sum,
        ("policy/num_tokens", "tokens", "Action tokens trained on in this step."),
        ("policy/num_trajectories", "trajectories", "Trajectories trained on in this step."),
        ("policy/num_groups", "groups", "Groups trained on in this step."),
        ("policy/num_microbatches", "micro-batches", "Micro-batches of this step, over all ranks."),
        ("policy/num_skipped_steps", "steps", "1 if the step was skipped for a non-finite loss or gradient."),
    ),
]

_TIME = [
    *_rows(
        Reduction.max,
        ("time/step_s", "s", "The whole step, waiting included; the slowest rank."),
        ("time/wait_s", "s", "The learner waited for a batch."),
        ("time/pack_s", "s", "Decoding and packing of the batch."),
        ("time/logprobs_s", "s", "Log-probabilities of the anchor or the reference."),
        ("time/score_s", "s", "The scoring pass before the first gradient, for losses that need one."),
        ("time/advantages_s", "s", "Advantages and targets."),
        ("time/forward_backward_s", "s", "Forward and backward passes of the policy."),
        ("time/optimizer_s", "s", "Gradient clipping and the optimizer step."),
        ("time/critic_s", "s", "Update of the critic."),
        ("time/publish_s", "s", "Gathering, digesting and announcing the new version."),
        ("time/checkpoint_s", "s", "The part of saving that held the loop up."),
        ("time/eval_s", "s", "Evaluation that held the loop up."),
    ),
    *_rows(
        Reduction.mean,
        ("time/install_s", "s", "An actor's time from announcement to live weights."),
        ("time/install_pause_s", "s", "The part of an install in which the actor generated nothing."),
        ("time/visible_s", "s", "From the end of publishing until an actor generates with the version."),
    ),
    *_rows(
        Reduction.last,
        ("time/learner_idle_fraction", "fraction", "Waiting share of the learner's step."),
        ("time/actor_idle_fraction", "fraction", "Share of the actors' slots that had no work."),
    ),
]

_THROUGHPUT = _rows(
    Reduction.last,
    ("throughput/train_tokens_per_s", "tokens/s", "Action tokens trained on per second of this step."),
    ("throughput/generate_tokens_per_s", "tokens/s", "Action tokens generated per second by all actors."),
    ("throughput/trajectories_per_s", "trajectories/s", "Trajectories trained on per second of this step."),
    ("throughput/wire_bytes_per_token", "bytes/token", "Bytes of the incoming groups over their action tokens."),
)

_HUB = [
    *_rows(
        Reduction.last,
        ("hub/num_actors", "actors", "Actors that the hub hears from."),
        ("hub/num_groups_queued", "groups", "Finished groups that wait to be trained on."),
        ("hub/num_leases_open", "leases", "Leases at the actors now."),
        ("hub/num_groups_leased", "groups", "Leases granted since the hub began."),
        ("hub/num_groups_accepted", "groups", "Groups accepted since the hub began."),
        ("hub/num_groups_trained", "groups", "Groups trained on since the hub began."),
        ("hub/num_groups_stale", "groups", "Groups refused for their lag since the hub began."),
        ("hub/num_duplicates_dropped", "groups", "Repeated deliveries dropped since the hub began."),
        ("hub/num_leases_reissued", "leases", "Leases given to another actor since the hub began."),
        ("hub/num_actor_restarts", "actors", "Actors that came back under a new incarnation since the hub began."),
        ("hub/num_installs", "installs", "Versions that actors made live since the hub began."),
        ("hub/num_install_failures", "installs", "Versions that actors refused since the hub began."),
        ("hub/num_installs_shm", "installs", "Of those, by shared memory."),
        ("hub/num_installs_zmq", "installs", "Of those, by a full pull."),
        ("hub/num_installs_zmq_delta", "installs", "Of those, by a pull of what had changed."),
        ("hub/num_installs_nccl", "installs", "Of those, by broadcast between GPUs."),
        ("hub/num_installs_ipc", "installs", "Of those, through slots on the learner's GPU."),
        ("hub/num_installs_same", "installs", "Of those, without a transfer: the bytes were here already."),
        ("hub/num_nccl_epochs", "epochs", "Communicators formed and tested for broadcasts since the hub began."),
        ("hub/num_nccl_broadcasts", "versions", "Versions broadcast to a whole communicator."),
        ("hub/num_nccl_reformations", "epochs", "Epochs that failed and had a successor for the same version."),
        ("hub/num_nccl_given_up", "versions", "Versions to be broadcast that everybody pulled instead."),
        ("hub/num_sender_restarts", "processes", "Senders that died or hung and were replaced."),
        ("hub/num_abandoned_threads", "threads", "Actors' threads that are stuck in a call of NCCL now."),
        ("hub/num_bytes_pulled", "bytes", "Bytes of weights and model files that the hub's weight socket served."),
        ("hub/num_probes", "probes", "Comparisons of an actor's engine with what was published, since the hub began."),
        ("hub/num_probe_failures", "probes", "Comparisons that failed and put the actor in quarantine."),
        ("hub/num_quarantined", "actors", "Actors that get no leases because their engine failed its last probe."),
        ("hub/probe_mean_difference", "nats", "Worst actor's mean log-prob difference from the learner, last probe."),
        ("hub/probe_largest_difference", "nats", "Worst actor's largest log-prob difference, last probe."),
        ("hub/tokens_generated", "tokens", "Action tokens generated by all actors since the hub began."),
    ),
    Metric("hub/*", "count", Reduction.last, "Any other counter of the hub, under its own name."),
]

_DROPPED = [
    *_rows(
        Reduction.sum,
        ("dropped/stale", "groups", "Beyond the lag bound."),
        ("dropped/version", "groups", "Sampled by a version that is not on the surviving history."),
        ("dropped/zero_std", "groups", "All rewards equal."),
        ("dropped/accuracy", "groups", "Mean score outside the accuracy filter."),
        ("dropped/overlong", "groups", "Prompts longer than rollout.max_prompt_tokens."),
        ("dropped/nonfinite_logprob", "groups", "A recorded log-probability was not finite."),
        ("dropped/duplicate", "groups", "Delivered more than once."),
        ("dropped/cancelled", "groups", "Cancelled in flight because of their lag."),
    ),
    Metric("dropped/*", "count", Reduction.sum, "Dropped in this step for another named reason."),
]

_PROCESS = [
    *_rows(
        Reduction.last,
        ("system/cpu_percent", "%", "CPU use of the learner's host."),
        ("system/gpu_reserved_bytes", "bytes", "Reserved accelerator memory of rank 0."),
    ),
    *_rows(
        Reduction.max,
        ("system/rss_bytes", "bytes", "Resident memory of a learner rank."),
        ("system/gpu_allocated_bytes", "bytes", "Peak allocated accelerator memory of a rank."),
    ),
    Metric("meter/num_nonfinite", "values", Reduction.sum, "Values refused by the meter because they were not finite."),
]

SECTIONS: dict[str, list[Metric]] = {
    "Run": _RUN,
    "Reward and advantage": _REWARD,
    "Trajectories": _ROLLOUT,
    "Evaluation": _EVAL,
    "Lag": _LAG,
    "Off-policy statistics and control": _OFF_POLICY,
    "Training": _TRAINING,
    "Time": _TIME,
    "Throughput": _THROUGHPUT,
    "Hub": _HUB,
    "Dropped": _DROPPED,
    "Process": _PROCESS,
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
        raise KeyError(f"{family!r} is no family of metrics; there are: {', '.join(families())}.")
    return f"{family}/{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:64] or 'unnamed'}"


def families() -> list[str]:
    """Names of the open families, without the `/*`."""
    return [key[:-2] for key in METRICS if key.endswith("/*")]


def markdown_page() -> str:
    """The page `docs/metrics.md`."""
    parts = [
        "# Metrics\n",
        "Every line of `metrics.jsonl` is one object: `step`, and the keys below that were measured in that step. This",
        "page is generated from `streamrl/metrics/names.py` by `python -m streamrl.metrics.names`.\n",
        "Means are sums over counts, reduced over all micro-batches and ranks before the division. Values that are not",
        "finite are left out and counted in `meter/num_nonfinite`. Histograms are objects from bin to count. Keys that",
        "end in `/*` are families: the last part comes from the task or the hub.",
    ]
    for title, rows in SECTIONS.items():
        parts += [f"\n## {title}\n", "| key | unit | reduction | meaning |", "|---|---|---|---|"]
        parts += [f"| `{m.key}` | {m.unit} | {m.reduction.value} | {m.meaning} |" for m in rows]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(markdown_page(), end="")
