"""`Plan`: how one collective of a group runs, for arrays of one element type and size.

A collective is planned, then run. Which way it takes (shared memory, the fast path of small messages, an algorithm over
one connection or several, another engine's own collectives) is decided once, by `_plan` in the collective's
module, and kept on the group: the next call like it only runs the plan. If the decision needs all ranks, for example to
measure the links, it is made in the plan's first run, which all ranks are in (`Plan.undecided`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ringfort.backends.group import Group
from ringfort.transport.messages import Envelope

_REMEMBERED: Final = 256
"""Plans kept of each group: programs repeat a few for ever."""

Run = Callable[..., None]
"""Runs a collective: takes the arrays and, at the end, its `timeout`."""


class Operation(NamedTuple):
    """A collective whose arguments have been checked, and that waits for its turn. Call `run` once: it returns the
    collective's result or raises."""

    name: str
    nbytes: int
    """Bytes of this rank's array: what the metrics count."""
    run: Callable[[], Any]


def unplanned(
    group: Group, name: str, nbytes: int, call: bytes, timeout: float | None, run: Callable[[Envelope], Any]
) -> Operation:
    """Return the operation that runs `run` with the envelope of its `call`. It is not worth a plan."""
    group.check_timeout(timeout)
    return Operation(name, nbytes, lambda: run(group.envelope(call, timeout)))


class Plan:
    """A collective that is ready to run."""

    __slots__ = ("durations", "metrics", "run")

    def __init__(self, run: Run) -> None:
        self.run = run
        """Raises as the collective does. The arrays have the element type and size that were planned for."""
        self.metrics: object = None
        """Whose `durations` are."""
        self.durations: list[float] = []
        """Where to say how many seconds a run took."""

    @classmethod
    def undecided(cls, decide: Callable[[float | None], Run]) -> Plan:
        """Return a plan that calls `decide` in its first run, and so by all ranks together, with that run's timeout."""

        def run(*arguments: Any, timeout: float | None = None) -> None:
            plan.run = decide(timeout)
            plan.run(*arguments, timeout=timeout)

        plan = cls(run)
        return plan


class _Plans(dict[object, Plan]):
    """The plans of a group."""


def planned(group: Group, key: object, make: Callable[[], Plan]) -> Plan:
    """Return the group's plan for `key`, which tells a call from all that are not alike. Without a key it is not kept:
    for a `PremulSum`, whose factor may be another every time."""
    if key is None:
        return make()
    known = group.part(_Plans)
    found = known.get(key)
    if found is None:
        if len(known) >= _REMEMBERED:
            known.clear()
            group.fast_plans.clear()
        found = known[key] = make()
    return found
