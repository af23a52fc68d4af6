"""Which variables other launchers set: torchrun, MPI's mpiexec, Slurm's srun. Pure: the environment is an argument."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

SPECIAL_STEPS: Final = 0xFFFF_FF00
"""From this number on, Slurm's steps are no `srun`: batch scripts, the shells of `salloc`, daemons."""
MAX_HOSTS: Final = 4096
"""Hosts in a list. A longer list would make a group that no network of ours forms."""
FIRST_PORT: Final = 10_000
PORTS: Final = 20_000
"""Ports for ranks to meet at: below those that systems hand out by themselves (Linux: 32768, others: 49152)."""
_STRIDE: Final = 101
"""Steps of one job that have ports of their own before those of the next job begin."""

_PART: Final = re.compile(r"([^\[\],]*)(?:\[([^\]]*)\]([^\[\],]*))?(?:,|$)")


@dataclass(frozen=True)
class Launcher:
    """A launcher, and the variables that tell a process its place."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    """Empty for Slurm, which has a list of the hosts instead."""


TORCHRUN: Final = Launcher("torchrun and `ringfort run`", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI: Final = Launcher(
    "mpiexec of Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
MPICH: Final = Launcher("mpiexec of MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SLURM: Final = Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
LAUNCHERS: Final = (TORCHRUN, OPEN_MPI, MPICH, SLURM)
"""In the order in which they count. People type torchrun's names by hand; `mpiexec` inside a Slurm job is started by
`srun`, so Slurm's come last."""


def name_of(variables: Mapping[str, str]) -> str:
    """Return the name of the launcher that tells this process its place; empty if there is none."""
    found = launcher_of(variables)
    return "" if found is None else found.name


def launcher_of(variables: Mapping[str, str]) -> Launcher | None:
    """Return the first launcher that tells this process a rank or a world size; None if there is none."""
    return next((one for one in LAUNCHERS if _tells(one, variables)), None)


def _tells(launcher: Launcher, variables: Mapping[str, str]) -> bool:
    place = [variables.get(name) for name in (launcher.rank, launcher.world_size)]
    if launcher is SLURM and step_of(variables) is None:
        return False  # a batch script has a SLURM_PROCID too, and no other rank
    if launcher is MPICH and place == [variables.get(name) for name in (SLURM.rank, SLURM.world_size)]:
        return False  # `srun --mpi=pmi2` sets MPICH's variables beside its own
    return any(place)


def step_of(variables: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the numbers of the Slurm job and of its step that `srun` has started this process in, if it has."""
    job, step = (variables.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    if not (job.isdecimal() and step.isdecimal()) or int(step) >= SPECIAL_STEPS:
        return None
    return int(job), int(step)


def of_one_launcher(variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` without the places that other launchers tell than the one that counts: the rank of one and the
    size of another make no place."""
    counts = launcher_of(variables)
    others = [one for one in LAUNCHERS if one is not counts]
    hidden = {name for one in others for name in (one.rank, one.world_size, one.local_world_size)}
    # A LOCAL_RANK alone says which GPU to use, whoever has started the process.
    hidden |= {one.local_rank for one in others if one is not TORCHRUN}
    return {name: value for name, value in variables.items() if name not in hidden}


def half_told(variables: Mapping[str, str]) -> str:
    """Return what is missing if a launcher tells a rank without a world size or the reverse, and how to go on; empty
    otherwise."""
    half = launcher_of(variables)
    if half is None:
        return ""
    given, missing = half.rank, half.world_size
    if not variables.get(given):
        given, missing = missing, given
    if variables.get(missing):
        return ""
    pairs = [f"{one.name} {'set' if one is TORCHRUN else 'sets'} {one.rank} and {one.world_size}" for one in LAUNCHERS]
    others = [one for one in LAUNCHERS if one is not half and variables.get(one.rank) and _tells(one, variables)]
    instead = f" to use what {others[0].name} has set" if others else ""
    return (
        f"missing: {given}={variables[given]} is set, and {missing} is not. "
        f"Set {missing} too, or unset {given}{instead}\n{'; '.join(pairs)}"
    )


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list as Slurm writes it, such as `login,node[01-03,7]`, in its order.

    Raises `ValueError` for other text.
    """
    found: list[str] = []
    place = 0
    while place < len(text):
        part = _PART.match(text, place)
        if part is None or part.end() == place or not part[1] + (part[2] or ""):
            raise ValueError(f"{text!r} is not a list of hosts")
        before, inside, after = part[1], part[2], part[3] or ""
        found += [before] if inside is None else [f"{before}{number}{after}" for number in _numbers(inside)]
        if len(found) > MAX_HOSTS:
            raise ValueError(f"{text[:80]!r} names more than {MAX_HOSTS} hosts")
        place = part.end()
    return found


def _numbers(text: str) -> list[str]:
    """Return the numbers in `01-03,7`, with their leading zeros."""
    found: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or not 0 <= int(last) - int(first) < MAX_HOSTS:
            raise ValueError(f"{part!r} is not a range of numbers")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def port_of(job: int, step: int = 0) -> int:
    """Return the port where the ranks of a job's step meet. The first 101 steps of 198 jobs in a row have
    different ones; further apart, two steps may have the same."""
    return FIRST_PORT + (job * _STRIDE + step) % PORTS
