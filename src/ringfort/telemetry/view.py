"""`RunView`: a run at one moment, ready to be shown. The terminal and the browser show the same one. Pure.

Seconds are means per step over the last `WINDOW` seconds, unless a name says otherwise.
"""

from __future__ import annotations

from typing import Final

import msgspec

WINDOW: Final = 10.0
"""Seconds over which a view takes means."""


ENDED: Final = ("lost", "ended")
"""States of processes that do not run any more."""


class Split(msgspec.Struct, frozen=True):
    """Where the time of a step goes."""

    compute: float = 0.0
    data: float = 0.0
    waiting: float = 0.0
    """For ranks that came later to the collectives."""
    wire: float = 0.0
    """In the collectives after all ranks had come: what the slowest link takes."""
    codec: float = 0.0
    seal: float = 0.0

    @property
    def total(self) -> float:
        """The seconds of a step."""
        return self.compute + self.data + self.waiting + self.wire + self.codec + self.seal

    def part(self, *names: str) -> float:
        """The fraction, from 0 to 1, of some of the fields."""
        total = self.total
        return sum(getattr(self, name) for name in names) / total if total else 0.0


class ShownStep(msgspec.Struct, frozen=True):
    """A step in the timeline."""

    number: int
    start: float
    """Seconds by the viewer's clock (`time.time()`)."""
    split: Split


class RankView(msgspec.Struct, frozen=True):
    """One rank."""

    key: str
    """Identifies its process: machine and process id."""
    rank: int
    name: str
    """Of its machine."""
    host: str = ""
    """Identifies its machine: ranks of one machine have the same."""
    state: str = "training"
    """training, learner (it copies the state and does not count yet), paused (no step for a while), silent (nothing
    was heard for a while), ended (its process has finished), lost (its process was killed or has failed), nonsense
    (what it sends cannot be understood)."""
    pid: int = 0
    step: int = 0
    split: Split = Split()
    steps_per_second: float = 0.0
    samples_per_second: float = 0.0
    heard: float = 0.0
    """Seconds since it was last heard of."""
    vitals: dict[str, float] = {}
    """Of its machine: see `Report.vitals`."""
    sent: float = 0.0
    """Bytes per second."""
    received: float = 0.0
    compression: str = ""


class LinkView(msgspec.Struct, frozen=True):
    """The connection between two machines."""

    source: str
    """A machine, by `RankView.host`."""
    target: str
    used: float = 0.0
    """Bytes per second that ranks of `source` send to ranks of `target`."""
    measured: float | None = None
    """Bytes per second that were measured when the machines met, or that it carries now if that is more; None if
    unknown."""
    round_trip: float | None = None
    kind: str = ""
    """Ethernet, Wi-Fi, loopback, or empty if unknown."""


class ShownEvent(msgspec.Struct, frozen=True):
    """Something that happened."""

    at: float
    """Seconds by the viewer's clock."""
    kind: str
    text: str
    name: str = ""
    """The machine that reports it."""
    rank: int = -1


class Verdict(msgspec.Struct, frozen=True):
    """What a run is doing, in figures and in a sentence."""

    sentence: str = ""
    """Who makes everyone wait, and what would help."""
    cause: str = "unknown"
    """well, slow_machine, slow_link, exchange (the same inside one machine), data, codec, seal, uneven (ranks wait for
    each other in turn), or unknown while there is too little to judge, or while not all ranks are seen."""
    culprit: str = ""
    """The machine that the others wait for, or the rank where there is only one machine; empty if there is none."""
    saving: float = 0.0
    """Seconds per step that the advice in the sentence would save; 0 without advice."""
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    samples_per_second: float | None = None
    """Of all ranks that are seen; None if the program does not say how many samples it takes."""
    steps_per_second: float = 0.0
    eta: float | None = None
    """Seconds until the last step, if it is known."""
    speed_up: float | None = None
    """How many times faster than its fastest rank alone; None if that cannot be known, also if not all ranks are
    seen."""


class Curve(msgspec.Struct, frozen=True):
    """A value over time, thinned to at most `MAX_POINTS`."""

    name: str
    at: list[float]
    """Seconds by the viewer's clock."""
    steps: list[int]
    values: list[float | None]
    """None for a value that is infinite or not a number."""


class RunView(msgspec.Struct, frozen=True):
    """One run at one moment."""

    now: float
    run: str = ""
    program: str = ""
    verdict: Verdict = Verdict()
    ranks: tuple[RankView, ...] = ()
    links: tuple[LinkView, ...] = ()
    events: tuple[ShownEvent, ...] = ()
    """The latest, newest last."""
    curves: tuple[Curve, ...] = ()
    timeline: dict[int, tuple[ShownStep, ...]] = {}
    """The latest steps by rank."""
    runs: tuple[str, ...] = ()
    """All runs that can be seen, by name."""
    notice: str = ""
    """What the viewer should know: a recording that was cut, nobody found, a peer that sends nonsense."""
    is_recording: bool = False
    world_size: int = 0
    """Ranks that the run has, as its ranks say; 0 if unknown."""
    seen: int = 0
    """How many of them are heard of."""

    @property
    def is_whole(self) -> bool:
        """Whether all ranks are seen. If not, nobody can tell who waits for whom: a rank that waits for one that is not
        seen looks like one whose link is slow."""
        return self.seen >= self.world_size
