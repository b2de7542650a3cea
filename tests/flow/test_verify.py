"""Bundles of a real run: an honest one agrees, each edit is found; blame and bisect on a run that was poisoned."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from math import ceil, log2
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs.registry import task_of
from learner.replay.bisect import Search, evaluated
from learner.replay.blame import blame, tables
from learner.replay.opened import open_run
from learner.replay.verify import LEVELS, verify
from learner.setup.trainer import save_policy
from streamrl.commands import DIFFERS, EQUAL, NOT_COMPARABLE
from streamrl.config.load import load_config
from streamrl.messages import TO_HUB
from streamrl.messages.codec import Decoder, encode
from streamrl.stream.archive import DIGEST, MANIFEST, pack, unpack
from streamrl.stream.history import History
from streamrl.stream.records import BatchCut, GroupArrived, Record, StepTaken, VersionPublished
from streamrl.stream.segments import read_records
from streamrl.stream.writer import LogWriter
from streamrl.verbs.bundle import bundle
from streamrl.weights.manifest import root_of
from tests.flow.forked_process import ForkedPopen
from tests.flow.processes import finished

NUM_STEPS, POISONED = 6, 3
SETTINGS = (
    f"trainer.num_steps={NUM_STEPS}", "eval.num_samples=8", "eval.every_steps=0", "run.device=cpu",
    "rollout.num_prompts_per_step=4", "rollout.num_responses_per_prompt=4", "policy.optimizer.name=sgd",
    "policy.optimizer.lr=0.03", "policy.optimizer.max_grad_norm=1e6", "policy.scheduler.name=constant",
)
replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, fork_server) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    models = tmp_path_factory.mktemp("models")
    done = finished(
        [sys.executable, "-m", "streamrl.cli", "launch", "experiment=quickstart", *SETTINGS, f"run.dir={folder}",
         f"policy.tiny.cache_dir={models}"],
        folder.parent, ForkedPopen, deadline_s=300,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def honest(run_dir, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("bundles") / "run.tar"
    assert bundle([str(run_dir), "--out", str(out)]) == 0
    return out


def checked(path: Path, tmp_path: Path, capsys, *levels: str) -> tuple[int, str]:
    """Exit status and output; the run directory plays no part."""
    folder = tmp_path / "unpacked"
    folder.mkdir()
    capsys.readouterr()
    code = verify(path, folder, levels, [], num=2, seed=1)
    return code, capsys.readouterr().out


def edited(honest: Path, tmp_path: Path, edit: Callable[[Path], None]) -> Path:
    """The bundle of somebody who edits files of it and makes all digests of the archive again."""
    folder, out = tmp_path / "edited", tmp_path / "edited.tar"
    manifest, _ = unpack(honest, folder)
    edit(folder)
    about = {name: value for name, value in manifest.items() if name != "files"}
    with out.open("wb") as file:
        pack({name: folder / name for name in manifest["files"]}, about, file)
    return out


def rewrite(folder: Path, change: Callable[[Record], Record]) -> None:
    """The log with other records, each with its right digest."""
    changed = [change(body) for _, body in read_records(folder)]
    shutil.rmtree(folder / "stream")
    writer = LogWriter(folder)
    for body in changed:
        writer.append(body)
    writer.close()


def change_rewards(folder: Path, change: Callable[[float], float], group_ids: set[int]) -> None:
    """Edit the rewards of groups wherever the log has them: in their frames, and in the plans of their batches."""
    decoder = Decoder(TO_HUB)

    def changed(body: Record) -> Record:
        if isinstance(body, GroupArrived) and body.group_id in group_ids:
            group = decoder.decode(body.frame)
            members = tuple(
                replace(one, reward=change(one.reward), turns=(replace(one.turns[0], reward=change(one.reward)),))
                for one in group.members
            )
            return replace(body, frame=bytes(encode(replace(group, members=members))))
        if isinstance(body, BatchCut):
            plan = tuple(
                replace(row, reward=change(row.reward)) if row.group_id in group_ids else row for row in body.plan
            )
            return replace(body, plan=plan)
        return body

    rewrite(folder, changed)


def edit_row(folder: Path, step: int, **values: float) -> None:
    """Edit a row of the metrics."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row.update({key.replace("__", "/"): value for key, value in values.items()} if row["step"] == step else {})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_an_honest_bundle_agrees_at_every_level(honest, tmp_path, capsys):
    code, said = checked(honest, tmp_path, capsys, *LEVELS)
    assert code == EQUAL, said
    assert [line.split()[1] for line in said.splitlines()[1:]] == ["agrees:"] * len(LEVELS)


