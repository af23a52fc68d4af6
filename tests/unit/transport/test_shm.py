"""Streams through memory: bytes in order, wake-ups, ends; where writes are seen in order and where they are told."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from ringfort.testing.check import pattern
from ringfort.transport.segment import Segment
from ringfort.transport.shm import RING, STREAM_BYTES, LocalPoller, ShmStream
from ringfort.transport.stream import Ready
from tests.helpers.background import Background


class Pair:
    """Both ends of a stream, each with a poller that knows the other as 1."""

    def __init__(self, *, is_ordered: bool) -> None:
        sockets = socket.socketpair()
        ours = Segment.create(STREAM_BYTES)
        theirs = Segment.open(ours.offer, STREAM_BYTES)
        self.streams: list[ShmStream] = []
        self.pollers: list[LocalPoller] = []
        for sock, segment in zip(sockets, (ours, theirs), strict=True):
            sock.setblocking(False)
            stream = ShmStream(sock, segment, is_first=segment is ours, is_ordered=is_ordered)
            self.streams.append(stream)
            self.pollers.append(LocalPoller({1: sock}, {1: stream}))

    def close(self) -> None:
        for poller, stream in zip(self.pollers, self.streams, strict=True):
            poller.forget(1)
            stream.close()
            poller.close()


@pytest.fixture(params=[True, False], ids=["ordered", "told"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(is_ordered=request.param)
    yield pair
    pair.close()


def read_all(stream: ShmStream, chunk: int = 1 << 20) -> bytes:
    """What is there now."""
    found = b""
    buffer = memoryview(bytearray(chunk))
    try:
        while count := stream.recv_into(buffer):
            found += buffer[:count]
    except BlockingIOError:
        pass
    return found


def test_bytes_arrive_in_order_both_ways(pair: Pair) -> None:
    a, b = pair.streams
    assert a.send(memoryview(b"hello")) == 5
    assert a.sendmsg((memoryview(b" there"), memoryview(b""), memoryview(b", you"))) == 11
    assert b.send(memoryview(b"good day")) == 8
    assert read_all(b) == b"hello there, you"
    assert read_all(a) == b"good day"
    with pytest.raises(BlockingIOError):
        a.recv_into(memoryview(bytearray(1)))


def test_a_full_ring_takes_no_more_until_it_is_read(pair: Pair) -> None:
    a, b = pair.streams
    data = memoryview(pattern(1, RING + 10))
    assert a.sendmsg((data[:3], data[3:])) == RING
    with pytest.raises(BlockingIOError):
        a.send(data[RING:])
    part = memoryview(bytearray(4))
    assert b.recv_into(part) == 4
    assert a.send(data[RING:]) == 4
    assert bytes(part) + read_all(b) == data[: RING + 4]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, RING + RING // 2)), max_size=20), st.booleans())
def test_any_reads_and_writes_give_the_same_bytes(steps: list[tuple[bool, int]], is_ordered: bool) -> None:
    pair = Pair(is_ordered=is_ordered)
    try:
        a, b = pair.streams
        source = memoryview(pattern(7, 4 * RING))
        sent = received = 0
        for is_write, size in steps:
            try:
                if is_write and sent < len(source):
                    sent += a.send(source[sent : sent + size])
                else:
                    buffer = memoryview(bytearray(size))
                    count = b.recv_into(buffer)
                    assert buffer[:count] == source[received : received + count]
                    received += count
            except BlockingIOError:
                continue
        rest = read_all(b)
        assert rest == source[received:sent]
    finally:
        pair.close()


def test_a_reader_that_sleeps_is_woken(pair: Pair) -> None:
    a, _ = pair.streams
    poller = pair.pollers[1]
    poller.watch(1, read=True, write=False)
    waiting = Background(poller.wait, poller.now() + 20)
    a.send(memoryview(b"x"))
    assert waiting.result() == [Ready(1, readable=True, writable=False)]


def test_a_writer_that_sleeps_is_woken_when_there_is_room(pair: Pair) -> None:
    a, b = pair.streams
    poller = pair.pollers[0]
    a.send(memoryview(bytes(RING)))
    poller.watch(1, read=True, write=True)
    assert poller.wait(poller.now()) == []
    waiting = Background(poller.wait, poller.now() + 20)
    b.recv_into(memoryview(bytearray(10)))
    assert waiting.result() == [Ready(1, readable=False, writable=True)]


def test_a_peer_that_ends_is_read_to_the_end_and_cannot_be_written_to(pair: Pair) -> None:
    a, b = pair.streams
    a.send(memoryview(b"last words"))
    a.shut_down()
    poller = pair.pollers[1]
    poller.watch(1, read=True, write=False)
    assert poller.wait(poller.now() + 20) == [Ready(1, readable=True, writable=False)]
    assert read_all(b) == b"last words"
    while not b.is_over:
        poller.wait(poller.now() + 20)
    assert b.recv_into(memoryview(bytearray(1))) == 0
    with pytest.raises(BrokenPipeError):
        b.send(memoryview(b"?"))


def test_an_end_is_told_to_who_does_not_want_to_read(pair: Pair) -> None:
    poller = pair.pollers[1]
    poller.watch(1, read=False, write=False)
    assert poller.wait(poller.now()) == []
    pair.streams[0].shut_down()
    for _ in range(2):
        assert poller.wait(poller.now() + 20) == [Ready(1, readable=True, writable=False)]


def test_nobody_rings_for_a_peer_that_is_awake() -> None:
    pair = Pair(is_ordered=True)
    a, b = pair.streams
    a.send(memoryview(b"x"))
    with pytest.raises(BlockingIOError):
        b._sock.recv(1)
    b.sleep(read=True, write=False)
    a.send(memoryview(b"x"))
    assert b._sock.recv(10) == b"\0"
    pair.close()


def test_where_writes_are_not_ordered_only_what_was_told_counts() -> None:
    pair = Pair(is_ordered=False)
    a, b = pair.streams
    a.send(memoryview(b"x"))
    told = b._sock.recv(100)  # stolen on its way
    with pytest.raises(BlockingIOError):
        b.recv_into(memoryview(bytearray(1)))
    b._hear(told[:3])
    b._hear(b._heard + told[3:])
    assert read_all(b) == b"x"
    pair.close()


def test_a_counter_that_could_not_be_told_is_told_later() -> None:
    pair = Pair(is_ordered=False)
    a, b = pair.streams
    stuffed = 0
    try:
        while True:
            stuffed += a._sock.send(bytes(8 * 4096))  # counters of 0
    except BlockingIOError:
        pass
    a.send(memoryview(b"late"))
    assert a.owed
    pair.pollers[0].watch(1, read=True, write=False)
    waiting = Background(pair.pollers[0].wait, pair.pollers[0].now() + 20)
    while not b.is_readable:
        b.listen()
        pair.pollers[0].wake()
        waiting.result()
        waiting = Background(pair.pollers[0].wait, pair.pollers[0].now() + 20)
    pair.pollers[0].wake()
    waiting.result()
    assert not a.owed
    assert read_all(b) == b"late"
    pair.close()
