"""Rules between settings. Each names the keys, what was got, and the remedy."""

from __future__ import annotations

import re
from dataclasses import fields, replace

from streamrl.config.addresses import check_endpoint, is_address, is_loopback, is_wildcard
from streamrl.config.devices import check_devices, check_engine, check_in_process, check_ranks
from streamrl.config.schema import (
    AdaptiveRule,
    Config,
    EvalConfig,
    EvalSamplingConfig,
    FilterConfig,
    LoraConfig,
    PublishWhen,
    SamplingConfig,
    SplitConfig,
    StalenessConfig,
    StalenessMode,
)
from streamrl.errors import ConfigError
from streamrl.extension import resolve
from streamrl.lag_rule import LagRule
from streamrl.messages import TRANSPORTS

ENGINES = {
    "native": "actors.engines.native.engine:NativeEngine",
    "vllm": "actors.engines.vllm.adapters:vllm_engine",
}
"""Engine of actors by name -> its factory, which `actors.engines.base` imports; nothing here does."""

SMALLEST_VLLM_CPU_HEAD = 32
"""Its attention on a CPU takes no smaller head size."""


def lead(config: Config) -> int:
    """Eta at the start, in batches; a forced lag is a lead that is always used up."""
    force = config.staleness.force
    return config.staleness.eta if force is None else force


def lookahead(config: Config) -> int:
    """W, the look-ahead window in groups."""
    window = config.staleness.num_lookahead_groups
    if window is not None:
        return window
    return 0 if config.staleness.mode is StalenessMode.wait else config.rollout.num_prompts_per_step


def steps_per_batch(config: Config) -> int:
    """S, optimizer steps of one batch."""
    return config.learner.num_minibatches * config.learner.num_epochs


def lag_rule(config: Config) -> LagRule:
    """The lag rule that the run starts with; its bound is the setting, or what grants and window allow."""
    staleness = config.staleness
    given = staleness.hard_max_lag if staleness.mode is StalenessMode.reweight else staleness.max_lag
    terms = {
        "eta": lead(config), "window": lookahead(config), "groups_per_batch": config.rollout.num_prompts_per_step,
        "max_lag": given, "steps_per_batch": steps_per_batch(config),
    }
    # Every other term of the rule is the setting of its name, so that a new term is not listed here.
    named = {term.name: getattr(staleness, term.name) for term in fields(LagRule) if term.name not in terms}
    return LagRule.from_settings(**terms, **named)


def max_lag(config: Config) -> int:
    """The bound at which a group is refused at the start, in optimizer steps."""
    return lag_rule(config).max_lag


def soft_max_lag(config: Config) -> int:
    """The lag beyond which tokens are masked or discounted at the start; `max_lag` where nothing is."""
    given = config.staleness.max_lag
    return max_lag(config) if given is None else given


def largest_eta(config: Config) -> int:
    """The largest lead that the run may ever have."""
    adaptive = config.staleness.adaptive
    moves = adaptive.enabled and adaptive.rule is not AdaptiveRule.fixed
    return max(lead(config), adaptive.max_eta) if moves else lead(config)


def largest_max_lag(config: Config) -> int:
    """The largest bound that the run may ever have."""
    return lag_rule(config).at_eta(largest_eta(config)).max_lag


def eval_sampling(config: Config) -> SamplingConfig:
    """The sampling of an evaluation: as in training where `rollout.test.sampling` says nothing."""
    own = {item.name: getattr(config.rollout.test.sampling, item.name) for item in fields(EvalSamplingConfig)}
    return replace(config.rollout.train.sampling, **{name: value for name, value in own.items() if value is not None})


def tracker_names(config: Config) -> list[str]:
    """Trackers of the run, `tracking.wandb.enabled` included."""
    return [*config.tracking.trackers, *(["wandb"] if config.tracking.wandb.enabled else [])]


