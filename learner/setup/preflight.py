"""Preflight: what settings, files and installed packages alone decide, cheapest first and before a model is loaded.

docs/change.md says which check stands here and which elsewhere. `streamrl launch` runs it in a process of its own
before it makes a run directory; the learner then repeats its last part with the device that it really has. Heavy
libraries are imported where they are first needed: most mistakes are found without them.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envs.check import check_task
from envs.data.chat_template import template_of_settings
from envs.registry import task_of
from envs.tools.taught import MERGED, UNREAD, merged_thought, unread_call
from learner.data.dialogues import task_dialogues
from learner.hub_client.settings import answer_limit
from learner.model.config_file import model_config, policy_vocab_size
from learner.setup.model_hub import find_models
from streamrl.config.devices import Choice
from streamrl.config.eval_sets import EvalSet, eval_sets, first_turn, longest_sequence
from streamrl.config.load import to_plain
from streamrl.config.overrides import leaves
from streamrl.config.rules import SMALLEST_VLLM_CPU_HEAD, largest_eta, largest_max_lag, steps_per_batch, tracker_names
from streamrl.config.schema import (
    Config,
    CriticConfig,
    DistillConfig,
    LoraBase,
    LoraConfig,
    MeshConfig,
    PolicyConfig,
    ReferenceConfig,
)
from streamrl.environment import Task
from streamrl.errors import ConfigError, TaskError, in_one_line
from streamrl.extension import resolve_function
from streamrl.gpus import gpu_of
from streamrl.metrics.trackers.registry import check_trackers
from streamrl.transport.keys import KeyDirectory
from streamrl.transport.sockets import socket_root
from streamrl.weights.model_folder import INDEX, SINGLE, check_folder, check_vocabulary, stored_tensors

if TYPE_CHECKING:
    import torch


NUM_PROMPTS, MEASURE_S = 64, 0.5
"""Records whose prompts are measured, and the time for it."""

ADAPTIVE = ("rule", "max_eta", "ess_target", "num_trial_steps", "breaker", "group_spread")
"""Settings of `staleness.adaptive` that only the rule reads; the others are of use without it."""


def check_run(
    config: Config, *, notify: Callable[[str], None] = lambda _: None,
    choose: Callable[[torch.device], Sequence[Choice]] = lambda device: (),
) -> Sequence[Choice]:
    """Check a run that is launched on this machine; returns what `choose` chose for its GPU, and set in the config.

    Args:
        notify: called with a line about each check that takes long.
        choose: called once the models are known to be good.
    Raises:
        ConfigError: a setting, a file, a GPU or a package that the run would fail for later.
        TaskError: the task cannot be made, or one of its records cannot be played.
    """
    check_trackers(tracker_names(config))
    _check_mesh(config)
    if config.launch.num_actors and ":" in config.actors.engine:
        resolve_function(config.actors.engine, {}, setting="actors.engine")
    if config.policy.lora.base_quantization is not LoraBase.none:
        from learner.model.adapter.lora import check_quantization

        check_quantization(config.policy.lora.base_quantization)
    check_models(config, notify)
    check_keys(config)
    check_port(config.hub.bind, "hub.bind")
    socket_root()
    _check_vllm_heads(config)
    _check_tensor_parallel(config)
    check_folders(config, notify)
    template_of_settings(config.data.chat_template)
    task = task_of(config)
    _check_template(config, task, notify)
    _check_positions(config)
    if not config.launch.debug:  # what is wrong shows in its first episode, in a debugger
        check_task(task, limit_s=config.env.step_timeout_s, notify=notify)
    checked_eval_sets(config, notify=notify)
    if config.policy.tiny.enabled:
        check_tiny_prompts(
            task, config.rollout.max_prompt_tokens, needs_target=config.policy.tiny.num_warm_start_steps > 0
        )
    device = learner_device(config)
    chosen = choose(device)
    _check_memory(config, device, notify)
    check_settings(config, device)
    if idle := idle_settings(config):
        notify(f"nothing in this run reads {', '.join(idle)}")
    return chosen


def checked_eval_sets(config: Config, *, notify: Callable[[str], None] = lambda _: None) -> list[EvalSet]:
    """The evaluation sets, none asked for more prompts than it has.

    Raises ConfigError or TaskError, with the set's name: a setting, a file or a record that it cannot be made of.
    """
    found = eval_sets(config)
    for one in found:
        if not one.name:
            continue
        try:
            task = task_of(one.config)
            check_task(task, limit_s=one.config.env.step_timeout_s, notify=notify)
            one.config.eval.num_samples = min(one.config.eval.num_samples, task.num_records("test"))
        except TaskError as error:
            raise TaskError(f"{one.setting}: {error}") from error
    return found


def _check_template(config: Config, task: Task, notify: Callable[[str], None]) -> None:
    """Tell that a model which is to be asked in its chat template has none, or writes what nobody reads."""
    data, path = config.data, config.policy.model_path
    if not data.apply_chat_template or path is None or config.policy.tiny.enabled:
        return
    template = template_of_settings(data.chat_template)
    if template is None and not has_chat_template(Path(path)):
        notify("the tokenizer has no chat template: contents are joined by line breaks; "
               "set data.apply_chat_template=false if that is intended")
        return
    tokenizer, read = _tokenizer(Path(path)), getattr(task, "read_calls", None)
    if text := merged_thought(tokenizer, template):
        notify(MERGED.format(text))
    if read is not None and (text := unread_call(tokenizer, getattr(task, "tools", ())[0], read, template)):
        parser = f"env.tool_use.parser={config.env.tool_use.parser}"
        notify(UNREAD.format(text, parser, "name a function of your own there"))


def _check_positions(config: Config) -> None:
    """Refuse answers for which a model of the run has no positions: it would show once the run has begun.

    Raises ConfigError.
    """
    from streamrl.architectures.positions import num_positions

    needed, models = first_turn(config), _folders(config)
    if config.distill.teacher is not None and Path(config.distill.teacher).is_dir():
        models["distill.teacher"] = config.distill.teacher
    for setting, path in models.items():
        positions = num_positions(path)
        if positions is not None and needed > positions:
            raise ConfigError(
                f"a prompt and an answer may have {needed} tokens, and {setting}={path} has positions for {positions}: "
                f"lower rollout.max_prompt_tokens={config.rollout.max_prompt_tokens}, or max_new_tokens of "
                "rollout.train.sampling and rollout.test.sampling"
            )


def has_chat_template(model_dir: Path) -> bool:
    """Whether one of the files in which a tokenizer keeps its chat template has one."""
    settings = model_dir / "tokenizer_config.json"
    written = json.loads(settings.read_text()).get("chat_template") if settings.exists() else None
    named = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    return bool(written) or any((model_dir / name).exists() for name in named)


def check_losses(config: Config) -> None:
    """Make one objective step on synthetic data, then the objective of the run. Raises ConfigError."""
    from learner.setup.dry_run import LossSections, run_dry
    from learner.setup.trainer import make_objective, make_staleness

    run_dry(LossSections(
        config.advantage, config.loss, config.kl, config.reference, config.distill, config.entropy, config.constraint,
        config.critic, config.filter, max_lag=largest_max_lag(config), max_new_tokens=answer_limit(config),
        steps_per_batch=steps_per_batch(config),
    ))
    make_objective(config, make_staleness(config, {}), {}, num_steps=0)


def unguarded_settings(config: Config) -> str:
    """The warning of `learner.objective.options.unguarded` at the run's largest lead, or nothing."""
    from learner.objective.options import unguarded

    return unguarded(config.advantage, config.loss, eta=largest_eta(config))


