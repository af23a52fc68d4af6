"""`Group`: what is true only for one agreed set of ranks. It is made with the set, and dropped with it.

Costs, plans, agreements and trials hold for the ranks that measured, planned, agreed and tried them. Each layer keeps
its own here, by type, and never in a table of its own: an epoch that follows has another `Group`, and so starts without
them at every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from ringfort.errors import DistributedError

T = TypeVar("T")


class _Life:
    """Whether the ranks of a group, and of all its sub-groups, are still a group."""

    error: Callable[[], DistributedError] | None = None


class Group:
    """The state of one set of ranks. A sub-group has one of its own, and ends with its parent's."""

    def __init__(self, parent: Group | None = None) -> None:
        self._life = _Life() if parent is None else parent._life
        self._parts: dict[type[object], object] = {}

    def part(self, kind: type[T]) -> T:
        """The group's one object of `kind`, which is made when it is first asked for."""
        found = self._parts.get(kind)
        if found is None:
            found = self._parts.setdefault(kind, kind())  # of two threads that ask at once, both get the first one's
        return cast("T", found)

    def end(self, error: Callable[[], DistributedError]) -> None:
        """The ranks are no group any more: from now on `check` raises, here and in all sub-groups."""
        self._life.error = self._life.error or error

    def check(self) -> None:
        """Raises what ended the group, if it has ended."""
        if self._life.error is not None:
            raise self._life.error()
