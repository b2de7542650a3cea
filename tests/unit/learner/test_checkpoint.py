"""Checkpoints: bit-equal resumption, every flipped byte noticed, and never fewer good ones than before."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from learner.checkpoint.checkpoint import checkpoint_home, find_checkpoint, save_checkpoint
from learner.checkpoint.run_lock import lock_run_dir
from learner.checkpoint.shards import Box
from learner.data.packing import pack
from learner.model.gradients import optimizer_step
from learner.model.optimizer import Schedule, make_optimizer
from learner.model.policy import load_policy
from learner.ranks.mesh import Ranks
from streamrl.config.schema import OptimizerConfig
from streamrl.errors import CheckpointError, RunLockedError
from streamrl.weights.saved import read_version, saved_versions
from tests.kit.learning import OneBatch, batch, make_objective, plan_of

HERE = Path(__file__).parent
ALONE = Ranks()
SCHEDULE = Schedule("cosine_with_min_lr", 1e-3, 8, num_warmup_steps=2)


class Training:
    """A policy, its optimizer, and steps on batches that depend on the version and on torch's generator."""

    def __init__(self, model_dir, seed=1, **optimizer):
        torch.manual_seed(seed)
        self.policy = load_policy(model_dir)
        self.optimizer = make_optimizer(self.policy, OptimizerConfig(lr=1e-3, **optimizer))
        self.objective = make_objective()
        self.version = 0

    def step(self, times=1):
        for _ in range(times):
            rows = batch(2, 3, seed=int(torch.randint(0, 1000, ())))
            self.one = OneBatch(self.objective, rows, plan_of(rows), version=5)
            for micro in pack(rows, 64):
                self.one.forward_backward(self.policy, micro)
            optimizer_step(self.policy, self.optimizer, SCHEDULE, step=self.version, max_grad_norm=1.0, ranks=ALONE)
            self.version += 1
        return self

    def save(self, run_dir, **changes):
        options = {"extra": {"learner_epoch": 1, "lineage": [[1, 0, self.version]]}, "num_keep": 2,
                   "blobs": {"ledger": b"ledger %d" % self.version}, **changes}
        return save_checkpoint(run_dir, self.version, self.policy, self.optimizer, ALONE, **options)

    def load(self, run_dir):
        found = find_checkpoint(run_dir, ALONE)
        found.restore(self.policy, self.optimizer, ALONE)
        self.version = found.version
        return found

    def state(self):
        named = {name: p.detach().clone() for name, p in self.policy.named_parameters()}
        for name, parameter in self.policy.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            named |= {f"{name} {key}": torch.as_tensor(value).clone() for key, value in state.items()}
        return named


@pytest.fixture
def training(checkpoints):
    return Training(checkpoints["qwen3-tied"])


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(training, checkpoints, tmp_path):
    training.step(2).save(tmp_path)
    uninterrupted = training.step(3).state()

    resumed = Training(checkpoints["qwen3-tied"], seed=99)
    found = resumed.load(tmp_path)

    assert (found.version, found.blobs, found.extra["lineage"]) == (2, {"ledger": b"ledger 2"}, [[1, 0, 2]])
    assert equal(resumed.step(3).state(), uninterrupted)


def test_a_checkpoint_before_the_first_step_restores_an_optimizer_without_moments(training, checkpoints, tmp_path):
    training.save(tmp_path)
    used = Training(checkpoints["qwen3-tied"]).step(1)

    used.load(tmp_path)

    assert equal(used.state(), training.state()) and not used.optimizer.state_dict()["state"]


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert find_checkpoint(tmp_path) is None
    assert find_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize("name", ["rank-00000-of-00001.safetensors", "ledger.bin", "manifest.json"])
