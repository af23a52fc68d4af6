"""Who sends which slice to whom, and when: every algorithm as a list of steps, with no I/O.

The steps are made by each rank alone, from its rank, the world size and the count. Two rules hold between the
steps of all ranks, and a new algorithm must keep them: a rank expects the messages of another in the order and with the
lengths in which they are sent; and no rank waits for something that waits for it, even if nothing is buffered between
ranks. Empty slices are sent like any other, so that neither side has to guess.

Arguments are not checked here: ranks and roots are a group's, counts are sizes of arrays, arities are a `Strategy`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, pairwise
from typing import Final, NamedTuple

from ringfort.errors import InvalidArgumentError

Span = tuple[int, int]
"""`(start, stop)`, in elements unless the function says otherwise."""

TreePlace = tuple[int | None, tuple[int, ...]]
"""A rank's place in a tree: its parent (`None` at the root) and its children."""

_REMEMBERED: Final = 256
"""Lists of steps that are kept for each algorithm. Programs repeat a few sizes; making a list costs microseconds."""


class Step(NamedTuple):
    """Send `x[out]` to `dst` while receiving `x[into]` from `src`; `None` where a half is missing.

    The two spans of a step never overlap, so the two halves may run in any order or at once.
    """

    dst: int | None
    out: Span | None
    src: int | None
    into: Span | None
    reduces: bool = False
    """Whether what arrives is reduced into `x[into]` or replaces it."""
    finish: Span | None = None
    """After this step `into`, which this then is, holds the whole reduction, here and nowhere else: the op's closing
    scale is due."""


def split(count: int, parts: int) -> list[Span]:
    """Split `count` elements into `parts` neighbouring spans; the first spans take the remainder, one element each."""
    size, remainder = divmod(count, parts)
    edges = [part * size + min(part, remainder) for part in range(parts + 1)]
    return list(pairwise(edges))


# --- rings ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=_REMEMBERED)
def ring_all_reduce(rank: int, world_size: int, count: int, ring: tuple[int, ...] = ()) -> tuple[Step, ...]:
    """Reduce-scatter and then all-gather round the ring, in place. Each rank sends 2(n-1)/n of the data.

    `ring` is the order in which the ring visits the ranks; that of their numbers where it is empty.
    """
    parts = split(count, world_size)
    place, left, right = neighbours(rank, world_size, ring)
    steps: list[Step] = []
    for back in range(1, world_size):
        into = parts[(place - back - 1) % world_size]
        last = back == world_size - 1
        steps.append(Step(right, parts[(place - back) % world_size], left, into, True, into if last else None))
    # The rank at place p now has the whole of part p, which is where an all-gather begins.
    order = [parts[(place - back) % world_size] for back in range(world_size)]
    steps.extend(Step(right, out, left, into) for out, into in pairwise(order))
    return tuple(steps)


def ring_all_gather(rank: int, world_size: int, ring: tuple[int, ...] = ()) -> list[Step]:
    """Each rank's part to every rank, passed on round the ring. Spans are in parts: part `p` is `(p, p + 1)`."""
    place, left, right = neighbours(rank, world_size, ring)
    ring = ring or tuple(range(world_size))
    order = [ring[(place - back) % world_size] for back in range(world_size)]
    return [Step(right, (a, a + 1), left, (b, b + 1)) for a, b in pairwise(order)]


