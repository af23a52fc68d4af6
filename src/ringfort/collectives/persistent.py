"""All-reduces that are like one before them: everything that can be known beforehand is, and kept ready. They do
what the ordinary ones do, message for message, in as few instructions as it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple
from weakref import ref

import numpy as np

from ringfort.backends.base import Backend, Ready
from ringfort.collectives import algorithms, shared_memory
from ringfort.collectives.algorithms import Span
from ringfort.collectives.cost_model import BLOCK_BYTES, DOUBLING_BYTES
from ringfort.collectives.ops import ReduceOp
from ringfort.collectives.shared_memory import Combine, SharedReducer
from ringfort.config import KIB, AllReduceStrategy, Shape
from ringfort.errors import DistributedError
from ringfort.transport.arena import Arena
from ringfort.transport.frames import MAX_FRAGMENT
from ringfort.transport.reducer import Array

_VIEWED: Final = 32 * KIB
"""Bytes from which a view of them is quicker than two copies: one of them, and one behind their header."""
REMEMBERED: Final = 256
"""Kinds of all-reduces that are kept ready: programs repeat a few for ever."""
Run = Callable[[Array], None]
"""See `Ready`."""


def key_of(x: Array, op: Any) -> tuple[object, ...]:
    """What tells an all-reduce from others. The usual op is not named: that would cost a hundredth of the whole."""
    return (x.dtype, x.size) if op is ReduceOp.SUM else (x.dtype, x.size, id(op))


def remember(backend: Backend, op: ReduceOp, flat: Array, run: Run | None) -> None:
    """Keeps what was found out about an all-reduce, for the next of its kind."""
    if run is None:
        return
    if len(backend.persistent) >= REMEMBERED:
        backend.persistent.clear()
    backend.persistent[key_of(flat, op)] = Ready(run)


def ready(backend: Backend, x: Any, op: Any) -> Callable[[], Any] | None:
    """The all-reduce of `x`, where one like it was done before; it returns `x`."""
    if type(x) is not np.ndarray or not x.flags.carray:
        return None
    flat: Array = x.reshape(-1)
    found = backend.persistent.get(key_of(flat, op))
    if found is None:
        return None

    def run() -> Any:
        found.run(flat)
        return x

    return run


class Holder:
    """The backend that keeps something ready, which must not keep the backend: links end with their last user."""

    __slots__ = ("_ref",)

    def __init__(self, backend: Backend) -> None:
        self._ref = ref(backend)

    @property
    def backend(self) -> Backend:
        """It is there: who calls holds it."""
        backend = self._ref()
        assert backend is not None
        return backend


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


def over_arena(backend: Backend, arena: Arena, call: bytes, size: int, shared_reducer: SharedReducer) -> Run:
    """For ranks that share memory."""
    if size * shared_reducer.dtype.itemsize <= shared_memory.SMALL_BYTES:
        return _in_slots(backend, arena, call, size, shared_reducer)
    return _InBlocks(backend, arena, call, size, shared_reducer)


def _in_slots(backend: Backend, arena: Arena, call: bytes, size: int, shared_reducer: SharedReducer) -> Run:
    """What `shared_memory.all_reduce` does of a small array. A function with all that it needs in its own scope: as a
    method it took half as long again."""
    engine, meet, number, holder = arena.engine.table, arena.meeting(call), backend.numbering(), Holder(backend)
    turns = [(slots, slots[arena.rank]) for slots in arena.slots(shared_reducer.dtype, size)]
    combine, is_pair = shared_reducer.closing, arena.world_size == 2
    # A partial's own call would cost a tenth of the addition.
    inside, function = (combine.func, *combine.args) if isinstance(combine, partial) else (Context().run, combine)

    def run(flat: Array) -> None:
        try:  # what `with arena` does, which would cost as much as a small copy
            operation = number()
            if engine.has_trouble:
                arena.engine.check(holder.backend.envelope_of(operation, call))
            arena.turn = turn = arena.turn ^ 1
            slots, own = turns[turn]
            own[...] = flat
            if not meet(operation):
                arena.wait_signed(holder.backend.envelope_of(operation, call))
            if is_pair:
                first, second = slots
                inside(function, first, second, flat)
            else:
                shared_reducer(slots, flat)
        except DistributedError:
            raise
        except BaseException:
            arena.abandon()
            raise

    return run


class _InBlocks:
    """For arrays that are reduced slice by slice."""

    __slots__ = ("_arena", "_blocks", "_call", "_engine", "_holder", "_meet", "_reduce")

    def __init__(self, backend: Backend, arena: Arena, call: bytes, size: int, shared_reducer: SharedReducer) -> None:
        self._holder = Holder(backend)
        self._arena = arena
        self._engine = arena.engine.table
        self._call = call
        self._meet = arena.meeting(call)
        is_one = size * shared_reducer.dtype.itemsize <= arena.slot
        slots = arena.slots(shared_reducer.dtype, size) if is_one else ()
        self._blocks = tuple(_Block.of(each, arena.rank) for each in slots)
        self._reduce = shared_reducer

    def __call__(self, flat: Array) -> None:
        """Raises as `all_reduce` does. `flat` has the element type and size that were told."""
        arena, backend, call = self._arena, self._holder.backend, self._call
        with arena:
            operation = backend.next_operation()
            if self._engine.has_trouble:
                arena.engine.check(backend.envelope_of(operation, call))
            if self._blocks:
                self._in_one_block(flat, operation)
            else:
                shared_memory.all_reduce(arena, flat, self._reduce, backend.envelope_of(operation, call))

    def _in_one_block(self, flat: Array, operation: int) -> None:
        """What `shared_memory.all_reduce` does of an array that fits a slot."""
        arena, backend, call = self._arena, self._holder.backend, self._call
        rank, block = arena.rank, self._blocks[arena.next_turn()]
        start, end = block.before.size, flat.size - block.after.size
        own = flat[start:end]
        block.before[...] = flat[:start]
        block.after[...] = flat[end:]
        if not self._meet(operation):
            arena.wait_signed(backend.envelope_of(operation, call))
        shared_memory.reduce_slice(self._reduce, (*block.theirs[:rank], own, *block.theirs[rank:]), rank, block.result)
        arena.publish()
        if not arena.is_met():
            arena.wait(backend.envelope_of(operation, call))
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


class _Landing:
    """Where a partner's elements wait until they are reduced: a group is in one collective at a time."""

    def __init__(self) -> None:
        self.room: Array = np.empty(MAX_FRAGMENT, np.uint8)


