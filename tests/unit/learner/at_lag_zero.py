"""Groups that an engine generates under settings of training, and what the learner says of them with its weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engines.base import Engine
from actors.episode import EpisodeRunner
from actors.render import Renderer
from actors.rollout import run_group
from actors.settings import episode_rules
from learner.data.packing import pack
from learner.data.trajectories import check_groups, read_groups
from learner.hub_client.settings import train_sampling
from learner.model.policy import load_policy
from streamrl.config.load import load_config
from streamrl.environment import ChatMessage, Step
from streamrl.messages import Group
from streamrl.messages.codec import encode
from tests.unit.actors.fakes import TableTask, lease


def two_turns() -> TableTask:
    """The first answer gets a reply, the second ends the episode: observations stand between sampled tokens."""
    replies = [Step(0.5, done=False, messages=[ChatMessage("user", "more")]), Step(1.0)]
    return TableTask(lambda action: replies.pop(0))


async def generated(engine: Engine, tokenizer: Any, *words: str) -> list[Group]:
    """Four groups of one answer of two turns, with these settings below `rollout.train.sampling`."""
    settings = [f"rollout.train.sampling.{word}" for word in ("max_new_tokens=24", *words)]
    config = load_config(["experiment=quickstart", "env.max_turns=2", *settings])
    sampling, groups = config.rollout.train.sampling, []
    for number in range(4):
        runner = EpisodeRunner(two_turns(), engine, Renderer(tokenizer), episode_rules(config, sampling))
        groups.append(await run_group(lease(number, sampling=train_sampling(sampling)), runner))
        runner.executor.close()
    return groups


def assert_ratios_are_1(groups: list[Group], model_dir: Path, vocab_size: int) -> None:
    """The learner gives every token, and every whole answer, the recorded probability to 1e-3."""
    version = groups[-1].members[-1].versions[-1].version
    frames = list(map(encode, groups))
    check_groups(frames, version=version, vocab_size=vocab_size)
    rows = read_groups(frames)
    assert len(rows) == 4 and any(row.num_turns == 2 for row in rows)
    policy = load_policy(model_dir)
    for micro in pack(rows, 256):
        scored, _ = policy(
            micro.tokens, micro.positions, micro.packing, micro.score_index, micro.targets, micro.temperatures,
            sets=micro.sets,
        )
        scores = micro.padded(scored.detach())
        for place, index in enumerate(micro.trajectory_ids):
            row = rows[index]
            log_ratio = scores[place][micro.mask[place]] - torch.from_numpy(row.logprobs[row.mask])
            torch.testing.assert_close(log_ratio.exp(), torch.ones_like(log_ratio), atol=1e-3, rtol=0)
            assert float(log_ratio.sum().exp()) == pytest.approx(1.0, abs=1e-3), "of the whole sequence, too"
