"""Run what the pages tell their readers to run, in a fresh clone with a fresh environment: `make docs-test`.

The clone holds the last commit. Commands run in the order of the pages, in the clone's folder, with its `.venv/bin`
first on the path; a file that a page shows is written there before the commands below it. commands.toml makes long runs
short and names what cannot run here. Ends with the list of commands, their exit status and seconds; status 1 if one
failed.

    python -m tests.docs.run                             everything, in a temporary clone
    python -m tests.docs.run --clone DIR                 the same in DIR, which is kept; one that is there is used again
    python -m tests.docs.run --clone DIR --only WORD     only commands or pages that contain the word
    python -m tests.docs.run --list                      what would be done with each command, without a clone
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from streamrl.metrics.samples import read_samples
from tests.docs.extract import ROOT, Item, all_items
from tests.docs.rules import Rule, full_text, read_rules, rule_for
from tests.docs.terminal import Outcome, Terminals

LOOPBACK = re.compile(r"(?<=127\.0\.0\.1:)(\d+)|(?<=localhost:)(\d+)")


class Ports:
    """A free port for each number that the pages name, the same one wherever it is named."""

    def __init__(self) -> None:
        self._free: dict[str, int] = {}

    def replace(self, text: str) -> str:
        return LOOPBACK.sub(lambda found: str(self._of(found[0])), text)

    def _of(self, named: str) -> int:
        if named not in self._free:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._free[named] = int(probe.getsockname()[1])
        return self._free[named]


class Reader:
    """Follows the pages in a clone."""

    def __init__(self, clone: Path, rules: list[Rule]) -> None:
        self._clone = clone
        self._rules = rules
        self._ports = Ports()
        self._terminals = Terminals(clone, clone.parent / f"{clone.name}-logs", _environment(clone))
        self._files: dict[str, str] = {}
        self._done: dict[tuple[str, ...], Outcome] = {}
        self.outcomes: list[Outcome] = []
        self._page_start = 0

    def follow(self, items: list[Item]) -> None:
        """Run every item. Commands for terminals run side by side until the page goes on with another command."""
        page = ""
        for item in items:
            if item.page != page:
                self._finish_page()
                page = item.page
            if item.kind == "file":
                path = self._clone / item.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(item.text, encoding="utf-8")
                self._files[item.name] = item.text
            else:
                self._command(item)
        self._finish_page()

    def close(self) -> None:
        """Ends what still runs, after an interruption."""
        self._terminals.close()

    def _command(self, item: Item) -> None:
        rule = rule_for(item, self._rules)
        text = full_text(item, rule)
        key = (text, *(f"{name}={content}" for name, content in sorted(self._files.items()) if name in text))
        if rule.skip:
            outcome = Outcome(item.where, text, note=f"not run: {rule.skip}")
        elif key in self._done and not rule.terminal:
            outcome = Outcome(item.where, text, note=f"as at {self._done[key].where}")
        elif rule.terminal:
            if rule.terminal == "learner":
                self._finish_terminals()
            self._terminals.open(item.where, self._ports.replace(text), rule.timeout_s)
            return
        else:
            self._finish_terminals()
            before = self._summaries()
            outcome = self._terminals.run(item.where, self._ports.replace(text), rule.timeout_s,
                                          python=item.kind == "python")
            if rule.learns or rule.no_gain:
                made = [(json.loads(path.read_text()), answers_of(path.parent))
                        for path in sorted(self._summaries() - before)]
                outcome = replace(outcome, note=rule.no_gain).with_scores(made, must_rise=rule.learns)
            self._done[key] = outcome
        self.outcomes.append(outcome)

    def _summaries(self) -> set[Path]:
        return set(self._clone.glob("runs/**/summary.json"))

    def _finish_terminals(self) -> None:
        self.outcomes += self._terminals.finish()

    def _finish_page(self) -> None:
        """Terminals end after commands that stand below them: the list has them in the order of the page."""
        self._finish_terminals()
        self.outcomes[self._page_start :] = sorted(self.outcomes[self._page_start :], key=lambda one: one.line)
        self._page_start = len(self.outcomes)


def answers_of(run_dir: Path) -> list[str]:
    """What the model said in the samples that a run kept."""
    return [one.answer for one in read_samples(run_dir)]


def _environment(clone: Path) -> dict[str, str]:
    """What a reader has after `source .venv/bin/activate`; nothing of this checkout's own environment."""
    kept = {key: value for key, value in os.environ.items()
            if key not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME") and not key.startswith(("MAKE", "STREAMRL"))}
    return {**kept, "PATH": f"{clone / '.venv/bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(clone / ".venv"),
            "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}


def make_clone(clone: Path) -> None:
    """A clone of the last commit, installed by the Makefile; one that is there is used as it is."""
    if not (clone / ".git").exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    if changed.stdout.strip():
        print("note: changes that are not committed are not tried", flush=True)


def selected(items: list[Item], word: str) -> list[Item]:
    """Commands that contain the word, or whose place does, and the files of their pages."""
    commands = [item for item in items if item.kind != "file" and (word in item.text or word in item.where)]
    pages = {item.page for item in commands}
    return [item for item in items if item in commands or (item.kind == "file" and item.page in pages)]


def planned(item: Item) -> Outcome:
    """A command that was not started: as it would be, or why not."""
    rule = rule_for(item, read_rules())
    return Outcome(item.where, full_text(item, rule), note=f"not run: {rule.skip}" if rule.skip else "")


def table(outcomes: list[Outcome]) -> str:
    """The list of commands with status and seconds, and a last line of counts."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    ran = [outcome for outcome in outcomes if outcome.status is not None]
    return "\n".join([
        "", "status   seconds  command", *(outcome.row() for outcome in outcomes), "",
        f"{len(outcomes)} commands: {len(ran) - len(failed)} ran and succeeded, {len(failed)} failed, "
        f"{len(outcomes) - len(ran)} not run: the reason stands beside each",
    ])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.docs.run", description=__doc__.split("\n\n")[0])
    parser.add_argument("--clone", type=Path, help="make the clone here and keep it; one that is there is used again")
    parser.add_argument("--only", default="", help="only commands or pages that contain this")
    parser.add_argument("--list", action="store_true", help="print what would be done, and do nothing")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        print("\n".join(planned(item).row() for item in all_items() if item.kind != "file"))
        return 0
    with tempfile.TemporaryDirectory(prefix="streamrl-docs-test-") as scratch:
        clone = (chosen.clone or Path(scratch) / "streamrl").absolute()
        make_clone(clone)
        reader = Reader(clone, read_rules())
        items = selected(all_items(clone), chosen.only)
        try:
            reader.follow([item for item in items if item.page == "README.md"])  # with what the quickstart installs
            subprocess.run(["make", "install"], cwd=clone, check=True)
            reader.follow([item for item in items if item.page != "README.md"])
        except KeyboardInterrupt:
            return 130
        finally:
            reader.close()
            print(table(reader.outcomes), flush=True)
    return int(any(outcome.failed for outcome in reader.outcomes) or not reader.outcomes)


if __name__ == "__main__":
    sys.exit(main())
