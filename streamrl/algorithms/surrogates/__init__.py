"""Policy losses per token. Two families: `weighted` (detached weight times log pi) and `clipped` (ratio with a bound).

Every surrogate but `reinforce` carries the importance ratio pi/mu, so estimators leave it out; `check_pairing` counts.
"""

from __future__ import annotations

from streamrl.algorithms.surrogates.clipped import (
    behavior_penalty,
    decoupled_ppo,
    gmpo,
    gspo,
    loglinear_proximal,
    m2po,
    ppo_clip,
    sapo,
)
from streamrl.algorithms.surrogates.registry import ANCHORS, ESTIMATORS, SURROGATES, check_pairing
from streamrl.algorithms.surrogates.weighted import (
    aipo,
    cispo,
    dppo_kl,
    dppo_tv,
    mis,
    reinforce,
    seq_tis,
    tis,
    topr,
    vespo,
)

__all__ = [
    "ANCHORS",
    "ESTIMATORS",
    "SURROGATES",
    "aipo",
    "behavior_penalty",
    "check_pairing",
    "cispo",
    "decoupled_ppo",
    "dppo_kl",
    "dppo_tv",
    "gmpo",
    "gspo",
    "loglinear_proximal",
    "m2po",
    "mis",
    "ppo_clip",
    "reinforce",
    "sapo",
    "seq_tis",
    "tis",
    "topr",
    "vespo",
]
