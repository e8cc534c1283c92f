"""A SLURM cluster of several nodes on this machine: Debian's `slurm-wlm` and `munge`, in a folder
of its own.

A node is a `slurmd` with a host name, mounts and process numbers of its own, so that a node can be
lost as by a power
cut: its first process is killed, and the kernel kills all others of the node at the same moment.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import pytest

from tests.processes import ROOT
from tests.train_runs import free_port

PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "scancel",
    "sinfo",
    "unshare",
    "setpriv",
)
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
CONFIG = """
ClusterName=jmoe
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ReturnToService=2
SlurmdTimeout=10
KillWait=60
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,requeue_delay=1
{gres}
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def why_not() -> str | None:
    """Return why there can be no cluster here, or None."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)}: not installed (apt-get install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "nodes with host names of their own need root"
    return None


class SlurmCluster:
    """Nodes n0, n1, …, each with `cpus` CPUs and `gpus` counted GPUs, which do nothing, in a
    `with` statement.
    """

    def __init__(self, folder: Path, num_nodes: int = 2, *, cpus: int = 2, gpus: int = 0) -> None:
        self.folder, self.nodes = folder, [f"n{index}" for index in range(num_nodes)]
        self._cpus, self._gpus = cpus, gpus
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        for name in ("state", *self.nodes):
            (self.folder / name).mkdir(parents=True)
        host = os.uname().nodename
        has = f"CPUs={self._cpus} State=UNKNOWN" + (f" Gres=gpu:{self._gpus}" if self._gpus else "")
        nodes = "\n".join(
            f"NodeName={name} NodeAddr=127.0.0.1 Port={free_port()} {has}" for name in self.nodes
        )
        gres = "GresTypes=gpu" if self._gpus else ""
        config = CONFIG.format(
            host=host, port=free_port(), folder=self.folder, gres=gres, nodes=nodes
        )
        if self._gpus:
            for index in range(self._gpus):
                (self.folder / f"gpu{index}").symlink_to("/dev/null")
            (self.folder / "gres.conf").write_text(
                f"Name=gpu File={self.folder}/gpu[0-{self._gpus - 1}]\n"
            )
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost {host} {' '.join(self.nodes)}\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self.start_munge()
        self.start_daemon("slurmctld", "slurmctld", "-D")
        for name in self.nodes:
            self.start_node(name)
        self.wait_until(lambda: self.states() == dict.fromkeys(self.nodes, "IDLE"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            for log in sorted(self.folder.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        for name in [
            *self.nodes,
            *reversed([name for name in self._daemons if name not in self.nodes]),
        ]:
            self.kill(name)

    def start_daemon(self, name: str, *command: str) -> None:
        """Start a program that runs until `kill(name)`."""
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                [*DIE_WITH_PARENT, *command],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def start_munge(self, name: str = "munge", *prefix: str) -> None:
        """Start `munged` with the cluster's key, `{name}.socket` in its folder; prefix: words
        before the command.
        """
        socket = self.folder / f"{name}.socket"
        socket.unlink(missing_ok=True)
        files = [f"--{kind}-file={self.folder}/{name}.{kind}" for kind in ("log", "pid", "seed")]
        options = (
            "--foreground",
            "--force",
            f"--socket={socket}",
            f"--key-file={self.folder}/munge.key",
            *files,
        )
        self.start_daemon(f"{name}d", *prefix, "munged", *options)
        self.wait_until(socket.exists)

    def start_node(self, name: str) -> None:
        """Start a node, anew where it was killed."""
        slurmd = f"while :; do test -e {self.folder}/{name}.down || slurmd -D; sleep 0.5; done"
        inside = f"hostname {name}; mount --bind {self.folder}/hosts /etc/hosts; {slurmd}"
        apart = ("unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")
        self.start_daemon(name, *apart, "sh", "-c", inside)

    def kill(self, name: str) -> None:
        """SIGKILL a daemon, or a node with every process on it."""
        daemon = self._daemons.pop(name, None)
        if daemon is not None:
            daemon.kill()
            daemon.wait(60)

    def kill_slurmd(self, name: str) -> None:
        """SIGKILL a node's `slurmd` alone: the job's processes stay. It comes back with
        `return_slurmd`.
        """
        (self.folder / f"{name}.down").touch()
        shell = _children(self._daemons[name].pid)[0]
        [slurmd] = [
            child
            for child in _children(shell)
            if Path(f"/proc/{child}/comm").read_text() == "slurmd\n"
        ]
        os.kill(slurmd, signal.SIGKILL)

    def return_slurmd(self, name: str) -> None:
        (self.folder / f"{name}.down").unlink()

    def run(
        self, *command: str, changes: Mapping[str, str | None] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of SLURM to its end, whatever that is; changes: to the environment."""
        changed = self._environment | dict(changes or {})
        environment = {name: value for name, value in changed.items() if value is not None}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    def call(self, *command: str, changes: Mapping[str, str | None] | None = None) -> str:
        """Return what a command of SLURM prints, which must succeed; changes: to the
        environment.
        """
        done = self.run(*command, changes=changes)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def states(self) -> dict[str, str]:
        """Return each node's state."""
        lines = self.call("sinfo", "--Node", "--noheader", "--format=%N %T").split("\n")
        return {
            name: state.rstrip("*").upper()
            for name, state in (line.split() for line in lines if line)
        }

    def submit(self, log: Path, *arguments: str, changes: Mapping[str, str | None]) -> int:
        """Submit a batch job (arguments: of sbatch, the script, and its own) and return its
        number.
        """
        where = (f"--chdir={ROOT}", f"--output={log}")
        return int(self.call("sbatch", "--parsable", *where, *arguments, changes=changes))

    def job(self, number: int) -> dict[str, str]:
        """Return what `scontrol show job` says."""
        words = self.call("scontrol", "show", "job", str(number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_until(
        self, ready: Callable[[], object], timeout_s: float = 300, log: Path | None = None
    ) -> None:
        """Wait for `ready()`, or fail with the end of `log`."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() > deadline:
                pytest.fail(
                    f"nothing in {timeout_s}"
                    f" s\n{log.read_text()[-6000:] if log and log.exists() else ''}"
                )
            time.sleep(0.1)

    def end(self, number: int, log: Path, timeout_s: float = 900) -> str:
        """Wait for a job's end, `timeout_s` at most, and return its last state."""

        def ended() -> bool:
            job = self.job(number)
            # two minutes after a requeue
            waits = job["JobState"] == "PENDING" and job["Reason"] == "BeginTime"
            if waits and set(self.states().values()) == {"IDLE"}:
                time.sleep(5)  # sooner, a node takes it for the start that was killed
                self.call("scontrol", "update", f"JobId={number}", "StartTime=now")
            return job["JobState"] in ENDED

        self.wait_until(ended, timeout_s, log)
        return self.job(number)["JobState"]


def _children(process: int) -> list[int]:
    return [
        int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()
    ]
