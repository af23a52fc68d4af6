"""`Engine`: a library that the benchmark compares. It forms a group once, binds each case to buffers, and is timed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ringfort.bench.options import STRATEGIES, Case, Options
from ringfort.bench.patterns import Array, element_type


class Bound(NamedTuple):
    """One case, ready to run."""

    run: Callable[[], object]
    """Runs the operation once; nothing else is timed."""
    result: Callable[[], Any]
    """The result of the last `run` at this rank; None if it has none."""


class Host(NamedTuple):
    """Where ranks run."""

    prefix: Sequence[str]
    """What to put in front of a command to run it there; nothing for this host."""
    address: str
    interface: str
    """The name of the interface that has `address`, for engines that ask for it."""


class Plan(NamedTuple):
    """How an engine's group is laid out."""

    ranks: int
    folder: Path
    """An empty folder in memory that all ranks of the engine share; removed afterwards."""
    hosts: Sequence[Host]

    def host(self, rank: int) -> Host:
        """Where `rank` runs."""
        return self.hosts[rank % len(self.hosts)]


class Seat(NamedTuple):
    """One rank's place in its group."""

    rank: int
    world_size: int
    address: str
    """Of this rank's host."""
    folder: Path
    share: Callable[[str], list[str]]
    """Gives a text to all ranks and returns the texts of all, in rank order; every rank has to call it."""
    options: Options


class Engine(ABC):
    """Collectives of one library, in a process of its own per rank. Used from the main thread of that process."""

    name: ClassVar[str]
    about: ClassVar[str]
    """For the report: what the engine is and how it is configured."""
    module: ClassVar[str] = "ringfort"
    """The module that has to be installed."""
    packages: ClassVar[tuple[str, ...]]
    """The distributions whose versions are part of the report."""
    install: ClassVar[str] = "pip install 'ringfort[bench]'"
    """How to install it."""

    @classmethod
    def available(cls) -> bool:
        """Whether the engine is installed. Must not import it: the parent asks too."""
        return find_spec(cls.module) is not None

    @classmethod
    def variables(cls, plan: Plan, rank: int | None) -> Mapping[str, str]:
        """Environment variables for the process of `rank`, or for all (None) if a launcher starts them."""
        return {}

    @classmethod
    def launcher(cls, plan: Plan) -> Sequence[str]:
        """The launcher that starts the processes of all ranks; empty if each is started by itself."""
        return ()

    @abstractmethod
    def setup(self, seat: Seat) -> None:
        """Form the group."""

    @abstractmethod
    def bind(self, case: Case, source: Array | None) -> Bound:
        """Prepare `case` with this rank's `source`, which in-place operations overwrite.

        Raises anything but a `DistributedError`, at every rank alike, if the engine has no such operation.
        """

    @abstractmethod
    def barrier(self) -> object:
        """Wait until all ranks have called it."""

    def teardown(self) -> None:  # noqa: B027  # some engines cannot leave: their process ends
        """Leave the group."""


def output(case: Case, rank: int) -> Array | None:
    """A buffer for the result of `rank`; None for operations that work in place."""
    if case.op in STRATEGIES or case.op == "barrier" or (case.op == "gather" and rank != 0):
        return None
    shape = (case.part,) if case.op in ("reduce_scatter", "scatter") else (case.world_size, case.part)
    return np.zeros(shape, element_type(case.dtype))
