"""`LocalSum`: the gradients of this member's micro-batches, added up until they are reduced. Pure.

All gradients of one element type are in one flat buffer, so a step has one reduction per element type. 16-bit floats
are added up in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import zip_longest
from math import inf, prod
from numbers import Real
from typing import Annotated, Any, Final, Literal, cast

import msgspec
import numpy as np

from ringfort.collectives.arrays import as_view
from ringfort.errors import GradientLayoutError, InvalidArgumentError
from ringfort.training.elastic.sample_order import Array, mix_array, random_key

Kind = Literal["float16", "bfloat16", "float32", "float64"]
_SUMMED_AS: Final[dict[Kind, str]] = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float32",
    "float64": "float64",
}
_MEAN_AS: Final[dict[Kind, str]] = {**_SUMMED_AS, "float16": "float16"}
"""NumPy alone has no bfloat16, and what a member has imported must not change the bits."""
_BLOCK: Final = 1 << 18
"""Bytes that are digested at once: with weights and scratch memory they stay in the L2 cache."""
_TURNS: Final = 16
"""Turns within which each block is in a sample. A sample of 64 MiB takes 0.8 ms of one core, of 1 MiB 0.06 ms."""
_FEWEST: Final = 2
"""Blocks of a sample at least, so that small gradients are in it whole: theirs and that of the sums."""
_WEIGHTS: Final = mix_array(np.arange(_BLOCK // 8, dtype=np.uint64)) | np.uint64(1)


class Gradient(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One gradient: its place in the tree, such as `gradients['w'][0]`, and what it is."""

    path: str
    kind: Kind
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{self.kind}{self.shape}"


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All gradients of a step, the same in every step and at every member."""

    gradients: tuple[Gradient, ...]
    tree: Any
    """The dicts and lists that the gradients are in, with None in the place of each gradient."""

    def __post_init__(self) -> None:
        if not self.gradients or _count(self.tree) != len(self.gradients):
            raise ValueError("the tree does not have a place for each gradient")

    @property
    def sizes(self) -> dict[str, int]:
        """The number of elements in each buffer, by element type. A receiver checks this before it takes memory."""
        sizes = {_SUMMED_AS[one.kind]: 0 for one in sorted(self.gradients, key=lambda one: _SUMMED_AS[one.kind])}
        for one in self.gradients:
            sizes[_SUMMED_AS[one.kind]] += one.size
        return sizes

    def check(self, run: Layout) -> None:
        """Raise `GradientLayoutError` if this layout is not that of the run."""
        if self == run:
            return
        ours, theirs = ({one.path: str(one) for one in layout.gradients} for layout in (self, run))
        for path in ours | theirs:
            if ours.get(path) != theirs.get(path):
                raise GradientLayoutError(path, ours.get(path, "missing"), theirs.get(path, "missing"))
        for place, (mine, other) in enumerate(zip_longest(ours, theirs)):
            if mine != other:
                raise GradientLayoutError(mine, f"number {place}", f"number {list(theirs).index(mine)}")
        raise GradientLayoutError("gradients", f"the tree {self.tree}", f"the tree {run.tree}")


class LocalSum:
    """The sum of `count * gradients` over the micro-batches that this member has computed."""

    def __init__(self) -> None:
        self.layout: Layout | None = None
        """None until something was added, or another member's layout is known."""
        self.buffers: dict[str, Array] = {}
        """The sums by element type."""
        self.count = 0.0
        """The number of samples in them."""
        self._overwrites = False

    def prepare(self, layout: Layout) -> None:
        """Use the layout of the run, with zeros: a member that was dealt nothing takes part in the reduction too.

        Raise `GradientLayoutError` if this member's own gradients have another.
        """
        if self.layout is not None:
            self.layout.check(layout)
            return
        self.layout = layout
        self.buffers = {kind: np.zeros(size, kind) for kind, size in layout.sizes.items()}

    def begin(self) -> None:
        """Begin another step, of which something will be added: that overwrites the sums. (Zeros would have to be
        written and read first.)"""
        self.count, self._overwrites = 0.0, True

    def clear(self) -> None:
        """Begin another step, with zeros."""
        self.count, self._overwrites = 0.0, False
        for buffer in self.buffers.values():
            buffer.fill(0)

    def add(self, tree: Any, count: float) -> None:
        """Add `count` times the gradients in `tree`: dicts and lists of arrays, each the mean over `count` samples.

        Raise `GradientLayoutError` if the tree is not like that of the micro-batches before; nothing is added then.
        """
        count = _checked(count)
        gradients, arrays = list[Gradient](), list[Array]()
        shape = _taken_apart(tree, "gradients", gradients, arrays)
        if not gradients:
            raise InvalidArgumentError("gradients", tree, "must contain at least one array")
        layout = Layout(tuple(gradients), shape)
        if self.layout is None:
            self.prepare(layout)
        else:
            layout.check(self.layout)
        with np.errstate(over="ignore", invalid="ignore"):  # infinities are found after the reduction
            for sums, values in zip(self._parts(self.buffers), arrays, strict=True):
                if self._overwrites:
                    np.multiply(values, count, out=sums, dtype=sums.dtype)
                    continue
                scaled = values if count == 1 else np.multiply(values, count, dtype=sums.dtype)
                np.add(sums, scaled, out=sums)
        self.count += count
        self._overwrites = False

    def mean(self, sums: dict[str, Array], count: float) -> Any:
        """Return `sums / count` as the tree that was added, of NumPy arrays; tuples have become lists, and bfloat16
        has become float32."""
        assert self.layout is not None
        means = list[Array]()
        with np.errstate(over="ignore", invalid="ignore"):
            for one, values in zip(self.layout.gradients, self._parts(sums), strict=True):
                mean = np.divide(values, count, dtype=values.dtype).astype(_MEAN_AS[one.kind], copy=False)
                means.append(mean.reshape(one.shape))
        return _put_together(self.layout.tree, iter(means))

    def _parts(self, buffers: dict[str, Array]) -> Iterator[Array]:
        """Yield the part of each gradient, in the order of the layout."""
        assert self.layout is not None
        used = dict.fromkeys(buffers, 0)
        for one in self.layout.gradients:
            kind = _SUMMED_AS[one.kind]
            first = used[kind]
            used[kind] = first + one.size
            yield buffers[kind][first : used[kind]]


