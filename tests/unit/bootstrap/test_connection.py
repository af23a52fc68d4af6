"""What is said while a group forms: nobody is heard longer than until the deadline."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ringfort.bootstrap import connection as connection_module
from ringfort.bootstrap.connection import Connection
from ringfort.errors import NoConnectionError
from ringfort.transport.handshake import Handshake, sealed
from ringfort.transport.hello import Ready, encode


class Dripping:
    """A socket in virtual time: a byte comes each time when the wait for it is nearly over."""

    def __init__(self, words: bytes, pause: float) -> None:
        self.now = 100.0
        self._words = words
        self._pause = pause
        self._patience = 0.0

    def settimeout(self, seconds: float) -> None:
        self._patience = seconds

    def recv(self, count: int) -> bytes:
        self.now += min(self._pause, self._patience)
        if self._patience < self._pause:
            raise TimeoutError
        byte, self._words = self._words[:1], self._words[1:]
        return byte

    def sendall(self, data: bytes) -> None:
        raise AssertionError("there is no time left")


def channel_over(monkeypatch: pytest.MonkeyPatch, words: bytes, pause: float) -> tuple[Connection, Dripping]:
    sock = Dripping(words, pause)
    monkeypatch.setattr(connection_module, "time", SimpleNamespace(monotonic=lambda: sock.now))
    handshake: Any = Handshake(None, Ready())
    return Connection(sock, handshake), sock  # type: ignore[arg-type]


@pytest.mark.parametrize("pause", [0.009, 0.3, 5.0])
def test_who_drips_is_heard_until_the_deadline_and_not_longer(monkeypatch: pytest.MonkeyPatch, pause: float) -> None:
    """10 ms for each byte after the deadline would be hours for a hello."""
    connection, sock = channel_over(monkeypatch, bytes((0, 16, 0, 0)) + bytes(4096), pause)
    with pytest.raises(NoConnectionError, match="did not answer in time"):
        connection.hear("rank 1", 101.0)
    assert sock.now <= 101.0 + 1e-6


def test_who_drips_quickly_enough_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    connection, sock = channel_over(monkeypatch, sealed(None, encode(Ready())), 0.001)
    assert connection.hear("rank 1", 101.0) == Ready()
    assert sock.now < 101.0


def test_nothing_is_said_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    connection, _ = channel_over(monkeypatch, b"", 1.0)
    with pytest.raises(NoConnectionError, match="the time for it is over"):
        connection.say(Ready(), 100.0)
