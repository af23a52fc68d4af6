"""`StateTree`: the state of a run as arrays and plain values, copied out at once and written back in place. Pure.

The state is a tree of dicts, lists and tuples. Its leaves are arrays, or plain values: numbers, strings, booleans,
None. Nothing is pickled: an image of the state is msgpack for the structure and the bytes of the arrays as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, NamedTuple, cast

import msgspec
import numpy as np

from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.errors import InvalidArgumentError, UnsupportedArrayError
from ringfort.training.elastic.sample_order import Array

BLOCK: Final = 1 << 20
"""Bytes of an image that have a hash of their own: what is sent, checked and asked for again."""
HASH: Final = 16
"""Bytes of such a hash."""
_ALIGNED: Final = 64
"""Arrays of an image begin at multiples of this, so that they can be used where they are."""
Plain = bool | int | float | str | None


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One leaf: an array at `offset` in the image, or a plain value."""

    path: str
    kind: str = ""
    """The element type of an array; empty for a plain value."""
    shape: tuple[int, ...] = ()
    offset: int = 0
    nbytes: int = 0
    value: Plain = None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an image contains. A receiver compares it with its own state before it takes memory for the image."""

    entries: tuple[Entry, ...]
    nbytes: int
    hashes: tuple[bytes, ...] = ()
    """One per block."""

    def differences(self, other: Manifest) -> str:
        """Return in words the first leaf that differs in path, element type or shape; empty if none does."""
        mine, theirs = ({entry.path: _shape(entry) for entry in one.entries} for one in (self, other))
        for path in sorted(mine.keys() | theirs.keys()):
            if mine.get(path) != theirs.get(path):
                return f"{path} is {mine.get(path, 'missing')} here and {theirs.get(path, 'missing')} there"
        return ""


def _shape(entry: Entry) -> str:
    return f"{entry.kind}{entry.shape}" if entry.kind else "a plain value"


@dataclass(frozen=True)
class Image:
    """A copy of the state at one moment."""

    manifest: Manifest
    data: Array
    """The arrays' bytes."""

    def block(self, index: int) -> memoryview:
        """Return the bytes of one block."""
        return memoryview(self.data)[index * BLOCK : (index + 1) * BLOCK]


class StateTree:
    """The state of a program, which the program changes in place."""

    def __init__(self, tree: Any) -> None:
        """Raise `UnsupportedArrayError` for a leaf that is neither a writable array nor a plain value, and
        `InvalidArgumentError` for a tree that is not a dict or a list."""
        if not isinstance(tree, (dict, list)):
            raise InvalidArgumentError("state", type(tree).__name__, "must be a dict or a list of arrays and numbers")
        self._tree = cast("Any", tree)
        self.manifest()

    def manifest(self) -> Manifest:
        """Return what an image would contain now, without hashes."""
        entries, offset = list[Entry](), 0
        for slot in self._slots():
            if isinstance(slot.leaf, ArrayView):
                nbytes = slot.leaf.flat.nbytes
                entries.append(Entry(slot.path, slot.leaf.kind.name, tuple(slot.leaf.shape), offset, nbytes))
                offset += -(-nbytes // _ALIGNED) * _ALIGNED
            else:
                entries.append(Entry(slot.path, value=slot.leaf))
        return Manifest(tuple(entries), offset)

    def image(self) -> Image:
        """Copy the state."""
        manifest = self.manifest()
        data = np.zeros(manifest.nbytes, np.uint8)
        for entry, slot in zip(manifest.entries, self._slots(), strict=True):
            if isinstance(slot.leaf, ArrayView):
                data[entry.offset : entry.offset + entry.nbytes] = slot.leaf.flat.view(np.uint8)
        return Image(manifest, data)

    def load(self, image: Image) -> None:
        """Write an image into the state: arrays in place, plain values by replacing them. Raise `InvalidArgumentError`
        if it is of another state."""
        why = self.manifest().differences(image.manifest)
        if why:
            raise InvalidArgumentError("state", "the run's", f"differs from this program's: {why}")
        entries = {entry.path: entry for entry in image.manifest.entries}
        for slot in self._slots():
            entry = entries[slot.path]
            if isinstance(slot.leaf, ArrayView):
                slot.leaf.flat.view(np.uint8)[...] = image.data[entry.offset : entry.offset + entry.nbytes]
                found = slot.leaf.finish()
                if found is not slot.holder[slot.key]:  # an array that cannot be written (MLX, JAX)
                    slot.holder[slot.key] = found
            else:
                slot.holder[slot.key] = entry.value

    def _slots(self) -> Iterator[_Slot]:
        return _slots(self._tree, "state")


class _Slot(NamedTuple):
    """A place in the tree: `holder[key]` is the leaf."""

    holder: Any
    key: Any
    path: str
    leaf: ArrayView | Plain


def _slots(holder: Any, path: str) -> Iterator[_Slot]:
    items: Iterable[tuple[Any, Any]]
    items = cast("dict[Any, Any]", holder).items() if isinstance(holder, dict) else enumerate(cast("list[Any]", holder))
    for key, child in list(items):
        place = f"{path}[{key!r}]"
        if isinstance(child, (dict, list, tuple)):
            yield from _slots(child, place)
        else:
            leaf = _leaf(place, child)
            if isinstance(holder, tuple) and not (isinstance(leaf, ArrayView) and leaf.finish() is child):
                raise InvalidArgumentError(place, child, "is in a tuple, where it cannot be replaced; use a list")
            yield _Slot(holder, key, place, leaf)


def _leaf(path: str, value: Any) -> ArrayView | Plain:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if not hasattr(value, "shape") and not hasattr(value, "__dlpack__"):
        what = "must be an array, a number, a string, a boolean or None"
        raise UnsupportedArrayError(path, type(value).__name__, what)
    return as_view(value, path, writable=True)


def hashed(image: Image) -> Image:
    """Return the image with a hash per block in its manifest."""
    blocks = range(-(-image.manifest.nbytes // BLOCK))
    hashes = tuple(block_hash(image.block(index)) for index in blocks)
    return Image(msgspec.structs.replace(image.manifest, hashes=hashes), image.data)


def block_hash(block: memoryview | bytes) -> bytes:
    """Return the hash of one block."""
    return blake2b(block, digest_size=HASH).digest()
