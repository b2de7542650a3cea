"""The jobs of a sweep by the package submitit, on Slurm or as processes here that outlive the sweep.

    submitted.json    in a run's directory: its newest job, which a resumed sweep finds, so that it starts no second one
    interrupts        beside it: how often the sweep has interrupted the run; the job looks there
    slurm/            what submitit writes: scripts, output, results
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.config.schema import SweepConfig
from streamrl.config.schema_system import SweepLauncher
from streamrl.errors import ConfigError, StreamrlError, in_one_line, install_extra
from streamrl.gpus import VISIBLE, visible_gpus
from streamrl.launch import EXIT_INTERRUPTED
from streamrl.metrics.files import read_object, write_atomic
from streamrl.named_code import is_own, sign
from streamrl.processes import host_id, process_state
from streamrl.sweep.job import Job, JobRun
from streamrl.sweep.trial import INTERRUPTS, Trial

if TYPE_CHECKING:
    from submitit import AutoExecutor
    from submitit import Job as Submission

NOTE, FOLDER = "submitted.json", "slurm"
POLL_S = 1.0
LOOK_S = 5.0
"""Between two questions to Slurm, about all jobs at once."""
LATE_S = 15.0
"""A result may come to a shared file system so long after the end of its job."""
SHARED = ("timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node", "name",
          "stderr_to_stdout")
"""Parameters that submitit takes for every cluster; others bear the name of theirs in front."""
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
         "REVOKED", "TIMEOUT", "")
"""States of a job that does not run again; "" is that of one that Slurm knows no more."""


class Cluster:
    """A cluster that takes the jobs of one sweep.

    Args:
        name: of jobs, before the number of each.
    Raises:
        ConfigError: submitit or Slurm is not here, or a parameter is none.
    """

    def __init__(self, settings: SweepConfig, name: str) -> None:
        if settings.launcher is SweepLauncher.local:
            given = settings.launcher_options
            raise ConfigError(f"sweep.launcher_options={given} is of submitit: add hydra/launcher=submitit_slurm")
        if importlib.util.find_spec("submitit") is None:
            hint = install_extra("slurm")
            raise ConfigError(f"hydra/launcher={settings.launcher} needs submitit; install it with {hint}")
        self.kind = settings.launcher.removeprefix("submitit_")
        self._name = name
        self._options = {"timeout_min": 60, **({"signal_delay_s": 120} if self.kind == "slurm" else {}),
                         **settings.launcher_options}
        self.num_again = int(self._options.pop("max_num_timeout", 3))
        self._states: dict[str, str] = {}
        self._looked = float("-inf")
        with tempfile.TemporaryDirectory() as folder:
            self._executor(folder, 0)

    def start(self, job: Job, share: Mapping[str, str]) -> JobRun:
        """The run of a job: the one that an earlier sweep has submitted, if it goes on, or a new one."""
        gpus = visible_gpus(os.environ)
        if self.kind == "local" and gpus and "gpus_per_node" not in self._options:
            share = {VISIBLE: ",".join(gpus), **share}  # submitit would hide them all
        return SubmittedRun(job, share, self)

    def submit(self, trial: Trial) -> Submission:
        """Submit it. Raises StreamrlError: the cluster does not take it."""
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        # In a terminal Ctrl-C is for the sweep, which tells its jobs: those of this machine must not hear it.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if self.kind == "local" else None
        try:
            found = self._executor(trial.job.run_dir / FOLDER, trial.job.number).submit(trial)
        except (FailedJobError, FailedSubmissionError, OSError) as error:
            raise StreamrlError(f"{self.kind} did not take job {trial.job.number}: {in_one_line(error)}") from error
        finally:
            if before is not None:
                signal.signal(signal.SIGINT, before)
        self._states[found.job_id] = "PENDING"  # the last answer cannot have it
        return found

    def known(self, run_dir: Path) -> Submission | None:
        """The job that was submitted for a run by an earlier sweep, if it has not ended."""
        from submitit import LocalJob, SlurmJob

        # submitit unpickles a result: nothing that somebody else has put into the directory may be taken for one.
        note = read_object(run_dir / NOTE) if is_own(run_dir / NOTE) else {}
        if note.get("cluster") != self.kind or (self.kind == "local" and note.get("host") != host_id()):
            return None
        kind = SlurmJob if self.kind == "slurm" else LocalJob
        found = kind(folder=run_dir / FOLDER, job_id=str(note["id"]))
        return None if self.state(found.job_id, anew=True) in ENDED else found

    def state(self, number: str, *, anew: bool = False) -> str:
        """The state of a job in Slurm's words; "" if it is known no more."""
        if self.kind == "local":
            return "" if process_state(int(number)) in ("", "Z") else "RUNNING"
        if time.monotonic() > self._looked + (1 if anew else LOOK_S):
            # Not by sacct, as submitit does: not every cluster keeps accounts.
            done = subprocess.run(["squeue", "--noheader", f"--user={os.getuid()}", "--states=all", "--format=%i %T"],
                                  capture_output=True, text=True)
            self._looked = time.monotonic()
            if done.returncode:
                return self._states.get(number, "UNKNOWN")  # nobody answers: it may well go on
            self._states = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line.strip())
        return self._states.get(number, "").strip()

    def _executor(self, folder: str | Path, number: int) -> AutoExecutor:
        from submitit import AutoExecutor

        options = {"name": f"{self._name}-{number}", **self._options}
        for key in ("nodes", "tasks_per_node"):
            if options.get(key, 1) != 1:
                raise ConfigError(
                    f"hydra.launcher.{key}={options[key]}: a run of a sweep is one job on one node: leave it out, and "
                    "give its size as cpus_per_task and gpus_per_node"
                )
        own = {key if key in SHARED else f"{self.kind}_{key}": value for key, value in options.items()}
        python = {f"{self.kind}_python": f"{shlex.quote(sys.executable)} -P"}  # as `streamrl.parent_watch.program`
        try:
            found = AutoExecutor(folder, self.kind, **python, **{f"{self.kind}_max_num_timeout": self.num_again})
            found.update_parameters(**own)
        except (AssertionError, NameError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"submitit refuses sweep.launcher_options={self._options}: {in_one_line(error)}: set parameters that "
                "it has, and run this where Slurm's commands are"
            ) from error
        return found


