"""What a rank called, in 16 bytes that travel with every message of a collective: so that ranks which disagree find out
at the first one, and can say in words what each of them called. Pure."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from struct import Struct
from typing import Final

from ringfort.backends.group import BARRIER_CALL
from ringfort.collectives.ops import ReduceOp
from ringfort.collectives.reduction import by_code
from ringfort.config import Shape, Strategy
from ringfort.errors import InvalidArgumentError

_CALL = Struct("<BBBBHBxQ")


class Collective(Enum):
    """The values are the wire's codes and never change."""

    BARRIER = 1
    ALL_REDUCE = 2
    REDUCE = 3
    BROADCAST = 4
    ALL_GATHER = 5
    GATHER = 6
    SCATTER = 7
    REDUCE_SCATTER = 8
    ALL_TO_ALL = 9
    ALL_TO_ALL_LIST = 10
    BROADCAST_OBJECT = 11
    ALL_GATHER_OBJECT = 12


_MEASURING: Final = 0x80
"""In a call's first byte: this is the collective that finds out what `call` has to know before it runs."""


def measuring_for(call: bytes) -> bytes:
    """Return the call of a collective that measures what `call` needs. No rank takes the one for the other, and whoever
    called something else is told of `call`, which is what the program wrote."""
    return bytes((call[0] | _MEASURING,)) + call[1:]


def split_measuring(call: bytes) -> tuple[bytes, bool]:
    """Return the call that the program made, and whether this is the measuring for it. Undoes `measuring_for`."""
    return bytes((call[0] & ~_MEASURING,)) + call[1:], bool(call[0] & _MEASURING)


@lru_cache(maxsize=1024)
def encode(
    what: Collective, *, kind: int = 0, count: int = 0, op: int = 0, root: int = 0, strategy: Strategy | None = None
) -> bytes:
    """Return the 16 bytes. `kind` and `op` are wire codes; `count` is the number of elements a rank passes."""
    shape, arity = (strategy.shape, strategy.arity) if strategy else (Shape.AUTO, 0)
    return _CALL.pack(what.value, op, kind, shape.value, root, arity if shape is Shape.TREE else 0, count)


def describe(call: bytes) -> str:
    """Return the call as a person would write it, such as `all_reduce(float32[1024], SUM, ring)`. Never raises."""
    what, op, kind, shape, root, arity, count = _CALL.unpack(call)
    try:
        collective = Collective(what)
        words: list[str] = []
        if kind:
            words.append(f"{by_code(kind).name}[{count}]")
        if op:
            words.append(ReduceOp(op).name)
        if collective in _ROOTED:
            words.append(f"root={root}")
        if shape:
            words.append(str(Strategy(Shape(shape), arity or 2)))
    except (ValueError, InvalidArgumentError):
        return f"something this version does not know ({call.hex()})"
    return f"{collective.name.lower()}({', '.join(words)})"


_ROOTED = {Collective.REDUCE, Collective.BROADCAST, Collective.GATHER, Collective.SCATTER, Collective.BROADCAST_OBJECT}

assert encode(Collective.BARRIER) == BARRIER_CALL
