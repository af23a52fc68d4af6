"""Start the ranks of one group as processes of this machine, and read what they report.

The parent opens the listening socket of rank 0 and hands it down, so no port is ever guessed. A rank reports by writing
one JSON object a line to its standard output (`report`); the parent reads them with `LocalRanks.messages`.
"""

from __future__ import annotations

import json
import runpy
import signal
import socket
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

from ringfort.errors import AbortedError, DistributedError, InvalidArgumentError, InvalidWorldSizeError
from ringfort.launch.processes import Children, Output

if TYPE_CHECKING:
    from typing_extensions import Self

Message = dict[str, Any]

EXIT_LOST_PEER = 75
"""EX_TEMPFAIL of sysexits.h: this rank was well, but it lost another. So the parent blames the other."""
BLAME_SECONDS = 1.0
"""How long to wait, after a rank lost another, for that other to end too: survivors may be the quicker to end."""
STOP_SECONDS = 1.0
"""How long a rank may take to end by SIGTERM before it is killed. Ranks install no handler, so it is instant."""

# Ranks share the cores of one machine; a BLAS that takes all cores in each of them makes all of them slower.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)


class RankFailedError(DistributedError):
    """A local rank's process ended badly. The others were stopped."""

    is_peer_failure = True
    is_fatal = True

    def __init__(self, rank: int, exit_code: int, stderr: Sequence[str]) -> None:
        words = "" if not stderr else f": {stderr[0]}" if len(stderr) == 1 else ":\n    " + "\n    ".join(stderr)
        super().__init__(f"local rank {rank} {describe_exit(exit_code)}{words}", peer=rank)
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
        self._children = Children()

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return [child.process.pid for child in self._children.children]

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
            "RINGFORT_MASTER": "",
            "RINGFORT_LISTEN_FD": str(listener.fileno()) if rank == 0 else "",
            **self._variables,
        }
        self._children.start(
            rank,
            [sys.executable, "-m", "ringfort.launch.local_ranks", self._module, *self._arguments],
            variables,
            pass_fds=(listener.fileno(),) if rank == 0 else (),
        )

    def messages(self, *, patience: float = 0.0) -> Generator[tuple[int, Message], None, None]:
        """What the ranks report, as (rank, message), until all have ended.

        Raises `RankFailedError` when one ends badly; the rest are stopped first, after `patience` seconds in which they
        may say what they make of it.
        """
        give_up = float("inf")
        children, seen = self._children, 0
        while not children.is_over and time.monotonic() < give_up:
            yield from _messages(children.poll())
            for child in children.failed[seen:]:
                blame = BLAME_SECONDS if child.exit_code == EXIT_LOST_PEER else 0.0
                give_up = min(give_up, time.monotonic() + max(blame, patience))
            seen = len(children.failed)
        failed = tuple(children.failed)  # those that are stopped now are not to blame
        yield from _messages(children.finish(STOP_SECONDS))
        self.stop()
        if failed:
            # min keeps the order in which they were seen among equals
            guilty = min(failed, key=lambda child: child.exit_code == EXIT_LOST_PEER)
            assert guilty.exit_code is not None
            raise RankFailedError(guilty.number, guilty.exit_code, list(guilty.tail))

    def stop(self) -> None:
        """End every rank that still runs, and wait until it has: first by SIGTERM, then by SIGKILL. Idempotent."""
        with closing(self._children):
            for _ in self._children.finish(STOP_SECONDS):
                pass


def _messages(outputs: Iterable[Output]) -> Iterator[tuple[int, Message]]:
    """The messages in what ranks wrote. Other lines go to the tail."""
    for output in outputs:
        child, lines = output.child, output.lines()
        if output.is_error:
            child.keep(lines)
            continue
        for line in lines:
            message = _decode(line)
            if message is None:
                child.keep([line])
            else:
                yield child.number, message


def _decode(line: bytes) -> Message | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None  # a library printed something
    return cast("Message", value) if isinstance(value, dict) else None


def describe_exit(exit_code: int) -> str:
    """What became of a process, in words; a negative code is a signal's."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


# --- in the rank's process --------------------------------------------------------------------------------------------


def report(**message: Any) -> None:
    """Tell the parent: one JSON object on one line of standard output."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _run_rank(module: str, arguments: Sequence[str]) -> int:
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except DistributedError as exc:
        sys.stderr.write(f"{type(exc).__name__}: {exc}\n")
        return EXIT_LOST_PEER if exc.is_peer_failure or isinstance(exc, AbortedError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(_run_rank(sys.argv[1], sys.argv[2:]))
