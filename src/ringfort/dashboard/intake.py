"""`Intake`: checks what the cluster and this machine say, and makes frames of it. Pure.

Peers are believed only about themselves, and none of them can make a viewer's memory grow: notes beyond `RATE` a second
are dropped, and so is what nobody asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from ringfort.cluster.core.events import CloneFound, ClusterEvent, Misbehaved, Noted, OtherClusters, PeerLost
from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.core.topology import ClusterTopology
from ringfort.cluster.view import PeerView
from ringfort.dashboard.known import AnyFrame, Ended, Happened, Printed, Reported, Unreadable
from ringfort.errors import ProtocolError
from ringfort.telemetry.records import Event
from ringfort.telemetry.report import Report, decode
from ringfort.telemetry.view import LinkView, ShownEvent
from ringfort.telemetry.watching import LOG, REPORT, decode_part

RATE: Final = 20.0
"""Notes of a peer that are read in a second: a launcher sends up to 17."""
BURST: Final = 40.0
"""Notes of a peer that may come at once."""
MAX_PROCESSES: Final = 512
"""Of one peer. More are ignored, unless some of these have ended."""
AGAIN: Final = 60.0
"""Seconds before it is said again that a peer sends too much."""
GONE: Final = 10.0
"""Seconds for which a peer is known that is not connected any more."""
LOCAL_FIRST: Final = 3.0
"""Seconds for which a rank of this machine that is seen over the network is expected to be seen here."""
LOCAL_KEPT: Final = 30.0
"""Seconds for which a process counts as seen here."""

_TEXTS: Final = ("program", "run", "role", "codec")
"""Fields of a header."""
_KINDS: Final = {
    LinkKind.ETHERNET: "Ethernet",
    LinkKind.WIFI: "Wi-Fi",
    LinkKind.THUNDERBOLT: "Thunderbolt",
    LinkKind.LOOPBACK: "loopback",
}


@dataclass
class _Process:
    rank: int
    run: str
    first: float
    """When it was first seen."""
    latest: float
    """When it last reported."""
    is_alive: bool = True

    @property
    def order(self) -> tuple[bool, float]:
        """The larger, the rather it is the process that has its rank now."""
        return self.is_alive, self.latest


@dataclass
class _Peer:
    host: str
    name: str
    role: str
    seen_at: float
    credit: float = BURST
    credit_at: float = 0.0
    said_at: float = -math.inf
    """When it was last said that it sends too much."""
    processes: dict[int, _Process] = field(default_factory=dict[int, _Process])

    def __post_init__(self) -> None:
        self.name = _printable(self.name)

    @property
    def is_shown(self) -> bool:
        """Whether it trains, or votes in a run: it is not a viewer."""
        return self.role != "observer"

    def process_of(self, rank: int, run: str | None = None) -> _Process | None:
        """The newest process with a rank, of a run or of any."""
        found = (one for one in self.processes.values() if one.rank == rank and run in (None, one.run))
        return max(found, key=lambda one: one.order, default=None)

    def has_room(self) -> bool:
        """Whether one more process can be remembered. Of those that have ended, the oldest is forgotten for it."""
        if len(self.processes) < MAX_PROCESSES:
            return True
        ended = [(one.latest, pid) for pid, one in self.processes.items() if not one.is_alive]
        if ended:
            del self.processes[min(ended)[1]]
        return bool(ended)

    def may_send(self, now: float) -> bool:
        self.credit = min(BURST, self.credit + RATE * max(0.0, now - self.credit_at))
        self.credit_at = now
        if self.credit < 1:
            return False
        self.credit -= 1
        return True


class Intake:
    """For one thread at a time."""

    def __init__(self, feed: Callable[[AnyFrame, float], None]) -> None:
        """`feed` takes every frame, with its time."""
        self.host = ""
        """This machine."""
        self.wanted: frozenset[tuple[str, int]] = frozenset()
        """The runs and ranks whose output was asked for."""
        self._feed = feed
        self._peers: dict[str, _Peer] | None = None
        """None before the first look: who was there already has not joined."""
        self._local: dict[int, float] = {}
        """When a trace of each process was last read here."""
        self._refusals: frozenset[str] = frozenset()

    # --- this machine -----------------------------------------------------------------------------------------------

    def take_local(self, reports: Iterable[Report], now: float) -> None:
        """Take the reports that were made of traces of this machine."""
        self._local = {pid: at for pid, at in self._local.items() if now - at < LOCAL_KEPT}
        for report in reports:
            self._local[report.header.pid] = now
            self._feed(Reported(report), now)

    # --- the cluster ------------------------------------------------------------------------------------------------

    def set_peers(self, views: Iterable[PeerView], now: float) -> None:
        """Take the peers that are connected."""
        before = self._peers
        # One that is gone is kept until its `PeerLost` has come.
        self._peers = {peer: one for peer, one in (before or {}).items() if 0 <= now - one.seen_at < GONE}
        for view in views:
            if view.is_self:
                self.host = view.host
                continue
            known = self._peers.setdefault(view.peer, _Peer(view.host, view.name or view.peer, view.role, now))
            known.seen_at = now
            if before is not None and view.peer not in before and known.is_shown:
                self._say("joined", f"{known.name} is here", now)

    def set_refusals(self, refusals: Iterable[str], now: float) -> None:
        """Take the latest refused connections, in words."""
        found = frozenset(refusals)
        for text in sorted(found - self._refusals):
            self._say("refused", text, now)
        self._refusals = found

    def take_event(self, event: ClusterEvent, now: float) -> None:
        """Take an event of the cluster."""
        match event:
            case Noted(peer=peer, topic=topic, body=body):
                self._take_note(peer, topic, body, now)
            case PeerLost(peer=peer, why=why):
                how = "has left" if event.left else "is gone" if event.died else "is out of reach"
                self._take_loss(event, f"{self._name(peer)} {how}: {why}", now)
            case Misbehaved(peer=peer, why=why):
                self._say("refused", f"{self._name(peer)} was refused: {why}", now)
            case CloneFound() | OtherClusters():
                self._say("refused" if isinstance(event, CloneFound) else "clusters", str(event), now)
            case _:
                pass

    def _take_loss(self, event: PeerLost, text: str, now: float) -> None:
        peer = (self._peers or {}).pop(event.peer, None)
        if peer is None:
            return
        if peer.is_shown:
            self._say("left" if event.left else "lost", text, now)
        for pid, process in peer.processes.items() if event.died or event.left else ():
            if process.is_alive and not self._is_local(peer, pid):
                self._feed(Ended(peer.host, pid, event.left), now)

    def _take_note(self, peer_id: str, topic: str, body: bytes, now: float) -> None:
        peer = (self._peers or {}).get(peer_id)
        if peer is None:
            return
        if not peer.may_send(now):
            if now - peer.said_at > AGAIN:
                peer.said_at = now
                self._say("dropped", f"{peer.name} sends more than {RATE:g} notes a second; most are dropped", now)
            return
        try:
            if topic == REPORT:
                self._take_report(peer, _checked(decode(body)), now)
            elif topic == LOG:
                part = decode_part(body)
                found = peer.process_of(part.rank)
                if found is not None and (found.run, part.rank) in self.wanted:
                    self._feed(Printed(found.run, part), now)
        except ProtocolError:
            self._feed(Unreadable(peer.host, peer.name), now)

    def _take_report(self, peer: _Peer, report: Report, now: float) -> None:
        header = report.header
        first = peer.processes[header.pid].first if header.pid in peer.processes else now
        if header.pid not in peer.processes and not peer.has_room():
            return
        peer.processes[header.pid] = _Process(header.rank, header.run_name, first, now, report.is_alive)
        if self._is_local(peer, header.pid) or (peer.host == self.host and now - first < LOCAL_FIRST):
            return
        self._feed(Reported(msgspec.structs.replace(report, host=peer.host, name=peer.name)), now)

    def peer_of(self, run: str, rank: int) -> str | None:
        """Return the peer that reports a rank: of several, the one whose process lives, and was heard of last. A rank
        may have moved to another machine."""
        found = [
            (process.order, peer_id)
            for peer_id, peer in (self._peers or {}).items()
            if (process := peer.process_of(rank, run)) is not None
        ]
        return max(found)[1] if found else None

    @property
    def peers(self) -> int:
        """The number of other peers that train or vote."""
        return sum(peer.is_shown for peer in (self._peers or {}).values())

    def _is_local(self, peer: _Peer, pid: int) -> bool:
        return peer.host == self.host and pid in self._local

    def _name(self, peer_id: str) -> str:
        peer = (self._peers or {}).get(peer_id)
        return _printable(peer_id) if peer is None else peer.name

    def _say(self, kind: str, text: str, now: float) -> None:
        self._feed(Happened(ShownEvent(now, kind, " ".join(_printable(line) for line in text.split("\n")))), now)


def links_of(topology: ClusterTopology) -> tuple[LinkView, ...]:
    """Return what was measured between each two machines, in both directions. Of several paths the fastest counts."""
    nodes, best = topology.nodes, dict[tuple[str, str], LinkView]()
    for one, two, link in topology.links():
        for source, target, seen in ((one, two, link), (two, one, link.reversed)):
            pair = nodes[source].host, nodes[target].host
            measured = seen.bandwidth_out
            known = best.get(pair)
            if pair[0] == pair[1] or (known is not None and (known.measured or 0.0) >= (measured or 0.0)):
                continue
            round_trip = None if seen.latency is None else 2 * seen.latency
            best[pair] = LinkView(*pair, 0.0, measured, round_trip, _KINDS.get(seen.kind, ""))
    return tuple(best[pair] for pair in sorted(best))


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)


def _checked(report: Report) -> Report:
    """Return a report with texts that can be shown. Raises `ProtocolError` for numbers that cannot be."""
    sums = report.sums
    numbers = (report.now, report.header.started, report.received, sums.seconds, sums.data, sums.exchange, sums.codec)
    if not all(map(math.isfinite, (*numbers, sums.seal, *report.sent.values(), *report.vitals.values()))):
        raise ProtocolError("Some numbers of this report are not finite")
    if min(report.received, *report.sent.values(), 0.0) < 0:
        raise ProtocolError("This report has a negative number of bytes")
    header = report.header
    texts: list[str] = [getattr(header, name) for name in _TEXTS]
    texts += [text for event in report.events for text in (event.kind, event.text)]
    texts += [name for values in report.values for name in values.values]
    if all(map(str.isprintable, texts)):
        return report
    shown = msgspec.structs.replace(header, **{name: _printable(getattr(header, name)) for name in _TEXTS})
    events = tuple(Event(one.at, _printable(one.kind), _printable(one.text), one.step) for one in report.events)
    values = tuple(
        msgspec.structs.replace(one, values={_printable(name): value for name, value in one.values.items()})
        for one in report.values
    )
    return msgspec.structs.replace(report, header=shown, events=events, values=values)
