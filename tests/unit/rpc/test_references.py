"""Who holds a reference, however the messages about it overtake each other."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from ringfort.rpc.protocol import Count, Inbound, Reference
from ringfort.rpc.references import References, RRef
from ringfort.rpc.requests import Failure

RANKS = 3


class Wire:
    """What one rank has told another of counts, in order."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.sent = self.arrived = 0

    def post(self, frame: bytes) -> None:
        self.frames.append(frame)
        self.sent += 1


class World:
    """Ranks that hold references, and messages on the way between them."""

    def __init__(self) -> None:
        self.wires = {(a, b): Wire() for a in range(RANKS) for b in range(RANKS)}
        self.woken = [False] * RANKS
        self.ranks = [
            References(
                rank,
                lambda peer, frame, rank=rank: self.wires[rank, peer].post(frame),
                lambda rank=rank: self.wake(rank),
                world_size=RANKS,
                most=1 << 16,
            )
            for rank in range(RANKS)
        ]
        self.held: list[list[RRef]] = [[] for _ in range(RANKS)]
        self.messages: list[tuple[int, int, Reference, int]] = []
        """From whom, to whom, what, and how many counts went before it on its link."""
        self.owned: list[tuple[int, Reference]] = []
        self.ever: set[Reference] = set()  # what its owner has heard of once

    def wake(self, rank: int) -> None:
        self.woken[rank] = True

    def create(self, creator: int, owner: int) -> None:
        rref = self.ranks[creator].new(owner)
        self.held[creator].append(rref)
        self.owned.append((owner, rref._name))

    def give(self, giver: int, to: int, which: int) -> None:
        if self.held[giver]:
            rref = self.held[giver][which % len(self.held[giver])]
            name = self.ranks[giver].name_of(rref)
            assert name is not None
            self.ranks[giver].give([name], to)
            self.messages.append((giver, to, name, self.wires[giver, to].sent))

    def arrive(self, which: int) -> None:
        if self.messages:
            giver, to, name, behind = self.messages.pop(which % len(self.messages))
            while self.wires[giver, to].arrived < behind:
                self.deliver(giver, to)
            self.held[to].append(RRef(self.ranks[to], name))

    def drop(self, rank: int, which: int) -> None:
        if self.held[rank]:
            del self.held[rank][which % len(self.held[rank])]

    def work(self, rank: int) -> None:
        """What the agent's thread does when it is woken."""
        self.woken[rank] = False
        self.ranks[rank].let_go()

    def deliver(self, a: int, b: int) -> None:
        """One count, on one wire."""
        if self.wires[a, b].frames:
            frame = self.wires[a, b].frames.popleft()
            self.wires[a, b].arrived += 1
            inbound = Inbound(lambda _: True)
            inbound.want()[: len(frame)] = frame
            inbound.took(len(frame))
            (count,) = inbound.events
            assert isinstance(count, Count)
            assert self.ranks[b].count(count, a) == ""

    def settle(self) -> None:
        while (
            any(self.woken)
            or any(references._dropped for references in self.ranks)
            or any(wire.frames for wire in self.wires.values())
        ):
            for rank in range(RANKS):
                self.work(rank)
            for a, b in self.wires:
                self.deliver(a, b)

    def check(self) -> None:
        """What somebody holds, or will when a message arrives, and the owner has heard of, is still there."""
        heard = {name for _, name in self.owned if name in self.ranks[name.owner]._entries}
        for _, name in self.owned:
            holders = [rref for held in self.held for rref in held if rref._name == name]
            if (holders or any(one == name for _, _, one, _ in self.messages)) and name in self.ever:
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
@example(
    [("create", 2, 1), ("give", 2, 1, 0), ("arrive", 0), ("give", 1, 1, 0), ("drop", 1, 0), ("work", 1)]
)  # on one link a message does not overtake the counts before it
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


