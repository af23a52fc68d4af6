"""What a process holds and a forked child must not keep: connections above all.

A child of `os.fork` (DataLoader workers, pools, `multiprocessing`) inherits every descriptor. If it kept the
sockets, the kernel would not close the connections when the parent dies, and the peers would wait for the whole
timeout. So each socket is registered here when it is made, and the child closes its copies before anything else runs.
Objects that use them are registered too, so that using them in the child raises an error that says why.

Nothing here takes a lock: in the child, it may be held by a thread that does not exist there.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar, cast
from weakref import ref

T = TypeVar("T")

FORKED = (
    "this process was forked from the one that formed the group, and cannot use its connections; form another group "
    "here, or start the workers with 'spawn'"
)
"""Why a child process cannot use the objects of its parent."""


class Inherited(Protocol):
    """An object of the parent that a child inherits but cannot use."""

    def abandon(self) -> None:
        """In the child, whose only thread this is: make every later call raise an error that says `FORKED`. Must send
        nothing and take no lock that was made before the fork."""
        ...


class WeakGroup(Generic[T]):
    """The objects of a set that are alive. Unlike `weakref.WeakSet` it runs no Python code when one dies: Python
    swallows what is raised there, and so would swallow a Ctrl-C."""

    def __init__(self) -> None:
        self._refs: set[ref[T]] = set()

    def add(self, item: T) -> None:
        """Remember `item` while it lives."""
        self._refs.add(ref(item, self._refs.discard))

    def alive(self) -> list[T]:
        """Return the objects that live, in no order."""
        return [item for item in (reference() for reference in tuple(self._refs)) if item is not None]

    def clear(self) -> None:
        """Forget all."""
        self._refs.clear()


_held: WeakGroup[Any] = WeakGroup()

S = TypeVar("S", bound="socket.socket | Inherited")


def keep_from_children(held: S) -> S:
    """Make forked children close their copy of a socket, or `abandon` an object. Return it."""
    _held.add(held)
    return held


def _abandon_all() -> None:
    for held in _held.alive():
        with suppress(Exception):  # the rest must be given up whatever this one raises
            held.close() if isinstance(held, socket.socket) else cast("Inherited", held).abandon()
    _held.clear()


os.register_at_fork(after_in_child=_abandon_all)
