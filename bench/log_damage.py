"""What becomes of a run's log when one bit of it flips, or one file of it is cut?

Each draw damages the log of a real run (files, headers, the mark) in place and asks its readers and its recovery. One
of these must be so, else it counts as a violation: all that was acknowledged is read, bit for bit; or it is refused by
an error that names file and byte. And recovery has deleted nothing: every byte is where it was, or in the file that it
keeps what it cuts in. Half of the cuts are made as a crash would, with the last write not acknowledged.

Run: python -m bench.log_damage [--run RUN] [--flips 100000] [--cuts 10000]
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import xxhash

from bench.record import exit_status, record, shared_arguments
from streamrl.stream.records import LogError
from streamrl.stream.segments import FOLDER, MARK, scan, segments, write_mark
from streamrl.stream.writer import close_log

HEADERS = 0.25
"""Share of the flips that are drawn among the headers and the mark, a few percent of the bytes."""
_NAMED = re.compile(r"/(?:\d+\.seg|durable), byte \d+: ")


class DamagedLog:
    """A copy of a run's log, damaged and restored again and again.

    Attributes:
        counts: what became of the draws.
        violations: what went wrong, with the damage.
    """

    def __init__(self, run_dir: Path, folder: Path) -> None:
        self._run = folder
        (folder / FOLDER).mkdir(parents=True)
        for path in (run_dir / FOLDER).iterdir():
            shutil.copy(path, folder / FOLDER)
        self._whole = self._content()
        self._records = self._read()
        self._headers = [(MARK, at) for at in range(len(self._whole[MARK]))]
        for one in segments(folder):
            self._headers += [(one.path.name, at) for at in range(one.begin)]
        starts = {}
        for place, _ in scan(folder):
            starts[place.sequence] = (place.path.name, place.at)
            self._headers += [(place.path.name, place.at + at) for at in range(place.form.header_size)]
            header = place.form.header(self._whole[place.path.name], place.at)
            assert header is not None
            self._last_write = header.synced
        self._last_write_at = starts[self._last_write + 1]
        self.num_bytes = sum(map(len, self._whole.values()))
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []

    def flip(self, chance: random.Random) -> None:
        """Flip one bit anywhere."""
        if chance.random() < HEADERS:
            name, at = chance.choice(self._headers)
        else:
            at, files = chance.randrange(self.num_bytes), iter(self._whole)
            name = next(files)
            while at >= len(self._whole[name]):
                at -= len(self._whole[name])
                name = next(files)
        data, bit = self._whole[name], chance.randrange(8)
        self._write(name, at, bytes([data[at] ^ 1 << bit]))
        self._judge(f"bit {bit} of byte {at} of {name} flipped", len(self._records))
        self._write(name, at, data[at : at + 1])

    def cut(self, chance: random.Random) -> None:
        """Cut one file anywhere; or as a crash would, in the last write, of which no actor was told."""
        name, acknowledged = chance.choice(list(self._whole)), len(self._records)
        at = chance.randrange(len(self._whole[name]))
        if chance.random() < 0.5:
            name, begin = self._last_write_at
            at, acknowledged = chance.randrange(begin, len(self._whole[name])), self._last_write
            write_mark(self._run / FOLDER, acknowledged)
        with (self._run / FOLDER / name).open("r+b") as file:
            file.truncate(at)
        self._judge(f"{name} cut at byte {at}, {acknowledged} records acknowledged", acknowledged)
        for one in (name, MARK):
            (self._run / FOLDER / one).write_bytes(self._whole[one])

    def _judge(self, damage: str, acknowledged: int) -> None:
        before, said = self._content(), ""
        try:
            found = self._read()
            if found != self._records[: max(acknowledged, len(found))]:
                self.violations.append(f"{damage}: {len(found)} records are read in silence")
            self.counts["read whole" if len(found) == len(self._records) else "read up to what was acknowledged"] += 1
        except LogError as error:
            said = str(error)
            self.counts["refused by name"] += 1
            if not _NAMED.search(said):
                self.violations.append(f"{damage}: {said}")
        try:
            close_log(self._run)
        except LogError:
            if before != self._content():
                self.violations.append(f"{damage}: a refused recovery changed the log")
        else:
            self._recovered(damage, before, bool(said))

    def _recovered(self, damage: str, before: dict[str, bytes], refused: bool) -> None:
        """After a recovery every byte is where it was, or behind the cut in the file that keeps it."""
        after = self._content()
        for name, data in before.items():
            kept = [after[one] for one in after if one.startswith(f"{name.removesuffix('.seg')}.cut-")]
            if after.get(name, b"") + b"".join(kept) != data and data.rstrip(b"\0") != (
                after.get(name, b"") + b"".join(kept)).rstrip(b"\0"):
                self.violations.append(f"{damage}: recovery lost bytes of {name}")
            if refused and name in after and after[name] != data:
                self.violations.append(f"{damage}: recovery cut {name}, which a reader had refused")
        for name in after.keys() - self._whole.keys():
            (self._run / FOLDER / name).unlink()
        for name in self._whole:
            if after.get(name) != before[name]:
                (self._run / FOLDER / name).write_bytes(before[name])

    def _read(self) -> list[int]:
        """A digest of every record that a reader gets."""
        return [xxhash.xxh3_64_intdigest(view) for _, view in scan(self._run)]

    def _content(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((self._run / FOLDER).iterdir())}

    def _write(self, name: str, at: int, data: bytes) -> None:
        with (self._run / FOLDER / name).open("r+b") as file:
            file.seek(at)
            file.write(data)


def real_run(run_dir: Path) -> Iterator[str]:
    """Record a run of the quickstart that is started twice; yields its commands."""
    words = [
        "experiment=quickstart", f"run.dir={run_dir}", "eval.every_steps=0", "rollout.num_prompts_per_step=4",
        "rollout.num_responses_per_prompt=4", "launch.num_actors=1", "checkpoint.every_steps=2",
    ]
    for more in (["trainer.num_steps=3"], ["trainer.num_steps=6", "checkpoint.resume=true"]):
        yield " ".join(more)
        subprocess.run(
            [sys.executable, "-m", "streamrl.cli", "launch", *words, *more], check=True, stdout=subprocess.DEVNULL,
        )


def main() -> int:
    parser = shared_arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--run", type=Path, default=None, metavar="RUN", help="whose log; by default one that is made")
    parser.add_argument("--flips", type=int, default=100_000)
    parser.add_argument("--cuts", type=int, default=10_000)
    given = parser.parse_args()
    lines, chance = [], random.Random(given.seed)
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = given.run or Path(folder) / "run"
        if given.run is None:
            for words in real_run(run_dir):
                print(f"recording a run: {words}", file=sys.stderr)
        for kind, num in (("flips", given.flips), ("cuts", given.cuts)):
            if not num:
                continue
            drawn = DamagedLog(run_dir, Path(folder) / kind)
            for _ in range(num // 100 if given.quick else num):
                drawn.flip(chance) if kind == "flips" else drawn.cut(chance)
            for one in drawn.violations[:20]:
                print(one, file=sys.stderr)
            lines.append(record(
                f"log_damage.violations.{kind}", len(drawn.violations), "draws", "lower", [len(drawn.violations)],
                {"draws": drawn.counts.total(), **drawn.counts, "log_bytes": drawn.num_bytes, "in_headers": HEADERS},
                goal={"id": f"log_damage.{kind}", "op": "<=", "value": 0}, seed=given.seed,
            ))
    return exit_status(lines, given.check)


if __name__ == "__main__":
    sys.exit(main())
