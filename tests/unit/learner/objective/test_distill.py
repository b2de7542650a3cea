"""On-policy distillation: advantages against literal ones, what each setting changes, and what is refused."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import streamrl
from learner.data.packing import pack
from learner.data.trajectories import Trajectory
from learner.model.networks import FrozenPolicy
from learner.model.policy import load_policy
from learner.model.teacher import check_teacher, load_teacher
from learner.model.tiny import make_tiny_model
from learner.objective.loss import policy_term, shaped_advantages
from learner.objective.token_batch import TEACHER
from learner.ranks.mesh import Ranks
from learner.setup.preflight import check_losses, check_models
from streamrl.api.trainer import recorded_group
from streamrl.config.load import load_config
from streamrl.errors import ConfigError
from tests.kit.learning import OneBatch, batch, make_objective, plan_of, tiny_checkpoint

LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Student and teacher: random weights, one vocabulary, different sizes."""
    folder = tmp_path_factory.mktemp("models")
    return tiny_checkpoint(folder / "student", seed=1), tiny_checkpoint(folder / "teacher", "llama", seed=2)


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    """The same with tokenizers; the teacher is wider."""
    folder = tmp_path_factory.mktemp("characters")
    return (
        make_tiny_model(folder / "student", characters=LETTERS, hidden_size=16, num_heads=2, seed=1),
        make_tiny_model(folder / "teacher", characters=LETTERS, hidden_size=32, num_heads=2, seed=2),
    )


def rows_of() -> list[Trajectory]:
    """Answers with tokens of several versions, two to a prompt."""
    return [replace(row, temperature=0.75) for row in batch(3, 2, seed=3)]


def scored(models, *words: str):
    """The advantages and losses of one micro-batch in a run with these settings, and what they were made of."""
    student, teacher = models
    config = load_config(["algorithm=distill", f"distill.teacher={teacher}", f"policy.model_path={student}", *words])
    objective = make_objective(config=config)
    policy, rows = load_policy(student).double(), rows_of()
    one = OneBatch(objective, rows, plan_of(rows))
    (micro,) = pack(rows, 10_000)
    one.score(policy, [micro], frozen={TEACHER: FrozenPolicy(load_policy(teacher).double(), name="teacher")})
    logprobs, entropy = policy(
        micro.tokens, micro.positions, micro.packing, micro.score_index, micro.targets, micro.temperatures
    )
    flat = logprobs.detach().requires_grad_()
    tokens = one.plan.tokens(micro, micro.padded(flat), micro.padded(entropy.detach()))
    return one.plan, tokens, flat


