"""Settings with a fixed set of values."""

from __future__ import annotations

from enum import Enum


class Engine(Enum):
    native = "native"
    vllm = "vllm"
    scripted = "scripted"


class OnInstall(Enum):
    keep = "keep"
    recompute = "recompute"
    finish = "finish"


class OnStale(Enum):
    reissue = "reissue"
    drop = "drop"


class StalenessMode(Enum):
    drop = "drop"
    mask_old_tokens = "mask_old_tokens"
    reweight = "reweight"
    wait = "wait"


class AdaptiveRule(Enum):
    ess = "ess"
    goodput = "goodput"
    fixed = "fixed"


class PublishWhen(Enum):
    every_step = "every_step"
    drift = "drift"


class EssRule(Enum):
    none = "none"
    sqrt = "sqrt"
    linear = "linear"


class GroupPolicy(Enum):
    reissue_missing = "reissue_missing"
    reissue_whole = "reissue_whole"
    accept_partial = "accept_partial"


class OnEnvError(Enum):
    drop = "drop"
    floor = "floor"


class WireDtype(Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class EntropyAdapt(Enum):
    none = "none"
    coef = "coef"
    clip_high = "clip_high"


class ConstraintMethod(Enum):
    lagrangian = "lagrangian"
    pid = "pid"
    penalty = "penalty"


class Discount(Enum):
    token = "token"
    turn = "turn"


class Segment(Enum):
    turn = "turn"
    block = "block"


class CriticKind(Enum):
    head = "head"
    model = "model"


class VetoStat(Enum):
    any = "any"
    mean = "mean"


class OpsmWhen(Enum):
    always = "always"
    over_budget = "over_budget"


class WandbMode(Enum):
    offline = "offline"
    online = "online"
