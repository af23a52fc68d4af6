"""`StateTree`: the state of a run as arrays and plain values, copied out at once and written back in place. Pure.

The state is a tree of dicts, lists and tuples. Its leaves are arrays, or plain values: numbers, strings, booleans,
None. Nothing is pickled: an image of the state is msgpack for the structure and the bytes of the arrays as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, NamedTuple, cast

import msgspec
import numpy as np

from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.errors import InvalidArgumentError, UnsupportedArrayError
from ringfort.training.elastic.sample_order import Array

_DEEPEST: Final = 100
"""Levels of a state. Deeper ones contain themselves, most likely."""
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
    number: bytes = b""
    """A whole number that does not fit into 64 bits: msgpack has no larger ones."""

    def plain(self) -> Plain:
        """Return the plain value."""
        return int.from_bytes(self.number, "little", signed=True) if self.number else self.value

    @property
    def place(self) -> slice:
        """Where the array is in the image."""
        return slice(self.offset, self.offset + self.nbytes)

    def __str__(self) -> str:
        return f"{self.kind}{self.shape}" if self.kind else "a plain value"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an image contains. A receiver compares it with its own state before it takes memory for the image."""

    entries: tuple[Entry, ...]
    nbytes: int
    hashes: tuple[bytes, ...] = ()
    """One per block, or none."""

    def only(self, other: Manifest) -> Manifest:
        """Return this manifest without the leaves that `other` does not have."""
        paths = {entry.path for entry in other.entries}
        return Manifest(tuple([entry for entry in self.entries if entry.path in paths]), self.nbytes)

    def differences(self, other: Manifest) -> str:
        """Return in words the first leaf that differs in path, element type or shape; empty if none does."""
        mine, theirs = ({entry.path: str(entry) for entry in one.entries} for one in (self, other))
        for path in mine | theirs:
            if mine.get(path) != theirs.get(path):
                return f"{path} is {mine.get(path, 'missing')} here and {theirs.get(path, 'missing')} there"
        return ""


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
            entries.append(_entry(slot.path, slot.leaf, offset))
            offset += -(-entries[-1].nbytes // _ALIGNED) * _ALIGNED
        return Manifest(tuple(entries), offset)

    def image(self) -> Image:
        """Copy the state."""
        manifest = self.manifest()
        data = np.zeros(manifest.nbytes, np.uint8)
        for entry, slot in zip(manifest.entries, self._slots(), strict=True):
            if isinstance(slot.leaf, ArrayView):
                data[entry.place] = slot.leaf.flat.view(np.uint8)
        return Image(manifest, data)

    def leaves(self) -> Iterator[tuple[str, Array | Plain]]:
        """Yield each leaf with its path: the bytes of an array, or a plain value."""
        for slot in self._slots():
            yield slot.path, slot.leaf.flat.view(np.uint8) if isinstance(slot.leaf, ArrayView) else slot.leaf

    def load(self, image: Image) -> None:
        """Write an image into the state: arrays in place, plain values by replacing them. Raise `InvalidArgumentError`
        if it is of another state; nothing is changed then."""
        own, found = self.manifest(), {entry.path: entry for entry in image.manifest.entries}
        why = own.differences(image.manifest)
        if why:
            why = f"differs from the run's: {why}; start the same program everywhere, and create the whole state before"
            why += " ringfort.elastic()"
            raise InvalidArgumentError("state", "this program's", why)
        for entry in own.entries:
            if image.data[found[entry.path].place].nbytes != entry.nbytes:
                raise InvalidArgumentError("image", entry.path, "is not in the place that the manifest says")
        for slot in self._slots():  # one at a time: a view may be a copy
            entry = found[slot.path]
            if isinstance(slot.leaf, ArrayView):
                slot.leaf.flat.view(np.uint8)[...] = image.data[entry.place]
                array = slot.leaf.finish()
                if array is not slot.holder[slot.key]:  # an array that cannot be written (MLX, JAX)
                    slot.holder[slot.key] = array
            else:
                slot.holder[slot.key] = entry.plain()

    def _slots(self) -> Iterator[_Slot]:
        return _slots(self._tree, "state")


class _Slot(NamedTuple):
    """A place in the tree: `holder[key]` is the leaf."""

    holder: Any
    key: Any
    path: str
    leaf: ArrayView | Plain


def _entry(path: str, leaf: ArrayView | Plain, offset: int) -> Entry:
    if isinstance(leaf, ArrayView):
        return Entry(path, leaf.kind.name, tuple(leaf.shape), offset, leaf.nbytes)
    if type(leaf) is int and not -(2**63) <= leaf < 2**63:  # such as the state of a random generator
        return Entry(path, number=leaf.to_bytes(leaf.bit_length() // 8 + 1, "little", signed=True))
    return Entry(path, value=leaf)


def _slots(holder: Any, path: str, depth: int = 1) -> Iterator[_Slot]:
    items = cast("dict[Any, Any]", holder).items() if isinstance(holder, dict) else enumerate(holder)
    for key, child in list(cast("Iterable[tuple[Any, Any]]", items)):
        if type(key) not in (str, int):  # others may look different on another machine
            raise InvalidArgumentError(path, key, "keys must be strings or whole numbers")
        if type(key) is str and not key.isascii():
            _check_text(path, key)
        place = f"{path}[{key!r}]"
        if isinstance(child, (dict, list, tuple)):
            if depth == _DEEPEST:
                why = f"has more than {_DEEPEST} levels; does it contain itself?"
                raise InvalidArgumentError("state", f"{place[:60]}...", why)
            yield from _slots(child, place, depth + 1)
        else:
            leaf = _leaf(place, child)
            if isinstance(holder, tuple) and not (isinstance(leaf, ArrayView) and leaf.finish() is child):
                raise InvalidArgumentError(place, child, "is in a tuple, where it cannot be replaced; use a list")
            yield _Slot(holder, key, place, leaf)


def _leaf(path: str, value: Any) -> ArrayView | Plain:
    # Not subclasses: a NumPy scalar or an enumeration would come back as something else.
    if value is None or type(value) in (bool, int, float):
        return value
    if type(value) is str:
        if not value.isascii():
            _check_text(path, value)
        return value
    if not hasattr(value, "shape") and not hasattr(value, "__dlpack__"):
        what = "must be an array, a number, a string, a boolean or None"
        raise UnsupportedArrayError(path, type(value).__name__, what)
    return as_view(value, path, writable=True)


def _check_text(path: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise InvalidArgumentError(path, value, "must be a string that UTF-8 can express") from exc


def hashed(image: Image, of: Callable[[memoryview], bytes] | None = None) -> Image:
    """Return the image with a hash per block in its manifest: `block_hash`, or that of the function `of`."""
    of = of or block_hash
    blocks = range(-(-image.manifest.nbytes // BLOCK))
    hashes = tuple(of(image.block(index)) for index in blocks)
    return Image(msgspec.structs.replace(image.manifest, hashes=hashes), image.data)


def block_hash(block: memoryview | bytes) -> bytes:
    """Return the hash of a block that is sent. (SHA-256, cut, because processors have instructions for it: 100 MB take
    57 ms of one core, and 111 ms with BLAKE2b.)"""
    return sha256(block).digest()[:HASH]
