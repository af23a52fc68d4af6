"""Control links over a pair of sockets: whole messages, however they are cut; and what their end means."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from ringfort.bootstrap.connection import Connection, shake_hands
from ringfort.cluster.core.peer_messages import MAX_MESSAGE_BYTES
from ringfort.cluster.net import control_link
from ringfort.cluster.net.control_link import ControlLink, connect
from ringfort.cluster.net.probing import BURST_BYTES, answer_probe, probe
from ringfort.cluster.net.waiting import run
from ringfort.errors import HandshakeError, NoConnectionError, ProtocolError, RefusedError
from ringfort.identity.credentials import Credentials
from ringfort.identity.keypair import NodeIdentity
from ringfort.identity.namespace import NetworkNamespace
from ringfort.transport.handshake import Handshake, sealed
from ringfort.transport.hello import Control, Probe
from ringfort.transport.records import MAX_OVERHEAD

NAMESPACE = NetworkNamespace.generate("test")


def member() -> Credentials:
    return Credentials(NodeIdentity.ephemeral(), NAMESPACE)


class End:
    """One end of a link, and what came out of it."""

    def __init__(self, handshake: Handshake, sock: socket.socket) -> None:
        self.connection, self.sock = Connection.of(sock, handshake), sock
        self.messages: asyncio.Queue[bytes] = asyncio.Queue()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.link = ControlLink(self.connection, self.messages.put_nowait, self.ended.set_result)


async def opened(*, encrypted: bool = True) -> tuple[End, End]:
    near, far = socket.socketpair()
    for sock in (near, far):
        sock.setblocking(False)
    credentials = member if encrypted else lambda: None
    handshakes = Handshake(credentials(), Control()), Handshake(credentials())
    await asyncio.gather(run(shake_hands(near, handshakes[0])), run(shake_hands(far, handshakes[1])))
    return End(handshakes[0], near), End(handshakes[1], far)


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    def run(*arguments: object) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments), 20))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def _carries(encrypted: bool) -> None:
    one, two = await opened(encrypted=encrypted)
    await one.link.attach()
    await two.link.attach()
    sizes = (1, 100, 65_536, MAX_MESSAGE_BYTES)
    for size in sizes:
        one.link.send(bytes(size))
    assert [len(await two.messages.get()) for _ in sizes] == list(sizes)
    two.link.send(b"back")
    assert await one.messages.get() == b"back"
    one.link.close()
    assert await two.ended == "the other side closed the link"
    await one.link.ended.wait()
    await two.link.ended.wait()
    assert not one.ended.done(), "who closed is not told"


@pytest.mark.parametrize("encrypted", [True, False])
def test_messages_of_every_size_arrive_whole_and_an_end_is_told(encrypted: bool) -> None:
    in_loop(_carries)(encrypted)


@pytest.mark.parametrize("how", [ControlLink.abort, ControlLink.close])
def test_a_link_that_is_ended_while_it_is_only_being_attached_ends(how: Callable[[ControlLink], None]) -> None:
    async def end() -> None:
        one, two = await opened()
        how(one.link)  # as a node that stops does: nothing has been made yet that could be closed
        await one.link.attach()
        await one.link.ended.wait()
        two.sock.close()

    in_loop(end)()


def test_a_link_whose_last_bytes_leave_after_the_other_side_has_closed_ends_quietly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_link, "CLOSE_WITHIN", 0.05)

    async def end() -> None:
        loop, wrong = asyncio.get_running_loop(), list[object]()
        loop.set_exception_handler(lambda _, context: wrong.append(context))
        one, two = await opened()
        await one.link.attach()
        one.link.send(bytes(MAX_MESSAGE_BYTES))  # more than the socket takes at once
        one.link.close()
        two.sock.shutdown(socket.SHUT_WR)
        while not one.link._transport.is_closing():
            await asyncio.sleep(0)
        while await loop.sock_recv(two.sock, 1 << 20):
            pass
        await one.link.ended.wait()
        over = loop.create_future()
        loop.call_later(0.1, over.set_result, None)  # behind the timer of the link
        await over
        two.sock.close()
        assert not wrong

    in_loop(end)()


@in_loop
async def test_a_message_may_arrive_byte_by_byte() -> None:
    one, two = await opened()
    await two.link.attach()
    for byte in sealed(one.connection.sealer, b"slowly"):
        one.sock.send(bytes([byte]))
        await asyncio.sleep(0)
    assert await two.messages.get() == b"slowly"
    two.link.abort()
    one.sock.close()


async def _breaks(data: bytes, words: str) -> None:
    one, two = await opened()
    await two.link.attach()
    one.sock.send(data or sealed(one.connection.sealer, b"x")[:-1] + b"\0\0\0\0")
    why = await two.ended
    assert words in why
    await two.link.ended.wait()
    one.sock.close()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "changed"),
        (b"\xff\xff\xff\xff", "claims"),
        ((MAX_MESSAGE_BYTES + 99).to_bytes(4, "little"), "the limit is"),
    ],
)
def test_what_was_tampered_with_or_is_too_long_ends_the_link(data: bytes, words: str) -> None:
    in_loop(_breaks)(data, words)


@in_loop
async def test_a_peer_that_does_not_read_is_given_up() -> None:
    one, two = await opened()
    await one.link.attach()
    for _ in range(40):
        one.link.send(bytes(MAX_MESSAGE_BYTES))
    why = await one.ended
    assert "does not read" in why
    two.sock.close()


async def _serve(
    credentials: Credentials | None, then: Callable[[Connection], Awaitable[object]]
) -> tuple[int, asyncio.Task[object]]:
    """Accepts one connection, opens it and does `then`; returns the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)

    async def serve() -> object:
        with listener:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        with sock:
            sock.setblocking(False)
            handshake = Handshake(credentials)
            await run(shake_hands(sock, handshake))
            return await then(Connection.of(sock, handshake))

    return listener.getsockname()[1], asyncio.ensure_future(serve())


