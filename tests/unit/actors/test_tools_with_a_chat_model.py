"""A real chat model calls a tool: its chat template, the parser, the answer of the tool, and every token as sampled.

Left out where the model is not there: `make smollm2` makes it.
"""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from actors.episode import EpisodeRunner
from actors.local_policy import local_config, open_policy, sampling_message
from actors.settings import episode_rules
from envs.data.shapes import RecordShape
from envs.data_task import player
from envs.tools.task import with_tools
from streamrl.messages import MemberStatus
from streamrl.messages.codec import unpack_ids, unpack_logprobs

MODEL = Path(__file__).parents[3] / "models" / "smollm2-135m"
NUMBERS = ((23, 19), (46, 12))


def said(expression: str) -> str:
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


class Products:
    """Products that the model cannot do by itself, after an example of how to ask for them."""

    name = "products"

    def num_records(self, split: str) -> int:
        return len(NUMBERS)

    def record(self, split: str, index: int):
        a, b = NUMBERS[index]
        turns = (
            ("user", "What is 12 * 17?"), ("assistant", said("12 * 17")), ("tool", "204"), ("assistant", "204"),
            ("user", f"What is {a} * {b}?"),
        )
        return {"messages": [{"role": role, "content": text} for role, text in turns], "answer": str(a * b)}

    def env(self):
        return player(lambda record, answer, prompt: float(record["answer"] in answer), "products", RecordShape())()


@pytest.mark.timeout(300)
@pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="models/smollm2-135m is not there: make smollm2")
def test_template_calls_and_answers_hold_together_token_by_token():
    config = local_config(str(MODEL), [
        "experiment=quickstart", "env.tools=[calculator]", "env.max_turns=3", "data.apply_chat_template=true",
        "rollout.max_prompt_tokens=500", "rollout.train.sampling.max_new_tokens=48",
        "rollout.train.sampling.temperature=0.3", f"actors.num_concurrent={len(NUMBERS)}",
    ])
    task = with_tools(Products(), config.env)
    sampling = config.rollout.train.sampling

    async def work():
        policy = await open_policy(config, task)
        try:
            runner = EpisodeRunner(task, policy.engine, policy.renderer, episode_rules(config, sampling, task))
            members = await asyncio.gather(*(
                runner.play(task.record("train", index), index, index, sampling_message(sampling))
                for index in range(len(NUMBERS))
            ))
            assert runner.num_env_errors == 0, runner.last_env_error
            called = [member for member in members if member.scores["tool_calls"] and not member.scores["tool_errors"]]
            assert called, [policy.renderer.whole_text(unpack_ids(member.token_ids)) for member in members]
            for member in members:
                await check(policy, member)
            for member in called:
                a, b = NUMBERS[member.index]
                text = policy.renderer.whole_text(unpack_ids(member.token_ids))
                # The template closes the model's turn, shows the answer of the tool and opens the next turn.
                assert f"<|im_end|>\n<|im_start|>tool\n{a * b}<|im_end|>\n<|im_start|>assistant\n" in text
                assert member.status == MemberStatus.FINISHED and len(member.turns) >= 2
        finally:
            await policy.engine.close()

    async def check(policy, member):
        """One sequence; a fresh pass over all of its ids gives the log-probs that were recorded turn by turn."""
        assert not member.sequences
        prompt, tokens = unpack_ids(member.prompt_ids).tolist(), unpack_ids(member.token_ids).tolist()
        scored = await policy.engine.score([*prompt, *tokens], start=len(prompt), temperature=sampling.temperature)
        recorded = unpack_logprobs(member.logprobs)
        actions = np.concatenate([np.arange(*span) for span in member.mask])
        np.testing.assert_allclose(np.array(scored)[actions], recorded[actions], atol=2e-3)

    asyncio.run(work())
