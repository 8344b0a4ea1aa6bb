"""A SLURM of two virtual nodes on one machine, in a folder of its own: started, asked and stopped by the tests."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=8
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=5,bf_interval=5
KillWait=10
InactiveLimit=0
GresTypes=gpu
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{second}] CPUs=4 RealMemory=2000 Gres=gpu:2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there can be no SLURM here: a tool that is not installed, or no right to start daemons; None where it can."""
    absent = [tool for tool in DAEMONS if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: apt-get install slurmctld slurmd slurm-client munge)"
    return None if os.geteuid() == 0 else "SLURM's daemons need root"


class OneMachineSlurm:
    """Use as a context manager. `environment` is that of every client call; its SLURM_CONF points here alone."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, []
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        self.environment = kept | {"SLURM_CONF": str(folder / "slurm.conf"), "MASTER_ADDR": "127.0.0.1",
                                   "PATH": f"{os.environ['PATH']}:/usr/sbin"}

    def __enter__(self) -> "OneMachineSlurm":
        for name in ("munge", "state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge/key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        (self.folder / "munge").chmod(0o755)
        ports, held = [], [socket.socket() for _ in range(3)]
        for probe in held:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
        for probe in held:
            probe.close()
        host = socket.gethostname().split(".")[0]
        first, second = _two_in_a_row()
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(
            host=host, port=ports[0], folder=self.folder, first=first, second=second, user="root"))
        cards = [self.folder / f"card{i}" for i in range(2)]
        for card in cards:
            card.touch()
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File={card}\n" for card in cards))
        try:
            # Munge asks for folders that nobody else can write to; pytest's lie in /tmp, so it is told to go ahead.
            munge = self.folder / "munge"
            self._start("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}/socket",
                        f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed")
            self._wait(lambda: (self.folder / "munge/socket").exists(), "munged's socket")
            self._start("slurmctld", "-D", "-c", "-f", str(self.folder / "slurm.conf"))
            for node in ("n1", "n2"):
                self._start("slurmd", "-D", "-N", node, "-f", str(self.folder / "slurm.conf"))
            idle = ("sinfo", "-h", "-N", "-o", "%t")
            self._wait(lambda: self.run(*idle, check=False).split() == ["idle", "idle"], "two idle nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.run("scancel", "--full", "-u", "root", check=False)
        time.sleep(1)
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def run(self, *command: str, check: bool = True, **environment: str) -> str:
        """Output of a client, such as `scontrol show job 1`."""
        done = subprocess.run(command, env=self.environment | environment, text=True, capture_output=True, timeout=60)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, ..."""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        words = self.run("scontrol", "show", "job", job).split()
        return next(word.split("=", 1)[1] for word in words if word.startswith(f"{name}="))

    def follow(self, job: str, done, seconds: float) -> None:
        """Waits until `done(state)`. SLURM holds a requeued job back for `cred_expire`, two minutes where not set."""
        end = time.monotonic() + seconds
        while not done(state := self.state(job)):
            assert time.monotonic() < end, f"job {job} is {state} after {seconds} s"
            time.sleep(0.5)

    def _start(self, *command: str) -> None:
        log = open(self.folder / f"daemon-{len(self.processes)}.log", "w")
        self.processes.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=subprocess.STDOUT))

    def _wait(self, met, what: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not met():
            logs = "".join(path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log"))
            assert time.monotonic() < end, f"no {what} after {seconds} s:\n{logs}"
            time.sleep(0.2)


def _two_in_a_row() -> tuple[int, int]:
    # slurm.conf wants a range of ports.
    for port in range(16821, 26821, 2):
        try:
            for number in (port, port + 1):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
            return port, port + 1
        except OSError:
            continue
    raise OSError("no two free ports in a row")
