"""`python -m bench.families`: every family in a process of its own, and a line of the result for each."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.families.page import RESULTS, read_lines

FAMILY_S, VLLM_S = 120.0, 400.0
"""A family that takes longer has failed."""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.families", description=__doc__)
    parser.add_argument("--only", default="", help="families, with commas between them; their lines are replaced")
    parser.add_argument("--engine", default="native", choices=["native", "vllm"])
    parser.add_argument("--out", type=Path, help="the result, instead of bench/results/families/ENGINE.jsonl")
    parser.add_argument("--resume", action="store_true", help="leave out families that have a line of this commit")
    asked = parser.parse_args(words)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from bench.environment import environment_stamp
    from bench.families.cases import FAMILIES
    from bench.families.family import warm

    chosen = [name for name in asked.only.split(",") if name] or list(FAMILIES)
    if unknown := sorted(set(chosen) - set(FAMILIES)):
        parser.error(f"{unknown[0]} is no family of causal language models of the installed transformers")
    out = asked.out or RESULTS / f"{asked.engine}.jsonl"
    lines = read_lines(out)
    stamp = environment_stamp()
    made = {"commit": (stamp["git_commit"] or "")[:12], "transformers": stamp["packages"]["transformers"]}
    if asked.engine == "vllm":
        made["vllm"] = metadata.version(metadata.packages_distributions()["vllm"][0])
    failed = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: the fork that is under way ends, too
    warm()
    for place, name in enumerate(chosen, 1):
        if asked.resume and {key: lines.get(name, {}).get(key) for key in made} == made:
            continue
        began = time.monotonic()
        line = {"family": name, **in_a_fork(name, asked.engine), **made}
        lines[name] = line
        write_lines(out, lines.values())
        failed += [name] * (line["result"] == "failed")
        print(
            f"{place:3}/{len(chosen)} {time.monotonic() - began:5.1f} s  {name}: {line['result']}  {line['reason']}",
            flush=True,
        )
    print(f"{sum(line['result'] == 'exact' for line in lines.values())} exact of {len(lines)} in {out.name}")
    return 1 if failed else 0


def in_a_fork(name: str, engine: str) -> dict[str, Any]:
    """The result of one family, found by a fork of this process in a limited time."""
    from bench.families.family import examine

    folder = Path(tempfile.mkdtemp(prefix="families-"))
    note = folder / "line.json"
    if (pid := os.fork()) == 0:
        os.setsid()  # so that all that it starts can be ended with it
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            note.write_text(json.dumps(examine(name, folder, engine)))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    limit = FAMILY_S if engine == "native" else VLLM_S
    try:
        if not ended(pid, limit):
            return {"result": "failed", "reason": f"it took longer than {limit:g} s"}
        if not note.exists():
            said = (folder / "log").read_text(errors="replace").strip().splitlines()
            return {"result": "failed", "reason": f"its process died: {' | '.join(said[-3:])}"[:500]}
        return json.loads(note.read_text())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def ended(pid: int, limit_s: float) -> bool:
    """Whether the process ends in time; if not, it and all that it started is killed."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text("".join(json.dumps(line) + "\n" for line in sorted(lines, key=lambda line: line["family"])))
    os.replace(draft, path)


if __name__ == "__main__":
    sys.exit(main())
