"""Who holds a reference, however the messages about it overtake each other, and whoever dies meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from ringfort.rpc.protocol import Count, Lost, Reference
from tests.helpers.reference_world import World

RANKS = 4
OWNER, GIVER, TAKER, OTHER = range(RANKS)
Step = tuple[Any, ...]


def after(*history: Step, ranks: int = RANKS) -> World:
    """The world after these steps. No value is freed meanwhile that somebody holds."""
    world = World(ranks)
    play(world, *history)
    return world


def play(world: World, *history: Step) -> None:
    for name, *arguments in history:
        getattr(world, name)(*arguments)
        world.check()


# --- any history ------------------------------------------------------------------------------------------------------

rank = st.integers(0, RANKS - 1)
which = st.integers(0, 7)
steps = [
    st.tuples(st.just("create"), rank, rank),
    st.tuples(st.just("give"), rank, rank, which),
    st.tuples(st.just("arrive"), which),
    st.tuples(st.just("take_back"), which),
    st.tuples(st.just("drop"), rank, which),
    st.tuples(st.just("work"), rank),
    st.tuples(st.just("deliver"), rank, rank),
]
notice = st.tuples(st.just("notice"), rank, rank)


@given(st.lists(st.one_of(steps), max_size=60))
@example(
    [("create", 2, 1), ("give", 2, 1, 0), ("arrive", 0), ("give", 1, 1, 0), ("drop", 1, 0), ("work", 1)]
)  # on one link a message does not overtake the counts before it
def test_a_value_is_kept_while_anybody_holds_it_and_freed_when_nobody_does(history: list[Step]) -> None:
    after(*history).check_end()


@given(st.lists(st.one_of(*steps, notice, st.tuples(st.just("kill"), rank)), max_size=60))
def test_it_is_so_for_those_that_live_whoever_dies(history: list[Step]) -> None:
    after(*history).check_end()


@given(st.lists(st.one_of(*steps, notice, st.tuples(st.just("cut"), rank, rank)), max_size=60))
def test_it_is_so_for_those_that_are_connected_whatever_connection_breaks(history: list[Step]) -> None:
    after(*history).check_end()


# --- every order of events when a rank dies that passes a reference on ------------------------------------------------

CREATES: list[Step] = [("create", GIVER, OWNER)]
HAS_IT: list[Step] = [
    *[("create", OWNER, OWNER), ("give", OWNER, GIVER, 0), ("arrive", 0)],
    *[("drop", OWNER, 0), ("work", OWNER)],
]
PASSES_ON: list[Step] = [("give", GIVER, TAKER, 0)]
TO_OWNER: list[Step] = [("give", GIVER, OWNER, 0)]
LETS_GO: list[Step] = [("drop", GIVER, 0), ("work", GIVER)]


def possible(world: World, program: list[Step]) -> Iterator[Step]:
    """What may happen next, if this is what the giver has still to do."""
    if GIVER not in world.dead:
        yield ("kill", GIVER)
        yield from program[:1]
    for rank in (OWNER, TAKER):
        if world.is_cut(rank, GIVER) and (rank, GIVER) not in world.noticed:
            yield ("notice", rank, GIVER)
        if world.ranks[rank]._dropped or world.ranks[rank]._apart:
            yield ("work", rank)
        if world.held[rank]:
            yield ("drop", rank, 0)
    for (a, b), wire in world.wires.items():
        if wire.frames and b not in world.dead:
            yield ("deliver", a, b)
    if world.messages:
        yield ("arrive", 0)


@pytest.mark.parametrize(
    ("before", "program"),
    [
        ([], CREATES + PASSES_ON + LETS_GO),
        ([], CREATES + TO_OWNER + LETS_GO),
        (HAS_IT, PASSES_ON + LETS_GO),
    ],
    ids=["it is the creator", "to the owner", "it is not the creator"],
)
def test_nothing_is_left_and_nothing_is_freed_too_early(before: list[Step], program: list[Step]) -> None:
    seen: set[object] = set()
    ends = 0
    ways: list[tuple[list[Step], list[Step]]] = [(before, program)]
    while ways:
        history, left = ways.pop()
        world = after(*history, ranks=3)
        if (state := (len(left), world.state())) in seen:
            continue
        seen.add(state)
        steps = list(possible(world, left))
        ways += [([*history, step], left[1:] if left[:1] == [step] else left) for step in steps]
        if not steps:
            ends += 1
            world.check_end()
    assert ends > 1


# --- rarer orders -----------------------------------------------------------------------------------------------------


def test_a_rank_that_passes_a_reference_on_twice_and_dies() -> None:
    world = after(*HAS_IT, *PASSES_ON, *PASSES_ON, ("deliver", GIVER, OWNER), ("arrive", 0), ("arrive", 0))
    play(
        world, ("drop", TAKER, 0), ("work", TAKER), ("deliver", TAKER, OWNER)
    )  # one rise and one fall: they cancel out
    play(world, ("kill", GIVER), ("notice", OWNER, GIVER), ("notice", OTHER, GIVER), ("deliver", OTHER, OWNER))
    play(world, ("work", OWNER))
    world.check_end()


def test_a_rank_that_dies_before_it_has_lost_the_one_that_gave_it_a_reference() -> None:
    world = after(*HAS_IT, *PASSES_ON, ("deliver", GIVER, OWNER), ("arrive", 0), ("kill", GIVER), ("kill", TAKER))
    play(world, ("notice", OWNER, GIVER), ("notice", OWNER, TAKER))
    assert len(world.ranks[OWNER].owned) == 1  # the last may have it of either
    world.check_end()


def test_the_last_of_a_chain_keeps_the_value_if_those_before_it_die() -> None:
    """The owner has heard of the first alone."""
    world = after(*HAS_IT, *PASSES_ON, ("arrive", 0), ("give", TAKER, OTHER, 0), ("arrive", 0))
    play(world, ("kill", GIVER), ("notice", OWNER, GIVER), ("notice", OTHER, GIVER), ("deliver", OTHER, OWNER))
    play(world, ("work", OWNER), ("kill", TAKER), ("notice", OWNER, TAKER))
    assert world.holders(Reference(OWNER, OWNER, 1)) == [OTHER]
    world.check_end()


def test_the_last_of_a_chain_keeps_the_value_if_the_one_before_it_dies_and_the_first_lets_go() -> None:
    """The owner has heard of the last but one only when that one was lost."""
    world = after(*HAS_IT, *PASSES_ON, *LETS_GO, ("arrive", 0), ("give", TAKER, OTHER, 0), ("arrive", 0))
    play(world, ("kill", TAKER), ("notice", OWNER, TAKER), ("deliver", GIVER, OWNER), ("deliver", GIVER, OWNER))
    assert world.holders(Reference(OWNER, OWNER, 1)) == [OTHER]
    world.check_end()


def test_a_reference_of_an_owner_that_the_giver_has_lost_is_counted_by_the_receiver() -> None:
    world = after(*HAS_IT, ("give", GIVER, OTHER, 0), ("arrive", 0), ("cut", GIVER, OWNER), ("notice", GIVER, OWNER))
    play(world, ("deliver", GIVER, TAKER), ("work", TAKER), *PASSES_ON, ("arrive", 0))
    world.settle()
    world.drop(OTHER, 0)
    world.settle()
    assert world.ranks[OWNER].owned._entries[Reference(OWNER, OWNER, 1)].counts == {(TAKER, TAKER): 1}
    world.check_end()


def test_a_rank_that_is_lost_holds_nothing_once_all_others_have_lost_it_and_never_will_again() -> None:
    world = after(*HAS_IT, *LETS_GO, ("kill", GIVER), ("notice", OWNER, GIVER))
    owner = world.ranks[OWNER].owned
    for other in (TAKER, OTHER):
        assert len(owner) == 1
        play(world, ("notice", other, GIVER), ("deliver", other, OWNER), ("work", OWNER))
    assert len(owner) == 0
    world.create(TAKER, OWNER)
    world.ranks[TAKER].give([Reference(OWNER, TAKER, 1)], GIVER)
    world.settle()
    assert owner._entries[Reference(OWNER, TAKER, 1)].counts == {(TAKER, TAKER): 1}


# --- what is no rank's to say -----------------------------------------------------------------------------------------


def test_a_count_of_what_another_rank_owns_is_ignored() -> None:
    references = World(RANKS).ranks[OWNER]
    assert references.hear(Count(Reference(OTHER, GIVER, 1), GIVER, GIVER, 1), GIVER) == ""
    assert len(references.owned) == 0


@pytest.mark.parametrize("ranks", [(RANKS, GIVER), (GIVER, RANKS)])
def test_a_holder_or_giver_that_is_no_rank_is_refused(ranks: tuple[int, int]) -> None:
    references = World(RANKS).ranks[OWNER]
    told = Count(Reference(OWNER, GIVER, 1), *ranks, 1)
    assert references.hear(told, GIVER) == "it sent a count for rank 4, which does not exist"
    assert len(references.owned) == 0


def test_the_loss_of_what_is_no_rank_is_refused() -> None:
    references = World(RANKS).ranks[OWNER]
    assert references.hear(Lost(RANKS), GIVER) == "it has lost rank 4, which does not exist"


def test_a_rank_that_says_that_it_has_lost_this_one_is_not_answered() -> None:
    references = World(RANKS).ranks[OWNER]
    assert references.hear(Lost(OWNER), GIVER) == ""
    assert not references._apart
