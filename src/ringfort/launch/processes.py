"""`Children`: processes of this machine that are started, read, signalled and ended together.

Each child has a process group of its own, so that whatever it starts ends with it. If this process is killed, the
reaper ends all of them (launch/reaper.py). Used by `LocalRanks`, `ringfort run`, `ringfort bench` and `ProcessRanks`.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import IO, NamedTuple, cast

from ringfort.config import child_environment
from ringfort.errors import DistributedError
from ringfort.launch.failure_report import TAIL_LINES, Failure

POLL_SECONDS = 0.05
"""How late the end of a child may be noticed if its pipes stay silent. Too short for a person to notice."""
READ_BYTES = 1 << 16
"""A pipe's usual capacity."""
MAX_LINE_BYTES = 1 << 24
"""A longer line is cut: 16 MiB without a line end are not text, and must not fill the memory."""
LOCAL_REPORT_SECONDS = 1.0
"""How long to wait, after a rank lost a peer on this machine, for the end of that peer."""
REMOTE_REPORT_SECONDS = 3.0
"""The same if the peer may be on another machine: the launcher there reports its failure, or is itself lost. Ranks and
launchers have the same patience, so both are noticed within a second or two of each other."""

_REAPER = Path(__file__).with_name("reaper.py")


class Output(NamedTuple):
    """What a child has written."""

    child: Child
    is_error: bool
    """Whether it was written to standard error."""
    data: bytes
    """Empty at the end of the stream."""

    def lines(self) -> list[bytes]:
        """The lines that `data` completes, without their ends. To be called once."""
        partial = self.child.partial
        *lines, rest = (partial[self.is_error] + self.data).split(b"\n")
        if rest and (not self.data or len(rest) > MAX_LINE_BYTES):
            lines, rest = [*lines, rest], b""
        partial[self.is_error] = rest
        return lines


class Child:
    """One process, with the output that does not yet make a whole line."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], tail_lines: int) -> None:
        self.number = number
        self.process = process
        self.is_over = False
        """Whether the process has ended and all its output was read."""
        self.tail: deque[str] = deque(maxlen=tail_lines)
        """The last lines. `Children` does not fill it: only its user knows which lines are worth keeping."""
        self.streams = cast("tuple[IO[bytes], IO[bytes]]", (process.stdout, process.stderr))
        self.partial = [b"", b""]

    @property
    def exit_code(self) -> int | None:
        """None while the process runs; negative for the signal that ended it."""
        return self.process.returncode

    def keep(self, lines: Sequence[bytes | bytearray]) -> None:
        """Put the lines that are not empty into the tail."""
        recent = lines[-2 * (self.tail.maxlen or 0) :]
        self.tail.extend(line.decode(errors="replace").rstrip() for line in recent if line.strip())

    def signal(self, signum: int) -> None:
        """Send `signum` to the process and to all that it started."""
        with suppress(ProcessLookupError, PermissionError):  # macOS: the group has only dead members
            os.killpg(self.process.pid, signum)


class Children:
    """Processes that `close` ends. For use by one thread."""

    def __init__(self, *, tail_lines: int = TAIL_LINES) -> None:
        self.children: list[Child] = []
        self.failed: list[Child] = []
        """The children that failed and whose output was read to its end, in that order."""
        self.failed_at = 0.0
        """When the first of them failed."""
        self._tail_lines = tail_lines
        self._selector = selectors.DefaultSelector()
        self._reaper: subprocess.Popen[bytes] | None = None

    def start(
        self,
        number: int,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Start `command` with `variables` added to this process's environment. `number` names the child.

        Raises `DistributedError` if the command cannot be started.
        """
        try:
            self._reaper = self._reaper or _start_reaper()
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
        child = Child(number, process, self._tail_lines)
        self.children.append(child)
        self._tell_reaper("+", process.pid)
        for stream in child.streams:
            self._selector.register(stream, selectors.EVENT_READ, child)
        return child

    def forget(self, child: Child) -> None:
        """Drop a child that is over, before another process takes its number."""
        for stream in child.streams:
            if not stream.closed:  # a process that left the group holds it open
                self._selector.unregister(stream)
        with child.process:  # closes its pipes
            self.children.remove(child)
        if child in self.failed:
            self.failed.remove(child)

    @property
    def is_over(self) -> bool:
        """Whether all children have ended and all their output was read."""
        return all(child.is_over for child in self.children)

    def poll(self, timeout: float = POLL_SECONDS) -> list[Output]:
        """Wait until something happens, and return what was written. `failed` is up to date afterwards."""
        found: list[Output] = []
        had_ended = {child for child in self.children if child.exit_code is not None}
        ready = [key for key, _ in self._selector.select(timeout)]
        for key in ready:
            child, stream = cast("Child", key.data), cast("IO[bytes]", key.fileobj)
            data = os.read(stream.fileno(), READ_BYTES)
            if not data:
                self._selector.unregister(stream)
                stream.close()
            found.append(Output(child, stream is child.streams[1], data))
        # The last output of a process was in its pipe when it died: if the pipe is empty now it stays so, even if a
        # process that left the group still holds the other end.
        silent = had_ended - {cast("Child", key.data) for key in ready}
        for child in self.children:
            if child.exit_code is None and child.process.poll() is not None:
                child.signal(SIGKILL)  # ends the processes that it started and left behind
                self._tell_reaper("-", child.process.pid)
            has_ended = child.exit_code is not None and all(stream.closed for stream in child.streams)
            if not child.is_over and (has_ended or child in silent):
                child.is_over = True
                if child.exit_code:
                    self.failed_at = self.failed_at if self.failed else time.monotonic()
                    self.failed.append(child)
        return found

    def _tell_reaper(self, what: str, group: int) -> None:
        if self._reaper is not None and self._reaper.stdin is not None:
            with suppress(BrokenPipeError):  # it was killed: the children still end with this process if it ends well
                self._reaper.stdin.write(f"{what}{group}\n".encode())

    def first_failure(self, host: str = "", *, is_alone: bool = True) -> Failure | None:
        """The failure that caused the others, once it is known; None before.

        A victim counts only if no other child fails for a while. Without `is_alone` the peer that it lost may be on
        another machine.
        """
        failures = [Failure.of_rank(child.number, host, child.exit_code or 0, child.tail) for child in self.failed]
        found = min(failures, key=lambda failure: failure.is_victim, default=None)
        if found is None or not found.is_victim or (is_alone and self.is_over):
            return found
        grace = LOCAL_REPORT_SECONDS if is_alone else REMOTE_REPORT_SECONDS
        return found if time.monotonic() >= self.failed_at + grace else None

    def signal(self, signum: int) -> None:
        """Send `signum` to every child that runs, and to all that it started."""
        for child in self.children:
            if child.exit_code is None:
                child.signal(signum)

    def finish(self, grace: float, signum: int = SIGTERM) -> Iterator[Output]:
        """End what runs, by `signum` (0 for none) and after `grace` seconds by SIGKILL; yield what is written."""
        self.signal(signum)
        kill_at = time.monotonic() + grace
        while not self.is_over:
            if time.monotonic() >= kill_at:
                self.signal(SIGKILL)
            yield from self.poll()

    def close(self) -> None:
        """Kill what still runs, and wait until it has ended. Idempotent."""
        self.signal(SIGKILL)
        for child in self.children:
            with child.process:  # closes its pipes, and waits
                child.is_over = True
        self._selector.close()
        if self._reaper is not None:
            # No child is left, but the reaper may not have been told of the last ones: do not wait for its grace.
            with self._reaper as reaper:
                reaper.kill()
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
