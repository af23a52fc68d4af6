"""What names this machine, and the clock that goes on while it sleeps."""

from __future__ import annotations

import hashlib
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_NETWORK: Final = Path("/proc/self/ns/net")


def host_id(salt: bytes) -> str:
    """The same in every process of this machine until it starts again, and nobody else's. A container with a network of
    its own is a machine of its own. `salt` keeps what two clusters see apart."""
    try:
        parts = [_BOOT_ID.read_text(encoding="ascii").strip(), str(_NETWORK.stat().st_ino)]
    except OSError:  # not Linux
        parts = [f"{uuid.getnode():012x}", os.uname().nodename]
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8, key=salt[:64])
    return digest.hexdigest()


def clock() -> float:
    """Seconds that never go back and run on while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


_CLOCK: Final[int] = getattr(time, "CLOCK_MONOTONIC" if sys.platform == "darwin" else "CLOCK_BOOTTIME", 1)
"""macOS's CLOCK_MONOTONIC counts sleep (its CLOCK_UPTIME_RAW does not); Linux's does not, but CLOCK_BOOTTIME does."""
