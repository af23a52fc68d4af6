"""`HealthMonitor`: which peers answer, how fast, and which are silent. Pure: time is an argument.

Silence is judged by what is usual on a link. The monitor averages the pauses between heartbeats and their variation. A
peer is lost when it has been silent for the average plus `caution` times the variation, within the bounds of
`HealthConfig`. So a link with jitter is given more time than a steady one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Final

from ringfort.cluster.core.events import ClusterEvent
from ringfort.config import CLUSTER_PATIENCE, HealthConfig

_WEIGHT: Final = 0.2
"""Weight of a new sample in the averages: about the last five heartbeats count."""
JITTER_ROOM: Final = 1.0
"""Limit of the seconds that a link with jitter is given beyond `patience`."""


class HealthStatus(Enum):
    """The health of a peer."""

    UNKNOWN = "unknown"
    """No heartbeat has arrived yet."""
    HEALTHY = "healthy"
    """It answers in time."""
    DEGRADED = "degraded"
    """Slow, busy, or silent for half of the limit. Such a peer is not given up."""
    UNHEALTHY = "unhealthy"
    """Silent for too long, so it is lost."""


@dataclass(frozen=True)
class HealthEvent(ClusterEvent):
    """The health of a peer has changed."""

    peer: str
    """Its id."""
    status: HealthStatus
    """Its health now."""
    was: HealthStatus
    """Its health before."""
    silence: float
    """Seconds since its last heartbeat."""
    round_trip: float | None
    """Seconds, smoothed; None before the first answer."""
    busy: bool = False
    """Its program runs but does not respond: it holds the interpreter lock, swaps or computes."""

    def __str__(self) -> str:
        if self.busy and self.status is HealthStatus.DEGRADED:
            return f"{self.peer} is degraded (was {self.was.value}): its program is busy and does not respond"
        trip = "" if self.round_trip is None else f", round trip {self.round_trip * 1e3:.1f} ms"
        return f"{self.peer} is {self.status.value} (was {self.was.value}): silent for {self.silence:.1f} s{trip}"


@dataclass(frozen=True)
class HealthSummary:
    """The health of all peers in a few numbers."""

    total: int
    """The number of peers that are watched."""
    healthy: int
    """Those of them that answer in time."""
    degraded: int
    """Those that are slow, busy or silent for a while."""
    unhealthy: int
    """Those that are lost."""
    unknown: int
    """Those that no heartbeat has come from yet."""
    round_trip: float | None
    """Seconds: the mean of the peers' smoothed round trips."""
    uptime: float
    """The share of the watched time in which peers were not lost; 1 without peers."""

    @property
    def is_sound(self) -> bool:
        """Whether no peer is lost or degraded."""
        return self.healthy + self.unknown == self.total


@dataclass
class _Watched:
    since: float
    heard: float
    status: HealthStatus = HealthStatus.UNKNOWN
    pause: float = 0.0
    variation: float = 0.0
    round_trip: float | None = None
    jitter: float = 0.0
    down: float = 0.0
    down_since: float | None = None
    busy: bool = False


class HealthMonitor:
    """Watches any number of peers. Feed it with `heard` and `answered`; `check` returns what has changed."""

    def __init__(self, config: HealthConfig | None = None) -> None:
        self.config = HealthConfig() if config is None else config
        self._peers: dict[str, _Watched] = {}

    def watch(self, peer: str, now: float) -> None:
        """Start to watch `peer`. Its silence counts from now."""
        self._peers[peer] = _Watched(now, now, pause=self.config.interval)

    def forget(self, peer: str) -> None:
        """Stop watching `peer`."""
        self._peers.pop(peer, None)

    def heard(self, peer: str, now: float, *, busy: bool = False) -> None:
        """Note a heartbeat of `peer`, which says whether its program is `busy`."""
        watched = self._peers[peer]
        if watched.status is not HealthStatus.UNKNOWN:
            error = now - watched.heard - watched.pause
            watched.pause += _WEIGHT * error
            watched.variation += _WEIGHT * (abs(error) - watched.variation)
        watched.heard = now
        watched.busy = busy

    def answered(self, peer: str, round_trip: float) -> None:
        """Note that `peer` answered after `round_trip` seconds."""
        watched = self._peers[peer]
        if watched.round_trip is None:
            watched.round_trip = round_trip
        else:
            watched.jitter += _WEIGHT * (abs(round_trip - watched.round_trip) - watched.jitter)
            watched.round_trip += _WEIGHT * (round_trip - watched.round_trip)

    def limit(self, peer: str) -> float:
        """Return the seconds of silence after which `peer` is lost."""
        watched = self._peers[peer]
        usual = watched.pause + self.config.caution * watched.variation
        patience = CLUSTER_PATIENCE if self.config.patience is None else self.config.patience
        return min(max(patience, usual), patience + JITTER_ROOM)

    def check(self, now: float) -> list[HealthEvent]:
        """Return what has changed since the last check, in the order in which peers joined."""
        events: list[HealthEvent] = []
        for peer, watched in self._peers.items():
            was, status = watched.status, self._judge(peer, watched, now)
            if status is was:
                continue
            watched.status = status
            if status is HealthStatus.UNHEALTHY:
                watched.down_since = now
            elif watched.down_since is not None:
                watched.down += now - watched.down_since
                watched.down_since = None
            events.append(HealthEvent(peer, status, was, now - watched.heard, watched.round_trip, watched.busy))
        return events

    def _judge(self, peer: str, watched: _Watched, now: float) -> HealthStatus:
        silence, limit = now - watched.heard, self.limit(peer)
        if silence >= limit:
            return HealthStatus.UNHEALTHY
        if watched.heard == watched.since:
            return HealthStatus.UNKNOWN
        slow = watched.round_trip is not None and watched.round_trip >= self.config.slow_round_trip
        is_degraded = watched.busy or slow or silence >= limit / 2
        return HealthStatus.DEGRADED if is_degraded else HealthStatus.HEALTHY

    def is_busy(self, peer: str) -> bool:
        """Return whether the last heartbeat said that the program is busy; False for an unknown peer."""
        return peer in self._peers and self._peers[peer].busy

    def status(self, peer: str) -> HealthStatus:
        """Return the status as of the last check; UNKNOWN for an unknown peer."""
        return self._peers[peer].status if peer in self._peers else HealthStatus.UNKNOWN

    def round_trip(self, peer: str) -> float | None:
        """Return the smoothed round trip in seconds; None before the first answer."""
        return self._peers[peer].round_trip if peer in self._peers else None

    def jitter(self, peer: str) -> float:
        """Return the smoothed variation of the round trip in seconds."""
        return self._peers[peer].jitter if peer in self._peers else 0.0

    def summary(self, now: float) -> HealthSummary:
        """Return a summary of all peers."""
        count = Counter(watched.status for watched in self._peers.values())
        trips = [w.round_trip for w in self._peers.values() if w.round_trip is not None]
        watched_for = sum(now - w.since for w in self._peers.values())
        down = sum(w.down + (0 if w.down_since is None else now - w.down_since) for w in self._peers.values())
        return HealthSummary(
            total=len(self._peers),
            **{status.value: count[status] for status in HealthStatus},
            round_trip=sum(trips) / len(trips) if trips else None,
            uptime=1 - down / watched_for if watched_for > 0 else 1.0,
        )
