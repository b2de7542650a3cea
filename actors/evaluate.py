"""streamrl eval MODEL_OR_RUN [key=value ...]

Answer the held-out prompts of a task with one model and score them: no learner, no hub. MODEL_OR_RUN is a run, as
runs/quickstart-001, whose settings are taken over, or a Hugging Face checkpoint, which needs a task:

  streamrl eval runs/quickstart-001
  streamrl eval runs/quickstart-001 eval.num_responses=4 rollout.test.sampling.temperature=0.7
  streamrl eval models/smollm2-135m-instruct experiment=smollm2 env.name=reasoning_gym.chain_sum eval.num_samples=50
  streamrl eval MODEL data.path=test.jsonl reward.type=math
  streamrl eval runs/quickstart-001@40                 the version that a checkpoint of the run holds
  streamrl eval runs/quickstart-001 eval.datasets.hard=hard.jsonl     that file, and the held-out prompts

Every answer goes into evals/ (of the run, else of the working directory), one JSON line each.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import msgspec

from actors.env_calls.instances import Instances
from actors.episode import EpisodeRunner
from actors.local_policy import LocalPolicy, local_config, open_policy, run_of, sampling_message
from actors.render import Renderer
from actors.settings import episode_rules, make_endpoint, make_renderer
from envs.registry import task_of
from envs.rewards.extract import stated_answer
from streamrl.commands import exit_at_once, status_of
from streamrl.config.eval_sets import EvalSet, eval_sets
from streamrl.environment import HasSetUp, Record, Task
from streamrl.errors import ConfigError, TaskError
from streamrl.messages import Member, MemberStatus
from streamrl.metrics.eval_scores import average, estimates

PROGRESS_S = 5.0
REFRESH_S = 0.5


@dataclass(slots=True)
class Answers:
    """The results by prompt: scores and final answers in the order of completion, and what was not scored."""

    scores: list[list[float]]
    finals: list[list[str]]
    parts: dict[str, list[float]] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    num_truncated: int = 0
    num_failed: int = 0
    failure: str = ""

    @property
    def num_done(self) -> int:
        return len(self.rewards) + self.num_failed


async def evaluate(one: EvalSet, policy: LocalPolicy, task: Task, out: TextIO, progress: Progress) -> Answers:
    """Play every prompt of a set `eval.num_responses` times, writing each answer as a line of JSON."""
    config, num_prompts = one.config, num_prompts_of(one, task)
    answers = Answers([[] for _ in range(num_prompts)], [[] for _ in range(num_prompts)])
    rules = episode_rules(config, one.sampling, task, trains=False)
    renderer = make_renderer(config, policy.tokenizer, policy.end_ids, task)
    runner = EpisodeRunner(
        task, policy.engine, renderer, rules, num_threads=config.env.num_threads, endpoint=make_endpoint(config),
        instances=Instances(config.env.num_max_instances),
    )
    sampling = sampling_message(one.sampling)
    places = asyncio.Semaphore(2 * config.actors.num_concurrent)  # the engine batches; more would only wait in memory

    async def play(index: int, response: int) -> None:
        async with places:
            record = task.record("test", index)
            seed = (config.run.seed * 1_000_003 + index * config.eval.num_responses + response) % (1 << 63)
            member = await runner.play(record, index, seed, sampling)
            _note(answers, index, response, record, member, renderer, out, runner.last_env_error)
            progress.update(answers)

    try:
        async with asyncio.TaskGroup() as group:
            for index in range(num_prompts):
                for response in range(config.eval.num_responses):
                    group.create_task(play(index, response))
    finally:
        await runner.close()
    return answers


def _note(
    answers: Answers, index: int, response: int, record: Record, member: Member, renderer: Renderer, out: TextIO,
    failure: str,
) -> None:
    line: dict[str, Any] = {"prompt_index": index, "response": response, "record": record}
    if member.status == MemberStatus.ABORTED:
        answers.num_failed += 1
        answers.failure = failure or member.finish
        line["failure"] = answers.failure
    else:
        text = renderer.said(member)
        score = member.scores.get("score", member.reward)
        answers.scores[index].append(score)
        final = stated_answer(text)
        answers.finals[index].append(final)
        answers.rewards.append(member.reward)
        answers.num_truncated += member.cut
        for name, value in member.scores.items():
            if name != "score":
                answers.parts.setdefault(name, []).append(value)
        line |= {
            "text": str(text), "answer": final, "score": score, "reward": member.reward, "scores": member.scores,
            "finish": member.finish, "num_tokens": len(member.token_ids) // 4,
        }
    out.write(msgspec.json.encode(line).decode() + "\n")


class Progress:
    """One line that is written over on a terminal, one line every few seconds in a pipe."""

    def __init__(self, total: int) -> None:
        self._total, self._began, self._last = total, time.monotonic(), time.monotonic()
        self._terminal = sys.stderr.isatty()

    def update(self, answers: Answers) -> None:
        now = time.monotonic()
        done = answers.num_done
        if now - self._last < (REFRESH_S if self._terminal else PROGRESS_S) and done < self._total:
            return
        self._last = now
        left = (now - self._began) / done * (self._total - done)
        text = f"{done}/{self._total} answers, score {average(answers.scores).value:.3f}, {left:.0f} s left"
        end = "" if self._terminal and done < self._total else "\n"
        print(f"\r{text:<70}" if self._terminal else text, end=end, file=sys.stderr, flush=True)


def summary(one: EvalSet, task: Task, answers: Answers) -> dict[str, Any]:
    """Every estimate, as plain values."""
    k = one.config.eval.num_responses
    scored = estimates(answers.scores, answers.finals, num_responses=k, solved=one.config.eval.solved_score)
    return {
        "set": one.name, "task": task.name, "model": str(one.config.policy.model_path),
        "num_prompts": len(answers.scores), "num_responses": k, "num_failed": answers.num_failed,
        "failure": answers.failure,
        "truncated_fraction": answers.num_truncated / max(1, len(answers.rewards)),
        "reward": sum(answers.rewards) / max(1, len(answers.rewards)),
        "estimates": {name: [one.value, one.stderr, one.num_prompts] for name, one in scored.items()},
        "parts": {name: sum(values) / len(values) for name, values in sorted(answers.parts.items())},
    }


def text_of(result: Mapping[str, Any], path: Path) -> str:
    """The table at the end."""
    many = f", {result['num_responses']} answers each" if result["num_responses"] > 1 else ""
    rows = [("set", result["set"])] if result.get("set") else []
    rows += [("task", f"{result['task']}, {result['num_prompts']} prompts{many}"), ("model", result["model"])]
    for name, (value, stderr, _) in result["estimates"].items():
        rows.append((name, f"{value:.3f}" + ("" if math.isnan(stderr) else f" ± {stderr:.3f}")))
    rows += [(f"  {name}", f"{value:.3f}") for name, value in result["parts"].items()]
    rows.append(("cut by a limit", f"{result['truncated_fraction']:.1%}"))
    if result["num_failed"]:
        rows.append(("failed", f"{result['num_failed']} answers could not be scored: {result['failure']}"))
    rows.append(("answers", str(path)))
    return "\n".join(f"{name:<16}{value}" for name, value in rows)


def num_prompts_of(one: EvalSet, task: Task) -> int:
    """The number of prompts that are asked of a set; TaskError for records that cannot be read."""
    return min(one.config.eval.num_samples, task.num_records("test"))


def _out_path(source: str, name: str) -> Path:
    """A new file in the run's, else the working directory's evals/."""
    folder = (run_of(source) or Path()) / "evals"
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in name)
    number = 1
    while (path := folder / f"{name}-{number:03d}.jsonl").exists():
        number += 1
    return path


def _with_tasks(sets: Iterable[EvalSet]) -> list[tuple[EvalSet, Task]]:
    """Every set with its task, its records read. Raises ConfigError or TaskError with the set's name."""
    found = []
    for one in sets:
        try:
            task = task_of(one.config)
            num_prompts_of(one, task)
        except TaskError as error:
            raise TaskError(f"{one.setting}: {error}" if one.name else str(error)) from error
        found.append((one, task))
    if not found:
        raise ConfigError("eval.num_samples=0 asks for no prompt: give the number of held-out prompts")
    return found


