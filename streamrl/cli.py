"""The `streamrl` command. It starts learner and actors as processes and imports neither."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from streamrl.commands import status_of
from streamrl.messages.printable import start_log
from streamrl.processes import keep_private
from streamrl.version import __version__

USAGE = f"""streamrl {__version__}: asynchronous off-policy RL for language models

  streamrl launch experiment=quickstart           a learner and its actors, supervised and stopped together
  streamrl launch -m staleness.eta=0,4 ...        one run for each combination, then a comparison
  streamrl debug experiment=quickstart            the same in one process: breakpoint() in a reward stands in pdb
  streamrl sft [key=value ...]                    supervised training, on answers of a file (data.path)
  streamrl dpo [key=value ...]                    training on pairs of a better and a worse answer
  streamrl train-reward-model [key=value ...]     a reward model from such pairs
  streamrl fit MODEL [--gpus 8] [--memory 80GB]   which settings fit, predicted without a GPU
  streamrl eval MODEL_OR_RUN [key=value ...]      score a model on held-out prompts, without a learner
  streamrl chat MODEL_OR_RUN                      talk to it
  streamrl serve MODEL_OR_RUN                     serve it to agents through the OpenAI and Anthropic APIs
  streamrl push RUN[@N] OWNER/NAME                its model on the Hugging Face hub
  streamrl settings [--common] [WORD ...]         settings with type, default and meaning
  streamrl tasks [WORD ...]                       the tasks that come with it, and their options
  streamrl relay --learner tcp://HOST:PORT        pass weights on to many actors; see streamrl relay --help
  streamrl report RUN_DIR [RUN_DIR ...]           write report.html again, or compare several runs
  streamrl report runs/                           an index of all runs
  streamrl reward-model DIR                       score answers with a reward model, for reward.model.url
  streamrl samples RUN_DIR [--worst] [...]        read what the model said; see streamrl samples --help

While a run goes on, and after it:
  streamrl status RUN                             who waits for whom, one sentence per process
  streamrl scale RUN N                            let its launcher keep N actors alive
  streamrl drain RUN ACTOR                        let an actor finish its leases and leave
  streamrl resume RUN [key=value ...]             go on from its newest checkpoint

From its log (docs/log.md, docs/verify.md), each with --help:
  streamrl stream RUN [--export FILE]             print, filter and export what happened
  streamrl replay RUN [--rewards]                 train it again, or score it again, and compare
  streamrl at RUN@137                             the model of any version; also: streamrl eval RUN@137, RUN@best
  streamrl what-if RUN algorithm=vespo,m2po       other settings on the identical stream
  streamrl bisect RUN [--drop X]                  the version where a score broke
  streamrl blame RUN A..B                         the groups that moved the weights between two versions
  streamrl bundle RUN                             one file with which others can verify the run
  streamrl verify BUNDLE                          check that a run was as its bundle says

By hand, in terminals of their own or on other machines:
  streamrl learner experiment=quickstart hub.bind=tcp://127.0.0.1:5601
  streamrl actor connect=tcp://127.0.0.1:5601
  streamrl keys new|add|remove|list               who may join over a network; see streamrl keys --help
  streamrl join tcp://HOST:PORT key=FILE          an actor on another machine
  streamrl slurm [--submit] [key=value ...]       a run as two Slurm jobs; see streamrl slurm --help
"""
HELP = {
    "launch": """streamrl launch [FILE.yaml] [key=value ...]       one run: a learner and launch.num_actors actors
