"""Where a node's connections are accepted: members get in, strangers have neither much time nor much room."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from ringfort.cluster import entrance as entrance_module
from ringfort.cluster.entrance import Entrance
from ringfort.cluster.wire import dial
from ringfort.config import parse_address
from ringfort.transport.greeting import Control
from ringfort.transport.opening import Opening
from tests.openings import member

PATIENCE = 20.0


class Street:
    """An entrance on loopback, who came in, and who was refused."""

    def __init__(self) -> None:
        self.came: list[Opening] = []
        self.refused: list[str] = []
        self._sockets: list[socket.socket] = []
        self._stirred = asyncio.Event()
        self.entrance = Entrance(member(), self._opened, self._refused)
        self.entrance.open(["127.0.0.1"], 0)
        self.address = parse_address(self.entrance.addresses[0])

    def _opened(self, sock: socket.socket, opening: Opening, where: str) -> None:
        self._sockets.append(sock)
        self.came.append(opening)
        self._stirred.set()

    def _refused(self, where: str, why: str) -> None:
        self.refused.append(why)
        self._stirred.set()

    async def stranger(self) -> socket.socket:
        """Somebody who connects, and is accepted, and says nothing."""
        sock = socket.socket()
        sock.setblocking(False)
        self._sockets.append(sock)
        await asyncio.get_running_loop().sock_connect(sock, self.address)
        return sock

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._stirred.clear()
            await asyncio.wait_for(self._stirred.wait(), PATIENCE)

    async def close(self) -> None:
        self.entrance.close()
        while self.entrance._waiting:
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
    monkeypatch.setattr(entrance_module, "MAX_WAITING", 3)

    async def scene(street: Street) -> None:
        crowd = [await street.stranger() for _ in range(5)]
        await street.until(lambda: len(street.refused) == 2)
        assert street.refused == ["too many strangers at once"] * 2
        assert await ends(crowd[0])
        assert await ends(crowd[1])
        assert len(street.entrance._waiting) == 3
        sock, _ = await dial(*street.address, member(), Control())
        sock.close()
        await street.until(lambda: bool(street.came))
        assert street.came[0].purpose == Control()

    on_a_street(scene)


def test_a_stranger_who_says_nothing_is_dropped_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance_module, "OPENING_TIMEOUT", 0.05)

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
