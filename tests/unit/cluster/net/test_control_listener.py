"""Where a node's connections are accepted: members get in, strangers have neither much time nor much room."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace

import pytest

from ringfort.bootstrap.admission import MAX_WAITING
from ringfort.cluster.net import control_listener as listener_module
from ringfort.cluster.net.control_link import dial
from ringfort.cluster.net.control_listener import ControlListener
from ringfort.config import parse_address
from ringfort.transport import tcp
from ringfort.transport.handshake import Handshake
from ringfort.transport.hello import Control
from tests.helpers.handshakes import impostor, member

PATIENCE = 20.0


class Street:
    """An listener on loopback, who came in, and who was refused."""

    def __init__(self) -> None:
        self.came: list[Handshake] = []
        self.refused: list[str] = []
        self._sockets: list[socket.socket] = []
        self._stirred = asyncio.Event()
        self.listener = ControlListener(member(), self._opened, self._refused)
        self.listener.open(["127.0.0.1"], 0)
        self.address = parse_address(self.listener.addresses[0])

    def _opened(self, sock: socket.socket, handshake: Handshake, where: str) -> None:
        self._sockets.append(sock)
        self.came.append(handshake)
        self._stirred.set()

    def _refused(self, where: str, why: str) -> None:
        self.refused.append(why)
        self._stirred.set()

    async def stranger(self, source: str = "127.0.0.1") -> socket.socket:
        """Somebody who connects from `source`, and is accepted, and says nothing."""
        sock = socket.socket()
        sock.bind((source, 0))
        sock.setblocking(False)
        self._sockets.append(sock)
        await asyncio.get_running_loop().sock_connect(sock, self.address)
        return sock

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._stirred.clear()
            await asyncio.wait_for(self._stirred.wait(), PATIENCE)

    async def close(self) -> None:
        self.listener.close()
        while self.listener._waiting:
            await asyncio.sleep(0)
        for sock in self._sockets:
            sock.close()


def on_a_street(scene: Callable[[Street], Awaitable[None]]) -> None:
    async def main() -> None:
        street = Street()
        try:
            await scene(street)
        finally:
            await street.close()

    asyncio.run(main())


async def ends(sock: socket.socket) -> bool:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 1), PATIENCE) == b""


def test_the_oldest_stranger_makes_room_and_a_member_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MAX_WAITING", 3)

    async def scene(street: Street) -> None:
        crowd = [await street.stranger() for _ in range(5)]
        await street.until(lambda: len(street.refused) == 2)
        assert street.refused == ["too many strangers at once"] * 2
        assert await ends(crowd[0])
        assert await ends(crowd[1])
        assert len(street.listener._waiting) == 3
        sock, _ = await dial(*street.address, member(), Control())
        sock.close()
        await street.until(lambda: bool(street.came))
        assert street.came[0].purpose == Control()

    on_a_street(scene)


@pytest.mark.parametrize("kind", ["silent, the same address", "half a handshake, another address"])
def test_a_member_whose_answer_takes_long_keeps_its_place_in_a_flood(kind: str) -> None:
    """Between its first message and its third, twice as many come as there are places."""
    words = b"" if "silent" in kind else bytes(Handshake(impostor(), Control()).outgoing)
    source = "127.0.0.1" if "the same" in kind else "127.0.0.2"

    async def flood(street: Street) -> None:
        before = len(street.refused)
        for _ in range(2 * MAX_WAITING):
            stranger = await street.stranger(source)
            await asyncio.get_running_loop().sock_sendall(stranger, words)
        await street.until(lambda: len(street.refused) >= before + MAX_WAITING)

    async def scene(street: Street) -> None:
        loop = asyncio.get_running_loop()
        handshake = Handshake(member(), Control())
        sock = await street.stranger()
        await loop.sock_sendall(sock, handshake.outgoing)
        handshake.outgoing.clear()
        await flood(street)
        while not handshake.outgoing:
            handshake.feed(await asyncio.wait_for(loop.sock_recv(sock, handshake.wants), PATIENCE))
        await flood(street)
        await loop.sock_sendall(sock, handshake.outgoing)
        await street.until(lambda: bool(street.came))
        assert street.came[0].purpose == Control()

    on_a_street(scene)


class Full(socket.socket):
    """A listening socket whose process has no descriptor left. Counts how often it was asked."""

    asked = 0
    is_full = True

    def accept(self) -> tuple[socket.socket, object]:
        self.asked += 1
        if self.is_full:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_listener_without_descriptors_pauses_warns_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listeners: list[Full] = []

    def listen(host: str, port: int) -> socket.socket:
        listeners.append(Full(fileno=tcp.listen(host, port).detach()))
        return listeners[0]

    monkeypatch.setattr(listener_module, "tcp", SimpleNamespace(listen=listen))

    async def scene(street: Street) -> None:
        loop = asyncio.get_running_loop()
        pauses: list[Callable[[], None]] = []
        monkeypatch.setattr(loop, "call_later", lambda seconds, go_on, *what: pauses.append(partial(go_on, *what)))
        await street.stranger()
        for turn in range(3):
            while len(pauses) == turn:
                await asyncio.sleep(0)
            for _ in range(100):  # however often the loop turns, it does not ask again
                await asyncio.sleep(0)
            assert listeners[0].asked == turn + 1
            listeners[0].is_full = turn < 2
            pauses[turn]()
        monkeypatch.undo()
        while not street.listener._waiting:
            await asyncio.sleep(0)
        assert len(caplog.records) == 1
        assert "Too many open files; raise the limit" in caplog.text

    with caplog.at_level(logging.WARNING, "ringfort"):
        on_a_street(scene)


def test_a_stranger_who_says_nothing_is_dropped_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "HANDSHAKE_TIMEOUT", 0.05)

    async def scene(street: Street) -> None:
        stranger = await street.stranger()
        assert await ends(stranger)
        assert street.refused == ["said nothing useful for 0.05 s"]

    on_a_street(scene)


def test_who_says_something_else_is_dropped_at_once_and_its_words_are_told() -> None:
    async def scene(street: Street) -> None:
        stranger = await street.stranger()
        await asyncio.get_running_loop().sock_sendall(stranger, b"GET / HTTP/1.1\r\n\r\n")
        await street.until(lambda: bool(street.refused))
        assert "not Ringfort: it began with b'GET" in street.refused[0]

    on_a_street(scene)
