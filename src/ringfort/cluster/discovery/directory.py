"""Where peers may be found: every address heard of, which to try next, and which is the best. Pure.

Addresses come from mDNS, from a person (`static`), from other peers (`exchange`) and from connections that came in
(`observed`). None is trusted: an address becomes a peer's when a handshake has proved who answers there. Until then it
is filed under a claim: a peer's id, or any other name that the addresses of one announcement have in common.

The node asks `due` whom to dial and tells how it went. It dials while a peer has no link, and later its other
addresses once, to measure them: that is how Wi-Fi gives way to a cable. A link either way introduces both sides, so it
is enough that one of two peers hears of the other.

Everything that can be made to grow from outside is bounded: addresses in all, of one peer, and from one source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from ringfort.cluster.discovery.interfaces import Choice
from ringfort.config import parse_address
from ringfort.errors import ConfigError

MAX_ADDRESSES: Final = 1024
"""In all: 256 peers of four addresses each."""
MAX_PER_PEER: Final = 16
"""As many as an announcement or an introduction may have."""
MAX_PER_INTRODUCER: Final = 256
"""Unproved ones from one peer: it may know a whole cluster, and can fill a quarter of the directory at most."""
MAX_DIALLING: Final = 16
"""Tries under way at once: a cluster of a few dozen peers comes up in a moment, and a bad list is no storm."""
FIRST_PAUSE: Final = 0.25
"""Seconds before an address that failed is tried again; doubled each time."""
STAGGER: Final = 0.1
"""Seconds before the next address of a peer is dialled beside those that have not answered yet. RFC 8305 has 0.25 for
the whole world; at home an answer takes milliseconds, or the address is a wrong one."""
LONGEST_PAUSE: Final = 15.0
"""Seconds: how long a peer that comes back may stay unnoticed where nobody announces it."""
FORGET_AFTER: Final = 300.0
"""Seconds after which an address that nobody mentions and that does not answer is forgotten."""
MEASURE_AGAIN: Final = 60.0
"""Seconds between two looks at the other addresses of a peer that has a link: networks change without notice."""
_TYPICAL_BYTES: Final = 1 << 20
"""Addresses are compared by the time for a message of this size."""


class Source(IntEnum):
    """How an address became known. The higher, the longer it is kept when there is no room."""

    EXCHANGE = 1
    MDNS = 2
    OBSERVED = 3
    STATIC = 4


@dataclass
class Entry:
    """One address, as `host:port`, and what is known about it."""

    address: str
    sources: set[Source]
    introducer: str
    """Who told, where it was another peer."""
    seen: float
    """When it was last heard of or answered."""
    claimed: str = ""
    """Whom it is said to belong to."""
    proved: str = ""
    """The peer that answered there last."""
    failures: int = 0
    next_try: float = 0.0
    dialled: float = -1.0
    """When the try that is under way began; negative if none is."""
    round_trip: float | None = None
    bandwidth: float | None = None
    why: str = ""
    """Why the last try failed."""

    @property
    def peer(self) -> str:
        return self.proved or self.claimed

    @property
    def dialling(self) -> bool:
        return self.dialled >= 0

    @property
    def is_measured(self) -> bool:
        return self.round_trip is not None

    def cost(self) -> float:
        """Seconds for a typical message, as measured. Without a bandwidth, the round trip alone tells little."""
        moving = _TYPICAL_BYTES / self.bandwidth if self.bandwidth else 0.0
        return (self.round_trip or 0.0) / 2 + moving


@dataclass
class AddressDirectory:
    """All addresses. `preference` ranks those that are not measured yet, lower first: that of the interface that leads
    there, say."""

    preference: Callable[[str], int] = field(default=lambda address: 0)
    _entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    _own: set[str] = field(default_factory=set[str])
    _linked: dict[str, str] = field(default_factory=dict[str, str])
    """The peers with a link, each with the address that its link goes to; empty where it came in."""
    _met: dict[str, None] = field(default_factory=dict[str, None])
    """The peers that have or had a link, the oldest first."""

    # --- what is heard -----------------------------------------------------------------------------------------------

    def learn(
        self, addresses: Iterable[str], source: Source, now: float, *, claim: str = "", introducer: str = ""
    ) -> None:
        """`addresses` may lead to whoever `claim` names. Those that there is no room for are passed over."""
        for address in addresses:
            if address in self._own:
                continue
            entry = self._entries.get(address)
            if entry is None:
                if not self._has_room(source, claim, introducer):
                    continue
                entry = self._entries[address] = Entry(address, set(), introducer, now)
            entry.seen = now
            entry.sources.add(source)
            if not entry.claimed or source > Source.EXCHANGE:
                entry.claimed = claim
            if source is not Source.EXCHANGE and entry.failures:
                # It was just announced or called us, so it is there: no need to wait out a long pause.
                entry.next_try = min(entry.next_try, now + FIRST_PAUSE)

    def withdraw(self, addresses: Iterable[str], source: Source) -> None:
        """The source takes them back; they are kept if they are known otherwise or are in use."""
        for address in addresses:
            entry = self._entries.get(address)
            if entry is not None:
                entry.sources.discard(source)
                if not entry.sources and not entry.proved:
                    del self._entries[address]

    def is_own(self, addresses: Iterable[str]) -> None:
        """These lead to this process itself: it is announced like any other, and never dialled."""
        for address in addresses:
            self._own.add(address)
            self._entries.pop(address, None)

    # --- what is tried -----------------------------------------------------------------------------------------------

    def due(self, now: float) -> list[str]:
        """The addresses to dial now; from now on they count as being dialled, until `answered` or `failed`.

        The best address of each peer, and a moment later the next best if it has not answered. Peers without a link
        come before those whose other addresses are only to be measured.
        """
        room = MAX_DIALLING - sum(entry.dialling for entry in self._entries.values())
        begun = self._begun()
        chosen: list[str] = []
        for entry in sorted(self._entries.values(), key=self._order):
            if len(chosen) < room and self._when(entry, begun) <= now:
                entry.dialled = now
                begun[entry.peer or entry.address] = now
                chosen.append(entry.address)
        return chosen

    @property
    def deadline(self) -> float:
        """When `due` will next have something, if nothing else happens; infinite if never."""
        if sum(entry.dialling for entry in self._entries.values()) >= MAX_DIALLING:
            return float("inf")
        begun = self._begun()
        return min((self._when(entry, begun) for entry in self._entries.values()), default=float("inf"))

    def answered(self, address: str, peer: str, now: float, round_trip: float | None = None) -> None:
        """A handshake at `address` has proved that `peer` is there; so the rest of that announcement is its too."""
        entry = self._entries.get(address)
        if entry is None:
            if not self._has_room(Source.OBSERVED, peer, ""):
                return
            entry = self._entries[address] = Entry(address, {Source.OBSERVED}, "", now)
        claim = entry.claimed
        for other in self._entries.values():
            if claim and other.claimed == claim:
                other.claimed = peer
        entry.claimed = entry.proved = peer
        entry.seen, entry.failures, entry.dialled, entry.why = now, 0, -1.0, ""
        entry.next_try = now + MEASURE_AGAIN
        if round_trip is not None:
            entry.round_trip = round_trip

    def failed(self, address: str, now: float, why: str) -> None:
        """Nobody answered there, or somebody who was refused."""
        entry = self._entries.get(address)
        if entry is None:
            return
        entry.failures += 1
        entry.dialled = -1.0
        entry.why = why
        entry.round_trip = entry.bandwidth = None
        pause = min(FIRST_PAUSE * 2 ** min(entry.failures - 1, 16), LONGEST_PAUSE)
        entry.next_try = now + (MEASURE_AGAIN if entry.peer in self._linked else pause)

    def skip(self, address: str, now: float) -> None:
        """It was not tried after all: it leads the same way as one that was."""
        entry = self._entries.get(address)
        if entry is not None:
            entry.dialled, entry.next_try = -1.0, now + MEASURE_AGAIN

    def measured(self, address: str, *, round_trip: float | None = None, bandwidth: float | None = None) -> None:
        """What a link to `address` is like: seconds, and bytes a second of its slower direction."""
        entry = self._entries.get(address)
        if entry is not None:
            entry.round_trip = entry.round_trip if round_trip is None else round_trip
            entry.bandwidth = entry.bandwidth if bandwidth is None else bandwidth

    # --- links -------------------------------------------------------------------------------------------------------

    def linked(self, peer: str, address: str = "") -> None:
        """There is a link with `peer`, to `address` if this side dialled: it need not be dialled now."""
        self._linked[peer] = address
        self._met[peer] = None
        while len(self._met) > MAX_ADDRESSES:
            del self._met[next(iter(self._met))]

    def unlinked(self, peer: str, now: float) -> None:
        """The link has ended: the peer's addresses are tried at once, the one that failed a little later."""
        address = self._linked.pop(peer, "")
        for entry in self._entries.values():
            if entry.peer == peer:
                entry.next_try = now if entry.address != address else now + FIRST_PAUSE

    def network_changed(self, now: float) -> None:
        """Our interfaces are others: old measurements and old failures mean nothing."""
        for entry in self._entries.values():
            entry.failures, entry.round_trip, entry.bandwidth = 0, None, None
            entry.next_try = now

    # --- what is known -----------------------------------------------------------------------------------------------

    def addresses(self, peer: str) -> list[str]:
        """Those of `peer`, the best first. Proved ones come before those that are only said to be its."""
        known = [entry for entry in self._entries.values() if entry.peer == peer]
        return [entry.address for entry in sorted(known, key=lambda entry: (not entry.proved, *self._order(entry)))]

    @property
    def linked_peers(self) -> tuple[str, ...]:
        """The peers with a link."""
        return tuple(self._linked)

    def is_measured(self, address: str) -> bool:
        """Whether it is known how fast `address` is."""
        entry = self._entries.get(address)
        return entry is not None and entry.bandwidth is not None

    def has_failed(self, address: str) -> bool:
        """Whether the last try of `address` failed."""
        entry = self._entries.get(address)
        return entry is not None and bool(entry.why)

    def troubles(self) -> list[tuple[str, str]]:
        """Addresses that have never led to a peer, and why: for people who ask where the others are. A peer that was
        here and has ended does not answer either, and nobody looks for it."""
        return [(one.address, one.why) for one in self._entries.values() if one.why and one.peer not in self._met]

    def forget(self, now: float) -> None:
        """Drop what nobody mentions any more. What a person named stays."""
        used = set(self._linked.values())
        for address, entry in list(self._entries.items()):
            kept = Source.STATIC in entry.sources or entry.dialling or address in used
            if not kept and now - entry.seen > FORGET_AFTER:
                del self._entries[address]

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, address: object) -> bool:
        return address in self._entries

    # --- rules -------------------------------------------------------------------------------------------------------

    def _begun(self) -> dict[str, float]:
        """When each peer that is being dialled was last begun with."""
        begun: dict[str, float] = {}
        for entry in self._entries.values():
            if entry.dialling:
                key = entry.peer or entry.address
                begun[key] = max(entry.dialled, begun.get(key, -1.0))
        return begun

    def _when(self, entry: Entry, begun: Mapping[str, float]) -> float:
        """When an address is to be tried. Never the one in use; the others of that peer now and then, if this side
        dialled: if the other side did, it measures."""
        if entry.dialling or (entry.peer in self._linked and self._linked[entry.peer] in ("", entry.address)):
            return float("inf")
        return max(entry.next_try, begun.get(entry.peer or entry.address, -STAGGER) + STAGGER)

    def _order(self, entry: Entry) -> tuple[object, ...]:
        return (
            entry.peer in self._linked,
            entry.failures,
            not entry.is_measured,
            entry.cost(),
            self.preference(entry.address),
            -max(entry.sources, default=Source.EXCHANGE),
            entry.address,
        )

    def _has_room(self, source: Source, claim: str, introducer: str) -> bool:
        """Counted by who told, so that nobody can use up another's room by speaking of it."""
        if source is Source.STATIC:
            return True
        told = [entry for entry in self._entries.values() if entry.introducer == introducer]
        if claim and sum(entry.claimed == claim for entry in told) >= MAX_PER_PEER:
            return False
        if introducer and sum(not entry.proved for entry in told) >= MAX_PER_INTRODUCER:
            return False
        return len(self._entries) < MAX_ADDRESSES or self._drop_worst(source)

    def _drop_worst(self, source: Source) -> bool:
        """Make room for an address from `source`, if there is one that is worth less: it fails, or it comes from a
        weaker source. So a flood of addresses ends when the directory is full, and pushes nothing out that works."""
        used = set(self._linked.values())
        spare = [
            entry
            for entry in self._entries.values()
            if not (entry.proved or entry.dialling or Source.STATIC in entry.sources or entry.address in used)
            and (entry.failures or max(entry.sources) < source)
        ]
        if not spare:
            return False
        worst = min(spare, key=lambda entry: (max(entry.sources), -entry.failures, entry.seen, entry.address))
        del self._entries[worst.address]
        return True


def preference_for(choice: Choice) -> Callable[[str], int]:
    """Ranks addresses `host:port` by the interface that leads there, in the order of `choice`; the others come last."""
    order = {interface.name: place for place, interface in enumerate(choice.interfaces)}

    def preference(address: str) -> int:
        try:
            host, _ = parse_address(address)
        except ConfigError:
            return len(order)
        interface = choice.interface_of(host)
        return len(order) if interface is None else order[interface.name]

    return preference
