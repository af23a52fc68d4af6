"""Pipes in memory behave as sockets do, in all the ways they fail."""

from __future__ import annotations

import pytest

from ringfort.testing import VirtualClock
from ringfort.transport import memory
from ringfort.transport.memory import MemoryPoller, MemoryStream, Pipe
from ringfort.transport.stream import Ready
from tests.helpers.background import Background


def nothing() -> None: ...


def streams() -> tuple[MemoryStream, MemoryStream]:
    there, back = Pipe(nothing, nothing), Pipe(nothing, nothing)
    return MemoryStream(incoming=back, outgoing=there), MemoryStream(incoming=there, outgoing=back)


def read(stream: MemoryStream, size: int = 100) -> bytes:
    buffer = bytearray(size)
    return bytes(buffer[: stream.recv_into(memoryview(buffer))])


def test_bytes_come_out_as_they_went_in_however_they_are_cut() -> None:
    a, b = streams()
    assert a.send(memoryview(b"hello ")) == 6
    assert a.sendmsg([memoryview(b"wor"), memoryview(b"ld")]) == 5
    assert read(b, 4) + read(b, 1) + read(b) == b"hello world"


def test_what_was_written_does_not_change_when_its_memory_does() -> None:
    a, b = streams()
    data = bytearray(b"hello")
    a.send(memoryview(data))
    data[:] = b"other"
    assert read(b) == b"hello"


def test_an_empty_pipe_blocks_and_a_full_one_takes_what_fits() -> None:
    a, b = streams()
    with pytest.raises(BlockingIOError):
        read(b)
    big = memoryview(bytes(memory._CAPACITY + 10))
    assert a.sendmsg([memoryview(b"head"), big]) == memory._CAPACITY
    with pytest.raises(BlockingIOError):
        a.send(memoryview(b"x"))
    with pytest.raises(BlockingIOError):
        a.sendmsg([memoryview(b"x"), memoryview(b"y")])
    assert len(read(b, 7)) == 7
    assert a.send(big) == 7


def test_a_closed_stream_is_read_to_its_end_and_refuses_writes() -> None:
    a, b = streams()
    a.send(memoryview(b"last words"))
    a.close()
    assert read(b, 4) == b"last"
    assert read(b) == b" words"
    assert read(b) == b""
    with pytest.raises(BrokenPipeError):
        b.send(memoryview(b"x"))


def test_a_stream_that_was_shut_down_can_still_be_read() -> None:
    a, b = streams()
    a.shut_down()
    assert read(b) == b""
    b.send(memoryview(b"answer"))
    assert read(a) == b"answer"


def test_a_cut_pipe_keeps_its_bytes_and_tells_nobody() -> None:
    a, b = streams()
    a.send(memoryview(b"before"))
    b.incoming.cut()
    a.send(memoryview(b" and after"))
    with pytest.raises(BlockingIOError):
        read(b)
    assert not b.incoming.is_readable
    a.close()
    with pytest.raises(BlockingIOError):
        read(b)
    b.incoming.cut(is_cut=False)
    assert read(b) == b"before and after"


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def poller(clock: VirtualClock) -> MemoryPoller:
    """Watches one stream, to peer 5, whose other end is `poller.streams[-1]`."""
    poller = MemoryPoller(clock)
    there, back = Pipe(poller.notify, nothing), Pipe(nothing, poller.notify)
    poller.streams[5] = MemoryStream(incoming=there, outgoing=back)
    poller.streams[-1] = MemoryStream(incoming=back, outgoing=there)
    return poller


def test_a_poller_says_at_once_what_can_move(poller: MemoryPoller) -> None:
    poller.watch(5, read=True, write=True)
    assert poller.wait(10.0) == [Ready(5, readable=False, writable=True)]
    poller.streams[-1].send(memoryview(b"x"))
    assert poller.wait(10.0) == [Ready(5, readable=True, writable=True)]
    poller.watch(5, read=True, write=False)
    assert poller.wait(10.0) == [Ready(5, readable=True, writable=False)]
    poller.forget(5)
    assert poller.wait(0.0) == []


def test_a_poller_sleeps_until_its_deadline(poller: MemoryPoller, clock: VirtualClock) -> None:
    poller.watch(5, read=True, write=False)
    waiting = Background(poller.wait, 10.0)
    clock.wait_for_sleepers(1)
    clock.advance(9.9)
    clock.wait_for_sleepers(1)
    assert not waiting.is_over
    clock.advance(0.1)
    assert waiting.result() == []


def test_a_poller_wakes_when_bytes_come(poller: MemoryPoller, clock: VirtualClock) -> None:
    poller.watch(5, read=True, write=False)
    waiting = Background(poller.wait, 10.0)
    clock.wait_for_sleepers(1)
    poller.streams[-1].send(memoryview(b"x"))
    assert waiting.result() == [Ready(5, readable=True, writable=False)]


def test_a_poller_wakes_when_there_is_room(poller: MemoryPoller, clock: VirtualClock) -> None:
    poller.streams[5].send(memoryview(bytes(memory._CAPACITY)))
    poller.watch(5, read=False, write=True)
    waiting = Background(poller.wait, 10.0)
    clock.wait_for_sleepers(1)
    read(poller.streams[-1])
    assert waiting.result() == [Ready(5, readable=False, writable=True)]


def test_a_poller_wakes_when_it_is_told_to_also_beforehand(poller: MemoryPoller, clock: VirtualClock) -> None:
    waiting = Background(poller.wait, 10.0)
    clock.wait_for_sleepers(1)
    poller.wake()
    assert waiting.result() == []
    poller.wake()
    assert poller.wait(10.0) == []


def test_a_poller_sees_the_end_of_a_stream(poller: MemoryPoller) -> None:
    poller.watch(5, read=True, write=False)
    poller.streams[-1].close()
    assert poller.wait(10.0) == [Ready(5, readable=True, writable=False)]
