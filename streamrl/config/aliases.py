"""Names that settings have elsewhere, and ours: for the suggestion when one of them is typed."""

from __future__ import annotations

import difflib
from collections.abc import Set

ALIASES: dict[str, str] = {
    # model
    "model": "policy.model_path", "model_name": "policy.model_path", "model_name_or_path": "policy.model_path",
    "base_model": "policy.model_path", "ref_model": "reference.model_path", "torch_dtype": "policy.dtype",
    "lora_rank": "policy.lora.rank", "lora_r": "policy.lora.rank", "use_peft": "policy.lora.rank",
    "peft_config": "policy.lora.rank", "peft": "policy.lora.rank", "lora": "policy.lora.rank",
    "qlora": "policy.lora.base_quantization", "lora_alpha": "policy.lora.alpha",
    "lora_target_modules": "policy.lora.target_modules", "target_modules": "policy.lora.target_modules",
    "exclude_modules": "policy.lora.exclude",
    # optimizer
    "lr": "policy.optimizer.lr", "learning_rate": "policy.optimizer.lr", "optim": "policy.optimizer.name",
    "optimizer": "policy.optimizer.name", "weight_decay": "policy.optimizer.weight_decay",
    "grad_clip": "policy.optimizer.max_grad_norm", "max_grad_norm": "policy.optimizer.max_grad_norm",
    "lr_scheduler_type": "policy.scheduler.name", "lr_scheduler": "policy.scheduler.name",
    "warmup_ratio": "policy.scheduler.warmup_ratio", "warmup_steps": "policy.scheduler.num_warmup_steps",
    "lr_warmup_steps": "policy.scheduler.num_warmup_steps", "lr_scheduler_kwargs": "policy.scheduler.options",
    # sizes
    "max_steps": "trainer.num_steps", "num_train_steps": "trainer.num_steps", "steps": "trainer.num_steps",
    "num_steps": "trainer.num_steps",
    "epochs": "trainer.num_epochs", "num_train_epochs": "trainer.num_epochs",
    "total_epochs": "trainer.num_epochs", "batch_size": "rollout.num_prompts_per_step",
    "train_batch_size": "rollout.num_prompts_per_step", "per_device_train_batch_size": "rollout.num_prompts_per_step",
    "rollout_batch_size": "rollout.num_prompts_per_step", "group_size": "rollout.num_responses_per_prompt",
    "num_generations": "rollout.num_responses_per_prompt", "n": "rollout.num_responses_per_prompt",
    "n_samples_per_prompt": "rollout.num_responses_per_prompt", "max_prompt_length": "rollout.max_prompt_tokens",
    "micro_batch_size": "learner.max_tokens_per_device", "gradient_accumulation_steps": "learner.max_tokens_per_device",
    "ppo_epochs": "learner.num_epochs", "num_iterations": "learner.num_epochs", "max_epochs": "learner.num_epochs",
    "steps_per_generation": "learner.num_minibatches", "num_mini_batches": "learner.num_minibatches",
    "ppo_mini_batch_size": "learner.num_minibatches", "ppo_n_minibatches": "learner.num_minibatches",
    # sampling
    "temperature": "rollout.train.sampling.temperature", "max_tokens": "rollout.train.sampling.max_new_tokens",
    "max_new_tokens": "rollout.train.sampling.max_new_tokens",
    "max_length": "rollout.train.sampling.max_new_tokens",
    "max_completion_length": "rollout.train.sampling.max_new_tokens",
    "max_response_length": "rollout.train.sampling.max_new_tokens", "stop": "rollout.train.sampling.stop",
    # objective
    "beta": "kl.coef", "kl_coef": "kl.coef", "kl_loss_coef": "kl.coef", "init_kl_coef": "kl.coef",
    "use_kl_loss": "kl.mode", "kl_loss_type": "kl.mode", "epsilon": "loss.clip_low", "eps_clip": "loss.clip_low",
    "clip_ratio": "loss.clip_low", "cliprange": "loss.clip_low", "epsilon_high": "loss.clip_high",
    "loss_type": "loss.surrogate", "entropy_coeff": "loss.entropy_coef", "adv_estimator": "advantage.estimator",
    "algo": "advantage.estimator", "gamma": "advantage.gamma", "gae_lambda": "advantage.lam", "lambda": "advantage.lam",
    "max_staleness": "staleness.eta", "max_off_policy_steps": "staleness.eta", "async_level": "staleness.eta",
    # task
    "dataset": "data.path", "data_path": "data.path", "dataset_name": "data.path", "train_files": "data.path",
    "val_files": "data.test_path", "task": "env.name", "environment": "env.name",
    "reward_fn": "env.path", "reward_funcs": "env.path",
    "custom_reward_function": "env.path", "reward_type": "reward.type", "messages_key": "data.prompt_key",
    "input_key": "data.prompt_key", "label_key": "data.answer_key", "test_size": "data.test_ratio",
    "max_turns": "env.max_turns", "system_prompt": "data.system_prompt",
    # run
    "seed": "run.seed", "output_dir": "run.dir", "out_dir": "run.dir", "save_dir": "run.dir", "run_name": "run.name",
    "experiment_name": "run.name", "device": "run.device", "resume": "checkpoint.resume",
    "resume_from_checkpoint": "checkpoint.resume", "save_steps": "checkpoint.every_steps",
    "num_max_failures": "checkpoint.grace_s",
    "save_freq": "checkpoint.every_steps", "eval_steps": "eval.every_steps",
    "eval_on_start": "eval.at_start", "val_before_train": "eval.at_start", "eval_batch_size": "eval.num_samples",
    "num_workers": "launch.num_actors", "num_actors": "launch.num_actors", "num_gpus": "launch.num_learner_ranks",
    "nproc_per_node": "launch.num_learner_ranks", "engine": "actors.engine", "use_vllm": "actors.engine",
    "backend": "actors.engine", "vllm": "actors.engine", "wandb": "tracking.trackers",
    "tensorboard": "tracking.trackers", "mlflow": "tracking.trackers", "trackio": "tracking.trackers",
    "report_to": "tracking.trackers",
    "logger": "tracking.trackers", "project_name": "tracking.project", "wandb_project": "tracking.project",
    # the rest of docs/coming_from.md: TRL, verl, prime-rl, OpenRLHF
    "num_generations_eval": "eval.num_responses", "log_completions": "samples.num_per_step",
    "log_val_generations": "samples.num_per_eval", "train_dataset": "data.path",
    "prompt_dataset": "data.path", "eval_dataset": "data.test_path",
    "generation_batch_size": "rollout.num_prompts_per_step", "seq_len": "learner.max_tokens_per_device",
    "vllm_gpu_memory_utilization": "actors.vllm.gpu_memory_utilization",
    "gpu_memory_utilization": "actors.vllm.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "actors.vllm.tensor_parallel_size",
    "tensor_parallel_size": "actors.vllm.tensor_parallel_size",
    "tensor_model_parallel_size": "actors.vllm.tensor_parallel_size",
    "delta": "loss.options.ratio_cap", "clip_ratio_c": "loss.dual_clip", "importance_sampling_level": "loss.surrogate",
    "loss_mode": "loss.surrogate", "is_correction_type": "loss.surrogate", "loss_agg_mode": "loss.avg_level",
    "rollout_is": "loss.correction", "rollout_rs": "loss.correction", "kl_tau": "loss.behavior_penalty",
    "vllm_importance_sampling_clip_max": "loss.cap", "off_policy_mask_threshold": "loss.opsm_delta",
    "use_kl_in_reward": "kl.mode", "scale_rewards": "advantage.scale", "norm_adv_by_std_in_grpo": "advantage.scale",
    "no_std_norm": "advantage.scale", "lam": "advantage.lam", "mask_truncated_completions": "filter.truncated",
    "filter_zero_advantages": "filter.zero_std", "dynamic_filtering_range": "filter.accuracy_range",
    "overlong_buffer_len": "overlong.cache_ratio", "use_adaptive_entropy": "entropy.adapt",
    "sync_ref_model": "reference.sync_every_steps", "ref_model_sync_steps": "reference.sync_every_steps",
    "max_norm": "policy.optimizer.max_grad_norm", "max_tool_calling_iterations": "env.max_turns",
    "agent_func_path": "env.path", "remote_url": "env.path", "async_queue_size": "staleness.eta",
    "staleness_threshold": "staleness.eta", "weight_sync_steps": "publish.when", "partial_rollout": "actors.on_install",
    "partial_rollout_enable": "actors.on_install", "test_freq": "eval.every_steps",
    "resume_mode": "checkpoint.resume", "n_gpus_per_node": "launch.num_learner_ranks",
    "num_gpus_per_node": "launch.num_learner_ranks", "num_train_gpus": "launch.num_learner_ranks",
    "num_infer_gpus": "launch.num_actors", "num_engines": "launch.num_actors",
    # sweep
    "n_trials": "sweep.num_trials", "n_jobs": "sweep.num_parallel",
    "max_concurrent_trials": "sweep.num_parallel", "parallel": "sweep.num_parallel", "study_name": "sweep.dir",
    "sampler": "sweep.sampler", "pruner": "sweep.pruner",
}
"""Lower case, without sections: `trainer.learning_rate` is looked up by its last part."""

