"""Persistent all-reduces: everything that can be known beforehand is worked out once. In shared memory, and over links
where the algorithm is a chain of exchanges with one partner each, a run then takes as few instructions as it can. Over
links it sends the same messages as the algorithm that it stands for, so ranks may mix the two."""

from __future__ import annotations

from collections.abc import Sequence
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
    if size * reducer.dtype.itemsize <= shared_memory.SMALL_BYTES:
        return _in_slots(group, arena, call, size, reducer)
    return _InBlocks(group, arena, call, size, reducer)


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


class _InBlocks:
    """For arrays that are reduced slice by slice."""

    __slots__ = ("_arena", "_blocks", "_call", "_group", "_meet", "_reducer")

    def __init__(self, group: Group, arena: Arena, call: bytes, size: int, reducer: SharedReducer) -> None:
        self._group, self._arena, self._call, self._reducer = group, arena, call, reducer
        self._meet = arena.meeting(call)
        is_one = size * reducer.dtype.itemsize <= arena.slot
        slots = arena.slots(reducer.dtype, size) if is_one else ()
        self._blocks = tuple(_Block.of(each, arena.rank) for each in slots)

    def __call__(self, flat: Array, timeout: float | None = None) -> None:
        group, arena, call = self._group, self._arena, self._call
        with arena:
            operation = group.next_operation()
            if not self._blocks:
                shared_memory.all_reduce(arena, flat, self._reducer, group.envelope_of(operation, call, timeout))
                return
            if arena.engine.table.has_trouble:
                arena.engine.check(group.envelope_of(operation, call, timeout))
            rank, block = arena.rank, self._blocks[arena.next_turn()]
            start, end = block.before.size, flat.size - block.after.size
            own = flat[start:end]
            block.before[...] = flat[:start]
            block.after[...] = flat[end:]
            if not self._meet(operation):
                arena.wait_signed(group.envelope_of(operation, call, timeout))
            parts = (*block.theirs[:rank], own, *block.theirs[rank:])
            shared_memory.reduce_slice(self._reducer, parts, rank, block.result)
            arena.publish()
            if not arena.is_met():
                arena.wait(group.envelope_of(operation, call, timeout))
            for span, result in block.results:
                flat[span] = result


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


class OverLinks:
    """For ranks that have one partner after the other."""

    __slots__ = ("_call", "_group", "_steps")

    def __init__(self, group: Group, call: bytes, steps: Sequence[_Swap], dtype: np.dtype[np.generic]) -> None:
        self._group, self._call = group, call
        room = group.part(_Arrivals).room
        places = [room[: (step.into[1] - step.into[0]) * dtype.itemsize] for step in steps]
        arrived = [(place.view(dtype), memoryview(place)) for place in places]
        self._steps = tuple(zip(steps, arrived, strict=True))

    @classmethod
    def suited(
        cls, group: Group, strategy: AllReduceStrategy, call: bytes, count: int, reducer: SharedReducer
    ) -> OverLinks | None:
        """If `strategy` is a chain of exchanges with one partner each, of a frame each way."""
        steps = _chain(group, strategy, count, reducer)
        largest = max((stop - start for step in steps for start, stop in step[1:3]), default=0)
        if not steps or largest * reducer.dtype.itemsize > MAX_FRAGMENT:
            return None
        return cls(group, call, steps, reducer.dtype)

    def __call__(self, flat: Array, timeout: float | None = None) -> None:
        group = self._group
        try:
            envelope = group.envelope_of(group.next_operation(), self._call, timeout)
            for (partner, out, into, combine, is_first), (theirs, landing) in self._steps:
                part, own = flat[out[0] : out[1]], flat[into[0] : into[1]]
                data = part.tobytes() if part.nbytes < _VIEWED else memoryview(part.view(np.uint8))
                if combine is None:
                    group.swap(data, memoryview(own.view(np.uint8)), partner, envelope)
                    continue
                group.swap(data, landing, partner, envelope)
                if is_first:
                    combine(own, theirs, own)
                else:
                    combine(theirs, own, own)
        except DistributedError:
            raise
        except BaseException as exc:  # Ctrl-C between two exchanges: the partner of the next one waits for it
            group.abort(str(exc) or type(exc).__name__)
            raise


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
