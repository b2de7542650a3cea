"""Arithmetic with a calculator: calls are answered, answers are scored, and its warm start plays such an episode."""

import pytest

from envs.check import check_task
from envs.registry import load_task
from envs.tasks.strings import ToolArithmetic
from streamrl.environment import HasTargetTurns, Step
from streamrl.errors import TaskError


def play(*actions: str, prompt: str = "37*45", answer: str = "1665") -> list[Step]:
    env = ToolArithmetic().env()
    (message,) = env.reset({"prompt": prompt, "answer": answer})  # type: ignore[misc]
    assert message.content == prompt
    return [env.step(action) for action in actions]  # type: ignore[misc]


def test_a_call_is_answered_and_the_answer_scored() -> None:
    asked, answered = play("<37*45>", "1665")
    assert [m.content for m in asked.messages] == ["1665"] and asked.reward == 0 and not asked.done
    assert answered.done and answered.reward == answered.score == 1.0 and answered.parts["tool_calls"] == 1.0


def test_wrong_calls_and_wrong_answers_earn_less() -> None:
    assert play("<37*46>", "1702")[1].reward == 0.25  # the 1
    assert play("1665")[0].score == 1.0
    wrong, last = play("<37*>", "1664")
    assert [m.content for m in wrong.messages] == ["?"] and last.score == 0.0 and last.reward == 0.75
    assert play("<1>", "<2>", "<3>")[2].done


def test_its_target_turns_are_an_episode_that_earns_everything() -> None:
    task = load_task("tool.arithmetic", options={"max_digits": 3})
    check_task(task)
    assert isinstance(task, HasTargetTurns)
    record = task.record("train", 5)
    call, said, answer = task.target_turns(record)
    env = task.env()
    env.reset(record)
    asked, answered = env.step(call), env.step(answer)
    assert asked.messages[0].content == said and answered.score == 1.0  # type: ignore[union-attr]


def test_splits_share_no_expression_and_operators_are_those_asked_for() -> None:
    task = ToolArithmetic(operators="+", max_digits=1)
    train, test = ({task.record(split, i)["prompt"] for i in range(300)} for split in ("train", "test"))
    assert not train & test and all("+" in prompt for prompt in train | test)


@pytest.mark.parametrize("options", [{"operators": "+/"}, {"operators": ""}, {"max_digits": 0}])
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(TaskError, match=next(iter(options))):
        load_task("tool.arithmetic", options=options)
