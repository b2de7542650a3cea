"""streamrl replay RUN --rewards [--from N] [--to N] [--json] [key=value ...]

Run the environment again on the recorded answers of the batches from version N on, and name every answer whose reward
differs. Nothing is generated: an engine says what the model said, turn for turn. Where the environment says something
else than it did, the reward is no function of record and answer, and the answer is named as one that cannot be checked.
`streamrl verify` reads the lines of --json.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from actors.engines.base import EngineStats, GenerateRequest, Generation, InstallTimes, VersionSpan
from actors.env_calls.group_step import GroupStep
from actors.env_calls.instances import Instances
from actors.episode import EpisodeRunner
from actors.local_policy import LocalModel
from actors.render import load_end_ids, load_tokenizer
from actors.settings import episode_rules, make_renderer
from actors.trajectory.rules import PromptTooLongError
from envs.registry import task_of
from envs.rewards.services import MODEL_PART
from streamrl.commands import DIFFERS, EQUAL, NOT_COMPARABLE, exit_at_once, parsed, parser_of, say, status_of
from streamrl.config.load import load_run_config
from streamrl.config.overrides import leaves
from streamrl.environment import HasSetUp, Task
from streamrl.errors import EngineError, WireError
from streamrl.messages import TO_HUB, Group, Member, MemberStatus, Sampling, Turn, VersionRef
from streamrl.messages.codec import Decoder, unpack_ids, unpack_logprobs
from streamrl.messages.printable import printable
from streamrl.parent_watch import take_stdout
from streamrl.run_dirs import find_run_dir
from streamrl.stream.history import MAX_FRAME_BYTES, History
from streamrl.stream.records import GroupArrived

OF_TASK = ("env.", "data.", "reward.")
NO_REWARD = ("env.step_timeout_s", "env.num_threads", "env.num_max_instances", "data.shuffle", "data.weights")
"""Settings of these sections that do not decide what an answer earns."""
ROUNDING, DEVICE = 1e-4, 0.3
"""How far scores of a reward model differ, of their size: by the rest of a batch, by bfloat16 and float32."""


class RecordedEngine:
    """Says what a recorded member said. Raises EngineError where it is asked for something else."""

    name, max_num_seqs = "recorded", 1
    installed: VersionRef | None = None

    def __init__(self, member: Member, prompt_ids: bytes) -> None:
        self._member, self._left = member, list(member.turns)
        self._tokens, self._logprobs = unpack_ids(member.token_ids).tolist(), unpack_logprobs(member.logprobs).tolist()
        self._contexts = [(0, prompt_ids), *((one.start, one.prompt_ids) for one in member.sequences)]

    async def generate(self, request: GenerateRequest) -> Generation:
        turns, read = self._member.turns, list(request.prompt_ids)
        if not self._left:
            raise EngineError(f"it goes on after turn {len(turns)}, the last that was recorded")
        # Turns are recorded by sequence: where conversations alternated, the next one asked for is not the next there.
        turn = next((one for one in self._left if self._context(one) == read), None)
        if turn is None:
            number = len(turns) - len(self._left) + 1
            raise EngineError(f"the input of turn {number} is another than was recorded")
        self._left.remove(turn)
        cut = turn is turns[-1] and self._member.finish == "length"
        spans = [
            VersionSpan(VersionRef(one.learner_epoch, one.version), one.start - turn.start, one.end - turn.start)
            for one in self._member.versions if turn.start <= one.start < turn.end
        ]
        return Generation(
            self._tokens[turn.start : turn.end], self._logprobs[turn.start : turn.end], spans,
            turn.finish or ("length" if cut else "stop"),
        )

    def _context(self, turn: Turn) -> list[int]:
        """Return everything that the model read before this turn."""
        start, prompt = next(one for one in reversed(self._contexts) if one[0] <= turn.start)
        return [*unpack_ids(prompt).tolist(), *self._tokens[start : turn.start]]

    async def install(self, tensors: Any, ref: VersionRef) -> InstallTimes:
        raise EngineError("recorded answers have no weights")

    def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None:
        pass


@dataclass
class Checked:
    """The outcome for the answers of a batch: lines that name those that differ, and those that cannot be checked."""

    num_equal: int = 0
    differing: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def add(self, more: Checked) -> None:
        """Count the answers of another batch too."""
        self.num_equal += more.num_equal
        self.differing += more.differing
        self.unchecked += more.unchecked


class RewardCheck:
    """Plays recorded groups again on a run's task."""

    def __init__(self, task: Task, runner: EpisodeRunner) -> None:
        self._task, self._runner = task, runner
        self._decoder = Decoder(TO_HUB, MAX_FRAME_BYTES)

    async def check(self, arrivals: Sequence[GroupArrived], changed: Sequence[str] = ()) -> Checked:
        """The members of these groups, those of a group side by side as they were generated.

        Args:
            changed: for each, the settings of its task that a resume has replaced since then.
        """
        checked = Checked()
        for arrived, other in zip(arrivals, changed or [""] * len(arrivals), strict=True):
            try:
                group = self._decoder.decode(arrived.frame)
            except WireError as error:
                checked.differing.append(f"group {arrived.group_id} of {arrived.actor_id} cannot be read: {error}")
                continue
            assert isinstance(group, Group)
            members = [one for one in group.members if one.status != MemberStatus.ABORTED]
            whose = f"of {arrived.actor_id}, prompt {arrived.prompt_index}"
            if other:
                name = f"group {group.group_id} member"
                checked.unchecked += [f"{name} {one.index} {whose}: a resume has changed {other}" for one in members]
                continue
            index = arrived.prompt_index % self._task.num_records("train")
            record = json.dumps(dict(self._task.record("train", index)))  # as it was leased
            together = GroupStep([one.index for one in members])
            for member, found in zip(members, await asyncio.gather(*(
                self._play(member, members[0].prompt_ids, record, member.sampling or group.sampling, together)
                for member in members
            )), strict=True):
                name = f"group {group.group_id} member {member.index} {whose}"
                if isinstance(found, str):
                    checked.unchecked.append(f"{name}: {found}")
                    continue
                apart, now = _apart(member, found), f"reward {member.reward:.6g} then, {found.reward:.6g} now"
                if apart > DEVICE:
                    checked.differing.append(f"{name}: {now}")
                elif apart > ROUNDING:
                    checked.unchecked.append(f"{name}: {now}, by a reward model, which rounds by device and precision")
                else:
                    checked.num_equal += 1
        return checked

    async def _play(
        self, member: Member, prompt_ids: bytes, record: str, sampling: Sampling, together: GroupStep
    ) -> Member | str:
        """The member with the reward of now, or why there is none."""
        if "env_error" in member.scores:
            together.leave(member.index)
            return "its environment had failed, the reward is env.reward_floor"
        runner = copy.copy(self._runner)
        runner.engine = RecordedEngine(member, member.prompt_ids or prompt_ids)
        try:
            played = await runner.play(json.loads(record), member.index, 0, sampling, group=together)
        except (EngineError, PromptTooLongError) as error:
            return str(error)
        finally:
            together.leave(member.index)
        if played.status == MemberStatus.ABORTED:
            return f"its environment fails: {runner.last_env_error or played.finish}"
        if len(played.turns) != len(member.turns):
            return f"it ends after {len(played.turns)} turns, {len(member.turns)} were recorded"
        return played


