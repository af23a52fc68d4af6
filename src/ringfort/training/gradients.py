"""`average_gradients`: average a tree of arrays over the ranks, in few large messages instead of many small ones.

Small arrays of one element type are packed into buckets. While one bucket is reduced, the next is packed and the one
before is unpacked. So at most two buckets of memory are in use, however large the model is.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import zip_longest
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np

from ringfort.collectives.arrays import ArrayView, as_view, plain_view
from ringfort.collectives.ops import Op, PremulSum, ReduceOp
from ringfort.compression.collective import Compression
from ringfort.compression.compressor import GradientCompressor, check_floats
from ringfort.compression.strategy import CompressionStrategy
from ringfort.config import MIB
from ringfort.errors import CollectiveMismatchError, GradientMismatchError, InvalidArgumentError
from ringfort.telemetry.trace import own_trace
from ringfort.transport.reducer import Array

if TYPE_CHECKING:
    from ringfort.collectives.work import Work
    from ringfort.context import DistributedContext

BUCKET_BYTES = 25 * MIB
"""As in torch's DDP: large enough that the fixed cost of a message does not matter, small enough that packing and
reducing overlap."""

IN_FLIGHT = 2
"""Buckets under way at once: one is reduced while the other is packed or unpacked. More would only take memory."""

Tree = TypeVar("Tree")


def average_gradients(
    ctx: DistributedContext,
    tree: Tree,
    *,
    weight: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    compression: Compression | None = None,
) -> Tree:
    """Average every array in `tree` over all ranks: nested dicts, lists, tuples and named tuples of float arrays.

    Arrays are averaged in place and the tree itself is returned. Where arrays cannot be written (MLX, JAX), the
    returned tree has new ones of the same kind in their places. `None` stays `None`. Arrays must not partly overlap.

    With `weight`, such as the number of samples that this rank's gradients are the mean of, the result is
    `sum(weight * gradient) / sum(weight)`. A rank with weight 0 contributes nothing, whatever its arrays hold.

    With `compression`, such as `"auto"`, `"int8"` or `"topk(0.01)+int4"`, the mean is approximated with fewer bytes,
    and what is lost in one step is added to the next. (`"auto"` may choose `int4`, which costs Adam some of its
    progress; `"auto(0.05)"` chooses `int8` at most.) The context has a compressor for each strategy; or pass a
    `GradientCompressor`, whose state you can save with a checkpoint. It tells gradients apart by their place in the
    tree.

    Every rank must pass the same structure, shapes and element types, the same settings, and a weight or none.
    The ranks compare these whenever they change, so a difference is an error and never a wrong mean.

    Raises `InvalidArgumentError` for an invalid weight or bucket size, for an array that is not of floats, and at every
    rank if all weights are zero; `UnsupportedArrayError` for a leaf that is not an array or is read-only; and
    `GradientMismatchError`, which names the first leaf that differs, if the ranks' trees differ. If a tree changes
    between calls at some ranks only, that is a `CollectiveMismatchError`, which ends the group. With `compression`
    also `NonFiniteError`, at every rank, if one has gradients that are infinite or not a number.

    Examples:
        >>> with ringfort.init() as ctx:
        ...     average_gradients(ctx, {"layer": {"w": np.ones(2)}}, weight=32)
        {'layer': {'w': array([1., 1.])}}
    """
    _check_arguments(weight, bucket_bytes)
    found = list(walk(tree, "tree"))
    leaves = [Leaf.of(array, path) for path, array in found if array is not None]
    compressor = None if compression is None else _compressor(ctx, compression)
    if compressor is not None:
        for leaf in leaves:
            check_floats(leaf.view, leaf.path)
    ctx.group.check()  # in a world of one, no collective would find out that the group has to change
    if ctx.world_size > 1:
        shapes = {leaf.path: leaf.describe() for leaf in leaves}
        way = "no compression" if compressor is None else f"compression={compressor.strategy}"
        settings = (f"bucket_bytes={bucket_bytes}", "no weight" if weight is None else "a weight", way)
        _agree(ctx, (*settings, *(f"{path}: {shapes.get(path)}" for path, _ in found)))
    op = _operation(ctx, weight)
    if ctx.world_size > 1 or (compressor is not None and compressor.names):
        results = iter(_reduce_all(ctx, leaves, bucket_bytes, op, compressor))
        tree = rebuild(tree, (None if array is None else next(results) for _, array in found))
    own_trace().mark(ctx)
    return tree


def _check_arguments(weight: object, bucket_bytes: object) -> None:
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise InvalidArgumentError("bucket_bytes", bucket_bytes, "must be a whole number of at least 1")
    if weight is None:
        return
    # NumPy's numbers are Real too. The bound is a number, not "finite", so that 10**400 is refused like infinity.
    number = not isinstance(weight, bool) and isinstance(weight, Real)
    if not number or not 0 <= cast("float", weight) <= sys.float_info.max:
        raise InvalidArgumentError("weight", weight, "must be a finite number of at least 0, such as a sample count")


def _compressor(ctx: DistributedContext, compression: Compression) -> GradientCompressor:
    """Return the caller's compressor, or the context's for a strategy."""
    if isinstance(compression, GradientCompressor):
        return compression
    strategy = CompressionStrategy.parse(compression)
    return ctx.compressors.setdefault(strategy, GradientCompressor(strategy))


def _operation(ctx: DistributedContext, weight: float | None) -> Op:
    if weight is None:
        return ReduceOp.MEAN
    total = float(ctx.all_reduce(np.array([weight], np.float64))[0])
    if not 0 < total <= sys.float_info.max:
        raise InvalidArgumentError("weight", weight, f"the weights of all ranks add up to {total:g}; no mean exists")
    return ReduceOp.premul_sum(float(weight) / total)


# --- the tree ---------------------------------------------------------------------------------------------------------


class Leaf(NamedTuple):
    """One array of the tree, its path, and a flat view of its elements."""

    path: str
    array: Any
    view: ArrayView

    @classmethod
    def of(cls, array: Any, path: str) -> Leaf:
        """Raise unless `array` is a writable array of floats or complex numbers."""
        view = as_view(array, path, writable=True)
        if view.kind.kind not in "fc":
            raise InvalidArgumentError(path, view.kind.name, "must be an array of floats; convert it or leave it out")
        return cls(path, array, view)

    def describe(self) -> str:
        """Return element type and shape, such as `float32(3, 4)`."""
        return f"{self.view.kind.name}{self.view.shape}"


def walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path as a Python expression, such as `tree['layers'][0].bias`."""
    if isinstance(node, dict):
        for key, child in cast("dict[Any, Any]", node).items():
            yield from walk(child, f"{path}[{key!r}]")
    elif isinstance(node, (list, tuple)):
        names = getattr(cast(Any, node), "_fields", None)
        for index, child in enumerate(cast("Sequence[Any]", node)):
            yield from walk(child, f"{path}.{names[index]}" if names else f"{path}[{index}]")
    else:
        yield path, node


