"""Acting when an object is gone, without a line of Python in the thread that lets it go.

`__del__` and the callbacks of weak references run at any bytecode of any thread, perhaps under a lock, and Python
swallows what is raised in them: also a Ctrl-C, whose signal may have come during the collection that calls them. So
what is called here is written in C: it starts a thread, and the thread acts.
"""

from __future__ import annotations

import _thread
import atexit
import os
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from types import MethodType
from typing import Any, Final, Generic, ParamSpec, TypeVar, cast
from weakref import ref

K = TypeVar("K")
V = TypeVar("V")
P = ParamSpec("P")


class Finaliser(ref[Any]):
    """A weak reference that starts an action when its object is gone, unless it is called off before."""

    __slots__ = ("start",)

    start: Callable[[], object]

    def call_off(self) -> None:
        """Do nothing when the object is gone. May be called twice."""
        _waiting.discard(self)
        self.start = bool  # what was to be done is not kept any longer


_waiting: Final[set[Finaliser]] = set()
"""Finalisers must live until their objects are gone."""
os.register_at_fork(after_in_child=_waiting.clear)  # what they would do is the parent's business

_start: Final = methodcaller("start")


@atexit.register
def _call_off_all() -> None:
    """Cancel all actions when the program ends. Registered first, so it runs after every other atexit handler; Python
    3.12 and later cannot start threads afterwards."""
    for finaliser in tuple(_waiting):
        finaliser.call_off()


class WeakKeys(Generic[K, V]):
    """A `weakref.WeakKeyDictionary` that runs no Python code when a key is gone."""

    def __init__(self) -> None:
        self._values: dict[ref[K], V] = {}

    def __setitem__(self, key: K, value: V) -> None:
        self._values[ref(key, self._values.__delitem__)] = value

    def __delitem__(self, key: K) -> None:
        del self._values[ref(key)]

    def get(self, key: K) -> V | None:
        """Return the value, or None."""
        return self._values.get(ref(key))


def weakly(method: Callable[P, V], otherwise: V) -> Callable[P, V]:
    """Return a function that calls `method` without keeping its object alive, and returns `otherwise` once it is gone.

    (`weakref.WeakMethod` would run Python code in a finaliser, which could swallow a Ctrl-C.)
    """
    bound = cast("MethodType", method)
    reference, function = ref(bound.__self__), bound.__func__

    def call(*args: P.args, **kwargs: P.kwargs) -> V:
        item = reference()
        return otherwise if item is None else function(item, *args, **kwargs)

    return call


def when_gone(item: object, action: Callable[[], object]) -> Finaliser:
    """Run `action`, which must not hold `item`, in a thread of its own once `item` is gone."""
    finaliser = Finaliser(item, _start)
    finaliser.start = partial(_thread.start_new_thread, _act, (finaliser.call_off, action))
    _waiting.add(finaliser)
    return finaliser


def _act(forget: Callable[[], None], action: Callable[[], object]) -> None:
    forget()
    action()
