"""Questions that are answered by searching, in the form of Search-R1 (https://arxiv.org/abs/2503.09516).

    model   <think>...</think> <search>person Baloro Kaviberg</search>
    env     <information>Doc 1: ... lives in the city Dosostad.</information>
    model   <think>...</think> <answer>Dosostad</answer>

What is found follows the model's words in the same message and is never trained on. The questions are those of
`data.path`, and `env.tool_use.documents` is what is searched, a file or a service. `examples/tasks/search_world.py`
asks about a synthetic world.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from envs.data.shapes import RecordShape
from envs.data_task import DataTask, TaskSettings
from envs.tools.search import Library, SearchService, library_of
from streamrl.environment import ChatMessage, Record, Step
from streamrl.errors import TaskError

NAME = "search.questions"
STOP = ("</search>", "</answer>")
INSTRUCTION = (
    "Answer the question. Think inside <think> and </think> whenever you have read something new. To search, write "
    "<search> words to look for </search>; what is found then stands between <information> and </information>. Search "
    "as often as you need. Give the final answer alone inside <answer> and </answer>, for example <answer> Paris "
    "</answer>.\nQuestion: "
)
NO_ACTION = "\nThis was neither a search nor an answer: write <search> words </search> or <answer> answer </answer>.\n"
_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_ARTICLE = re.compile(r"\b(a|an|the)\b")


class SearchEnv:
    """One question.

    Args:
        prompt: of a record.
        answers: all right ones of a record.
        library: what is searched.
        format_reward: added for an answer in its tags, right or wrong.
    """

    def __init__(
        self, prompt: Callable[[Record], Sequence[ChatMessage]], answers: Callable[[Record], Sequence[str]],
        library: Library | SearchService, format_reward: float,
    ) -> None:
        self._prompt, self._answers, self._library, self._format_reward = prompt, answers, library, format_reward
        self._record: Record = {}
        self._num_searches = 0

    def reset(self, record: Record) -> Sequence[ChatMessage]:
        self._record, self._num_searches = record, 0
        return self._prompt(record)

    def step(self, action: str) -> Step:
        found = _ACTION.search(action)
        if found is None:
            return Step(0.0, done=False, text=NO_ACTION)
        if found[1] == "search":
            self._num_searches += 1
            return Step(0.0, done=False, text=information(self._library.best(found[2])))
        given = normalized(found[2])
        right = float(bool(given) and any(given == normalized(answer) for answer in self._answers(self._record)))
        parts = {"searches": float(self._num_searches)}
        if self._format_reward:
            parts["format"] = self._format_reward
        return Step(right + self._format_reward, score=right, parts=parts)


class _FileForm:
    """The part of a reward that a task over data files needs: stop strings, system prompt and target."""

    stop, system_prompt = STOP, None

    def target(self, record: Record, answer: Any) -> str:
        return f"<answer>{answers_of(answer)[0]}</answer>"


def search_file(
    settings: TaskSettings, *, num_results: int = 3, format_reward: float = 0.0, instruction: str = INSTRUCTION
) -> DataTask:
    """The task of the questions of data.path. Raises TaskError if nothing says what is searched."""
    documents = settings.env.tool_use.documents
    if documents is None:
        raise TaskError(f"env.name={NAME} searches: set env.tool_use.documents=FILE, the texts to search.")
    shape = RecordShape(settings.data.prompt_key, settings.data.answer_key)
    library = library_of(documents, checked_results(num_results))

    def prompt(record: Record) -> Sequence[ChatMessage]:
        *before, last = shape.messages(record)
        return [*before, replace(last, content=instruction + last.content)]

    def answers(record: Record) -> Sequence[str]:
        return answers_of(shape.required_answer(record))

    return DataTask(settings.data, shape, lambda: SearchEnv(prompt, answers, library, format_reward), _FileForm())


def answers_of(answer: Any) -> list[str]:
    """One right answer, a list of them, or a mapping with such a list under `target`."""
    if isinstance(answer, Mapping):
        answer = answer.get("target")
    found = [str(one) for one in (answer if isinstance(answer, list | tuple) else [answer]) if one is not None]
    if not found:
        raise TaskError(f"the right answer is {answer!r:.60}: give a text or a list of texts.")
    return found


def information(found: Sequence[str]) -> str:
    """The found texts as the model reads them."""
    texts = "\n".join(f"Doc {rank}: {text}" for rank, text in enumerate(found, 1)) or "Nothing was found."
    return f"\n<information>{texts}</information>\n"


def normalized(answer: str) -> str:
    """Lower case, without articles, punctuation and double spaces: https://arxiv.org/abs/1606.05250, section 6."""
    bare = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(_ARTICLE.sub(" ", bare).split()) or " ".join(bare.split()) or answer.strip()  # A, The The, ?


def checked_results(num_results: int) -> int:
    """The number of documents that a search finds. Raises TaskError for none and for too many."""
    if not 1 <= num_results <= 50:
        raise TaskError(f"num_results={num_results} must lie between 1 and 50.")
    return num_results