def rebuild(node: Any, leaves: Iterator[Any]) -> Any:
    """Return `node` with `leaves` in the order of `walk`; the same object where nothing in it was replaced."""
    if isinstance(node, dict):
        old = cast("dict[Any, Any]", node)
        children = {key: rebuild(child, leaves) for key, child in old.items()}
        if all(children[key] is old[key] for key in old):
            return old
        fresh = copy.copy(old)  # not type(node)(children): the constructor of a defaultdict takes something else
        fresh.update(children)
        return fresh
    if isinstance(node, (list, tuple)):
        items = cast("Sequence[Any]", node)
        rebuilt = [rebuild(child, leaves) for child in items]
        if all(new is child for new, child in zip(rebuilt, items, strict=True)):
            return items
        if isinstance(node, list):
            return rebuilt
        make = getattr(cast(Any, node), "_make", tuple)
        return make(rebuilt)
    return next(leaves)


# --- agreement --------------------------------------------------------------------------------------------------------


class _Agreed:
    """The listing that the ranks of a group last agreed on.

    Only the last one is kept, which makes it safe to skip the check. Either all ranks have the listing that they last
    agreed on, or one has another and starts the check, which is a mismatch with the reductions of the others. With
    several former listings, two ranks could each have a different one of them, and average unrelated arrays. The next
    group has agreed on nothing yet: a rank that is new in it knows of no agreement.
    """

    listing: tuple[str, ...] | None = None


def _agree(ctx: DistributedContext, listing: tuple[str, ...]) -> None:
    """Raise `GradientMismatchError` at every rank unless all have the same listing. Free while nothing changes."""
    agreed = ctx.group.part(_Agreed)
    last = agreed.listing
    if listing == last:
        return
    try:
        compare_listings(ctx, listing)
    except CollectiveMismatchError as exc:
        if last is None:
            raise
        before, now = _first_difference(last, listing)
        ours = f"average_gradients with {now}, where its last call had {before},"
        raise CollectiveMismatchError(exc.rank, ours, int(exc.peer or 0), exc.theirs, operation=exc.operation) from exc
    agreed.listing = listing


