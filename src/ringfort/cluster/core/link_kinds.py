"""The kinds of links and interfaces, with the speed to assume before a measurement."""

from __future__ import annotations

from enum import Enum
from typing import Final


class LinkKind(Enum):
    """The values appear in tables and in messages, so they never change."""

    SHARED_MEMORY = "shared memory"
    LOOPBACK = "loopback"
    THUNDERBOLT = "thunderbolt"
    ETHERNET = "ethernet"
    WIFI = "wifi"
    UNKNOWN = "unknown"

    @property
    def nominal_bandwidth(self) -> float:
        """Bytes per second to assume before a measurement."""
        return _NOMINAL[self][0]

    @property
    def nominal_latency(self) -> float:
        """Seconds one way to assume before a measurement."""
        return _NOMINAL[self][1]


# Bandwidth (bytes/s) and latency (s) as homes have them, not as boxes promise: shared memory and loopback measured on a
# small machine, IP over Thunderbolt 3 about 16 Gbit/s of its 40, gigabit Ethernet, Wi-Fi 5 in the next room. What is
# unknown counts as the worst of them, so that nothing is preferred for lack of knowledge.
_NOMINAL: Final[dict[LinkKind, tuple[float, float]]] = {
    LinkKind.SHARED_MEMORY: (8e9, 5e-6),
    LinkKind.LOOPBACK: (2e9, 20e-6),
    LinkKind.THUNDERBOLT: (2e9, 100e-6),
    LinkKind.ETHERNET: (117e6, 200e-6),
    LinkKind.WIFI: (25e6, 3e-3),
    LinkKind.UNKNOWN: (25e6, 3e-3),
}
