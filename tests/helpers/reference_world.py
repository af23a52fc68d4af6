"""Ranks that hold references and tell each other of it, without a network: every order of what arrives can be tried."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count

from ringfort.rpc.protocol import Count, Inbound, Lost, Reference
from ringfort.rpc.references import References, RRef


class Wire:
    """What one rank has told another, in order."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.sent = self.arrived = 0

    def take(self) -> Count | Lost:
        frame = self.frames.popleft()
        self.arrived += 1
        return read(frame)


@cache
def read(frame: bytes) -> Count | Lost:
    inbound = Inbound(lambda _: True)
    inbound.want()[: len(frame)] = frame
    inbound.took(len(frame))
    (event,) = inbound.events
    assert isinstance(event, Count | Lost)
    return event


@dataclass
class Passed:
    """A message on its way with a reference in it."""

    giver: int
    to: int
    name: Reference
    behind: int
    """How many frames went before it on its link."""
    is_doubtful: bool


@dataclass
class Held:
    """An `RRef` that a program has."""

    rref: RRef
    is_doubtful: bool
    """Whether the rank that passed it on was cut off from the owner, so that the value may be gone."""

    @property
    def name(self) -> Reference:
        return self.rref._name


class World:
    """Ranks that hold references, and what is on the way between them. What a rank that is dead would do, or one that
    has no such thing, does nothing."""

    def __init__(self, ranks: int) -> None:
        self.size = ranks
        self.wires = {(a, b): Wire() for a in range(ranks) for b in range(ranks) if a != b}
        self.ranks = [
            References(
                rank,
                lambda peer, frame, rank=rank: self.post(rank, peer, frame),
                lambda: None,
                world_size=ranks,
                most=1 << 16,
            )
            for rank in range(ranks)
        ]
        self.held: list[list[Held]] = [[] for _ in range(ranks)]
        self.messages: list[Passed] = []
        self.asked: set[Reference] = set()
        """The values that their owners have heard of from the ranks that want them."""
        self.created: list[Reference] = []
        self.dead: set[int] = set()
        self.cuts: set[frozenset[int]] = set()
        self.broken: set[frozenset[int]] = set()
        """Of `cuts` those between two ranks that live on."""
        self.noticed: set[tuple[int, int]] = set()

    def post(self, a: int, b: int, frame: bytes) -> None:
        if not self.is_cut(a, b):
            self.wires[a, b].frames.append(frame)
            self.wires[a, b].sent += 1

    def is_cut(self, a: int, b: int) -> bool:
        return frozenset((a, b)) in self.cuts

    @property
    def living(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.dead]

    # --- what programs do -----------------------------------------------------------------------------------------

    def create(self, creator: int, owner: int) -> None:
        if creator not in self.dead:
            rref = self.ranks[creator].new(owner)
            self.held[creator].append(Held(rref, False))
            self.created.append(rref._name)
            if creator == owner:
                self.asked.add(rref._name)

    def give(self, giver: int, to: int, which: int) -> None:
        if self.held[giver]:
            held = self.held[giver][which % len(self.held[giver])]
            name = self.ranks[giver].name_of(held.rref)
            assert name is not None
            self.ranks[giver].give([name], to)
            if giver == to:
                self.receive(Passed(giver, to, name, 0, held.is_doubtful))
            elif not self.is_cut(giver, to):
                self.messages.append(Passed(giver, to, name, self.wires[giver, to].sent, held.is_doubtful))

    def take_back(self, which: int) -> None:
        """A message is given up before anything of it was sent."""
        messages = [message for message in self.messages if message.giver not in self.dead]
        if messages:
            message = messages[which % len(messages)]
            self.messages.remove(message)
            self.ranks[message.giver].give([message.name], message.to, -1)

    def drop(self, rank: int, which: int) -> None:
        if self.held[rank]:
            del self.held[rank][which % len(self.held[rank])]

    def work(self, rank: int) -> None:
        """What the agent's thread does."""
        if rank not in self.dead:
            self.ranks[rank].work()

    # --- what arrives ---------------------------------------------------------------------------------------------

    def arrive(self, which: int) -> None:
        if self.messages:
            message = self.messages.pop(which % len(self.messages))
            while self.wires[message.giver, message.to].arrived < message.behind:
                self.deliver(message.giver, message.to)
            self.receive(message)

    def receive(self, message: Passed) -> None:
        giver, to, name = message.giver, message.to, message.name
        self.held[to].append(Held(RRef(self.ranks[to], name, giver), self.is_doubtful(message)))

    def is_doubtful(self, message: Passed) -> bool:
        return message.is_doubtful or frozenset((message.giver, message.name.owner)) in self.broken

    def deliver(self, a: int, b: int) -> None:
        """One frame, on one wire."""
        if a != b and b not in self.dead and self.wires[a, b].frames:
            told = self.wires[a, b].take()
            assert self.ranks[b].hear(told, a) == ""
            if isinstance(told, Count) and told.reference.creator == a:
                self.asked.add(told.reference)

    # --- what breaks ----------------------------------------------------------------------------------------------

    def kill(self, rank: int) -> None:
        """Nothing more is sent by `rank`. What is on its way may still arrive, until it is noticed."""
        self.dead.add(rank)
        self.held[rank].clear()
        self.messages = [message for message in self.messages if message.to != rank]
        self.cuts |= {frozenset((rank, other)) for other in range(self.size) if other != rank}

    def cut(self, a: int, b: int) -> None:
        if a != b:
            self.cuts.add(frozenset((a, b)))
            self.broken.add(frozenset((a, b)))

    def notice(self, rank: int, peer: int) -> None:
        """What has not arrived from `peer` never will."""
        if rank in self.dead or not self.is_cut(rank, peer) or (rank, peer) in self.noticed:
            return
        self.noticed.add((rank, peer))
        self.wires[peer, rank].frames.clear()
        self.messages = [message for message in self.messages if (message.giver, message.to) != (peer, rank)]
        self.ranks[rank].lost(peer)

    # --- looking at it --------------------------------------------------------------------------------------------

    def state(self) -> object:
        """All that may make a difference to what happens next."""
        wires = [(tuple(wire.frames), wire.sent, wire.arrived) for wire in self.wires.values()]
        messages = [(message.giver, message.to, message.name, message.behind) for message in self.messages]
        ranks = [
            (
                sorted((name, *entry.counts.items()) for name, entry in rank.owned._entries.items()),
                sorted((hold.name, hold.giver, hold() is None) for hold in rank._holds),
                sorted(rank.owned.parted),
                rank.owned._leaving,
                rank.owned._gone,
                rank._apart,
            )
            for rank in self.ranks
        ]
        return repr((wires, messages, ranks, self.asked, self.dead, self.noticed))

    # --- how it ends ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Until nothing more happens by itself."""
        for link in self.cuts:
            for rank in link:
                self.notice(rank, *(link - {rank}))
        while self.messages:
            self.arrive(0)
        for _ in self.until_quiet():
            for rank in self.living:
                self.work(rank)
            for a, b in self.wires:
                self.deliver(a, b)

    def until_quiet(self) -> Iterator[int]:
        for turn in count():
            if not any(self.ranks[rank]._dropped or self.ranks[rank]._apart for rank in self.living) and not any(
                wire.frames for (_, b), wire in self.wires.items() if b not in self.dead
            ):
                return
            assert turn < 1000, "they talk without end"
            yield turn

    def holders(self, name: Reference) -> list[int]:
        """The ranks that hold a value, or will when a message arrives, and that its owner can hear."""
        ranks = [rank for rank in self.living for held in self.held[rank] if held.name == name and not held.is_doubtful]
        ranks += [message.to for message in self.messages if message.name == name and not self.is_doubtful(message)]
        return [rank for rank in ranks if not self.is_cut(rank, name.owner)]

    def check(self) -> None:
        """What somebody holds is still there."""
        for name in self.asked:
            if name.owner not in self.dead and name not in self.ranks[name.owner].owned._entries:
                assert not self.holders(name), name

    def check_end(self) -> None:
        """Each value that somebody holds is there, and no other; and when nobody does, nothing is left."""
        self.settle()
        self.check()
        for rank in self.living:
            held = {
                held.name
                for holder in self.living
                for held in self.held[holder]
                if held.name.owner == rank and not self.is_cut(holder, rank)
            }
            assert set(self.ranks[rank].owned._entries) == held
        for held in self.held:
            held.clear()
        self.settle()
        assert [len(self.ranks[rank].owned) for rank in self.living] == [0] * len(self.living)
