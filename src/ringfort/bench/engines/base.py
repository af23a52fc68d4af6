"""What an engine of the benchmark is: it forms a group once, binds a case to buffers once, and is then called often."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from ringfort.bench.options import STRATEGIES, Case, Options
from ringfort.bench.patterns import Array, element_type


class Bound(NamedTuple):
    """One case, ready to run."""

    run: Callable[[], object]
    """Does the operation once; nothing else is timed."""
    result: Callable[[], Any]
    """What the last `run` gave this rank; None where that is nothing."""


class Host(NamedTuple):
    """Where ranks run."""

    prefix: Sequence[str]
    """What a command starts with to run there; nothing for this host."""
    address: str
    interface: str
    """The name of the interface that has `address`, for engines that ask for it."""


@dataclass(frozen=True)
class Plan:
    """What the parent knows of a group before it starts."""

    ranks: int
    folder: Path
    """An empty folder in memory that all ranks of the engine see, removed afterwards."""
    hosts: Sequence[Host]

    def host(self, rank: int) -> Host:
        """Where `rank` runs."""
        return self.hosts[rank % len(self.hosts)]


@dataclass(frozen=True)
class Seat:
    """One rank's place in its group."""

    rank: int
    world_size: int
    address: str
    """Of this rank's host."""
    folder: Path
    share: Callable[[str], list[str]]
    """Gives a text to all ranks and returns everybody's, in order; every rank has to call it."""
    options: Options


class Engine(Protocol):
    """Collectives of one library, in a process of its own for each rank. Used from the process's main thread."""

    name: ClassVar[str]
    about: ClassVar[str]
    """For the report: what it is and how it was set."""
    packages: ClassVar[tuple[str, ...]]
    """What has to be installed, as `importlib.metadata` knows it; the versions are part of the report."""
    install: ClassVar[str]
    """How to get it."""

    @classmethod
    def available(cls) -> bool:
        """Whether it is installed. Must not import it: the parent asks too."""
        ...

    @classmethod
    def variables(cls, plan: Plan, rank: int | None) -> Mapping[str, str]:
        """Environment variables that the process of `rank` needs, or all of them if a launcher starts them."""
        ...

    @classmethod
    def launcher(cls, plan: Plan) -> Sequence[str]:
        """What starts all ranks' processes at once when a command follows it; empty if they are started one by one."""
        ...

    def setup(self, seat: Seat) -> None:
        """Form the group."""
        ...

    def bind(self, case: Case, source: Array | None) -> Bound:
        """Prepare `case` with this rank's `source`, which in-place operations overwrite.

        Raises anything but a `DistributedError`, on every rank alike, if the engine has no such operation.
        """
        ...

    def barrier(self) -> object:
        """Returns when all ranks have called it."""
        ...

    def teardown(self) -> None:
        """Leave the group."""
        ...


class OneByOne:
    """What most engines share: nothing to set, and processes that are started one by one."""

    @classmethod
    def variables(cls, plan: Plan, rank: int | None) -> Mapping[str, str]:
        """None."""
        del plan, rank
        return {}

    @classmethod
    def launcher(cls, plan: Plan) -> Sequence[str]:
        """None."""
        del plan
        return ()


def output(case: Case, rank: int) -> Array | None:
    """Where `rank`'s result goes, for operations that do not work in place."""
    if case.op in STRATEGIES or case.op == "barrier" or (case.op == "gather" and rank != 0):
        return None
    shape = (case.part,) if case.op in ("reduce_scatter", "scatter") else (case.world_size, case.part)
    return np.zeros(shape, element_type(case.dtype))
