"""Episodes with tools: calls are answered, problems are reported to the model, the final answer goes to the task."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from envs.registry import task_of
from envs.tools.environment import ToolEnv
from streamrl.config.load import from_plain
from streamrl.config.schema import Config
from streamrl.environment import Env, HasTools, Step
from streamrl.errors import StreamrlError

TIMES = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'


class Reverse:
    """A user's own async tool."""

    name, description = "reverse", "Reverse a text."
    parameters: Mapping[str, Any] = {
        "type": "object", "required": ["text"],
        "properties": {"text": {"type": "string"}, "times": {"type": "integer"}},
    }  # fmt: skip

    async def call(self, arguments: Mapping[str, Any]) -> str:
        if arguments["text"] == "":
            raise RuntimeError("nothing to reverse")
        return str(arguments["text"][::-1]) * arguments.get("times", 1)


OWN = f"{__name__}:Reverse"


def settings(*words: str) -> Config:
    return from_plain({}, ["policy.tiny.enabled=true", "env.max_turns=4", "env.options.max_length=4", *words])


def new_env(*words: str) -> tuple[Env, dict[str, Any]]:
    task = task_of(settings(*words))
    record = dict(task.record("train", 0))
    env = task.env()
    play(env.reset, record)
    return env, record


def play(method: Callable[[Any], Any], argument: object) -> Any:
    result = method(argument)
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


def say(env: Env, *actions: str) -> list[Step]:
    return [play(env.step, action) for action in actions]


def reverse(arguments: str) -> str:
    return f'<tool_call>{{"name": "reverse", "arguments": {arguments}}}</tool_call>'


@pytest.mark.shows("env.tools")
def test_any_task_gets_tools_and_scores_the_final_answer() -> None:
    plain, record = new_env("env.tools=[]")
    assert say(plain, TIMES)[0].done
    env, record = new_env("env.tools=[calculator]")
    asked, answered = say(env, f"I compute. {TIMES}", record["answer"])
    assert isinstance(env, ToolEnv) and not inspect.iscoroutinefunction(env.step)
    assert [(m.role, m.content) for m in asked.messages] == [("tool", "42")] and not asked.done and asked.reward == 0
    assert answered.done and answered.reward == 1.0 and answered.score == 1.0
    assert answered.parts["tool_calls"] == 1.0 and answered.parts["tool_errors"] == 0.0


def test_an_own_async_tool_and_a_wrong_answer() -> None:
    env, record = new_env(f"env.tools=[{OWN},calculator]")
    assert isinstance(env, ToolEnv) and inspect.iscoroutinefunction(env.step)
    asked, both, answered = say(env, reverse('{"text": "abc", "times": 2}'), TIMES + reverse('{"text": "x"}'), "???")
    assert [m.content for m in asked.messages] == ["cbacba"]
    assert [m.content for m in both.messages] == ["42", "x"]
    assert answered.done and answered.score == 0.0 and answered.parts["tool_calls"] == 3.0


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        (reverse("{}"), "Error: reverse: the argument 'text' is missing."),
        (reverse('{"text": 3}'), "Error: reverse: the argument 'text' must be of type string, got 3."),
        (reverse('{"text": "a", "times": true}'), "must be of type integer, got True."),
        (reverse('{"text": "a", "time": 2}'), "unknown argument 'time'. Did you mean times? It takes: text, times."),
        (reverse('{"text": ""}'), "Error: RuntimeError: nothing to reverse"),
        (reverse('{"text": "a"}').replace('"reverse"', '"revers"'), "there is no tool 'revers'. Did you mean reverse?"),
        ("<tool_call>reverse(a)</tool_call>", "Error: the call is not JSON"),
    ],
)
def test_errors_are_answers_to_the_model(action: str, problem: str) -> None:
    env, record = new_env(f"env.tools=[{OWN}]")
    asked, answered = say(env, action, record["answer"])
    assert problem in asked.messages[0].content and not asked.done
    assert answered.reward == 1.0 and answered.parts["tool_errors"] == 1.0


@pytest.mark.shows("env.tool_use.max_calls")
def test_after_so_many_calls_the_next_text_is_the_answer() -> None:
    env, _ = new_env("env.tools=[calculator]", "env.tool_use.max_calls=1", "env.max_turns=9")
    first, second, third = say(env, TIMES + TIMES, TIMES, TIMES)
    assert [m.content for m in first.messages] == ["42", "No calls are left: give the final answer."]
    assert second.done and second.parts["tool_calls"] == 1.0
    env, _ = new_env("env.tools=[calculator]", "env.tool_use.max_calls=2", "env.max_turns=9")
    first, second = say(env, TIMES + TIMES, TIMES)
    assert [m.content for m in first.messages] == ["42", "42"]
    assert [m.content for m in second.messages] == ["No calls are left: give the final answer."]


def test_the_last_turn_is_the_answer_whatever_it_holds() -> None:
    env, _ = new_env("env.tools=[calculator]", "env.max_turns=2")
    first, last = say(env, TIMES, TIMES)
    assert not first.done and last.done and last.score == 0.0


@pytest.mark.shows("env.tool_use.max_output_chars")
@pytest.mark.shows("env.tool_use.role")
def test_long_outputs_are_cut_and_come_in_the_role_that_is_set() -> None:
    words = (f"env.tools=[{OWN}]", "env.tool_use.max_output_chars=3", "env.tool_use.role=user")
    (asked,) = say(new_env(*words)[0], reverse('{"text": "edcba"}'))
    assert [(m.role, m.content) for m in asked.messages] == [("user", "abc\n... (2 more characters)")]


@pytest.mark.shows("env.tool_use.parser")
def test_the_parser_that_is_set_reads_the_calls() -> None:
    env, _ = new_env("env.tools=[calculator]", "env.tool_use.parser=angle")
    assert say(env, "<6*7>")[0].messages[0].content == "42"
    assert say(new_env("env.tools=[calculator]")[0], "<6*7>")[0].done


@pytest.mark.shows("env.tool_use.describe")
def test_tools_are_described_unless_turned_off() -> None:
    task = task_of(settings("env.tools=[calculator,python]"))
    assert '"name": "python"' in task.tool_prompt and "<tool_call>" in task.tool_prompt  # type: ignore[attr-defined]
    env, _ = new_env("env.tools=[calculator,python]")
    assert isinstance(env, HasTools) and [one["function"]["name"] for one in env.tools] == ["calculator", "python"]
    env, _ = new_env("env.tools=[calculator]", "env.tool_use.describe=false")
    assert isinstance(env, HasTools) and env.tools == []


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["env.tools=[calculator]", "env.max_turns=1"], "a call takes one turn and the answer another"),
        (["env.tools=[calculater]"], "env.tools=calculater is unknown. Did you mean calculator?"),
        (["env.tools=[calculator,calculator]"], "gives one name to several tools"),
        (["env.tools=[pathlib:Path]"], "pathlib:Path is no tool"),
        (["env.tools=[search]"], "give env.tool_use.documents=FILE"),
        (["env.tools=[search]", "env.tool_use.documents=nowhere.jsonl"], "there is no such file"),
        (["env.tools=[calculator]", "env.tool_use.parser=xml"], "env.tool_use.parser=xml is unknown"),
    ],
)
def test_mistakes_in_the_settings_are_told(words: list[str], problem: str) -> None:
    with pytest.raises(StreamrlError, match=problem.replace("[", r"\[").replace(".", r"\.").replace("?", r"\?")):
        task_of(settings(*words))
