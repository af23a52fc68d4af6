"""A benchmark run: starts the workers of every engine for each world size, and collects their times in a report."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from ringfort.bench.engines import ENGINES
from ringfort.bench.engines.base import Host
from ringfort.bench.machine import describe_machine
from ringfort.bench.options import Case, Options
from ringfort.bench.patterns import element_type
from ringfort.bench.results import OURS, Report, Row
from ringfort.bench.schedule import Ask, Schedule, is_ours
from ringfort.bench.workers import WorkersFailedError, start_workers


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
                begun = Step(len(rows), total, case, None)
                row = schedule.measure(case, lambda part, begun=begun: on_step(begun._replace(done=begun.done + part)))
                rows.append(row)
                on_step(Step(len(rows), total, case, row))
            schedule.end()
    return Report(options, machine, rows)


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
