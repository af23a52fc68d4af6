"""`StateTree`: the state of a run as arrays and plain values, copied out at once and written back in place. Pure.

The state is a tree of dicts, lists and tuples. Its leaves are arrays, or plain values: numbers, strings, booleans,
None. Nothing is pickled: an image of the state is msgpack for the structure and the bytes of the arrays as they are.

A program may create leaves while it trains, such as the momentum of an optimizer in its first step. So an image may
have leaves that a program which has just started lacks: they are created when the image is loaded.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from math import prod
from operator import is_
from typing import Any, Final, NamedTuple, cast

import msgspec
import numpy as np

from ringfort.collectives.arrays import ArrayView, as_view, plain_view
from ringfort.collectives.reduction import element_type, element_type_named
from ringfort.errors import InvalidArgumentError, UnsupportedArrayError
from ringfort.training.elastic.image_memory import ImageMemory
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
    def is_none(self) -> bool:
        """Whether it is None, which stands for a leaf that is not there yet."""
        return not self.kind and self.plain() is None

    @property
    def place(self) -> slice:
        """Where the array is in the image."""
        return slice(self.offset, self.offset + self.nbytes)

    def __str__(self) -> str:
        return f"{self.kind}{self.shape}" if self.kind else "a plain value"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an image contains. A receiver compares it with its own state before it takes memory for the image."""

    entries: tuple[Entry, ...]
    """In the order of their paths: so the same state has the same image, whatever the order of the program's dicts."""
    nbytes: int
    hashes: tuple[bytes, ...] = ()
    """One per block, or none."""
    tree: Any = None
    """The dicts and lists that the leaves are in, with None for each leaf. Keys are written as `repr` does, because
    msgpack has no large numbers. Tuples are lists here. None in checkpoints of format 1: nothing can be created."""

    def leaves(self) -> dict[str, str]:
        """Return in words what each leaf is, by its path. `{0: x}` and `[x]` give the same path and other words."""
        found = {entry.path: str(entry) for entry in self.entries}
        for path, holders in _holders(self.tree, "state"):
            found[path] = f"{found.get(path, '')} in {holders}"
        return found

    def differences(self, other: Manifest) -> str:
        """Return in words the first leaf that differs in path, element type or shape; empty if none does."""
        return _first_difference(self.leaves(), other.leaves())

    def check_tree(self) -> None:
        """Raise `ValueError` if the tree does not have exactly one place for each leaf, or is none."""
        if sorted(_paths(self.tree, "state")) != sorted(entry.path for entry in self.entries):
            raise ValueError("the tree does not have a place for each leaf")


@dataclass(frozen=True)
class Image:
    """A copy of the state at one moment."""

    manifest: Manifest
    data: Array
    """The arrays' bytes."""

    def block(self, index: int) -> memoryview:
        """Return the bytes of one block."""
        return memoryview(self.data)[index * BLOCK : (index + 1) * BLOCK]

    def array(self, entry: Entry) -> Array:
        """Return the bytes of an array. Raise `InvalidArgumentError` if they are not where the manifest says."""
        found = self.data[entry.place]
        if not len(found) == entry.nbytes == _nbytes(entry):
            raise InvalidArgumentError("image", entry.path, "is not in the place that the manifest says")
        return found


