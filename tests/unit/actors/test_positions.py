"""Models with fewer positions than a trajectory may have tokens: engines have room for these, and no turn asks more."""

import json
from types import SimpleNamespace

import pytest

from actors.episode import EpisodeRunner
from actors.local_policy import open_policy
from actors.rollout import run_group
from actors.settings import episode_rules
from learner.model.tiny import make_tiny_model
from learner.setup.preflight import check_run
from streamrl.config.eval_sets import longest_sequence
from streamrl.config.load import load_config
from streamrl.config.rules import eval_sampling
from streamrl.environment import ChatMessage, Step
from streamrl.errors import ConfigError, EpisodeFullError
from streamrl.messages import MemberStatus
from streamrl.messages.codec import unpack_ids
from tests.kit.loops import run
from tests.unit.actors.fakes import TableTask, lease

POSITIONS = 48
WORDS = ("experiment=quickstart", "rollout.max_prompt_tokens=16", "rollout.train.sampling.max_new_tokens=8",
         "rollout.test.sampling.max_new_tokens=8")  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(
        tmp_path_factory.mktemp("model"), characters="abcdefgh ", hidden_size=16, num_heads=2, max_positions=POSITIONS
    )


def settings(model_dir, *words):
    return load_config([*WORDS, f"policy.model_path={model_dir}", "policy.tiny.enabled=false", *words])


async def play(model_dir, task, num_turns: int):
    config = settings(model_dir, f"env.max_turns={num_turns}")
    assert longest_sequence(config) > POSITIONS
    policy = await open_policy(config)
    try:
        runner = EpisodeRunner(task, policy.engine, policy.renderer, episode_rules(config, eval_sampling(config)))
        (member,) = (await run_group(lease(), runner)).members
        runner.executor.close()
        return member
    finally:
        await policy.engine.close()


def test_an_episode_of_many_turns_ends_where_the_positions_end(model_dir):
    task = TableTask(lambda action: Step(0.0, done=False, messages=[ChatMessage("user", "abc")]))

    async def work() -> None:
        member = await play(model_dir, task, num_turns=40)
        num_tokens = len(unpack_ids(member.prompt_ids)) + len(unpack_ids(member.token_ids))
        assert (member.status, member.finish) == (MemberStatus.TRUNCATED, "length")
        assert POSITIONS - 8 <= num_tokens <= POSITIONS

    run(work)


def test_a_loop_is_told_that_its_input_leaves_no_position(model_dir):
    said = []

    async def rollout(record, client):
        for length in (16, POSITIONS - 3, POSITIONS):
            try:
                said.append(len((await client.generate("a" * length, train=length == 16)).token_ids))
            except EpisodeFullError as error:
                said.append(str(error))
        return Step(1.0)

    async def work() -> None:
        task = TableTask(lambda action: Step(0.0))
        task.env = lambda: SimpleNamespace(rollout=rollout)
        await play(model_dir, task, num_turns=8)
        assert said[0] <= 8 and said[1] <= 3 and "no room" in said[2]

    run(work)


def test_a_launch_refuses_an_answer_that_has_no_positions(model_dir, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"question": "ab" * n, "answer": "b"}) + "\n" for n in range(1, 9)))
    own = (f"data.path={path}", "data.test_ratio=0", "reward.type=exact", "data.apply_chat_template=false")

    with pytest.raises(ConfigError, match="may have 49 tokens, .* positions for 48: lower rollout.max_prompt_tokens="):
        check_run(settings(model_dir, *own, "rollout.max_prompt_tokens=41"))
    check_run(settings(model_dir, *own, "rollout.max_prompt_tokens=40", "env.max_turns=8"))
    whole = make_tiny_model(tmp_path / "m", characters="abcdefgh ", hidden_size=16, num_heads=2)
    for word in ("reference.model_path", "distill.teacher"):
        with pytest.raises(ConfigError, match=f"{word}=.* has positions for 48"):
            check_run(settings(whole, *own, "rollout.max_prompt_tokens=41", f"{word}={model_dir}", "kl.mode=k2_is"))