def neighbours(rank: int, world_size: int, ring: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the place of `rank` in the ring, and the ranks before and after it."""
    if not ring:
        return rank, (rank - 1) % world_size, (rank + 1) % world_size
    if sorted(ring) != list(range(world_size)):
        raise InvalidArgumentError("ring", ring, f"must contain each of the {world_size} ranks once")
    place = ring.index(rank)
    return place, ring[place - 1], ring[(place + 1) % world_size]


# --- halving and doubling ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=_REMEMBERED)
def halving_doubling_all_reduce(rank: int, world_size: int, count: int) -> tuple[Step, ...]:
    """Reduce-scatter by halves and then all-gather by doubles, in place: 2 log2(n) steps instead of a ring's 2(n-1).

    The pairing needs a power of two. The ranks beyond the largest one reduce all they have into a partner first and get
    a copy of the result last.
    """
    whole = (0, count)
    helper, partners = doubling_all_reduce(rank, world_size)
    if helper is not None and not partners:
        return (Step(helper, whole, None, None), Step(None, None, helper, whole))
    parts = split(count, 1 << len(partners))

    def reach(member: int, partner: int) -> Span:
        # What `member` holds once the pairs are as far apart as this rank and `partner`: its aligned group of parts.
        distance = rank ^ partner
        first = member & -distance
        return parts[first][0], parts[first + distance - 1][1]

    steps = [] if helper is None else [Step(None, None, helper, whole, True)]
    for partner in reversed(partners):
        kept, is_last = reach(rank, partner), partner == partners[0]
        steps.append(Step(partner, reach(partner, partner), partner, kept, True, kept if is_last else None))
    steps.extend(Step(partner, reach(rank, partner), partner, reach(partner, partner)) for partner in partners)
    if helper is not None:
        steps.append(Step(helper, whole, None, None))
    return tuple(steps)


@lru_cache(maxsize=_REMEMBERED)
def doubling_all_reduce(rank: int, world_size: int) -> tuple[int | None, tuple[int, ...]]:
    """For arrays so small that only the number of steps counts: partners at doubling distances exchange all they have.

    Returns the helper and the partners of `rank`. As above, the ranks beyond the largest power of two have no partners:
    they give all to a helper first and get the result last. A rank that has partners may be the helper of one of them.
    """
    core = 1 << (world_size.bit_length() - 1)
    if rank >= core:
        return rank - core, ()
    helped = rank + core if rank + core < world_size else None
    return helped, tuple(rank ^ (1 << bit) for bit in range(core.bit_length() - 1))


# --- hosts ------------------------------------------------------------------------------------------------------------


class HostSteps(NamedTuple):
    """The three phases of a hierarchical all-reduce, of one rank."""

    before: tuple[Step, ...] = ()
    """Reduce inside the host."""
    between: tuple[Step, ...] = ()
    """Ring with one rank of each other host."""
    after: tuple[Step, ...] = ()
    """Spread inside the host."""


def hierarchical_all_reduce(rank: int, hosts: tuple[int, ...], count: int) -> tuple[Step, ...]:
    """Reduce inside each host, ring between hosts, and spread inside each host, in place."""
    before, between, after = hierarchical_phases(rank, hosts, count)
    return before + between + after


@lru_cache(maxsize=_REMEMBERED)
def hierarchical_phases(rank: int, hosts: tuple[int, ...], count: int) -> HostSteps:
    """Return the phases of `hierarchical_all_reduce`.

    `hosts` names for each rank the lowest on its host. The data is cut into as many parts as there are `lanes`: the
    i-th rank of every host collects part i from its neighbours, and rings it with the i-th of the others. So each byte
    crosses to another host as often as with one leader a host, and no rank does it all.
    """
    groups, rings = groups_of(hosts), lanes(hosts)
    at = next(place for place, group in enumerate(groups) if rank in group)
    group = groups[at]
    parts = split(count, len(rings))
    own = group.index(rank)
    holds = own < len(parts)
    meetings = [((own + k) % len(group), (own - k) % len(group)) for k in range(1, len(group))]
    before: list[Step] = []
    for turn, (to, of) in enumerate(meetings, start=2):
        is_last = turn == len(group) and len(groups) == 1
        dst, out = (group[to], parts[to]) if to < len(parts) else (None, None)
        src, into = (group[of], parts[own]) if holds else (None, None)
        before.append(Step(dst, out, src, into, holds, into if is_last else None))
    between: list[Step] = []
    if holds:
        start, stop = parts[own]
        steps = ring_all_reduce(at, len(groups), stop - start)
        between = [_moved(step, rings[own], start) for step in steps]
    after: list[Step] = []
    for to, of in meetings:
        dst, out = (group[to], parts[own]) if holds else (None, None)
        src, into = (group[of], parts[of]) if of < len(parts) else (None, None)
        after.append(Step(dst, out, src, into))
    return HostSteps(_met(before), tuple(between), _met(after))


@lru_cache(maxsize=_REMEMBERED)
def lanes(hosts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the rings between hosts: the i-th has the i-th rank of every host. There are as many as the smallest host
    has ranks."""
    return tuple(zip(*groups_of(hosts), strict=False))


def _met(steps: list[Step]) -> tuple[Step, ...]:
    return tuple(step for step in steps if step.dst is not None or step.src is not None)


def host_links(rank: int, hosts: tuple[int, ...], root: int, *, is_pipelined: bool) -> TreePlace:
    """Return the place of `rank` in a tree from `root` that enters every other host once.

    What goes in one piece takes as few hops as can be: a tree of one leader a host, and one inside each host below its
    leader. What goes in many, down a pipe, is best passed on once by everybody: a chain through one host after the
    other.
    """
    groups = [sorted(group, key=lambda member: member != root) for group in groups_of(hosts)]
    groups.sort(key=lambda group: group[0] != root)
    if is_pipelined:
        return _links_in([member for group in groups for member in group], rank, 1)
    group = next(group for group in groups if rank in group)
    parent, inside = _links_in(group, rank, 2)
    if rank != group[0]:
        return parent, inside
    parent, others = _links_in([leader for leader, *_ in groups], rank, 2)
    return parent, others + inside  # the longer way first


def groups_of(hosts: tuple[int, ...]) -> list[list[int]]:
    """Return the ranks of each host."""
    return [[member for member, host in enumerate(hosts) if host == leader] for leader in sorted(set(hosts))]


def _links_in(order: list[int], rank: int, arity: int) -> TreePlace:
    """Return the links of `rank` in the tree that `order` fills level by level."""
    place = order.index(rank)
    first = arity * place + 1
    return None if place == 0 else order[(place - 1) // arity], tuple(order[first : first + arity])


def _moved(step: Step, members: tuple[int, ...], start: int) -> Step:
    """Return a step of a plan for some ranks and a part of the data, as one of the whole."""

    def span(part: Span | None) -> Span | None:
        return None if part is None else (part[0] + start, part[1] + start)

    dst = None if step.dst is None else members[step.dst]
    src = None if step.src is None else members[step.src]
    return Step(dst, span(step.out), src, span(step.into), step.reduces, span(step.finish))


# --- trees ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=_REMEMBERED)
def tree_links(rank: int, world_size: int, root: int, arity: int) -> TreePlace:
    """Return the links of `rank` in a tree that is filled level by level. Arity 1 is a chain, `world_size - 1` a
    star."""
    return _links_in([*range(root, world_size), *range(root)], rank, arity)


def tree_all_reduce(rank: int, world_size: int, count: int, arity: int, block: int) -> Iterator[Step]:
    """Reduce up the tree to rank 0 and broadcast down again, in place, in blocks of `block` elements."""
    links = tree_links(rank, world_size, 0, arity)
    return chain(reduce_up(links, count, block), broadcast_down(links, count, block))


def reduce_up(links: TreePlace, count: int, block: int) -> Iterator[Step]:
    """Up a tree to its root with reduces, in place: the nodes on the way hold partial reductions when it is over.

    A node sends on block b-1 while it receives block b, and touches no other; so one that must keep its own array can
    run this on a scratch of two blocks.
    """
    parent, children = links
    ready: Span | None = None  # reduced from every child, and not yet sent on
    for span in _blocks(count, block):
        if parent is not None and not children:
            yield Step(parent, span, None, None)
            continue
        for child in children:
            finish = span if parent is None and child == children[-1] else None
            yield Step(None if ready is None else parent, ready, child, span, True, finish)
            ready = None
        ready = None if parent is None else span
    if ready is not None:
        yield Step(parent, ready, None, None)


def broadcast_down(links: TreePlace, count: int, block: int) -> Iterator[Step]:
    """From the root down a tree, in place, in blocks of `block` elements. A count of 0 is one empty message an edge."""
    parent, children = links
    ready: Span | None = None  # received, and not yet sent on
    for span in _blocks(count, block):
        if parent is None:
            yield from (Step(child, span, None, None) for child in children)
            continue
        first, *others = children if ready is not None and children else (None,)
        yield Step(first, None if first is None else ready, parent, span)
        yield from (Step(child, ready, None, None) for child in others)
        ready = span
    if ready is not None:
        yield from (Step(child, ready, None, None) for child in children)


def _blocks(count: int, block: int) -> Iterator[Span]:
    return ((start, min(start + block, count)) for start in range(0, max(count, 1), block))


# --- pairs ------------------------------------------------------------------------------------------------------------


def exchange_order(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Return `(dst, src)` of each step of a pairwise exchange: every rank meets every other once in each role."""
    return [((rank + k) % world_size, (rank - k) % world_size) for k in range(1, world_size)]
