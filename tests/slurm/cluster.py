"""A Slurm cluster of one node, this machine: real slurmctld and slurmd, with a directory and ports of their own."""

import os
import shutil
import socket
import subprocess
from pathlib import Path

from tests.flow.processes import free_port, wait_until

DAEMONS = ("slurmctld", "slurmd")


def missing() -> str:
    """Why there can be no cluster here; "" if there can."""
    if os.geteuid():
        return "slurmd runs as root only"
    absent = [name for name in (*DAEMONS, "sbatch") if shutil.which(name) is None]
    return f"there is no {', '.join(absent)} here: apt-get install slurmctld slurmd slurm-client" if absent else ""


class Cluster:
    """Up once it is made. `environment` is for sbatch and the other commands."""

    def __init__(self, path: Path) -> None:
        host = socket.gethostname().partition(".")[0]
        for folder in ("state", "spool"):
            (path / folder).mkdir(parents=True)
        conf = path / "slurm.conf"
        conf.write_text(f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={path}/state
SlurmdSpoolDir={path}/spool
SlurmctldPidFile={path}/slurmctld.pid
SlurmdPidFile={path}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
NodeName={host} NodeAddr=127.0.0.1 CPUs=8
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
""")
        (path / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self.environment = {**os.environ, "SLURM_CONF": str(conf)}
        self._path, self._processes = path, []
        for name, more in (("slurmctld", []), ("slurmd", ["-N", host])):
            with (path / f"{name}.log").open("wb") as log:
                self._processes.append(subprocess.Popen(
                    [name, "-D", "-f", str(conf), *more], env=self.environment, stdout=log, stderr=subprocess.STDOUT,
                ))
        wait_until(lambda: "idle" in self.command("sinfo", "-h", "-o", "%T"), 60, "an idle node", self.logs)

    def command(self, *words: str) -> str:
        """Output of a Slurm command."""
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60).stdout

    def jobs(self) -> list[str]:
        """Name and state of every job that has not ended."""
        return self.command("squeue", "-h", "-r", "-o", "%j %T").splitlines()

    def logs(self) -> str:
        return "\n".join(f"--- {one}\n{one.read_text(errors='replace')[-3000:]}" for one in self._path.glob("*.log"))

    def close(self) -> None:
        self.command("scancel", "--user=root")
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
