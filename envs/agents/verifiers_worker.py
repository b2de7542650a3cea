"""Plays episodes of a taskset of verifiers; a program of the Python that has verifiers 0.4, with nothing of ours.

    verifiers_worker.py SETTINGS tasks   writes the tasks, a line of JSON each
    verifiers_worker.py SETTINGS play    reads episodes to play and to cancel, writes their rewards, a line each
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


async def rewarded(env: Any, asked: dict[str, Any]) -> dict[str, float]:
    """The reward of an episode and its parts; the mean over agents, where several play."""
    kind = type(env.taskset).task_type()
    task = kind(kind.data_type().model_validate(asked["task"]), env.config.taskset.task)
    # The base URL and the key belong to the session of this episode.
    client = EvalClientConfig(
        base_url=asked["base_url"], headers={"x-api-key": asked["api_key"]}, api_key_var="NO_OTHER_KEY"
    )
    (slot,) = env.slots(task)
    episode = await env.run_slot(slot, ModelContext(model="policy", client=client, sampling=SamplingConfig()))
    errors = [error for one in (episode, *episode.traces) if not one.ok for error in one.errors]
    if not episode.ok or errors or not episode.traces:
        raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}" if errors else "no agent played")
    parts: dict[str, float] = {}
    for trace in episode.traces:
        scores = {name: one.score for name, one in trace.rewards.items() if one is not None}
        for name, value in {**scores, "reward": trace.reward}.items():
            parts[name] = parts.get(name, 0.0) + value / len(episode.traces)
    return parts


async def play(env: Any, out: Any) -> None:
    """Play the episodes of standard input until it ends."""
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(asked: dict[str, Any]) -> None:
        try:
            found: dict[str, Any] = {"reward": await rewarded(env, asked)}
        except Exception as error:  # a taskset may raise anything
            found = {"error": f"{type(error).__name__}: {error}"[:2000]}
        finally:
            del running[asked["id"]]
        print(json.dumps({"id": asked["id"], **found}), file=out, flush=True)

    async with env.serving():
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            if "cancel" not in asked:
                running[asked["id"]] = asyncio.create_task(answer(asked))
            elif (one := running.get(asked["cancel"])) is not None:
                one.cancel()
        for one in running.values():
            one.cancel()


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a taskset prints is for the log
    print(file=out, flush=True)  # ends what an import has printed
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"  # uv, for harnesses
    env = load_environment(resolve_env_config(json.loads(sys.argv[1])))
    if sys.argv[2] == "play":
        return asyncio.run(play(env, out))
    if not env.taskset.bounded:
        sys.exit("the taskset is infinite: bound it by its settings")
    for task in env.taskset:
        found = {"prompt": task.data.prompt_text, "task": task.data.model_dump(mode="json")}
        print(json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
    main()
