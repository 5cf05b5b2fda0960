"""Slurm on this machine: one controller and two nodes, n1 and n2, of four CPUs, all in one folder.

    with Cluster(folder) as slurm:
        job = slurm.sbatch("examples/slurm/train.sbatch", "ck", *FLAGS, nodes=2)
        job.wait()

Slurm's own daemons, as root and with a key and a socket of their own: nothing is read from /etc or written outside the
folder, and no process is left, whatever happens in the block or to pytest (`leftovers.py`). Nodes are ended by their
process ids (`lose_node`), jobs by Slurm. Partitions: low, and high, whose jobs put those of low back into the queue.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.harness.launch import ROOT, descendants
from tests.slurm import leftovers

NODES = ("n1", "n2")
PACKAGES = ("slurm-wlm", "munge")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "runuser")
OURS = "TESTS_OF_SLURM"  # a variable of every process below a cluster; its value is the folder
PATIENCE_S = 600.0  # other work may have the machine
POLL_S = 0.1

CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
# A requeued job is held for as long as a credential lives: two minutes unless said otherwise.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
SlurmctldPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
EnforcePartLimits=ALL
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmdTimeout=10
KillWait=15
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=8000
PartitionName=low Nodes=n[1-2] Default=YES PriorityTier=1 GraceTime=30 State=UP
PartitionName=high Nodes=n[1-2] MaxTime=60 PriorityTier=10 PreemptMode=OFF State=UP
"""


def ready() -> str | None:
    """Why there can be no cluster here; None where there can. Installs the packages where that is this user's to do."""
    if os.getuid() != 0:
        return "Slurm's daemons run as root here, and this user is not"
    if missing() and shutil.which("apt-get"):
        quiet: Any = {"capture_output": True, "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
        subprocess.run(["apt-get", "update"], check=False, **quiet)
        install = ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]
        subprocess.run(install, check=False, **quiet)
    return (
        f"not on this machine: {', '.join(missing())} (packages {' '.join(PACKAGES)})" if missing() else None
    )


