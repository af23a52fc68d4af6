"""The arguments of a process group's methods. Torch passes lists of tensors and an object with options; people may pass
one tensor and plain values."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ringfort.collectives.ops import Op
from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import dist, torch
from ringfort.torch.tensors import to_op


def as_list(tensors: Any) -> list[Any]:
    """A list of tensors, or of the one there is."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


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
    if opts is None:
        return to_op(dist.ReduceOp.SUM)
    return to_op(getattr(opts, "reduceOp", opts))


def root_of(opts: Any) -> int:
    """The root, from options or by itself; 0 where none is said."""
    return int(getattr(opts, "rootRank", opts) or 0)


class _NoOptions:
    """The options of a call that was given none, but perhaps a timeout."""

    asyncOp = True  # noqa: N815  # torch's name

    def __init__(self, timeout: timedelta | None) -> None:
        self.timeout = timeout


def options_of(opts: Any, timeout: timedelta | None) -> Any:
    """What has `timeout` and `asyncOp`, which says that the caller does not wait at once."""
    return opts if hasattr(opts, "timeout") else _NoOptions(timeout)
