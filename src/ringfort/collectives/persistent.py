"""Persistent all-reduces: everything that can be known beforehand is worked out once. In shared memory, and over links
where the algorithm is a chain of exchanges with one partner each, a run then takes as few instructions as it can. Over
links it sends the same messages as the algorithm that it stands for, so ranks may mix the two."""

from __future__ import annotations

from contextvars import Context
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from ringfort.backends.group import Group
from ringfort.collectives import algorithms, shared_memory
from ringfort.collectives.algorithms import Span
from ringfort.collectives.cost_model import DOUBLING_BYTES
from ringfort.collectives.plan import Run
from ringfort.collectives.shared_memory import Combine, SharedReducer
from ringfort.collectives.steps import BLOCK_BYTES
from ringfort.config import KIB, AllReduceStrategy, Shape
from ringfort.errors import DistributedError
from ringfort.transport.arena import Arena
from ringfort.transport.frames import MAX_FRAGMENT
from ringfort.transport.reducer import Array

_VIEWED: Final = 32 * KIB
"""Bytes from which a view of them is quicker than two copies: one of them, and one behind their header."""


class _Block(NamedTuple):
    """Where on the arena a rank finds and puts what, of an array that is one block, in one of two turns."""

    before: Array
    """For its own elements that lie before the slice that it reduces."""
    after: Array
    """For those behind it."""
    theirs: tuple[Array, ...]
    """Its slice, as the others have it, in the order of their ranks."""
    result: Array
    """For its slice, reduced."""
    results: tuple[tuple[slice, Array], ...]
    """The others' slices, reduced, and where they belong."""

    @classmethod
    def of(cls, slots: tuple[Array, ...], rank: int) -> _Block:
        spans = [slice(*span) for span in pairwise(shared_memory.edges_of(slots[0].size, len(slots)))]
        own, others = spans[rank], [r for r in range(len(slots)) if r != rank]
        return cls(
            slots[rank][: own.start],
            slots[rank][own.stop :],
            tuple(slots[r][own] for r in others),
            slots[rank][own],
            tuple((spans[r], slots[r][spans[r]]) for r in others),
        )


def over_arena(group: Group, arena: Arena, call: bytes, size: int, reducer: SharedReducer) -> Run:
    """For ranks that share memory."""
    nbytes = size * reducer.dtype.itemsize
    if nbytes <= shared_memory.SMALL_BYTES:
        return _in_slots(group, arena, call, size, reducer)
    if nbytes <= arena.slot:
        return _in_one_block(group, arena, call, size, reducer)

    def run(flat: Array, timeout: float | None = None) -> None:
        with arena:
            shared_memory.all_reduce(arena, flat, reducer, group.envelope(call, timeout))

    return run


def over_arena_apart(group: Group, arena: Arena, call: bytes, size: int, reducer: SharedReducer) -> Run | None:
    """For ranks that share memory, with a second array that is reduced into the first; None if a copy of the second is
    no slower."""
    if size * reducer.dtype.itemsize <= arena.slot:
        return None

    def run(flat: Array, source: Array, timeout: float | None = None) -> None:
        given: Array | None = source
        if np.may_share_memory(flat, source):  # a block's result would overwrite what is read for the next one
            flat[...] = source
            given = None
        with arena:
            shared_memory.all_reduce(arena, flat, reducer, group.envelope(call, timeout), given)

    return run


def _in_slots(group: Group, arena: Arena, call: bytes, size: int, reducer: SharedReducer) -> Run:
    """Small arrays: every rank puts its own into its slot, and reduces all of them in the order of the ranks. A
    function with all that it needs in its own scope: as a method it took half as long again."""
    engine, table, meet, number = arena.engine, arena.engine.table, arena.meeting(call), group.next_operation
    turns = [(slots, slots[arena.rank]) for slots in arena.slots(reducer.dtype, size)]
    combine, is_pair = reducer.closing, arena.world_size == 2
    # A partial's own call would cost a tenth of the addition.
    inside, function = (combine.func, *combine.args) if isinstance(combine, partial) else (Context().run, combine)

    def run(flat: Array, timeout: float | None = None) -> None:
        try:  # what `with arena` does, which would cost as much as a small copy
            operation = number()
            if table.has_trouble:
                engine.check(group.envelope_of(operation, call, timeout))
            arena.turn = turn = arena.turn ^ 1
            slots, own = turns[turn]
            own[...] = flat
            if not meet(operation):
                arena.wait_signed(group.envelope_of(operation, call, timeout))
            if is_pair:
                first, second = slots
                inside(function, first, second, flat)
            else:
                reducer(slots, flat)
        except DistributedError:
            raise
        except BaseException:
            arena.abandon()
            raise

    return run


