"""A Slurm cluster for tests: the real munged and slurmctld, and one slurmd on each host of a network of namespaces.

    with lan(2, machine_ids=True) as net, slurm(net, folder) as cluster:
        cluster.srun("-N2", sys.executable, "-c", "...")

The hosts are called n0, n1 and so on, and see the same files: as over NFS, home directories too.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.namespaces import ETC, Host, Lan

TOOLS = ("munged", "mungekey", "slurmctld", "slurmd", "srun", "sinfo")
INSTALL = "apt-get install --no-install-recommends munge slurm-client slurmctld slurmd"
START_SECONDS = 60.0
"""Until all nodes are there: on an idle machine it takes 3 s."""
CONFIGURATION = """
ClusterName=test
SlurmctldHost=n0({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def why_not() -> str:
    """Why there can be no Slurm here; empty where there can."""
    missing = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    return f"needs Slurm ({', '.join(missing)} not found): {INSTALL}" if missing else ""


PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
needs_slurm = pytest.mark.skipif(bool(why_not()), reason=why_not() or "never skipped")


@dataclass
class Cluster:
    """Starts programs by Slurm. Commands are typed on host n0."""

    login: Host
    variables: Mapping[str, str]

    def start(self, *arguments: str, variables: Mapping[str, str] | None = None) -> subprocess.Popen[Any]:
        """Start a command of Slurm, such as `srun`."""
        return self.login.start(
            *_named(self.login, *arguments),
            variables={**self.variables, **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def srun(
        self, *arguments: str, variables: Mapping[str, str] | None = None, timeout: float = 300.0, status: int = 0
    ) -> str:
        """Run `srun ARGUMENTS` to its end and return what it printed."""
        process = self.start("srun", *arguments, variables=variables)
        try:
            out, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(process.communicate()[0]) from None
        assert process.returncode == status, out
        return out


@contextmanager
def slurm(net: Lan, folder: Path, cpus: int = 4) -> Iterator[Cluster]:
    """A cluster of all hosts of `net`, with its files in `folder`."""
    folder.mkdir()
    (folder / "state").mkdir()
    configuration = folder / "slurm.conf"
    names = "\n".join(f"{host.address()} n{host.number}" for host in net.hosts)
    for host in net.hosts:
        (folder / f"spool-n{host.number}").mkdir()
        (ETC / host.namespace / "hosts").write_text(f"127.0.0.1 localhost\n{names}\n")
    nodes = "\n".join(f"NodeName=n{host.number} NodeAddr={host.address()} CPUs={cpus}" for host in net.hosts)
    configuration.write_text(CONFIGURATION.format(folder=folder, address=net.hosts[0].address(), nodes=nodes))
    # Without it slurmd looks at the machine's cgroups, which `ip netns exec` hides.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    key = folder / "munge.key"
    subprocess.run([*_tool("mungekey"), "--create", f"--keyfile={key}"], check=True)
    variables = {"SLURM_CONF": str(configuration), "PATH": f"{Path(sys.executable).parent}:{PATH}"}
    cluster = Cluster(net.hosts[0], variables)
    munge = (
        *_tool("munged"), "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}",
        f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed",
    )  # fmt: skip
    log = (folder / "daemons.log").open("wb")
    with log:
        daemons = [net.hosts[0].start(*munge, stdout=log, stderr=log)]
        daemons.append(_daemon(cluster, net.hosts[0], log, "slurmctld"))
        daemons += [_daemon(cluster, host, log, "slurmd") for host in net.hosts]
        try:
            _wait(cluster, len(net.hosts), folder)
            yield cluster
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
            for daemon in daemons:
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
            # The daemons of steps whose `srun` was killed outlive slurmd, and belong to nobody.
            for host in net.hosts:
                found = subprocess.run(
                    ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=False
                )
                for pid in found.stdout.split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)


def _tool(name: str) -> tuple[str]:
    path = shutil.which(name, path=PATH)
    assert path is not None
    return (path,)


def _named(host: Host, *arguments: str) -> tuple[str, ...]:
    """The command, on a machine with the host's name."""
    return "unshare", "--uts", "sh", "-c", f'hostname n{host.number} && exec "$@"', "sh", *arguments


def _daemon(cluster: Cluster, host: Host, log: Any, name: str) -> subprocess.Popen[Any]:
    command = _named(host, *_tool(name), "-D")
    return host.start(*command, variables=cluster.variables, stdout=log, stderr=log)


def _wait(cluster: Cluster, nodes: int, folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    seen = ""
    while time.monotonic() < deadline:
        process = cluster.start("sinfo", "-h", "-N", "-o", "%T")
        seen = process.communicate(timeout=START_SECONDS)[0]
        if seen.split() == ["idle"] * nodes:
            return
        time.sleep(0.2)
    raise AssertionError(f"Slurm has not started: {seen}\n{(folder / 'daemons.log').read_text()[-2000:]}")
