"""A program in an elastic run to which something happens:
`python -m tests.workers.elastic_cases '{"total": 40, "at": 5, "do": {"hold": {"seconds": 3}}}'`.

Its gradients are whole numbers, so that its state can be compared bit for bit with that of a plain loop. It says in
JSON lines what it does. Once the file `hurry` is there, it computes quickly. What is to happen does so in step `at` or
later, when the program has computed `own` micro-batches.
"""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ringfort
from ringfort.config import AutoDiscoveryConfig
from ringfort.training.elastic.run import ElasticRun
from ringfort.training.elastic.step import Step
from tests.workers.elastic import DATA, fresh, gradient, update

SLOW, QUICK = 0.02, 0.0005
"""Seconds that a micro-batch takes."""


def say(**line: Any) -> None:
    print(json.dumps({**line, "at": time.monotonic()}), flush=True)


class Handler(logging.Handler):
    """Says what the library logs."""

    def emit(self, record: logging.LogRecord) -> None:
        say(log=record.getMessage(), level=record.levelname)


# --- what happens, in the middle of a micro-batch ---------------------------------------------------------------------


def hold(run: ElasticRun, step: Step, seconds: int) -> None:
    """Hold the interpreter lock, as a call into C may: no other thread of this process runs."""
    say(holds=seconds)
    ctypes.PyDLL(None).sleep(seconds)
    say(held=seconds)


def wait(run: ElasticRun, step: Step, file: str) -> None:
    """Compute until the file is there."""
    while not Path(file).exists():
        time.sleep(0.01)


def jump(run: ElasticRun, step: Step, seconds: float) -> None:
    """The wall clock is set, forwards or backwards."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 1e9)


def fail(run: ElasticRun, step: Step) -> None:
    """The program has a bug."""
    raise ZeroDivisionError("a bug of the program")


def fork(run: ElasticRun, step: Step) -> None:
    """Start processes as data loaders do, and fork a child that takes the run for its own, and lives on."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        results = pool.map(abs, [-1, -2])
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    if os.fork():
        return
    try:
        step.add(gradient(DATA.part(DATA.span(0), 0)))
        for _ in step:
            pass
    except ringfort.DistributedError as exc:
        run.leave()
        run.close()
        say(child=os.getpid(), results=results, why=str(exc))
    signal.pause()
    os._exit(0)


def meddle(run: ElasticRun, step: Step) -> None:
    """Another thread uses the step while this one waits for the others."""

    def other() -> None:
        while not run._participant.driver.is_reducing:  # then it waits for the member that is slow in this step
            time.sleep(0.001)
        try:
            for _ in step:
                say(meddled="got a micro-batch")
        except ringfort.DistributedError as exc:
            say(meddled=str(exc))

    threading.Thread(target=other).start()


def full_disk(run: ElasticRun, step: Step, path: str) -> None:
    """Fill the file system of the checkpoints."""
    with Path(path).open("wb", 0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError as exc:
            say(full=exc.strerror)


def too_late(run: ElasticRun, step: Step, total: int) -> list[str]:
    """Use a run that is over. Return what it says."""
    uses: list[Callable[[], Any]] = [
        lambda: run.steps(total, samples=4, batch=2, microbatch=1),
        lambda: step.add(gradient(DATA.part(DATA.span(0), 0))),
        step.mean,
    ]
    said = list[str]()
    for use in uses:
        try:
            use()
            said.append("nothing")
        except ringfort.InvalidArgumentError as exc:
            said.append(str(exc))
    run.leave()
    run.close()
    return said


# --- the program ------------------------------------------------------------------------------------------------------


def main(
    total: int,
    do: dict[str, dict[str, Any]] | None = None,
    at: int = 0,
    own: int = 0,
    name: str = "cases",
    hurry: str = "",
    nodes: str = "2:4",
    patience: float = 2.0,
    checkpoint: str | None = None,
    every: int = 5,
    slow_disk: float = 0.0,
    in_thread: bool = False,
    interfaces: list[str] | None = None,
    timeout: float = 30.0,
) -> None:
    for logger in ("ringfort.elastic", "ringfort.training.elastic", "ringfort.cluster"):
        logging.getLogger(logger).addHandler(Handler())
        logging.getLogger(logger).setLevel(logging.INFO)
    if slow_disk:
        sync = os.fsync
        os.fsync = lambda file: (time.sleep(slow_disk), sync(file))[1]
    state = fresh()
    config = AutoDiscoveryConfig(interfaces=["127.0.0.1"] if interfaces is None else interfaces, timeout=timeout)
    todo, computed = dict(do or {}), 0
    last: list[Step] = []

    def loop() -> None:
        nonlocal computed
        for step in run.steps(
            total, samples=DATA.samples, batch=DATA.batch, microbatch=DATA.microbatch, seed=DATA.seed
        ):
            last[:] = [step]
            for part in step:
                time.sleep(QUICK if not hurry or Path(hurry).exists() else SLOW)
                while todo and step.number >= at and computed >= own:
                    what = next(iter(todo))
                    globals()[what](run, step, **todo.pop(what))
                step.add(gradient(part))
                computed += 1
            update(state, step.mean())
            say(step=step.number, members=len(run.members))

    run = ringfort.elastic(
        state, name=name, nodes=nodes, patience=patience, config=config, checkpoint=checkpoint, checkpoint_every=every
    )
    say(begun=os.getpid())
    try:
        with run:
            if in_thread:
                thread = threading.Thread(target=loop)
                thread.start()
                thread.join()
            else:
                loop()
    except SystemExit:  # SIGTERM: it has left after its step
        say(left=run.step, w=state["w"].tolist(), seen=state["seen"].tolist())
        raise
    late = too_late(run, last[0], total) if last else []
    say(done=run.step, w=state["w"].tolist(), seen=state["seen"].tolist(), late=late, events=run.events)


if __name__ == "__main__":
    try:
        main(**json.loads(sys.argv[1]))
    except (ringfort.DistributedError, ArithmeticError) as exc:
        say(failed=type(exc).__name__, why=str(exc))
        sys.exit(3)