@pytest.fixture(scope="module")
def resumed(run_dir, tmp_path_factory, fork_server) -> Path:
    """The run, gone on under other settings of each part that makes weights of batches."""
    folder = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(run_dir, folder)
    done = finished(
        [sys.executable, "-m", "streamrl.cli", "resume", str(folder), "trainer.num_steps=9", "kl.mode=k3_is",
         "kl.coef=0.05", "policy.optimizer.lr=0.003", "policy.scheduler.name=linear", "loss.clip_high=0.1",
         "rollout.num_prompts_per_step=3", "rollout.train.sampling.temperature=0.7", "env.reward_floor=-0.5"],
        folder.parent, ForkedPopen, deadline_s=300,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_each_batch_is_trained_again_under_the_settings_of_its_start(resumed, tmp_path, capsys):
    run = open_run(resumed)
    found = {version: text for one in run.train() for version, text in one.versions.items()}
    assert found == dict.fromkeys(range(1, 10), "") and run.config.policy.optimizer.lr == 0.003

    run = open_run(resumed, at_most=2)
    for upto in (NUM_STEPS - 1, NUM_STEPS, NUM_STEPS + 1):  # in pieces, one of which ends where the settings change
        assert not any(text for one in run.train(upto=upto) for text in one.versions.values())
        assert run.config.policy.optimizer.lr == (0.03 if upto <= NUM_STEPS else 0.003) and run.difference() == ""

    run = open_run(resumed, ["policy.optimizer.lr=0.02"])  # what is typed holds for all
    list(run.train())
    assert (run.config.policy.optimizer.lr, run.config.kl.coef, run.difference() == "") == (0.02, 0.05, False)

    own = load_config([str(resumed / "config.yaml")])
    fork = load_config([str(resumed / "config.yaml"), "loss.clip_high=0.3"])
    configs = [open_run(resumed, config=one, own=own).config for one in (own, fork)]
    assert [(one.policy.optimizer.lr, one.kl.mode, one.loss.clip_high) for one in configs] == [
        (0.03, "off", 0.28), (0.03, "off", 0.3)
    ]


def test_a_resumed_run_agrees_and_rewards_of_an_earlier_task_are_not_called_wrong(resumed, tmp_path, capsys):
    assert bundle([str(resumed), "--out", str(tmp_path / "run.tar")]) == 0
    code, said = checked(tmp_path / "run.tar", tmp_path, capsys, *LEVELS)
    levels = {line.split()[0]: line.split()[1] for line in said.splitlines() if line.split()[0] in LEVELS}
    assert levels == {name: "not" if name == "reward" else "agrees:" for name in LEVELS}, said
    assert code == NOT_COMPARABLE and "a resume has changed env.reward_floor" in said


@pytest.mark.parametrize(("stopped", "agrees"), [("stopped: SIGTERM", True), ("", False)])
def test_an_evaluation_that_only_the_hub_noted_before_the_end_is_missed_by_a_finished_run(
    honest, tmp_path, capsys, stopped, agrees
):
    def edit(folder: Path) -> None:
        edit_row(folder, NUM_STEPS, eval__version=0, eval__score=first(folder)["score"])
        (folder / "evaluations.jsonl").write_text(json.dumps(first(folder)) + "\n")
        summary = json.loads((folder / "summary.json").read_text())
        summary |= {"stopped": stopped, "eval_score_last": first(folder)["score"] + (0 if agrees else 0.125)}
        (folder / "summary.json").write_text(json.dumps(summary))

    def first(folder: Path) -> dict:
        return json.loads((folder / "evaluations.jsonl").read_text().splitlines()[0])

    code, said = checked(edited(honest, tmp_path, edit), tmp_path, capsys, "hash")
    assert (code == EQUAL) == agrees and ("eval_score_last" in said) != agrees, said


def test_a_run_is_for_its_owner_alone(run_dir):
    others = {str(path) for path in (run_dir, *run_dir.rglob("*")) if path.stat().st_mode & 0o077}
    assert others == set()


def test_the_same_run_gives_the_same_bundle(run_dir, honest, tmp_path):
    assert bundle([str(run_dir), "--out", str(tmp_path / "again.tar")]) == 0
    assert (tmp_path / "again.tar").read_bytes() == honest.read_bytes()


def test_a_flipped_byte_in_any_part_is_found(honest, tmp_path, capsys):
    data = honest.read_bytes()
    places = [0, 110, 140, 300, 512, len(data) - 1, *range(1000, len(data), len(data) // 40)]
    for name in (MANIFEST, DIGEST):
        places.append(data.index(name.encode()) + 600)
    for number, place in enumerate(places):
        folder = tmp_path / str(number)
        folder.mkdir()
        flipped = folder / "flipped.tar"
        flipped.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        code, said = checked(flipped, folder, capsys, "hash")
        assert code == DIFFERS and "DISAGREES" in said, place


def test_a_wrong_reward_in_a_frame_contradicts_its_batch(honest, tmp_path, capsys):
    decoder = Decoder(TO_HUB)
    first = History.read(_unpacked(honest, tmp_path)).batches[0].cut.plan[0].group_id

    def change(body: Record) -> Record:
        if not isinstance(body, GroupArrived) or body.group_id != first:
            return body
        group = decoder.decode(body.frame)
        members = (replace(group.members[0], reward=5.0), *group.members[1:])
        return replace(body, frame=bytes(encode(replace(group, members=members))))

    path = edited(honest, tmp_path, lambda folder: rewrite(folder, change))
    code, said = checked(path, tmp_path, capsys, "hash")
    assert code == DIFFERS and f"group {first} member" in said


def test_a_wrong_reward_that_all_records_repeat_is_not_the_tasks(honest, tmp_path, capsys):
    batch = History.read(_unpacked(honest, tmp_path)).batches[1]
    group = batch.cut.plan[0].group_id

    def edit(folder: Path) -> None:
        change_rewards(folder, lambda reward: reward + 0.25, {group})
        plan = History.read(folder).batches[1].cut.plan
        edit_row(folder, 2, reward__trained=sum(row.reward for row in plan) / len(plan))

    path = edited(honest, tmp_path, edit)
    code, said = checked(path, tmp_path, capsys, "hash", "reward")
    assert code == DIFFERS and "hash    agrees" in said, said
    assert "reward  DISAGREES: 4 of" in said and f"group {group} member 0 of" in said


def test_swapped_versions_are_found_by_their_roots_and_by_training(honest, tmp_path, capsys):
    def swapped(*, new_roots: bool) -> Callable[[Path], None]:
        def edit(folder: Path) -> None:
            found = {body.manifest.ref.version: body.manifest for _, body in read_records(folder)
                     if isinstance(body, VersionPublished)}

            def change(body: Record) -> Record:
                if not isinstance(body, VersionPublished) or (version := body.manifest.ref.version) not in (1, 2):
                    return body
                manifest = replace(body.manifest, digests=found[3 - version].digests)
                if new_roots:
                    root = root_of(manifest.layout_digest, manifest.ref, manifest.digest_kind, manifest.digests)
                    manifest = replace(manifest, root=root)
                return replace(body, manifest=manifest)

            rewrite(folder, change)
        return edit

    for name, new_roots, levels in (("plain", False, ["hash"]), ("forged", True, ["hash", "step"])):
        folder = tmp_path / name
        folder.mkdir()
        path = edited(honest, folder, swapped(new_roots=new_roots))
        code, said = checked(path, folder, capsys, *levels)
        assert code == DIFFERS, said
        assert ("version 1: its root digest" if not new_roots else "version 1 differs in") in said, said


@pytest.mark.parametrize(("values", "level"), [
    ({"policy__grad_norm": 0.5}, "hash"), ({"reward__trained": 0.9}, "hash"), ({"run__version": 7.0}, "hash"),
    ({"policy__num_groups": 5.0}, "hash"), ({"policy__loss": 0.25}, "step"), ({"entropy__mean": 0.25}, "step"),
])
def test_an_edited_metric_is_found(honest, tmp_path, capsys, values, level):
    path = edited(honest, tmp_path, lambda folder: edit_row(folder, 1, **values))
    code, said = checked(path, tmp_path, capsys, *dict.fromkeys(["hash", level]))
    name = next(iter(values)).replace("__", "/")
    assert code == DIFFERS and f"step 1: {name} is" in said, said


def test_an_edited_norm_of_the_log_is_found_by_training(honest, tmp_path, capsys):
    def edit(folder: Path) -> None:
        rewrite(folder, lambda one: replace(one, grad_norm=0.5) if isinstance(one, StepTaken) else one)
        for step in range(1, NUM_STEPS + 1):
            edit_row(folder, step, policy__grad_norm=0.5)

    code, said = checked(edited(honest, tmp_path, edit), tmp_path, capsys, "hash", "step")
    assert code == DIFFERS and "hash    agrees" in said and "policy/grad_norm is 0.5, training again gives" in said


def test_the_digest_that_was_published_tells_another_bundle(honest, tmp_path, capsys):
    folder = tmp_path / "unpacked"
    _, digest = unpack(honest, tmp_path / "first")
    assert digest == hashlib.sha256((tmp_path / "first" / MANIFEST).read_bytes()).hexdigest()
    folder.mkdir()
    assert verify(honest, folder, ["hash"], [], num=1, seed=0, digest="0" * 64) == DIFFERS


def test_blame_and_bisect_find_what_was_poisoned_and_without_it_the_score_stands(run_dir, tmp_path):
    poisoned_dir = tmp_path / "poisoned"
    shutil.copytree(run_dir, poisoned_dir, ignore=shutil.ignore_patterns("ckpt-*", "LATEST"))
    groups = {row.group_id for row in History.read(run_dir).batches[POISONED].cut.plan}
    groups.remove(max(groups))  # a batch cannot be trained without all of them
    change_rewards(poisoned_dir, lambda reward: -1000.0 * reward, groups)

    score = target_probability(run_dir)
    search = Search(poisoned_dir, (), score, 0.02, tmp_path / "models")
    assert search.between(0, NUM_STEPS) == POISONED + 1, search.scores
    assert len(search.scores) <= ceil(log2(NUM_STEPS)) + 1

    found = blame(poisoned_dir, POISONED - 1, POISONED + 2)
    moved = [one.group_id for one in found if one.norm > 0.0 and one.group_id in groups]
    assert moved and [one.group_id for one in found[: len(moved)]] == moved
    assert str(found[0].group_id) in tables(found, 3)[2]

    run = open_run(poisoned_dir)
    list(run.train(compare=False, without=frozenset(groups)))
    assert score(save_policy(run.config, run.trainer, run.model_dir, tmp_path / "restored")) > search.limit


def test_shares_are_those_of_the_gradient_that_the_run_had(run_dir):
    found = blame(run_dir, 1, 3)
    for batch in History.read(run_dir).batches[1:3]:
        along = sum(one.along for one in found if one.version == batch.cut.version)
        assert along == pytest.approx(batch.step.grad_norm, rel=1e-4)


def test_a_version_is_scored_by_streamrl_eval(run_dir):
    score = evaluated(run_dir / "model", [str(run_dir / "config.yaml"), "eval.num_samples=4"], "")
    assert 0.0 <= score <= 1.0


def target_probability(run_dir: Path) -> Callable[[Path], float]:
    """A score that is cheap and exact: the mean probability of the right answers' characters."""
    task = task_of(load_config([str(run_dir / "config.yaml")]))

    def score(folder: Path) -> float:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        sums = []
        for index in range(16):
            record = task.record("test", index)
            messages = [{"role": one.role, "content": one.content} for one in task.env().reset(record)]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, task.target(record))]
            with torch.no_grad():
                logits = model(torch.tensor([ids[0] + ids[1]])).logits[0, len(ids[0]) - 1 : -1].nan_to_num()
            sums.append(float(logits.softmax(-1)[range(len(ids[1])), ids[1]].mean()))
        return sum(sums) / len(sums)

    return score


def _unpacked(path: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "read"
    unpack(path, folder)
    return folder
