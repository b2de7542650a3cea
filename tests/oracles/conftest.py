"""The oracles. A fixture imports its package only when a test asks for it, so collecting this folder costs nothing."""

import importlib
import importlib.util
import os
from types import ModuleType, SimpleNamespace

import pytest
import torch

torch.set_num_threads(1)
REQUIRED = os.environ.get("STREAMRL_ORACLES_REQUIRED", "").split(",")
PACKAGES = {  # what each fixture needs; RLlib is there only if gymnasium is, ray alone may be part of something else
    "rlax": ("rlax",),
    "torchrl": ("torchrl",),
    "rllib": ("ray", "gymnasium"),
    "trl": ("trl",),
    "verl": ("verl",),
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what is not installed, unless this environment was set up to have it; installed but broken is an error."""
    for package in (package for name in item.fixturenames for package in PACKAGES.get(name, ())):
        if importlib.util.find_spec(package) is None:
            if package in REQUIRED:
                pytest.fail(f"{package} is missing, and STREAMRL_ORACLES_REQUIRED names it", pytrace=False)
            pytest.skip(f"{package} is not installed here: `make oracles` sets it up")


@pytest.fixture(scope="session")
def rlax() -> SimpleNamespace:
    """In float64: its type checks refuse a mixture, and float32 would hide small mistakes. Compiled once a shape."""
    module, jax = importlib.import_module("rlax"), importlib.import_module("jax")
    jax.config.update("jax_enable_x64", True)
    names = (
        "vtrace_td_error_and_advantage",
        "leaky_vtrace_td_error_and_advantage",
        "truncated_generalized_advantage_estimation",
        "lambda_returns",
        "general_off_policy_returns_from_q_and_v",
        "retrace_continuous",
        "retrace",
        "clipped_surrogate_pg_loss",
    )
    functions = {name: jax.jit(getattr(module, name)) for name in names}
    n_step = jax.jit(module.n_step_bootstrapped_returns, static_argnames="n")
    return SimpleNamespace(**functions, n_step_bootstrapped_returns=n_step)


@pytest.fixture
def torchrl():
    """Its thresholds and its masked discounts take the default dtype, so that is float64 while a test uses it."""
    module = importlib.import_module("torchrl.objectives.value.functional")
    torch.set_default_dtype(torch.float64)
    yield module
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def rllib() -> SimpleNamespace:
    """`vtrace_torch` of the new stack, `from_importance_weights` of the old one."""
    new = importlib.import_module("ray.rllib.algorithms.impala.torch.vtrace_torch_v2")
    old = importlib.import_module("ray.rllib.algorithms.impala.vtrace_torch")
    return SimpleNamespace(vtrace_torch=new.vtrace_torch, from_importance_weights=old.from_importance_weights)


@pytest.fixture(scope="session")
def trl() -> SimpleNamespace:
    """The trainer's static functions, and its functions of logits."""
    trainer, utils = importlib.import_module("trl.trainer.grpo_trainer"), importlib.import_module("trl.trainer.utils")
    return SimpleNamespace(
        get_off_policy_mask=trainer.GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=trainer.GRPOTrainer.get_gamma_weights,
        selective_log_softmax=utils.selective_log_softmax,
    )


@pytest.fixture(scope="session")
def verl() -> ModuleType:
    """`verl.trainer.ppo.core_algos`: advantages, losses, aggregation, KL."""
    return importlib.import_module("verl.trainer.ppo.core_algos")


@pytest.fixture(scope="session")
def verl_config(verl) -> SimpleNamespace:
    """The settings that verl's functions read."""
    workers, trainer = importlib.import_module("verl.workers.config"), importlib.import_module("verl.trainer.config")
    return SimpleNamespace(
        FSDPActorConfig=workers.FSDPActorConfig,
        PolicyLossConfig=workers.PolicyLossConfig,
        RolloutCorrectionConfig=trainer.RolloutCorrectionConfig,
        AlgoConfig=trainer.AlgoConfig,
    )


@pytest.fixture(scope="session")
def verl_actor(verl_config):
    """Makes an actor's settings; their `clip_ratio_c` (dual clip, or DPPO's cap) is 3 unless given."""

    def make(**settings):
        return verl_config.FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)

    return make


@pytest.fixture(scope="session")
def verl_corrections(verl) -> ModuleType:
    """`verl.trainer.ppo.rollout_corr_helper`: importance weights and rejection masks."""
    return importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
