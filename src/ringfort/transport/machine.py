"""Which machine a process runs on, in 16 bytes that are the same for all its processes and say nothing about it."""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import blake2b
from math import ceil
from pathlib import Path

import msgspec
import psutil

from ringfort.errors import InvalidArgumentError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ORDERED = ("x86_64", "amd64", "i686")
_NETWORK = Path("/proc/self/ns/net")
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""What `docker --cpus` and the limits of Kubernetes set: processor time in a period, on any of the processors."""


class Machine(msgspec.Struct, frozen=True):
    """Where a process runs, as it says itself. The default is a machine that nobody else is on."""

    id: bytes = b""
    shares: bool = False
    """Whether it moves data through shared memory."""
    is_ordered: bool = False
    """Its processors show writes to each other in the order in which they were made, without being asked to: x86 does.
    Python has no way to ask."""


def this_machine(*, shares: bool) -> Machine:
    """Return the machine of this process."""
    return Machine(_machine_id(), shares, platform.machine().lower() in _ORDERED)


@cache
def _machine_id() -> bytes:
    """Return a hash of the boot and of the network namespace: a container with its own network counts as a machine."""
    try:
        marks = (_BOOT_ID.read_text().strip(), str(_NETWORK.stat().st_ino))
    except OSError:  # not Linux, or no /proc
        marks = (platform.node(), str(uuid.getnode()), str(int(psutil.boot_time())))
    return blake2b("\n".join(marks).encode(), digest_size=16, person=b"ringfort machine").digest()


def hosts_of(machines: Mapping[int, Machine]) -> tuple[int, ...]:
    """Return, for each rank, the lowest rank on its machine. `machines` has all ranks."""
    first: dict[bytes | int, int] = {}  # by machine; a rank that does not tell its machine stands for itself
    return tuple(first.setdefault(machines[rank].id or rank, rank) for rank in range(len(machines)))


def cores() -> int:
    """Return how many processors this process may use, which a container or `taskset` may limit."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux tells
        usable = os.cpu_count() or 1
    try:
        time, period = map(int, _CPU_LIMIT.read_text().split())
    except (OSError, ValueError):  # no container, or `max`: no limit
        return usable
    return max(1, min(usable, ceil(time / period)))


def check_hosts(hosts: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Return `hosts` as a tuple. Raises `InvalidArgumentError` unless it has, for each rank, the lowest rank on its
    host."""
    given = tuple(hosts)
    if len(given) != world_size or given != tuple(map(given.index, given)):
        raise InvalidArgumentError(
            "hosts",
            given,
            f"must name for each of {world_size} ranks the lowest rank on its host, such as (0, 0, 2, 2)",
        )
    return given
