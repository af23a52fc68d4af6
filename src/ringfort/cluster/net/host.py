"""The id of this machine in a cluster, and a clock that runs on while it sleeps."""

from __future__ import annotations

import hashlib
import sys
import time
from typing import Final

from ringfort.transport.machine import this_machine


def host_id(salt: bytes) -> str:
    """Return an id that all processes of this machine share until it reboots. A container with its own network counts
    as a machine. `salt` makes the id different in each cluster."""
    return hashlib.blake2b(this_machine(shares=False).id, digest_size=8, key=salt[:64]).hexdigest()


def clock() -> float:
    """Return seconds that never go back and run on while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


_CLOCK: Final[int] = getattr(time, "CLOCK_MONOTONIC" if sys.platform == "darwin" else "CLOCK_BOOTTIME", 1)
"""macOS's CLOCK_MONOTONIC counts sleep (its CLOCK_UPTIME_RAW does not); Linux's does not, but CLOCK_BOOTTIME does."""
