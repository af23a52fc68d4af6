"""One rank of one engine: `python -m ringfort.bench.worker ADDRESS ENGINE OPTIONS FOLDER` does as the parent says.

The parent lets the engines take turns, a burst of calls each. Between its turns a rank sleeps on the wire to the
parent. Nothing but the operation itself lies between two calls of a burst.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

from ringfort.bench.engines import ENGINES
from ringfort.bench.engines.base import Bound, Engine, Seat
from ringfort.bench.engines.ours import RingfortEngine
from ringfort.bench.options import Case, Options
from ringfort.bench.patterns import Array, WrongResultError, fill, first_difference, new_source
from ringfort.bench.worker_protocol import Message, Wire, end_with
from ringfort.config import Environment
from ringfort.errors import DistributedError
from ringfort.launch.local_ranks import EXIT_LOST_PEER


class UnsupportedError(Exception):
    """The engine has no such operation. The message is the engine's own first line."""


def prepare(engine: Engine, rank: int, case: Case, source: Array | None) -> Bound:
    """The engine bound to `case`, its result checked once.

    Raises `UnsupportedError` if the engine has no such operation, `WrongResultError` if it gives a wrong result.
    """
    if source is not None:
        fill(source, rank)
    try:
        bound = engine.bind(case, source)
        bound.run()
    except DistributedError:
        raise
    except Exception as exc:
        if isinstance(engine, RingfortEngine):
            raise
        raise UnsupportedError(next(iter(str(exc).splitlines()), type(exc).__name__)) from exc
    result = bound.result()
    wrong = None if result is None else first_difference(case, rank, result)
    if wrong is not None:
        raise WrongResultError(engine.name, case, rank, wrong)
    if source is not None:
        source.fill(0)  # so that sums of sums neither overflow nor become NaN, whose arithmetic may take longer
    return bound


def warm_up(bound: Bound, calls: int) -> float:
    """Seconds that the last of `calls` calls took."""
    taken = 0.0
    for _ in range(calls):
        start = time.perf_counter()
        bound.run()
        taken = time.perf_counter() - start
    return taken


def burst(engine: Engine, bound: Bound, calls: int) -> list[int]:
    """Nanoseconds of each of `calls` calls."""
    clock, run = time.perf_counter_ns, bound.run
    taken: list[int] = []
    engine.barrier()
    for _ in range(calls):
        start = clock()
        run()
        taken.append(clock() - start)
    return taken


class Server:
    """Answers the parent's commands."""

    def __init__(self, engine: Engine, seat: Seat) -> None:
        self._engine = engine
        self._seat = seat
        self._bound: Bound | None = None

    def answer(self, command: Message) -> Message:
        """Do what `command` says."""
        match command["do"]:
            case "join":
                self._engine.setup(self._seat)
            case "prepare":
                return self._prepare(Case(**command["case"]))
            case "warm":
                assert self._bound is not None
                return {"seconds": warm_up(self._bound, command["calls"])}
            case "burst":
                assert self._bound is not None
                return {"nanoseconds": burst(self._engine, self._bound, command["calls"])}
            case "drop":
                self._bound = None  # and with it the buffers
                gc.collect()
            case _:
                self._engine.teardown()
        return {}

    def _prepare(self, case: Case) -> Message:
        try:
            rank = self._seat.rank
            self._bound = prepare(self._engine, rank, case, new_source(case, rank))
        except UnsupportedError as exc:
            return {"skipped": str(exc)}
        return {"seconds": warm_up(self._bound, 1)}


def run(address: str, name: str, options: Options, folder: Path) -> None:
    """Serve until the parent hangs up."""
    told = Environment.from_mapping()
    assert told.rank is not None
    assert told.world_size is not None
    wire = Wire.connect(folder / "control")
    end_with(wire, EXIT_LOST_PEER)

    def share(text: str) -> list[str]:
        wire.send({"share": text})
        return [str(item) for item in wire.read()["all"]]

    server = Server(ENGINES[name](), Seat(told.rank, told.world_size, address, folder, share, options))
    gc.disable()  # as timeit does: a collection in the middle of a call is not the call's
    wire.send({"rank": told.rank})
    try:
        while True:
            wire.send(server.answer(wire.read()))
    except EOFError:
        return


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], Options.from_json(sys.argv[3]), Path(sys.argv[4]))
