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
from struct import Struct
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol, cast

import msgspec
import numpy as np

from ringfort.collectives.arrays import as_view
from ringfort.context import DistributedContext
from ringfort.errors import GradientLayoutError, InvalidArgumentError
from ringfort.training.elastic.digests import Inspection
from ringfort.training.elastic.sample_order import Array
from ringfort.training.elastic.spare_memory import SpareMemory

Kind = Literal["float16", "bfloat16", "float32", "float64"]
_SUMMED_AS: Final[dict[Kind, str]] = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float32",
    "float64": "float64",
}
_AS_IT_IS: Final = {kind: np.dtype(kind) for kind in ("float16", "float32", "float64")}
"""What NumPy can add up."""
SUMS: Final = "sums"
"""The part of a result with the weight of its samples and the weighted sum of their losses. They are reduced with the
gradients: a result that is settled later, or replayed, must be divided by the same number."""
_PAIR: Final = Struct("<2d")
_WORDS: Final = 8
"""A member's weight and loss as whole numbers of 16 bits, which every float32 has: each member fills its own places,
and all add up the same numbers in the same order. So this costs no collective of its own, and rounds nothing."""
_TAIL: Final = 64 * _WORDS
"""Elements behind the gradients: room for 64 members. In larger groups the sums are reduced by themselves."""
_COPIED: Final = (1 << 20) + 8 * _TAIL
"""Bytes up to which it is quickest to copy an array and to reduce the copy in place."""
_EXACT: Final = 2**53
"""A float has every whole number up to here."""
_PIECE: Final = 1 << 16
"""Elements that are scaled and added at once: the scratch memory for them stays in the L2 cache."""


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
    bucket_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Bytes of a bucket at least: buckets are reduced one after the other. 0 for one bucket per element type."""

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

    def buckets(self) -> list[Bucket]:
        """Return the parts of the buffers that are reduced one after the other: from the end, because the gradients of
        the last layers are complete first. Each has at least `bucket_bytes`, if the buffer has so many, and less than
        three times as many. So a large gradient is in several."""
        found = list[Bucket]()
        for kind, size in self.sizes.items():
            least, begin, end = max(self.bucket_bytes // np.dtype(kind).itemsize or size, 1), size, size
            first, places = len(found), list[int]()
            for place in (place for place in reversed(range(len(self.gradients))) if self._kind(place) == kind):
                begin -= self.gradients[place].size
                places.append(place)
                while end - begin >= 2 * least:
                    found.append(Bucket(kind, end - least, end, tuple(places)))
                    end, places = end - least, [place]
                if end - begin >= least:
                    found.append(Bucket(kind, begin, end, tuple(places)))
                    end, places = begin, []
            if places and len(found) > first:  # too little for a bucket of its own
                last = found.pop()
                end, places = last.end, [*dict.fromkeys((*last.places, *places))]
            if places:
                found.append(Bucket(kind, begin, end, tuple(places)))
        return found

    def _kind(self, place: int) -> str:
        return _SUMMED_AS[self.gradients[place].kind]

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
        if self.bucket_bytes != run.bucket_bytes:
            raise GradientLayoutError("gradients", f"buckets of {self.bucket_bytes} bytes", f"{run.bucket_bytes} bytes")
        raise GradientLayoutError("gradients", f"the tree {self.tree}", f"the tree {run.tree}")


class Bucket(NamedTuple):
    """The elements `begin` to `end` of one buffer, and the places in the layout of the gradients that are there, in
    whole or in part."""

    kind: str
    begin: int
    end: int
    places: tuple[int, ...]


class GradientSum(Protocol):
    """This member's sum of weighted gradients, until they are reduced. `LocalSum` is for programs that hand over
    gradients as arrays; other frameworks have their own."""

    layout: Layout | None
    """None until something was added, or another member's layout is known."""

    @property
    def host_copies(self) -> int:
        """The copies of the gradients that a run takes on the host: of the sum, of results and of their mean."""
        ...

    @property
    def device_bytes(self) -> int:
        """The bytes that the sum takes on a GPU."""
        ...

    @property
    def loss(self) -> float:
        """The weighted sum of the losses."""
        ...

    @property
    def count(self) -> float:
        """The weight of the samples in the sum."""
        ...

    def fits(self, layout: Layout) -> bool:
        """Return whether `prepare` accepts a layout."""
        ...

    def prepare(self, layout: Layout) -> None:
        """Use the layout of the run. Raise `GradientLayoutError` if this member's own gradients have another."""
        ...

    def begin(self) -> None:
        """Begin another step, of which something will be added."""
        ...

    def clear(self) -> None:
        """Begin another step, with zeros."""
        ...

    def expect(self, context: DistributedContext) -> None:
        """The next micro-batch is the last before `reduce`: gradients that are complete may be reduced at once."""
        ...

    def forget(self) -> None:
        """The epoch has ended: `reduce` will not come for what was expected."""
        ...

    def reduce(self, context: DistributedContext) -> dict[str, Array]:
        """Add up the sums of all members, bucket by bucket, into memory of their own: if that fails, another epoch
        reduces them again. Return the results by element type; with `SUMS`, if those came with them."""
        ...

    def inspection(self) -> Inspection | None:
        """Return what was looked at of the last result while it came; None for nothing."""
        ...

    def own(self) -> dict[str, Array]:
        """Return this member's sums by element type, as they were reduced."""
        ...