@torch.no_grad()
def literal_logprobs(path, row) -> np.ndarray:
    """Float64 log-probs of a row's action tokens by transformers alone, at the temperature of their sampling."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.token_ids]).astype(np.int64))
    logits = model(ids[None]).logits[0, :-1].double() / row.temperature
    found = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return found[len(row.prompt_ids) - 1:].numpy()


@pytest.mark.parametrize(
    ("coef", "reward_weight", "center"), [(1.0, 0.0, False), (0.3, 1.0, False), (0.5, 0.2, True)]
)
@pytest.mark.shows("distill.coef", "distill.reward_weight", "distill.center")
def test_the_advantage_is_the_literal_one_in_float64(models, coef, reward_weight, center):
    plan, tokens, _ = scored(
        models, f"distill.coef={coef}", f"distill.reward_weight={reward_weight}", f"distill.center={center}",
        "advantage.baseline=leave_one_out",
    )
    found = shaped_advantages(tokens, plan)

    rows = list(plan.rows)
    by_teacher, by_student = ([literal_logprobs(path, row)[row.mask] for row in rows] for path in reversed(models))
    recorded = [row.logprobs[row.mask].astype(np.float64) for row in rows]
    mean = np.concatenate([a - b for a, b in zip(by_teacher, recorded, strict=True)]).mean() if center else 0.0
    for place, at in enumerate(tokens.micro.trajectory_ids):
        siblings = [one.reward for one in rows if one.group_id == rows[at].group_id and one is not rows[at]]
        reward = rows[at].reward - sum(siblings) / len(siblings)
        literal = reward_weight * reward + coef * (by_teacher[at] - by_student[at] - mean)
        mine = found[place][tokens.mask[place]].double().numpy()
        assert np.abs(mine - literal).max() < 1e-6 * max(1.0, np.abs(literal).max())


def test_its_gradient_is_that_of_the_truncated_ratio_times_the_advantage(models):
    plan, tokens, flat = scored(models, "loss.cap=1.5", "distill.center=false")
    policy_term(tokens, plan).losses.sum().backward()

    behavior = tokens.micro.behavior_logprobs[tokens.mask].double()
    student, teacher = tokens.policy.detach()[tokens.mask].double(), tokens.outputs.teacher[tokens.mask].double()
    literal = -(student - behavior).exp().clamp(max=1.5) * (teacher - student)
    mine = tokens.micro.padded(flat.grad)[tokens.mask].double()
    torch.testing.assert_close(mine, literal, atol=1e-6, rtol=1e-5)


def groups_of(trainer, number: int):
    """Answers of random letters, as the policy of the start would score them."""
    rng = np.random.default_rng(number)
    return [
        recorded_group(
            group, [4, 5, 6],
            [(ids, [-np.log(12.0)] * 6, 0.0) for ids in rng.integers(4, 12, (4, 6)).tolist()],
            version=trainer.version,
        )
        for group in range(4)
    ]


@pytest.mark.shows("distill.teacher")
def test_a_student_comes_nearer_to_the_teacher_that_is_named_without_any_reward(characters):
    student, teacher = characters
    trainer = streamrl.Trainer(
        student, algorithm="distill", distill__teacher=teacher, policy__optimizer__lr=3e-3,
        rollout__max_prompt_tokens=16,
    )
    measured = [trainer.train(groups_of(trainer, number))["distill/kl"] for number in range(12)]

    assert measured[-1] < 0.7 * measured[0]
    assert trainer.version == 12


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["distill.coef=2"], "distill.coef=2.0 does nothing without a teacher"),
        (["algorithm=distill"], "algorithm=distill. needs a teacher: distill.teacher=MODEL"),
        (["distill.teacher=x", "distill.reward_weight=0"], "would drop groups by their reward"),
        (
            ["algorithm=vtrace", "distill.teacher=x", "distill.reward_weight=0", "filter.zero_std=false"],
            "trains a critic for nothing",
        ),
    ],
)
def test_what_would_do_nothing_is_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        check_losses(load_config([*words, "policy.model_path=none"]))


def test_a_teacher_of_another_tokenizer_is_refused_before_the_run(characters, tmp_path):
    student, teacher = characters
    other = make_tiny_model(tmp_path / "other", characters="hgfedcba", hidden_size=16, num_heads=2)
    config = load_config([f"policy.model_path={student}", f"distill.teacher={other}", "algorithm=distill"])

    with pytest.raises(ConfigError, match="distill.teacher=.*other has another tokenizer.*token 4 is 'a' there"):
        check_models(config, notify=pytest.fail)
    check_teacher(teacher, student)
    larger = make_tiny_model(tmp_path / "larger", characters=LETTERS + "xyz", hidden_size=16, num_heads=2)
    check_teacher(larger, student)  # it knows more tokens, and all of the student's
    load = partial(load_teacher, ranks=Ranks(), passes={}, dtype=torch.float32)
    assert load(larger, load_policy(student), student).name == "teacher"
    with pytest.raises(ConfigError, match="the teacher does not have it .3 of 15 tokens differ"):
        load(student, load_policy(larger), larger)


def test_a_teacher_that_is_not_there_is_refused(characters, tmp_path):
    config = load_config([f"policy.model_path={characters[0]}", f"distill.teacher={tmp_path}/none"])

    with pytest.raises(ConfigError, match="distill.teacher=.*no such folder"):
        check_models(config, notify=pytest.fail)
