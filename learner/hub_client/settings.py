"""Settings of the hub, made from the config of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec

from learner.hub.context.settings import EvalSetSettings, HubSettings
from learner.hub.ledger.tables.settings import LedgerSettings, SamplingRule
from streamrl.config import schema
from streamrl.config.eval_sets import eval_sets, splits
from streamrl.config.load import to_plain
from streamrl.config.rules import eval_sampling, lag_rule, largest_max_lag
from streamrl.messages import MAX_SEQUENCES, Limits, Lineage, Sampling
from streamrl.messages.validate import is_truncated
from streamrl.stream.records import RunStarted

OUTBOX_GROUPS = 1024
"""Groups that one actor may hold until they are durable; as many ranges as one HELLO can list."""
OUTBOX_BYTES = 4 << 30
DEDUPE_WINDOW = 8192
"""Sequence numbers between an actor's oldest group that is not durable and its newest; wider than the outbox, because
evaluations and returned leases use numbers too and are durable at once."""
FAR_FUTURE = (1 << 31) - 1


def hub_settings(
    config: schema.Config, *, started: RunStarted, run_dir: Path, lineage: tuple[Lineage, ...],
    dp_ranks: tuple[int, ...], bind: str, rank_endpoint: str, shm_dir: Path, vocab_size: int,
    restore_path: Path | None, bounds: tuple[int, int] | None = None, device: str = "cpu",
) -> HubSettings:
    """Make all settings of the hub process.

    Args:
        started: the log's record of this start.
        bounds: eta and max_lag to begin with, where the run's staleness control left them; None is as they are set.
    """
    return HubSettings(
        started=started, run_dir=str(run_dir), lineage=lineage, stream=config.stream,
        run_seed=config.run.seed, dp_ranks=dp_ranks, bind=bind, rank_endpoint=rank_endpoint, shm_dir=str(shm_dir),
        env=config.env, data=config.data, reward=config.reward,
        welcome_task=json.dumps({name: to_plain(section) for name, section in _for_actors(config).items()}),
        total_steps=config.trainer.num_steps, limits=limits(config, vocab_size),
        sampling=train_sampling(config.rollout.train.sampling),
        eval_sampling=wire_sampling(eval_sampling(config)),
        eval_sets=tuple(
            EvalSetSettings(one.name, one.config.env, one.config.data, one.config.reward, wire_sampling(one.sampling))
            for one in eval_sets(config) if one.name
        ),
        ledger=ledger_settings(config, vocab_size, bounds), filter=config.filter,
        trained_scores=trained_scores(config),
        hub=config.hub, publish=config.publish, trust=config.trust,
        restore_path=str(restore_path) if restore_path else None, device=device,
        num_minibatches=config.learner.num_minibatches, rank_silent_s=config.learner.rank_silent_s,
        by_turns=config.launch.by_turns,
    )


def _for_actors(config: schema.Config) -> dict[str, object]:
    """The sections of the learner's config that an actor builds its runtime from."""
    names = ("env", "data", "rollout", "actors", "learner", "policy", "reward", "eval")
    # What one answer a prompt is compared with: the actor's own check of its settings asks. No name of code.
    advantage = schema.AdvantageConfig(baseline=config.advantage.baseline)
    return {**{name: getattr(config, name) for name in names}, "advantage": advantage}


def wire_sampling(sampling: schema.SamplingConfig) -> Sampling:
    return Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)


def train_sampling(sampling: schema.SamplingConfig) -> Sampling:
    """The same with a top-k wherever ids are cut off: a token's set has a bound."""
    whole = wire_sampling(sampling)
    if whole.top_k > 0 or not is_truncated(whole):
        return whole
    return msgspec.structs.replace(whole, top_k=sampling.max_kept)


def sampling_rule(config: schema.Config) -> SamplingRule:
    """Sampling of training groups and of their members, where they differ."""
    train = config.rollout.train
    own = {"temperature": train.member_temperatures, "top_p": train.member_top_p}
    members = [
        train_sampling(replace(train.sampling, **{name: one[place % len(one)] for name, one in own.items() if one}))
        for place in range(config.rollout.num_responses_per_prompt if any(own.values()) else 0)
    ]
    return SamplingRule(tuple(members), train.final_temperature, train.num_annealing_steps)


def response_limit(config: schema.Config) -> int:
    """Return the most tokens after the prompt of one trajectory, in training or in any evaluation."""
    return _longest_response(config, splits(config))


