"""Settings of the loss: filters, rewards, staleness, credit, surrogate, KL, entropy, constraints."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from streamrl.config import Cap, Count, NonNegative, Number, Positive, PositiveInt, Share

AdaptiveRule = StrEnum("AdaptiveRule", ["ess", "goodput", "fixed"])
ConstraintMethod = StrEnum("ConstraintMethod", ["lagrangian", "pid", "penalty"])
Discount = StrEnum("Discount", ["token", "turn"])
AdvantageBy = StrEnum("AdvantageBy", ["trajectory", "agent"])
EntropyAdapt = StrEnum("EntropyAdapt", ["none", "coef", "clip_high"])
DpoLoss = StrEnum("DpoLoss", ["sigmoid", "ipo", "simpo", "orpo"])
OnStale = StrEnum("OnStale", ["reissue", "drop"])
OpsmWhen = StrEnum("OpsmWhen", ["always", "over_budget"])
Segment = StrEnum("Segment", ["turn", "block"])
StalenessMode = StrEnum("StalenessMode", ["drop", "mask_old_tokens", "reweight", "wait"])
VetoScope = StrEnum("VetoScope", ["trajectory", "suffix"])
VetoStat = StrEnum("VetoStat", ["any", "mean"])


@dataclass
class FilterConfig:
    zero_std: bool = False
    """Drop groups whose rewards, before the overlong penalty, are all equal; others are drawn in their place."""
    min_std: Positive = 1e-6
    """Rewards that spread less than this count as equal under `filter.zero_std`."""
    refill: bool = True
    """Generate others in the place of dropped groups; `false` keeps those in the batch, out of the loss."""
    truncated: bool = False
    """Leave trajectories that hit the length limit out of the loss; they still count in their group's baseline."""
    accuracy_range: list[Number] | None = None
    """[low, high]: drop groups whose mean score is not strictly between; a score is summed over turns; null is off."""


@dataclass
class AdaptiveConfig:
    enabled: bool = False
    """Let measured staleness move eta and max_lag during the run; they start from the values set above."""
    rule: AdaptiveRule = AdaptiveRule.ess
    """What moves the lead: `ess` keeps the predicted ESS at its target, `goodput` climbs groups per second times ESS,
    `fixed` leaves it to the circuit breaker alone."""
    min_eta: int = 1
    """Smallest lead that the rule may choose; the circuit breaker may go below it."""
    max_eta: int = 16
    """Largest lead that the rule may choose."""
    ess_target: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """ESS of whole trajectories (`ess/sequence_clipped`) that the largest admitted lag should still have."""
    m2_target: Positive = 0.04
    """Budget of drift, mean squared log-ratio of a token: for off-policy masking, publishing and the group spread."""
    half_life_steps: Positive = 30.0
    """Steps after which an old measurement of the drift counts half."""
    num_trial_steps: Annotated[int, Meta(ge=2)] = 20
    """Steps for which `goodput` measures one lead before it tries the next."""
    breaker: bool = True
    """Halve the lead when the ESS falls, gradients jump or drift oscillates; drain the queue in the worst case."""
    group_spread: bool = False
    """Split a group whose lags differ by more than the drift allows: each part gets a baseline of its own."""


@dataclass
class OverlongConfig:
    cache_ratio: Share = 0.0
    """Soft overlong penalty: the reward falls by up to 1 over this last part of the allowed new tokens; 0 is off."""
    cache_tokens: PositiveInt | None = None
    """The same part as a number of tokens, which wins. Null with `overlong.max_tokens` and no ratio is a quarter of
    that, at most 1024."""
    max_tokens: PositiveInt | None = None
    """Length from which the whole penalty applies; null is the most new tokens that a trajectory may have."""
    scale: NonNegative | None = None
    """Size of the penalty at the limit; null is `reward.correct`, what a right answer earns."""
    zero_when_truncated: bool = False
    """An answer that a limit of tokens or turns cut is trained on with the reward 0, whatever the task paid."""


