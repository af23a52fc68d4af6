"""Who holds a reference, however the messages about it overtake each other."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ringfort.rpc.inbound import Inbound
from ringfort.rpc.messages import Count, Reference
from ringfort.rpc.outbound import Outgoing
from ringfort.rpc.references import References, RRef

RANKS = 3


class Wire:
    """What one rank has told another of counts, in order."""

    is_open = True
    broken: str | None = None

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.frames: deque[bytes] = deque()

    def control(self, frame: bytes) -> None:
        self.frames.append(frame)

    def post(self, outgoing: Outgoing) -> None:
        raise AssertionError("only counts are sent")


class World:
    """Ranks that hold references, and messages on the way between them."""

    def __init__(self) -> None:
        self.wires = {(a, b): Wire(b) for a in range(RANKS) for b in range(RANKS)}
        self.soon: list[deque[Any]] = [deque() for _ in range(RANKS)]
        self.ranks = [
            References(rank, lambda peer, rank=rank: self.wires[rank, peer], self.soon[rank].append)
            for rank in range(RANKS)
        ]
        self.held: list[list[RRef]] = [[] for _ in range(RANKS)]
        self.messages: list[tuple[int, Reference]] = []
        self.owned: list[tuple[int, Reference]] = []
        self.ever: set[Reference] = set()  # what its owner has heard of once

    def create(self, creator: int, owner: int) -> None:
        rref = self.ranks[creator].new(owner)
        self.held[creator].append(rref)
        self.owned.append((owner, rref._name))

    def give(self, giver: int, to: int, which: int) -> None:
        if self.held[giver]:
            rref = self.held[giver][which % len(self.held[giver])]
            name = self.ranks[giver].giver(to)(rref)
            assert name is not None
            self.messages.append((to, name))

    def arrive(self, which: int) -> None:
        if self.messages:
            to, name = self.messages.pop(which % len(self.messages))
            self.held[to].append(self.ranks[to].taken(name))

    def drop(self, rank: int, which: int) -> None:
        if self.held[rank]:
            del self.held[rank][which % len(self.held[rank])]

    def work(self, rank: int) -> None:
        """What was left for the agent's thread."""
        if self.soon[rank]:
            self.soon[rank].popleft()()

    def deliver(self, a: int, b: int) -> None:
        """One count, on one wire."""
        if self.wires[a, b].frames:
            frame = self.wires[a, b].frames.popleft()
            inbound = Inbound(lambda _: True)
            inbound.want()[: len(frame)] = frame
            inbound.took(len(frame))
            (count,) = inbound.events
            assert isinstance(count, Count)
            self.ranks[b].count(count)

    def settle(self) -> None:
        while any(self.soon) or any(wire.frames for wire in self.wires.values()):
            for rank in range(RANKS):
                self.work(rank)
            for a, b in self.wires:
                self.deliver(a, b)

    def check(self) -> None:
        """What somebody holds, or will when a message arrives, and the owner has heard of, is still there."""
        heard = {name for _, name in self.owned if name in self.ranks[name.owner]._entries}
        for _, name in self.owned:
            holders = [rref for held in self.held for rref in held if rref._name == name]
            if (holders or any(one == name for _, one in self.messages)) and name in self.ever:
                assert name in heard, name
        self.ever |= heard


rank = st.integers(0, RANKS - 1)
which = st.integers(0, 7)
steps = st.one_of(
    st.tuples(st.just("create"), rank, rank),
    st.tuples(st.just("give"), rank, rank, which),
    st.tuples(st.just("arrive"), which),
    st.tuples(st.just("drop"), rank, which),
    st.tuples(st.just("work"), rank),
    st.tuples(st.just("deliver"), rank, rank),
)


@given(st.lists(steps, max_size=60))
def test_a_value_is_kept_while_anybody_holds_it_and_freed_when_nobody_does(history: list[tuple[Any, ...]]) -> None:
    world = World()
    for name, *arguments in history:
        getattr(world, name)(*arguments)
        world.check()
    while world.messages:
        world.arrive(0)
    world.settle()
    world.check()
    assert {name for _, name in world.owned if any(r._name == name for held in world.held for r in held)} == {
        name for references in world.ranks for name in references._entries
    }
    for held in world.held:
        held.clear()
    world.settle()
    assert [len(references) for references in world.ranks] == [0] * RANKS
