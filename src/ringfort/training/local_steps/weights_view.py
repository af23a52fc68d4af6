"""`WeightsView`: the arrays of a program's tree as one flat array, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ringfort.collectives.arrays import ArrayView, as_view, plain_view
from ringfort.compression.floats import narrow, widen
from ringfort.errors import InvalidArgumentError
from ringfort.training.gradients import Leaf, rebuild, walk
from ringfort.transport.reducer import Array


class WeightsView:
    """The layout of a tree of float arrays. All of it is float32, or float64 if one of the arrays is."""

    def __init__(self, tree: Any, view_of: Callable[..., ArrayView] = as_view) -> None:
        """`view_of` makes a view of an array. Raise `InvalidArgumentError` and `UnsupportedArrayError` for leaves that
        cannot be averaged."""
        self._view_of = view_of
        leaves = [leaf for _, leaf in self._leaves(tree) if leaf is not None]
        if not leaves:
            raise InvalidArgumentError("tree", tree, "must contain at least one array")
        self._described = {leaf.path: leaf.describe() for leaf in leaves}
        edges = accumulate((leaf.view.size for leaf in leaves), initial=0)
        self._spans = [slice(*span) for span in pairwise(edges)]
        self.size = self._spans[-1].stop
        """Elements of all arrays."""
        is_wide = any(leaf.view.kind.name == "float64" for leaf in leaves)
        self.dtype = np.dtype(np.float64 if is_wide else np.float32)
        self.is_replaced = any(leaf.view.finish() is not leaf.array for leaf in leaves)
        """Whether arrays cannot be written, so that a tree gets new ones."""

    @property
    def listing(self) -> tuple[str, ...]:
        """What ranks must have in common."""
        return tuple(f"{path}: {what}" for path, what in self._described.items())

    def read(self, tree: Any) -> Array:
        """Return the elements of all arrays, as a new array."""
        flat = np.empty(self.size, self.dtype)
        for view, span in self._views(tree):
            flat[span] = _wide(view)
        return flat

    def difference(self, weights: Array, tree: Any, part: slice | None = None) -> Array:
        """Return what `weights` were in the tree when they were written there, less what they are now: of a `part` of
        the elements, or of all."""
        part = part or slice(0, self.size)
        found = np.empty(part.stop - part.start, self.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            for view, span in self._views(tree):
                inside, here = _common(span, part)
                if inside.start < inside.stop:
                    mine = _rounded(weights[span], view)[inside]
                    np.subtract(mine, _wide(view)[inside], out=found[here])
        return found

    def write(self, weights: Array, tree: Any, part: slice | None = None, *, kept: float = 0.0) -> Any:
        """Write `weights` into the tree, rounded to the type of each array: a `part` of the elements, or all. Of what
        is there now, `kept` stays: 0.5 is the mean of both. Return the tree; where arrays cannot be written, one with
        new arrays."""
        part = part or slice(0, self.size)
        results = list[Any]()
        for view, span in self._views(tree, writable=True):
            inside, _ = _common(span, part)
            if inside.start < inside.stop:
                values = weights[span]
                if kept or inside != slice(0, values.size):
                    values, new = _wide(view).astype(self.dtype), values[inside]
                    values[inside] = new if not kept else kept * values[inside] + (1 - kept) * new
                _write(values, view)
            results.append(view.finish())
        made = iter(results)
        return rebuild(tree, (None if leaf is None else next(made) for _, leaf in walk(tree, "tree")))

    def _views(self, tree: Any, *, writable: bool = False) -> Iterator[tuple[ArrayView, slice]]:
        found = {path: leaf for path, leaf in self._leaves(tree, writable=writable) if leaf is not None}
        for path in self._described | found:
            ours, now = self._described.get(path, "missing"), found[path].describe() if path in found else "missing"
            if ours != now:
                why = f"was {ours} when LocalSteps was made; make another one when the weights change their shapes"
                raise InvalidArgumentError(path, now, why)
        for path, span in zip(self._described, self._spans, strict=True):
            yield found[path].view, span

    def _leaves(self, tree: Any, *, writable: bool = True) -> Iterator[tuple[str, Leaf | None]]:
        for path, array in walk(tree, "tree"):
            if array is None:
                yield path, None
                continue
            view = self._view_of(array, path, writable=writable)
            if view.kind.kind != "f":
                why = "must be an array of floats; leave it out, or convert it"
                raise InvalidArgumentError(path, view.kind.name, why)
            yield path, Leaf(path, array, view)


def _common(span: slice, part: slice) -> tuple[slice, slice]:
    """Return the elements that an array, which lies at `span`, has in common with a `part` of all: where they are in
    the array, and where in the part."""
    begin, end = max(span.start, part.start), min(span.stop, part.stop)
    end = max(begin, end)
    return slice(begin - span.start, end - span.start), slice(begin - part.start, end - part.start)


def _wide(view: ArrayView) -> Array:
    return view.flat if view.kind.name == "float64" else widen(view, 1.0, copy=False)


def _write(values: Array, view: ArrayView) -> None:
    if view.kind.name == "float64":
        view.flat[...] = values
    else:
        narrow(values.astype(np.float32, copy=False), view)


def _rounded(values: Array, view: ArrayView) -> Array:
    """Return `values` as they are in an array of this type."""
    if view.kind.name in ("float32", "float64"):
        return values
    copy = plain_view(np.empty_like(view.flat), view.kind, view.shape)
    _write(values, copy)
    return _wide(copy)
