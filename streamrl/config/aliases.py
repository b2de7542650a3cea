"""Names that settings have elsewhere, and ours: for the suggestion when one of them is typed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence, Set

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
    "gamma": "advantage.gamma", "gae_lambda": "advantage.lam", "lambda": "advantage.lam",
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
    "eval_on_start": "eval.at_start", "val_before_train": "eval.at_start", "eval_batch_size": "actors.num_concurrent",
    "num_workers": "launch.num_actors", "num_actors": "launch.num_actors", "num_gpus": "launch.num_learner_ranks",
    "nproc_per_node": "launch.num_learner_ranks", "engine": "actors.engine", "use_vllm": "actors.engine",
    "backend": "actors.engine", "vllm": "actors.engine", "wandb": "tracking.trackers",
    "tensorboard": "tracking.trackers", "mlflow": "tracking.trackers", "trackio": "tracking.trackers",
    "report_to": "tracking.trackers",
    "logger": "tracking.trackers", "project_name": "tracking.project", "wandb_project": "tracking.project",
    # the rest of docs/coming_from.md: TRL, verl, prime-rl, OpenRLHF
    "num_generations_eval": "eval.num_responses", "log_completions": "samples.num_per_step",
    "log_val_generations": "samples.num_per_eval", "train_dataset": "data.path", "eval_save_dir": "eval.directory",
    "enable_profiling": "run.profile_steps", "profile_interval": "run.memory_interval_s",
    "prompt_dataset": "data.path", "eval_dataset": "data.test_path",
    "generation_batch_size": "rollout.num_prompts_per_step", "seq_len": "learner.max_tokens_per_device",
    "vllm_gpu_memory_utilization": "actors.vllm.gpu_memory_utilization",
    "gpu_memory_utilization": "actors.vllm.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "actors.vllm.tensor_parallel_size",
    "tensor_model_parallel_size": "actors.vllm.tensor_parallel_size",
    "delta": "loss.options.ratio_cap", "clip_ratio_c": "loss.dual_clip", "importance_sampling_level": "loss.surrogate",
    "loss_mode": "loss.surrogate", "is_correction_type": "loss.surrogate", "loss_agg_mode": "loss.avg_level",
    "avg_level": "loss.avg_level",
    "rollout_is": "loss.correction", "rollout_rs": "loss.correction", "kl_tau": "loss.behavior_penalty",
    "vllm_importance_sampling_clip_max": "loss.cap", "off_policy_mask_threshold": "loss.opsm_delta",
    "use_kl_in_reward": "kl.mode", "scale_rewards": "advantage.scale", "norm_adv_by_std_in_grpo": "advantage.scale",
    "no_std_norm": "advantage.scale", "lam": "advantage.lam", "mask_truncated_completions": "filter.truncated",
    "filter_zero_advantages": "filter.zero_std", "dynamic_filtering_range": "filter.accuracy_range",
    "overlong_buffer_len": "overlong.cache_tokens", "use_adaptive_entropy": "entropy.adapt",
    "sync_ref_model": "reference.sync_every_steps", "ref_model_sync_steps": "reference.sync_every_steps",
    "max_norm": "policy.optimizer.max_grad_norm", "max_tool_calling_iterations": "env.max_turns",
    "agent_func_path": "env.path", "remote_url": "env.path", "async_queue_size": "staleness.eta",
    "staleness_threshold": "staleness.eta", "weight_sync_steps": "publish.every_steps",
    "partial_rollout": "actors.on_install", "partial_rollout_enable": "actors.on_install",
    "test_freq": "eval.every_steps",
    "resume_mode": "checkpoint.resume", "n_gpus_per_node": "launch.num_learner_ranks",
    "num_gpus_per_node": "launch.num_learner_ranks", "num_train_gpus": "launch.num_learner_ranks",
    "num_infer_gpus": "launch.num_actors", "num_engines": "launch.num_actors",
    "ppo_max_token_len_per_gpu": "learner.max_tokens_per_device", "max_assistant_turns": "env.max_turns",
    "lr_warmup_steps_ratio": "policy.scheduler.warmup_ratio", "clip_ratio_low": "loss.clip_low",
    "clip_ratio_high": "loss.clip_high", "total_training_steps": "trainer.num_steps",
    "max_inflight": "actors.num_concurrent", "max_tokens_per_gpu": "learner.max_tokens_per_device",
    "num_examples": "eval.num_samples", "value_clip": "critic.clip",
    "enforce_eager": "actors.vllm.enforce_eager", "max_model_len": "actors.vllm.max_model_len",
    "enable_chunked_prefill": "actors.vllm.enable_chunked_prefill",
    # RL2 and its fork
    "train_data_path": "data.path", "test_data_path": "data.test_path", "response_key": "data.answer_key",
    "prompts_per_rollout": "rollout.num_prompts_per_step", "responses_per_prompt": "rollout.num_responses_per_prompt",
    "dynamic_filtering": "filter.zero_std", "bucket_size": "publish.bucket_bytes",
    "mem_fraction_static": "actors.vllm.gpu_memory_utilization",
    "enable_gradient_checkpointing": "policy.gradient_checkpointing",
    "enable_activation_checkpointing": "policy.gradient_checkpointing",
    "recompute_granularity": "policy.gradient_checkpointing", "ddp_size": "learner.mesh.replicate",
    "tp_size": "learner.mesh.tensor", "cp_size": "learner.mesh.context", "sp_size": "learner.mesh.context",
    "context_parallel_size": "learner.mesh.context", "max_length_per_device": "learner.max_tokens_per_device",
    "max_inference_length_per_device": "learner.max_inference_tokens_per_device",
    "clip_grad": "policy.optimizer.max_grad_norm",
    "lr_decay_style": "policy.scheduler.name", "offload_optimizer": "policy.optimizer.offload",
    "update_per_rollout": "learner.num_minibatches", "clip": "loss.clip_low", "tis_coef": "loss.cap",
    "freeze_steps": "critic.num_warmup_steps", "reward_estimator": "kl.mode", "loss_estimator": "kl.mode",
    "adaptive_kl": "kl.controller", "controller_type": "kl.controller", "target_kl": "kl.options",
    "env_path": "env.path", "optimizer_dir": "checkpoint.resume", "model_path": "policy.model_path",
    "dtype": "policy.dtype", "exp_factor": "kl.options", "exp_decay": "kl.options", "linear_factor": "kl.options",
    "kp": "kl.options", "ki": "kl.options", "kd": "kl.options", "min_coef": "kl.options", "max_coef": "kl.options",
    "schedule_type": "kl.options", "schedule_steps": "kl.options",
    "initial_coef": "kl.coef", "constraint_optimization": "constraint.kl_limit", "kl_constraint": "constraint.kl_limit",
    "entropy_constraint": "constraint.entropy_min", "use_lagrangian": "constraint.method",
    "constraint_violation_penalty": "constraint.method", "lagrangian_lr": "constraint.options",
    "lamda": "advantage.lam", "global_norm": "advantage.whiten", "norm_var": "advantage.scale",
    "n_steps": "advantage.options", "bootstrap_method": "advantage.options",
    "multi_objective": "objectives.components", "objective_weights": "objectives.components",
    "pareto_method": "objectives.combine", "diversity_weight": "objectives.bonus", "optimizer_type": "sweep.sampler",
    "objective_name": "sweep.metric", "maximize": "sweep.direction", "total_steps": "trainer.num_steps",
    "n_epochs": "trainer.num_epochs", "load_ckpt_from": "checkpoint.resume", "use_wandb": "tracking.trackers",
    "disable_wandb": "tracking.trackers", "enable_wandb": "tracking.trackers", "enable_mlflow": "tracking.trackers",
    "enable_tensorboard": "tracking.trackers", "tracking_uri": "tracking.options",
    # rl4llm
    "pretrained_model": "policy.model_path", "policy_model": "policy.model_path", "value_model": "critic.model_path",
    "max_completion_tokens": "rollout.train.sampling.max_new_tokens",
    "train_rollout_size": "rollout.num_prompts_per_step", "train_micro_batch_size": "learner.max_tokens_per_device",
    "normalize_advantages": "advantage.whiten", "normalize_rewards": "objectives.divide_by_std",
    "entropy_loss_coef": "loss.entropy_coef",
    "sync_reference_interval": "reference.sync_every_steps", "checkpoint_interval": "checkpoint.every_steps",
    "eval_interval": "eval.every_steps", "eval_rollout_size": "eval.num_samples", "clip_eps": "loss.clip_low",
    "clip_eps_low": "loss.clip_low", "clip_eps_high": "loss.clip_high", "length_cache": "overlong.cache_tokens",
    "num_updates": "learner.num_epochs", "policy_num_updates": "learner.num_epochs",
    "value_num_updates": "critic.num_steps", "value_clip_eps": "critic.clip", "filter_low_reward_std": "filter.min_std",
    "tool_call_success_bonus": "env.tool_use.call_reward", "tool_call_error_penalty": "env.tool_use.error_penalty",
    "tool_schemas": "env.tools", "shuffle_dataset": "data.shuffle", "reward_functions": "env.path",
    "max_train_samples": "data.num_samples", "sample_buffer_size": "samples.num_per_step", "infer_host": "hub.bind",
    "infer_port": "hub.bind", "chunked_prefill_size": "actors.vllm",
    "gradient_clipping": "policy.optimizer.max_grad_norm", "betas": "policy.optimizer.beta1",
    "checkpoint_path": "checkpoint.resume", "model_max_length": "learner.max_tokens_per_device",
    "max_test_samples": "eval.num_samples", "value_num_epochs": "critic.num_steps",
    "train_prompts_per_rollout": "rollout.num_prompts_per_step", "test_prompts_per_rollout": "eval.num_samples",
    "artifacts_path": "run.dir", "rollout_size": "rollout.num_prompts_per_step",
    "load_in_4bit": "policy.lora.base_quantization", "flash_attention": "learner.attention",
    "normalize_group_rewards": "advantage.scale", "clip_grad_norm": "policy.optimizer.max_grad_norm",
    "gradient_accumulate_steps": "learner.max_tokens_per_device", "xml_format": "reward.format_tags",
    "warmup_fraction": "policy.scheduler.warmup_ratio", "warmup_num_steps": "policy.scheduler.num_warmup_steps",
    "total_num_steps": "trainer.num_steps", "train_micro_batch_size_per_gpu": "learner.max_tokens_per_device",
    "infer_cohost_mode": "launch.share_gpus", "enable_memory_saver": "launch.share_gpus",
    # ColossalAI
    "num_episodes": "trainer.num_epochs", "num_trainers": "launch.num_learner_ranks",
    "num_inferencer": "launch.num_actors", "inference_batch_size": "actors.num_concurrent",
    "inference_microbatch_size": "actors.num_concurrent", "train_minibatch_size": "learner.num_minibatches",
    "train_microbatch_size": "learner.max_tokens_per_device",
    "producer_tensor_parallel_size": "actors.vllm.tensor_parallel_size", "kl_coeff": "kl.coef",
    "code_verifier_api_url": "reward.code.url", "n_behind": "staleness.eta", "save_interval": "checkpoint.every_steps",
    "log_rollout_interval": "samples.num_per_step", "filter_range": "filter.accuracy_range",
    "loss_variation": "loss.avg_level", "soft_over_length_punishment": "overlong.cache_ratio",
    "cache_length": "overlong.cache_tokens", "filter_truncated_response": "filter.truncated",
    "reward_fn_type": "reward.type", "precision": "policy.dtype", "response_format_tags": "reward.format_tags",
    "temp": "rollout.train.sampling.temperature", "topk": "rollout.train.sampling.top_k",
    "topp": "rollout.train.sampling.top_p",
    "microbatch_size": "learner.max_tokens_per_device", "num_producers": "launch.num_actors",
    "num_consumer_procs": "launch.num_learner_ranks", "num_proc_per_producer": "launch.gpus_per_actor",
    "inference_backend": "actors.engine", "data_actor_buffer_size_limit": "staleness.eta",
    "enable_flash_attention": "learner.attention", "enable_sequence_parallelism": "learner.mesh.context",
    # RLite
    "executor": "actors.engine", "colocate_with": "launch.share_gpus", "p2p_weight_sync": "publish.transports",
    "weight_sync": "publish.transports", "grad_acc_steps": "learner.max_tokens_per_device", "r": "policy.lora.rank",
    "attn_implementation": "learner.attention", "prompts": "data.path", "sampling_params": "rollout.train.sampling",
    "max_num_seqs": "actors.num_concurrent",
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
    "ckpt.load_enable": "checkpoint.resume", "rollout.train.path": "data.path", "rollout.test.path": "data.test_path",
    "server_args.tp_size": "actors.vllm.tensor_parallel_size", "critic.model_name": "critic.model_path",
    "tf_config.tensor_model_parallel_size": "learner.mesh.tensor", "ref_actor.model_name": "reference.model_path",
    "ref_actor.offload_model": "reference.offload", "critic.update_per_rollout": "critic.num_steps",
    "kl.type": "kl.mode", "entropy.coef": "loss.entropy_coef", "env.batch_size": "actors.num_concurrent",
    "env.max_steps": "env.max_turns", "dataset.names": "data.path", "job.datasets": "data.path",
    "train_data.path": "data.path", "test_data.path": "data.test_path", "train_dataset_config.path": "data.path",
    "train_dataset_config.max_length": "rollout.max_prompt_tokens", "inference_model_config.path": "policy.model_path",
    "vllm.tensor_parallel_size": "actors.vllm.tensor_parallel_size", "actor.dtype": "policy.dtype",
    "actor.beta": "dpo.beta", "data.max_length": "data.max_tokens",
    "grpo_config.batch_size": "learner.max_tokens_per_device", "ppo.train_batch_size": "learner.num_minibatches",
    "optimizer.type": "policy.optimizer.name", "scheduler.type": "policy.scheduler.name",
    "bf16.enabled": "policy.dtype", "adaptive_kl.enabled": "kl.controller",
    "constraint_optimization.enabled": "constraint.kl_limit", "multi_objective.enabled": "objectives.combine",
    "multi_objective.objectives": "objectives.components", "objective_weights.reward": "objectives.components",
    "objective_weights.kl_penalty": "objectives.components", "objective_weights.entropy": "objectives.components",
    "hyperopt.enabled": "sweep.sampler", "hyperopt.save_dir": "sweep.dir",
    "experiment_tracking.enabled": "tracking.trackers",
}
"""Names whose last part alone would say something else; sections may stand in front."""

RENAMED: dict[str, str] = {
    "actor": "policy", "ref_actor": "reference", "ref": "reference", "adv": "advantage", "value_model": "critic",
    "policy_model": "policy",
}
"""Sections elsewhere that hold settings of the same names as one of ours."""

FOR_SECTIONS: tuple[tuple[str, dict[str, str]], ...] = (
    ("critic|value|value_model", {
        "policy.": "critic.", "loss.clip_low": "critic.clip", "learner.num_epochs": "critic.num_steps",
        "learner.num_minibatches": "critic.num_steps",
    }),
    ("ref|ref_actor|reference", {"policy.model_path": "reference.model_path"}),
    ("(test|eval|val)(_.*)?", {
        "rollout.num_prompts_per_step": "eval.num_samples", "rollout.num_responses_per_prompt": "eval.num_responses",
        "rollout.train.": "rollout.test.", "data.path": "data.test_path",
    }),
    ("rollout|server_args|inference_model_config", {
        "learner.mesh.tensor": "actors.vllm.tensor_parallel_size", "policy.dtype": "actors.dtype",
    }),
)
"""(a section elsewhere, start of a setting of ours -> what it begins with for that section)."""

NOT_HERE: dict[str, str] = {
    "deepspeed": "ranks are sharded by FSDP2: launch.num_learner_ranks",
    "accelerate": "ranks are started by torchrun: launch.num_learner_ranks",
    "local_rank": "ranks are started by torchrun: launch.num_learner_ranks",
    "zero_stage": "FSDP2 shards as ZeRO-3 does, and with learner.reshard_after_forward=false as ZeRO-2",
    "reference_deepspeed": "the reference model is sharded as the policy is: learner.mesh.shard",
    "zero_optimization": "FSDP2 shards as ZeRO-3 does, and with learner.reshard_after_forward=false as ZeRO-2",
    "memory_optimization": "policy.gradient_checkpointing, policy.optimizer.offload and learner.max_tokens_per_device "
                           "save memory",
    "offload_model": "actors have GPUs of their own, so what is trained stays on its GPU: reference.offload and "
                     "policy.optimizer.offload move the rest to host memory",
    "profiling": "run.memory_interval_s samples memory, and every step logs its peak in system/gpu_allocated_bytes",
    "save_optimizer": "a checkpoint always holds the optimizer: checkpoint.every_steps",
    "use_infer_server": "actors always run in separate processes: launch.num_actors",
    "rollout_save_dir": "every rollout is in the log in run.dir, and samples.num_per_step of them as text",
    "log_level": "set the variable STREAMRL_LOG, for example STREAMRL_LOG=DEBUG",
    **dict.fromkeys(
        ("ep_size", "etp_size", "pp_size", "pipeline_parallel_size", "pipeline_model_parallel_size",
         "expert_model_parallel_size", "expert_tensor_parallel_size"),
        "a model is spread by learner.mesh.replicate, shard, context and tensor",
    ),
    **dict.fromkeys(
        ("initial_batch_size", "min_batch_size", "max_batch_size", "adaptive_batch_sizing", "dynamic_batching"),
        "micro-batches are packed by tokens: learner.max_tokens_per_device",
    ),
    **dict.fromkeys(
        ("min_temperature", "max_temperature", "group_temperature"),
        "rollout.train.member_temperatures gives each answer of a group its own",
    ),
    **dict.fromkeys(("algo", "core_algo"), "algorithm=NAME chooses a recipe: algorithm=grpo or algorithm=dapo"),
    **dict.fromkeys(
        ("tensor_parallel_size", "tp"),
        "learner.mesh.tensor divides the learner's model, actors.vllm.tensor_parallel_size that of a vLLM engine",
    ),
    **dict.fromkeys(
        ("ray_dir", "master_address", "master_addr", "master_port"),
        "Ray is not used: actors join the learner with connect=tcp://HOST:PORT, its ranks are started by torchrun",
    ),
    **dict.fromkeys(
        ("clip_eps_min", "clip_eps_max"),
        "loss.clip_low and loss.clip_high are where the range begins, loss.clip_decay what is left of it at the end",
    ),
}
"""What people look for and will not find, and what there is."""

COMMON = (
    "policy.model_path", "env.name", "env.path", "trainer.num_steps", "policy.optimizer.lr",
    "rollout.num_prompts_per_step", "rollout.num_responses_per_prompt", "rollout.train.sampling.max_new_tokens",
    "rollout.train.sampling.temperature", "staleness.eta", "kl.mode", "actors.engine", "launch.num_actors",
    "eval.every_steps", "run.name",
)
"""Settings to know first: `streamrl settings --common`."""


SIMILAR = 0.85
"""The least similarity of a name and its misspelling: below it, two names only share words."""
SIMILAR_INSIDE = 0.7
"""The same of two names in one section of ours."""


def suggestion(key: str, names: Set[str]) -> str:
    """The setting of these names that was probably meant, as the end of a sentence."""
    near = nearest(key, names)
    return f"did you mean `{near}`?" if near else f"{done_otherwise(key) or 'see `streamrl settings` for every key'}."


def done_otherwise(key: str) -> str | None:
    """The sentence for a name without a setting: the way to get here what it asks for."""
    return next((NOT_HERE[part] for part in reversed(_plain(key).split(".")) if part in NOT_HERE), None)


def nearest(key: str, names: Set[str]) -> str | None:
    """The setting whose name, or name elsewhere, this nearly is; without a section it may be its last part."""
    *sections, last = _plain(key).split(".")
    if (whole := _by_full_name([*sections, last], names)) or last in NOT_HERE:
        return whole
    if not sections:
        known = {name: name for name in names} | _last_parts(names) | ALIASES
        return next((known[name] for name in _close(last, known)), None)
    inside = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == ".".join(sections)}
    if close := _close(last, inside):
        return inside[close[0]]
    parts = _sure_parts(names) | ALIASES
    if last in parts:
        return _for_sections(parts[last], sections, names)
    if done_otherwise(key):
        return None
    if close := _close(last, inside, SIMILAR_INSIDE) if len(last) > 2 else []:
        return inside[close[0]]
    alike = {name for name in names if _close(name.partition(".")[0], [sections[0]])}
    if close := [name for name in _close(_plain(key), alike) if _close(name.rpartition(".")[2], [last])]:
        return close[0]
    meant = next((_for_sections(parts[part], sections, names) for part in _close(last, parts)), None)
    foreign = sections[0] not in names
    return meant if meant is not None and (foreign or meant.rpartition(".")[0] == ".".join(sections)) else None


def _plain(key: str) -> str:
    return key.lower().replace("-", "_")


def _close(word: str, words: Iterable[str], cutoff: float = SIMILAR) -> list[str]:
    """The nearest of these words, if one is near."""
    return difflib.get_close_matches(word, words, n=1, cutoff=cutoff)


def _by_full_name(parts: Sequence[str], names: Set[str]) -> str | None:
    """The setting that these parts, or the last of them with a section, name in full."""
    for start in range(len(parts) - 1 or 1):
        for section in (parts[start], RENAMED.get(parts[start])):
            name = ".".join([section or "", *parts[start + 1 :]])
            if name in FULL_NAMES or ("." in name and name in names):
                return FULL_NAMES.get(name, name)
    return None


def _for_sections(name: str, sections: Sequence[str], names: Set[str]) -> str:
    """The setting that is to that section elsewhere what this one is to the policy or to training."""
    for section, starts in FOR_SECTIONS:
        if any(re.fullmatch(section, part) for part in sections):
            changed = (new + name[len(old) :] for old, new in starts.items() if name.startswith(old))
            return next((one for one in changed if one in names or one.startswith("actors.vllm.")), name)
    return name


def _sure_parts(names: Set[str]) -> dict[str, str]:
    """The setting for each last part that leaves no doubt: no other section has one, but for the critic's."""
    sections: dict[str, set[str]] = {}
    for name in names:
        sections.setdefault(name.rpartition(".")[2], set()).add(name.partition(".")[0])
    return {part: name for part, name in _last_parts(names).items() if len(sections[part] - {"critic"}) < 2}


def _last_parts(names: Set[str]) -> dict[str, str]:
    """The setting for each last part; of several with the same one that is to know first, else the policy's or that
    of training, else the alphabet's first."""
    order = sorted(
        names, key=lambda name: (name not in COMMON, not name.startswith(("policy.", "rollout.train.")), name),
        reverse=True,
    )
    return {name.rpartition(".")[2]: name for name in order}
