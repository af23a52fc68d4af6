"""Carrying out the steps of an algorithm: whose memory, which messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ringfort.backends.group import Group, RingStep, as_bytes
from ringfort.collectives.algorithms import Span, Step
from ringfort.config import KIB
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array, Reducer

BLOCK_BYTES: Final = 256 * KIB
"""How large a block of a pipelined tree is: what one system call moves, and what stays in the L2 cache."""


class Memory:
    """An array's storage as bytes, cut by spans of elements; or by spans of `unit` bytes each."""

    __slots__ = ("_bytes", "_unit")

    def __init__(self, flat: Array, *, unit: int | None = None) -> None:
        self._bytes = as_bytes(flat, "x", writable=False)
        self._unit = flat.itemsize if unit is None else unit

    def __getitem__(self, span: Span) -> memoryview:
        return self._bytes[span[0] * self._unit : span[1] * self._unit]


class PartMemory:
    """Arrays that steps in parts take for one: part `p`, which is `(p, p + 1)`, is the elements `span` of array p."""

    __slots__ = ("_parts", "_span")

    def __init__(self, parts: Sequence[Array], span: Span) -> None:
        self._parts, self._span = parts, slice(*span)

    def __getitem__(self, span: Span) -> memoryview:
        return as_bytes(self._parts[span[0]][self._span], "out", writable=False)


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


def block_of(flat: Array) -> int:
    """Elements in a block of a pipelined algorithm."""
    return max(1, BLOCK_BYTES // flat.itemsize)
