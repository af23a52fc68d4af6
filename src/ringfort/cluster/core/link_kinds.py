"""The kinds of links and interfaces, with the speed to assume before a measurement."""

from __future__ import annotations

from enum import Enum


class LinkKind(Enum):
    """The values appear in tables and in messages, so they never change."""

    # Bandwidth and latency as homes have them, not as boxes promise: shared memory and loopback measured on a small
    # machine, IP over Thunderbolt 3 about 16 Gbit/s of its 40, gigabit Ethernet, Wi-Fi 5 in the next room. What is
    # unknown counts as the worst of them, so that nothing is preferred for lack of knowledge.
    SHARED_MEMORY = ("shared memory", 8e9, 5e-6)
    LOOPBACK = ("loopback", 2e9, 20e-6)
    THUNDERBOLT = ("thunderbolt", 2e9, 100e-6)
    ETHERNET = ("ethernet", 117e6, 200e-6)
    WIFI = ("wifi", 25e6, 3e-3)
    UNKNOWN = ("unknown", 25e6, 3e-3)

    nominal_bandwidth: float
    """Bytes per second to assume before a measurement."""
    nominal_latency: float
    """Seconds one way to assume before a measurement."""

    def __new__(cls, value: str, bandwidth: float, latency: float) -> LinkKind:
        """Make a member whose value is only the text."""
        made = object.__new__(cls)
        made._value_, made.nominal_bandwidth, made.nominal_latency = value, bandwidth, latency
        return made
