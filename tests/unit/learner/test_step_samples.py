"""Sampled trajectories of a run: drawn fairly, with the numbers of the loss, and decoded token by token."""

import copy
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from learner.data.packing import pack
from learner.objective.objective import Objective
from learner.ranks.mesh import Ranks
from learner.record.step_samples import draft, draw_groups, draw_member, draw_prompts, open_samples, token_texts
from streamrl.config.schema import AdvantageConfig, LossConfig, SamplesConfig
from streamrl.messages import BatchShare, EvalResult, GroupOrigin, KeptGroup
from streamrl.messages.printable import printable
from streamrl.metrics.samples import Sample, read_samples
from tests.kit.learning import OneBatch, batch, plan_of
from tests.unit.learner.test_trajectories import frame, member

VERSION = 5


@pytest.fixture(scope="module")
def tokenizer():
    """One token a byte, and an end of sequence."""
    alphabet = {char: place for place, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    model = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>")


@pytest.fixture(scope="module")
def model_dir(tokenizer, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(path)
    return path


def objective() -> Objective:
    return Objective(AdvantageConfig(), LossConfig(), max_new_tokens=32, max_lag=3)


def keep_steps(
    run_dir: Path, model_dir: Path, *rows_of_steps, result: EvalResult | None = None,
    passed_over: tuple[KeptGroup, ...] = (), **settings,
) -> list[Sample]:
    """What a learner of one process keeps of these steps; its policy gives each token the log-prob -2."""
    samples = open_samples(
        SamplesConfig(**settings), run_dir, model_dir, seed=1, ranks=Ranks(), resume_step=0
    )
    for step, rows in enumerate(rows_of_steps, start=VERSION + 1):
        plan = plan_of(rows)
        one = OneBatch(objective(), rows, plan, version=VERSION)
        samples.choose(one.plan.rows, BatchShare(VERSION, plan, (), passed_over=passed_over), one.statistics)
        for micro in pack(rows, 64):
            one.loss(micro, torch.full([micro.num_scored], -2.0), torch.zeros(micro.num_scored))
        samples.keep(step, one.statistics, skipped=False)
    if result is not None:
        samples.evaluated(result)
    samples.close()
    assert samples.take() == read_samples(run_dir)
    return read_samples(run_dir)


def test_every_group_and_every_member_is_drawn_equally_often():
    times, members = Counter(), Counter()
    for seed in range(2_000):
        drawn = draw_groups(range(100, 120), 4, seed)
        times.update(drawn)
        members.update(draw_member([0, 2, 3], group_id, seed) for group_id in drawn)

    assert len(times) == 20 and all(abs(count - 400) < 90 for count in times.values())  # 5 standard deviations
    assert set(members) == {0, 2, 3} and all(abs(count - 2667) < 220 for count in members.values())


def test_draws_of_parts_can_be_merged_into_the_draw_of_the_whole():
    whole = draw_groups(range(50), 6, 3)

    parts = draw_groups(range(20), 6, 3) + draw_groups(range(20, 50), 6, 3)

    assert draw_groups(parts, 6, 3) == whole


@pytest.mark.shows("samples.num_per_step")
def test_a_step_keeps_that_many_trajectories_each_of_another_group(tmp_path, model_dir):
    for num in (0, 1, 3, 99):
        folder = tmp_path / str(num)
        folder.mkdir()
        found = keep_steps(folder, model_dir, batch(5, 4), batch(5, 4, seed=1), num_per_step=num, num_per_eval=1)

        assert Counter(one.step for one in found) == ({6: min(num, 5), 7: min(num, 5)} if num else {})
        assert len({(one.step, one.group) for one in found}) == len(found)


@pytest.mark.shows("samples.echo_every_steps")
def test_now_and_then_one_answer_is_printed_in_a_line(tmp_path, model_dir, caplog):
    caplog.set_level("INFO", "streamrl.learner")
    steps = [batch(3, 2, seed=seed) for seed in range(4)]
    for every, printed in ((0, []), (2, [7, 9]), (1, [6, 7, 8, 9])):
        caplog.clear()
        (folder := tmp_path / str(every)).mkdir()
        kept = keep_steps(folder, model_dir, *steps, echo_every_steps=every)
        lines = [text for text in caplog.messages if "an answer with reward" in text]
        assert [int(re.match(r"step (\d+),", text)[1]) for text in lines] == printed
        for text, step in zip(lines, printed, strict=True):
            one = next(one for one in kept if one.step == step)
            assert text.endswith(f"reward {one.reward:.3g}: {printable(one.prompt)} -> {printable(one.answer)}")


def test_a_sample_holds_the_numbers_of_its_trajectory_and_of_the_loss(tmp_path, model_dir, tokenizer):
    rows = [replace(row, actor_id="a0", prompt_index=40 + row.group_id) for row in batch(4, 4, seed=3)]
    by_key = {(row.group_id, row.index): row for row in rows}
    groups = {g: np.mean([row.reward for row in rows if row.group_id == g]) for g in range(4)}

    found = keep_steps(tmp_path, model_dir, rows)

    assert len(found) == 4
    for one in found:
        row = by_key[one.group, one.member]
        assert (one.kind, one.step, one.fate, one.actor, one.record) == ("train", 6, "trained", "a0", 40 + one.group)
        assert (one.version, one.lag) == (row.versions[0], VERSION - row.versions[0])
        assert (one.reward, one.score, one.truncated) == (row.reward, row.scores["score"], row.truncated)
        assert one.num_tokens == row.num_action_tokens
        assert one.prompt == tokenizer.decode(row.prompt_ids) and "".join(one.tokens.texts)
        for ratio, logprob, acts in zip(one.tokens.ratios, row.logprobs, row.mask, strict=True):
            assert ratio == (pytest.approx(np.exp(-2.0 - logprob), rel=1e-3) if acts else None)
        assert one.tokens.ids == row.token_ids.tolist() and one.tokens.versions == row.versions.tolist()
        assert np.sign(one.advantage) == np.sign(round(row.reward - groups[one.group], 6))


@pytest.mark.shows("samples.num_detailed_tokens")
def test_only_the_first_tokens_are_kept_one_by_one(tmp_path, model_dir):
    rows = batch(2, 2, num_actions=10, with_gap=False)

    for num in (0, 3, 512):
        folder = tmp_path / str(num)
        folder.mkdir()
        for one in keep_steps(folder, model_dir, rows, num_detailed_tokens=num):
            tokens = one.tokens
            assert (tokens is None) == (num == 0)
            if tokens is not None:
                lists = (tokens.ids, tokens.texts, tokens.ratios, tokens.versions)
                assert [len(values) for values in lists] == [min(num, 10)] * 4


def test_an_evaluation_keeps_its_transcripts_though_they_are_greedy(tmp_path, model_dir):
    kept = KeptGroup(frame(member(), group_id=(1 << 63) | (7 << 32) | 3, temperature=0.0), GroupOrigin("a1", 3))

    (one,) = keep_steps(tmp_path, model_dir, result=EvalResult(7, 7, 1, 0.0, 0.0, 0.0, 0.0, kept=(kept,)))

    assert (one.kind, one.step, one.version, one.lag, one.record, one.actor) == ("eval", 7, 6, 0, 3, "a1")
    assert [(turn.role, turn.reward) for turn in one.messages] == [
        ("assistant", 0.25), ("environment", 0.0), ("assistant", 0.75),
    ]
    assert one.answer.count("\n") == 1 and one.advantage is None and one.group == 7 << 32 | 3


def test_groups_that_are_not_trained_on_are_drawn_like_the_others(tmp_path, model_dir):
    passed_over = tuple(
        KeptGroup(frame(member(0), member(1), group_id=group_id), GroupOrigin("a1", 3), "zero_std")
        for group_id in range(100, 120)
    )

    found = keep_steps(tmp_path, model_dir, batch(20, 1), passed_over=passed_over, num_per_step=10)

    assert {one.group for one in found} == set(draw_groups([*range(20), *range(100, 120)], 10, 1))
    fates = {one.fate for one in found if one.group >= 100}
    assert fates == {"zero_std"} and {one.fate for one in found if one.group < 100} == {"trained"}
    for one in found:
        assert (one.advantage is None) == (one.fate == "zero_std") == (set(one.tokens.ratios) == {None})
        assert one.fate == "trained" or one.version == 6  # as its tokens say


def test_dropped_groups_are_kept_before_a_first_batch_came(tmp_path, model_dir):
    dropped = [KeptGroup(frame(member(0), member(1), group_id=one), GroupOrigin("a1", 3), "zero_std") for one in (1, 2)]
    samples = open_samples(SamplesConfig(), tmp_path, model_dir, seed=1, ranks=Ranks(), resume_step=0)

    samples.dropped(dropped, 0)
    samples.close()

    found = [(one.group, one.fate, one.step) for one in read_samples(tmp_path)]
    assert found == [(1, "zero_std", 1), (2, "zero_std", 1)]


def test_a_model_without_a_tokenizer_costs_the_samples_and_not_the_run(tmp_path, caplog):
    assert keep_steps(tmp_path, tmp_path / "nothing", batch(2, 2), batch(2, 2)) == []
    assert caplog.text.count("training goes on without them") == 1


def test_the_prompts_of_an_evaluation_are_always_the_same_ones():
    first, second = draw_prompts(200, 8, 1), draw_prompts(200, 8, 1)

    assert first == second and len(set(first)) == 8 and max(first) < 200 and first != draw_prompts(200, 8, 2)
    assert draw_prompts(3, 8, 1) == (0, 1, 2)


@pytest.mark.parametrize("text", ["plain words", "naïve 日本 👩‍🚀 end", "x" * 40, ""])
def test_the_texts_of_tokens_join_to_the_whole_text(tokenizer, text):
    ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]

    texts = token_texts(tokenizer.decode, ids)

    assert len(texts) == len(ids) and "".join(texts) == f"{text}<eos>"


def test_tokens_that_are_no_text_are_shown_as_such(tokenizer):
    broken = [tokenizer("é")["input_ids"][0]] * 9  # nine first halves

    texts = token_texts(tokenizer.decode, broken)

    assert len(texts) == 9 and set("".join(texts)) == {"�"}


def test_a_trajectory_without_action_tokens_can_be_drafted(tokenizer):
    (row,) = batch(1, 1)
    nothing = replace(row, mask=np.zeros_like(row.mask), versions=np.full_like(row.versions, -1))

    one = draft(nothing, kind="train", step=6, version=5, fate="stale").decoded(tokenizer, 10)

    assert isinstance(one, Sample) and (one.answer, one.version, one.num_tokens) == ("", 5, 0)


def test_an_answer_is_shown_with_its_thought_as_rewards_read_it(tokenizer):
    """Marks of gpt-oss are special tokens: without them thought and answer would be one text."""
    tokenizer = copy.deepcopy(tokenizer)
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>7<|return|>"
    ids = tokenizer(said)["input_ids"]
    (row,) = batch(1, 1, num_prompt=2, num_actions=len(ids), with_gap=False)
    row = replace(row, token_ids=np.array([*row.token_ids[: -len(ids)], *ids], np.int32))

    one = draft(row, kind="train", step=6, version=5, fate="trained").decoded(tokenizer, 0)

    assert one.answer == "<think>Hm.</think>7"


def test_a_rewritten_history_stands_where_it_was_read(tokenizer):
    (row,) = batch(1, 1, num_prompt=2, num_actions=4, with_gap=False)
    row = replace(row, later=((1, np.array([5, 6], np.int32)), (3, np.array([7], np.int32))))

    one = draft(row, kind="train", step=6, version=5, fate="trained").decoded(tokenizer, 3)

    assert [turn.role for turn in one.messages] == ["assistant", "context", "assistant", "context", "assistant"]
    assert [one.messages[place].content for place in (1, 3)] == [tokenizer.decode([5, 6]), tokenizer.decode([7])]
    assert one.tokens.starts == [1]  # the third is beyond the tokens that were kept one by one
