"""The plans of all ranks, run against each other in one process.

The simulator is the strictest network there is: nothing is buffered, a send ends only when its receiver takes it, and
the two sides must agree on every length. Elements carry whose contributions they hold, so a slice that is lost, reduced
twice or put in the wrong place cannot go unseen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice

import pytest
from hypothesis import given, strategies as st

from ringfort.collectives import algorithms
from ringfort.collectives.algorithms import Span, Step
from ringfort.errors import InvalidArgumentError

world_sizes = st.integers(1, 33)
counts = st.integers(0, 200)
arities = st.integers(1, 34)
blocks = st.integers(1, 210)


@dataclass(frozen=True)
class Element:
    """One element: its place, how often each rank's part is in it, and whether the closing scale was applied."""

    index: int
    ranks: tuple[int, ...]
    finished: bool = False

    def reduced(self, other: Element) -> Element:
        assert self.index == other.index
        assert not self.finished
        assert not other.finished, "a finished value was reduced"
        return Element(self.index, tuple(sorted(self.ranks + other.ranks)))


Memory = list[list[Element]]


def contributions(world_size: int, count: int) -> Memory:
    return [[Element(index, (rank,)) for index in range(count)] for rank in range(world_size)]


class Network:
    """Runs a plan a rank on `memory` until all are done, and counts what was sent."""

    def __init__(self, memory: Memory, plans: list[Iterable[Step]]) -> None:
        self.memory = memory
        self.plans = [iter(steps) for steps in plans]
        self.current = [next(steps, None) for steps in self.plans]
        self.sent: Counter[tuple[int, int]] = Counter()
        self.messages: Counter[tuple[int, int]] = Counter()
        self.finishes: Counter[int] = Counter()
        # The halves of each rank's current step that have not happened yet.
        self.sending = [False] * len(plans)
        self.receiving = [False] * len(plans)

    def run(self) -> Network:
        ready = list(range(len(self.plans)))
        for rank in ready:
            self._enter(rank)
        while ready:
            rank = ready.pop()
            step = self.current[rank]
            if step is None:
                continue
            ready += self._deliver(rank, step.dst)
            ready += self._deliver(step.src, rank)
        stuck = {rank: step for rank, step in enumerate(self.current) if step is not None}
        assert not stuck, f"deadlock or unmatched messages: {stuck}"
        return self

    def _enter(self, rank: int) -> None:
        step = self.current[rank]
        if step is None:
            return
        assert (step.dst is None) == (step.out is None)
        assert (step.src is None) == (step.into is None)
        assert step.dst is not None or step.src is not None
        assert rank not in (step.dst, step.src)
        if step.out is not None and step.into is not None:
            assert max(step.out[0], step.into[0]) >= min(step.out[1], step.into[1]), f"{step} reads what it writes"
        self.sending[rank] = step.dst is not None
        self.receiving[rank] = step.src is not None

    def _deliver(self, source: int | None, target: int | None) -> list[int]:
        """Move the message from `source` to `target` if both are at it; the ranks whose step that ended."""
        if source is None or target is None:
            return []
        giver, taker = self.current[source], self.current[target]
        if giver is None or taker is None or giver.dst != target or taker.src != source:
            return []
        if not (self.sending[source] and self.receiving[target]):
            return []
        assert giver.out is not None
        assert taker.into is not None
        arriving = self.memory[source][slice(*giver.out)]
        there = self.memory[target][slice(*taker.into)]
        assert giver.out[1] - giver.out[0] == taker.into[1] - taker.into[0] == len(arriving) == len(there)
        if taker.reduces:
            arriving = [old.reduced(new) for old, new in zip(there, arriving, strict=True)]
        self.memory[target][slice(*taker.into)] = arriving
        self.sent[source, target] += len(arriving)
        self.messages[source, target] += 1
        self.sending[source] = self.receiving[target] = False
        return [rank for rank in (source, target) if self._advance(rank)]

    def _advance(self, rank: int) -> bool:
        step = self.current[rank]
        assert step is not None
        if self.sending[rank] or self.receiving[rank]:
            return False
        if step.finish is not None:
            assert step.reduces
            assert step.finish == step.into
            self._finish(rank, step.finish)
        self.current[rank] = next(self.plans[rank], None)
        self._enter(rank)
        return True

    def _finish(self, rank: int, span: Span) -> None:
        for index in range(*span):
            element = self.memory[rank][index]
            assert element.ranks == tuple(range(len(self.plans))), f"finished too early: {element}"
            assert not element.finished
            self.memory[rank][index] = replace(element, finished=True)
            self.finishes[index] += 1


