"""What a receiver must know that passes no array of its own: element type and shape, in a message of fixed size. Pure
but for the one function that receives it."""

from __future__ import annotations

from math import prod
from struct import Struct
from typing import Final

import numpy as np

from ringfort.backends.group import Group
from ringfort.collectives.arrays import ArrayView, plain_view
from ringfort.collectives.reduction import ElementType, by_code
from ringfort.errors import DistributedError, InvalidArgumentError, ProtocolError
from ringfort.transport.messages import Envelope

_MAX_AXES: Final = 32
_LAYOUT: Final = Struct(f"<BB6x{_MAX_AXES}Q")
"""Element type, number of axes, their lengths."""
LAYOUT_BYTES: Final = _LAYOUT.size


def pack_layout(kind: ElementType, shape: tuple[int, ...]) -> bytes:
    """Return the message. Raises `InvalidArgumentError` for an array of too many axes."""
    if len(shape) > _MAX_AXES:
        raise InvalidArgumentError("x", f"array of {len(shape)} axes", f"must have at most {_MAX_AXES} axes")
    return _LAYOUT.pack(kind.code, len(shape), *shape, *([0] * (_MAX_AXES - len(shape))))


def unpack_layout(data: bytes | bytearray, peer: int) -> tuple[int, tuple[int, ...]]:
    """Return the code of the element type, and the shape. Raises `ProtocolError`."""
    kind, axes, *lengths = _LAYOUT.unpack(data)
    if axes > _MAX_AXES:
        raise ProtocolError(f"Rank {peer} announced an array of {axes} axes", peer=peer)
    return kind, tuple(lengths[:axes])


def receive_layout(group: Group, root: int, envelope: Envelope) -> ArrayView:
    """Receive a layout from `root`; return memory for what it describes."""
    data = bytearray(LAYOUT_BYTES)
    group.recv(data, root, envelope)
    return room_for(*unpack_layout(data, root), root)


def room_for(kind: int, shape: tuple[int, ...], peer: int) -> ArrayView:
    """Return memory for the array that a peer announced. The kernel allocates pages as bytes arrive: a claim costs
    nothing."""
    try:
        element = by_code(kind)
        return plain_view(np.empty(prod(shape), element.storage), element, shape)
    except (DistributedError, MemoryError, ValueError, OverflowError) as exc:
        raise ProtocolError(f"Rank {peer} announced an invalid array: {exc}", peer=peer) from exc
