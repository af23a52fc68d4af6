"""`LocalRanks`: the ranks of one group as processes of this machine, and what they report.

The parent opens the listening socket of rank 0 and passes it on, so no port is ever guessed. A rank reports by writing
one JSON object per line to its standard output (`report`); the parent reads them with `LocalRanks.messages`.
"""

from __future__ import annotations

import json
import runpy
import socket
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, cast

from ringfort.config import check_world_size
from ringfort.errors import DistributedError, InvalidArgumentError
from ringfort.launch.failure_report import describe_exit, with_tail
from ringfort.launch.processes import Children, Output

Message = dict[str, Any]

STOP_SECONDS = 1.0
"""How long a rank may take to end by SIGTERM before it is killed. Ranks install no handler, so it is instant."""

# Ranks share the cores of one machine; a BLAS that takes all cores in each of them makes all of them slower.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)


def rank_variables(rank: int, world_size: int, listener: socket.socket) -> dict[str, str]:
    """What the environment tells a local rank about its group. Rank 0 must inherit `listener`."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        # Empty counts as unset: it hides the value that this process may have been given itself.
        "RINGFORT_MASTER": "",
        "RINGFORT_LISTEN_FD": str(listener.fileno()) if rank == 0 else "",
    }


class RankFailedError(DistributedError):
    """The process of a local rank failed. The other ranks were stopped."""

    is_peer_failure = True
    is_fatal = True

    def __init__(self, rank: int, exit_code: int, stderr: Sequence[str]) -> None:
        super().__init__(with_tail(f"local rank {rank} {describe_exit(exit_code)}", stderr), peer=rank)
        self.rank = rank
        self.exit_code = exit_code
        self.stderr = tuple(stderr)


class LocalRanks:
    """`world_size` processes that each run `python -m module arguments` with RANK, WORLD_SIZE and the master's address.

    A context manager that ends every process on exit. Not for use by several threads.
    """

    def __init__(
        self, module: str, world_size: int, arguments: Sequence[str] = (), *, variables: Mapping[str, str] | None = None
    ) -> None:
        """`variables` are added to the environment of every rank, and override those that are set here.

        Raises `InvalidWorldSizeError` for fewer than one rank.
        """
        check_world_size(world_size)
        if not module:
            raise InvalidArgumentError("module", module, "name a module that `python -m` can run")
        self._command = [sys.executable, "-m", "ringfort.launch.local_ranks", module, *arguments]
        self._world_size = world_size
        self._variables = dict(variables or {})
        self._children = Children()

    @property
    def pids(self) -> list[int]:
        """The process id of each rank."""
        return [child.process.pid for child in self._children.children]

    def __enter__(self) -> LocalRanks:
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
        passed = [listener.fileno()] if rank == 0 else []
        variables = {**ONE_THREAD, **rank_variables(rank, self._world_size, listener), **self._variables}
        self._children.start(rank, self._command, variables, pass_fds=passed)

    def messages(self, *, patience: float = 0.0) -> Generator[tuple[int, Message], None, None]:
        """Yield what the ranks report, as (rank, message), until all have ended.

        Raises `RankFailedError` if a rank fails. The others are stopped first, after `patience` seconds in which they
        may still report.
        """
        children, failure = self._children, None
        while not children.is_over:
            yield from _messages(children.poll())
            failure = children.first_failure()
            if failure is not None and time.monotonic() >= children.failed_at + patience:
                break
        yield from _messages(children.finish(STOP_SECONDS))
        self.stop()
        if failure is not None:
            assert failure.rank is not None
            raise RankFailedError(failure.rank, failure.exit_code, failure.tail)

    def stop(self) -> None:
        """End every rank that still runs, first by SIGTERM, then by SIGKILL, and wait until it has. Idempotent."""
        with closing(self._children):
            for _ in self._children.finish(STOP_SECONDS):
                pass


def _messages(outputs: Iterable[Output]) -> Iterator[tuple[int, Message]]:
    """The messages in what ranks wrote. Other lines go to the tail."""
    for output in outputs:
        for line in output.lines():
            message = None if output.is_error else _decode(line)
            if message is None:
                output.child.keep([line])
            else:
                yield output.child.number, message


def _decode(line: bytes) -> Message | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None  # a library printed something
    return cast("Message", value) if isinstance(value, dict) else None


# --- in the rank's process --------------------------------------------------------------------------------------------


def report(**message: Any) -> None:
    """Send a message to the parent: one JSON object on one line of standard output."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _run_rank(module: str, arguments: Sequence[str]) -> None:
    """Run `module`. An error of ours is one line in place of a traceback."""
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except DistributedError as exc:
        sys.exit(f"{type(exc).__name__}: {exc}")


if __name__ == "__main__":
    _run_rank(sys.argv[1], sys.argv[2:])