def check_all_reduce(world_size: int, count: int, make: Callable[[int], Iterable[Step]]) -> Network:
    memory = contributions(world_size, count)
    network = Network(memory, [make(rank) for rank in range(world_size)]).run()
    if world_size == 1:
        assert memory == contributions(1, count)
        return network
    # Bit-identical, and scaled once: each rank has the one finished value. A copy taken before the finish would differ.
    whole = [Element(index, tuple(range(world_size)), finished=True) for index in range(count)]
    assert memory == [whole] * world_size
    assert network.finishes == Counter(range(count))
    assert sum(network.sent.values()) == 2 * (world_size - 1) * count
    return network


# --- split ------------------------------------------------------------------------------------------------------------


@given(counts, st.integers(1, 40))
def test_split_covers_every_element_once_and_gives_the_remainder_to_the_first_parts(count: int, parts: int) -> None:
    spans = algorithms.split(count, parts)
    assert [index for span in spans for index in range(*span)] == list(range(count))
    lengths = [stop - start for start, stop in spans]
    assert len(lengths) == parts
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


# --- all-reduce -------------------------------------------------------------------------------------------------------


@given(world_sizes, counts)
def test_a_ring_leaves_the_whole_reduction_on_every_rank(world_size: int, count: int) -> None:
    network = check_all_reduce(world_size, count, lambda rank: algorithms.ring_all_reduce(rank, world_size, count))
    assert set(network.sent) == {(rank, (rank + 1) % world_size) for rank in range(world_size) if world_size > 1}
    assert set(network.messages.values()) <= {2 * (world_size - 1)}


@given(st.permutations(range(7)), counts)
def test_a_ring_may_visit_the_ranks_in_any_order(ring: list[int], count: int) -> None:
    order = tuple(ring)
    network = check_all_reduce(7, count, lambda rank: algorithms.ring_all_reduce(rank, 7, count, order))
    assert set(network.sent) == {(ring[place - 1], ring[place]) for place in range(7)}