class LocalSum:
    """The sum of `count * gradients` over the micro-batches that this member has computed."""

    def __init__(self) -> None:
        self.host_copies = 4
        self.device_bytes = 0
        self.layout: Layout | None = None
        """None until something was added, or another member's layout is known."""
        self.buffers: dict[str, Array] = {}
        """The sums by element type."""
        self._whole: dict[str, Array] = {}
        """The same, with room for the sums of weights and losses behind."""
        self._sums: list[Array] = []
        """The part of each gradient in them, in the order of the layout."""
        self._seat: tuple[int, int] | None = None
        self._sources: list[tuple[str, Array, Array | None, Array | None]] = []
        """What is reduced in a group of this size, at this rank: see `_seated`."""
        self.count = 0.0
        self.loss = 0.0
        self.is_adding = False
        """Whether some of a micro-batch was added to others and it is not known that all of it was: `add` was
        interrupted. Whoever calls `add` sets it back."""
        self._overwrites = False
        self._results = SpareMemory()
        self._means = SpareMemory()

    def fits(self, layout: Layout) -> bool:
        """Return whether `prepare` accepts a layout."""
        return self.layout in (None, layout)

    def prepare(self, layout: Layout) -> None:
        """Use the layout of the run, with zeros: a member that was dealt nothing takes part in the reduction too.

        Raise `GradientLayoutError` if this member's own gradients have another.
        """
        if self.layout is not None:
            self.layout.check(layout)
            return
        self.layout = layout
        self._whole = {kind: np.zeros(size + _TAIL, kind) for kind, size in layout.sizes.items()}
        self.buffers = {kind: self._whole[kind][:size] for kind, size in layout.sizes.items()}
        self._sums, self._seat = list(self._parts(self.buffers)), None

    def begin(self) -> None:
        """Begin another step, of which something will be added: that overwrites the sums. (Zeros would have to be
        written and read first.)"""
        self.count, self.loss, self._overwrites, self.is_adding = 0.0, 0.0, True, False

    def clear(self) -> None:
        """Begin another step, with zeros."""
        self.count, self.loss, self._overwrites, self.is_adding = 0.0, 0.0, False, False
        for buffer in self.buffers.values():
            buffer.fill(0)

    def add(self, tree: Any, count: float, unit: int = 1) -> float:
        """Add the gradients in `tree`, dicts and lists of arrays that are each the mean over `count` samples. Return
        the weight with which they were added: `count / unit`. With a count of 0 zeros are added, whatever the gradients
        are: the mean over nothing may be NaN.

        Raise `GradientLayoutError` if the tree is not like that of the micro-batches before; nothing is added then.
        """
        weight = checked_count(count) / unit
        arrays = None if self.layout is None else _arrays_like(tree, self.layout)
        if arrays is None:
            arrays = self._checked_arrays(tree)
        self.is_adding = not self._overwrites
        with np.errstate(over="ignore", invalid="ignore"):  # infinities are found after the reduction
            for sums, values in zip(self._sums, arrays, strict=True):
                if not weight:
                    if self._overwrites:
                        sums.fill(0)
                elif self._overwrites:
                    np.multiply(values, weight, sums, dtype=sums.dtype)
                else:
                    _add_scaled(sums, values, weight)
        self.count += weight
        self._overwrites = False
        return weight

    def _checked_arrays(self, tree: Any) -> list[Array]:
        gradients, arrays = list[Gradient](), list[Array]()
        shape = _taken_apart(tree, "gradients", gradients, arrays)
        if not gradients:
            raise InvalidArgumentError("gradients", tree, "must contain at least one array")
        layout = Layout(tuple(gradients), shape)
        if self.layout is None:
            self.prepare(layout)
        else:
            layout.check(self.layout)
        return arrays

    def expect(self, context: DistributedContext) -> None:
        """Do nothing: the gradients of a micro-batch come all at once."""

    def forget(self) -> None:
        """Do nothing: nothing was begun."""

    def reduce(self, context: DistributedContext) -> dict[str, Array]:
        """Add up the sums of all members, out of place. Weights and losses travel behind the first gradients."""
        total, n, me = dict[str, Array](), context.world_size, context.rank
        if self._seat != (n, me):
            self._seat, self._sources = (n, me), self._seated(n, me)
        for kind, source, words, own in self._sources:
            if words is not None and own is not None:
                words.fill(0)
                own[...] = np.frombuffer(_PAIR.pack(self.count, self.loss), np.uint16)
            size, whole = self.buffers[kind].size, self._whole[kind]
            into = self._results.take(kind, whole.size)
            out = into[: source.size]
            if out.nbytes <= _COPIED:
                np.copyto(out, source)
                context.all_reduce(out)
            elif out.size:
                context.all_reduce(source, out=out)
            total[kind] = into[:size]
            if words is not None:
                total[SUMS] = _added_up(out[size:].astype(np.uint16).tobytes())
        return total

    def _seated(self, n: int, me: int) -> list[tuple[str, Array, Array | None, Array | None]]:
        """Return of each type what is reduced as rank `me` of `n`, and in it the place for all members' weights and
        losses, and this one's: behind the first gradients only, and not in large groups."""
        found = list[tuple[str, Array, Array | None, Array | None]]()
        for kind, whole in self._whole.items():
            size, tail = self.buffers[kind].size, 0 if found or _WORDS * n > _TAIL else _WORDS * n
            words = whole[size : size + tail] if tail else None
            own = None if words is None else words[_WORDS * me : _WORDS * (me + 1)]
            found.append((kind, whole[: size + tail], words, own))
        return found

    def inspection(self) -> Inspection | None:
        """Return None: a result comes as a whole."""

    def own(self) -> dict[str, Array]:
        """Return this member's sums by element type."""
        return self.buffers

    def mean(self, sums: dict[str, Array], count: float) -> Any:
        """Return `sums / count` as the tree that was added, of NumPy arrays that cannot be written: tuples have become
        lists, and bfloat16 has become float32. (NumPy alone has no bfloat16, and what a member has imported must not
        change the bits.)"""
        assert self.layout is not None
        if count != 1:
            with np.errstate(over="ignore", invalid="ignore"):
                for kind in self.layout.sizes:
                    into = self._means.take(kind, sums[kind].size)
                    sums = {**sums, kind: np.divide(sums[kind], count, out=into, dtype=into.dtype)}
        means = list[Array]()
        for one, values in zip(self.layout.gradients, self._parts(sums), strict=True):
            mean = values
            if one.kind == "float16":
                with np.errstate(over="ignore"):
                    mean = values.astype(np.float16)
            mean = mean.reshape(one.shape)
            mean.flags.writeable = False
            means.append(mean)
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