streamrl launch -m [FILE.yaml] [key=value ...]    one run for each combination of comma-separated values, ranked
streamrl launch -m hydra/sweeper=optuna ...       a search of ranges such as 'key=interval(0,1)': docs/search.md

  experiment=NAME    settings of configs/experiment/, e.g. quickstart or smollm2
  algorithm=NAME     settings of configs/algorithm/, e.g. grpo or dapo
  key=value          any setting: streamrl settings --common, streamrl settings WORD
  FILE.yaml          your own settings; words beside it override them. The config.yaml of a run repeats the run
  --cfg job          print the composed settings (with -m those of each job) as YAML, and run nothing; --resolve with
                     values for references
  -cd DIR, -cn NAME  config groups and a settings file in a directory of your own: docs/settings.md""",
    "debug": """streamrl debug [FILE.yaml] [key=value ...]   one run as threads of this process, on the CPU; see launch

  breakpoint() in a reward or an environment stands in pdb, and no time limit passes meanwhile; what they raise opens
  pdb where it was raised. `continue` goes on, `quit` ends the run. Tiny models start untrained; the first evaluation
  and the check of the task before the run are left out.""",
    "settings": """streamrl settings [--common] [WORD ...]    settings with type, default and meaning

  WORD        only those whose line contains every word
  --common    only those to know first""",
    "tasks": """streamrl tasks [WORD ...]    tasks by name, with what they ask and their options

  WORD                   only those whose name or sentence contains every word
  reasoning_gym.NAME     one data set of that package""",
    "report": """streamrl report RUN_DIR                 write RUN_DIR/report.html again
streamrl report RUN_DIR RUN_DIR ...     compare runs, the best last evaluation first: comparison.html and
                                        comparison.md next to the first run named
streamrl report FOLDER                  index.html of all runs in a folder, and the reports that are missing or old""",
}


PROGRAMS = {
    "learner": "learner", "fit": "learner.fit", "at": "learner.replay.at", "what-if": "learner.replay.what_if",
    "verify": "learner.replay.verify", "blame": "learner.replay.blame", "bisect": "learner.replay.bisect",
    "actor": "actors", "eval": "actors.evaluate", "chat": "actors.chat", "serve": "actors.serve",
    "reward-model": "actors.reward_model", "tasks": "envs.catalog",
}
"""Command -> the module that this process becomes."""
MODULES = {
    "keys": "streamrl.transport.keys", "slurm": "streamrl.verbs.slurm", "relay": "streamrl.weights.pull.relay",
    "stream": "streamrl.verbs.stream", "bundle": "streamrl.verbs.bundle", "status": "streamrl.verbs.status",
    "scale": "streamrl.verbs.actors", "drain": "streamrl.verbs.actors", "resume": "streamrl.verbs.resume",
    "samples": "streamrl.report.sample_view", "push": "streamrl.verbs.push",
}
"""Command -> the module with a function of that name, which gets the words."""


class CurrentStderr(logging.Handler):
    """Writes to what `sys.stderr` is at the moment: the live display takes it over, to keep lines above its panel."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def main() -> int:
    """Entry point of the console script."""
    keep_private()
    start_log("launch", level="INFO", handler=CurrentStderr())
    # Ctrl-C arrives here while settings are checked; a run that has started handles it by itself.
    return status_of(_command, interrupted="")


def _command() -> int:
    """The command that the words of this process name."""
    command, *words = sys.argv[1:] or [""]
    if command in ("-h", "--help", "help", ""):
        print(USAGE)
        return 0 if command else 2
    if command in ("-V", "--version", "version"):
        print(__version__)
        return 0
    known = commands()
    if command not in known:
        near = get_close_matches(command, known, n=1)
        hint = f" Did you mean `streamrl {near[0]}`?" if near else ""
        print(f"{USAGE}\nUnknown command `{command}`.{hint}", file=sys.stderr)
        return 2
    if command in HELP and {"-h", "--help"} & set(words):
        print(HELP[command])
        return 0
    return known[command](words)


def commands() -> dict[str, Callable[[list[str]], int]]:
    """Command -> what it does with its words."""
    return {
        "launch": launch, "debug": debug, "settings": settings, "report": report, "join": join, "replay": replay,
        **{name: partial(_become, module) for name, module in PROGRAMS.items()},
        **{name: partial(_open_model, PROGRAMS[name]) for name in ("eval", "chat", "serve")},
        **{name: partial(_call, module, name) for name, module in MODULES.items()},
        **{name: partial(supervised, name) for name in ("sft", "dpo", "train-reward-model")},
    }


