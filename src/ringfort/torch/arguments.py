"""The arguments of a process group's methods. Torch passes lists of tensors and an options object; people may pass a
single tensor and plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Final

from ringfort.collectives.ops import Op
from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import dist, torch
from ringfort.torch.tensors import to_op


def first_tensor(arguments: Iterable[Any]) -> Any:
    """Return the first tensor among arguments that are tensors, lists of them or lists of lists; None if none is."""
    for argument in arguments:
        found = argument
        while type(found) in (list, tuple) and found:
            found = found[0]
        if hasattr(found, "is_cpu"):
            return found
    return None


def at_least_one(tensors: Any) -> list[Any]:
    """Return a list of tensors, also for a single one. Raises `InvalidArgumentError` if it is empty."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if not tensors:
        raise InvalidArgumentError("tensors", "empty list", "must have at least one tensor")
    return tensors


def only(tensors: Any, name: str) -> Any:
    """Return the only tensor of a list. Raises `InvalidArgumentError` if there are more, or none."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if len(tensors) != 1:
        raise InvalidArgumentError(name, f"list of {len(tensors)} tensors", "must have exactly one tensor")
    return tensors[0]


def only_list(lists: Any) -> list[Any]:
    """Return the only list of a list of lists, or a plain list."""
    lists = list(lists)
    return list(lists[0]) if len(lists) == 1 and not isinstance(lists[0], torch.Tensor) else lists


def pairs_of(outputs: Any, inputs: Any) -> list[tuple[Any, Any]]:
    """Return each output with its input. Raises `InvalidArgumentError` if their numbers differ."""
    if len(outputs) != len(inputs):
        why = f"must have one for each of {len(inputs)} inputs"
        raise InvalidArgumentError("outputs", f"list of {len(outputs)}", why)
    return list(zip(outputs, inputs, strict=True))


class Options:
    """The options of a call that was given plain values in place of torch's options."""

    timeout: timedelta | None = None
    rootTensor = 0  # noqa: N815  # torch's name

    def __init__(
        self, opts: Any = None, timeout: timedelta | None = None, *, root: int | None = None, op: Any = None
    ) -> None:
        """`opts` may be torch's options, a root or a reduction; the other arguments replace what it says."""
        is_root = isinstance(opts, int)
        self.timeout = getattr(opts, "timeout", None) if timeout is None else timeout
        self.asyncOp = getattr(opts, "asyncOp", True)
        self.rootRank = getattr(opts, "rootRank", opts if is_root else 0) if root is None else root
        self.reduceOp = getattr(opts, "reduceOp", None if is_root else opts) if op is None else op


def options_of(opts: Any, timeout: timedelta | None = None, op: Any = None) -> Any:
    """Return torch's options, or plain values as `Options`."""
    # Of the class: torch takes a microsecond to make a timedelta.
    return opts if hasattr(opts.__class__, "timeout") else Options(opts, timeout, op=op)


def op_of(opts: Any) -> Op:
    """Return the reduction of `options_of`; SUM by default."""
    return to_op(dist.ReduceOp.SUM if opts.reduceOp is None else opts.reduceOp)


def root_tensor_of(opts: Any, tensors: list[Any]) -> int:
    """Return which of the root's tensors is meant. Raises `InvalidArgumentError`."""
    if not 0 <= opts.rootTensor < len(tensors):
        raise InvalidArgumentError("rootTensor", opts.rootTensor, f"must be from 0 to {len(tensors) - 1}")
    return opts.rootTensor


_KEYWORDS: Final = {
    "tensor": "tensors",
    "output_split_sizes": "output_sizes",
    "input_split_sizes": "input_sizes",
    "dstRank": "dst",
    "srcRank": "src",
    **dict.fromkeys(("output", "output_tensor", "output_tensors", "output_lists", "outputTensor"), "outputs"),
    **dict.fromkeys(("input", "input_tensor", "input_tensors", "input_list", "inputTensor"), "inputs"),
}
"""Torch's names of the arguments of a process group's methods, and ours: the same in all methods."""


def by_name(method: Callable[..., Any], given: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a method of a process group by our names. `root`, `op` and `timeout` become options.

    Raises `TypeError` as Python does.
    """
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
        values["opts"] = Options(values.get("opts"), **plain)
    return values
