"""A policy whose answers are hostile text: what `tests/unit/envs/hostile.py` holds, from a scripted engine."""

import os

from actors.engines.base import EngineSpec
from tests.fakes.scripted_engine import ScriptedEngine
from tests.unit.envs.hostile import STALLS, marks

FOLDER = "STREAMRL_TEST_MARKS"
"""Environment variable with the folder that must stay empty."""


def engine(spec: EngineSpec) -> ScriptedEngine:
    """Engine for `actors.engine=tests.flow.hostile_policy:engine`."""
    texts = [text for text in (*marks(os.environ[FOLDER]), *STALLS) if len(text) < spec.max_new_tokens - 20]
    answers = [spec.tokenizer(f"<answer>{text}</answer>", add_special_tokens=False)["input_ids"] for text in texts]
    return ScriptedEngine(
        lambda ids, seed, ref: [*answers[seed % len(answers)], spec.tokenizer.eos_token_id],
        max_num_seqs=spec.max_num_seqs,
    )
