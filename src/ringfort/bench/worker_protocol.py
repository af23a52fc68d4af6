"""What the benchmark's parent and its ranks say to each other: JSON, one object a line, over a socket in a folder.

Not over standard input and output, because MPI's launchers keep those to themselves; and not over the network, because
ranks may be in network namespaces of their own.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
from pathlib import Path
from typing import Any, cast

Message = dict[str, Any]


class Wire:
    """One end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @classmethod
    def connect(cls, path: Path) -> Wire:
        """To the parent's socket at `path`."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(str(path))
        except OSError:
            sock.close()
            raise
        return cls(sock)

    def fileno(self) -> int:
        """For selectors."""
        return self.sock.fileno()

    def send(self, message: Message) -> None:
        """Raises `OSError` if the other end has gone."""
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> Message:
        """The next message. Raises `EOFError` at the end.

        The two ends take turns, so what has arrived is never more than one.
        """
        data = bytearray()
        while not data.endswith(b"\n"):
            try:
                more = self.sock.recv(1 << 16)
            except ConnectionError:
                more = b""
            if not more:
                raise EOFError
            data += more
        return cast("Message", json.loads(data))

    def close(self) -> None:
        """Idempotent."""
        self.sock.close()


def end_with(wire: Wire, exit_code: int) -> None:
    """From now on this process ends when the other end of `wire` does, whatever its main thread is in."""

    def watch() -> None:
        poll = select.poll()
        poll.register(wire, 0)  # nothing but the hang-up, which comes unasked
        poll.poll()
        os._exit(exit_code)  # not sys.exit: the main thread may be in a long call, and nobody is left to read a word

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
