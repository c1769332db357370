"""A Slurm of one node, with its own munge, ports and folders: real commands, nothing outside a temporary folder."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from megatron.bdlm.testing.training_run import REPOSITORY, free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller}
SlurmdPort={daemon}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
MpiDefault=none
ReturnToService=2
JobRequeue=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why no cluster can be started here, None if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"Slurm is not installed (no {', '.join(missing)}): apt-get install slurm-wlm munge"
    if os.geteuid():
        return "slurmd needs root"
    return None


class Cluster:
    """The daemons, started; leaving the `with` block ends them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._daemons: list[subprocess.Popen] = []
        host = socket.gethostname().split(".")[0]
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        self.configuration = folder / "slurm.conf"
        self.configuration.write_text(
            CONFIGURATION.format(host=host, folder=folder, controller=free_port(), daemon=free_port(), cpus=os.cpu_count())
        )
        self.environment = {**os.environ, "SLURM_CONF": str(self.configuration)}

    def __enter__(self) -> "Cluster":
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._start("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files)
        self.wait(lambda: (self.folder / "munge.socket").exists(), 20, "munged has no socket")
        self._start("slurmctld", "-D", "-c", "-f", str(self.configuration))
        self._start("slurmd", "-D", "-c", "-f", str(self.configuration))
        self.wait(lambda: "State=IDLE" in self.command("scontrol", "show", "node", check=False), 60, "the node is not idle")
        return self

    def __exit__(self, *_: object) -> None:
        self.command("scancel", "--user=root", check=False)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start(self, program: str, *words: str) -> None:
        log = open(self.folder / f"{program}.output", "w")
        path = shutil.which(program)
        self._daemons.append(subprocess.Popen([path, *words], env=self.environment, stdout=log, stderr=subprocess.STDOUT))

    def command(self, *words: str, check: bool = True, **extra: str) -> str:
        """Output of a Slurm command."""
        done = subprocess.run(words, env={**self.environment, **extra}, cwd=REPOSITORY, capture_output=True, text=True)
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Fields of `scontrol show job`."""
        words = self.command("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, holds, seconds: float, otherwise: str) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            logs = "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in self.folder.glob("*.log"))
            assert time.monotonic() < deadline, f"{otherwise}\n{logs}"
            time.sleep(0.3)
