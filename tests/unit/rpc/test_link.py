"""A connection and the thread that reads it: fairness, and what becomes of messages and readers when it ends."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from ringfort.errors import ProtocolError
from ringfort.rpc.calls import RpcFuture
from ringfort.rpc.link import Link, PeerLink
from ringfort.rpc.network import Network
from ringfort.rpc.outbound import Outbound, Outgoing
from ringfort.rpc.protocol import FIRST, HEADER, SIZE, Event, Kind, Message, pack_cancel
from ringfort.rpc.setup import Formed
from tests.helpers.agents import PATIENCE, until


class Scripted:
    """A `Stream` over a socket that gives what it was told to, one after the other, once the socket can be read."""

    chunk = 1 << 16

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.script: deque[bytes | Exception] = deque()
        self.reads = 0
        self.sent = bytearray()
        self.send_error: OSError | None = None

    @property
    def has_pending(self) -> bool:
        return self.reads > 0 and bool(self.script)

    def recv_into(self, buffer: memoryview, /) -> int:
        if not self.script:
            return self._sock.recv_into(buffer)
        if not self.reads:
            self._sock.recv(1)
        self.reads += 1
        assert self.reads < 1000, "one link is read for ever"
        found = self.script.popleft()
        if isinstance(found, Exception):
            raise found
        buffer[: len(found)] = found
        return len(found)

    def send(self, data: memoryview, /) -> int:
        if self.send_error is not None:
            raise self.send_error
        self.sent += data
        return len(data)

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        return sum(self.send(data) for data in buffers)

    def shut_down(self) -> None:
        pass

    def close(self) -> None:
        self._sock.close()


class Scene:
    """A link whose other end is `far`."""

    def __init__(self) -> None:
        near, self.far = socket.socketpair()
        near.setblocking(False)
        self.stream = Scripted(near)
        self.stuck: list[Link] = []
        self.link = Link(1, near, self.stream, lambda line, head: True, self.stuck.append, lambda: None)

    def close(self) -> None:
        self.link.close()
        self.far.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


def frames(*messages: Message) -> list[bytes]:
    outbound, found = Outbound(), list[bytes]()
    for message in messages:
        outbound.post(Outgoing(message))
        head, body = outbound.pieces()
        found.append(bytes(head) + bytes(body))
        outbound.wrote(len(found[-1]))
    return found


def answer(number: int) -> Message:
    return Message(Kind.RESPONSE, number, [b"answer"])


# --- one link, no thread ----------------------------------------------------------------------------------------------


def test_a_link_that_always_has_more_lets_others_have_their_turn(scene: Scene) -> None:
    scene.stream.script.extend([HEADER.pack(Kind.REQUEST, FIRST, 1, 0, 0, 8 + 1, 1) + SIZE.pack(1 << 20) + b"x"])
    scene.stream.script.extend([HEADER.pack(Kind.REQUEST, 0, 0, 0, 0, 1, 1) + b"x"] * 2000)
    scene.far.send(b"!")
    scene.link.read(lambda _: None)
    assert 1 < scene.stream.reads < 100
    assert scene.stream.has_pending


def test_a_link_that_is_broken_sends_nothing_and_says_that_it_is_done_with_what_it_gets(scene: Scene) -> None:
    done: list[int] = []
    scene.link.broken = "out of step"
    scene.link.post(Outgoing(answer(1), done=lambda: done.append(1)))
    scene.link.post(pack_cancel(1))
    assert done == [1]
    assert scene.stream.sent == b""
    assert scene.link.is_flushed


def test_messages_are_done_with_as_soon_as_the_way_is_gone(scene: Scene) -> None:
    done: list[int] = []
    scene.stream.send_error = BrokenPipeError(32, "Broken pipe")
    scene.link.post(Outgoing(answer(1), done=lambda: done.append(1)))
    assert done == [1]
    assert scene.stuck == [scene.link]
    assert scene.link.broken == "Broken pipe"


def test_messages_that_are_stuck_are_done_with_when_the_link_is_closed(scene: Scene) -> None:
    done: list[int] = []
    scene.stream.send_error = BlockingIOError()
    for number in (1, 2):
        scene.link.post(Outgoing(answer(number), done=lambda number=number: done.append(number)))
    assert scene.link.is_stuck
    assert done == []
    scene.link.close()
    assert sorted(done) == [1, 2]


# --- with the agent's thread ------------------------------------------------------------------------------------------


class Watched(Scene):
    """A link in a network, and what it tells."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.ended: list[str] = []
        self.has_ended = threading.Event()
        self.future = RpcFuture(1, 1, "a call", 10 * PATIENCE, lambda _: True)
        self.network = Network(
            0,
            Formed({}, [], [], 10 * PATIENCE),
            admit=lambda link, head: True,
            on_event=self._handle,
            on_lost=self._lost,
            expire=lambda now: now + PATIENCE,
            is_running=lambda: False,
        )
        self.network.links[1] = self.link

    def _handle(self, link: PeerLink, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Message) and event.call == 1:
            self.future.set_result(None)

    def _lost(self, peer: int) -> None:
        self.ended.append(self.network.lost[peer])
        self.has_ended.set()


@contextmanager
def watched() -> Iterator[Watched]:
    made = Watched()
    made.network.start()
    try:
        yield made
    finally:
        made.link.hang_up()  # whoever still reads ends
        made.network.stop()
        made.close()


def test_who_leads_leaves_nothing_unread_that_nobody_would_be_told_of() -> None:
    with watched() as scene, scene.link.reading:  # so that the thread cannot read it
        scene.stream.script.extend(frames(*map(answer, range(1, 100))))
        scene.far.send(b"!")
        scene.network.lead(scene.link, scene.future)
        assert [event.call for event in scene.events if isinstance(event, Message)] == list(range(1, 100))


def test_when_a_caller_that_leads_finds_nonsense_the_link_ends() -> None:
    with watched() as scene:
        with scene.link.reading:
            scene.stream.script.append(ProtocolError("nonsense"))
            scene.far.send(b"!")
            scene.network.lead(scene.link, scene.future)
        assert scene.has_ended.wait(PATIENCE)
        assert scene.ended == ["nonsense"]


def test_a_caller_that_leads_is_woken_when_another_finds_the_link_broken() -> None:
    with watched() as scene:
        leader = threading.Thread(target=scene.network.lead, args=(scene.link, scene.future))
        leader.start()
        until(lambda: scene.link.is_led, "nobody leads")
        scene.link.broken = "it could not be written to"
        scene.network.stuck(scene.link)
        leader.join(PATIENCE)
        assert not leader.is_alive()
        assert scene.has_ended.wait(PATIENCE)


def test_what_came_before_a_link_broke_still_counts() -> None:
    with watched() as scene:
        with scene.link.reading:  # the thread has something to read, and cannot
            scene.far.send(frames(answer(1))[0])
            scene.link.broken = "it could not be written to"
            scene.network.stuck(scene.link)
            until(lambda: not scene.network._stuck, "the thread has not looked")
        assert scene.has_ended.wait(PATIENCE)
        assert [event.call for event in scene.events if isinstance(event, Message)] == [1]
