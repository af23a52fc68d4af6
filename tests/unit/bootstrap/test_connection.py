"""Hellos: no peer is waited for longer than until the deadline, however slowly it sends."""

from __future__ import annotations

import errno

import pytest

from ringfort.bootstrap import connection as connection_module
from ringfort.bootstrap.connection import Connection
from ringfort.errors import NoConnectionError
from ringfort.transport.handshake import sealed
from ringfort.transport.hello import Hello, Ready, encode


class Dripping:
    """A socket in virtual time: a byte comes after each `pause`."""

    def __init__(self, words: bytes, pause: float) -> None:
        self.now = 100.0
        self._words = words
        self._pause = pause

    def setblocking(self, is_blocking: bool) -> None:
        assert not is_blocking

    def sleep(self, sock: object, event: int, deadline: float, beside: object = None) -> None:
        """As `tcp.sleep_on` does."""
        if deadline <= self.now:
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        self.now = min(self.now + self._pause, deadline)
        if self.now >= deadline:
            raise TimeoutError(errno.ETIMEDOUT, "timed out")

    def recv(self, count: int) -> bytes:
        byte, self._words = self._words[:1], self._words[1:]
        return byte

    def send(self, data: bytes) -> int:
        raise AssertionError("there is no time left")


def connection_over(monkeypatch: pytest.MonkeyPatch, words: bytes, pause: float) -> tuple[Connection, Dripping]:
    sock = Dripping(words, pause)
    monkeypatch.setattr(connection_module, "sleep_on", sock.sleep)
    return Connection(sock, b"", None, None), sock  # type: ignore[arg-type]


@pytest.mark.parametrize("pause", [0.009, 0.3, 5.0])
def test_who_drips_is_heard_until_the_deadline_and_not_longer(monkeypatch: pytest.MonkeyPatch, pause: float) -> None:
    """10 ms for each byte after the deadline would be hours for a hello."""
    connection, sock = connection_over(monkeypatch, bytes((0, 16, 0, 0)) + bytes(4096), pause)
    with pytest.raises(NoConnectionError, match="No answer in time from rank 1"):
        connection.hear(1, Hello, 101.0)
    assert sock.now <= 101.0 + 1e-6


def test_who_drips_quickly_enough_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    connection, sock = connection_over(monkeypatch, sealed(None, encode(Ready())), 0.001)
    assert connection.hear(1, Hello, 101.0) == Ready()
    assert sock.now < 101.0


def test_nothing_is_said_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    connection, _ = connection_over(monkeypatch, b"", 1.0)
    with pytest.raises(NoConnectionError, match="timed out"):
        connection.say(Ready(), 100.0)