def _added_up(pairs: bytes) -> Array:
    """Return the sums of all members' weights and losses. (Not by `sum`, which rounds otherwise in other versions of
    Python.)"""
    weight = loss = 0.0
    for one, other in _PAIR.iter_unpack(pairs):
        weight += one
        loss += other
    return np.array((weight, loss))


def _add_scaled(sums: Array, values: Array, count: float) -> None:
    """Do `sums += count * values` without an array for the product."""
    if count == 1:
        np.add(sums, values, out=sums)
        return
    scratch = np.empty(min(_PIECE, sums.size), sums.dtype)
    for begin in range(0, sums.size, _PIECE):
        part = sums[begin : begin + _PIECE]
        scaled = np.multiply(values[begin : begin + _PIECE], count, out=scratch[: part.size], dtype=sums.dtype)
        np.add(part, scaled, out=part)


def checked_count(count: Any) -> float:
    """Return a weight as a float. Raise `InvalidArgumentError` if it is none."""
    if type(count) in (int, float) and 0 <= count < _EXACT:  # as most are
        return float(count)
    # NumPy's numbers are Real too.
    with suppress(OverflowError):
        if not isinstance(count, bool) and isinstance(count, Real) and 0 <= float(count) < inf:
            return float(count)
    raise InvalidArgumentError("count", count, "must be the number of samples, or of tokens, of the micro-batch")