def idle_settings(config: Config) -> list[str]:
    """Settings off their defaults that nothing in this run reads, as words; a recipe may have set them for another one.
    """
    from streamrl.algorithms.registry import find_estimator, find_surrogate

    surrogate = find_surrogate(config.loss.surrogate)
    unread = {
        "critic": not find_estimator(config.advantage.estimator).needs_critic,
        "loss.clip_low": not surrogate.clips,
        "loss.clip_high": not surrogate.clips,
        "loss.dual_clip": "dual_clip" not in surrogate.knobs and config.loss.dual_clip is not None,
        **dict.fromkeys(
            (f"staleness.adaptive.{name}" for name in ADAPTIVE), not config.staleness.adaptive.enabled
        ),
    }
    usual = dict(leaves(to_plain(Config())))
    return [
        f"{key}={value}"
        for key, value in leaves(to_plain(config))
        if value != usual.get(key) and any(found and f"{key}.".startswith(f"{name}.") for name, found in unread.items())
    ]


def check_settings(config: Config, device: torch.device) -> None:
    """Transports on this device, and one objective step on synthetic data. Raises ConfigError."""
    from learner.model.optimizer import check_optimizer, make_schedule

    check_transports(config.publish.transports, device)
    check_losses(config)
    for name, section in (("policy", config.policy), ("critic", config.critic)):
        check_optimizer(section.optimizer, setting=f"{name}.optimizer")
        make_schedule(
            section.optimizer, section.scheduler, num_steps=config.trainer.num_steps, setting=f"{name}.scheduler"
        )


