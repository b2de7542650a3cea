"""`streamrl slurm`: one run as two Slurm jobs, a learner and an array of actors, which meet by its directory.

The learner's node writes its address to `hub.json` of the run directory, on the file system that the nodes share. Each
task of the array waits for it and joins; when the learner is requeued on another node, its actors find the new address.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from streamrl.config.load import load_config, to_plain
from streamrl.errors import ConfigError, StreamrlError
from streamrl.named_code import words_for_actors
from streamrl.parent_watch import program
from streamrl.run_dirs import choose_run_dir, note_start
from streamrl.transport.keys import KeyDirectory

KEY = "slurm"
"""Name of the key that the actors of such runs share."""
WARN_S = 120
"""Seconds before the end of its time at which a job is told to stop: time for a checkpoint."""


@dataclass(frozen=True)
class Jobs:
    """The two scripts of a run.

    Args:
        words: settings of the run.
        learner_options, actor_options: options for sbatch, e.g. "--gres=gpu:1 --time=8:00:00".
        setup: shell lines before the command of each job, such as the activation of an environment.
        allowed: words that let the actors use the code that the settings name.
    """

    name: str
    run_dir: Path
    keys: Path
    words: tuple[str, ...]
    num_actors: int
    num_ranks: int = 1
    learner_options: str = ""
    actor_options: str = ""
    setup: str = ""
    allowed: tuple[str, ...] = ()

    def learner(self) -> str:
        """A learner that saves and stops when its time is over, and goes on where it was when it is started again."""
        torchrun = [
            *program("torch.distributed.run"), f"--nproc_per_node={self.num_ranks}", "--standalone", "--no-python",
        ] if self.num_ranks > 1 else []
        command = shlex.join([
            *torchrun, *program("learner"), *self.words, f"run.dir={self.run_dir}", "hub.bind=tcp://0.0.0.0:0",
            f"hub.keys={self.keys}",
        ])
        note = shlex.quote(str(self.run_dir / "EPOCH"))
        return self._script("learner", self.learner_options, f"--signal=B:USR1@{WARN_S} --requeue", f"""\
resume=false
[ -e {note} ] && resume=true  # it was requeued
{command} \\
  hub.advertise="${{SLURMD_NODENAME:-$(hostname)}}" checkpoint.resume=$resume &
wait_for_it
exit $code
""")

    def actors(self) -> str:
        """Tasks that join, and join again wherever the learner is next, until it says that the run is over."""
        command = shlex.join([
            *program("streamrl.cli"), "join", str(self.run_dir), f"key={self.keys / 'actors' / KEY}.key",
            "actors.give_up_after_s=60", *self.allowed,
        ])
        array = f"--array=0-{self.num_actors - 1} --signal=B:USR1@30 --requeue"
        return self._script("actor", self.actor_options, array, f"""\
while :; do
  {command} &
  wait_for_it
  case $code in 0|2|3|4|5|130|143) exit $code ;; esac  # finished, or nothing that a new start would fix
  sleep 5
done
""", number="_%a")

    def _script(self, what: str, options: str, always: str, body: str, number: str = "") -> str:
        log = self.run_dir / "logs" / f"{what}{number}-slurm.log"
        wanted = [f"--job-name={self.name}-{what}", f"--output={log}", "--open-mode=append", *always.split(),
                  *shlex.split(options)]
        lines = "\n".join(f"#SBATCH {shlex.quote(one) if ' ' in one else one}" for one in wanted)
        return f"""#!/bin/bash
{lines}
cd {shlex.quote(str(Path.cwd()))}
{self.setup + chr(10) if self.setup else ""}\
# USR1 comes before the time is over: the process saves its work, and the job is put into the queue again.
wait_for_it() {{
  child=$!
  trap 'kill -TERM $child' TERM
  trap 'kill -TERM $child; again=yes' USR1
  wait $child; code=$?
  while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
  if [ "${{again:-}}" ]; then scontrol requeue "$SLURM_JOB_ID"; exit; fi
}}
{body}"""

    def write(self) -> tuple[Path, Path]:
        """Both scripts, in the run directory."""
        folder = self.run_dir / "slurm"
        for one in (folder, self.run_dir / "logs"):
            one.mkdir(parents=True, exist_ok=True)
        paths = folder / "learner.sbatch", folder / "actors.sbatch"
        for path, text in zip(paths, (self.learner(), self.actors()), strict=True):
            path.write_text(text)
        return paths


def slurm(words: list[str]) -> int:
    """The command: writes the jobs, and submits them if asked to. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        prog="streamrl slurm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--submit", action="store_true", help="submit both jobs; without it they are only written")
    parser.add_argument("--actors", type=int, help="tasks in the array of actors (launch.num_actors)")
    parser.add_argument("--keys", default="keys", help="directory of keys, made if it is not there (keys)")
    parser.add_argument("--learner-options", default="", help="options of sbatch for the learner, in one word")
    parser.add_argument("--actor-options", default="", help="options of sbatch for each actor, in one word")
    parser.add_argument("--setup", default="", help="a shell command before each start, e.g. 'source env/bin/activate'")
    parser.add_argument("settings", nargs="*", default=[], metavar="key=value", help="settings of the run")
    chosen = parser.parse_intermixed_args(words)
    jobs = _jobs(chosen)
    learner, actors = jobs.write()
    note_start(jobs.run_dir, ["streamrl", "slurm", *words])
    if not chosen.submit:
        print(f"Written. Submit with:\n  sbatch {learner}\n  sbatch {actors}")
        return 0
    number = _sbatch(learner)
    _sbatch(actors, f"--dependency=after:{number}")
    print(f"Submitted. Watch it with:\n  squeue --name={jobs.name}-learner,{jobs.name}-actor\n  tail -f "
          f"{jobs.run_dir}/logs/learner-slurm.log")
    return 0


def _jobs(chosen: argparse.Namespace) -> Jobs:
    taken = [word for word in chosen.settings if word.startswith(("hub.bind=", "hub.advertise=", "hub.keys="))]
    if taken:
        raise ConfigError(
            f"{' '.join(taken)}: streamrl slurm sets these itself: leave them out, and give keys as --keys=DIRECTORY"
        )
    config = load_config(chosen.settings)
    num_actors = config.launch.num_actors if chosen.actors is None else chosen.actors
    if num_actors < 1:
        raise ConfigError(f"{num_actors} actors cannot generate anything: give --actors N, at least 1")
    keys = Path(chosen.keys).resolve()
    directory = KeyDirectory(keys) if (keys / "hub.key").exists() else KeyDirectory.create(keys)
    if not (keys / "actors" / f"{KEY}.key").exists():
        directory.add(KEY)
    return Jobs(
        config.run.name, choose_run_dir(config).resolve(), keys,
        tuple(word for word in chosen.settings if not word.startswith(("run.dir=", "checkpoint.resume="))), num_actors,
        config.launch.num_learner_ranks, chosen.learner_options, chosen.actor_options, chosen.setup,
        tuple(words_for_actors(to_plain(config))),
    )


def _sbatch(script: Path, *options: str) -> str:
    """The number of the submitted job."""
    if shutil.which("sbatch") is None:
        raise ConfigError(f"sbatch is not installed here: run `sbatch {script}` on a machine that submits to Slurm")
    command: Sequence[str] = ["sbatch", "--parsable", *options, str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise StreamrlError(f"Slurm did not take {script}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip().partition(";")[0]