def checked_loss(loss: Any) -> float:
    """Return a loss as a float: a number, or an array of any framework with one element and no axis. It may be infinite
    or NaN. Raise `InvalidArgumentError` for anything else."""
    if type(loss) is float:  # as most are
        return loss
    is_one = not isinstance(loss, (bool, str, bytes, bytearray)) and tuple(getattr(loss, "shape", ())) == ()
    with suppress(TypeError, ValueError, OverflowError):
        if is_one:
            return float(loss)
    raise InvalidArgumentError("loss", loss, "must be one number, the mean loss over the samples of the micro-batch")


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


def _arrays_like(tree: Any, layout: Layout) -> list[Array] | None:
    """Return the leaves of `tree` if they are NumPy arrays of this layout that can be used as they are; else None. Most
    trees are like the one before, and this takes a tenth of the time of `_taken_apart`."""
    leaves = list[Any]()
    if not _walk(tree, layout.tree, leaves):
        return None
    for leaf, one in zip(leaves, layout.gradients, strict=True):
        kind = _AS_IT_IS.get(one.kind)  # NumPy takes None for float64
        is_alike = type(leaf) is np.ndarray and kind is not None and leaf.dtype == kind and leaf.shape == one.shape
        if not is_alike or not leaf.flags.c_contiguous:
            return None
    return [leaf.reshape(-1) for leaf in leaves]


def _walk(node: Any, like: Any, leaves: list[Any]) -> bool:
    """Append the leaves below `node`. Return whether it has the dicts and lists of `like`."""
    if like is None:
        leaves.append(node)
        return True
    if type(like) is dict:
        same = type(node) is dict and list(node) == list(like)  # pyright: ignore[reportUnknownArgumentType]
        return same and all(_walk(node[key], child, leaves) for key, child in like.items())  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    same = type(node) in (list, tuple) and len(node) == len(like)
    return same and all(_walk(*both, leaves) for both in zip(node, like, strict=True))


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


def is_finite(sums: dict[str, Array]) -> bool:
    """Return whether no sum is infinite or NaN."""
    return all(bool(np.isfinite(buffer).all()) for buffer in sums.values())