FULL_NAMES: dict[str, str] = {
    "eval.n_samples_per_prompt": "eval.num_responses", "orchestrator.eval.group_size": "eval.num_responses",
    "actor_rollout_ref.rollout.val_kwargs.n": "eval.num_responses",
    "eval.temperature": "rollout.test.sampling.temperature",
    "custom_reward_function.path": "env.path", "eval.dataset": "data.test_path", "data.train_files": "data.path",
    "model.name": "policy.model_path",
    "actor_rollout_ref.model.path": "policy.model_path",
    "actor_rollout_ref.rollout.name": "actors.engine", "orchestrator.train.source": "env.path",
    "rollout.max_new_tokens": "rollout.train.sampling.max_new_tokens", "critic.adam.lr": "critic.optimizer.lr",
    "critic.lr_scheduler": "critic.scheduler.name", "trainer.scheduler.type": "policy.scheduler.name",
    "actor.lr_warmup_ratio": "policy.scheduler.warmup_ratio",
    "trainer.loss.type": "loss.surrogate", "algorithm.kl_ctrl.type": "kl.controller", "algo.kl.use_loss": "kl.mode",
    "algo.kl.estimator": "kl.mode", "algo.kl.target": "kl.controller", "algo.kl.horizon": "kl.controller",
    "algo.kl.init_coef": "kl.coef", "weight_broadcast.type": "publish.transports",
    "orchestrator.eval.interval": "eval.every_steps", "eval.steps": "eval.every_steps",
    "train.max_epochs": "learner.num_epochs", "train.batch_size": "learner.num_minibatches",
    "ckpt.interval": "checkpoint.every_steps",
    "ckpt.load_enable": "checkpoint.resume",
}
"""Names whose last part alone would say something else."""

