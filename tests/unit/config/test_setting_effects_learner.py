"""Settings of the learner: its model, optimizer, loss, ranks, records and directories."""

from __future__ import annotations

import json
import math
import sys
import types

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from envs.registry import load_task
from learner.data.packing import pack
from learner.model.gradients import optimizer_step
from learner.model.optimizer import make_optimizer, make_schedule
from learner.model.paths import compute_dtype, model_directory
from learner.model.policy import load_policy
from learner.objective.objective import Objective
from learner.ranks.mesh import Ranks
from learner.record.recorder import Recorder
from learner.setup import device
from learner.setup.inputs import fit_to_records
from streamrl.errors import ConfigError
from streamrl.metrics.sinks import Sink, TrackedRun
from streamrl.run_dirs import choose_run_dir
from tests.kit.learning import OneBatch, batch, plan_of, trajectory
from tests.unit.config.setting_harness import config_of, tiny_model

pytestmark = pytest.mark.timeout(60)


def start_ranks(config):
    return device.start_ranks(config.run, config.learner)


# --- the model -------------------------------------------------------------------------------------------------------

TINY = (
    "policy.tiny.hidden_size=16", "policy.tiny.num_layers=1", "policy.tiny.num_heads=2", "env.options.max_length=3",
    "policy.tiny.num_warm_start_steps=0", "learner.max_tokens_per_device=1088",
)


def made_model(tmp_path, *words: str):
    """The directory of the model that a run under these words starts from."""
    config = config_of(f"policy.tiny.cache_dir={tmp_path}", *TINY, *words)
    task = load_task(config.env.name, options=dict(config.env.options))
    return model_directory(
        config.policy, task, Ranks(), seed=config.run.seed, num_threads=config.run.num_threads,
        max_positions=config.learner.max_tokens_per_device,
    )


@pytest.mark.shows("policy.tiny.hidden_size", "policy.tiny.num_layers", "policy.tiny.num_heads")
@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("policy.tiny.hidden_size=24", "hidden_size", 24), ("policy.tiny.num_layers=3", "num_hidden_layers", 3),
        ("policy.tiny.num_heads=4", "num_attention_heads", 4),
    ],
)
def test_a_tiny_model_has_the_sizes_that_are_set(tmp_path, word, key, value):
    plain, changed = (json.loads((made_model(tmp_path, *w) / "config.json").read_text()) for w in ([], [word]))

    assert changed[key] == value != plain[key]


@pytest.mark.shows("policy.tiny.num_warm_start_steps", "policy.tiny.warm_start_lr")
@pytest.mark.parametrize(
    "words",
    [
        ["policy.tiny.num_warm_start_steps=2"],
        ["policy.tiny.num_warm_start_steps=2", "policy.tiny.warm_start_lr=0.02"],
        ["run.seed=43"],
    ],
)
def test_warm_start_and_seed_change_the_weights_that_a_run_starts_from(tmp_path, words):
    before, after = (load_file(made_model(tmp_path, *w) / "model.safetensors") for w in (words[:-1], words))

    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_another_end_of_the_warm_start_is_another_model(tmp_path):
    """What it ends at is tested with the warm start itself; here: the setting gets there."""
    assert made_model(tmp_path, "policy.tiny.warm_start_until=0.5") != made_model(tmp_path)


@pytest.mark.shows("policy.tiny.cache_dir")
def test_made_models_are_cached_and_reused(tmp_path):
    first, other = made_model(tmp_path / "a"), made_model(tmp_path / "b")

    assert first.parent == tmp_path / "a" and other.parent == tmp_path / "b"
    made_at = (first / "config.json").stat().st_mtime_ns
    assert made_model(tmp_path / "a") == first and (first / "config.json").stat().st_mtime_ns == made_at


@pytest.mark.shows("policy.model_path", "policy.tiny.enabled")
def test_a_run_starts_from_the_checkpoint_it_is_given_unless_a_tiny_model_is_asked_for(tmp_path):
    given = tiny_model(tmp_path / "given")

    assert made_model(tmp_path, f"policy.model_path={given}") == given, "the command line wins over the experiment"
    assert made_model(tmp_path, f"policy.model_path={given}", "policy.tiny.enabled=false") == given
    assert made_model(tmp_path, "policy.tiny.enabled=true") != given
    with pytest.raises(ConfigError, match=f"policy.model_path={given} and policy.tiny.enabled=true are two models"):
        made_model(tmp_path, f"policy.model_path={given}", "policy.tiny.enabled=true")


def scored(policy) -> torch.Tensor:
    (micro,) = pack(batch(1, 2), 500)
    return policy(
        micro.tokens % 14, micro.positions, micro.packing, micro.score_index, micro.targets % 14, micro.temperatures
    )[0].detach()


