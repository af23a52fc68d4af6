"""`LocalSum`: the gradients of this member's micro-batches, added up until they are reduced. Pure.

All gradients of one element type are in one flat buffer, so a step has one reduction per element type. 16-bit floats
are added up in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Final, cast

import msgspec
import numpy as np

from ringfort.collectives.arrays import as_view
from ringfort.errors import GradientMismatchError, InvalidArgumentError
from ringfort.training.elastic.sample_order import Array, random_key

_WORDS: Final = 32768
"""Words of eight bytes that are digested at once: 256 KiB stay in the L2 cache for the second look."""
_SUMMED_AS: Final = {"float16": "float32", "float32": "float32", "float64": "float64"}


class Gradient(msgspec.Struct, frozen=True):
    """Where one gradient is in the tree, and what it is."""

    path: tuple[str | int, ...]
    kind: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def __str__(self) -> str:
        return f"gradients{''.join(f'[{key!r}]' for key in self.path)}: {self.kind}{self.shape}"


Layout = tuple[Gradient, ...]
"""All gradients of a step, the same in every step and at every member."""


class LocalSum:
    """The sum of `count * gradients` over the micro-batches that this member has computed."""

    def __init__(self) -> None:
        self.layout: Layout = ()
        self.buffers: dict[str, Array] = {}
        """The sums by element type."""
        self.count = 0.0
        """The number of samples in them."""

    def prepare(self, layout: Layout) -> None:
        """Use the layout of the other members, if this one has not added anything yet. Raise `GradientMismatchError` if
        it has, and its own is another."""
        if not self.layout:
            self.layout = layout
            sizes = {_SUMMED_AS[one.kind]: 0 for one in layout}
            for one in layout:
                sizes[_SUMMED_AS[one.kind]] += one.size
            self.buffers = {kind: np.zeros(size, kind) for kind, size in sorted(sizes.items())}
        elif layout != self.layout:
            pairs = zip((*self.layout, None), (*layout, None), strict=False)
            ours, theirs = next((mine, other) for mine, other in pairs if mine != other)
            raise GradientMismatchError(0, str(ours), 0, str(theirs))

    def clear(self) -> None:
        """Begin another step."""
        self.count = 0.0
        for buffer in self.buffers.values():
            buffer.fill(0)

    def add(self, tree: Any, count: float) -> None:
        """Add `count` times the gradients in `tree`: dicts and lists of arrays, each the mean over `count` samples."""
        if isinstance(count, bool) or not count > 0:
            raise InvalidArgumentError("count", count, "must be the number of samples of the micro-batch")
        leaves = list(_leaves(tree, ()))
        self.prepare(tuple(gradient for gradient, _ in leaves))
        for (_, values), sums in zip(leaves, self._parts(self.buffers), strict=True):
            np.add(sums, values if count == 1 else np.multiply(values, count, dtype=sums.dtype), out=sums)
        self.count += count

    def mean(self, sums: dict[str, Array], count: float) -> Any:
        """Return `sums / count` as a tree of the layout, of NumPy arrays."""
        tree: Any = {}
        for gradient, values in zip(self.layout, self._parts(sums), strict=True):
            mean = np.divide(values, count, dtype=values.dtype).astype(gradient.kind, copy=False)
            tree = _put(tree, gradient.path, mean.reshape(gradient.shape))
        return _with_lists(tree)

    def _parts(self, buffers: dict[str, Array]) -> Iterator[Array]:
        """Yield the part of each gradient, in the order of the layout."""
        used = dict.fromkeys(buffers, 0)
        for one in self.layout:
            kind = _SUMMED_AS[one.kind]
            first = used[kind]
            used[kind] = first + one.size
            yield buffers[kind][first : used[kind]]


def _leaves(node: Any, path: tuple[str | int, ...]) -> Iterator[tuple[Gradient, Array]]:
    if isinstance(node, (dict, list, tuple)):
        items = cast("dict[Any, Any]", node).items() if isinstance(node, dict) else enumerate(cast("list[Any]", node))
        for key, child in items:
            if not isinstance(key, (str, int)):
                raise InvalidArgumentError("gradients", key, "keys must be strings or whole numbers")
            yield from _leaves(child, (*path, key))
        return
    name = f"gradients{''.join(f'[{key!r}]' for key in path)}"
    view = as_view(node, name)
    if view.kind.name not in _SUMMED_AS:
        raise InvalidArgumentError(name, view.kind.name, f"must be one of {', '.join(_SUMMED_AS)}; convert it")
    yield Gradient(path, view.kind.name, tuple(view.shape)), view.flat


def _put(tree: Any, path: Sequence[str | int], value: Array) -> Any:
    if not path:
        return value
    node = tree
    for key in path[:-1]:
        node = node.setdefault(key, {})
    node[path[-1]] = value
    return tree


def _with_lists(node: Any) -> Any:
    """Return a tree in which dicts with the keys 0, 1, ... are lists again."""
    if not isinstance(node, dict):
        return node
    children = {key: _with_lists(child) for key, child in cast("dict[Any, Any]", node).items()}
    return list(children.values()) if list(children) == list(range(len(children))) and children else children


def is_finite(sums: dict[str, Array]) -> bool:
    """Return whether no sum is infinite or NaN."""
    return all(bool(np.isfinite(buffer).all()) for buffer in sums.values())


def digest_share(sums: dict[str, Array], me: int, size: int) -> int:
    """Return the digest of this member's share of the blocks. The digests of all shares add up to that of the whole,
    modulo 2**64, however many members share it. It finds damage; it is no proof against forgery."""
    total, block = 0, 0
    for kind in sorted(sums):
        words = _words(sums[kind])
        count = -(-words.size // _WORDS)
        first, last = count * me // size, count * (me + 1) // size
        if first < last:
            total += _digest(words[first * _WORDS : last * _WORDS], block + first)
        block += count
    return total % 2**64


def _digest(words: Array, block: int) -> int:
    whole = words.size // _WORDS
    found = 0
    for index in range(whole + bool(words.size % _WORDS)):
        part = words[index * _WORDS : (index + 1) * _WORDS]
        found += random_key(block + index, int(part.sum(dtype=np.uint64)), int(np.bitwise_xor.reduce(part)))
    return found


def _words(array: Array) -> Array:
    """Return the memory of an array as words of eight bytes; the last one is filled up with zeros."""
    data = array.view(np.uint8)
    if data.size % 8:
        data = np.concatenate([data, np.zeros(-data.size % 8, np.uint8)])
    return data.view(np.uint64)
