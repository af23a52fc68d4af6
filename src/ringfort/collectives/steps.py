"""Carrying out the steps of an algorithm: whose memory, which messages, which reducers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from ringfort.backends.group import Group, RingStep, as_bytes
from ringfort.collectives import reduction
from ringfort.collectives.algorithms import Span, Step, ring_all_gather
from ringfort.collectives.ops import Op
from ringfort.collectives.reduction import ElementType
from ringfort.config import KIB
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array, Reducer

BLOCK_BYTES: Final = 256 * KIB
"""How large a block of a pipelined tree is: what one system call moves, and what stays in the L2 cache."""


class Memory:
    """An array's storage as bytes, cut by spans of elements."""

    __slots__ = ("_bytes", "_itemsize")

    def __init__(self, flat: Array) -> None:
        self._bytes = as_bytes(flat, "x", writable=False)
        self._itemsize = flat.itemsize

    def __getitem__(self, span: Span) -> memoryview:
        return self._bytes[span[0] * self._itemsize : span[1] * self._itemsize]


class PartMemory:
    """Arrays that steps in parts take for one: part `p`, which is `(p, p + 1)`, is the elements `span` of array p."""

    __slots__ = ("_parts", "_span")

    def __init__(self, parts: Sequence[Array], span: Span) -> None:
        self._parts, self._span = parts, slice(*span)

    def __getitem__(self, span: Span) -> memoryview:
        return as_bytes(self._parts[span[0]][self._span], "out", writable=False)


class Reducers:
    """Which reducer a step needs. What the op scales is scaled on the way, while it is in the cache: a PREMUL_SUM's
    elements when they are first sent or reduced into, a MEAN's when they are whole."""

    def __init__(self, op: Op, kind: ElementType, flat: Array, world_size: int) -> None:
        self._op, self._kind, self._flat = op, kind, flat
        self._plain = reduction.reducer(op, kind)
        self._closing = reduction.closing_reducer(op, kind, world_size)
        self._opening = reduction.opening_reducer(op, kind)
        self._untouched: list[Span] = [(0, flat.size)] if reduction.needs_scale_before(op) and flat.size else []

    def __call__(self, step: Step) -> Reducer | None:
        if self._untouched and step.out is not None:
            self._scale(self._touch(step.out))
        if not step.reduces or step.into is None:
            return None
        if self._untouched:
            fresh = self._touch(step.into)
            if fresh == [step.into]:
                return self._opening
            self._scale(fresh)
        return self._plain if step.finish is None else self._closing

    def _touch(self, span: Span) -> list[Span]:
        """What of `span` was untouched until now."""
        fresh: list[Span] = []
        left: list[Span] = []
        for start, stop in self._untouched:
            low, high = max(start, span[0]), min(stop, span[1])
            if low >= high:
                left.append((start, stop))
                continue
            fresh.append((low, high))
            left.extend(rest for rest in ((start, low), (high, stop)) if rest[0] < rest[1])
        self._untouched = left
        return fresh

    def _scale(self, spans: list[Span]) -> None:
        for start, stop in spans:
            reduction.scale_before(self._op, self._kind, self._flat[start:stop])


ReducerOf = Callable[[Step], Reducer | None]
"""Says, before each step, how what arrives is reduced."""


def run_steps(
    group: Group,
    steps: Iterable[Step],
    memory: Memory | PartMemory,
    envelope: Envelope,
    *,
    reducer: ReducerOf | None = None,
    first: Envelope | None = None,
) -> None:
    """Carry out the steps of an algorithm. `first` is the envelope of the first message to each peer, where that is
    another one."""
    met: set[int] = set()
    for step in steps:
        reduce = None if reducer is None else reducer(step)
        tag = envelope
        if first is not None and step.dst is not None and step.dst not in met:
            met.add(step.dst)
            tag = first
        if step.dst is None:
            group.recv(memory[step.into], step.src, tag, reduce)  # pyright: ignore[reportArgumentType]
        elif step.src is None:
            group.send(memory[step.out], step.dst, tag)  # pyright: ignore[reportArgumentType]
        else:
            group.exchange(memory[step.out], step.dst, memory[step.into], step.src, tag, reduce)  # pyright: ignore[reportArgumentType]


def run_ring(
    group: Group,
    steps: Sequence[Step],
    memory: Memory | PartMemory,
    envelope: Envelope,
    *,
    reducer: ReducerOf | None = None,
) -> None:
    """`run_steps` round a ring, where every step passes on what the one before has received."""
    if steps:
        ring_steps = [
            RingStep(memory[step.out], memory[step.into], None if reducer is None else reducer(step))  # pyright: ignore[reportArgumentType]
            for step in steps
        ]
        group.pipelined_ring(ring_steps, steps[0].dst, steps[0].src, envelope)  # pyright: ignore[reportArgumentType]


def gather_rows(group: Group, row: Sequence[float] | Array, envelope: Envelope) -> Array:
    """Return the figures of all ranks, of which this one has `row`: a table that is the same at every rank."""
    table = np.zeros((group.world_size, len(row)))
    table[group.rank] = row
    steps = ring_all_gather(group.rank, group.world_size)
    run_steps(group, steps, PartMemory(list(table), (0, len(row))), envelope)
    return table


def block_of(flat: Array) -> int:
    """Elements in a block of a pipelined algorithm."""
    return max(1, BLOCK_BYTES // flat.itemsize)
