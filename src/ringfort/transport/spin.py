"""`Spin`: how often to try again before sleeping. Learns from whether it paid."""

from __future__ import annotations

_MOST, _LEAST = 200, 4
"""Tries. One is a system call that finds nothing and one that gives the processor away: some 2 microseconds, while
sleeping and being woken costs 50 to 100 on a virtual machine. The most is what two sleeps would cost; the least keeps
looking whether waiting has become worth it again."""
LONGEST = 0.0005
"""Seconds: where others want the processor, giving it away takes a time slice and not a microsecond. A thread
that sleeps is woken before those that compute; one that only yields comes behind them.

Linux with `sched_autogroup_enabled` lets a process yield only to those of its own session, and our launcher gives
each rank one, as torchrun does. Four ranks on two cores, all in one session, took a tenth less over 64 KiB to 16 MiB of
TCP, but twice as long over a tiny all-reduce through shared memory. So it stays."""


class Spin:
    """The tries before a sleep: doubled when what was waited for came in time, halved when it did not. So a rank whose
    peers are busy elsewhere soon sleeps at once, and where ranks answer each other quickly none of them sleeps."""

    __slots__ = ("budget",)

    def __init__(self) -> None:
        self.budget = _MOST

    def tell(self, *, paid: bool) -> None:
        """What was waited for came while trying, or did not."""
        self.budget = min(_MOST, self.budget * 2) if paid else max(_LEAST, self.budget // 2)
