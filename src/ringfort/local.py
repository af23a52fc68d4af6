"""Start the ranks of one group as processes of this machine, and read what they report.

The parent opens the listening socket of rank 0 and hands it down, so no port is ever guessed. A rank reports by writing
one JSON object a line to its standard output (`report`); the parent reads them with `LocalRanks.messages`. The standard
input of a rank is a pipe that only the parent holds: when it ends, however the parent died, the rank ends too.
"""

from __future__ import annotations

import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, cast

from ringfort.errors import AbortedError, DistributedError, InvalidArgumentError, InvalidWorldSizeError

if TYPE_CHECKING:
    from typing_extensions import Self

Message = dict[str, Any]

EXIT_LOST_PEER = 75
"""EX_TEMPFAIL of sysexits.h: this rank was well, but it lost another. So the parent blames the other."""
POLL_SECONDS = 0.05
"""How late the end of a rank may be noticed when its pipes say nothing. Short beside what a person notices."""
BLAME_SECONDS = 1.0
"""How long to wait, after a rank lost another, for that other to end too: survivors may be the quicker to end."""
STOP_SECONDS = 1.0
"""How long a rank may take to end by SIGTERM before it is killed. Ranks install no handler, so it is instant."""
TAIL_LINES = 20
"""How many lines of a rank's other output to keep: a traceback's end, with the error and where it came from."""

# Ranks share the cores of one machine; a BLAS that takes all cores in each of them makes all of them slower.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)


class RankFailedError(DistributedError):
    """A local rank's process ended badly. The others were stopped."""

    is_peer_failure = True
    is_fatal = True

    def __init__(self, rank: int, exit_code: int, stderr: Sequence[str]) -> None:
        how = f"ended with exit code {exit_code}" if exit_code >= 0 else f"was killed by {_signal_name(-exit_code)}"
        words = "" if not stderr else f": {stderr[0]}" if len(stderr) == 1 else ":\n    " + "\n    ".join(stderr)
        super().__init__(f"local rank {rank} {how}{words}", peer=rank)
        self.rank = rank
        self.exit_code = exit_code
        self.stderr = tuple(stderr)