class StateTree:
    """The state of a program, which the program changes in place."""

    is_copied_between = True
    """Whether it can be copied between two micro-batches of a step, and not only after a step."""

    def __init__(self, tree: Any) -> None:
        """Raise `UnsupportedArrayError` for a leaf that is neither a writable array nor a plain value, and
        `InvalidArgumentError` for a tree that is not a dict or a list."""
        if not isinstance(tree, (dict, list)):
            raise InvalidArgumentError("state", type(tree).__name__, "must be a dict or a list of arrays and numbers")
        self._tree = cast("Any", tree)
        self._remember_first()

    def _remember_first(self) -> None:
        self._first = {entry.path for entry in self.manifest().entries if not entry.is_none}
        """The leaves that the program began with. Those that came later, in the place of None too, may be missing in an
        earlier image."""

    @property
    def planned_steps(self) -> int:
        """The optimizer steps of a round that is opened now, where the state says that."""
        return 1

    @cached_property
    def memory(self) -> ImageMemory:
        """The memory of its images."""
        return ImageMemory()

    def manifest(self) -> Manifest:
        """Return what an image would contain now, without hashes."""
        entries, offset = list[Entry](), 0
        tree = self._root()
        for slot in self._slots(tree):
            entries.append(_entry(slot.path, self._leaf(slot, needs_data=False), offset))
            offset += -(-entries[-1].nbytes // _ALIGNED) * _ALIGNED
        return Manifest(tuple(entries), offset, tree=_tree_of(tree))

    def image(self) -> Image:
        """Copy the state."""
        manifest = self.manifest()
        data, end = self.memory.take(manifest.nbytes), 0
        for entry, slot in zip(manifest.entries, self._slots(self._root()), strict=True):
            leaf = self._leaf(slot)
            if isinstance(leaf, ArrayView):
                data[end : entry.offset] = 0  # between two arrays
                data[entry.place] = leaf.flat.view(np.uint8)
                end = entry.place.stop
        data[end:] = 0
        return Image(manifest, data)

    def leaves(self) -> Iterator[tuple[str, Array | Plain]]:
        """Yield each leaf with its path: the bytes of an array, or a plain value."""
        for slot in self._slots(self._root()):
            leaf = self._leaf(slot)
            yield slot.path, leaf.flat.view(np.uint8) if isinstance(leaf, ArrayView) else leaf

    def misfit(self, manifest: Manifest) -> str:
        """Return in words why an image with that manifest is not of this program's state; empty if it can be loaded.

        It must have all leaves that the program began with, and may have others. None stands for a leaf that is not
        there yet.
        """
        own = self.manifest()
        if manifest.tree is None:
            return msgspec.structs.replace(own, tree=None).differences(manifest)
        try:
            manifest.check_tree()
        except ValueError as exc:
            return f"the manifest is invalid: {exc}"
        if type(own.tree) is not type(manifest.tree):
            return f"state is a {type(own.tree).__name__} here and a {type(manifest.tree).__name__} there"
        absent = {entry.path for entry in own.entries if entry.is_none}
        theirs = manifest.leaves()
        needed = {path: what for path, what in own.leaves().items() if path in self._first and path not in absent}
        return _first_difference(needed, {path: what for path, what in theirs.items() if path in needed})

    def load(self, image: Image) -> None:
        """Make the state that of an image: arrays are written in place, plain values replaced. Leaves that only the
        image has are created, with their dicts and lists, as NumPy arrays; those that were created here and are not in
        the image are removed. Raise `InvalidArgumentError` if it is of another state; nothing is changed then."""
        why = self.misfit(image.manifest)
        if why:
            why = f"differs from the run's: {why}; start the same program everywhere"
            raise InvalidArgumentError("state", "this program's", why)
        found = {entry.path: entry for entry in image.manifest.entries}
        for entry in found.values():
            if entry.kind:
                image.array(entry)
        manifest, root = self.manifest(), self._root()
        tree = manifest.tree if image.manifest.tree is None else image.manifest.tree
        own, theirs = manifest.leaves(), msgspec.structs.replace(image.manifest, tree=tree).leaves()
        made = {path: self._made(found[path]) for path, what in theirs.items() if own.get(path) != what}
        _merge(root, tree, "state", made)
        for slot in self._slots(root):  # one at a time: a view may be a copy
            entry, leaf = found[slot.path], self._leaf(slot)
            if isinstance(leaf, ArrayView):
                leaf.flat.view(np.uint8)[...] = image.data[entry.place]
                array = leaf.finish()
                if array is not slot.child:  # an array that cannot be written (MLX, JAX)
                    slot.holder[slot.key] = array
            else:
                slot.holder[slot.key] = entry.plain()
        self._take(root)

    # --- what a framework does in its own way -------------------------------------------------------------------------

    def _root(self) -> Any:
        """Return the tree, with the arrays that the program uses."""
        return self._tree

    def _take(self, tree: Any) -> None:
        """An image was written into a tree of `_root`."""

    def _leaf(self, slot: Slot, *, needs_data: bool = True) -> ArrayView | Plain:
        """Return a leaf, of which not more than type and shape may be looked at without `needs_data`. Raise an error if
        it cannot be kept, or not in this place."""
        leaf = _leaf(slot.path, slot.child)
        if isinstance(slot.holder, tuple) and not (isinstance(leaf, ArrayView) and leaf.finish() is slot.child):
            why = "is in a tuple, where it cannot be replaced; use a list"
            raise InvalidArgumentError(slot.path, slot.child, why)
        return leaf

    def _made(self, entry: Entry) -> Any:
        """Return a new leaf, with any content. Raise `InvalidArgumentError` if NumPy does not have such arrays."""
        return _made(entry)

    def _slots(self, tree: Any) -> Iterator[Slot]:
        """Yield all places, in the order of their paths."""
        return iter(sorted(_slots(tree, "state"), key=lambda slot: slot.path))


class Slot(NamedTuple):
    """A place in the tree: `holder[key]` is the leaf."""

    holder: Any
    key: Any
    path: str
    child: Any


def _entry(path: str, leaf: ArrayView | Plain, offset: int) -> Entry:
    if isinstance(leaf, ArrayView):
        return Entry(path, leaf.kind.name, tuple(leaf.shape), offset, leaf.nbytes)
    if type(leaf) is int and not -(2**63) <= leaf < 2**63:  # such as the state of a random generator
        return Entry(path, number=leaf.to_bytes(leaf.bit_length() // 8 + 1, "little", signed=True))
    return Entry(path, value=leaf)


def _slots(holder: Any, path: str, depth: int = 1) -> Iterator[Slot]:
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
            yield Slot(holder, key, place, child)


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


# --- the tree of a manifest -------------------------------------------------------------------------------------------


def _tree_of(node: Any) -> Any:
    """Return the dicts and lists of a state, with None for each leaf."""
    if isinstance(node, dict):
        return {repr(key): _tree_of(child) for key, child in cast("dict[Any, Any]", node).items()}
    if isinstance(node, (list, tuple)):
        return [_tree_of(child) for child in cast("list[Any]", node)]
    return None


def _children(tree: Any, path: str) -> list[tuple[str, str, Any]]:
    """Return the key, as text, the path and the tree of each child."""
    items = cast("dict[str, Any]", tree).items() if isinstance(tree, dict) else enumerate(cast("list[Any]", tree))
    return [(str(key), f"{path}[{key}]", child) for key, child in items]


def _paths(tree: Any, path: str, depth: int = 1) -> Iterator[str]:
    """Yield the paths of all leaves below a dict or a list. Raise `ValueError` for a tree that no state has."""
    if not isinstance(tree, (dict, list)) or depth > _DEEPEST:
        raise ValueError(f"{path[:60]} is no dict or list, or too deep")
    for key, place, child in _children(tree, path):
        if isinstance(tree, dict):
            _key(key)
        if child is None:
            yield place
        else:
            yield from _paths(child, place, depth + 1)


def _key(text: str) -> str | int:
    """Return the key of a dict whose `repr` this is. Raise `ValueError` if no state has such a key."""
    try:
        key = literal_eval(text)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as exc:
        raise ValueError(f"{text[:60]} is no key") from exc
    if type(key) not in (str, int) or repr(key) != text:
        raise ValueError(f"{text[:60]} is no key")
    return key


def _holders(tree: Any, path: str, outside: str = "", *, is_unclear: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the path of each leaf below a number as the key of a dict, which looks like the place in a list; and in
    words the dicts and lists that the leaf is in."""
    if not isinstance(tree, (dict, list)):
        return
    around = "a dict" if isinstance(tree, dict) else "a list"
    around = f"{around} in {outside}" if outside else around
    for key, place, child in _children(tree, path):
        is_number = isinstance(tree, dict) and not key.startswith(("'", '"'))
        if child is not None:
            yield from _holders(child, place, around, is_unclear=is_unclear or is_number)
        elif is_unclear or is_number:
            yield place, around


def _first_difference(mine: dict[str, str], theirs: dict[str, str]) -> str:
    for path in mine | theirs:
        if mine.get(path) != theirs.get(path):
            return f"{path} is {mine.get(path, 'missing')} here and {theirs.get(path, 'missing')} there"
    return ""


def _nbytes(entry: Entry) -> int:
    """Return the bytes of an array of that shape; -1 if there is no such array."""
    return prod(entry.shape) * element_type_named(entry.kind).itemsize if min(entry.shape, default=0) >= 0 else -1


def _made(entry: Entry) -> Any:
    """Return a new leaf, with any content. Raise `InvalidArgumentError` if NumPy does not have such arrays."""
    if not entry.kind:
        return None
    kind = element_type_named(entry.kind)
    array = plain_view(np.empty(prod(entry.shape), kind.storage), kind, entry.shape).finish()
    if element_type(array.dtype).name != entry.kind:
        why = (
            f"is {entry.kind}, which NumPy has only with ml_dtypes: import that, or create it before ringfort.elastic()"
        )
        raise InvalidArgumentError("state", entry.path, why)
    return array


def _merge(node: Any, tree: Any, path: str, made: dict[str, Any]) -> Any:
    """Return `node`, or what replaces it, with exactly the dicts, lists and leaves of `tree`. Leaves in `made` are
    taken from there."""
    if tree is None:
        return made.get(path, node)
    children = _children(tree, path)
    if isinstance(tree, dict):
        held = cast("dict[Any, Any]", node) if isinstance(node, dict) else dict[Any, Any]()
        keys = {_key(key): (place, child) for key, place, child in children}
        for key in [key for key in held if key not in keys]:
            del held[key]
        for key, (place, child) in keys.items():
            merged = _merge(held.get(key), child, place, made)
            if key not in held or merged is not held[key]:
                held[key] = merged
        return held
    old = cast("list[Any]", node) if isinstance(node, (list, tuple)) else []
    items = [*old, *[None] * (len(children) - len(old))]
    merged = [_merge(item, child, place, made) for item, (_, place, child) in zip(items, children, strict=False)]
    if not isinstance(node, (list, tuple)):
        return merged
    if len(merged) == len(old) and all(map(is_, merged, old)):
        return old  # a tuple too
    if isinstance(node, list):
        old[:] = merged
        return old
    return merged


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