@pytest.mark.shows("policy.dtype")
def test_half_precision_changes_the_scores_and_not_the_master_weights(tmp_path):
    model_dir = tiny_model(tmp_path)
    ranks = Ranks.start("cpu", sharded=True)
    try:
        single, half = (
            load_policy(model_dir, dtype=compute_dtype(name, ranks.device), ranks=ranks)
            for name in ("auto", "bfloat16")
        )
        masters = {parameter.dtype for parameter in half.parameters()}
        difference = float((scored(single) - scored(half)).abs().max())
    finally:
        ranks.close()

    assert masters == {torch.float32} and 1e-5 < difference < 0.2


# --- the optimizer ---------------------------------------------------------------------------------------------------


def trained_weights(*words: str) -> torch.Tensor:
    """A small layer after three steps with the same gradients."""
    config = config_of("policy.optimizer.lr=0.01", "trainer.num_steps=4", *words)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 2)
        gradients = [[torch.randn_like(p) for p in layer.parameters()] for _ in range(3)]
    optimizer = make_optimizer(layer, config.policy.optimizer)
    schedule = make_schedule(config.policy.optimizer, config.policy.scheduler, num_steps=config.trainer.num_steps)
    for step, gradient in enumerate(gradients):
        for parameter, value in zip(layer.parameters(), gradient, strict=True):
            parameter.grad = value.clone()
        limit = config.policy.optimizer.max_grad_norm
        optimizer_step(layer, optimizer, schedule, step=step, max_grad_norm=limit, ranks=Ranks())
    return layer.weight.detach()


@pytest.mark.shows(
    "policy.optimizer.lr", "policy.optimizer.beta1", "policy.optimizer.beta2", "policy.optimizer.eps",
    "policy.optimizer.weight_decay", "policy.optimizer.max_grad_norm", "policy.scheduler.name",
    "policy.scheduler.warmup_ratio", "policy.scheduler.min_lr",
)
@pytest.mark.shows(
    "policy.scheduler.num_warmup_steps", "policy.scheduler.decay_ratio", "policy.scheduler.options",
)
@pytest.mark.parametrize(
    "words",
    [
        ["policy.optimizer.lr=0.02"], ["policy.optimizer.beta1=0.5"], ["policy.optimizer.beta2=0.5"],
        ["policy.optimizer.eps=0.1"], ["policy.optimizer.weight_decay=0.5"], ["policy.optimizer.max_grad_norm=100"],
        ["policy.scheduler.name=linear"], ["policy.scheduler.warmup_ratio=0.5"],
        ["policy.scheduler.name=linear", "policy.scheduler.min_lr=0.005"], ["policy.scheduler.num_warmup_steps=2"],
        ["policy.scheduler.name=warmup_stable_decay", "policy.scheduler.decay_ratio=1"],
        ["policy.scheduler.name=polynomial", "policy.scheduler.options.power=2"],
    ],
)
def test_each_setting_of_the_optimizer_and_its_schedule_moves_the_weights(words):
    assert not torch.allclose(trained_weights(*words[:-1]), trained_weights(*words), atol=1e-6, rtol=0)


# --- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.shows("loss.dual_clip")
@pytest.mark.parametrize(("word", "capped"), [("loss.dual_clip=3.0", True), ("loss.dual_clip=null", False)])
def test_the_dual_clip_ends_the_gradient_of_bad_tokens_that_became_far_too_likely(word, capped):
    config = config_of("loss.veto_high=null", "advantage.estimator=group", word)
    made = Objective(config.advantage, config.loss, max_new_tokens=16, max_lag=4)
    rows = batch(1, 4)
    one = OneBatch(made, rows, plan_of(rows))
    (micro,) = pack(rows, 500)
    recorded = micro.behavior_logprobs[micro.mask]
    logprobs = (recorded + math.log(10)).requires_grad_()  # ratio 10 everywhere

    one.loss(micro, logprobs, torch.zeros_like(logprobs)).backward()

    worst = min(rows, key=lambda row: row.reward)
    bad = torch.tensor([rows[i] is worst for i in micro.trajectory_ids])[:, None].expand(micro.mask.shape)[micro.mask]
    assert bool((logprobs.grad[bad] == 0).all()) is capped


@pytest.mark.shows("learner.max_tokens_per_device")
@pytest.mark.parametrize(("budget", "num_passes"), [(2000, 1), (1100, 2)])
def test_the_token_budget_sets_how_many_passes_a_batch_takes(budget, num_passes):
    config = config_of(f"learner.max_tokens_per_device={budget}")
    rng = np.random.default_rng(0)
    rows = [trajectory(rng, 0, i, num_prompt=900, num_actions=9, with_gap=False) for i in range(2)]

    assert len(pack(rows, config.learner.max_tokens_per_device)) == num_passes


# --- ranks and threads -----------------------------------------------------------------------------------------------