class LocalRanks:
    """`world_size` processes that each run `python -m module arguments` with RANK, WORLD_SIZE and the master's address.

    A context manager: leaving it, by any way, ends every process that still runs. Not for use from several threads.
    """

    def __init__(
        self, module: str, world_size: int, arguments: Sequence[str] = (), *, variables: Mapping[str, str] | None = None
    ) -> None:
        """`variables` are added to the environment of every rank, and may override the ones set here.

        Raises `InvalidWorldSizeError` for fewer than one rank.
        """
        if isinstance(world_size, bool) or world_size < 1:
            raise InvalidWorldSizeError(world_size)
        if not module:
            raise InvalidArgumentError("module", module, "name a module that `python -m` can run")
        self._module = module
        self._world_size = world_size
        self._arguments = tuple(arguments)
        self._variables = dict(variables or {})
        self._children: list[_Child] = []
        self._failed: list[_Child] = []
        self._selector = selectors.DefaultSelector()

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return [child.process.pid for child in self._children]

    def __enter__(self) -> Self:
        try:
            with socket.create_server(("127.0.0.1", 0), backlog=max(16, self._world_size)) as listener:
                for rank in range(self._world_size):
                    self._start(rank, listener)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, rank: int, listener: socket.socket) -> None:
        variables = {
            **ONE_THREAD,
            "RANK": str(rank),
            "WORLD_SIZE": str(self._world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            # Empty counts as unset: it hides one that this process may itself have been given.
            "RINGFORT_LISTEN_FD": str(listener.fileno()) if rank == 0 else "",
            **self._variables,
        }
        # env(1) adds to the environment and then becomes Python; reading ours here is for config.py alone.
        assignments = [f"{name}={value}" for name, value in variables.items()]
        process = subprocess.Popen(
            ["env", *assignments, sys.executable, "-m", "ringfort.local", self._module, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=(listener.fileno(),) if rank == 0 else (),
            start_new_session=True,  # Ctrl-C goes to the parent alone, and the parent ends the ranks
        )
        child = _Child(rank, process)
        self._children.append(child)
        for stream in child.streams():
            self._selector.register(stream, selectors.EVENT_READ, child)

    def messages(self, *, patience: float = 0.0) -> Generator[tuple[int, Message], None, None]:
        """What the ranks report, as (rank, message), until all have ended.

        Raises `RankFailedError` when one ends badly; the rest are stopped first, after `patience` seconds in which they
        may say what they make of it.
        """
        give_up = float("inf")
        while True:
            ready = self._selector.select(POLL_SECONDS)
            for key, _ in ready:
                yield from self._read(key)
            for child in self._children:
                if child.process.poll() and child not in self._failed:
                    self._failed.append(child)
                    blame = BLAME_SECONDS if child.process.returncode == EXIT_LOST_PEER else 0.0
                    give_up = min(give_up, time.monotonic() + max(blame, patience))
            ended = all(child.process.poll() is not None for child in self._children)
            if (ended and not ready) or time.monotonic() >= give_up:
                break
        self._end_all()
        while last_words := self._selector.select(0):  # of ranks that have ended, so this ends too
            for key, _ in last_words:
                yield from self._read(key)
        self.stop()
        if self._failed:
            # min keeps the order in which they were seen among equals
            guilty = min(self._failed, key=lambda child: child.process.returncode == EXIT_LOST_PEER)
            raise RankFailedError(guilty.rank, guilty.process.returncode, list(guilty.tail))

    def _read(self, key: selectors.SelectorKey) -> Iterator[tuple[int, Message]]:
        child = cast("_Child", key.data)
        stream = cast("IO[bytes]", key.fileobj)
        data = os.read(stream.fileno(), 1 << 16)  # a pipe's usual capacity
        if not data:
            self._selector.unregister(stream)
            stream.close()
        for message in child.take(stream, data):
            yield child.rank, message

    def stop(self) -> None:
        """End every rank that still runs, and wait until it has: first by SIGTERM, then by SIGKILL. Idempotent."""
        try:
            self._end_all()
        finally:
            for child in self._children:
                child.close()
            self._selector.close()

    def _end_all(self) -> None:
        try:
            self._end(signal.SIGTERM, STOP_SECONDS)
        finally:  # also when a second Ctrl-C arrives in the wait
            self._end(signal.SIGKILL, None)

    def _end(self, signum: int, timeout: float | None) -> None:
        running = [child.process for child in self._children if child.process.poll() is None]
        for process in running:
            process.send_signal(signum)
        deadline = None if timeout is None else time.monotonic() + timeout
        for process in running:
            try:
                process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue


class _Child:
    """One rank's process, with what it wrote that is not yet a whole line."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.process = process
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._partial: dict[IO[bytes], bytes] = dict.fromkeys(self.streams(), b"")

    def streams(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        return self.process.stdout, self.process.stderr

    def take(self, stream: IO[bytes], data: bytes) -> Iterator[Message]:
        """The messages that `data` completes; empty `data` means the stream's end. Other lines go to the tail."""
        *lines, rest = (self._partial[stream] + data).split(b"\n")
        self._partial[stream] = rest if data else b""
        for line in lines if data else [*lines, rest]:
            message = _decode(line) if stream is self.process.stdout else None
            if message is not None:
                yield message
            elif line.strip():
                self.tail.append(line.decode(errors="replace").rstrip())

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def _decode(line: bytes) -> Message | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None  # a library printed something
    return cast("Message", value) if isinstance(value, dict) else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# --- in the rank's process --------------------------------------------------------------------------------------------


def report(**message: Any) -> None:
    """Tell the parent: one JSON object on one line of standard output."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(EXIT_LOST_PEER)  # not sys.exit: the main thread may be in a long call, and nobody is left to read a word


def _run_rank(module: str, arguments: Sequence[str]) -> int:
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except DistributedError as exc:
        sys.stderr.write(f"{type(exc).__name__}: {exc}\n")
        return EXIT_LOST_PEER if exc.is_peer_failure or isinstance(exc, AbortedError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(_run_rank(sys.argv[1], sys.argv[2:]))