NOT_HERE: dict[str, str] = {
    "deepspeed": "ranks are sharded by FSDP2: launch.num_learner_ranks",
    "accelerate": "ranks are started by torchrun: launch.num_learner_ranks",
}
"""What people look for and will not find, and what there is."""

HYDRA_SWEEPS = {
    "hydra/sweeper": "sweep.sampler", "hydra/sweeper/sampler": "sweep.sampler", "hydra.sweep.dir": "sweep.dir",
    "hydra.sweeper.n_trials": "sweep.num_trials", "hydra.sweeper.direction": "sweep.direction",
    "hydra.sweeper.n_jobs": "sweep.num_parallel", "hydra.launcher.n_jobs": "sweep.num_parallel",
}
"""What the Optuna sweeper and the joblib launcher of hydra call our settings; a sweep takes both names."""
HYDRA = {
    "hydra.run.dir": "run.dir", "hydra.job.name": "run.name", "hydra.sweep.subdir": "sweep.dir",
    "hydra.mode": "streamrl launch -m", "hydra/launcher": "sweep.num_parallel", "hydra.verbose": "STREAMRL_LOG",
    "hydra.output_subdir": "run.dir", "hydra.searchpath": "a settings file, as streamrl launch my.yaml",
}
"""What does here what an option of hydra's own does elsewhere: nothing but hydra's grammar is used."""

COMMON = (
    "policy.model_path", "env.name", "env.path", "trainer.num_steps", "policy.optimizer.lr",
    "rollout.num_prompts_per_step", "rollout.num_responses_per_prompt", "rollout.train.sampling.max_new_tokens",
    "rollout.train.sampling.temperature", "staleness.eta", "kl.mode", "actors.engine", "launch.num_actors",
    "eval.every_steps", "run.name",
)
"""Settings to know first: `streamrl settings --common`."""


def suggestion(key: str, names: Set[str]) -> str:
    """The setting of these names that was probably meant, as the end of a sentence."""
    if key.lower() not in FULL_NAMES and key.lower().partition(".")[0] in NOT_HERE:
        return f"{NOT_HERE[key.lower().partition('.')[0]]}."
    near = nearest(key, names) or next(iter(difflib.get_close_matches(key, names, n=1, cutoff=0.5)), None)
    if near is None:  # the section may be wrong: compare the last parts
        parts = _last_parts(names)
        near = next((parts[part] for part in difflib.get_close_matches(key.rpartition(".")[2], parts, n=1)), None)
    return f"did you mean `{near}`?" if near else "see `streamrl settings` for every key."


def nearest(key: str, names: Set[str]) -> str | None:
    """The setting whose name, or name elsewhere, this nearly is; without a section it may be its last part."""
    typed = key.lower().replace("-", "_")
    if typed in FULL_NAMES:
        return FULL_NAMES[typed]
    known = {name: name for name in names}
    if "." not in key:
        known |= _last_parts(names) | ALIASES
    close = [known[name] for name in difflib.get_close_matches(typed, known, n=1, cutoff=0.8 if "." in key else 0.75)]
    last = typed.rpartition(".")[2]
    if last in ALIASES and not (close and "." in key):
        return ALIASES[last]
    return close[0] if close else None


def _last_parts(names: Set[str]) -> dict[str, str]:
    """The setting for each last part; of several with the same one that is to know first, else the policy's, else
    the alphabet's first."""
    order = sorted(
        names, key=lambda name: (name not in COMMON, not name.startswith("policy."), name), reverse=True
    )
    return {name.rpartition(".")[2]: name for name in order}