def _apart(then: Member, now: Member) -> float:
    """How far two rewards are from each other, in their own size; infinitely where a task is exact and they differ."""
    apart = abs(now.reward - then.reward) / max(1.0, abs(then.reward))
    return apart if MODEL_PART in now.scores or apart == 0 else math.inf


async def check_rewards(run_dir: Path, words: Sequence[str], first: int, last: int | None, *, as_json: bool) -> int:
    """Print each batch and what differs in it; the exit status."""
    out, tell = (take_stdout(), lambda text: None) if as_json else (None, say)
    config = load_run_config(run_dir, words)
    history = History.read(run_dir)
    batches = history.trained(first, last)
    task, total, changes = task_of(config), Checked(), _changes(history)
    if not as_json and any(word.startswith(OF_TASK) for word in words):
        changes = {}  # the question is what another task says of all answers
    tell(f"{run_dir}: the rewards of {len(batches)} batches, from version {batches[0].cut.version} on")
    if isinstance(task, HasSetUp):
        await asyncio.to_thread(task.set_up)
    try:
        with LocalModel(run_dir, 0).files() as files:
            tokenizer = load_tokenizer(files)
            renderer = make_renderer(config, tokenizer, load_end_ids(files, tokenizer), task)
        runner = EpisodeRunner(
            task, RecordedEngine(_NO_MEMBER, b""), renderer, episode_rules(config, config.rollout.train.sampling, task),
            num_threads=config.env.num_threads, instances=Instances(config.env.num_max_instances),
        )
        check = RewardCheck(task, runner)
        for number, one in enumerate(batches, start=1):
            changed = [next((changes[at] for at in reversed(changes) if at < frame), "") for frame in one.cut.frames]
            found = await check.check(history.arrivals(one), changed)
            total.add(found)
            for line in _lines(f"batch {number} of {len(batches)}  version {one.cut.version}", found):
                tell(printable(line))
            if as_json:
                print(json.dumps(asdict(found)), file=out, flush=True)
        await runner.close()
    finally:
        if isinstance(task, HasSetUp):
            task.tear_down()
    tell(f"{total.num_equal} of {total.num_equal + len(total.differing)} rewards equal" + (
        f"; {len(total.unchecked)} answers cannot be checked" if total.unchecked else ""
    ))
    return DIFFERS if total.differing else NOT_COMPARABLE if total.unchecked else EQUAL