def check(config: Config) -> None:
    """Raise ConfigError, with the setting, its value and the remedy, for the first rule that is broken."""
    _check_ranges(config)
    _check_data(config)
    _check_staleness(config)
    _check_sizes(config)
    _check_names(config)
    _check_hub(config)
    check_endpoint(config.actors.endpoint, config.env.agent)
    check_engine(config)
    check_devices(config)
    check_in_process(config)
    _check_turns(config)
    _check_lora(config)


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _check_ranges(config: Config) -> None:
    for split in ("train", "test"):
        sampling, name = getattr(config.rollout, split).sampling, f"rollout.{split}.sampling"
        top_k = sampling.top_k
        _need(top_k in (None, -1) or top_k > 0, f"{name}.top_k={top_k} must be -1 (off) or positive")
        _need(
            not {r"\n", r"\n\n", r"\t"}.intersection(sampling.stop or ()),
            f"{name}.stop={sampling.stop} is a backslash and a letter, which would end no answer. For a new line write "
            f"$'{name}.stop=[\"\\n\"]' in a shell, with the $, or \"\\n\" in double quotes in a YAML file",
        )
    accuracy = config.filter.accuracy_range
    _need(
        accuracy is None or (len(accuracy) == 2 and accuracy[0] < accuracy[1]),
        f"filter.accuracy_range={accuracy} must be two numbers, the lower one first, e.g. [0.01,0.99]",
    )
    _need(
        config.filter.refill or config.filter.zero_std or accuracy is not None,
        "filter.refill=false does nothing without a filter: set filter.zero_std=true or filter.accuracy_range too",
    )
    _need(
        config.filter.zero_std or config.filter.min_std == FilterConfig().min_std,
        f"filter.min_std={config.filter.min_std:g} does nothing with filter.zero_std=false: set that to true, or leave "
        "it out",
    )
    _check_train_sampling(config.rollout.train.sampling)
    _check_train_split(config.rollout.train, config.distill.teacher)
    _need(
        not config.objectives.divide_by_std or config.advantage.scale == "none",
        f"objectives.divide_by_std=true does nothing with advantage.scale={config.advantage.scale}, which divides the "
        "same rewards by another spread: leave one of them out",
    )
    _need(
        config.eval.pin or config.eval.pin_s == EvalConfig().pin_s,
        f"eval.pin_s={config.eval.pin_s:g} does nothing with eval.pin=false: leave one of them out",
    )
    _need(
        config.eval.num_responses == 1 or eval_sampling(config).temperature > 0,
        f"eval.num_responses={config.eval.num_responses} with rollout.test.sampling.temperature=0 would give the same "
        "answer each time: use rollout.test.sampling.temperature=0.7, say, or one response",
    )


def _check_train_sampling(sampling: SamplingConfig) -> None:
    name = "rollout.train.sampling"
    _need(
        sampling.temperature > 0,
        f"{name}.temperature=0 is greedy: all members of a group would be the same; use more than 0",
    )
    _need(
        sampling.top_k <= sampling.max_kept,
        f"{name}.top_k={sampling.top_k} is above {name}.max_kept={sampling.max_kept}, the most ids of a token that "
        "travel to the learner: lower the one or raise the other",
    )


def _check_train_split(train: SplitConfig, teacher: str | None) -> None:
    temperatures, top_p, final = train.member_temperatures, train.member_top_p, train.final_temperature
    _need(
        all(one > 0 for one in temperatures),
        f"rollout.train.member_temperatures={temperatures} must be positive numbers, e.g. [0.6,0.8,1.0,1.2]",
    )
    _need(
        all(0 < one <= 1 for one in top_p),
        f"rollout.train.member_top_p={top_p} must be numbers above 0 and at most 1, e.g. [0.9,1.0]",
    )
    _need(
        (final is not None) == (train.num_annealing_steps > 0),
        f"rollout.train.final_temperature={final} and rollout.train.num_annealing_steps={train.num_annealing_steps} "
        "need each other: set both, or leave both out",
    )
    _need(
        final is None or not (temperatures or top_p),
        f"rollout.train.final_temperature={final} moves one temperature, and rollout.train.member_temperatures or "
        "member_top_p give each member of a group its own sampling: leave one of them out",
    )
    others = {*temperatures, *([] if final is None else [final])} - {1.0}
    _need(
        "://" not in str(teacher) or not others,
        f"distill.teacher={teacher} tells log-probs at temperature 1 only, and rollout.train.member_temperatures or "
        f"final_temperature sample at {sorted(others)}: leave these out, or give the teacher's checkpoint",
    )


def _check_data(config: Config) -> None:
    data = config.data
    for name, paths in (("data.path", data.path), ("data.test_path", data.test_path)):
        is_list = isinstance(paths, list) and bool(paths) and all(isinstance(path, str) for path in paths)
        _need(
            paths is None or (isinstance(paths, str) and bool(paths)) or is_list,
            f"{name}={paths} must be a path such as train.jsonl, or a list of them: [a.jsonl,b.jsonl]",
        )
    given = len(data.path) if isinstance(data.path, list) else 1
    _need(
        data.weights is None or (len(data.weights) == given and all(weight > 0 for weight in data.weights)),
        f"data.weights={data.weights} must be {given} positive numbers, one for each path of data.path={data.path}",
    )


