"""What Gloo and NCCL have in common: collectives of a process group of torch's, made apart from torch's default one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ringfort.backends.engines.native import Native, Pending
from ringfort.backends.group import Group
from ringfort.errors import BackendUnavailableError
from ringfort.transport.reducer import Array

_NO_TAG = 2
"""Of a message that nobody sends."""


class TorchNative(Native):
    """The collectives of a process group, which is made when the first of them begins."""

    def __init__(self, group: Group, make: Callable[[], Any], wake: Callable[[], None]) -> None:
        super().__init__(group, wake)
        self._make = make
        self.group: Any = None

    @cached_property
    def _c10d(self) -> Any:
        return import_module("torch._C._distributed_c10d")

    def all_reduce(self, x: Any, op: str) -> Pending:
        return self._begin("allreduce", [as_tensor(x)], self._options("Allreduce", reduceOp=self._op(op)))

    def reduce(self, x: Any, root: int, op: str) -> Pending:
        options = self._options("Reduce", reduceOp=self._op(op), rootRank=root, rootTensor=0)
        return self._begin("reduce", [as_tensor(x)], options)

    def broadcast(self, x: Any, root: int) -> Pending:
        options = self._options("Broadcast", rootRank=root, rootTensor=0)
        return self._begin("broadcast", [_bytes(x)], options)

    def all_gather(self, x: Any, into: Any) -> Pending:
        parts = list(_bytes(into).chunk(self._group.world_size))
        return self._begin("allgather", [parts], [_bytes(x)])

    def reduce_scatter(self, x: Any, into: Any, op: str) -> Pending:
        parts = list(as_tensor(x).chunk(self._group.world_size))
        options = self._options("ReduceScatter", reduceOp=self._op(op))
        return self._begin("reduce_scatter", [as_tensor(into)], [parts], options)

    def all_to_all(self, x: Any, into: Any) -> Pending:
        return self._begin("alltoall_base", _bytes(into), _bytes(x), [], [])

    def _op(self, op: str) -> Any:
        return getattr(self._c10d.ReduceOp, op)

    def _options(self, what: str, **settings: Any) -> Any:
        options = getattr(self._c10d, f"{what}Options")()
        for name, value in settings.items():
            setattr(options, name, value)
        return options

    def _begin(self, what: str, *arguments: Any) -> Pending:
        if self.group is None:
            self.group = self._make()
        work = getattr(self.group, what)(*arguments)
        if not self.eager:
            work.get_future().add_done_callback(lambda _: self._wake())  # pyright: ignore[reportUnknownLambdaType]

        def is_done() -> bool:
            if not work.is_completed():
                return False
            work.wait()  # raises what it has failed with
            return True

        return Pending(is_done, (work, arguments))


def may_have(group: str, library: str = "") -> bool:
    """Whether torch is installed with `library` and, where the program has imported it, with the class `group`."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    if c10d is not None:
        return hasattr(c10d, group)
    found = find_spec("torch")
    return found is not None and found.origin is not None and (Path(found.origin).parent / "lib" / library).exists()


def c10d_with(group: str, engine: str, how: str) -> Any:
    """Return torch's module of process groups. Raises `BackendUnavailableError` for `engine` without the class
    `group`."""
    try:
        import_module("torch")
        c10d = import_module("torch._C._distributed_c10d")
    except ImportError as exc:
        raise BackendUnavailableError(engine, how) from exc
    if not hasattr(c10d, group):
        raise BackendUnavailableError(engine, how)
    return c10d


def break_group(group: Any) -> None:
    """Close the connections of a Gloo group, which wakes every thread that waits on them. Gloo has one way to do that,
    on all versions: a wait that times out."""
    peer = (group.rank() + 1) % group.size()
    with suppress(RuntimeError):
        group.recv([as_tensor(bytearray(1))], peer, _NO_TAG).wait(timedelta(milliseconds=1))


def as_tensor(memory: Any) -> Any:
    """Return a tensor of the same memory."""
    torch = import_module("torch")
    if isinstance(memory, torch.Tensor):
        return memory
    array: Array = memory if hasattr(memory, "flags") else np.frombuffer(memory, "u1")
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))


def _bytes(x: Any) -> Any:
    """Return the memory of a flat array, or tensor, as bytes: an engine need not know what it only moves."""
    return as_tensor(x.view("u1") if isinstance(x, np.ndarray) else x.view(import_module("torch").uint8))


class _Writable:
    """An array that must not be written, for torch, which knows no such tensors and warns. It is only read."""

    def __init__(self, array: Array) -> None:
        self._array = array  # keeps the memory
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
