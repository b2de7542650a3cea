"""Combinations of staleness settings that contradict each other, or would do nothing, are refused with the remedy."""

from __future__ import annotations

import pytest

from streamrl.config.rules import largest_eta, largest_max_lag, lookahead, max_lag, soft_max_lag
from streamrl.errors import ConfigError
from tests.unit.config.setting_harness import config_of


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("staleness.mode=wait", "staleness.num_lookahead_groups=3"), "leave staleness.num_lookahead_groups"),
        (("staleness.mode=wait", "staleness.max_lag=9"), "staleness.max_lag alone"),
        (("staleness.mode=reweight",), "set staleness.max_lag below"),
        (("staleness.mode=reweight", "staleness.max_lag=1", "staleness.decay=1"), "1 would do nothing"),
        (("staleness.mode=reweight", "staleness.max_lag=0", "staleness.hard_max_lag=1"), "raise hard_max_lag"),
        (("staleness.hard_max_lag=9",), "staleness.mode=reweight"),
        (("staleness.decay=0.9",), "staleness.decay=0.9 does nothing with staleness.mode=drop: set staleness.mode=rew"),
        (("staleness.mode=mask_old_tokens", "staleness.decay=0"), "does nothing with staleness.mode=mask_old_tokens"),
        (("staleness.adaptive.enabled=true", "staleness.adaptive.max_eta=1"), "must lie around staleness.eta=2"),
        (("staleness.adaptive.enabled=true", "staleness.adaptive.rule=fixed", "staleness.adaptive.breaker=false"),
         "does nothing: choose a part of it"),
        (("staleness.force=3", "staleness.adaptive.enabled=true"), "adaptive.enabled=true moves it: choose one"),
        (("staleness.force=3", "publish.when=drift"), "set publish.when=every_step"),
        (("staleness.force=3", "staleness.max_lag=2"), "below staleness.force=3: .*raise max_lag or lower force"),
        (("staleness.force=-1",), "staleness.force=-1"),
        (("staleness.adaptive.ess_target=1",), "staleness.adaptive.ess_target=1"),
        (("policy.scheduler.ess_floor=2",), "policy.scheduler.ess_floor=2"),
    ],
)
def test_a_contradiction_is_refused_with_the_remedy(words, said):
    with pytest.raises(ConfigError, match=said):
        config_of(*words)


def test_the_bounds_follow_mode_and_window():
    def bounds(*words: str) -> tuple[int, ...]:
        config = config_of("rollout.num_prompts_per_step=4", "staleness.eta=3", *words)
        return lookahead(config), soft_max_lag(config), max_lag(config), largest_eta(config), largest_max_lag(config)

    assert bounds() == (4, 4, 4, 3, 4)
    assert bounds("staleness.mode=wait") == (0, 3, 3, 3, 3)
    assert bounds("staleness.mode=wait", "staleness.force=8") == (0, 8, 8, 8, 8)
    assert bounds("staleness.mode=reweight", "staleness.max_lag=1") == (4, 1, 4, 3, 4)
    assert bounds("staleness.mode=reweight", "staleness.max_lag=1", "staleness.hard_max_lag=9") == (4, 1, 9, 3, 9)
    adaptive = ("staleness.adaptive.enabled=true", "staleness.adaptive.max_eta=8")
    assert bounds(*adaptive) == (4, 4, 4, 8, 9)
    assert bounds(*adaptive, "staleness.adaptive.rule=fixed") == (4, 4, 4, 3, 4)