def _check_names(config: Config) -> None:
    names = tracker_names(config)
    _need(
        not config.tracking.artifacts or not {"tensorboard", "trackio"}.issuperset(names),
        f"tracking.artifacts=true with tracking.trackers={names}: none of them keeps files; add wandb, mlflow or your "
        "own",
    )
    _need(
        not config.env.tools or config.env.max_turns > 1,
        f"env.tools={config.env.tools} with env.max_turns={config.env.max_turns}: a call takes one turn and the answer "
        "another; set env.max_turns=4, or as many as an episode may have",
    )
    relay, actor_id = config.actors.relay, config.actors.actor_id
    _need(
        relay is None or re.fullmatch(r"tcp://[^\s/]+:\d{1,5}(#[\w-]+)?", relay) is not None,
        f"actors.relay={relay} is not a valid address: give tcp://HOST:PORT, as `streamrl relay` prints it",
    )
    for name, value in (("run.name", config.run.name), ("actors.actor_id", actor_id)):
        _need(
            value is None or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}", value) is not None,
            f"{name}={value} must be 1 to 48 of A-Z a-z 0-9 . _ - and begin with a letter or digit",
        )
    for name, transports in (
        ("actors.transports", config.actors.transports), ("publish.transports", config.publish.transports)
    ):
        unknown = sorted(one for one in transports if one not in TRANSPORTS and ":" not in one)
        _need(
            not unknown, f"{name}={transports} names unknown transports {unknown}: choose from "
            f"{', '.join(sorted(TRANSPORTS))}, or name your own as package.module:attribute",
        )
        _need("zmq" in transports, f"{name} must contain zmq: it carries the model's files")
        _need(len(set(transports)) == len(transports), f"{name}={transports} names a transport twice")
    dtypes, devices = ("auto", "float32", "bfloat16", "float16"), ("auto", "cpu", "cuda")
    for name, value, known in (
        ("run.device", config.run.device.partition(":")[0], devices),
        ("actors.device", config.actors.device.partition(":")[0], devices),
        ("policy.dtype", config.policy.dtype, dtypes),
        ("actors.dtype", config.actors.dtype, dtypes),
    ):
        _need(value in known, f"{name}={value} is unknown: choose one of {', '.join(known)}")
    if ":" not in config.actors.engine:  # one's own is looked up where it is made
        resolve(config.actors.engine, ENGINES, setting="actors.engine")
    tiny = config.policy.tiny
    _need(
        not tiny.enabled or config.policy.model_path is None,
        f"policy.model_path={config.policy.model_path} and policy.tiny.enabled=true are two models to start from: "
        "leave one of them out",
    )
    _need(
        not tiny.enabled or config.policy.tokenizer_path is None,
        f"policy.tokenizer_path={config.policy.tokenizer_path} does not fit a tiny model, whose tokenizer is made for "
        "its task: leave it out, or give policy.model_path",
    )
    _need(
        not tiny.enabled or tiny.hidden_size % tiny.num_heads == 0,
        f"policy.tiny.hidden_size={tiny.hidden_size} must be a multiple of policy.tiny.num_heads={tiny.num_heads}",
    )


def _check_staleness(config: Config) -> None:
    eta, bound, mode = lead(config), max_lag(config), config.staleness.mode
    setting = "eta" if config.staleness.force is None else "force"
    name = "hard_max_lag" if mode is StalenessMode.reweight else "max_lag"
    steps, least = steps_per_batch(config), replace(lag_rule(config), window=0).bound
    of_steps = f" of {steps} optimizer steps, whose last one trains at lag {least}" if steps > 1 else ""
    _need(
        bound >= least,
        f"staleness.{name}={bound} is below staleness.{setting}={eta}: generation may run {eta} batches ahead"
        f"{of_steps}, so the bound would drop what admission allows; raise {name} or lower {setting}",
    )
    _check_mode(config)
    _check_adaptive(config)
    _check_forced(config)
    _check_publishing(config)


def _check_forced(config: Config) -> None:
    force = config.staleness.force
    _need(
        force is None or not config.staleness.adaptive.enabled,
        f"staleness.force={force} keeps the lag where it is, staleness.adaptive.enabled=true moves it: choose one",
    )
    _need(
        force is None or config.publish.when is not PublishWhen.drift,
        f"staleness.force={force} generates every batch from a version of its own, which publish.when=drift may leave "
        "out: set publish.when=every_step",
    )