def _rewards(key: str) -> bool:
    return key.startswith(OF_TASK) and key not in NO_REWARD


def _changes(history: History) -> dict[int, str]:
    """The settings of the task that the last start of a run has not any more, by the record of each start."""
    starts = [
        {key: value for key, value in leaves(json.loads(one.settings)) if _rewards(key)}
        for one in history.starts
    ]
    last = starts[-1] if starts else {}
    return {
        record: ", ".join(sorted(key for key in then | last if then.get(key, OF_TASK) != last.get(key, OF_TASK)))
        for record, then in zip(history.begun, starts, strict=True)
    }


_NO_MEMBER = Member(0, MemberStatus.ABORTED, b"", b"", b"", (), (), (), 0.0, {}, "")


def _lines(head: str, found: Checked) -> Iterator[str]:
    yield f"  {head}  {found.num_equal} equal, {len(found.differing)} differ, {len(found.unchecked)} not checked"
    yield from (f"    {line}" for line in found.differing)
    yield from (f"    cannot be checked: {line}" for line in found.unchecked)


def main() -> int:
    parser = parser_of(
        "replay", "Run the environment again on a run's recorded answers, and name the rewards that differ.",
        find=find_run_dir, between=True,
        usage="streamrl replay RUN --rewards [--from N] [--to N] [--json] [key=value ...]",
        epilog="Exit status: 0 all equal, 1 a reward differs, 2 an error, 3 some cannot be checked.",
    )
    parser.add_argument("--rewards", action="store_true", help="this")
    parser.add_argument("--json", action="store_true", help="print an object for each batch, in place of the text")
    given = parsed(parser, words="settings that replace the run's, such as the reward", level="ERROR")
    return asyncio.run(check_rewards(given.run, given.words, given.first, given.last, as_json=given.json))


if __name__ == "__main__":
    exit_at_once(status_of(main))
