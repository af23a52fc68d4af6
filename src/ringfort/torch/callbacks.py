"""Collectives that a program issues in the callback of a future.

A callback runs in the thread that completes the future, or in the caller's if the future is complete already. So
callbacks of several futures, and the program beside them, would issue their collectives in another order at each rank.
Therefore each callback has a communicator of its own over the links of the group, whose id follows from what is the
same at every rank: which callback of which collective it is. (With NCCL callbacks run where they are added; Gloo leaves
the order to chance.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import Any, Final

from ringfort.backends.sub import SubBackend
from ringfort.context import DistributedContext
from ringfort.torch.names import torch
from ringfort.transport.finalisers import WeakKeys

_Callback = Callable[[Any], Any]


class Origin:
    """Of which collective of which group something is a consequence, by a path that is the same at every rank."""

    __slots__ = ("_numbers", "group", "path")

    def __init__(self, group: DistributedContext, path: str) -> None:
        self.group = group
        self.path = path
        self._numbers = count(1)

    def next(self) -> Origin:
        """The next callback of this future, or the next collective of this callback."""
        return Origin(self.group, f"{self.path}/{next(self._numbers)}")


class _Scope(threading.local):
    """The callback that this thread is in."""

    origin: Origin | None = None
    context: DistributedContext | None = None


_scope: Final = _Scope()
_origins: Final[WeakKeys[Any, Origin]] = WeakKeys()
"""Of the futures that collectives have given, and of those that callbacks of them have made."""


def current(group: DistributedContext) -> DistributedContext:
    """The context for what is issued on `group` now: that of the callback of one of its futures, or its own."""
    origin = _scope.origin
    if origin is None or origin.group is not group:
        return group
    if _scope.context is None:
        backend = group.backend
        everybody = range(backend.world_size)
        label = f"callback {origin.path}"
        lane = SubBackend(backend, everybody, is_ordered=True, label=label, is_brief=True)
        _scope.context = group.over(lane)
    return _scope.context


def origin_of(group: DistributedContext, number: int) -> Origin:
    """What the collective that is issued now is known by: `number` is its place in the group."""
    origin = _scope.origin
    return Origin(group, str(number)) if origin is None or origin.group is not group else origin.next()


def follow(future: Any, origin: Origin) -> None:
    """From now on, the callbacks of `future` are known by `origin`."""
    _origins[future] = origin


def _within(origin: Origin, callback: _Callback) -> _Callback:
    def call(future: Any) -> Any:
        before = _scope.origin, _scope.context
        _scope.origin, _scope.context = origin, None
        try:
            return callback(future)
        finally:
            context = _scope.context
            _scope.origin, _scope.context = before
            if context is not None:
                context.let_go()

    return call


# Where a future is complete already, torch calls a callback at once, without a word to whoever made the future. Nothing
# but the method that adds the callback can tell which future it belongs to; and what `then` returns is of torch's own
# class, whatever class the future has.
_then: Final[Any] = torch._C.Future.then
_add_done_callback: Final[Any] = torch._C.Future.add_done_callback


def _then_followed(self: Any, callback: _Callback) -> Any:
    origin = _origins.get(self)
    if origin is None:
        return _then(self, callback)
    own = origin.next()
    child = _then(self, _within(own, callback))
    _origins[child] = Origin(own.group, f"{own.path}/then")
    return child


def _add_followed(self: Any, callback: _Callback) -> None:
    origin = _origins.get(self)
    _add_done_callback(self, callback if origin is None else _within(origin.next(), callback))


torch._C.Future.then = _then_followed
torch._C.Future.add_done_callback = _add_followed