@given(st.integers(2, 33), counts)
def test_every_rank_of_a_ring_sends_its_even_share(world_size: int, count: int) -> None:
    network = check_all_reduce(world_size, count, lambda rank: algorithms.ring_all_reduce(rank, world_size, count))
    most, least = max(network.sent.values()), min(network.sent.values())
    assert most - least <= 2
    assert most <= 2 * (count - count // world_size)


@given(world_sizes, counts)
def test_halving_and_doubling_leaves_the_whole_reduction_on_every_rank(world_size: int, count: int) -> None:
    check_all_reduce(world_size, count, lambda rank: algorithms.halving_doubling_all_reduce(rank, world_size, count))


@given(world_sizes)
def test_halving_and_doubling_takes_twice_log2_steps_and_two_more_for_odd_worlds(world_size: int) -> None:
    longest = max(len(algorithms.halving_doubling_all_reduce(rank, world_size, 64)) for rank in range(world_size))
    power = world_size.bit_length() - 1
    assert longest == 2 * power + (2 if world_size > 1 << power else 0)


@given(world_sizes, counts, arities, blocks)
def test_a_tree_leaves_the_whole_reduction_on_every_rank(world_size: int, count: int, arity: int, block: int) -> None:
    network = check_all_reduce(
        world_size, count, lambda rank: algorithms.tree_all_reduce(rank, world_size, count, arity, block)
    )
    assert set(network.sent.values()) <= {count}
    assert set(network.messages.values()) <= {max(1, -(-count // block))}
    assert len(network.sent) == 2 * (world_size - 1)


@st.composite
def spreads(draw: st.DrawFn) -> tuple[int, ...]:
    """For each of some ranks the lowest on its host: any spread, in any order."""
    places = draw(st.lists(st.integers(0, 5), min_size=1, max_size=20))
    return tuple(places.index(place) for place in places)


@given(spreads(), counts)
def test_hosts_leave_the_whole_reduction_on_every_rank_and_cross_as_seldom_as_a_ring_of_hosts(
    hosts: tuple[int, ...], count: int
) -> None:
    network = check_all_reduce(len(hosts), count, lambda rank: algorithms.hierarchical_all_reduce(rank, hosts, count))
    crossed = sum(sent for (a, b), sent in network.sent.items() if hosts[a] != hosts[b])
    assert crossed == 2 * (len(set(hosts)) - 1) * count


def test_ranks_of_even_hosts_share_the_way_between_them() -> None:
    hosts = (0, 0, 2, 2)
    network = check_all_reduce(4, 8, lambda rank: algorithms.hierarchical_all_reduce(rank, hosts, 8))
    between = dict.fromkeys([(0, 2), (2, 0), (1, 3), (3, 1)], 4)
    inside = dict.fromkeys([(0, 1), (1, 0), (2, 3), (3, 2)], 8)
    assert network.sent == between | inside


def test_ranks_of_uneven_hosts_leave_it_to_one_leader_a_host() -> None:
    hosts = (0, 1, 1, 1, 4, 4)
    network = check_all_reduce(6, 7, lambda rank: algorithms.hierarchical_all_reduce(rank, hosts, 7))
    assert {pair for pair in network.sent if hosts[pair[0]] != hosts[pair[1]]} == {(0, 1), (1, 4), (4, 0)}


def test_a_tree_of_a_billion_elements_is_planned_one_step_at_a_time() -> None:
    steps = list(islice(algorithms.tree_all_reduce(1, 7, 2**30, 2, 1), 6))
    assert steps == [
        Step(None, None, 3, (0, 1), True),
        Step(None, None, 4, (0, 1), True),
        Step(0, (0, 1), 3, (1, 2), True),
        Step(None, None, 4, (1, 2), True),
        Step(0, (1, 2), 3, (2, 3), True),
        Step(None, None, 4, (2, 3), True),
    ]


@st.composite
def hosts_of_ranks(draw: st.DrawFn) -> tuple[int, ...]:
    """For each rank the lowest on its host, hosts in any order."""
    of = draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
    return tuple(of.index(host) for host in of)


@given(hosts_of_ranks(), counts, blocks, st.booleans(), st.data())
def test_a_tree_over_hosts_reduces_and_broadcasts_and_enters_every_other_host_once(
    hosts: tuple[int, ...], count: int, block: int, is_pipelined: bool, data: st.DataObject
) -> None:
    n = len(hosts)
    root = data.draw(st.integers(0, n - 1))
    links = [algorithms.host_links(rank, hosts, root, is_pipelined=is_pipelined) for rank in range(n)]
    crossings = [(parent, rank) for rank, (parent, _) in enumerate(links) if parent is not None]
    crossings = [(a, b) for a, b in crossings if hosts[a] != hosts[b]]
    assert sorted(hosts[b] for _, b in crossings) == sorted(set(hosts) - {hosts[root]})
    if is_pipelined:
        assert all(len(children) <= 1 for _, children in links), "everybody passes it on once"
    up = Network(contributions(n, count), [algorithms.reduce_up(link, count, block) for link in links]).run()
    assert [element.ranks for element in up.memory[root]] == [tuple(range(n))] * count
    down = Network(contributions(n, count), [algorithms.broadcast_down(link, count, block) for link in links]).run()
    assert all(memory == down.memory[root] for memory in down.memory)


def test_one_leader_a_host_hears_from_the_root_before_the_roots_own_host() -> None:
    hosts = (0, 1, 0, 1, 0)
    links = [algorithms.host_links(rank, hosts, 2, is_pipelined=False) for rank in range(5)]
    assert links == [(2, ()), (2, (3,)), (None, (1, 0, 4)), (1, ()), (2, ())]
    chain = [algorithms.host_links(rank, hosts, 2, is_pipelined=True) for rank in range(5)]
    assert chain == [(2, (4,)), (4, (3,)), (None, (0,)), (1, ()), (0, (1,))]


# --- trees ------------------------------------------------------------------------------------------------------------


@given(world_sizes, arities, st.data())
def test_the_links_of_a_tree_agree_from_both_ends_and_reach_every_rank(
    world_size: int, arity: int, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, world_size - 1))
    links = [algorithms.tree_links(rank, world_size, root, arity) for rank in range(world_size)]
    assert links[root][0] is None
    for rank, (_, children) in enumerate(links):
        assert len(children) <= arity
        assert all(links[child][0] == rank for child in children)
    reached = [root]
    for rank in reached:
        reached += links[rank][1]
    assert sorted(reached) == list(range(world_size))


def test_arity_one_is_a_chain_and_the_widest_arity_a_star() -> None:
    assert [algorithms.tree_links(rank, 4, 2, 1) for rank in range(4)] == [(3, (1,)), (0, ()), (None, (3,)), (2, (0,))]
    assert [algorithms.tree_links(rank, 4, 2, 3) for rank in range(4)] == [(2, ()), (2, ()), (None, (3, 0, 1)), (2, ())]


@given(world_sizes, counts, arities, blocks, st.data())
def test_a_tree_reduce_leaves_the_finished_reduction_at_the_root(
    world_size: int, count: int, arity: int, block: int, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, world_size - 1))
    memory = contributions(world_size, count)
    plans = [
        algorithms.reduce_up(algorithms.tree_links(rank, world_size, root, arity), count, block)
        for rank in range(world_size)
    ]
    network = Network(memory, list(plans)).run()
    everyone = tuple(range(world_size))
    assert memory[root] == [Element(index, everyone, finished=world_size > 1) for index in range(count)]
    assert len(network.sent) == world_size - 1
    assert set(network.sent.values()) <= {count}


@given(st.integers(2, 33), st.integers(1, 200), arities, blocks)
def test_a_node_on_the_way_up_touches_only_two_neighbouring_blocks_at_a_time(
    world_size: int, count: int, arity: int, block: int
) -> None:
    for rank in range(1, world_size):
        latest = 0
        for step in algorithms.reduce_up(algorithms.tree_links(rank, world_size, 0, arity), count, block):
            touched = [span[0] // block for span in (step.out, step.into) if span is not None]
            assert min(touched) >= latest - 1
            assert max(touched) <= latest + 1
            latest = max(latest, *touched)


@given(world_sizes, counts, arities, blocks, st.data())
def test_a_broadcast_gives_every_rank_the_roots_elements_once(
    world_size: int, count: int, arity: int, block: int, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, world_size - 1))
    memory = contributions(world_size, count)
    plans = [
        algorithms.broadcast_down(algorithms.tree_links(rank, world_size, root, arity), count, block)
        for rank in range(world_size)
    ]
    network = Network(memory, list(plans)).run()
    assert memory == [[Element(index, (root,)) for index in range(count)]] * world_size
    assert Counter(target for _, target in network.sent) == Counter(set(range(world_size)) - {root})
    assert set(network.sent.values()) <= {count}
    assert set(network.messages.values()) <= {max(1, -(-count // block))}


def test_a_node_of_a_broadcast_receives_a_block_while_it_sends_the_one_before() -> None:
    assert list(algorithms.broadcast_down(algorithms.tree_links(1, 5, 0, 2), 5, 2)) == [
        Step(None, None, 0, (0, 2)),
        Step(3, (0, 2), 0, (2, 4)),
        Step(4, (0, 2), None, None),
        Step(3, (2, 4), 0, (4, 5)),
        Step(4, (2, 4), None, None),
        Step(3, (4, 5), None, None),
        Step(4, (4, 5), None, None),
    ]


# --- gathers and exchanges ------------------------------------------------------------------------------------------


@given(world_sizes)
def test_an_all_gather_brings_each_rank_every_part_once(world_size: int) -> None:
    memory = [[Element(part, (rank,)) for part in range(world_size)] for rank in range(world_size)]
    network = Network(memory, [algorithms.ring_all_gather(rank, world_size) for rank in range(world_size)]).run()
    assert memory == [[Element(part, (part,)) for part in range(world_size)]] * world_size
    assert sum(network.sent.values()) == world_size * (world_size - 1)


@given(st.permutations(range(6)))
def test_an_all_gather_round_a_ring_of_another_order_still_puts_each_part_in_its_place(ring: list[int]) -> None:
    memory = [[Element(part, (rank,)) for part in range(6)] for rank in range(6)]
    network = Network(memory, [algorithms.ring_all_gather(rank, 6, tuple(ring)) for rank in range(6)]).run()
    assert memory == [[Element(part, (part,)) for part in range(6)]] * 6
    assert set(network.sent) == {(ring[place - 1], ring[place]) for place in range(6)}


@given(world_sizes)
def test_a_pairwise_exchange_meets_every_other_rank_once_each_way_and_both_sides_agree(world_size: int) -> None:
    orders = [algorithms.exchange_order(rank, world_size) for rank in range(world_size)]
    for rank, order in enumerate(orders):
        others = sorted(set(range(world_size)) - {rank})
        assert sorted(dst for dst, _ in order) == others
        assert sorted(src for _, src in order) == others
        assert all(orders[dst][k][1] == rank for k, (dst, _) in enumerate(order))


def test_a_world_of_one_moves_nothing() -> None:
    assert algorithms.ring_all_reduce(0, 1, 5) == ()
    assert algorithms.halving_doubling_all_reduce(0, 1, 5) == ()
    assert algorithms.hierarchical_all_reduce(0, (0,), 5) == ()
    assert list(algorithms.tree_all_reduce(0, 1, 5, 2, 2)) == []
    assert list(algorithms.broadcast_down(algorithms.tree_links(0, 1, 0, 2), 5, 2)) == []
    assert algorithms.ring_all_gather(0, 1) == []
    assert algorithms.exchange_order(0, 1) == []


def test_a_ring_without_each_rank_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="ring="):
        algorithms.ring_all_reduce(0, 3, 1, (0, 1, 1))


@given(st.integers(1, 65))
def test_doubling_partners_agree_and_reach_everyone(world_size: int) -> None:
    plans = [algorithms.doubling_all_reduce(rank, world_size) for rank in range(world_size)]
    held = [{rank} for rank in range(world_size)]
    for rank, (helper, partners) in enumerate(plans):
        if helper is not None:
            assert plans[helper][0] == rank
            if not partners and world_size > 1:
                assert held[helper].isdisjoint(held[rank])
                held[helper] |= held[rank]
    for turn in range(max(len(partners) for _, partners in plans)):
        before = [set(one) for one in held]
        for rank, (_, partners) in enumerate(plans):
            if partners:
                partner = partners[turn]
                assert plans[partner][1][turn] == rank
                assert before[rank].isdisjoint(before[partner])
                held[rank] = before[rank] | before[partner]
    assert all(held[rank] == set(range(world_size)) for rank, (_, partners) in enumerate(plans) if partners)
