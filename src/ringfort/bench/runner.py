"""A benchmark run: starts the workers of every engine for each world size, and collects their times in a report."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import psutil

from ringfort.bench.engines import ENGINES
from ringfort.bench.engines.base import Host, Plan
from ringfort.bench.machine import describe_machine
from ringfort.bench.options import Case, Options
from ringfort.bench.patterns import element_type
from ringfort.bench.results import OURS, Report, Row
from ringfort.bench.schedule import Ask, Schedule, is_ours
from ringfort.bench.workers import Workers, WorkersFailedError

MEMORY_FOLDER = Path("/dev/shm")
"""Linux's folder in memory: files that engines share there never wait for a disk."""


class Step(NamedTuple):
    """How far a run is."""

    done: float
    """Cases, with the share of the current one."""
    total: int
    case: Case
    row: Row | None
    """The result, when the case is done."""


def run_bench(options: Options, on_step: Callable[[Step], None], hosts: Sequence[Host] = ()) -> Report:
    """Measure everything in `options`, with ranks on `hosts` in turn; on this host by default.

    Raises `WorkersFailedError` if one of our own ranks fails. Leaves no process behind.
    """
    element_type(options.dtype)  # fail before any process starts
    names = (OURS, *options.against)
    packages = dict.fromkeys(["numpy", *(package for name in names for package in ENGINES[name].packages)])
    machine = describe_machine(packages)
    total = sum(len(options.cases(ranks)) for ranks in options.ranks)
    rows: list[Row] = []
    for ranks in options.ranks:
        cases = options.cases(ranks)
        on_step(Step(len(rows), total, cases[0], None))
        with all_workers(options, ranks, hosts) as schedule:
            for case in cases:
                on_part = partial(_on_part, on_step, Step(len(rows), total, case, None))
                rows.append(schedule.measure(case, on_part))
                on_step(Step(len(rows), total, case, rows[-1]))
            schedule.end()
    return Report(options, machine, rows)


def _on_part(on_step: Callable[[Step], None], begun: Step, part: float) -> None:
    on_step(begun._replace(done=begun.done + part))


@contextmanager
def all_workers(options: Options, ranks: int, hosts: Sequence[Host] = ()) -> Generator[Schedule, None, None]:
    """Start the workers of every engine. An engine that does not start is left out, unless it is ours."""
    engines: dict[str, Ask] = {}
    lost: dict[str, str] = {}
    with ExitStack() as stack:
        for name in (OURS, *options.against):
            try:
                engines[name] = stack.enter_context(start_workers(name, options, ranks, hosts)).ask
            except WorkersFailedError as exc:
                if is_ours(name):
                    raise
                lost[name] = " ".join(str(exc).split())
        yield Schedule(engines, lost, options)


@contextmanager
def start_workers(
    name: str, options: Options, ranks: int, hosts: Sequence[Host] = ()
) -> Generator[Workers, None, None]:
    """Start the workers of one engine, with a folder that they share. Raises `WorkersFailedError`."""
    memory = MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None
    prefix = f"ringfort-bench-{os.getpid()}-"  # names the owner, should the folder ever be left behind
    with (
        TemporaryDirectory(prefix=prefix, dir=memory) as folder,
        Workers(name, Plan(ranks, Path(folder), hosts or [loopback()]), options) as workers,
    ):
        yield workers


def loopback() -> Host:
    """This host, through its loopback interface."""
    interfaces = psutil.net_if_addrs().items()
    names = (name for name, addresses in interfaces if any(one.address == "127.0.0.1" for one in addresses))
    return Host((), "127.0.0.1", next(names, ""))
