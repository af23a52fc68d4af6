"""Runs a control service in a process of its own, or in a thread of this one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import spawn
from pathlib import Path
from typing import Final

from ringfort.cluster.net.process_watch import open_own_pidfd
from ringfort.cluster.net.service import ControlService
from ringfort.transport.forks import keep_from_children
from ringfort.transport.locks import Thread

_PROGRAM: Final = (
    "import sys; sys.path[:] = sys.argv[3:]; from ringfort.cluster.net.service import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]))"
)
"""It copies this process's search path before it imports anything, so that neither the current folder nor a .pth file
decides what is loaded. (`-m` would put the current folder first.)"""


class ProcessHost:
    """A service in a process of its own, which ends with this process."""

    def __init__(self, sock: socket.socket) -> None:
        """Start the process, which takes over `sock`."""
        pidfd = open_own_pidfd()
        inherited = [sock.fileno(), *([] if pidfd is None else [pidfd])]
        package = str(Path(__file__).parents[2])
        path = [entry or str(Path.cwd()) for entry in sys.path if isinstance(entry, str)]  # pyright: ignore[reportUnnecessaryIsInstance]
        command = [os.fsdecode(spawn.get_executable()), "-S", *(["-B"] if sys.dont_write_bytecode else []), "-c"]
        command += [_PROGRAM, str(sock.fileno()), str(-1 if pidfd is None else pidfd), *path, package]
        try:
            # A session of its own: Ctrl-C and a closed terminal are for the training process, which then leaves.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=inherited,
                start_new_session=True,
            )
            keep_from_children(self)
        finally:
            sock.close()
            if pidfd is not None:
                os.close(pidfd)

    def wait(self, seconds: float) -> bool:
        """Return whether it ends within `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def abandon(self) -> None:
        """Forget the process. Called in a forked child, which is not its parent."""
        self._process.returncode = 0

    @property
    def how_it_ended(self) -> str:
        """How the process ended, as the end of a sentence."""
        code = self._process.returncode
        if code is None:
            return "closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with status {code}"

    name = "control process"


class ThreadHost:
    """A service in a thread of this process: for observers, which nobody waits for, and for tests."""

    def __init__(self, sock: socket.socket) -> None:
        """Start the thread, which takes over `sock`."""
        self.service = ControlService(sock)
        self._thread = Thread(lambda: asyncio.run(self.service.run()), name="ringfort-control")
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Return whether it ends within `seconds`."""
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def kill(self) -> None:
        """Do nothing: a thread cannot be killed. It ends with the process."""

    how_it_ended = "ended"
    name = "control thread"
