"""One rank of one engine: `python -m ringfort.bench.worker ADDRESS ENGINE OPTIONS FOLDER` follows its parent.

The parent lets each engine in turn make a burst of calls. Between its bursts a rank sleeps until the parent's next
command. Nothing but the operation itself happens between two calls of a burst.
"""

from __future__ import annotations

import gc
import os
import select
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import msgspec

from ringfort.bench.engines import ENGINES
from ringfort.bench.engines.base import Bound, Engine, Seat
from ringfort.bench.engines.ours import RingfortEngine
from ringfort.bench.options import Case, Options
from ringfort.bench.patterns import Array, WrongResultError, fill, first_difference, new_source
from ringfort.bench.workers import Message, read, send
from ringfort.config import Environment
from ringfort.errors import DistributedError


class UnsupportedError(Exception):
    """The engine has no such operation. The message is the first line of the engine's error."""


def prepare(engine: Engine, rank: int, case: Case, source: Array | None) -> Bound:
    """Bind the engine to `case`, and check its result once.

    Raises `UnsupportedError` if the engine has no such operation, `WrongResultError` if its result is wrong.
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


class Server:
    """Follows the parent's commands: each is the name of a method in `do`, and its arguments."""

    def __init__(self, engine: Engine, seat: Seat) -> None:
        self._engine = engine
        self._seat = seat
        self._source: Array | None = None
        self._bounds: dict[str, Bound] = {}
        """By strategy, where several are compared in the same processes; else one."""

    def join(self) -> None:
        """Form the group."""
        self._engine.setup(self._seat)

    def explain(self, case: Message) -> Message:
        """See `RingfortEngine.explain`."""
        assert isinstance(self._engine, RingfortEngine)
        return self._engine.explain(Case(**case))

    def prepare(self, case: Message, strategy: str = "") -> Message:
        """Bind the engine to `case`, and return the time of one call, or why there is none."""
        chosen = Case(**case)
        if strategy:
            chosen = replace(chosen, strategy=strategy)
        if not self._bounds:
            self._source = new_source(chosen, self._seat.rank)
        try:
            self._bounds[strategy] = prepare(self._engine, self._seat.rank, chosen, self._source)
        except UnsupportedError as exc:
            return {"skipped": str(exc)}
        return self.burst(1, strategy)

    def burst(self, calls: int, strategy: str = "") -> Message:
        """Make `calls` calls, and return the nanoseconds that each took."""
        clock, run = time.perf_counter_ns, self._bounds[strategy].run
        taken: list[int] = []
        self._engine.barrier()
        for _ in range(calls):
            start = clock()
            run()
            taken.append(clock() - start)
        return {"nanoseconds": taken}

    def drop(self, strategy: str = "") -> None:
        """Release the buffers of the case, for all strategies."""
        self._bounds, self._source = {}, None
        gc.collect()

    def end(self) -> None:
        """Leave the group."""
        self._engine.teardown()


def run(address: str, name: str, options: Options, folder: Path) -> None:
    """Follow the parent until it closes the connection."""
    told = Environment.from_mapping()
    assert told.rank is not None
    assert told.world_size is not None
    wire: Connection[Any, Any] = Client(str(folder / "control"), "AF_UNIX")
    _end_with(wire)

    def share(text: str) -> list[str]:
        send(wire, {"share": text})
        return [str(item) for item in read(wire)["all"]]

    server = Server(ENGINES[name](), Seat(told.rank, told.world_size, address, folder, share, options))
    gc.disable()  # as timeit does: the time of a garbage collection is not the call's
    send(wire, {"rank": told.rank})
    try:
        while True:
            command = read(wire)
            send(wire, getattr(server, command.pop("do"))(**command) or {})
    except EOFError:
        return


def _end_with(wire: Connection[Any, Any]) -> None:
    """From now on this process ends when the other end of `wire` is closed, whatever its main thread does."""

    def watch() -> None:
        poll = select.poll()
        poll.register(wire, 0)  # no event but the hang-up, which is always reported
        poll.poll()
        os._exit(1)  # not sys.exit: the main thread may be in a long call, and nobody reads its output any more

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], msgspec.json.decode(sys.argv[3], type=Options), Path(sys.argv[4]))
