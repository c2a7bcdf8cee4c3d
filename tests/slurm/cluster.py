"""Runs a real Slurm on this machine for tests: slurmctld, and one slurmd per node.

`Cluster` starts this file in new Linux namespaces for mounts, network and processes. So it uses no
ports of the machine, does not change its /etc/hosts, and leaves no processes behind.

Every node is a slurmd with its own host name and address. It claims to have 96 cores and 8 GPUs
(device files that behave like /dev/null), and runs on the cores of this machine. Starting takes a
second. `stop` ends all daemons and jobs, and so does the end of the process that started them.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "unshare", "nsenter", "ip")
INSTALL = "apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge iproute2"
START_S = 60.0
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")
ADDRESS = "192.0.2.1"
"""An address, reserved for documentation, that is added to the loopback interface.

Slurm cannot resolve host names if there are only addresses in 127.0.0.0/8.
"""

SLURM_CONF = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
# How soon a requeued job may start again.
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{controller}
EnforcePartLimits=ALL
ReturnToService=2
# Ranks on a busy machine have time to save and end.
KillWait=120
# A test that asks late still finds its job.
MinJobAge=3600
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""
NODE = (
    "NodeName=n{i} NodeAddr=127.0.1.{i} Port={port} Sockets=2 CoresPerSocket=48 ThreadsPerCore=1 "
    "RealMemory=1900000 Gres=gpu:h100:8 State=UNKNOWN"
)


def missing() -> str:
    """Returns why Slurm cannot be started on this machine, or "" if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"needs {', '.join(absent)}: {INSTALL}"
    if os.geteuid() != 0:
        return "needs root: a Slurm of its own is started in namespaces"
    tried = subprocess.run(["unshare", "-mnpf", "true"], capture_output=True, text=True)
    return f"needs namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(slots=True, kw_only=True)
class Cluster:
    """A Slurm cluster that runs inside a `with` block."""

    folder: Path  # folder of its configuration, state and logs
    num_nodes: int
    # Whether Slurm, before it preempts a job, sends the signal that the job requested by --signal
    # (preempt_send_user_signal). If not, the ranks get SIGTERM.
    user_signal: bool = True
    _holder: "subprocess.Popen[bytes] | None" = field(default=None, init=False)
    _pid: int = field(default=0, init=False)

    def __enter__(self) -> "Cluster":
        said = self.folder / "start.log"
        command = ["unshare", "-mnpf", "--kill-child", "--mount-proc", "--propagation", "private"]
        inside = [sys.executable, __file__, str(self.folder), str(self.num_nodes)]
        with said.open("wb") as log:
            self._holder = subprocess.Popen(
                [*command, *inside, *(["user_signal"] if self.user_signal else [])],
                stdout=log,
                stderr=log,
                stdin=subprocess.PIPE,
            )
        until = time.monotonic() + START_S
        ready = self.folder / "ready"
        while not ready.exists():
            if self._holder.poll() is not None or time.monotonic() > until:
                self.stop()
                raise RuntimeError(f"Slurm did not start; {said}:\n{said.read_text()}")
            time.sleep(0.05)
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        self._pid = int(children.read_text())
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._holder is not None:
            self._holder.kill()  # --kill-child takes the namespaces' processes with it
            self._holder.communicate()

    def run(
        self,
        *words: str,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> "subprocess.CompletedProcess[str]":
        """Runs a command inside the namespaces and returns its two outputs as one text."""
        enter = ["nsenter", "-t", str(self._pid), "-m", "-n", "-p", f"--wd={cwd or Path.cwd()}"]
        done = subprocess.run(
            [*enter, *words],
            env={**os.environ, **(environment or {}), "SLURM_CONF": f"{self.folder}/slurm.conf"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}")
        return done

    def submit(self, *words: str, cwd: Path, environment: Mapping[str, str] | None = None) -> int:
        """Submits a job by `sbatch` and returns its number."""
        said = self.run("sbatch", "--parsable", *words, cwd=cwd, environment=environment).stdout
        return int(said.splitlines()[-1])

    def job(self, number: int) -> dict[str, str]:
        """Returns the fields of `scontrol show job`, such as JobState, Restarts and NodeList."""
        line = self.run("scontrol", "show", "job", "-o", str(number)).stdout
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    def ended(self, number: int, *, within_s: float) -> dict[str, str]:
        """Waits until a job has ended and is not requeued, and returns its fields (see `job`).

        Raises:
            TimeoutError: If it has not ended after `within_s` seconds.
        """
        until = time.monotonic() + within_s
        while (job := self.job(number))["JobState"] not in FINAL:
            if time.monotonic() > until:
                raise TimeoutError(f"job {number} has not ended in {within_s} s: {job}")
            time.sleep(0.2)
        return job


def _main(folder: Path, num_nodes: int, user_signal: bool) -> None:
    """Configures and starts Slurm inside the namespaces, and waits for the starting process's end.

    When all nodes are idle, it makes the file `ready`.
    """
    _configure(folder, num_nodes, user_signal)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    daemons = [subprocess.Popen(["slurmctld", "-D"], stdin=subprocess.DEVNULL)]
    for i in range(1, num_nodes + 1):
        named = f"hostname n{i} && exec slurmd -D -N n{i}"
        node = ["unshare", "-u", "sh", "-c", named]
        daemons.append(subprocess.Popen(node, stdin=subprocess.DEVNULL))
    until = time.monotonic() + START_S
    idle = ""
    while idle != str(num_nodes):
        if time.monotonic() > until:
            sys.exit(f"{idle or 'no'} nodes of {num_nodes} are idle; see {folder}/log")
        ask = ["timeout", "3", "sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D"]
        idle = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
        time.sleep(0.05)
    (folder / "ready").touch()
    sys.stdin.buffer.read()  # returns when the starting process ends


def _configure(folder: Path, num_nodes: int, user_signal: bool) -> None:
    host = os.uname().nodename.split(".")[0]
    nodes = range(1, num_nodes + 1)
    for name in ("state", "log", "dev", *(f"spool.n{i}" for i in nodes)):
        (folder / name).mkdir()
    for i in range(8):
        subprocess.run(["mknod", f"{folder}/dev/nvidia{i}", "c", "1", "3"], check=True)
    (folder / "gres.conf").write_text(f"Name=gpu Type=h100 File={folder}/dev/nvidia[0-7]\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    lines = [NODE.format(i=i, port=17000 + i) for i in nodes]
    controller = "SlurmctldParameters=preempt_send_user_signal" if user_signal else ""
    (folder / "slurm.conf").write_text(
        SLURM_CONF.format(folder=folder, host=host, nodes="\n".join(lines), controller=controller)
    )
    hosts = [f"127.0.0.1 localhost {host}", *(f"127.0.1.{i} n{i}" for i in nodes)]
    (folder / "hosts").write_text("\n".join(hosts) + "\n")
    for command in (
        ["mount", "--bind", f"{folder}/hosts", "/etc/hosts"],
        ["ip", "link", "set", "lo", "up"],
        ["ip", "address", "add", f"{ADDRESS}/32", "dev", "lo"],
    ):
        subprocess.run(command, check=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), "user_signal" in sys.argv[3:])