def test_one_flipped_byte_in_any_file_falls_back_to_the_one_before_and_names_the_file(
    training, tmp_path, name, caplog
):
    training.step().save(tmp_path)
    good = training.state()
    path = training.step().save(tmp_path) / name
    raw = path.read_bytes()
    for place in {0, len(raw) // 3, len(raw) // 2, len(raw) - 1}:
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 0x10]) + raw[place + 1 :])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = find_checkpoint(tmp_path)
        assert found.version == 1, place
        assert name in caplog.text and "ckpt-00000002" in caplog.text

    training.load(tmp_path)
    assert equal(training.state(), good)
    path.write_bytes(raw)
    assert find_checkpoint(tmp_path).version == 2


@pytest.mark.parametrize("damage", ["missing", "short", "long"])
def test_a_missing_or_resized_file_is_noticed(training, tmp_path, damage):
    training.step().save(tmp_path)
    path = training.step().save(tmp_path) / "ledger.bin"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if damage == "short" else path.read_bytes() + b"x")

    assert find_checkpoint(tmp_path).version == 1


def test_damaged_checkpoints_and_no_good_one_is_an_error_not_a_fresh_start(training, tmp_path):
    path = training.step().save(tmp_path)
    (path / "ledger.bin").write_bytes(b"")

    with pytest.raises(CheckpointError, match="1 checkpoints and none is good"):
        find_checkpoint(tmp_path)


def test_a_latest_that_names_nothing_is_passed_over(training, tmp_path, caplog):
    training.step().save(tmp_path)
    (tmp_path / "LATEST").write_bytes(b"ckpt-0000\xff")

    assert find_checkpoint(tmp_path).version == 1 and "LATEST" in caplog.text


@pytest.mark.shows("checkpoint.num_keep")
def test_only_the_newest_few_stay_and_drafts_go(training, tmp_path):
    (tmp_path / "ckpt.tmp-7-dead").mkdir()
    for _ in range(4):
        training.step().save(tmp_path, num_keep=2)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "ckpt-00000003", "ckpt-00000004"]
    assert (tmp_path / "LATEST").read_text() == "ckpt-00000004\n"


def test_after_a_fall_back_the_abandoned_branch_does_not_come_back(training, tmp_path):
    training.step().save(tmp_path)
    training.step().save(tmp_path)
    (tmp_path / "ckpt-00000002" / "ledger.bin").write_bytes(b"")
    training.load(tmp_path)

    training.step().save(tmp_path, blobs={"ledger": b"second try"})

    found = find_checkpoint(tmp_path)
    assert (found.version, found.blobs["ledger"]) == (2, b"second try")
    training.version = 1
    training.save(tmp_path)
    assert [path.name for path in tmp_path.glob("ckpt*")] == ["ckpt-00000001"]


def test_a_checkpoint_that_latest_does_not_name_yet_is_used_only_if_nothing_else_is_good(training, tmp_path):
    training.step().save(tmp_path)
    training.step().save(tmp_path)
    (tmp_path / "LATEST").write_text("ckpt-00000001\n")  # killed after the rename

    assert find_checkpoint(tmp_path).version == 1
    (tmp_path / "ckpt-00000001" / "ledger.bin").unlink()
    assert find_checkpoint(tmp_path).version == 2


STAGES = ("write_shards", "write_durably", "_publish", "sync_directory")
KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
import torch
import learner.checkpoint.checkpoint as module
from tests.unit.learner.test_checkpoint import Training
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
for stage in {stages!r}:  # forks, before torch has threads: each imports nothing again
    child = os.fork()
    if child == 0:
        run = os.path.join({folder!r}, stage)
        training = Training({model!r}).step()
        training.save(run)
        setattr(module, stage, die)
        training.step().save(run)
        os._exit(0)
    print(stage, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def killed(checkpoints, tmp_path_factory) -> tuple[Path, list[str]]:
    """(a folder with a run for each stage of writing, whose learner was killed in it, and how those learners ended)."""
    folder = tmp_path_factory.mktemp("killed")
    for stage in STAGES:
        (folder / stage).mkdir()
    paths, model = [str(HERE.parents[2])], str(checkpoints["qwen3-tied"])
    code = KILLED.format(paths=paths, model=model, folder=str(folder), stages=STAGES)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=250)
    return folder, [*done.stdout.splitlines(), done.stderr]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", STAGES)