@in_loop
async def test_connecting_proves_who_is_there() -> None:
    there, here = member(), member()

    async def nothing(connection: Connection) -> bytes:
        return connection.identity

    port, served = await _serve(there, nothing)
    connection = await connect("127.0.0.1", port, here, Control())
    connection.close()
    assert connection.identity == there.identity.public_key
    assert await served == here.identity.public_key


@in_loop
async def test_connecting_fails_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(NoConnectionError, match="Connection refused"):
        await connect("127.0.0.1", port, member(), Control())
    with pytest.raises(NoConnectionError, match="is not an address"):
        await connect("not an address", port, member(), Control())


@in_loop
async def test_another_clusters_member_is_told_so() -> None:
    async def nothing(connection: Connection) -> None: ...

    other = Credentials(NodeIdentity.ephemeral(), NetworkNamespace.generate("other"))
    port, served = await _serve(other, nothing)
    with pytest.raises((RefusedError, HandshakeError), match="another cluster"):
        await connect("127.0.0.1", port, member(), Control())
    with pytest.raises(RefusedError, match="another cluster"):
        await served


@in_loop
async def test_a_probe_tells_both_sides_the_same_of_both_ways() -> None:
    here, there = member(), member()

    async def answer(connection: Connection) -> object:
        return await answer_probe(connection, f"{there.identity.peer_id}.1")

    port, served = await _serve(there, answer)
    found = await probe("127.0.0.1", port, here, f"{here.identity.peer_id}.1", asyncio.Lock())
    told = await served
    assert found.peer == f"{there.identity.peer_id}.1"
    assert told.peer == f"{here.identity.peer_id}.1"
    assert (found.bandwidth_out, found.bandwidth_in) == (told.bandwidth_in, told.bandwidth_out)
    assert found.bandwidth_in > 1e5
    assert found.round_trip is not None


@in_loop
async def test_who_answers_a_probe_speaks_for_no_other_peer() -> None:
    """Else a member could have the data of another come its way."""
    here, victim = member(), f"{member().identity.peer_id}.1"

    async def answer(connection: Connection) -> object:
        with pytest.raises(ProtocolError):
            await answer_probe(connection, victim)

    port, served = await _serve(member(), answer)
    with pytest.raises(ProtocolError, match=f"claims to be of {victim} and proved to be"):
        await probe("127.0.0.1", port, here, f"{here.identity.peer_id}.1", asyncio.Lock())
    await served


@in_loop
async def test_a_burst_without_an_end_is_broken_off() -> None:
    async def flood(connection: Connection) -> object:
        return await answer_probe(connection, "there.1")

    port, served = await _serve(member(), flood)
    connection = await connect("127.0.0.1", port, member(), Probe())
    piece = bytes(64 * 1024 - MAX_OVERHEAD)
    with connection.sock as sock:
        for _ in range(3 * BURST_BYTES // len(piece)):
            try:
                await asyncio.get_running_loop().sock_sendall(sock, sealed(connection.sealer, piece))
            except OSError:
                break
        with pytest.raises(ProtocolError, match="no end"):
            await served