def test_a_rank_that_is_lost_holds_nothing_and_never_will_again() -> None:
    world = World()
    owner = world.ranks[1]
    world.create(0, 1)
    world.give(0, 2, 0)
    world.settle()
    world.drop(0, 0)
    world.settle()
    assert len(owner) == 1  # rank 2 has it
    owner.lost(2)
    assert len(owner) == 0
    world.create(0, 1)
    world.give(0, 2, 0)  # rank 0 has not heard of the death
    world.settle()
    assert len(owner) == 1
    world.drop(0, 0)
    world.settle()
    assert len(owner) == 0


def test_who_asks_for_what_a_lost_rank_was_about_to_ask_for_is_not_kept_waiting() -> None:
    owner = World().ranks[1]
    before, after = Reference(1, 0, 5), Reference(1, 0, 6)
    outcome = owner.outcome(before, 0)
    assert not outcome.done()
    owner.lost(0)
    for asked in (outcome, owner.outcome(after, 0)):
        assert isinstance(asked.result(0), Failure)
    assert len(owner) == 0


def test_who_gives_up_asking_leaves_nothing_behind_and_takes_nothing_from_those_who_hold() -> None:
    world = World()
    owner, unknown = world.ranks[1], Reference(1, 0, 99)
    owner.outcome(unknown, 0)
    owner.forget(unknown)
    assert len(owner) == 0
    world.create(0, 1)
    world.settle()
    (name,) = owner._entries
    owner.outcome(name, 0)
    owner.forget(name)
    assert len(owner) == 1


def test_a_count_of_what_another_rank_owns_is_ignored() -> None:
    world = World()
    assert world.ranks[1].count(Count(Reference(2, 0, 1), 0, 1), 0) == ""
    assert len(world.ranks[1]) == 0


# --- bounds -----------------------------------------------------------------------------------------------------------


def owner_of_rank_0(most: int) -> References:
    return References(0, lambda peer, frame: None, lambda: None, world_size=RANKS, most=most)


def test_a_rank_that_has_more_values_kept_than_it_may_is_full_until_it_lets_go_of_one() -> None:
    owner = owner_of_rank_0(2)
    names = [Reference(0, 1, number) for number in range(3)]
    for name in names:
        assert owner.count(Count(name, 1, 1), 1) == ""
    assert owner.is_full_for(1)
    assert not owner.is_full_for(2)
    owner.count(Count(names[0], 2, 1), 1)  # it passes one on, and that one is still of its asking
    owner.count(Count(names[0], 1, -1), 1)
    assert owner.is_full_for(1)
    owner.count(Count(names[0], 2, -1), 2)
    assert not owner.is_full_for(1)
    assert len(owner) == 2


def test_a_rank_that_goes_on_beyond_all_bounds_is_told_from_one_that_hears_of_it_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = owner_of_rank_0(2)
    monkeypatch.setattr("ringfort.rpc.references.SLACK", 3)
    wrong = [owner.count(Count(Reference(0, 1, number), 1, 1), 1) for number in range(100)]
    assert wrong == [""] * 5 + ["it keeps asking for values to be kept: max_references here is 2"] * 95
    assert len(owner) == 5
    assert owner.count(Count(Reference(0, 2, 1), 2, 1), 2) == ""  # another rank's are its own
    assert owner.count(Count(Reference(0, 1, 0), 2, 1), 1) == ""  # and so are those that it has


def test_a_holder_that_is_no_rank_is_refused() -> None:
    owner = owner_of_rank_0(2)
    assert owner.count(Count(Reference(0, 1, 1), RANKS, 1), 1) == "it sent a count for rank 3, which does not exist"
    assert len(owner) == 0


def test_a_rank_keeps_its_own_values_without_a_bound() -> None:
    owner = owner_of_rank_0(1)
    held = [owner.new(0) for _ in range(5)]
    assert not owner.is_full_for(0)
    assert len(owner) == len(held)