def launch(overrides: list[str]) -> int:
    """One run, or with -m / --multirun several: a grid of listed values, or a search."""
    from streamrl.parent_watch import watch

    watch(lambda: os.kill(os.getpid(), signal.SIGTERM))  # a sweep started this run
    from streamrl.config.hydra_words import read_command_line

    line = read_command_line(overrides)
    if line.shows and line.multirun:
        from streamrl.sweep.sweep import jobs_yaml

        print(jobs_yaml(line.words, resolves=line.resolves), end="")
        return 0
    if line.shows:
        from streamrl.config.load import composed_yaml

        print(composed_yaml(line.words, resolves=line.resolves), end="")
        return 0
    if line.multirun:
        from streamrl.sweep.sweep import launch_sweep

        return launch_sweep(line.words)
    from streamrl.launch import launch_run

    return launch_run(line.words)[1]


def debug(words: list[str]) -> int:
    """Start a run in this process, for a debugger."""
    from streamrl.config.hydra_words import read_command_line
    from streamrl.launch import launch_run
    from streamrl.supervise.one_process import DEBUG_WORDS

    return launch_run([*DEBUG_WORDS, *read_command_line(words).words])[1]


def settings(words: list[str]) -> int:
    """Print settings under their sections: all, the common ones, or those whose line contains every word."""
    from streamrl.config.aliases import COMMON
    from streamrl.config.catalog import nearest_setting
    from streamrl.config.catalog import settings as all_settings

    wanted = [word.lower() for word in words if word != "--common"]
    section = ""
    for name, kind, default, sentence in all_settings():
        line = f"{name}={'null' if default is None else default}  ({kind})  {sentence}"
        if ("--common" in words and name not in COMMON) or not all(word in line.lower() for word in wanted):
            continue
        head = name.partition(".")[0]
        if head != section:
            print(f"{chr(10) if section else ''}{head}")
            section = head
        print(f"  {line}")
    if section:
        return 0
    print(f"No setting contains {' and '.join(wanted)}: {nearest_setting(wanted[0])}", file=sys.stderr)
    return 2


def join(words: list[str]) -> int:
    """An actor for a run elsewhere: this process becomes it."""
    from streamrl.transport.keys import JOIN_USAGE, join_words

    if {"-h", "--help"} & set(words):
        print(JOIN_USAGE)
        return 0
    return _become("actors", join_words(words))


def replay(words: list[str]) -> int:
    """The run's log again: by a learner, or with --rewards by the environment alone."""
    return _become("actors.recorded" if "--rewards" in words else "learner.replay", words)


def supervised(kind: str, words: list[str]) -> int:
    """A trainer beside RL: this process becomes it."""
    return _become("learner.supervised", [kind, *words])


def _call(module: str, name: str, words: list[str]) -> int:
    """The function of a command in its module, which is imported for it alone."""
    try:
        return getattr(importlib.import_module(module), name)(words)
    except SystemExit as ended:  # of argparse, which has printed its help, or what is wrong
        return int(ended.code or 0)


def _open_model(module: str, words: list[str]) -> int:
    """A program of MODEL_OR_RUN: what it names is there, before this process loads libraries for seconds."""
    if words and not words[0].startswith("-") and not {"-h", "--help"} & set(words):
        from streamrl.stream.rebuilt import require_model

        require_model(words[0])
    return _become(module, words)


def _become(module: str, words: list[str]) -> int:
    """This process becomes the program: nothing of it is imported here."""
    from streamrl.parent_watch import program

    command = [*program(module), *words]
    os.execv(command[0], command)


def report(run_dirs: list[str]) -> int:
    """Write report.html of a run, comparison.html of several, or index.html of a folder of runs."""
    from streamrl.metrics.ranking import Objective
    from streamrl.report.compare import write_comparison
    from streamrl.report.index import write_index
    from streamrl.report.report import write_report

    if not run_dirs:
        print("name at least one run directory", file=sys.stderr)
        return 2
    if len(run_dirs) == 1:
        run_dir = Path(run_dirs[0])
        is_folder = run_dir.is_dir() and not (run_dir / "metrics.jsonl").exists() and any(run_dir.iterdir())
        print(write_index(run_dir, reports=True) if is_folder else write_report(run_dir))
        if not is_folder and (run_dir.parent / "index.html").exists():
            write_index(run_dir.parent)
        return 0
    out = Path(run_dirs[0]).parent / "comparison.html"
    print(write_comparison(run_dirs, out, Objective()))  # ranked by their last evaluation
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
