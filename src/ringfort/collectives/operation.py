"""`Operation`: a collective that has been checked and waits to be run, and the steps that most of them run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ringfort.backends.base import Backend, RingStep, as_bytes
from ringfort.collectives.algorithms import Span, Step
from ringfort.errors import InvalidRankError
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array, Reducer


class Operation(NamedTuple):
    """Call `run` once. It returns the collective's result or raises."""

    name: str
    nbytes: int
    """Bytes of this rank's array: what the metrics count."""
    run: Callable[[], Any]


class Memory:
    """An array's storage as bytes that can be cut by the plan's unit: elements, or parts of so many bytes."""

    __slots__ = ("_bytes", "_unit")

    def __init__(self, flat: Array, *, unit: int | None = None) -> None:
        self._bytes = as_bytes(flat, "x", writable=False)
        self._unit = flat.itemsize if unit is None else unit

    def __getitem__(self, span: Span) -> memoryview:
        return self._bytes[span[0] * self._unit : span[1] * self._unit]


def run_steps(
    backend: Backend,
    steps: Iterable[Step],
    memory: Memory,
    envelope: Envelope,
    *,
    reducer: Callable[[Step], Reducer | None] | None = None,
    first: Envelope | None = None,
) -> None:
    """Carries out a plan. `reduce` is asked before each step how what arrives is reduced; `first` is the envelope of
    the first message to each peer, where that is another one."""
    met: set[int] = set()
    for step in steps:
        reduce = None if reducer is None else reducer(step)
        tag = envelope
        if first is not None and step.dst is not None and step.dst not in met:
            met.add(step.dst)
            tag = first
        if step.dst is None:
            backend.recv(memory[step.into], step.src, reduce=reduce, tag=tag)  # pyright: ignore[reportArgumentType]
        elif step.src is None:
            backend.send(memory[step.out], step.dst, tag=tag)  # pyright: ignore[reportArgumentType]
        else:
            backend.exchange(memory[step.out], step.dst, memory[step.into], step.src, reduce=reduce, tag=tag)  # pyright: ignore[reportArgumentType]


def run_ring(
    backend: Backend,
    steps: Sequence[Step],
    memory: Memory,
    envelope: Envelope,
    *,
    reducer: Callable[[Step], Reducer | None] | None = None,
) -> None:
    """`run_steps` for a plan round a ring, whose every step passes on what the one before has received."""
    if steps:
        ring_steps = [
            RingStep(memory[step.out], memory[step.into], None if reducer is None else reducer(step))  # pyright: ignore[reportArgumentType]
            for step in steps
        ]
        backend.pipelined_ring(ring_steps, steps[0].dst, steps[0].src, tag=envelope)  # pyright: ignore[reportArgumentType]


def check_root(backend: Backend, root: int) -> None:
    """Raises `InvalidRankError` unless `root` is a rank of the group."""
    if not isinstance(root, int) or isinstance(root, bool) or not 0 <= root < backend.world_size:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidRankError(root, backend.world_size, name="root")
