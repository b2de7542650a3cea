"""Every declared metric is written by some real run, and each condition under which it is has a run that meets it.

The runs themselves are those of `tests/flow`; at their end `RunHarness.check_metric_keys` compares their lines with the
list, in both directions.
"""

import ast
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.load import load_config, to_plain
from streamrl.metrics.names import METRICS, NEEDS
from tests.contract.conditions import HOLDS, missing_and_surplus
from tests.flow.processes import SMALL
from tests.flow.test_adaptive_staleness import FORCED
from tests.flow.test_critic import MORE_METRICS, WITH_CRITIC
from tests.flow.test_diagnosis import PHASED
from tests.flow.test_kl_runs import DISTILLED, PULLED

ROOT = Path(__file__).parents[2]
RUNS = {
    "test_launch": (),
    "test_critic": (*WITH_CRITIC, *MORE_METRICS),
    "test_kl_runs": PULLED,
    "test_kl_runs distill": DISTILLED,
    "test_diagnosis": PHASED,
    "test_adaptive_staleness": ("staleness.mode=reweight", "staleness.max_lag=0", "staleness.eta=3"),
    "test_adaptive_staleness forced": FORCED,
    "test_adaptive_staleness mask": ("staleness.mode=mask_old_tokens", "staleness.eta=3"),
}
"""Flow test -> the settings of a run whose keys it checks."""
NO_RUN_HERE = {"gpu", "gpu_transport", "supervised"}
"""Conditions that need a GPU, or another trainer."""


def settings_of(*words: str) -> dict[str, Any]:
    return to_plain(load_config([*SMALL, *words])) | {"device": "cpu"}


@pytest.mark.parametrize("name", sorted({run.split()[0] for run in RUNS}))
def test_each_of_these_runs_checks_the_keys_that_it_wrote(name):
    tree = ast.parse((ROOT / "tests" / "flow" / f"{name}.py").read_text())

    assert any(isinstance(node, ast.Attribute) and node.attr == "check_metric_keys" for node in ast.walk(tree))


def test_every_condition_is_met_by_a_run():
    all_settings = [settings_of(*words) for words in RUNS.values()]
    met = {name: [holds(settings) for settings in all_settings] for name, holds in HOLDS.items()}

    assert {name for name, held in met.items() if not any(held)} == NO_RUN_HERE
    used = {metric.needs for metric in METRICS.values()} - {""}
    assert used == NEEDS.keys() == HOLDS.keys(), "an unused or unknown condition"


def test_a_condition_follows_its_setting():
    plain = settings_of()
    off = {"loss.veto_low=null", "loss.veto_high=null", "eval.num_samples=0"}

    assert HOLDS["veto"](plain) and HOLDS["eval"](plain)
    assert not HOLDS["veto"](settings_of(*off)) and not HOLDS["eval"](settings_of(*off))
    assert HOLDS["gpu"](plain | {"device": "cuda"})
    assert HOLDS["gpu_transport"](settings_of("publish.transports=[nccl,zmq]"))


def test_a_missing_key_a_surplus_one_and_an_unknown_counter_are_found():
    settings = settings_of()
    due = missing_and_surplus([], settings)[0]
    assert missing_and_surplus(due, settings) == ([], [])

    fine = [*due, "reward/format", "constraint/kl", "dropped/attempts", "hub/num_returned_drain"]
    assert missing_and_surplus(fine, settings) == ([], [])
    assert missing_and_surplus(due[1:], settings) == (due[:1], [])
    wrong = [*due, "kl/value", "hub/num_new_things"]
    assert missing_and_surplus(wrong, settings) == ([], ["hub/num_new_things", "kl/value"])