def test_a_learner_killed_half_way_leaves_the_checkpoint_before_it(checkpoints, killed, stage):
    folder, ended = killed
    run = folder / stage

    assert f"{stage} {-signal.SIGKILL}" in ended, ended
    assert list(run.glob("ckpt.tmp-*"))
    found = find_checkpoint(run)
    assert (found.version, found.blobs["ledger"]) == (1, b"ledger 1")
    Training(checkpoints["qwen3-tied"]).load(run)


def test_a_fenced_learner_makes_nothing_visible(training, tmp_path):
    lock = lock_run_dir(tmp_path)
    training.step().save(tmp_path, lock=lock)
    (tmp_path / "EPOCH").write_text("2\n")  # a newer learner on another machine, where this lock means nothing

    with pytest.raises(RunLockedError, match="a newer learner owns"):
        training.step().save(tmp_path, lock=lock)

    assert find_checkpoint(tmp_path).version == 1
    lock.release()


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_trained(training, checkpoints, tmp_path):
    training.step().save(tmp_path)

    with pytest.raises(CheckpointError, match="has no tensor 'model/model.lm_head.weight'"):
        Training(checkpoints["qwen3"]).load(tmp_path)
    other = Training(checkpoints["qwen3-tied"])
    other.policy.model.model.norm.weight = torch.nn.Parameter(torch.ones(31))
    with pytest.raises(CheckpointError, match=r"is \[32\] in the checkpoint and \[31\] here"):
        other.load(tmp_path)


def test_tensors_are_safetensors_the_rest_is_json_and_generators_are_integers(training, tmp_path):
    path = training.step().save(tmp_path)

    assert sorted(file.name for file in path.iterdir()) == [
        "ledger.bin", "manifest.json", "rank-00000-of-00001.safetensors"
    ]
    body = json.loads((path / "manifest.json").read_text())["body"]
    assert (body["version"], body["world"], set(body["files"])) == (
        1, 1, {"ledger.bin", "rank-00000-of-00001.safetensors"}
    )
    with safe_open(path / "rank-00000-of-00001.safetensors", framework="pt") as file:
        assert file.get_tensor("rng/cpu").dtype == torch.uint8


def test_no_code_of_the_learner_can_load_a_pickle():
    """tests/contract/test_plan.py has the imports of pickle's family."""
    unpickles = re.compile(r"torch\.(load|save)\(|distributed\.checkpoint|gather\w*_object")
    for path in (HERE.parents[2] / "learner").rglob("*.py"):
        assert not unpickles.search(path.read_text()), path


def test_boxes_overlap_only_where_they_meet():
    first, second = Box((0, 0), (3, 4)), Box((2, 1), (5, 2))

    assert first.overlap(second) == Box((2, 1), (1, 2))
    assert first.overlap(Box((3, 0), (1, 4))) is None
    assert Box((2, 1), (1, 2)).within(second) == (slice(0, 1), slice(0, 2))


def test_every_lock_is_a_new_epoch_that_is_on_disk_before_it_is_returned(tmp_path):
    epochs = []
    for _ in range(3):
        lock = lock_run_dir(tmp_path / "run")
        epochs.append(lock.learner_epoch)
        assert (tmp_path / "run" / "EPOCH").read_text() == f"{lock.learner_epoch}\n"
        lock.release()
    assert epochs == [1, 2, 3]


def test_a_running_learner_holds_the_lock_and_an_exited_one_does_not(tmp_path):
    hold = (
        "import sys; from learner.checkpoint.run_lock import lock_run_dir; c = lock_run_dir(sys.argv[1]); "
        "print('held', flush=True); input()"
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2])}
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RunLockedError, match="still running"):
            lock_run_dir(tmp_path)
    finally:
        holder.kill()
        holder.communicate(timeout=30)

    lock = lock_run_dir(tmp_path)
    assert lock.learner_epoch == 2
    lock.release()


