"""The worker processes of one engine, one per rank: they follow commands of this process and answer with times.

Both sides exchange JSON over a Unix socket in a folder: not over standard input and output, which MPI's launchers keep
to themselves, and not over the network, because ranks may be in network namespaces of their own.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import msgspec
import psutil

from ringfort.bench.engines import ENGINES
from ringfort.bench.engines.base import Host, Plan
from ringfort.bench.options import Options
from ringfort.errors import DistributedError
from ringfort.launch.failure_report import TAIL_LINES, describe_exit, with_tail
from ringfort.launch.local_ranks import ONE_THREAD
from ringfort.launch.processes import Children

if TYPE_CHECKING:
    Wire = Connection[Any, Any]

Message = dict[str, Any]

MEMORY_FOLDER = Path("/dev/shm")
"""Linux's folder in memory: files that engines share there never wait for a disk."""
START_SECONDS = 60.0
"""Until all workers of an engine are connected: importing torch in 16 processes on two cores takes half of it."""
ANSWER_SECONDS = 90.0
"""For an answer: longer than the slowest engine needs for the largest size. An engine that takes longer is left out."""
POLL_SECONDS = 0.2
"""Between two looks at the processes and their output while answers are awaited."""
STOP_SECONDS = 2.0
"""Until a process that should end is killed."""


@contextmanager
def start_workers(
    name: str, options: Options, ranks: int, hosts: Sequence[Host] = ()
) -> Generator[Workers, None, None]:
    """Start the workers of one engine on `hosts` in turn, by default on this one, with a folder that they share.

    Ends every process on exit. Raises `WorkersFailedError`.
    """
    memory = MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None
    prefix = f"ringfort-bench-{os.getpid()}-"  # names the owner, should the folder ever be left behind
    with TemporaryDirectory(prefix=prefix, dir=memory) as folder:
        workers = Workers(name, Plan(ranks, Path(folder), hosts or [loopback()]), options)
        try:
            workers.start()
            yield workers
        finally:
            workers.stop()


def loopback() -> Host:
    """This host, through its loopback interface."""
    interfaces = psutil.net_if_addrs().items()
    names = (name for name, addresses in interfaces if any(one.address == "127.0.0.1" for one in addresses))
    return Host((), "127.0.0.1", next(names, ""))


class WorkersFailedError(DistributedError):
    """The workers of an engine ended, or did not answer in time."""

    is_fatal = True

    def __init__(self, engine: str, what: str, tail: Sequence[str]) -> None:
        super().__init__(with_tail(f"{engine}: {what}", tail))
        self.engine = engine
        self.tail = tuple(tail)


class Workers:
    """See `start_workers`."""

    def __init__(self, name: str, plan: Plan, options: Options) -> None:
        self.name = name
        self._plan = plan
        self._options = options
        self._children = Children()
        self._wires: dict[int, Wire] = {}

    def start(self) -> None:
        """Start the processes, and let them form their group."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._plan.folder / "control"))
            listener.listen(self._plan.ranks)
            self._start_processes()
            self._accept(listener)
        self.ask(do="join")

    def ask(self, **command: object) -> list[Message]:
        """Give all ranks the same command, and return their answers in rank order. Raises `WorkersFailedError`."""
        while True:
            for wire in self._wires.values():
                with suppress(OSError):  # the process has ended, which the missing answer tells
                    send(wire, command)
            answers = self._answers()
            if "share" not in answers[0]:
                return answers
            command = {"all": [message["share"] for message in answers]}  # see `Seat.share`

    def stop(self) -> None:
        """End every process, and wait until it has. Idempotent."""
        for wire in self._wires.values():
            wire.close()  # the workers end with it, whatever they do; launchers end with their workers
        self._wires.clear()
        for output in self._children.finish(STOP_SECONDS, signum=0):
            output.child.keep(output.lines())
        self._children.close()

    def _start_processes(self) -> None:
        plan, engine = self._plan, ENGINES[self.name]
        launcher = list(engine.launcher(plan))
        for rank in [None] if launcher else range(plan.ranks):
            host = plan.host(rank or 0)
            arguments = [host.address, self.name, msgspec.json.encode(self._options).decode(), str(plan.folder)]
            place = {} if rank is None else {"RANK": str(rank), "WORLD_SIZE": str(plan.ranks)}
            self._children.start(
                rank or 0,
                [*host.prefix, *launcher, sys.executable, "-m", "ringfort.bench.worker", *arguments],
                {**ONE_THREAD, **place, **engine.variables(plan, rank)},
            )

    def _accept(self, listener: socket.socket) -> None:
        """Accept the connection of every rank. Each begins with its rank."""
        deadline = time.monotonic() + START_SECONDS
        listener.settimeout(POLL_SECONDS)
        while len(self._wires) < self._plan.ranks:
            self._check(deadline, f"only {len(self._wires)} of {self._plan.ranks} ranks came in {START_SECONDS:g} s")
            with suppress(TimeoutError):
                sock, _ = listener.accept()
                sock.setblocking(True)
                wire: Wire = Connection(sock.detach())
                with suppress(EOFError):  # the process has ended, which is found out above
                    self._wires[int(read(wire)["rank"])] = wire

    def _answers(self) -> list[Message]:
        deadline = time.monotonic() + ANSWER_SECONDS
        found: dict[int, Message] = {}
        while missing := {wire: rank for rank, wire in self._wires.items() if rank not in found}:
            ready = cast("list[Wire]", wait(list(missing), POLL_SECONDS))
            for wire in ready:
                try:
                    found[missing[wire]] = read(wire)
                except EOFError as exc:
                    raise self._failed(f"rank {missing[wire]} ended") from exc
            if not ready:
                self._check(deadline, f"no answer from ranks {sorted(missing.values())} in {ANSWER_SECONDS:g} s")
        return [found[rank] for rank in sorted(found)]

    def _check(self, deadline: float, late: str) -> None:
        """Read the output of the processes. Raises if one has ended, or if it is too late."""
        for output in self._children.poll(0):
            output.child.keep(output.lines())
        ended = [child.exit_code for child in self._children.children if child.exit_code is not None]
        if ended:
            raise self._failed(f"a process {describe_exit(ended[0])}")
        if time.monotonic() > deadline:
            raise self._failed(late)

    def _failed(self, what: str) -> WorkersFailedError:
        ended = [child for child in self._children.children if child.exit_code is not None]
        self.stop()  # before the tails are looked at: they are whole then
        lines = [line for child in ended or self._children.children for line in child.tail]
        return WorkersFailedError(self.name, what, lines[-TAIL_LINES:])


def send(wire: Wire, message: Message) -> None:
    """Raises `OSError` if the other end was closed."""
    wire.send_bytes(json.dumps(message).encode())


def read(wire: Wire) -> Message:
    """The next message. Raises `EOFError` if the other end was closed."""
    try:
        return cast("Message", json.loads(wire.recv_bytes()))
    except ConnectionError as exc:
        raise EOFError from exc