def missing() -> list[str]:
    """Programs that a cluster needs and this machine lacks."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


def unavailable(why: str) -> NoReturn:
    """Skips the test; as root in CI, where everything has to run, it fails."""
    if os.environ.get("CI") and os.getuid() == 0:
        pytest.fail(why)
    pytest.skip(why)


class Cluster:
    """A controller, munged and two nodes while entered. folder: of everything, which user munge can reach. env: what
    Slurm's commands and what they start are given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        others = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        # `megatron-zero` and `python` are those that run the tests.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        conf = str(self.folder / "slurm.conf")
        self.env = {**others, "PATH": path, "SLURM_CONF": conf, OURS: str(self.folder)}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        # Its standard input ends with this process.
        watcher = [sys.executable, leftovers.__file__, f"{OURS}={self.folder}"]
        self._watcher = subprocess.Popen(watcher, stdin=subprocess.PIPE, start_new_session=True)
        try:
            self._begin()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def _begin(self) -> None:
        munge = self.folder / "munge"
        for folder in (munge, self.folder / "state", *(self.folder / f"spool_{node}" for node in NODES)):
            folder.mkdir()
        control, first, last = _free_ports()
        facts = {"folder": self.folder, "host": socket.gethostname()}
        conf = CONF.format(**facts, port=control, first=first, last=last)
        (self.folder / "slurm.conf").write_text(conf)
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        for path in (munge, munge / "key"):
            shutil.chown(path, "munge", "munge")
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        as_munge = ("runuser", "-u", "munge", "--", "munged", "--foreground")
        self._start("munged", *as_munge, f"--socket={munge / 'socket'}", *files)
        self.until((munge / "socket").exists, "munge has a socket")
        self._start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        self.until(self.is_idle, "both nodes are idle")

    def _start(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            self._daemons[name] = subprocess.Popen(
                words, env=self.env, start_new_session=True, cwd=self.folder, **streams
            )

    def start_node(self, node: str) -> None:
        """The daemon of a node, also after `lose_node`."""
        self._start(node, "slurmd", "-D", "-N", node)

    def lose_node(self, node: str) -> None:
        """kill -9 of the node's daemon: what runs there goes on, and Slurm hears no more of it."""
        self._daemons[node].kill()
        self._daemons.pop(node).wait()

    def _end(self) -> None:
        with contextlib.suppress(AssertionError, subprocess.SubprocessError):  # the rest ends what is left
            if "slurmctld" in self._daemons and self.commands("squeue", "-h", check=False):
                self.commands("scancel", "--user=root", check=False)
                self.until(lambda: not self.commands("squeue", "-h"), "no job is left")
        for name in ("n1", "n2", "slurmctld", "munged"):
            if daemon := self._daemons.pop(name, None):
                daemon.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(10)
        self._watcher.communicate()

    # --- what is there

    def commands(self, *words: object, check: bool = True, **options: Any) -> str:
        """What one of Slurm's commands prints, errors too."""
        streams: Any = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
            "timeout": PATIENCE_S,
        }
        done = subprocess.run([*map(str, words)], check=False, **{"env": self.env, **streams, **options})
        assert not check or done.returncode == 0, f"{words}: status {done.returncode}\n{done.stdout}"
        return done.stdout.strip()

    def is_idle(self) -> bool:
        """Whether both nodes wait for work."""
        states = self.commands("sinfo", "-h", "-N", "-p", "low", "-o", "%t", check=False)
        return states.split() == ["idle", "idle"]

    def processes(self, **variables: object) -> list[int]:
        """Processes below this cluster, daemons too, whose environment has these variables."""
        return leftovers.processes(
            f"{name}={value}" for name, value in {OURS: self.folder, **variables}.items()
        )

    def until(self, holds: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
        """The first true answer; fails with what the daemons have said."""
        deadline = time.monotonic() + timeout_s
        while not (found := holds()):
            assert time.monotonic() < deadline, f"not after {timeout_s} s: {what}\n{self.said()}"
            time.sleep(POLL_S)
        return found

    def said(self) -> str:
        """The last lines of each daemon, and the queue."""
        logs = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        tails = [f"{log.name}:\n{log.read_text(errors='replace')[-1500:]}" for log in logs]
        return "\n".join([*tails, self.commands("squeue", check=False), self.commands("sinfo", check=False)])

    def sbatch(self, script: Path | str, *words: object, **how: Any) -> Job:
        """Submit a script of the checkout with its words. how: as `submit`."""
        return self.submit(ROOT / script, *words, **how)

    def submit(self, *words: object, cwd: Path, **how: Any) -> Job:
        """sbatch with these last words. how: env, more variables; else its flags, _ for -, None: without a value."""
        variables = {**self.env, **how.pop("env", {})}
        flags = [
            f"--{name.replace('_', '-')}" + ("" if value is None else f"={value}")
            for name, value in how.items()
        ]
        command = ["sbatch", "--parsable", f"--output={self.folder}/%x-%j.log", *flags]
        said = self.commands(*command, *words, cwd=cwd, env=variables)
        return Job(self, said.partition(";")[0])


class Job:
    """A job of a cluster, by its id."""

    ENDED = (
        "COMPLETED",
        "FAILED",
        "CANCELLED",
        "TIMEOUT",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "BOOT_FAIL",
        "DEADLINE",
    )

    def __init__(self, cluster: Cluster, job_id: object) -> None:
        self.cluster, self.id = cluster, str(job_id)

    @property
    def shown(self) -> dict[str, str]:
        """What `scontrol show job` says: of it Comment, ExitCode, JobState, Restarts, StdOut."""
        text = self.cluster.commands("scontrol", "show", "job", self.id)
        fields = re.findall(r"^ +(Comment)=(.*)$|(?:^| )([A-Z]\w+)=(\S*)", text, re.MULTILINE)
        return {a or b: (c or d).strip() for a, c, b, d in fields}

    @property
    def log(self) -> str:
        """All that the job has said, in all attempts."""
        path = Path(self.shown["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def ran_s(self) -> int:
        """For how long this attempt has run."""
        hours, minutes, seconds = map(int, self.shown["RunTime"].split(":"))
        return hours * 3600 + minutes * 60 + seconds

    def wait_for(self, pattern: str, timeout_s: float = PATIENCE_S) -> re.Match[str]:
        """Wait until the log has a match."""

        def found() -> re.Match[str] | None:
            state, match = self.shown["JobState"], re.search(pattern, self.log)
            assert match or state not in self.ENDED, f"{state} without {pattern!r}:\n{self.log}"
            return match

        return self.until(found, pattern, timeout_s)

    def wait(self, state: str = "COMPLETED", timeout_s: float = PATIENCE_S) -> dict[str, str]:
        """Wait for its end, which has to be this one; what is shown then."""
        self.until(lambda: self.shown["JobState"] in self.ENDED, f"the end of job {self.id}", timeout_s)
        shown = self.shown
        assert shown["JobState"] == state, f"{shown}\n{self.log}"
        self.until(self.cluster.is_idle, "both nodes are idle again", timeout_s)
        return shown

    def until(self, holds: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
        """As the cluster's, with the job's log."""
        try:
            return self.cluster.until(holds, what, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None

    def launcher(self, node: str) -> int:
        """The process id of `megatron-zero launch` on a node."""
        pids = self.cluster.processes(SLURM_JOB_ID=self.id, SLURMD_NODENAME=node)
        launchers = [pid for pid in pids if "launch" in _words(pid) and "python" in _words(pid)[0]]
        (outer,) = [pid for pid in launchers if _parent(pid) not in launchers]
        return outer

    def ranks(self, node: str) -> list[int]:
        """Process ids of a node's ranks, the first one first."""
        launcher = self.launcher(node)
        return sorted(pid for pid in descendants(launcher) if _parent(pid) == launcher)


def _words(pid: int) -> list[str]:
    """Of a process's command line; [""] of one that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return [""]


def _parent(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _free_ports() -> tuple[int, int, int]:
    """One for the controller and two behind it, for the nodes; below those that systems give to whoever asks."""
    while True:
        first = random.randrange(12000, 32000)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + 3):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first, first + 1, first + 2
