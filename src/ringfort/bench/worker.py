"""One rank of the benchmark: `python -m ringfort.bench.worker OPTIONS FOLDER` times every call and reports the times.

All engines live in the same process and take turns, a burst of calls each, in alternating order: what disturbs the
machine disturbs them alike. Nothing but the operation itself lies between two calls of a burst.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import ringfort
from ringfort.bench.engines import ENGINES, Bound, Engine, RingfortEngine
from ringfort.bench.options import MAX_REPEATS, MIN_REPEATS, Case, Options
from ringfort.bench.patterns import Array, WrongResultError, fill, first_difference, new_source
from ringfort.collectives.ops import ReduceOp
from ringfort.context import DistributedContext
from ringfort.errors import DistributedError
from ringfort.local import report

BURST_SECONDS = 0.02
"""Of one engine before the other's turn: long beside the barrier between, short beside what drifts on a machine."""
MAX_BURST = 50
WARM_UP = 3
"""Calls before any counts: sockets' windows grow, pages are touched, caches fill. The last one is the estimate."""
REPORT_SECONDS = 0.2


def prepare(ctx: DistributedContext, engine: Engine, case: Case, given: Array | None, strategy: str) -> Bound | None:
    """The engine bound to `case`, its result checked once; None if the engine has no such operation.

    Raises `WrongResultError` if it gives a wrong result.
    """
    if given is not None:
        fill(given, ctx.rank)
    try:
        bound = engine.bind(case, strategy, given)
        bound.run()
    except DistributedError:
        raise
    except Exception as exc:
        if isinstance(engine, RingfortEngine):
            raise
        if ctx.is_master:
            why = next(iter(str(exc).splitlines()), type(exc).__name__)
            report(kind="skipped", engine=engine.name, bytes=case.nbytes, why=why)
        return None
    result = bound.result()
    wrong = None if result is None else first_difference(case, ctx.rank, result)
    if wrong is not None:
        raise WrongResultError(engine.name, case, ctx.rank, wrong)
    return bound


def estimate(ctx: DistributedContext, bounds: Sequence[Bound]) -> list[float]:
    """Seconds that one call of each takes, the slowest rank's; the same on every rank."""
    taken: list[float] = []
    for bound in bounds:
        ctx.barrier()
        start = 0.0
        for _ in range(WARM_UP):
            start = time.perf_counter()
            bound.run()
        taken.append(time.perf_counter() - start)
    return [float(seconds) for seconds in ctx.all_reduce(np.array(taken), ReduceOp.MAX)]


def schedule(seconds: Sequence[float], options: Options) -> list[int]:
    """How many calls each burst has, given how long a call of each engine takes."""
    longest = max(seconds)
    repeats = options.repeat
    if repeats is None:
        repeats = min(max(MIN_REPEATS, int(options.min_time * len(seconds) / sum(seconds))), MAX_REPEATS)
    burst = min(max(1, int(BURST_SECONDS / longest)), MAX_BURST)
    whole, rest = divmod(repeats, burst)
    return [burst] * whole + ([rest] if rest else [])


def measure(ctx: DistributedContext, case: Case, bounds: dict[str, Bound], options: Options) -> dict[str, list[int]]:
    """Nanoseconds of every call of every engine on this rank."""
    bursts = schedule(estimate(ctx, list(bounds.values())), options)
    times: dict[str, list[int]] = {name: [] for name in bounds}
    clock = time.perf_counter_ns
    last_report = time.monotonic()
    for turn, burst in enumerate(bursts):
        order = list(bounds) if turn % 2 == 0 else list(reversed(bounds))
        for name in order:
            run, taken = bounds[name].run, times[name]
            ctx.barrier()
            for _ in range(burst):
                start = clock()
                run()
                taken.append(clock() - start)
        if ctx.is_master and time.monotonic() - last_report > REPORT_SECONDS:
            last_report = time.monotonic()
            report(kind="progress", bytes=case.nbytes, done=(turn + 1) / len(bursts))
    return times


def run_case(ctx: DistributedContext, engines: Sequence[Engine], case: Case, options: Options) -> dict[str, list[int]]:
    """Check every engine once, then time those that have the operation, all on the same buffer."""
    given = new_source(case, ctx.rank)
    bounds: dict[str, Bound] = {}
    for engine in engines:
        bound = prepare(ctx, engine, case, given, options.strategy)
        if bound is not None:
            bounds[engine.name] = bound
    if given is not None:
        given.fill(0)  # so that sums of sums neither overflow nor become NaN, whose arithmetic may take longer
    return measure(ctx, case, bounds, options)


def run(options: Options, scratch: Path) -> None:
    """Measure every case, and report its times."""
    with ringfort.init(encryption=options.encryption) as ctx:
        engines = [ENGINES[name]() for name in (RingfortEngine.name, *options.against)]
        for engine in engines:
            engine.setup(ctx, scratch)
        gc.disable()  # as timeit does: a collection in the middle of a call is not the call's
        for case in options.cases(ctx.world_size):
            times = run_case(ctx, engines, case, options)
            report(kind="times", bytes=case.nbytes, nanoseconds=times)
            gc.collect()
        ctx.barrier()
        for engine in reversed(engines):
            engine.teardown()


if __name__ == "__main__":
    run(Options.from_json(sys.argv[1]), Path(sys.argv[2]))
