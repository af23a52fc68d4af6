"""Collectives that a program issues in the callback of a future.

A callback runs in the thread that completes the future, or in the caller's if the future is complete already. So
callbacks of several futures, and the program beside them, issue their collectives in another order at each rank.
Therefore each callback has a communicator of its own over the links of the group. Its id is the path from the
collective to the callback, which is the same at every rank. (NCCL runs callbacks where they are added; Gloo leaves the
order to chance.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any, Final

from ringfort.backends.sub import SubBackend
from ringfort.context import DistributedContext
from ringfort.torch.names import torch
from ringfort.transport.finalisers import WeakKeys

_Callback = Callable[[Any], Any]


class Origin:
    """Where something was issued: by a collective of a group, or in a callback of one. All ranks have the same path."""

    __slots__ = ("_numbers", "group", "path")

    def __init__(self, group: DistributedContext, path: str) -> None:
        self.group = group
        self.path = path
        self._numbers = count(1)

    def next(self) -> Origin:
        """Return the origin of the next callback of this future, or of the next collective of this callback."""
        return Origin(self.group, f"{self.path}/{next(self._numbers)}")


class _Scope(threading.local):
    """The callback that runs in this thread."""

    origin: Origin | None = None
    context: DistributedContext | None = None


_scope: Final = _Scope()
_origins: Final[WeakKeys[Any, Origin]] = WeakKeys()
"""Of the futures of collectives, and of those that `then` has made of them."""


def current(group: DistributedContext) -> DistributedContext:
    """Return the context for what is issued on `group` now: its own, or that of the callback that this thread is in."""
    origin = _scope.origin
    if origin is None or origin.group is not group:
        return group
    if _scope.context is None:
        backend = group.backend
        label = f"callback {origin.path}"
        own = SubBackend(backend, range(backend.world_size), is_ordered=True, label=label, is_brief=True)
        _scope.context = group.over(own)
    return _scope.context


def origin_of(group: DistributedContext, number: int) -> Origin:
    """Return the origin of the collective that is issued now; `number` counts those of the group."""
    origin = _scope.origin
    return Origin(group, str(number)) if origin is None or origin.group is not group else origin.next()


def follow(future: Any, origin: Origin) -> None:
    """Number the callbacks of `future` under `origin` from now on."""
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


@cache
def follow_futures() -> None:
    """Make torch's futures tell their callbacks apart. Idempotent.

    Where a future is complete already, torch calls a callback at once and tells nobody else. Only the method that adds
    the callback knows which future it belongs to. A subclass would not help: what `then` returns is of torch's class.
    """
    base: Any = torch._C.Future
    then, add_done_callback = base.then, base.add_done_callback

    def then_followed(self: Any, callback: _Callback) -> Any:
        origin = _origins.get(self)
        if origin is None:
            return then(self, callback)
        own = origin.next()
        child = then(self, _within(own, callback))
        _origins[child] = Origin(own.group, f"{own.path}/then")
        return child

    def add_followed(self: Any, callback: _Callback) -> None:
        origin = _origins.get(self)
        add_done_callback(self, callback if origin is None else _within(origin.next(), callback))

    base.then, base.add_done_callback = then_followed, add_followed