@dataclass
class ObjectivesConfig:
    combine: str = "reward"
    """What is trained on: the task's reward, or its named scores as weighted_sum, tchebycheff, gdpo, or a weighted sum
    with a bonus in the group for not being dominated (pareto) or for volume that only it covers (hypervolume)."""
    components: dict[str, Number] = field(default_factory=dict)
    """Name of a score -> weight; a negative weight makes smaller better. Two or more also keep a Pareto archive."""
    ideal: dict[str, Number] = field(default_factory=dict)
    """The point that tchebycheff aims at; what is not given is the best seen in the run."""
    reference_point: dict[str, Number] = field(default_factory=dict)
    """Reference point of the hypervolume; empty is, for combine=hypervolume, the worst seen in the run
    less a tenth of the range."""
    scale_by_range: bool = False
    """Divide each component of tchebycheff by its range in the run so far, so that weights alone say what counts."""
    bonus: NonNegative = 0.1
    """Weight of the group bonus of pareto and hypervolume."""
    divide_by_std: bool = False
    """Divide the rewards of a batch by their standard deviation before any baseline or value is subtracted; their mean
    is not shifted. It suits critics, whose advantages `advantage.scale` does not reach."""
    archive_size: PositiveInt = 100
    """Most evaluations in pareto.json."""


@dataclass
class StalenessConfig:
    eta: Count = 1
    """Allowed lead in batches: how far generation may run ahead of training. 0 is strictly synchronous."""
    force: Count | None = None
    """For experiments on stale data: every batch trains at a lag of exactly so many batches, in place of `eta`. The
    learner waits until everything that this lead allows has been generated; null is off."""
    num_lookahead_groups: Count | None = None
    """W: how many later groups may overtake an unfinished one when a batch is cut; null means B (0 with mode=wait)."""
    max_lag: int | None = None
    """Bound on `version - token version` at every optimizer step; null derives eta + ceil(W / B), or with S > 1
    optimizer steps a batch S (eta + ceil(W / B)) + S - 1."""
    mode: StalenessMode = StalenessMode.drop
    """What happens beyond max_lag: `drop` the group; `mask_old_tokens` and train on the others; `reweight` old tokens
    and drop beyond a hard bound. `wait` lets no group get that old: batches are cut strictly in order."""
    hard_max_lag: int | None = None
    """Under mode=reweight: the lag at which a group is refused after all; null derives it as for max_lag."""
    decay: Number = 0.5
    """Under mode=reweight: factor on a token's loss for each step of its lag beyond max_lag."""
    on_stale: OnStale = OnStale.reissue
    """A group that is refused for its lag is generated again, or dropped."""
    adaptive: AdaptiveConfig = field(default_factory=AdaptiveConfig)
    """The staleness control."""


@dataclass
class AdvantageConfig:
    estimator: str = "group"
    """Credit assignment: a key of `streamrl.algorithms.ESTIMATORS`, or your own as package.module:function. Those that
    need values bring a critic."""
    baseline: str = "leave_one_out"
    """Baseline of a group: leave_one_out, group_mean, none, weighted_leave_one_out, opob; or `batch`, all other answers
    of the batch, for one answer a prompt. With a critic it centers the rewards."""
    by: AdvantageBy = AdvantageBy.trajectory
    """Compare the rewards of whole trajectories, or of each `agent` with those of the same agent in its group."""
    scale: str = "none"
    """Divide centered scores by: none, std (of the group) or batch_std."""
    whiten: str = "none"
    """Normalize the advantages of all tokens to mean 0 and std 1, over the batch or over each group: none, batch or
    group."""
    gamma: Share = 1.0
    """Discount of later rewards."""
    discount: Discount = Discount.token
    """Apply gamma at every `token`, or once at the end of every `turn`."""
    lam: Share = 1.0
    """Trace decay."""
    rho_bar: Cap = 1.0
    """Cap of the ratio in the last step's error (V-trace)."""
    rho_bar_ess_target: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Choose rho_bar every step: the largest cap up to 10 whose clipped-sequence ESS reaches this; null is off."""
    c_bar: Cap = 1.0
    """Cap of the ratio in the trace (V-trace)."""
    rho_bar_pg: Cap | None = None
    """Cap of the token's own ratio inside the estimator (published IMPALA form); null leaves it to the surrogate."""
    segment: Segment = Segment.turn
    """Segments of `vtrace_segments`: whole turns, or blocks of `advantage.segment_tokens`."""
    segment_tokens: PositiveInt = 32
    """Tokens of one block."""
    bootstrap_truncated: bool = True
    """The critic's value of the end stands for what an answer that was cut by a limit could not earn any more,
    unless the environment had judged it; `false` ends there with 0."""
    weight_cap: Cap = 2.0
    """Cap of the sequence ratios that weigh siblings in `weighted_leave_one_out` and `opob`."""
    min_ess: NonNegative = 2.0
    """With fewer effective siblings `weighted_leave_one_out` is a plain leave-one-out."""
    options: dict[str, Any] = field(default_factory=dict)
    """The estimator's own constants by name, e.g. {n: 8} of n_step, {eps: 0.2} of clipped_is, {leak: 0.9} of vtrace."""


