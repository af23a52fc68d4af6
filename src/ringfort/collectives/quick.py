"""All-reduces that are like one before them: everything that can be known beforehand is, and kept ready. They do
what the ordinary ones do, message for message, in as few instructions as it takes."""

from __future__ import annotations

from typing import Final

import numpy as np

from ringfort.backends.base import Backend
from ringfort.collectives import plan, shared
from ringfort.collectives.ops import ReduceOp
from ringfort.collectives.shared import Folding
from ringfort.config import KIB, AllReduceStrategy, Shape
from ringfort.errors import DistributedError
from ringfort.transport.board import Board
from ringfort.transport.fold import Array

_VIEWED: Final = 32 * KIB
"""Bytes from which a view of them is quicker than two copies: one of them, and one behind their header."""
REMEMBERED: Final = 256
"""Kinds of all-reduces that are kept ready: programs repeat a few for ever."""


def remember(backend: Backend, op: ReduceOp, flat: Array, ready: OverBoard | OverLinks | None) -> None:
    """Keeps what was found out about an all-reduce, for the next of its kind."""
    if ready is None:
        return
    if len(backend.quick) >= REMEMBERED:
        backend.quick.clear()
    backend.quick[flat.dtype, flat.size, id(op)] = ready


class OverBoard:
    """For ranks that share memory."""

    __slots__ = ("_backend", "_board", "_call", "_engine", "_fold", "_of_two", "_slots")

    def __init__(self, backend: Backend, board: Board, call: bytes, size: int, folding: Folding) -> None:
        self._backend = backend
        self._board = board
        self._engine = board.sleeper.engine
        self._call = call, int.from_bytes(call[:8], "little"), int.from_bytes(call[8:], "little")
        is_small = size * folding.dtype.itemsize <= shared.SMALL_BYTES
        self._slots = board.slots(folding.dtype, size) if is_small else None
        self._fold = folding
        self._of_two = folding.closing if board.world_size == 2 else None

    def __call__(self, flat: Array) -> None:
        """Raises as `all_reduce` does. `flat` has the element type and size that were told."""
        board, backend = self._board, self._backend
        call, low, high = self._call
        operation = backend.next_operation()
        if self._engine.has_trouble:
            board.sleeper.check(backend.envelope_of(operation, call))
        if self._slots is None:
            with board:
                shared.all_reduce(board, flat, self._fold, backend.envelope_of(operation, call))
            return
        try:  # what `with board` does, which would cost as much as a small copy
            board.turn ^= 1
            slots = self._slots[board.turn]
            slots[board.rank][...] = flat
            if not board.meet(operation, low, high):
                board.wait_signed(backend.envelope_of(operation, call))
            if self._of_two is not None:
                self._of_two(slots[0], slots[1], out=flat)
            else:
                self._fold(slots, flat)
        except DistributedError:
            raise
        except BaseException:
            board.sleeper.abandon()
            raise


class OverLinks:
    """For ranks that exchange all they have with one partner after the other."""

    __slots__ = ("_backend", "_call", "_steps")

    def __init__(self, backend: Backend, call: bytes, partners: tuple[int, ...], folding: Folding) -> None:
        self._backend = backend
        self._call = call
        combine = [folding.plain] * (len(partners) - 1) + [folding.closing]
        self._steps = tuple(zip(partners, combine, strict=True))

    @classmethod
    def suited(cls, backend: Backend, strategy: AllReduceStrategy, call: bytes, folding: Folding) -> OverLinks | None:
        """If the ordinary way of `strategy`, for a small array, is a chain of such exchanges."""
        rank, n = backend.rank, backend.world_size
        if strategy.shape is Shape.DIRECT and n == 2:
            return cls(backend, call, (1 - rank,), folding)
        if strategy.shape is Shape.HALVING_DOUBLING and n & (n - 1) == 0:
            return cls(backend, call, plan.doubling_all_reduce(rank, n)[1], folding)
        return None

    def __call__(self, flat: Array) -> None:
        """Raises as `all_reduce` does. `flat` has the element type and size that were told."""
        backend, dtype = self._backend, flat.dtype
        envelope = backend.envelope_of(backend.next_operation(), self._call)
        rank = backend.rank
        for partner, combine in self._steps:

            def take(theirs: memoryview) -> None:
                # The lower rank's elements come first, so that both get the same bits.
                if rank < partner:  # noqa: B023  # called before the next turn
                    combine(flat, np.frombuffer(theirs, dtype), out=flat)  # noqa: B023
                else:
                    combine(np.frombuffer(theirs, dtype), flat, out=flat)  # noqa: B023

            data = flat.tobytes() if flat.nbytes < _VIEWED else memoryview(flat.view(np.uint8))
            backend.swap(data, partner, envelope, take)