class OverLinks:
    """For ranks that have one partner after the other."""

    __slots__ = ("_call", "_holder", "_steps")

    def __init__(self, backend: Backend, call: bytes, steps: Sequence[_Swap], flat: Array) -> None:
        self._holder = Holder(backend)
        self._call = call
        landing = backend.group.part(_Landing).room
        places = [landing[: (step.into[1] - step.into[0]) * flat.itemsize] for step in steps]
        arrived = [(place.view(flat.dtype), memoryview(place)) for place in places]
        self._steps = tuple(zip(steps, arrived, strict=True))

    @classmethod
    def suited(
        cls, backend: Backend, strategy: AllReduceStrategy, call: bytes, flat: Array, shared_reducer: SharedReducer
    ) -> OverLinks | None:
        """If the ordinary way of `strategy` is a chain of exchanges with one partner each, of a frame each way."""
        steps = _chain(backend, strategy, flat, shared_reducer)
        largest = max((stop - start for step in steps for start, stop in step[1:3]), default=0)
        if not steps or largest * flat.itemsize > MAX_FRAGMENT:
            return None
        return cls(backend, call, steps, flat)

    def __call__(self, flat: Array) -> None:
        """Raises as `all_reduce` does. `flat` has the element type and size that were told."""
        try:
            self._move(flat)
        except DistributedError:
            raise
        except BaseException as exc:  # Ctrl-C between two exchanges: the partner of the next one waits for it
            self._holder.backend.abort(str(exc) or type(exc).__name__)
            raise

    def _move(self, flat: Array) -> None:
        backend = self._holder.backend
        envelope = backend.envelope_of(backend.next_operation(), self._call)
        for (partner, out, into, combine, is_first), (theirs, landing) in self._steps:
            part, own = flat[out[0] : out[1]], flat[into[0] : into[1]]
            data = part.tobytes() if part.nbytes < _VIEWED else memoryview(part.view(np.uint8))
            if combine is None:
                backend.swap(data, memoryview(own.view(np.uint8)), partner, envelope)
                continue
            backend.swap(data, landing, partner, envelope)
            if is_first:
                combine(own, theirs, own)
            else:
                combine(theirs, own, own)


def _chain(backend: Backend, strategy: AllReduceStrategy, flat: Array, shared_reducer: SharedReducer) -> list[_Swap]:
    """The exchanges that `strategy` makes, if each is with one partner; else none."""
    rank, n = backend.rank, backend.world_size
    if strategy.shape is Shape.DIRECT and n == 2 and flat.nbytes <= BLOCK_BYTES:
        partners: tuple[int, ...] = (1 - rank,)
    elif strategy.shape is Shape.HALVING_DOUBLING and n & (n - 1) == 0:
        if flat.nbytes > DOUBLING_BYTES:
            return [
                _swap_of(step, shared_reducer) for step in algorithms.halving_doubling_all_reduce(rank, n, flat.size)
            ]
        partners = algorithms.doubling_all_reduce(rank, n)[1]
    else:
        return []
    whole = 0, flat.size
    reducers = [shared_reducer.plain] * (len(partners) - 1) + [shared_reducer.closing]
    # The lower rank's elements come first, so that both get the same bits.
    return [
        _Swap(partner, whole, whole, reducer, rank < partner)
        for partner, reducer in zip(partners, reducers, strict=True)
    ]


def _swap_of(step: algorithms.Step, shared_reducer: SharedReducer) -> _Swap:
    assert step.dst is not None
    assert step.out is not None
    assert step.into is not None
    combine = shared_reducer.plain if step.finish is None else shared_reducer.closing
    return _Swap(step.dst, step.out, step.into, combine if step.reducer else None)