@dataclass
class LossConfig:
    surrogate: str = "ppo_clip"
    """Trust region: a key of `streamrl.algorithms.SURROGATES`, or your own as package.module:function."""
    clip_low: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    """Lower clip distance of the ratio from 1."""
    clip_high: Annotated[float, Meta(ge=0)] = 0.28
    """Upper clip distance of the ratio from 1."""
    clip_decay: Share | None = None
    """Part of both clip distances that is left at `trainer.num_steps`; they shrink linearly. Null keeps them."""
    dual_clip: Cap | None = 3.0
    """Cap of the loss of negative advantages, in units of the advantage; null is off."""
    cap: Cap | None = None
    """Cap of the importance weight in surrogates that truncate it (tis, cispo, seq_tis ...); null is their own."""
    options: dict[str, Any] = field(default_factory=dict)
    """The surrogate's own constants by name, e.g. {budget: 0.04} of m2po, {ratio_cap: 4} of ppo_clip."""
    anchor: str | None = None
    """Denominator of the ratio: behavior, recomputed, loglinear, ewma; null is the surrogate's usual one."""
    ewma_decay: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    """Decay of the averaged weights behind `loss.anchor=ewma`, for each step (batch)."""
    correction: str = "disabled"
    """Importance weights and rejection between actor and learner: a key of `streamrl.algorithms.CORRECTION_PRESETS`, or
    your own as package.module:function."""
    opsm_delta: NonNegative | None = None
    """Drop harmful tokens of trajectories whose mean log-ratio is below minus this; null is off."""
    opsm_when: OpsmWhen = OpsmWhen.always
    """`over_budget` masks them only while the drift at the mean lag exceeds its target."""
    zscore_bound: Positive | None = None
    """Drop harmful tokens whose log-ratio is this many standard deviations of their lag's drift; null is off."""
    veto_low: NonNegative | None = 1e-4
    """Drop a trajectory if one of its token ratios is below this; null is off."""
    veto_high: Cap | None = 100.0
    """Drop a trajectory if one of its token ratios is above this; null is off."""
    veto_stat: VetoStat = VetoStat.any
    """Compare `any` single ratio of the trajectory with the bounds, or their `mean`."""
    veto_kl: Positive | None = None
    """Drop a trajectory if the KL estimate `ratio - 1 - log ratio` of one of its tokens is above this; null is off."""
    veto_scope: VetoScope = VetoScope.trajectory
    """What a veto drops: the whole `trajectory`, or its `suffix` from the first vetoed token on."""
    exact_at_lag_zero: bool = False
    """Take the ratio of tokens that the current version sampled to be exactly 1, which leaves out how far the engine's
    log-probs are from the learner's; older tokens keep the recorded one."""
    entropy_coef: NonNegative = 0.0
    """Bonus on the mean token entropy."""
    behavior_penalty: NonNegative = 0.0
    """Weight of the squared log-ratio that pulls the policy back to where its data came from."""
    avg_level: str = "token-mean"
    """How token losses are averaged: token-mean, seq-mean-token-mean, seq-mean-token-sum, seq-mean-token-sum-norm,
    prompt-mean."""
    allow_uncorrected: bool = False
    """Permit training on stale data without any importance ratio (negative control of experiments)."""


@dataclass
class ShadowConfig:
    algorithms: list[str] = field(default_factory=list)
    """Algorithms whose gradients are measured beside that of the one in use, from the same forward pass: presets of
    `configs/algorithm`, or surrogates as `loss.surrogate` names them."""


