"""A crowd at a listener: `python -m tests.workers.strangers HOST PORT NETWORK_ID RATE [silent]` makes bad connections.

They take turns: no secret, another cluster, garbage, half a handshake, silence, and a byte a second. Four lines a
second on the standard output say how many there were so far, and how many of them found somebody who listens.
"""

from __future__ import annotations

import os
import random
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ringfort.config import parse_address
from ringfort.errors import DistributedError
from ringfort.identity.namespace import NetworkNamespace
from ringfort.transport.handshake import Handshake
from tests.helpers.handshakes import PURPOSE, impostor, member

ROOT = Path(__file__).parents[2]
MOST_OPEN = 500
"""Connections that the crowd holds at once; the oldest go first."""


class Count(NamedTuple):
    """How many have come, and how many of them met an open listener."""

    attempts: int
    connected: int


class _Public(NetworkNamespace):
    """A cluster of which only the network id is known."""

    def __init__(self, network_id: bytes) -> None:
        super().__init__("default", os.urandom(32))
        self.network_id = network_id


class Crowd:
    """All strangers, in one thread."""

    def __init__(self, address: tuple[str, int], network_id: bytes, *, is_silent: bool = False) -> None:
        self._address = address
        self._cluster = _Public(network_id)
        self._selector = selectors.DefaultSelector()
        self._open: deque[socket.socket] = deque()
        self._talks: dict[socket.socket, Handshake] = {}
        self._drips: dict[socket.socket, bytes] = {}
        self._drip_at = 0.0
        self._rng = random.Random(1)
        self.attempts = 0
        self.connected = 0
        self._kinds: list[Callable[[socket.socket], None]] = [
            lambda sock: self._talk(sock, Handshake(impostor(self._cluster), PURPOSE)),
            lambda sock: self._talk(sock, Handshake(member(NetworkNamespace.generate()), PURPOSE)),
            lambda sock: self._say(sock, self._rng.randbytes(200)),
            lambda sock: self._say(sock, bytes(Handshake(impostor(self._cluster), PURPOSE).outgoing[:50])),
            lambda sock: None,
            lambda sock: self._drips.update({sock: bytes(Handshake(impostor(self._cluster), PURPOSE).outgoing)}),
        ]
        if is_silent:
            self._kinds = [lambda sock: None]

    def come(self) -> None:
        """One more stranger."""
        self.attempts += 1
        sock = socket.socket()
        try:
            sock.settimeout(0.5)
            sock.connect(self._address)
        except OSError:  # nobody listens, or the kernel's queue is full
            sock.close()
            return
        self.connected += 1
        sock.setblocking(False)
        self._open.append(sock)
        self._selector.register(sock, selectors.EVENT_READ)
        self._kinds[self.attempts % len(self._kinds)](sock)
        if len(self._open) > MOST_OPEN:
            self._end(self._open[0])

    def go_on(self, until: float) -> None:
        """What those who are there do until then."""
        while True:
            for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
                self._hear(key.fileobj)  # type: ignore[arg-type]
            now = time.monotonic()
            if now >= self._drip_at:
                self._drip_at = now + 1
                for sock, words in list(self._drips.items()):
                    self._drips[sock] = words[1:]
                    self._say(sock, words[:1])
            if now >= until:
                return

    def _talk(self, sock: socket.socket, handshake: Handshake) -> None:
        self._talks[sock] = handshake
        self._say(sock, bytes(handshake.outgoing))
        handshake.outgoing.clear()

    def _hear(self, sock: socket.socket) -> None:
        handshake = self._talks.get(sock)
        try:
            data = sock.recv(handshake.wants if handshake else 4096)
            if not data:
                self._end(sock)
            elif handshake:
                handshake.feed(data)
                self._say(sock, bytes(handshake.outgoing))
                handshake.outgoing.clear()
        except BlockingIOError:
            return
        except (DistributedError, OSError):
            self._end(sock)

    def _say(self, sock: socket.socket, words: bytes) -> None:
        with suppress(OSError):  # they have closed on us, which reading will tell
            sock.send(words)

    def _end(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        self._open.remove(sock)
        self._talks.pop(sock, None)
        self._drips.pop(sock, None)
        sock.close()


def main() -> None:
    host, port, network_id, rate, *silent = sys.argv[1:]
    crowd = Crowd((host, int(port)), bytes.fromhex(network_id), is_silent=bool(silent))
    step, told = 1 / float(rate), 0.0
    due = time.monotonic()
    while True:
        crowd.come()
        due = max(due + step, time.monotonic() - 1)  # what was missed in a busy second is made up for, no more
        crowd.go_on(due)
        if time.monotonic() >= told:
            told = time.monotonic() + 0.25
            print(crowd.attempts, crowd.connected, flush=True)


@contextmanager
def crowd(
    address: str, cluster: NetworkNamespace, rate: float = 300, *, is_silent: bool = False
) -> Generator[Callable[[], Count], None, None]:
    """A crowd of so many a second at `address`, in a process of its own, there when the block begins. A silent one only
    connects.

    The value tells how many there have been since then, as of a quarter of a second ago.
    """
    host, port = parse_address(address)
    arguments = [host, str(port), cluster.network_id.hex(), str(rate), *(["silent"] if is_silent else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.workers.strangers", *arguments], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    lines: deque[bytes] = deque(maxlen=1)
    try:
        lines.append(process.stdout.readline())
        first = Count(*map(int, lines[0].split()))
        reader = threading.Thread(target=lines.extend, args=(process.stdout,), name="crowd", daemon=True)
        reader.start()

        def so_far() -> Count:
            assert process.poll() is None, "the crowd has gone"
            now = Count(*map(int, lines[0].split()))
            return Count(now.attempts - first.attempts, now.connected - first.connected)

        try:
            yield so_far
        finally:
            process.kill()
            reader.join()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    main()