def check_tiny_prompts(task: Task, max_prompt_tokens: int, *, needs_target: bool) -> None:
    """Whether a tiny model, which has a token for each character, can be made for this task.

    Raises:
        TaskError: it does not open with one user message, or has no right answers for the warm start.
        ConfigError: most prompts are too long.
    """
    dialogues = task_dialogues(task, NUM_PROMPTS, needs_target=needs_target, limit_s=MEASURE_S)
    lengths = [len(prompt) + 1 for prompt, *_ in dialogues]
    lengths.sort()
    if lengths and lengths[len(lengths) // 2] > max_prompt_tokens:
        raise ConfigError(
            f"most prompts of task {task.name} are longer than rollout.max_prompt_tokens={max_prompt_tokens}: they "
            f"have up to {lengths[-1]} characters, each a token of the tiny model. Set rollout.max_prompt_tokens="
            f"{ceil(1.25 * lengths[-1] / 64) * 64}, or take a real model with policy.model_path."
        )


def check_transports(transports: Sequence[str], device: torch.device) -> None:
    """Refuse a transport that is unknown or that this machine cannot use. Raises ConfigError."""
    from streamrl.weights.transport import load_transport

    for name in transports:
        load_transport(name, setting="publish.transports").require(str(device))


def models_of(config: Config) -> dict[str, PolicyConfig | ReferenceConfig | CriticConfig | DistillConfig]:
    """The sections that name a model, by the setting in which each does."""
    return {
        "policy.model_path": config.policy, "reference.model_path": config.reference,
        "critic.model_path": config.critic, "distill.teacher": config.distill,
    }


def check_keys(config: Config) -> None:
    """Raise ConfigError if the directory of keys cannot be used, or lacks the one for actors that launch starts."""
    if config.hub.keys is None:
        return
    keys = KeyDirectory(config.hub.keys)
    keys.hub()
    keys.allowed()
    if config.launch.num_actors:
        keys.launched_key()


def check_port(address: str, setting: str) -> None:
    """Raise ConfigError if another process listens at this address; port 0 is any free one."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            # As the hub does: a run that just ended is no bar.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), int(port)))
    except OSError as error:
        raise ConfigError(
            f"{setting}={address} cannot be used ({error.strerror}): stop the process that has it, choose another port "
            "(0: any free), or give an address of this machine."
        ) from error


def check_models(config: Config, notify: Callable[[str], None]) -> None:
    """Find every model that the settings name. Raises ConfigError."""
    find_models(models_of(config), notify, allow=config.actors.allow)
    for setting, path in _folders(config).items():
        model_config(path, setting=setting)
    if config.distill.teacher is not None and config.policy.model_path is not None:  # a tiny model is made later
        from learner.model.teacher import check_teacher

        temperature = config.rollout.train.sampling.temperature
        check_teacher(config.distill.teacher, Path(config.policy.model_path), temperature=temperature)


def check_folders(config: Config, notify: Callable[[str], None]) -> None:
    """Refuse a model that some part of the run would read otherwise than transformers does. Raises ConfigError.

    Of the models that `check_models` has found.
    """
    for setting, path in _folders(config).items():
        is_critic = setting == "critic.model_path"  # which may be a value head alone
        check_folder(path, said=f"{setting}={path}", needs_weights=not is_critic)
        if not is_critic:
            _check_tied(Path(path), setting, notify)
        if setting == "policy.model_path":
            _check_tokenizer(Path(path))
            _check_adapter(config.policy.lora, Path(path))


def _folders(config: Config) -> dict[str, str]:
    """The folders of models that the settings name, by setting, but for a teacher's."""
    found = {"reference.model_path": config.reference.model_path, "critic.model_path": config.critic.model_path}
    if not config.policy.tiny.enabled:
        found["policy.model_path"] = config.policy.model_path
    return {setting: path for setting, path in found.items() if path is not None}


def _check_tied(folder: Path, setting: str, notify: Callable[[str], None]) -> None:
    """Refuse two embeddings that differ where the configuration says they are one; a model is built only if need be."""
    stored, settings = stored_tensors(folder), model_config(folder, setting=setting)
    if (folder / SINGLE).is_file() and (folder / INDEX).is_file():
        notify(f"{setting}={folder} holds {SINGLE} and {INDEX}: the former is read, as transformers does")
    rows = policy_vocab_size(folder)
    tables = [name for name, one in stored.items() if len(one.shape) == 2 and one.shape[0] == rows]
    if len(tables) > 1 and settings.get("tie_word_embeddings") is not False:
        import torch

        from learner.checkpoint.model_files import ModelFiles, empty_model

        model = empty_model(folder, dtype=torch.float32, attention="eager")
        ModelFiles(folder).check_tied(model, said=f"{setting}={folder}")


def _check_adapter(lora: LoraConfig, folder: Path) -> None:
    """Refuse names of layers that the model does not have."""
    if lora.rank is not None:
        import torch

        from learner.checkpoint.model_files import empty_model
        from learner.model.adapter.lora import chosen_layers

        chosen_layers(empty_model(folder, dtype=torch.float32, attention="eager"), lora)


def _check_tokenizer(folder: Path) -> None:
    """Refuse a tokenizer that cannot be loaded, or that has more tokens than the model."""
    check_vocabulary(_tokenizer(folder), policy_vocab_size(folder), said=f"policy.model_path={folder}")


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any library that a tokenizer needs
        raise ConfigError(
            f"policy.model_path={folder}: its tokenizer cannot be loaded, put tokenizer.json and tokenizer_config.json "
            f"there: {in_one_line(error)}"
        ) from error


def _check_tensor_parallel(config: Config) -> None:
    """Every GPU of a vLLM engine gets as many heads; those for keys and values may also stand on several."""
    size, tiny = int(config.actors.vllm.get("tensor_parallel_size", 1)), config.policy.tiny
    if not config.launch.num_actors or config.actors.engine != "vllm":
        return
    model, heads, kv_heads = "the tiny model", tiny.num_heads, tiny.num_heads
    if not tiny.enabled and config.policy.model_path is not None:
        model, settings = config.policy.model_path, model_config(config.policy.model_path, setting="policy.model_path")
        settings = settings.get("text_config", settings)
        heads = int(settings.get("num_attention_heads") or size)  # a model without attention is not judged here
        kv_heads = int(settings.get("num_key_value_heads") or heads)
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if size not in fitting:
        raise ConfigError(
            f"actors.vllm.tensor_parallel_size={size} does not divide the heads of {model}, which has {heads} for "
            f"queries and {kv_heads} for keys and values: set it to one of {', '.join(map(str, fitting))}."
        )


def _check_mesh(config: Config) -> None:
    if config.learner.mesh != MeshConfig():
        from learner.ranks.mesh import Mesh

        Mesh.from_world_size(config.launch.num_learner_ranks, **vars(config.learner.mesh))


def _check_vllm_heads(config: Config) -> None:
    tiny, on_cpu = config.policy.tiny, not config.actors.device.startswith("cuda")
    head = tiny.hidden_size // tiny.num_heads
    if not (config.launch.num_actors and config.actors.engine == "vllm" and tiny.enabled and on_cpu):
        return
    if head < SMALLEST_VLLM_CPU_HEAD and (config.actors.device == "cpu" or not num_gpus()):
        raise ConfigError(
            f"actors.engine=vllm has no attention for heads of {head} on a CPU, and policy.tiny.hidden_size="
            f"{tiny.hidden_size} is split over policy.tiny.num_heads={tiny.num_heads}: set policy.tiny.num_heads="
            f"{max(1, tiny.hidden_size // SMALLEST_VLLM_CPU_HEAD)}, or take actors.engine=native."
        )


def _check_memory(config: Config, device: torch.device, notify: Callable[[str], None]) -> None:
    from learner.fit.estimate import Uncounted, check_memory

    gpu = gpu_of(str(device))
    if gpu is not None and gpu.total_bytes and config.policy.model_path is not None:
        notify("counting the memory of a step")
        try:
            notify(str(check_memory(config, gpu.total_bytes, longest=longest_sequence(config))))
        except Uncounted as error:
            notify(str(error))


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def learner_device(config: Config) -> torch.device:
    """The learner's device. Raises ConfigError if a GPU that learner or actors name is not here."""
    import torch

    count, ranks = num_gpus(), config.launch.num_learner_ranks
    wanted = config.run.device.partition(":")[0]
    if wanted == "cuda" and count < ranks:
        raise ConfigError(
            f"run.device={config.run.device} needs a GPU for each of launch.num_learner_ranks={ranks}, but {count} "
            "are visible here: set run.device=cpu, or check the driver and CUDA_VISIBLE_DEVICES."
        )
    if config.launch.num_actors and config.actors.device.startswith("cuda") and not count:
        raise ConfigError(
            f"actors.device={config.actors.device}, but no GPU is visible here: set actors.device=cpu, or "
            "launch.num_actors=0 and start the actors on a machine that has one."
        )
    return torch.device("cuda" if wanted == "cuda" or (wanted == "auto" and count) else "cpu")
