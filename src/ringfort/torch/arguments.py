"""The arguments of a process group's methods. Torch passes lists of tensors and an object with options; people may pass
one tensor and plain values."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from ringfort.collectives.ops import Op
from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import dist, torch
from ringfort.torch.tensors import to_op


def as_list(tensors: Any) -> list[Any]:
    """A list of tensors, or of the one there is."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def at_least_one(tensors: Any) -> list[Any]:
    """A list of tensors. Raises `InvalidArgumentError` if it is empty."""
    tensors = as_list(tensors)
    if not tensors:
        raise InvalidArgumentError("tensors", "empty list", "must have at least one")
    return tensors


def only(tensors: Any, name: str) -> Any:
    """The one tensor that there may be. Raises `InvalidArgumentError`."""
    tensors = as_list(tensors)
    if len(tensors) != 1:
        raise InvalidArgumentError(name, f"list of {len(tensors)} tensors", "must have exactly one")
    return tensors[0]


def only_list(lists: Any) -> list[Any]:
    """The one list in a list of lists, or a plain list."""
    lists = list(lists)
    return list(lists[0]) if len(lists) == 1 and not isinstance(lists[0], torch.Tensor) else lists


def pairs_of(outputs: Any, inputs: Any) -> list[tuple[Any, Any]]:
    """Each output with its input. Raises `InvalidArgumentError` if their numbers differ."""
    if len(outputs) != len(inputs):
        raise InvalidArgumentError("outputs", f"list of {len(outputs)}", f"there are {len(inputs)} inputs")
    return list(zip(outputs, inputs, strict=True))


def op_of(opts: Any) -> Op:
    """The reduction, from options or by itself; SUM where none is said."""
    op = getattr(opts, "reduceOp", opts)
    return to_op(dist.ReduceOp.SUM if op is None else op)


def root_of(opts: Any) -> int:
    """The root, from options or by itself; 0 where none is said."""
    return int(getattr(opts, "rootRank", opts) or 0)


class _Options:
    """The options of a call that was given plain values in place of torch's."""

    def __init__(self, timeout: timedelta | None, opts: Any = None, *, root: Any = None, op: Any = None) -> None:
        """`opts` may be a root or a reduction itself."""
        is_root = isinstance(opts, int)
        self.timeout = timeout
        self.asyncOp = getattr(opts, "asyncOp", True)
        self.rootRank = getattr(opts, "rootRank", opts if is_root else 0) if root is None else root
        self.reduceOp = getattr(opts, "reduceOp", None if is_root else opts) if op is None else op


def options_of(opts: Any, timeout: timedelta | None) -> Any:
    """What has `timeout` and `asyncOp`, which says that the caller does not wait at once."""
    return opts if hasattr(opts, "timeout") else _Options(timeout)


_KEYWORDS: Final = {
    "tensor": "tensors",
    "output": "outputs",
    "output_tensor": "outputs",
    "output_tensors": "outputs",
    "output_lists": "outputs",
    "outputTensor": "outputs",
    "input": "inputs",
    "input_tensor": "inputs",
    "input_tensors": "inputs",
    "input_list": "inputs",
    "inputTensor": "inputs",
    "output_split_sizes": "output_sizes",
    "input_split_sizes": "input_sizes",
    "dstRank": "dst",
    "srcRank": "src",
}
"""Torch's names of the arguments of a process group's methods, and ours: one thing has one name in all methods."""


def by_name(method: Callable[..., Any], given: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a method of a process group by our names. `root`, `op` and `timeout` go into its options.

    Raises `TypeError` as Python does."""
    code = method.__code__
    names = code.co_varnames[1 : code.co_argcount]
    values = dict(zip(names, given, strict=False))
    plain = {key: keywords[key] for key in ("root", "op", "timeout") if key in keywords}
    for key in keywords.keys() - plain.keys():
        name = _KEYWORDS.get(key, key)
        if name not in names:
            raise TypeError(f"{method.__name__}() got an unexpected keyword argument {key!r}")
        if name in values:
            raise TypeError(f"{method.__name__}() got multiple values for argument {key!r}")
        values[name] = keywords[key]
    if plain:
        values["opts"] = _Options(plain.pop("timeout", None), values.get("opts"), **plain)
    return values
