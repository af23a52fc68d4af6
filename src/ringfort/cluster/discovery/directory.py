"""`AddressDirectory`: all known addresses of peers, which to try next, and which is best. Pure.

Addresses come from mDNS, from a person (`static`), from other peers (`exchange`) and from incoming connections
(`observed`). None is trusted: an address belongs to a peer once a handshake has proved who answers there. Until then it
is filed under a claim: a peer's id, or any other name that the addresses of one announcement share.

The node asks `due` which addresses to dial, and reports the results. It dials while a peer has no link, and later its
other addresses once, to measure them; so data moves from Wi-Fi to a cable. One link serves both peers, so it is enough
that one of them hears of the other.

Everything that outsiders can make grow is bounded: addresses in total, for each peer, and from each source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from ringfort.cluster.discovery.interfaces import Choice

MAX_ADDRESSES: Final = 1024
"""In total: 256 peers with four addresses each."""
MAX_PER_PEER: Final = 16
"""As many as one announcement or introduction may contain."""
MAX_PER_INTRODUCER: Final = 256
"""Unproved addresses from one peer. It may know a whole cluster, but can fill only a quarter of the directory."""
MAX_DIALLING: Final = 16
"""Attempts at once: enough for a few dozen peers to connect quickly, without a storm of connections."""
FIRST_PAUSE: Final = 0.25
"""Seconds before another attempt at an address that failed; doubled each time."""
STAGGER: Final = 0.1
"""Seconds before the next address of a peer is dialled in parallel. RFC 8305 recommends 0.25 for the internet; on a
local network an answer takes milliseconds."""
LONGEST_PAUSE: Final = 15.0
"""Limit of that pause in seconds: how long the return of a peer may go unnoticed without an announcement."""
FORGET_AFTER: Final = 300.0
"""Seconds after which an address that is not mentioned and does not answer is forgotten."""
MEASURE_AGAIN: Final = 60.0
"""Seconds between two measurements of the other addresses of a connected peer, because networks change."""
_TYPICAL_BYTES: Final = 1 << 20
"""Addresses are compared by the time for a message of this size, in bytes."""


class Source(IntEnum):
    """How an address became known. Addresses from higher sources are kept longer when there is no room."""

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
    """The peer that told this address; empty for other sources."""
    seen: float
    """When it was last mentioned or answered."""
    claimed: str = ""
    """The peer or announcement that it is said to belong to."""
    proved: str = ""
    """The last peer that answered there."""
    failures: int = 0
    next_try: float = 0.0
    dialled: float = -1.0
    """When the attempt that is under way began; negative if there is none."""
    round_trip: float | None = None
    bandwidth: float | None = None
    why: str = ""
    """Why the last attempt failed."""

    @property
    def peer(self) -> str:
        return self.proved or self.claimed

    @property
    def dialling(self) -> bool:
        return self.dialled >= 0

    def cost(self) -> float:
        """Return the measured seconds for a typical message."""
        moving = _TYPICAL_BYTES / self.bandwidth if self.bandwidth else 0.0
        return (self.round_trip or 0.0) / 2 + moving


@dataclass
class AddressDirectory:
    """All addresses. Those that are not measured yet are ranked by their interface, in the order of `choice`."""

    choice: Choice = field(default_factory=lambda: Choice(()))
    _entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    _own: set[str] = field(default_factory=set[str])
    _linked: dict[str, str] = field(default_factory=dict[str, str])
    """The connected peers, each with the address that this side dialled; empty for an incoming link."""
    _met: dict[str, None] = field(default_factory=dict[str, None])
    """The peers that are or were connected, the oldest first."""

    # --- sources -----------------------------------------------------------------------------------------------------

    def learn(
        self, addresses: Iterable[str], source: Source, now: float, *, claim: str = "", introducer: str = ""
    ) -> None:
        """Add addresses that may lead to `claim`. Those without room are ignored."""
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
            is_other = source is Source.MDNS and entry.claimed != claim
            if not entry.claimed or source > Source.EXCHANGE:
                entry.claimed = claim
            if is_other and not entry.dialling:
                # Another process has taken the place of one that has ended, whose failures say nothing about it.
                entry.failures, entry.why, entry.next_try = 0, "", now
            elif source is not Source.EXCHANGE and entry.failures:
                # It was just announced or has connected, so it is there: there is no need to wait out a long pause.
                entry.next_try = min(entry.next_try, now + FIRST_PAUSE)

    def withdraw(self, claim: str, keep: Sequence[str] = ()) -> None:
        """Remove the announced addresses of `claim` except those to `keep`, unless another source knows them or they
        are proved."""
        for address, entry in list(self._entries.items()):
            if entry.claimed == claim and address not in keep:
                entry.sources.discard(Source.MDNS)
                if not entry.sources and not entry.proved:
                    del self._entries[address]

    def is_own(self, addresses: Iterable[str]) -> None:
        """Never dial these addresses, which lead to this process itself."""
        for address in addresses:
            self._own.add(address)
            self._entries.pop(address, None)

    # --- attempts ----------------------------------------------------------------------------------------------------

    def due(self, now: float) -> list[str]:
        """Return the addresses to dial now. They count as being dialled until `answered` or `failed`.

        These are the best address of each peer and, a moment later, the next best if it has not answered. Peers without
        a link come before connected ones, whose other addresses are only measured.
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
        """When `due` will next return an address if nothing else happens; infinite if never."""
        if sum(entry.dialling for entry in self._entries.values()) >= MAX_DIALLING:
            return float("inf")
        begun = self._begun()
        return min((self._when(entry, begun) for entry in self._entries.values()), default=float("inf"))

    def answered(
        self, address: str, peer: str, now: float, round_trip: float | None = None, bandwidth: float | None = None
    ) -> None:
        """A handshake has proved that `peer` is at `address`. The other addresses of that announcement are its as well.
        A probe has also measured seconds, and the bytes per second of the slower direction."""
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
        if bandwidth is not None:
            entry.bandwidth = bandwidth

    def failed(self, address: str, now: float, why: str) -> None:
        """The attempt failed: nothing answered, or the peer was refused."""
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
        """The address was not tried: it uses the same interface as one that was measured."""
        entry = self._entries.get(address)
        if entry is not None:
            entry.dialled, entry.next_try = -1.0, now + MEASURE_AGAIN

    # --- links -------------------------------------------------------------------------------------------------------

    def linked(self, peer: str, address: str = "") -> None:
        """`peer` is connected, through `address` if this side dialled, so it need not be dialled."""
        self._linked[peer] = address
        self._met[peer] = None
        while len(self._met) > MAX_ADDRESSES:
            del self._met[next(iter(self._met))]

    def unlinked(self, peer: str, now: float) -> None:
        """The link has ended. The peer's addresses are tried at once, the one that failed a little later."""
        address = self._linked.pop(peer, "")
        for entry in self._entries.values():
            if entry.peer == peer:
                entry.next_try = now if entry.address != address else now + FIRST_PAUSE

    def network_changed(self, now: float) -> None:
        """Forget measurements and failures, because the interfaces of this machine have changed."""
        for entry in self._entries.values():
            entry.failures, entry.round_trip, entry.bandwidth = 0, None, None
            entry.next_try = now

    # --- queries -----------------------------------------------------------------------------------------------------

    def addresses(self, peer: str) -> list[str]:
        """Return the addresses of `peer`, best first. Proved addresses come before claimed ones."""
        known = [entry for entry in self._entries.values() if entry.peer == peer]
        return [entry.address for entry in sorted(known, key=lambda entry: (not entry.proved, *self._order(entry)))]

    @property
    def linked_peers(self) -> tuple[str, ...]:
        """The connected peers."""
        return tuple(self._linked)

    def is_measured(self, address: str) -> bool:
        """Return whether the bandwidth of `address` was measured."""
        return address in self._entries and self._entries[address].bandwidth is not None

    def has_failed(self, address: str) -> bool:
        """Return whether the last attempt at `address` failed."""
        return address in self._entries and bool(self._entries[address].why)

    def troubles(self) -> list[tuple[str, str]]:
        """Return the addresses that have never led to a peer, each with the reason. Addresses of peers that were
        connected before are left out: nobody looks for those."""
        return [(one.address, one.why) for one in self._entries.values() if one.why and one.peer not in self._met]

    def forget(self, now: float) -> None:
        """Drop addresses that are not mentioned any more. Those that a person named stay."""
        used = set(self._linked.values())
        for address, entry in list(self._entries.items()):
            kept = Source.STATIC in entry.sources or entry.dialling or address in used
            if not kept and now - entry.seen > FORGET_AFTER:
                del self._entries[address]

    # --- rules -------------------------------------------------------------------------------------------------------

    def _begun(self) -> dict[str, float]:
        """Return when the latest attempt at each peer began."""
        begun: dict[str, float] = {}
        for entry in self._entries.values():
            if entry.dialling:
                key = entry.peer or entry.address
                begun[key] = max(entry.dialled, begun.get(key, -1.0))
        return begun

    def _when(self, entry: Entry, begun: Mapping[str, float]) -> float:
        """Return when to try an address: never the one in use, and other addresses of a connected peer now and then if
        this side dialled. If the other side dialled, it measures."""
        if entry.dialling or (entry.peer in self._linked and self._linked[entry.peer] in ("", entry.address)):
            return float("inf")
        return max(entry.next_try, begun.get(entry.peer or entry.address, -STAGGER) + STAGGER)

    def _order(self, entry: Entry) -> tuple[object, ...]:
        return (
            entry.peer in self._linked,
            entry.failures,
            entry.round_trip is None,
            entry.cost(),
            self._preference(entry.address),
            -max(entry.sources, default=Source.EXCHANGE),
            entry.address,
        )

    def _preference(self, address: str) -> int:
        interface, interfaces = self.choice.interface_at(address), self.choice.interfaces
        return len(interfaces) if interface is None else interfaces.index(interface)

    def _has_room(self, source: Source, claim: str, introducer: str) -> bool:
        """Return whether there is room. It is counted by introducer, so that no peer can use up the room of another."""
        if source is Source.STATIC:
            return True
        told = [entry for entry in self._entries.values() if entry.introducer == introducer]
        if claim and sum(entry.claimed == claim for entry in told) >= MAX_PER_PEER:
            return False
        if introducer and sum(not entry.proved for entry in told) >= MAX_PER_INTRODUCER:
            return False
        return len(self._entries) < MAX_ADDRESSES or self._drop_worst(source)

    def _drop_worst(self, source: Source) -> bool:
        """Make room by dropping an address that fails or comes from a weaker source. Return False if there is none. So
        a flood of addresses cannot push out those that work."""
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