@pytest.mark.parametrize("epoch_file", [None, b"", b"garbage"])
def test_a_lost_epoch_file_does_not_repeat_an_epoch_that_a_checkpoint_knows(tmp_path, epoch_file):
    (tmp_path / "ckpt-00000003").mkdir()
    body = {"extra": {"learner_epoch": 7}}
    (tmp_path / "ckpt-00000003" / "manifest.json").write_text(json.dumps({"body": body}))
    (tmp_path / "ckpt-00000004").mkdir()
    (tmp_path / "ckpt-00000004" / "manifest.json").write_text("damaged")
    if epoch_file is not None:
        (tmp_path / "EPOCH").write_bytes(epoch_file)

    lock = lock_run_dir(tmp_path)

    assert lock.learner_epoch == 8
    lock.release()


def test_a_newer_epoch_on_disk_fences_the_older_learner(tmp_path):
    lock = lock_run_dir(tmp_path)
    assert lock.is_owner()
    lock.check()

    (tmp_path / "EPOCH").write_text("2\n")

    assert not lock.is_owner()
    with pytest.raises(RunLockedError, match="EPOCH is 2, this learner has epoch 1"):
        lock.check()
    lock.release()


def test_checkpoints_may_stand_on_another_disk_and_are_found_and_removed_through_links(training, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    home, others = checkpoint_home(str(tmp_path / "disk"), "r-1", run_dir), tmp_path / "disk" / "others"
    others.mkdir(parents=True)
    for _ in range(3):
        training.step().save(run_dir, home=home)

    assert sorted(path.name for path in home.iterdir()) == ["ckpt-00000002", "ckpt-00000003"]
    assert {path.is_symlink() for path in run_dir.glob("ckpt-*")} == {True} and others.exists()
    assert saved_versions(run_dir) == [2, 3] and dict(read_version(run_dir, 3))
    assert find_checkpoint(run_dir, ALONE).version == 3

    assert checkpoint_home(str(tmp_path / "disk"), "r-1", run_dir) == home
    (tmp_path / "disk").rename(tmp_path / "unplugged")
    with pytest.raises(CheckpointError, match=f"leads to {home}/ckpt-0000000[23], which is not there"):
        find_checkpoint(run_dir, ALONE)


def test_a_copy_of_a_run_leaves_the_checkpoints_of_the_run_alone_and_a_moved_run_keeps_its_folder(training, tmp_path):
    run_dir, disk = tmp_path / "run", str(tmp_path / "disk")
    run_dir.mkdir()
    (run_dir / "run_id").write_text("r-1")
    home = checkpoint_home(disk, "r-1", run_dir)
    training.step().save(run_dir, home=home)
    training.step().save(run_dir, home=home)
    saved = {name: one.tolist() for name, one in read_version(run_dir, 2)}

    for follow in (False, True):  # the links, or what they lead to
        copy = tmp_path / f"copy-{follow}"
        shutil.copytree(run_dir, copy, symlinks=not follow)
        own = checkpoint_home(disk, "r-1", copy)
        assert own not in (home, None) and checkpoint_home(disk, "r-1", copy) == own
        training.version = 1
        for _ in range(3):  # version 2 anew, and others, which take the place of the older ones
            training.step().save(copy, home=own)
        assert saved_versions(copy) == [3, 4] and sorted(one.name for one in own.iterdir()) == [
            "ckpt-00000003", "ckpt-00000004"]
        assert find_checkpoint(run_dir, ALONE).version == 2 and saved_versions(run_dir) == [1, 2]
        assert {name: one.tolist() for name, one in read_version(run_dir, 2)} == saved

    assert checkpoint_home(disk, "r-1", run_dir) == home
    run_dir.rename(tmp_path / "moved")
    assert checkpoint_home(disk, "r-1", tmp_path / "moved") == home
    for folder in ("../others", "r-2", "", None, 3):
        (tmp_path / "moved" / "checkpoints.json").write_text(json.dumps({"run": "\0", "folder": folder}))
        assert checkpoint_home(disk, "r-1", tmp_path / "moved") == home