@pytest.fixture
def threads_are_put_back():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.shows("run.device", "run.num_threads")
def test_the_learner_takes_the_device_and_the_threads_that_are_set(monkeypatch, threads_are_put_back):
    for count in (1, 3):
        assert start_ranks(config_of("run.device=cpu", f"run.num_threads={count}")).device.type == "cpu"
        assert torch.get_num_threads() == count
    start_ranks(config_of("run.device=cpu", "run.num_threads=0"))
    assert torch.get_num_threads() == 3  # left as it was

    monkeypatch.setenv("LOCAL_RANK", "99")
    with pytest.raises(ConfigError, match="needs GPU 99"):
        start_ranks(config_of("run.device=cuda"))


@pytest.mark.shows("learner.rank_timeout_s")
def test_a_rank_that_waits_alone_gives_up_after_the_time_set(monkeypatch):
    group = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in group.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(torch.distributed.DistError, match="(?i)timed out after [12] seconds.*1/2 clients"):
        start_ranks(config_of("learner.rank_timeout_s=1", "run.device=cpu"))


# --- records and directories -----------------------------------------------------------------------------------------


def tracker_options(monkeypatch, tmp_path, *words: str) -> dict:
    """What the tracker's `init` is called with when a run under these words opens its sinks; {} if it is not."""
    started: dict = {}
    run = types.SimpleNamespace(config={}, log=lambda *_, **__: None, finish=lambda: None)
    run.config = types.SimpleNamespace(update=lambda *_, **__: None)
    tracker = types.ModuleType("wandb")
    tracker.init = lambda **options: started.update(options) or run
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    config = config_of(*words)
    Recorder(
        config, tmp_path, "run-1", resume_step=None, wall_s=0.0, trained_tokens=0, device="cpu", dtype="float32"
    )
    return started


@pytest.mark.shows("tracking.project", "tracking.wandb.enabled", "tracking.wandb.mode")
def test_the_tracker_is_opened_only_if_enabled_with_its_project_and_mode(monkeypatch, tmp_path):
    on = "tracking.wandb.enabled=true"

    assert tracker_options(monkeypatch, tmp_path) == {}
    plain = tracker_options(monkeypatch, tmp_path, on)
    other = tracker_options(monkeypatch, tmp_path, on, "tracking.project=mine", "tracking.wandb.mode=online")
    assert (plain["project"], plain["mode"]) == ("streamrl", "offline")
    assert (other["project"], other["mode"]) == ("mine", "online")
    assert tracker_options(monkeypatch, tmp_path, "tracking.trackers=[wandb]") == plain


@pytest.mark.shows("tracking.trackers", "tracking.options")
def test_a_users_own_tracker_is_opened_with_its_options(monkeypatch, tmp_path):
    opened: list[TrackedRun] = []
    module = types.ModuleType("my_tracker")
    module.open_mine = lambda run: opened.append(run) or Sink()
    monkeypatch.setitem(sys.modules, "my_tracker", module)

    tracker_options(monkeypatch, tmp_path, "tracking.trackers=[my_tracker:open_mine]", "tracking.options.url=there")

    (run,) = opened
    assert (run.run_id, run.run_dir, run.settings["options"]) == ("run-1", tmp_path, {"url": "there"})


@pytest.mark.shows("run.name", "run.root", "run.dir")
def test_name_root_and_dir_choose_the_run_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def directory(*words: str):
        return choose_run_dir(config_of("run.root=runs", "run.name=first", *words))

    assert str(directory()) != str(directory("run.name=second"))
    assert directory("run.name=second", f"run.root={tmp_path}") == tmp_path / "second-001"
    assert directory(f"run.dir={tmp_path / 'exactly'}") == tmp_path / "exactly"


@pytest.mark.shows("trainer.num_epochs")
@pytest.mark.parametrize(
    ("words", "num_steps"), [((), 200), (("trainer.num_epochs=2",), 13), (("trainer.num_epochs=0.01",), 1)]
)
def test_epochs_give_the_steps_that_their_batches_make_and_no_held_out_prompt_comes_twice(words, num_steps):
    config = config_of("trainer.num_steps=200", "rollout.num_prompts_per_step=16", "eval.num_samples=500", *words)
    (own,) = fit_to_records(config, load_task("string.reverse", options={"num_train": 100, "num_test": 30}))

    assert (config.trainer.num_steps, own.config.eval.num_samples) == (num_steps, 30)
    assert config.eval.num_samples == 500, "what config.yaml says: a later reader may have more records"


def test_a_set_of_other_records_is_not_cut_to_the_number_of_the_runs_own(tmp_path):
    (tmp_path / "many.jsonl").write_text("".join(f'{{"question": "{i}", "answer": "{i}"}}\n' for i in range(50)))
    many = f"{{path: {tmp_path}/many.jsonl, reward: {{type: exact}}}}"
    config = config_of("eval.num_samples=40", f"eval.datasets={{many: {many}, again: {{sampling: {{top_p: 0.9}}}}}}")
    config.env.options = {"num_train": 9, "num_test": 7}
    sets = fit_to_records(config, load_task("string.reverse", options=config.env.options))

    assert {one.name: one.config.eval.num_samples for one in sets} == {"": 7, "many": 40, "again": 7}
