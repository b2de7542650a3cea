"""An adapter in a real run: it learns, travels alone, serves beside its predecessors, and goes on after a restart."""

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from tests.flow.processes import RunHarness

LORA = (
    "policy.lora.rank=8", "rollout.num_prompts_per_step=16", "rollout.num_responses_per_prompt=8",
    "policy.tiny.num_warm_start_steps=300", "eval.num_samples=100", "actors.on_install=finish", "kl.mode=k2_is",
    "kl.coef=0.001", "publish.probe_every=2", "launch.num_actors=1", "hub.heartbeat_s=0.2",
)


def test_an_adapter_learns_the_quickstart_and_resumes_over_its_base(harness: RunHarness):
    first = harness.launch(*LORA, "trainer.num_steps=14")
    assert harness.finish(first, 400) == 0, harness.logs()
    harness.check_metric_keys()

    summary, rows = harness.summary(), [row for row in harness.metrics() if "policy/loss" in row]
    assert summary["eval_score_last"] > summary["eval_score_first"] + 0.2, "measured 0.28 to 0.78 in 12 steps"
    assert summary["num_lag_violations"] == 0
    assert rows[0]["policy/lr"] == pytest.approx(3e-3), "policy.lora.lr_scale times that of the experiment"
    assert abs(rows[0]["kl/value"]) < 1e-7 < abs(rows[-1]["kl/value"]), "the reference is the base alone"
    last = [row for row in harness.metrics() if "hub/num_probes" in row][-1]
    assert last["hub/num_probes"] >= 5 and last["hub/num_probe_failures"] == 0
    whole = load_file(harness.run_dir / "model" / "model.safetensors")
    adapter = load_file(harness.run_dir / "adapter" / "adapter_model.safetensors")
    assert rows[-1]["throughput/published_bytes"] == sum(4 * factor.numel() for factor in adapter.values())
    assert all(".lora_" not in name and ".base_layer" not in name for name in whole)
    with safe_open(max(harness.run_dir.glob("ckpt-*")) / "rank-00000-of-00001.safetensors", "pt") as file:
        assert all(".lora_" in key for key in file.keys() if not key.startswith("rng/"))  # noqa: SIM118

    again = harness.launch(*LORA, "trainer.num_steps=16", "checkpoint.resume=true")
    assert harness.finish(again, 300) == 0, harness.logs()
    versions = [row["run/version"] for row in harness.metrics() if "policy/loss" in row]
    assert versions == list(range(1, 17))
    assert harness.summary()["eval_score_last"] > summary["eval_score_first"] + 0.2, "it went on, and not from the base"
    assert harness.leftovers() == []
