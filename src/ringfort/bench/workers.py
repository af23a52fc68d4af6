"""The processes of one engine: one for each rank, started together, told what to do and asked for the times."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ringfort.bench.engines import ENGINES
from ringfort.bench.engines.base import Plan
from ringfort.bench.options import Options
from ringfort.bench.worker_protocol import Message, Wire
from ringfort.errors import DistributedError
from ringfort.launch.local_ranks import ONE_THREAD
from ringfort.launch.processes import TAIL_LINES

if TYPE_CHECKING:
    from typing_extensions import Self

WORKER = "ringfort.bench.worker"
START_SECONDS = 60.0
"""Until every process of an engine has come: importing torch in 16 of them on two cores takes half of it."""
ANSWER_SECONDS = 90.0
"""For an answer: beyond the slowest engine's calls of the largest size. Whoever takes longer is left out."""
STOP_SECONDS = 2.0
"""Until a process that was told to end is killed."""


class CrewFailedError(DistributedError):
    """The processes of an engine ended, or did not answer in time."""

    is_fatal = True

    def __init__(self, engine: str, what: str, tail: Sequence[str]) -> None:
        words = "" if not tail else f": {tail[0]}" if len(tail) == 1 else ":\n    " + "\n    ".join(tail)
        super().__init__(f"{engine}: {what}{words}")
        self.engine = engine
        self.tail = tuple(tail)


class Crew:
    """A context manager: leaving it ends every process."""

    def __init__(self, name: str, plan: Plan, options: Options) -> None:
        self.name = name
        self._engine = ENGINES[name]
        self._plan = plan
        self._options = options
        self._log = plan.folder / "log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._wires: dict[int, Wire] = {}

    def __enter__(self) -> Self:
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(self._plan.folder / "control"))
                listener.listen(self._plan.ranks)
                self._start()
                self._meet(listener)
            self.ask(do="join")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(self, **command: object) -> list[Message]:
        """Give all ranks the same command; returns their answers in order. Raises `CrewFailedError`."""
        self._tell(command)
        return self._answers()

    def stop(self) -> None:
        """End every process, and wait until it has. Idempotent."""
        for wire in self._wires.values():
            wire.close()  # ranks end with it, wherever they are; so do launchers when their ranks have
        self._wires.clear()
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _start(self) -> None:
        plan, engine = self._plan, self._engine
        arguments = [self.name, self._options.to_json(), str(plan.folder)]
        launcher = list(engine.launcher(plan))
        with self._log.open("wb") as log:
            for rank in [None] if launcher else range(plan.ranks):
                host = plan.host(rank or 0)
                place = {} if rank is None else {"RANK": str(rank), "WORLD_SIZE": str(plan.ranks)}
                variables = {**ONE_THREAD, **place, **engine.variables(plan, rank)}
                # env(1) adds to the environment; reading ours here is for config.py alone.
                assignments = [f"{name}={value}" for name, value in variables.items()]
                worker = [sys.executable, "-m", WORKER, host.address, *arguments]
                self._processes.append(
                    subprocess.Popen(
                        [*host.prefix, "env", *assignments, *launcher, *worker],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,  # Ctrl-C goes to the parent alone, and the parent ends the ranks
                    )
                )

    def _meet(self, listener: socket.socket) -> None:
        """Take every rank's connection. Each begins by saying its rank."""
        deadline = time.monotonic() + START_SECONDS
        listener.settimeout(0.1)  # seconds between looks at the processes
        while len(self._wires) < self._plan.ranks:
            self._check_alive()
            if time.monotonic() > deadline:
                raise self._failed(f"only {len(self._wires)} of {self._plan.ranks} ranks came in {START_SECONDS:g} s")
            with suppress(TimeoutError):
                sock, _ = listener.accept()
                sock.settimeout(START_SECONDS)
                wire = Wire(sock)
                try:
                    self._wires[int(wire.read()["rank"])] = wire
                except (EOFError, TimeoutError):
                    wire.close()  # the process has ended, and is found so above

    def _answers(self) -> list[Message]:
        """One of each rank. Ranks that share a text on the way are served."""
        while True:
            found = self._gather()
            if "share" not in found[0]:
                return found
            self._tell({"all": [message["share"] for message in found]})

    def _gather(self) -> list[Message]:
        deadline = time.monotonic() + ANSWER_SECONDS
        found: dict[int, Message] = {}
        with selectors.DefaultSelector() as selector:
            for rank, wire in self._wires.items():
                selector.register(wire, selectors.EVENT_READ, rank)
            while len(found) < len(self._wires):
                ready = selector.select(deadline - time.monotonic())
                if not ready:
                    missing = sorted(set(self._wires) - set(found))
                    raise self._failed(f"no answer from ranks {missing} in {ANSWER_SECONDS:g} s")
                for key, _ in ready:
                    try:
                        found[key.data] = self._wires[key.data].read()
                    except EOFError as exc:
                        raise self._failed(f"rank {key.data} ended") from exc
        return [found[rank] for rank in sorted(found)]

    def _tell(self, message: Message) -> None:
        for rank, wire in sorted(self._wires.items()):
            try:
                wire.send(message)
            except OSError as exc:
                raise self._failed(f"rank {rank} ended") from exc

    def _check_alive(self) -> None:
        ended = [process.returncode for process in self._processes if process.poll() is not None]
        if ended:
            raise self._failed(f"a process ended with exit code {ended[0]}")

    def _failed(self, what: str) -> CrewFailedError:
        self.stop()  # first, so that the log is whole
        lines = self._log.read_text(errors="replace").splitlines()
        return CrewFailedError(self.name, what, [line.rstrip() for line in lines if line.strip()][-TAIL_LINES:])