def _longest_response(config: schema.Config, chosen: Iterable[tuple[schema.Config, schema.SamplingConfig]]) -> int:
    lengths = [(one.env.max_turns, sampling.max_new_tokens) for one, sampling in chosen]
    longest = max(turns * new_tokens for turns, new_tokens in lengths)
    if all(turns == 1 for turns, _ in lengths):
        return longest
    return max(config.learner.max_row_tokens, longest)


def answer_limit(config: schema.Config) -> int:
    """Return the most action tokens of one training trajectory: the scale of length rewards, no limit of admission."""
    return config.env.max_turns * config.rollout.train.sampling.max_new_tokens


def limits(config: schema.Config, vocab_size: int) -> Limits:
    """Make the limits that actors must respect."""
    masks = config.staleness.mode is schema.StalenessMode.mask_old_tokens
    return Limits(
        heartbeat_s=config.hub.heartbeat_s, hub_silent_s=max(3.0, 3 * config.hub.heartbeat_s),
        progress_deadline_s=_progress_deadline_s(
            _longest_response(config, [(config, config.rollout.train.sampling)]), config.env.step_timeout_s
        ),
        outbox_groups=OUTBOX_GROUPS, outbox_bytes=OUTBOX_BYTES, max_prompt_tokens=config.rollout.max_prompt_tokens,
        max_new_tokens=response_limit(config), vocab_size=vocab_size,
        max_lag=FAR_FUTURE if masks else largest_max_lag(config), max_sequences=MAX_SEQUENCES,
        eval_progress_deadline_s=_progress_deadline_s(
            response_limit(config), max(one.env.step_timeout_s for one, _ in splits(config))
        ),
        max_trajectory_tokens=config.learner.max_row_tokens,
    )


SLOWEST_TOKEN_S = 0.5
"""Slower than any live engine."""


def _progress_deadline_s(num_tokens: int, step_timeout_s: float) -> float:
    # Progress is reported once a generation or a call of the environment is finished.
    return max(120.0, SLOWEST_TOKEN_S * num_tokens, 2 * step_timeout_s)


def stall_fail_s(config: schema.Config) -> float:
    """Return `learner.stall_fail_s`, or longer where the first answers may take longer; 0 is never."""
    patience_s = config.learner.stall_fail_s
    return max(patience_s, SLOWEST_TOKEN_S * response_limit(config)) if patience_s else 0.0


def _slowest_s(config: schema.Config) -> tuple[float, float]:
    """Estimate the time that a turn and a whole episode may take, in training or in any evaluation."""
    lengths = [(one.env, SLOWEST_TOKEN_S * sampling.max_new_tokens) for one, sampling in splits(config)]
    episodes = [(env.max_turns + 1) * env.step_timeout_s + env.max_turns * turn_s for env, turn_s in lengths]
    return max(turn_s for _, turn_s in lengths), max(episodes)


def trained_scores(config: schema.Config) -> tuple[str, ...]:
    """Names of the scores that are trained on, where they are not the task's reward."""
    return () if config.objectives.combine == "reward" else tuple(config.objectives.components)


def ledger_settings(config: schema.Config, vocab_size: int, bounds: tuple[int, int] | None = None) -> LedgerSettings:
    lag = lag_rule(config)
    if bounds is not None:
        lag = replace(lag, eta=bounds[0], max_lag=bounds[1])
    steps = 0 if config.trainer.eval_only else config.trainer.num_steps
    slowest_turn_s, slowest_episode_s = _slowest_s(config)
    return LedgerSettings(
        lag=lag, group_size=config.rollout.num_responses_per_prompt,
        num_groups_total=steps * lag.groups_per_batch, lease_ttl_s=config.hub.lease_ttl_s,
        dead_after_s=config.hub.dead_after_s, max_attempts=config.hub.num_max_attempts,
        on_stale=config.staleness.on_stale.name, mode=config.staleness.mode.name,
        group_policy=config.rollout.group_policy.name, min_members=config.rollout.num_min_members,
        group_deadline_s=config.hub.group_deadline_s, dedupe_window=DEDUPE_WINDOW,
        num_passed_over=config.samples.num_per_step, eval_keep_s=config.eval.pin_s if config.eval.pin else 0.0,
        limits=limits(config, vocab_size), slowest_turn_s=slowest_turn_s,
        lease_max_s=config.hub.lease_ttl_s + slowest_episode_s, keep_refused=config.stream.keep_refused,
        sampling_rule=sampling_rule(config),
    )