def _check_publishing(config: Config) -> None:
    every, when = config.publish.every_steps, config.publish.when
    _need(
        every == 1 or (when is PublishWhen.every_step and config.staleness.force is None),
        f"publish.every_steps={every} goes with publish.when=every_step and without staleness.force, got "
        f"publish.when={when.name} and staleness.force={config.staleness.force}: leave it out, or change these",
    )
    _need(
        every <= lead(config) + 1,
        f"publish.every_steps={every} is more than staleness.eta={lead(config)} + 1: actors would have no lead left, "
        f"and training would wait for them; set staleness.eta={every - 1} or more",
    )


def _check_mode(config: Config) -> None:
    staleness, mode = config.staleness, config.staleness.mode
    if mode is StalenessMode.wait:
        _need(
            lookahead(config) == 0 and staleness.max_lag is None,
            f"staleness.mode=wait consumes in dispatch order, so its bound is staleness.eta={staleness.eta}: leave "
            "staleness.num_lookahead_groups and staleness.max_lag alone, or choose staleness.mode=drop",
        )
    if mode is StalenessMode.reweight:
        _need(
            0 < staleness.decay < 1,
            f"staleness.decay={staleness.decay} must be in (0, 1): 0 would mask (staleness.mode=mask_old_tokens), 1 "
            "would do nothing",
        )
        _need(
            staleness.max_lag is not None and 0 <= staleness.max_lag < max_lag(config),
            f"staleness.mode=reweight discounts tokens beyond staleness.max_lag={staleness.max_lag} and refuses groups "
            f"beyond {max_lag(config)}: with these nothing would be discounted; set staleness.max_lag below that",
        )
    else:
        _need(
            staleness.hard_max_lag is None,
            f"staleness.hard_max_lag={staleness.hard_max_lag} does nothing with staleness.mode={mode.name}: set "
            "staleness.mode=reweight, or use staleness.max_lag",
        )
        _need(
            staleness.decay == StalenessConfig().decay,
            f"staleness.decay={staleness.decay} does nothing with staleness.mode={mode.name}: set "
            "staleness.mode=reweight, or leave it out",
        )


def _check_adaptive(config: Config) -> None:
    adaptive, eta = config.staleness.adaptive, config.staleness.eta
    name = "staleness.adaptive"
    if not adaptive.enabled:
        return
    _need(
        0 <= adaptive.min_eta <= eta <= adaptive.max_eta or adaptive.rule is AdaptiveRule.fixed,
        f"{name}.min_eta={adaptive.min_eta} and max_eta={adaptive.max_eta} must lie around staleness.eta={eta}, where "
        "the control starts",
    )
    _need(
        adaptive.rule is not AdaptiveRule.fixed or adaptive.breaker or adaptive.group_spread,
        f"{name}.enabled=true with rule=fixed, breaker=false and group_spread=false does nothing: choose a part of it",
    )


def _check_sizes(config: Config) -> None:
    rollout = config.rollout
    group, new_tokens = rollout.num_responses_per_prompt, rollout.train.sampling.max_new_tokens
    check_ranks(config)
    _check_minibatches(config)
    _need(
        group > 1 or config.advantage.baseline in ("none", "batch") and not config.filter.zero_std,
        f"rollout.num_responses_per_prompt={group} leaves advantage.baseline={config.advantage.baseline} and "
        f"filter.zero_std={str(config.filter.zero_std).lower()} nothing to compare with: use at least 2, or "
        "algorithm=sao (a critic) or algorithm=single_rollout (the batch's other answers), whose filter is off",
    )
    _need(
        config.advantage.by != "agent" or not config.filter.zero_std,
        "filter.zero_std=true drops groups whose sums of rewards are equal: with advantage.by=agent set it to false",
    )
    _need(
        rollout.num_min_members <= group or rollout.group_policy != "accept_partial",
        f"rollout.num_min_members={rollout.num_min_members} exceeds rollout.num_responses_per_prompt={group}",
    )
    longest = rollout.max_prompt_tokens + config.env.max_turns * new_tokens
    for name in ("max_tokens_per_device", "max_inference_tokens_per_device"):
        budget, context = getattr(config.learner, name), config.learner.mesh.context
        _need(
            budget is None or longest <= budget * context,
            f"learner.{name}={budget} on learner.mesh.context={context} ranks cannot hold the longest trajectory: "
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} + env.max_turns={config.env.max_turns} x "
            f"rollout.train.sampling.max_new_tokens={new_tokens} = {longest}; raise the budget or lower the lengths",
        )