@dataclass
class KlConfig:
    mode: str = "off"
    """Pull toward the reference model: off; in the reward (reward_k1); in the advantages (advantage); in the loss
    (k2_is, k1_is, k3_is, k2, k3, k1+, k3+)."""
    coef: NonNegative | None = None
    """Weight of the KL term, where a controller starts; null is 0.001 if constant, else 0.2."""
    cap: Cap = 2.0
    """Cap of the KL term's own importance weight (k2_is, constraint.kl_limit; advantage, teacher without a ratio)."""
    allow_biased: bool = False
    """Permit k3, and on stale data k2, k1+ and k3+, whose gradient is not that of the reverse KL."""
    controller: str = "constant"
    """What moves the weight: constant, exponential, linear, pid, horizon, doubling, log_integral, schedule."""
    options: dict[str, Any] = field(default_factory=dict)
    """Knobs of the controller by their name in `streamrl.algorithms`, e.g. `kl.options.target=0.01`."""

    def __post_init__(self) -> None:
        if self.mode == "False":  # YAML reads a bare `off` as false
            self.mode = "off"


@dataclass
class ReferenceConfig:
    model_path: str | None = None
    """The KL term's reference model, a local checkpoint with the policy's vocabulary; null is the run's start."""
    sync_every_steps: Count = 0
    """Replace the reference by the current policy every so many steps; 0 never."""
    offload: bool = False
    """Keep the reference model's shards in host memory: each layer's are copied to the GPU as it computes."""


@dataclass
class DistillConfig:
    teacher: str | None = None
    """On-policy distillation: a frozen model with the policy's tokens, whose log-probs of what the policy sampled
    become advantages: a checkpoint, a name of the model hub, RUN@N, or http://HOST:PORT/v1; null is off."""
    coef: Positive = 1.0
    """Weight of `log teacher - log policy`, the advantage of each token."""
    center: bool = True
    """Subtract the batch's mean of `log teacher - log policy`: a baseline, without which nearly every advantage of an
    untrained student is negative."""
    reward_weight: NonNegative = 1.0
    """Weight of the advantages by the task's reward beside the teacher's; 0 learns from the teacher alone."""


@dataclass
class DpoConfig:
    loss: DpoLoss = DpoLoss.sigmoid
    """Loss of `streamrl dpo`: sigmoid (DPO), ipo, or without a reference model simpo and orpo, whose rewards are mean
    log-probs of tokens."""
    beta: Positive = 0.1
    """Weight, in `streamrl dpo`, of the log-ratio to the reference, the reward that the loss compares; of simpo of the
    mean log-prob (usually 2), of ipo the size of the pull to the reference, of orpo the weight of the odds ratio."""
    margin: NonNegative = 0.0
    """Margin of `dpo.loss=simpo`: the better answer's reward is to exceed the other's by it (gamma)."""
    label_smoothing: Annotated[float, Meta(ge=0, lt=0.5)] = 0.0
    """Share of the pairs that may be the wrong way round."""
    sft_weight: NonNegative = 0.0
    """Weight of the chosen answers' cross entropy, per token, added to the loss."""


@dataclass
class EntropyConfig:
    target: Positive | None = None
    """Mean token entropy in nats that `entropy.adapt` aims at; above it no bonus is paid."""
    adapt: EntropyAdapt = EntropyAdapt.none
    """What moves to hold the target: `coef` moves loss.entropy_coef, `clip_high` moves loss.clip_high, none nothing."""
    step: Positive = 0.005
    """How far it moves per optimizer step."""
    low: Number | None = None
    """Lowest value it may take; null is 0 for the bonus and 0.2 for the clip."""
    high: Number | None = None
    """Highest value it may take; null is 1 for the bonus and 0.5 for the clip."""


@dataclass
class ConstraintConfig:
    kl_limit: Positive | None = None
    """The mean KL to the reference model in nats per token must stay below this; null is off."""
    entropy_min: Positive | None = None
    """The mean token entropy in nats must stay above this; null is off."""
    method: ConstraintMethod = ConstraintMethod.lagrangian
    """How a violation becomes a weight: dual ascent, a PID controller, or the slope of a squared penalty."""
    options: dict[str, Any] = field(default_factory=dict)
    """Knobs of the method by their name in `streamrl.algorithms`, e.g. `constraint.options.lr=0.1`."""
    one_sided: bool = False
    """Apply a weight only while its constraint is violated, not until it has come down."""
