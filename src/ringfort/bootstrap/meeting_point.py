"""Where the ranks meet that another launcher has started: the address of rank 0, from what the launcher tells."""

from __future__ import annotations

import os
from typing import Final, NamedTuple
from zlib import crc32

import psutil

from ringfort.config import Environment, format_address
from ringfort.errors import ConfigError
from ringfort.launchers import MPICH, OPEN_MPI, SLURM, port_of

LOOPBACK: Final = "127.0.0.1"
_PASS: Final = {OPEN_MPI.name: "mpiexec -x {0}=...", MPICH.name: "mpiexec -genv {0} ..."}
"""How to pass a variable to all ranks."""


class MeetingPoint(NamedTuple):
    """Where ranks meet, and the name of their group."""

    address: str | None
    """Of rank 0, as `host:port`; None if nobody has told one."""
    group: str = ""
    """What the launcher calls the processes that it has started together; empty if it has no name for them. Rank 0
    refuses those of another group, which may have found it by a port that both were given."""


def meeting_point(told: Environment, world_size: int) -> MeetingPoint:
    """Return where `world_size` ranks meet: at `RINGFORT_MASTER`, else at `MASTER_ADDR` and `MASTER_PORT`. What is
    missing of the last two is derived from the Slurm step or from the `mpiexec`, if one has started this process.

    Raises `ConfigError` if only one of the two is set, or if the launcher tells too little; the message says what to
    set.
    """
    if told.master is not None:
        return MeetingPoint(told.master)
    group, number = _job(told)
    host, port = told.master_addr, told.master_port
    if world_size == 1:
        pass  # there is nobody to meet
    elif told.launcher in (SLURM.name, OPEN_MPI.name, MPICH.name):
        host = _host(told) if host is None else host
        port = number if port is None else port
        if port is None:
            raise ConfigError("MASTER_PORT", None, f"missing: {told.launcher} tells no port; {_advice(told)}")
    elif (host is None) != (port is None):
        given, missing = ("MASTER_ADDR", "MASTER_PORT") if port is None else ("MASTER_PORT", "MASTER_ADDR")
        why = f"missing: {given}={host or port} is set, and {missing} is not; torchrun and `ringfort run` set both"
        raise ConfigError(missing, None, why)
    return MeetingPoint(None if host is None or port is None else format_address(host, port), group)


def _job(told: Environment) -> tuple[str, int | None]:
    """Return the launcher's name for the processes that it has started together, and a port that follows from it."""
    if told.launcher == SLURM.name and told.step is not None:
        return "Slurm step {}.{}".format(*told.step), port_of(*told.step)
    if told.launcher == OPEN_MPI.name and told.mpi_job is not None:
        return f"mpiexec {told.mpi_job}", port_of(crc32(told.mpi_job.encode()))
    if told.launcher == MPICH.name and told.local_world_size == told.world_size:
        proxy = _starter()
        return ("", None) if proxy is None else (f"mpiexec {proxy}", port_of(proxy))
    return "", None


def _starter() -> int | None:
    """Return the process that MPICH's `mpiexec` has started the ranks of this machine from. It makes a session for each
    rank, so programs may be between it and this process."""
    try:
        return psutil.Process(os.getsid(0)).ppid()
    except (OSError, psutil.Error):
        return None


def _host(told: Environment) -> str:
    if told.launcher == SLURM.name:
        hosts = told.hosts
        if hosts:
            return hosts[0] if len(hosts) > 1 else LOOPBACK
    elif told.local_world_size == told.world_size:
        return LOOPBACK
    raise ConfigError("MASTER_ADDR", None, f"missing: {told.launcher} does not tell where rank 0 is; {_advice(told)}")


def _advice(told: Environment) -> str:
    """Say how to set the address of rank 0 for all ranks."""
    how = _PASS.get(told.launcher, "export {0}=...")
    return (
        f"set the machine of rank 0 and a free port there for all ranks: {how.format('MASTER_ADDR')} (and MASTER_PORT)"
    )
