"""When a rank that has crashed is started again. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FIRST_SECONDS: Final = 0.5
"""Before the first restart: a machine that was killed for its memory needs a moment to have it back."""
MAX_SECONDS: Final = 30.0
"""Before any restart: a person who has repaired the cause still watches."""
HEALTHY_SECONDS: Final = 60.0
"""A rank that lived so long did not crash because of how it was started: the next delay is the first one again."""


def delay(crashes: int) -> float:
    """The seconds before the restart that follows so many crashes in a row: half a second, doubled each time, at most
    half a minute."""
    doublings = min(max(0, crashes - 1), 16)  # more would be too large for a float
    return min(FIRST_SECONDS * 2**doublings, MAX_SECONDS)


@dataclass
class Restarts:
    """The restarts of one rank."""

    limit: int
    used: int = 0
    crashes: int = 0
    """In a row, each within `HEALTHY_SECONDS` of its start."""

    def crashed(self, lived: float) -> float | None:
        """The rank has crashed `lived` seconds after its start. Returns the seconds until it is started again; None if
        no restart is left."""
        self.crashes = 1 if lived >= HEALTHY_SECONDS else self.crashes + 1
        if self.used >= self.limit:
            return None
        self.used += 1
        return delay(self.crashes)
