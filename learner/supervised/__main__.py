"""streamrl sft|dpo|train-reward-model [key=value ...]    torchrun --nproc_per_node=N -m learner.supervised sft ...

    sft                   data.path: conversations (messages) or prompts with a completion; learns the answers
    dpo                   data.path: prompts with a chosen and a rejected answer
    train-reward-model    the same; a model that gives the chosen one a greater score, for reward.type=model

  streamrl sft policy.model_path=MODEL data.path=answers.jsonl policy.optimizer.lr=1e-5
  streamrl dpo policy.model_path=MODEL data.path=pairs.jsonl policy.optimizer.lr=5e-7

settings, with their defaults:
    policy.model_path                       the model to start from
    policy.optimizer.lr=1e-06               RL's: sft and reward models usually take 1e-5, small models more
    policy.scheduler.name=constant          or another: docs/formulas.md
    rollout.num_prompts_per_step=16         records of a step
    trainer.num_steps=100                   or passes over the records, trainer.num_epochs
    eval.every_steps=25                     held-out loss, of eval.num_samples=100 records; 0 samples is off
    data.max_tokens                         of a record, or of each answer of a pair; longer ones are cut
    learner.max_tokens_per_device=4096      of records trained together, and most of one
    dpo.beta=0.1                            of the log-ratio to the reference

Every setting: streamrl settings; more: docs/supervised.md
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from contextlib import ExitStack
from functools import partial

from streamrl.commands import exit_at_once
from streamrl.config.load import load_config
from streamrl.errors import StreamrlError, TaskError
from streamrl.messages.printable import printable_lines, start_log
from streamrl.parent_watch import end_with_parent
from streamrl.processes import keep_private
from streamrl.run_dirs import choose_run_dir, name_or_path, note_start, numbered_run_dir

log = logging.getLogger("streamrl.learner")
KINDS = ("sft", "dpo", "train-reward-model")


def main() -> int:
    keep_private()
    kind, *words = sys.argv[1:] or [""]
    if {"-h", "--help"} & set(sys.argv[1:]) or kind not in KINDS:
        print(__doc__)
        return 0 if kind in (*KINDS, "-h", "--help") else 2
    end_with_parent()
    rank = int(os.environ.get("RANK", "0"))
    start_log(f"{kind}{rank or ''}", level=os.environ.get("STREAMRL_LOG", "WARNING" if rank else "INFO").upper())
    try:
        return train(kind, words)
    except StreamrlError as error:
        log.error("%s", error)
        return 2 if isinstance(error, ValueError | TaskError) else 1


def train(kind: str, words: list[str]) -> int:
    """Set up, train, finish and clean up."""
    config = load_config(words, notify=log.info)
    from learner.ranks.stop_flag import StopFlag
    from learner.setup.device import agreed_run_dir, start_ranks
    from learner.supervised.run import build_run, check_start, open_records

    check_start(config, kind)
    stop = StopFlag(grace_s=2 * config.run.shutdown_s)
    ranks = start_ranks(config.run, config.learner)
    with ExitStack() as resources:
        resources.callback(ranks.close)
        records = open_records(config, kind)
        choose, numbered = partial(choose_run_dir, config), partial(numbered_run_dir, config)
        run_dir = agreed_run_dir(choose, numbered, config.run.dir, ranks)
        run = build_run(config, kind, records, run_dir, stop, ranks, resources)
        if ranks.rank == 0:
            note_start(run_dir, ["streamrl", kind, *words])
        try:
            completed = run.train()
            summary = run.finish(completed=completed)
        except Exception as error:
            run.close(failed=str(error))
            raise
    if completed and summary is not None:
        print("\n" + printable_lines(summary.table()), flush=True)
    if not completed and ranks.rank == 0:
        log.info("stopped at step %d; go on with:  streamrl resume %s", run.step, shlex.quote(name_or_path(run_dir)))
    return 0


if __name__ == "__main__":
    exit_at_once(main())
