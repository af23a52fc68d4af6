"""The listener in an event loop: members get in, unauthenticated clients have neither much time nor much room."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ringfort.bootstrap import listener as listener_module
from ringfort.bootstrap.admission import MAX_WAITING
from ringfort.bootstrap.connection import Connection
from ringfort.bootstrap.listener import Listener
from ringfort.cluster.net import control_listener
from ringfort.cluster.net.control_link import connect
from ringfort.cluster.net.control_listener import ControlListener
from ringfort.config import parse_address
from ringfort.transport import tcp
from ringfort.transport.handshake import Handshake
from ringfort.transport.hello import Control
from tests.helpers.handshakes import impostor, member

PATIENCE = 20.0


class Scene:
    """A listener on loopback, the connections that it accepted, and what it refused."""

    def __init__(self, **limits: Any) -> None:
        self.accepted: list[Connection] = []
        self.refused: list[str] = []
        self._sockets: list[socket.socket] = []
        self._changed = asyncio.Event()
        self.core = Listener(member(), on_refused=self._refused)
        vars(self.core).update(limits)
        self.listener = ControlListener(self.core, self._accepted)
        self.listener.open(["127.0.0.1"], 0)
        self.address = parse_address(self.listener.addresses[0])

    def _accepted(self, connection: Connection) -> None:
        self._sockets.append(connection.sock)
        self.accepted.append(connection)
        self._changed.set()

    def _refused(self, where: str, why: str) -> None:
        self.refused.append(why)
        self._changed.set()

    async def client(self, source: str = "127.0.0.1") -> socket.socket:
        """A client that connects from `source`, is accepted, and sends nothing."""
        sock = socket.socket()
        sock.bind((source, 0))
        sock.setblocking(False)
        self._sockets.append(sock)
        await asyncio.get_running_loop().sock_connect(sock, self.address)
        return sock

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), PATIENCE)

    async def close(self) -> None:
        self.listener.close()
        for sock in self._sockets:
            sock.close()


def with_listener(play: Callable[[Scene], Awaitable[None]], **limits: Any) -> None:
    async def main() -> None:
        scene = Scene(**limits)
        try:
            await play(scene)
        finally:
            await scene.close()

    asyncio.run(main())


async def ends(sock: socket.socket) -> bool:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 1), PATIENCE) == b""


def test_the_oldest_client_makes_room_and_a_member_gets_in() -> None:
    async def play(scene: Scene) -> None:
        crowd = [await scene.client() for _ in range(5)]
        await scene.until(lambda: len(scene.refused) == 2)
        assert scene.refused == ["too many unauthenticated connections at once"] * 2
        assert await ends(crowd[0])
        assert await ends(crowd[1])
        assert len(scene.core._waiting) == 3
        connection = await connect(*scene.address, member(), Control())
        connection.close()
        await scene.until(lambda: bool(scene.accepted))
        assert scene.accepted[0].purpose == Control()

    with_listener(play, max_waiting=3)


@pytest.mark.parametrize("kind", ["silent, the same address", "half a handshake, another address"])
def test_a_member_whose_answer_takes_long_keeps_its_place_in_a_flood(kind: str) -> None:
    """Between its first message and its third, twice as many come as there are places."""
    words = b"" if "silent" in kind else bytes(Handshake(impostor(), Control()).outgoing)
    source = "127.0.0.1" if "the same" in kind else "127.0.0.2"

    async def flood(scene: Scene) -> None:
        before = len(scene.refused)
        for _ in range(2 * MAX_WAITING):
            client = await scene.client(source)
            await asyncio.get_running_loop().sock_sendall(client, words)
        await scene.until(lambda: len(scene.refused) >= before + MAX_WAITING)

    async def play(scene: Scene) -> None:
        loop = asyncio.get_running_loop()
        handshake = Handshake(member(), Control())
        sock = await scene.client()
        await loop.sock_sendall(sock, handshake.outgoing)
        handshake.outgoing.clear()
        await flood(scene)
        while not handshake.outgoing:
            handshake.feed(await asyncio.wait_for(loop.sock_recv(sock, handshake.wants), PATIENCE))
        await flood(scene)
        await loop.sock_sendall(sock, handshake.outgoing)
        await scene.until(lambda: bool(scene.accepted))
        assert scene.accepted[0].purpose == Control()

    with_listener(play)


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
    now = [time.monotonic()]

    def listen(host: str, port: int) -> socket.socket:
        listeners.append(Full(fileno=tcp.listen(host, port).detach()))
        return listeners[0]

    monkeypatch.setattr(control_listener, "tcp", SimpleNamespace(listen=listen))
    monkeypatch.setattr(listener_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def play(scene: Scene) -> None:
        loop = asyncio.get_running_loop()
        timers: list[tuple[float, Callable[[], None]]] = []

        def call_at(when: float, action: Callable[[], None]) -> SimpleNamespace:
            timers.append((when, action))
            return SimpleNamespace(cancel=lambda: None)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "call_at", call_at)
            await scene.client()
            for turn in range(3):
                while len(timers) == turn:
                    await asyncio.sleep(0)
                for _ in range(100):  # however often the loop turns, it does not ask again
                    await asyncio.sleep(0)
                assert listeners[0].asked == turn + 1
                listeners[0].is_full = turn < 2
                now[0], resume = timers[turn]
                resume()
        while not scene.core._waiting:
            await asyncio.sleep(0)
        assert len(caplog.records) == 1
        assert "Too many open files; raise the limit" in caplog.text

    with caplog.at_level(logging.WARNING, "ringfort"):
        with_listener(play)


def test_a_client_that_sends_nothing_is_dropped_in_the_end() -> None:
    async def play(scene: Scene) -> None:
        client = await scene.client()
        assert await ends(client)
        assert scene.refused == ["did not finish its handshake within 0.05 s"]

    with_listener(play, handshake_timeout=0.05)


def test_a_client_that_is_not_ringfort_is_dropped_at_once_and_its_first_bytes_are_told() -> None:
    async def play(scene: Scene) -> None:
        client = await scene.client()
        await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.1\r\n\r\n")
        await scene.until(lambda: bool(scene.refused))
        assert "not Ringfort: it began with b'GET" in scene.refused[0]

    with_listener(play)
