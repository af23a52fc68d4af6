"""Processes of this machine that belong together: started, listened to, signalled and ended as one.

Each has a process group of its own, so that whatever it starts ends with it; and if this process is killed, the reaper
ends them all (launch/reaper.py). Used by `LocalRanks` and by `ringfort run`.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, cast

from ringfort.config import child_environment
from ringfort.errors import DistributedError

if TYPE_CHECKING:
    from typing_extensions import Self

POLL_SECONDS = 0.05
"""How late the end of a child may be noticed when its pipes say nothing. Short beside what a person notices."""
TAIL_LINES = 20
"""How many lines of a child's output to keep: a traceback's end, with the error and where it came from."""
READ_BYTES = 1 << 16
"""A pipe's usual capacity."""
MAX_LINE_BYTES = 1 << 24
"""A line that is longer is cut: 16 MiB without an end is no text, and must not fill the memory."""

_REAPER = Path(__file__).with_name("reaper.py")


class Output(NamedTuple):
    """What a child has written."""

    child: Child
    is_error: bool
    """On standard error."""
    data: bytes
    """Empty at the stream's end."""

    def lines(self) -> list[bytes]:
        """The lines that this completes, without their ends. To be called once."""
        return self.child.split(self.child.streams[self.is_error], self.data)


class Child:
    """One process, with what it wrote that is not yet a whole line."""

    def __init__(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.number = number
        self.process = process
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """The last lines; `Children` does not fill it, because only its user knows which are worth keeping."""
        self.streams: tuple[IO[bytes], IO[bytes]] = (process.stdout, process.stderr)
        self._partial: dict[IO[bytes], bytes] = dict.fromkeys(self.streams, b"")

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for the signal that ended it."""
        return self.process.returncode

    @property
    def is_read(self) -> bool:
        """Whether it has ended, and its output too."""
        return self.exit_code is not None and all(stream.closed for stream in self.streams)

    def keep(self, lines: Sequence[bytes]) -> None:
        """Put lines that are not empty into the tail."""
        self.tail.extend(line.decode(errors="replace").rstrip() for line in lines[-2 * TAIL_LINES :] if line.strip())

    def split(self, stream: IO[bytes], data: bytes) -> list[bytes]:
        """The lines that `data` completes; empty `data` means the stream's end."""
        *lines, rest = (self._partial[stream] + data).split(b"\n")
        if rest and (not data or len(rest) > MAX_LINE_BYTES):
            lines, rest = [*lines, rest], b""
        self._partial[stream] = rest
        return lines


class Children:
    """A context manager: leaving it, by any way, ends every process that still runs. For use by one thread."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self.failed: list[Child] = []
        """Those that ended badly and whose last words have been read, in that order."""
        self._selector = selectors.DefaultSelector()
        self._reaper: subprocess.Popen[bytes] | None = None
        self._over: set[Child] = set()
        """Those that have ended and whose last words have been read."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self,
        number: int,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Start `command` with `variables` added to this process's environment. `number` is the child's name.

        Raises `DistributedError` if it cannot be started.
        """
        try:
            reaper = self._reaper = self._reaper or _start_reaper()
            process = subprocess.Popen(
                list(command),
                env=child_environment(variables),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=pass_fds,
                start_new_session=True,  # Ctrl-C goes to this process alone, which passes it on
            )
        except OSError as exc:
            raise DistributedError(f"cannot start {command[0]}: {exc}") from exc
        child = Child(number, process)
        self.children.append(child)
        _tell(reaper, "+", process.pid)
        for stream in child.streams:
            self._selector.register(stream, selectors.EVENT_READ, child)
        return child

    @property
    def is_over(self) -> bool:
        """Whether all have ended and all that they wrote has been read."""
        return len(self._over) == len(self.children)

    def watch(self, stream: IO[bytes] | int) -> None:
        """`poll` returns early when there is something to read in `stream`, and leaves that to the caller."""
        self._selector.register(stream, selectors.EVENT_READ, None)

    def poll(self, timeout: float = POLL_SECONDS) -> list[Output]:
        """Waits for something to happen, and returns what was written. `failed` is up to date afterwards."""
        found: list[Output] = []
        had_ended = {child for child in self.children if child.exit_code is not None}
        ready = [key for key, _ in self._selector.select(timeout) if key.data is not None]
        for key in ready:
            child, stream = cast("Child", key.data), cast("IO[bytes]", key.fileobj)
            data = os.read(stream.fileno(), READ_BYTES)
            if not data:
                self._selector.unregister(stream)
                stream.close()
            found.append(Output(child, stream is child.streams[1], data))
        self._notice_ends()
        # What a dead process wrote was in its pipe when it died: if nothing is there now, nothing will be, even where a
        # process that left its group still holds the other end.
        silent = had_ended - {cast("Child", key.data) for key in ready}
        for child in self.children:
            if child not in self._over and (child in silent or child.is_read):
                self._over.add(child)
                if child.exit_code:
                    self.failed.append(child)
        return found

    def _notice_ends(self) -> None:
        for child in self.children:
            if child.exit_code is None and child.process.poll() is not None:
                self._signal(child, signal.SIGKILL)  # to those it started and left behind
                if self._reaper is not None:
                    _tell(self._reaper, "-", child.process.pid)

    def signal(self, signum: int) -> None:
        """Send `signum` to every child that runs, and to what each of them started."""
        for child in self.children:
            if child.exit_code is None:
                self._signal(child, signum)

    def _signal(self, child: Child, signum: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # macOS: the group has only dead members
            os.killpg(child.process.pid, signum)

    def finish(self, grace: float) -> Iterator[Output]:
        """Ends what runs, by SIGTERM and after `grace` seconds by SIGKILL; yields what is written meanwhile."""
        self.signal(signal.SIGTERM)
        kill_at = time.monotonic() + grace
        while not self.is_over:
            if time.monotonic() >= kill_at:
                self.signal(signal.SIGKILL)
            yield from self.poll()

    def close(self) -> None:
        """Kill what still runs, and wait until it has ended. Idempotent."""
        self.signal(signal.SIGKILL)
        for child in self.children:
            child.process.wait()
            for stream in child.streams:
                stream.close()
        self._selector.close()
        self._over = set(self.children)
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            with suppress(OSError):
                self._reaper.stdin.close()
            # Nobody that it was told of is left, but a child may have ended unseen: it need not wait for that.
            self._reaper.kill()
            self._reaper.wait()
            self._reaper = None


def _start_reaper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_REAPER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )


def _tell(reaper: subprocess.Popen[bytes], what: str, group: int) -> None:
    assert reaper.stdin is not None
    with suppress(BrokenPipeError):  # somebody killed the reaper: the children still end with us when we end well
        reaper.stdin.write(f"{what}{group}\n".encode())