def _in_one_block(group: Group, arena: Arena, call: bytes, size: int, reducer: SharedReducer) -> Run:
    """Arrays that fit a slot: every rank reduces one slice."""
    engine, rank, meet = arena.engine, arena.rank, arena.meeting(call)
    blocks = [_Block.of(slots, rank) for slots in arena.slots(reducer.dtype, size)]

    def run(flat: Array, timeout: float | None = None) -> None:
        with arena:
            operation = group.next_operation()
            if engine.table.has_trouble:
                engine.check(group.envelope_of(operation, call, timeout))
            block = blocks[arena.next_turn()]
            start, end = block.before.size, size - block.after.size
            own = flat[start:end]
            block.before[...] = flat[:start]
            block.after[...] = flat[end:]
            if not meet(operation):
                arena.wait_signed(group.envelope_of(operation, call, timeout))
            parts = (*block.theirs[:rank], own, *block.theirs[rank:])
            shared_memory.reduce_slice(reducer, parts, rank, block.result, own)
            arena.publish()
            if not arena.is_met():
                arena.wait(group.envelope_of(operation, call, timeout))
            for span, result in block.results:
                flat[span] = result

    return run


class _Swap(NamedTuple):
    """An exchange with a partner: it gets one part of the array, and what it sends is reduced into another or takes its
    place."""

    partner: int
    out: Span
    into: Span
    combine: Combine | None
    is_first: bool = True
    """Where they are reduced, our elements come before the partner's."""


class _Arrivals:
    """Where a partner's elements wait until they are reduced: a group is in one collective at a time."""

    def __init__(self) -> None:
        self.room: Array = np.empty(MAX_FRAGMENT, np.uint8)


def over_links(
    group: Group, strategy: AllReduceStrategy, call: bytes, count: int, reducer: SharedReducer
) -> Run | None:
    """For ranks that have one partner after the other: if `strategy` is a chain of exchanges, of a frame each way."""
    swaps, dtype = _chain(group, strategy, count, reducer), reducer.dtype
    largest = max((stop - start for swap in swaps for start, stop in (swap.out, swap.into)), default=0)
    if not swaps or largest * dtype.itemsize > MAX_FRAGMENT:
        return None
    room = group.part(_Arrivals).room
    places = [room[: (swap.into[1] - swap.into[0]) * dtype.itemsize] for swap in swaps]
    steps = [(swap, place.view(dtype), memoryview(place)) for swap, place in zip(swaps, places, strict=True)]

    def run(flat: Array, timeout: float | None = None) -> None:
        try:
            envelope = group.envelope_of(group.next_operation(), call, timeout)
            for (partner, out, into, combine, is_first), theirs, arriving in steps:
                part, own = flat[out[0] : out[1]], flat[into[0] : into[1]]
                data = part.tobytes() if part.nbytes < _VIEWED else memoryview(part.view(np.uint8))
                if combine is None:
                    group.swap(data, memoryview(own.view(np.uint8)), partner, envelope)
                    continue
                group.swap(data, arriving, partner, envelope)
                if is_first:
                    combine(own, theirs, own)
                else:
                    combine(theirs, own, own)
        except DistributedError:
            raise
        except BaseException as exc:  # Ctrl-C between two exchanges: the partner of the next one waits for it
            group.abort(str(exc) or type(exc).__name__)
            raise

    return run


def _chain(group: Group, strategy: AllReduceStrategy, count: int, reducer: SharedReducer) -> list[_Swap]:
    """Return the exchanges that `strategy` makes, if each is with one partner; else none."""
    rank, n, nbytes = group.rank, group.world_size, count * reducer.dtype.itemsize
    if strategy.shape is Shape.DIRECT and n == 2 and nbytes <= BLOCK_BYTES:
        partners: tuple[int, ...] = (1 - rank,)
    elif strategy.shape is Shape.HALVING_DOUBLING and n & (n - 1) == 0:
        if nbytes > DOUBLING_BYTES:
            return [_swap_of(step, reducer) for step in algorithms.halving_doubling_all_reduce(rank, n, count)]
        partners = algorithms.doubling_all_reduce(rank, n)[1]
    else:
        return []
    whole = 0, count
    combines = [reducer.plain] * (len(partners) - 1) + [reducer.closing]
    # The lower rank's elements come first, so that both get the same bits.
    return [
        _Swap(partner, whole, whole, combine, rank < partner)
        for partner, combine in zip(partners, combines, strict=True)
    ]


def _swap_of(step: algorithms.Step, reducer: SharedReducer) -> _Swap:
    assert step.dst is not None
    assert step.out is not None
    assert step.into is not None
    combine = reducer.plain if step.finish is None else reducer.closing
    return _Swap(step.dst, step.out, step.into, combine if step.reduces else None)
