"""`Parts`: one array for each rank, as a list or as the rows of one array. What gathers write and scatters read. And
the layout of a part, in a message of fixed size: what a receiver must know that passes no array of its own."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from struct import Struct
from typing import Any, Final, cast

import numpy as np

from ringfort.backends.group import Group, as_bytes
from ringfort.collectives.arrays import ArrayView, as_view, plain_view
from ringfort.collectives.reduction import ElementType, by_code
from ringfort.errors import DistributedError, InvalidArgumentError, ProtocolError
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array

_MAX_AXES: Final = 32
_LAYOUT: Final = Struct(f"<BB6x{_MAX_AXES}Q")
"""Element type, number of axes, their lengths."""
LAYOUT_BYTES: Final = _LAYOUT.size


class Parts:
    """The flat storage of one array for each rank."""

    def __init__(self, views: Sequence[ArrayView], parts: list[Array], whole: ArrayView | None) -> None:
        self._views = views
        self.parts = parts
        self.whole = whole
        """The array whose rows the parts are, if they are."""
        self.kind: ElementType = views[0].kind

    @classmethod
    def of(cls, whole: ArrayView, count: int) -> Parts:
        """Return the rows of one array."""
        is_here = whole.device is None  # else only an engine that takes the whole works on it
        return cls([whole], [whole.part(index) for index in range(count)] if is_here else [], whole)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of each part."""
        return self._views[0].shape if self.whole is None else self.whole.shape[1:]

    def new_part(self, index: int) -> ArrayView:
        """Room for a copy of one part, of the same kind."""
        view = self._views[index] if self.whole is None else self.whole
        return view.new(view.shape if self.whole is None else self.part_shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(view.nbytes for view in self._views)

    def finish(self) -> Any:
        """Return the caller's array, or the list of them, with what was written."""
        finished = [view.finish() for view in self._views]
        return finished[0] if self.whole is not None else finished


def as_parts(
    x: Any, name: str, count: int, *, like: ArrayView | None = None, writable: bool = False, is_uneven: bool = False
) -> Parts:
    """Return `x`, a list of `count` arrays or an array of so many rows, as `Parts`. Each part has the element type and
    size of `like`, where that is given; else all parts of a list are alike, unless `is_uneven`.

    Raises `InvalidArgumentError`, and what `as_view` raises.
    """
    if not isinstance(x, (list, tuple)):
        view = as_view(x, name, writable=writable)
        check_rows(view, count, name)
        if like is not None:
            check_alike(name, view.kind, view.size // count, like.kind, like.size)
        return Parts.of(view, count)
    arrays = cast("Sequence[Any]", x)
    if len(arrays) != count:
        raise InvalidArgumentError(name, f"list of {len(arrays)}", f"must have one array for each of {count} ranks")
    views = [as_view(array, f"{name}[{index}]", writable=writable) for index, array in enumerate(arrays)]
    for index, view in enumerate(views):
        place = f"{name}[{index}]"
        if writable:
            as_bytes(view.flat, place, writable=True)
        other = like or views[0]
        check_alike(place, view.kind, view.size, other.kind, view.size if is_uneven else other.size)
    return Parts(views, [view.flat for view in views], None)


def check_rows(view: ArrayView, count: int, name: str = "x") -> None:
    """Raise unless the array's first axis has one row for each rank."""
    if not view.shape or view.shape[0] != count:
        why = f"the first axis must have one part for each of {count} ranks"
        raise InvalidArgumentError(name, f"array of shape {view.shape}", why)


def check_who_passes(name: str, given: object, group: Group, root: int, *, is_optional: bool = False) -> None:
    """Raise unless the root, and only the root, passes arrays; the root may leave them out if that `is_optional`."""
    is_root = group.rank == root
    if (given is None) == is_root and not (is_optional and given is None):
        why = "the root must pass one array per rank" if is_root else "only the root passes arrays; pass None"
        what = "None" if given is None else f"a {type(given).__name__}"
        raise InvalidArgumentError(name, what, f"invalid at rank {group.rank}: {why}")


def check_alike(name: str, kind: ElementType, size: int, other: ElementType, other_size: int) -> None:
    """Raise unless an array has the element type and the size of another."""
    if kind is not other or size != other_size:
        why = f"must match the other arrays, {other.name} of {other_size} elements"
        raise InvalidArgumentError(name, f"{kind.name} of {size} elements", why)


# --- layouts ----------------------------------------------------------------------------------------------------------


def pack_layout(kind: ElementType, shape: tuple[int, ...]) -> bytes:
    """Return the message. Raises `InvalidArgumentError` for an array of too many axes."""
    if len(shape) > _MAX_AXES:
        raise InvalidArgumentError("x", f"array of {len(shape)} axes", f"must have at most {_MAX_AXES} axes")
    return _LAYOUT.pack(kind.code, len(shape), *shape, *([0] * (_MAX_AXES - len(shape))))


def receive_layout(group: Group, root: int, envelope: Envelope) -> ArrayView:
    """Receive a layout from `root`; return memory for what it describes."""
    data = bytearray(LAYOUT_BYTES)
    group.recv(data, root, envelope)
    return room_for(data, root)


def room_for(data: bytearray, peer: int) -> ArrayView:
    """Return memory for the array of the layout that a peer sent. The kernel allocates pages as bytes arrive: a claim
    costs nothing. Raises `ProtocolError`."""
    kind, axes, *lengths = _LAYOUT.unpack(data)
    if axes > _MAX_AXES:
        raise ProtocolError(f"Rank {peer} announced an array of {axes} axes", peer=peer)
    shape = tuple(lengths[:axes])
    try:
        element = by_code(kind)
        return plain_view(np.empty(prod(shape), element.storage), element, shape)
    except (DistributedError, MemoryError, ValueError, OverflowError) as exc:
        raise ProtocolError(f"Rank {peer} announced an invalid array: {exc}", peer=peer) from exc
