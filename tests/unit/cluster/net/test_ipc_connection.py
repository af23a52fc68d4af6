"""Messages, and sockets that travel with them, cross the socket between a node and its control service."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from ringfort.bootstrap.connection import Session
from ringfort.cluster.net import ipc
from ringfort.cluster.net.ipc_connection import IpcConnection
from ringfort.transport.machine import Machine


class Ends:
    """Both ends of a connection, and what arrived at each."""

    def __init__(self) -> None:
        self.at_node: list[ipc.ToNode] = []
        self.at_service: list[ipc.ToService] = []
        self.ended: list[str] = []
        self.sockets = socket.socketpair()
        self.node = IpcConnection(
            self.sockets[0], ipc.decode_for_node, self.at_node.append, lambda: self.ended.append("node")
        )
        self.service = IpcConnection(
            self.sockets[1], ipc.decode_for_service, self.at_service.append, lambda: self.ended.append("service")
        )


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(500):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within 5 s")


def run(work: Callable[[Ends], Awaitable[None]]) -> Ends:
    async def in_loop() -> Ends:
        ends = Ends()
        ends.node.start()
        ends.service.start()
        try:
            await work(ends)
        finally:
            ends.node.close()
            ends.service.close()
        return ends

    return asyncio.run(in_loop())


def test_messages_arrive_in_order_also_when_the_other_side_reads_late() -> None:
    notes = [ipc.Call("tell", ("topic", bytes(100_000), str(number))) for number in range(50)]

    async def work(ends: Ends) -> None:
        for number, note in enumerate(notes):
            ends.node.send(ipc.Ask(number, note))
        assert ends.node.unsent_bytes > 0
        await until(lambda: len(ends.at_service) == len(notes))
        assert ends.node.unsent_bytes == 0

    ends = run(work)
    assert ends.at_service == [ipc.Ask(number, note) for number, note in enumerate(notes)]


def test_a_socket_travels_with_its_message() -> None:
    session = Session(b"", Machine(b"m" * 16, False), None, None)
    received: list[bytes] = []

    async def work(ends: Ends) -> None:
        ours, theirs = socket.socketpair()
        ends.service.send(ipc.Connected(1, 2, session), [theirs])
        await until(lambda: bool(ends.at_node))
        with ours, ends.node.take_socket() as taken:
            taken.sendall(b"hello")
            received.append(ours.recv(5))
        assert theirs.fileno() == -1

    run(work)
    assert received == [b"hello"]


def test_a_stream_of_a_peer_travels_with_its_socket_and_is_acknowledged() -> None:
    session = Session(b"key", Machine(b"m" * 16, False), None, None)

    async def work(ends: Ends) -> None:
        ours, theirs = socket.socketpair()
        ends.service.send(ipc.Streamed("a.1", "state", session), [theirs])
        await until(lambda: bool(ends.at_node))
        with ours, ends.node.take_socket():
            ends.node.send(ipc.StreamTaken())
            await until(lambda: bool(ends.at_service))

    ends = run(work)
    assert ends.at_node == [ipc.Streamed("a.1", "state", session)]
    assert ends.at_service == [ipc.StreamTaken()]


def test_the_end_of_one_side_is_noticed_after_what_it_sent() -> None:
    async def work(ends: Ends) -> None:
        ends.service.send(ipc.Ping())
        ends.service.close()
        await until(lambda: ends.ended == ["node"])
        ends.node.send(ipc.Pong())  # nobody reads it

    assert run(work).at_node == [ipc.Ping()]


def test_something_malformed_ends_the_connection() -> None:
    async def work(ends: Ends) -> None:
        ends.sockets[1].sendall(b"\xff\xff\xff\xff")
        await until(lambda: ends.ended == ["node"])

    run(work)
