"""What names this machine, and the clock that goes on while it sleeps."""

from __future__ import annotations

import hashlib
import sys
import time
from typing import Final

from ringfort.transport.machine import this_machine


def host_id(salt: bytes) -> str:
    """The same in every process of this machine until it starts again, and nobody else's. A container with a network of
    its own is a machine of its own. `salt` keeps what two clusters see apart."""
    return hashlib.blake2b(this_machine(shares=False).id, digest_size=8, key=salt[:64]).hexdigest()


def clock() -> float:
    """Seconds that never go back and run on while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


_CLOCK: Final[int] = getattr(time, "CLOCK_MONOTONIC" if sys.platform == "darwin" else "CLOCK_BOOTTIME", 1)
"""macOS's CLOCK_MONOTONIC counts sleep (its CLOCK_UPTIME_RAW does not); Linux's does not, but CLOCK_BOOTTIME does."""
