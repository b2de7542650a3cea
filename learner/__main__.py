"""python -m learner [key=value ...]    torchrun --nproc_per_node=N -m learner [key=value ...]

The only finite process of a run: owns the version number, the leases (in its hub) and the checkpoint.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from streamrl.config.load import load_config
from streamrl.config.schema import Config
from streamrl.errors import StreamrlError
from streamrl.run_dirs import choose_run_dir

log = logging.getLogger("streamrl.learner")


def main() -> int:
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(__doc__)
        print("Every setting: streamrl settings")
        return 0
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(
        level=os.environ.get("STREAMRL_LOG", "INFO" if rank == 0 else "WARNING").upper(),
        format=f"%(asctime)s learner{'' if rank == 0 else rank}  %(message)s", datefmt="%H:%M:%S",
    )
    try:
        config = load_config(words)
        run_dir = agreed_run_dir(config)
        run_dir.mkdir(parents=True, exist_ok=True)
        return learn(config, run_dir, words)
    except StreamrlError as error:
        log.error("%s", error)
        return 2 if isinstance(error, ValueError) else 1


def agreed_run_dir(config: Config) -> Path:
    """Ranks that start at the same moment must not count up to different numbers: torchrun needs the name."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and config.run.dir is None and not config.checkpoint.resume:
        config.run.dir = str(Path(config.run.root) / f"{config.run.name}-{os.environ['TORCHELASTIC_RUN_ID'][:8]}")
    if int(os.environ.get("RANK", "0")) > 0 and config.run.dir is not None:
        return Path(config.run.dir)
    return choose_run_dir(config)


def learn(config: Config, run_dir: Path, words: list[str]) -> int:
    """Set up, train, leave everything in order."""
    from learner.finish import finish
    from learner.loop import train
    from learner.setup import build_run, tear_down
    from learner.stop_flag import StopFlag

    stop = StopFlag(patience_s=2 * config.run.shutdown_s)
    run = build_run(config, run_dir, stop)
    try:
        completed = train(run)
        finish(run, completed=completed)
    finally:
        tear_down(run)
    if not completed and run.ranks.rank == 0:
        kept = " ".join(word for word in words if not word.startswith(("run.dir=", "checkpoint.resume=")))
        log.info("stopped at version %d; go on with:  python -m learner %s run.dir=%s checkpoint.resume=true",
                 run.version, kept, run_dir)
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # idle library threads must not hold a finished process up
