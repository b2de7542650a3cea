"""streamrl learner [key=value ...]    torchrun --nproc_per_node=N -m learner [key=value ...]

  -m             one run, with actors, for each combination of comma-separated values: streamrl launch --help
  --cfg job      print the composed settings as YAML, and run nothing

The only finite process of a run: owns the version number, the leases (in its hub) and the checkpoint.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from streamrl.commands import exit_at_once
from streamrl.config.devices import Choice, apply, choice_lines
from streamrl.config.hydra_words import read_command_line
from streamrl.config.load import Loaded, composed_yaml, load_with_choices, recorded
from streamrl.config.schema import Config
from streamrl.errors import ConfigError, StreamrlError, one_sentence
from streamrl.messages.printable import start_log
from streamrl.parent_watch import NOTICE, end_with_parent, program, take_stdout
from streamrl.process_memory import uncollected
from streamrl.processes import keep_private
from streamrl.run_dirs import choose_run_dir, name_or_path, note_start, numbered_run_dir

if TYPE_CHECKING:
    import torch

log = logging.getLogger("streamrl.learner")

STANDBY = "--standby"
"""First word: load the libraries, and begin when the launcher writes to standard input."""
CHECK = "--check"
"""First word: check the settings as `streamrl launch` does, and start nothing."""


def main() -> int:
    keep_private()
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(__doc__)
        print("Every setting: streamrl settings")
        return 0
    if words[:1] == [CHECK]:
        return check_only(words[1:])
    if words[:1] == [STANDBY]:
        words = words[1:]
        if not stand_by():
            return 0
    launched = end_with_parent()
    rank = int(os.environ.get("RANK", "0"))
    level = os.environ.get("STREAMRL_LOG", "INFO" if rank == 0 else "WARNING").upper()
    start_log(f"learner{rank or ''}", level=level)
    prepare_allocator()
    try:
        told = log.debug if launched else log.info  # the launcher has said it
        line = read_command_line(words)
        if line.multirun:  # several runs, each a learner with its actors
            if "RANK" in os.environ:
                raise ConfigError("torchrun starts one run: use streamrl launch -m launch.num_learner_ranks=N ...")
            command = [*program("streamrl.cli"), "launch", *words]
            os.execv(command[0], command)
        if line.shows:
            print(composed_yaml(line.words, resolves=line.resolves), end="")
            return 0
        return learn(line.words, told, launched=launched)
    except StreamrlError as error:
        log.error("%s", error)
        return 2 if isinstance(error, ValueError) else 1
    except OSError as error:
        if error.filename is None:
            raise
        log.error("%s", one_sentence(error))  # as a run directory that is read-only, or a full disk
        return 1


def prepare_allocator() -> None:
    """Before torch is imported: batches differ in shape, fixed segments leave holes. The user's own choice wins."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def stand_by() -> bool:
    """Import what a learner needs, which is most of its start; then wait. False if the launcher ended meanwhile."""
    load_libraries()
    return bool(os.read(0, 1))


def load_libraries() -> None:
    with uncollected():
        importlib.import_module("learner.setup.compose")


def check_only(words: list[str]) -> int:
    """Print what is wrong with these settings, or what is chosen for the GPU if a launched run could start with them.

    Returns 0 if it could.
    """
    end_with_parent()
    from learner.setup.preflight import check_run

    answer = take_stdout()

    def notify(text: str) -> None:
        print(f"{NOTICE}{text}", file=sys.stderr, flush=True)

    try:
        loaded = load_with_choices(words)
        chosen = check_run(loaded.config, notify=notify, choose=lambda device: choices_on(device, loaded, notify))
    except StreamrlError as error:
        print(error, file=answer, flush=True)
        return 2
    print(json.dumps([asdict(one) for one in chosen]), file=answer, flush=True)
    return 0


def choices_on(device: torch.device, loaded: Loaded, notify: Callable[[str], None]) -> list[Choice]:
    """Ask the planner for a GPU's settings; its libraries are loaded only there."""
    if device.type == "cpu" and not loaded.choices:
        return []
    from learner.fit.by_device import choose

    return choose(loaded, device, notify)


def settled(words: list[str], told: Callable[..., None]) -> Config:
    """The settings of a learner that may have no launcher: what is left to its GPU is chosen, and told.

    A run that is resumed keeps the sizes with which it began.
    """
    loaded = load_with_choices(words, notify=told)
    config, chosen = loaded.config, list(loaded.choices)
    if config.checkpoint.resume and loaded.open:
        chosen += recorded(choose_run_dir(config), loaded.open)
        loaded = replace(loaded, open=sorted({*loaded.open} - {one.key for one in chosen}))
    if chosen or loaded.open:
        from learner.setup.model_hub import find_models
        from learner.setup.preflight import learner_device, models_of

        trial = replace(loaded, config=deepcopy(config))
        find_models(models_of(trial.config), told, allow=config.actors.allow)
        chosen += choices_on(learner_device(config), trial, told)
        apply(config, chosen)
        for line in choice_lines(chosen):
            told(line)
    return config


def learn(words: list[str], told: Callable[..., None], *, launched: bool) -> int:
    """Set up, train, finish, and clean up; `streamrl launch` has noted the start of a run that it launched."""
    config = settled(words, told)
    load_libraries()
    from learner.ranks.stop_flag import StopFlag
    from learner.setup.compose import carry_out
    from learner.setup.device import agreed_run_dir, start_ranks

    stop = StopFlag(grace_s=2 * config.run.shutdown_s)
    ranks = start_ranks(config.run, config.learner)
    run_dir = agreed_run_dir(
        partial(choose_run_dir, config), partial(numbered_run_dir, config), config.run.dir, ranks
    )
    noted = ranks.rank != 0 or launched
    run, completed = carry_out(
        config, run_dir, stop, ranks,
        locked=(lambda: None) if noted else partial(note_start, run_dir, ["streamrl", "learner", *words]),
    )
    if not completed and run.ranks.rank == 0:
        # A launcher says how to go on; two commands would be one too many.
        go_on = "" if launched else f"; go on with:  streamrl resume {shlex.quote(name_or_path(run_dir))}"
        log.info("stopped at version %d%s", run.version, go_on)
    return 0


if __name__ == "__main__":
    exit_at_once(main())