def compare_listings(ctx: DistributedContext, listing: tuple[str, ...]) -> None:
    """Raise `GradientMismatchError` at every rank, with the first line that differs, unless all have the same
    `listing`. A collective."""
    digests = ctx.all_gather_object(sha256("\n".join(listing).encode()).hexdigest())
    if len(set(digests)) > 1:
        listings = [tuple(other) for other in ctx.all_gather_object(list(listing))]
        peer = next(rank for rank, other in enumerate(listings) if other != listing)
        ours, theirs = _first_difference(listing, listings[peer])
        raise GradientMismatchError(ctx.rank, ours, peer, theirs)


def _first_difference(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    pairs = zip_longest(ours, theirs, fillvalue="no more leaves")
    return next((mine, other) for mine, other in pairs if mine != other)


# --- buckets ----------------------------------------------------------------------------------------------------------


def plan_buckets(leaves: Sequence[tuple[str, int]], bucket_bytes: int) -> list[list[int]]:
    """Return the leaves of each bucket, by index, given each leaf's element type and size in bytes.

    From the last leaf to the first, which is the order in which gradients become ready. A bucket holds one element type
    and at most `bucket_bytes`. A leaf of more than half of that has a bucket of its own, because copying it would cost
    more than a message. Empty leaves are in no bucket. All ranks make the same plan, for it depends on nothing else.
    """
    done: list[list[int]] = []
    open_buckets: dict[str, list[int]] = {}
    room: dict[str, int] = {}
    for index in reversed(range(len(leaves))):
        kind, nbytes = leaves[index]
        if nbytes > bucket_bytes // 2:
            done.append([index])
        elif nbytes > 0:
            if kind in open_buckets and room[kind] < nbytes:
                done.append(open_buckets.pop(kind))
            open_buckets.setdefault(kind, []).append(index)
            room[kind] = (room[kind] if len(open_buckets[kind]) > 1 else bucket_bytes) - nbytes
    return [*done, *open_buckets.values()]


class _Reduction(NamedTuple):
    """A bucket that is being reduced."""

    members: list[int]
    packed: Array
    work: Work


def _reduce_all(
    ctx: DistributedContext, leaves: list[Leaf], bucket_bytes: int, op: Op, compressor: GradientCompressor | None
) -> list[Any]:
    results: list[Any] = [leaf.array for leaf in leaves]
    sizes = [(leaf.view.kind.name, leaf.view.flat.nbytes) for leaf in leaves]
    in_flight: deque[_Reduction] = deque()
    for members in plan_buckets(sizes, bucket_bytes):
        if len(in_flight) == IN_FLIGHT:
            _finish(in_flight.popleft(), leaves, results)
        in_flight.append(_start(ctx, members, leaves, op, compressor))
    while in_flight:
        _finish(in_flight.popleft(), leaves, results)
    return results


def _start(
    ctx: DistributedContext, members: list[int], leaves: list[Leaf], op: Op, compressor: GradientCompressor | None
) -> _Reduction:
    views = [leaves[index].view for index in members]
    packed = views[0].flat if len(views) == 1 else np.concatenate([view.flat for view in views])
    if isinstance(op, PremulSum) and op.factor == 0:
        packed.fill(0)  # a rank without samples may hold NaN, and 0 * NaN would make the mean NaN at every rank
    # NumPy has no bfloat16: its bits are stored as uint16, and only the view has the element type.
    kind = views[0].kind
    operand = plain_view(packed, kind, packed.shape) if kind.name == "bfloat16" else packed
    if compressor is None:
        return _Reduction(members, packed, ctx.all_reduce(operand, op, async_op=True))
    tensors = [(leaves[index].path, leaves[index].view.shape) for index in members]
    return _Reduction(members, packed, ctx.all_reduce_compressed(operand, op, compressor, tensors, async_op=True))


def _finish(reduction: _Reduction, leaves: list[Leaf], results: list[Any]) -> None:
    reduction.work.wait()
    start = 0
    for index in reduction.members:
        view = leaves[index].view
        stop = start + view.flat.size
        if len(reduction.members) > 1:
            view.flat[...] = reduction.packed[start:stop]
        results[index] = view.finish()
        start = stop