class SubmittedRun(JobRun):
    """A run in a job of a cluster. One that is lost without a result, as with its node, is submitted again."""

    def __init__(self, job: Job, share: Mapping[str, str], cluster: Cluster) -> None:
        super().__init__(job)
        self._share, self._cluster, self._num_left = share, cluster, cluster.num_again
        self._num_interrupts, self._code, self._ended_at = 0, None, None
        self._submission = cluster.known(job.run_dir)
        if self._submission is not None:
            print(f"job {job.number} goes on as {self._name}", flush=True)
        elif self._submit():
            print(f"job {job.number} is submitted as {self._name}", flush=True)

    @property
    def _name(self) -> str:
        return f"{'Slurm job' if self._cluster.kind == 'slurm' else 'process'} {self._submission.job_id}"

    def _submit(self) -> bool:
        """Whether the cluster took it; a run whose job it does not take has failed, and others go on."""
        (self.job.run_dir / INTERRUPTS).unlink(missing_ok=True)
        for result in (self.job.run_dir / FOLDER).glob("*_result.pkl"):
            result.unlink()  # see `Cluster.known`
        try:
            self._submission = self._cluster.submit(Trial(self.job, dict(self._share)))
        except StreamrlError as error:
            self._code, self.reason = 1, str(error)
            return False
        note = {"cluster": self._cluster.kind, "id": self._submission.job_id, "host": host_id()}
        write_atomic(self.job.run_dir / NOTE, json.dumps(note) + "\n")
        sign(self.job.run_dir / NOTE)
        self._ended_at = None
        return True

    def poll(self) -> int | None:
        if self._code is not None:
            return self._code
        if self._submission.paths.result_pickle.exists():
            return self._ended(*self._result())
        state = self._cluster.state(self._submission.job_id)
        if state not in ENDED:
            self._ended_at = None
        elif self._ended_at is None:
            self._ended_at = time.monotonic()
        elif time.monotonic() > self._ended_at + LATE_S:
            return self._ended(None, f"{self._name} left no result{state and f' ({state})'}")
        return None

    def _result(self) -> tuple[int | None, str]:
        """The exit status of the run in a job that has ended, or why it has none."""
        if (error := self._submission.exception()) is None:
            return self._submission.result(), ""
        lines = [line for line in str(error).splitlines() if "Error: " in line] or [in_one_line(error)]
        return 1, f"{self._name}: {lines[-1]}"

    def _ended(self, code: int | None, reason: str) -> int | None:
        """Return the status; None once it is submitted again, because it was lost or stopped unasked."""
        lost = code is None or code == EXIT_INTERRUPTED
        if lost and self._num_interrupts:
            code = EXIT_INTERRUPTED
        elif lost and self._num_left > 0 and "CANCELLED" not in reason:
            self._num_left -= 1
            why = reason or f"{self._name} was stopped"
            if self._submit():
                print(f"job {self.job.number} goes on as {self._name}: {why}", flush=True)
            return self._code
        self._code, self.reason = 1 if code is None else code, reason
        return self._code

    def interrupt(self) -> None:
        if self.poll() is None:
            self._num_interrupts += 1
            write_atomic(self.job.run_dir / INTERRUPTS, f"{self._num_interrupts}\n")
            if self._cluster.state(self._submission.job_id, anew=True) == "PENDING":
                with suppress(OSError):
                    self._submission.cancel(check=False)
                self._code = EXIT_INTERRUPTED

    def close(self) -> None:
        while self.poll() is None:
            time.sleep(POLL_S)