async def run(source: str, words: Sequence[str]) -> int:
    """Evaluate each set, print, write; returns the exit status."""
    config = local_config(source, words)
    tasks = _with_tasks(eval_sets(config))
    print(f"loading {config.policy.model_path}", file=sys.stderr, flush=True)
    policy = await open_policy(config)
    codes = []
    try:
        for place, (one, task) in enumerate(tasks):
            print("\n" if place else "", end="")
            codes.append(await _run_set(source, one, task, policy))
    finally:
        with contextlib.suppress(Exception):  # the engine's own end must not hide what happened
            await policy.engine.close()
    return max(codes)


async def _run_set(source: str, one: EvalSet, task: Task, policy: LocalPolicy) -> int:
    path = _out_path(source, one.name or task.name)
    if isinstance(task, HasSetUp):
        await asyncio.to_thread(task.set_up)
    progress = Progress(num_prompts_of(one, task) * one.config.eval.num_responses)
    try:
        with path.open("w", encoding="utf-8") as out:
            answers = await evaluate(one, policy, task, out, progress)
    finally:
        if isinstance(task, HasSetUp):
            task.tear_down()
    result = summary(one, task, answers)
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    print(text_of(result, path), flush=True)
    if not answers.rewards:
        print(f"error: no answer could be scored: {answers.failure}", file=sys.stderr)
        return 1
    return 0


def main(words: Sequence[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        print(__doc__)
        return 0 if {"-h", "--help"} & set(words) else 2
    return status_of(
        lambda: asyncio.run(run(words[0], words[1:])), interrupted="\nstopped; the answers so far are in evals/"
    )


if __name__ == "__main__":
    exit_at_once(main(sys.argv[1:]))
