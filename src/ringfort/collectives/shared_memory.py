"""Collectives of a group that shares memory: over its arena.

Small arrays: every rank puts its own into its slot, and reduces all of them in the order of the ranks. Larger ones go
block by block: every rank reduces one slice of the block and puts the result into its slot, where the others find it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import Context
from functools import partial
from typing import Final, NamedTuple, Protocol

import numpy as np

from ringfort.config import KIB
from ringfort.transport.arena import Arena
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array, Reducer

SMALL_BYTES = 64 * KIB
"""Up to here every rank reduces all: one step less is worth more than the bytes that are read and added twice."""

_PIECE = 256 * KIB
"""Bytes that are reduced at a time and then copied."""

BLOCK = 512 * KIB
"""Bytes that are copied at a time where nothing is reduced: they stay in the cache."""


class Combine(Protocol):
    """Does `out = a <op> b`; `out` may be `a` or `b`. For one thread at a time. By position: a name costs as much as
    an eighth of a small addition."""

    def __call__(self, a: Array, b: Array, out: Array, /) -> object: ...


class SharedReducer(NamedTuple):
    """How the arrays of all ranks become one."""

    dtype: np.dtype[np.generic]
    plain: Combine
    closing: Combine
    """For the last two: does what is to be done to elements that are whole, such as dividing them."""
    spare: int = 2
    """Over how many of the first parts the result is best written."""

    @classmethod
    def of(cls, plain: Reducer, closing: Reducer) -> SharedReducer:
        combine = _combiner(plain)
        spare = 1 if plain.ufunc is None or closing.ufunc is None else 2  # a second part is copied first
        return cls(plain.dtype, combine, combine if closing is plain else _combiner(closing), spare)

    def __call__(self, parts: Sequence[Array], out: Array) -> None:
        """Reduce in the order of `parts`, of which `out` may be the first or the second: a third would be written over
        before it is read."""
        so_far = parts[0]
        for part in parts[1:-1]:
            self.plain(so_far, part, out)
            so_far = out
        self.closing(so_far, parts[-1], out)


def edges_of(block: int, world_size: int) -> list[int]:
    """Where in a block each rank's slice begins, and the last one ends."""
    return [block * rank // world_size for rank in range(world_size + 1)]


def all_reduce(
    arena: Arena, flat: Array, shared_reducer: SharedReducer, envelope: Envelope, source: Array | None = None
) -> None:
    """Every rank's `flat`, which is larger than a slot, becomes the reduction of all: in place, or of every rank's
    `source`, which is kept.

    One meeting per block: a rank publishes its slice of this block, reduced, and its part of the next, together.

    The law of this function: **a rank writes results only to its own slice of its slot, and parts only to the others'
    slices**, which are at the same place in every block. So its part of the block after next can be put down while the
    others still read the result of this one.
    """
    arena.begin(envelope)
    rank, n = arena.rank, arena.world_size
    count = -(-flat.nbytes // arena.slot)
    block = -(-flat.size // count)  # all alike, so that every rank has its share of the last one too
    edges = edges_of(block, n)
    turns = arena.slots(shared_reducer.dtype, block)
    given = flat if source is None else source

    def put(start: int) -> tuple[Array, tuple[Array, ...], list[int]]:
        own, slots = given[start : start + block], turns[arena.next_turn()]
        bounds = [min(edge, own.size) for edge in edges]
        low, high = bounds[rank], bounds[rank + 1]
        slots[rank][:low] = own[:low]
        slots[rank][high : own.size] = own[high:]
        return own, slots, bounds

    ahead = put(0)
    arena.publish()
    arena.wait_signed(envelope)
    for start in range(0, flat.size, block):
        own, slots, bounds = ahead
        low, high = bounds[rank], bounds[rank + 1]
        into = flat[start : start + block]
        parts = [own[low:high] if r == rank else slots[r][low:high] for r in range(n)]
        reduce_slice(shared_reducer, parts, rank, slots[rank][low:high], into[low:high])
        if start + block < flat.size:
            ahead = put(start + block)
        arena.publish()
        arena.wait(envelope)
        for r in range(n):
            if r != rank:
                into[bounds[r] : bounds[r + 1]] = slots[r][bounds[r] : bounds[r + 1]]


def reduce_slice(shared_reducer: SharedReducer, parts: Sequence[Array], rank: int, result: Array, into: Array) -> None:
    """Reduce the slice of `rank`, of which `parts` has what each rank has: both into `into`, which may be
    `parts[rank]`, and into `result`. Where it can, first to where it was read from, and in pieces that stay in the
    cache until they are copied: a tenth to a quarter less time."""
    piece = _PIECE // result.itemsize
    if result.size > piece:
        for start in range(0, result.size, piece):
            end = start + piece
            pieces = [part[start:end] for part in parts]
            reduce_slice(shared_reducer, pieces, rank, result[start:end], into[start:end])
        return
    first, second = (into, result) if rank < shared_reducer.spare else (result, into)
    shared_reducer(parts, first)
    second[...] = first


def broadcast(arena: Arena, flat: Array, root: int, envelope: Envelope) -> None:
    """Every rank's `flat` becomes the root's, in place."""
    arena.begin(envelope)
    turns = arena.slots(flat.dtype, arena.slot // flat.itemsize)
    for start, part in _blocks(arena, flat):
        slot = turns[arena.next_turn()][root]
        if arena.rank == root:
            slot[: part.size] = part
        arena.publish()
        (arena.wait if start else arena.wait_signed)(envelope)
        if arena.rank != root:
            part[...] = slot[: part.size]


def all_gather(arena: Arena, flat: Array, parts: Sequence[Array], envelope: Envelope) -> None:
    """`parts[r]` becomes rank r's `flat`."""
    arena.begin(envelope)
    turns = arena.slots(flat.dtype, arena.slot // flat.itemsize)
    for start, own in _blocks(arena, flat):
        slots = turns[arena.next_turn()]
        slots[arena.rank][: own.size] = own
        arena.publish()
        (arena.wait if start else arena.wait_signed)(envelope)
        for slot, part in zip(slots, parts, strict=True):
            part[start : start + own.size] = slot[: own.size]


def _blocks(arena: Arena, flat: Array) -> Iterator[tuple[int, Array]]:
    """Where each block begins, and the block; an array without elements has one of none."""
    size = min(BLOCK, arena.slot) // flat.itemsize
    for start in range(0, max(flat.size, 1), size):
        yield start, flat[start : start + size]


_CONTEXT_HOLDS_ERRSTATE: Final = int(np.__version__.partition(".")[0]) >= 2


_BY_NAME: Final = np.maximum, np.minimum
"""Functions that want to be told by name where the result goes."""


def _combiner(reducer: Reducer) -> Combine:
    ufunc = reducer.ufunc
    if ufunc is None:

        def reduce_apart(a: Array, b: Array, out: Array, /) -> None:
            if out is not a:
                b = b.copy() if out is b else b
                out[...] = a
            reducer.apply(out, b)

        return reduce_apart
    combine: Combine = ufunc if ufunc not in _BY_NAME else lambda a, b, out: ufunc(a, b, out=out)
    if reducer.dtype.kind not in "fc":
        return combine
    if _CONTEXT_HOLDS_ERRSTATE:
        # A tenth of what np.errstate costs, which is as much as a small addition.
        quiet = Context()
        quiet.run(np.seterr, all="ignore")
        return partial(quiet.run, combine)

    def reduce_quietly(a: Array, b: Array, out: Array, /) -> None:
        with np.errstate(all="ignore"):
            combine(a, b, out)

    return reduce_quietly