def _checked(count: Any) -> float:
    # NumPy's numbers are Real too.
    with suppress(OverflowError):
        if not isinstance(count, bool) and isinstance(count, Real) and 0 < float(count) < inf:
            return float(count)
    raise InvalidArgumentError("count", count, "must be the number of samples of the micro-batch")


# --- the tree ---------------------------------------------------------------------------------------------------------


def _taken_apart(node: Any, path: str, gradients: list[Gradient], arrays: list[Array]) -> Any:
    """Append the leaves below `node`. Return its dicts and lists alone."""
    if isinstance(node, dict):
        children = cast("dict[Any, Any]", node)
        for key in children:
            if type(key) not in (str, int):
                raise InvalidArgumentError(path, key, "keys must be strings or whole numbers")
        return {key: _taken_apart(child, f"{path}[{key!r}]", gradients, arrays) for key, child in children.items()}
    if isinstance(node, (list, tuple)):
        items = enumerate(cast("list[Any]", node))
        return [_taken_apart(child, f"{path}[{index}]", gradients, arrays) for index, child in items]
    view = as_view(node, path)
    kind = view.kind.name
    if kind not in _SUMMED_AS:
        raise InvalidArgumentError(path, kind, f"must be one of {', '.join(_SUMMED_AS)}; convert it")
    gradients.append(Gradient(path, kind, tuple(view.shape)))
    arrays.append(_widened(view.flat) if kind == "bfloat16" else view.flat)
    return None


def _put_together(node: Any, leaves: Iterator[Array]) -> Any:
    if isinstance(node, dict):
        return {key: _put_together(child, leaves) for key, child in cast("dict[Any, Any]", node).items()}
    if isinstance(node, list):
        return [_put_together(child, leaves) for child in cast("list[Any]", node)]
    return next(leaves)


def _count(node: Any) -> int:
    """Return the number of leaves."""
    if isinstance(node, (dict, list)):
        children = cast("dict[Any, Any]", node).values() if isinstance(node, dict) else cast("list[Any]", node)
        return sum(map(_count, children))
    return 1


def _widened(bits: Array) -> Array:
    """Return bfloat16 as float32, of which it is the upper half."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


# --- the reduced sums -------------------------------------------------------------------------------------------------


def is_finite(sums: dict[str, Array]) -> bool:
    """Return whether no sum is infinite or NaN."""
    return all(bool(np.isfinite(buffer).all()) for buffer in sums.values())


def digest_share(sums: dict[str, Array], me: int, size: int) -> int:
    """Return the digest of this member's share of the blocks. The digests of all shares add up to that of the whole,
    modulo 2**64, however many members share it. It finds damage; it is no proof against forgery."""
    total, before = 0, 0
    for kind in sorted(sums):
        data = sums[kind].view(np.uint8)
        count = -(-data.size // _BLOCK)
        for index in range(count * me // size, count * (me + 1) // size):
            total += random_key(before + index, _block_digest(data[index * _BLOCK : (index + 1) * _BLOCK]))
        before += count
    return total % 2**64


def digest_sample(sums: dict[str, Array], turn: int) -> int:
    """Return the digest of some blocks: others at each turn, and each block within 16 consecutive turns."""
    blocks = [(kind, -(-sums[kind].nbytes // _BLOCK)) for kind in sorted(sums)]
    count = sum(number for _, number in blocks)
    size = min(count, max(_FEWEST, -(-count // _TURNS)))
    wanted = {(turn * size + place) % count for place in range(size)}
    total, before = 0, 0
    for kind, number in blocks:
        data = sums[kind].view(np.uint8)
        for index in (place - before for place in wanted if before <= place < before + number):
            total += random_key(before + index, _block_digest(data[index * _BLOCK : (index + 1) * _BLOCK]))
        before += number
    return total % 2**64


def _block_digest(data: Array) -> int:
    """Return the sum of the words of eight bytes, each times an odd number that depends on its place: a flipped bit
    always changes it, and swapped words almost always do. (16 MiB on one core: 2.4 ms; crc32: 8.1 ms.)"""
    if data.size % 8:
        data = np.concatenate([data, np.zeros(-data.size % 8, np.uint8)])
    words = data.view(np.uint64)
    # The upper half of a word is added to the lower: otherwise two flipped signs cancel each other modulo 2**64.
    mixed = words >> np.uint64(32)
    mixed ^= words
    mixed *= _WEIGHTS[: words.size]
    return int(mixed.sum(dtype=np.uint64))