def _check_minibatches(config: Config) -> None:
    num, groups = config.learner.num_minibatches, config.rollout.num_prompts_per_step
    _need(
        groups % num == 0,
        f"learner.num_minibatches={num} does not divide rollout.num_prompts_per_step={groups}: a minibatch is a whole "
        "number of groups, the same number in each; set a divisor of it",
    )
    _need(
        config.publish.when is not PublishWhen.every_optimizer_step or steps_per_batch(config) > 1,
        "publish.when=every_optimizer_step does nothing with one optimizer step per batch: leave it out, or "
        "set learner.num_minibatches or learner.num_epochs",
    )
    _need(
        num > 1 or not config.critic.by_minibatch,
        "critic.by_minibatch=true does nothing with learner.num_minibatches=1: leave it out, or set that to 4, say",
    )
    _need(
        config.learner.stop_kl is None or steps_per_batch(config) > 1,
        f"learner.stop_kl={config.learner.stop_kl} does nothing with one optimizer step per batch: leave it out, or "
        "set learner.num_minibatches or learner.num_epochs",
    )


def _check_hub(config: Config) -> None:
    bind = config.hub.bind
    _need(is_address(bind), f"hub.bind={bind} must look like tcp://127.0.0.1:5601")
    _need(
        is_loopback(bind) or config.hub.keys is not None,
        f"hub.bind={bind} is open to the network, where anyone could join: make keys with `streamrl keys new keys`, "
        f"then start with  hub.bind={bind} hub.keys=keys",
    )
    _need(
        not is_wildcard(bind) or config.hub.advertise is not None,
        f"hub.bind={bind} listens on every interface and names none that actors could use: add hub.advertise=NAME, "
        "this machine's name or address as actors reach it",
    )
    _need(
        config.hub.dead_after_s > config.hub.heartbeat_s,
        f"hub.dead_after_s={config.hub.dead_after_s} must exceed hub.heartbeat_s={config.hub.heartbeat_s}",
    )
    _need(
        config.policy.model_path is not None or config.policy.tiny.enabled,
        "policy.model_path is not set: give a local checkpoint directory, or try experiment=quickstart",
    )


def _check_turns(config: Config) -> None:
    """Whatever keeps memory of a device, or works, while it is the others' turn, is refused."""
    shared, eta = config.launch.share_gpus, largest_eta(config)
    _need(
        not isinstance(shared, str) or config.launch.by_turns,
        f"launch.share_gpus={shared} is none of true, false, null and turns: take one of them",
    )
    if not config.launch.by_turns:
        return
    _need(
        eta == 0,
        f"launch.share_gpus=turns, but the lead of generation is up to {eta} batches: actors and learner never work at "
        "once, so a lead only makes data older; set staleness.eta=0, without staleness.force and staleness.adaptive",
    )
    on_device = {"ipc", "nccl"} & {*config.publish.transports, *config.actors.transports}
    _need(
        not on_device,
        f"launch.share_gpus=turns, but publish.transports or actors.transports have {sorted(on_device)}, which keep "
        "versions on the GPU: set both to [shm,zmq]",
    )
    _need(
        config.policy.optimizer.offload,
        "launch.share_gpus=turns leaves the GPU to the engine between two steps, but policy.optimizer.offload is "
        "false: set it to true, so that moments are in host memory then",
    )
    _need(
        not config.launch.in_process,
        "launch.share_gpus=turns is for processes that could not share a GPU, and launch.in_process=true has one "
        "process on the CPU: leave one of them out",
    )


def _check_lora(config: Config) -> None:
    lora, usual = config.policy.lora, LoraConfig()
    if lora.rank is None:
        changed = [item.name for item in fields(lora) if getattr(lora, item.name) != getattr(usual, item.name)]
        _need(
            not changed,
            f"policy.lora.{changed[0] if changed else ''} does nothing while policy.lora.rank is not set: set "
            "policy.lora.rank=16, say, or leave policy.lora alone",
        )
        return
    _need(
        "all-linear" not in lora.target_modules or len(lora.target_modules) == 1,
        f"policy.lora.target_modules={lora.target_modules}: all-linear stands for all names: remove the others",
    )
    _need(
        bool(lora.target_modules),
        "policy.lora.target_modules=[] adapts no layer: set it to some names, or to [all-linear]",
    )
    _need(
        not (config.reference.sync_every_steps and config.reference.model_path),
        f"reference.model_path={config.reference.model_path} cannot follow an adapter "
        f"(reference.sync_every_steps={config.reference.sync_every_steps}): leave reference.model_path=null",
    )
