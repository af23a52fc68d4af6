"""The fast path of small messages: taken when all is as expected, and left without a byte lost when it is not."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress

import numpy as np
import pytest

from ringfort.errors import CollectiveMismatchError, PeerLostError, ProtocolError
from ringfort.transport.engine import Engine
from ringfort.transport.fast_path import LARGEST, is_small
from ringfort.transport.frames import CLEAR_TO_SEND, DATA, HEADER, HEADER_BYTES, pack
from ringfort.transport.inbound import Inbound
from ringfort.transport.messages import Envelope, Job, Receive, Send
from ringfort.transport.progress import Spin
from ringfort.transport.reducer import Reducer
from ringfort.transport.socket_streams import SocketPoller, SocketStream

CALL, OTHER = b"a call of 16 byt", b"another of 16 by"
SUM = Reducer(np.dtype("<i4"), lambda into, span: np.add(into, span, out=into))


class Rank:
    """An engine with one peer, whose socket is in the test's hands."""

    def __init__(self) -> None:
        mine, self.peer = socket.socketpair()
        mine.setblocking(False)
        self.peer.setblocking(False)
        self.engine = Engine(0, {1: SocketStream(mine)}, SocketPoller({1: mine}), inbox_bytes=1 << 20)
        self.link = self.engine.links[1]
        self.operation = 0

    def envelope(self, call: bytes = CALL) -> Envelope:
        return Envelope(0, 5, self.operation, call, frozenset({0, 1}), False, 5.0, self.engine.now() + 5)

    def exchange(self, out: bytes, into: bytearray, reducer: Reducer | None = None) -> Job:
        self.operation += 1
        job = Job("exchange", 5.0, self.engine.now() + 5)
        envelope = self.envelope()
        job.send, job.send_link = Send(memoryview(out), envelope, is_rendezvous=False), self.link
        job.receive, job.receive_link = Receive(memoryview(into), envelope, reducer), self.link
        return job

    def frame(self, data: bytes, *, operation: int = 1, call: bytes = CALL) -> bytes:
        return HEADER.pack(DATA, 0, len(data), 0, 0, 5, operation, len(data), call) + data

    def heard(self) -> bytes:
        return self.peer.recv(1 << 20)


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.peer.close()
    made.engine.close()


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> list[Receive]:
    """The receives that took the ordinary path."""
    found: list[Receive] = []
    post = Inbound.post

    def spy(self: Inbound, receive: Receive) -> None:
        found.append(receive)
        post(self, receive)

    monkeypatch.setattr(Inbound, "post", spy)
    return found


@pytest.mark.parametrize("size", [0, 1, 4, 4096, LARGEST])
def test_a_small_exchange_takes_the_fast_path_with_the_same_bytes_on_the_wire(
    rank: Rank, ordinary: list[Receive], size: int
) -> None:
    theirs, into = bytes(index & 255 for index in range(size)), bytearray(size)
    rank.peer.sendall(rank.frame(theirs))
    rank.engine.run(rank.exchange(theirs[::-1], into))
    assert into == theirs
    assert rank.heard() == rank.frame(theirs[::-1])
    assert ordinary == []
    assert rank.engine.traffic() == [(1, size, 1, size)]


def test_what_the_fast_path_receives_is_reduced(rank: Rank, ordinary: list[Receive]) -> None:
    into = bytearray(np.arange(4, dtype="<i4").tobytes())
    rank.peer.sendall(rank.frame(np.full(4, 10, "<i4").tobytes()))
    rank.engine.run(rank.exchange(b"1234", into, SUM))
    assert np.frombuffer(into, "<i4").tolist() == [10, 11, 12, 13]
    assert ordinary == []


def test_a_message_that_comes_in_pieces_and_late_is_finished_on_the_ordinary_path(
    rank: Rank, ordinary: list[Receive]
) -> None:
    """The first piece is there, the rest comes when the engine has stopped trying and sleeps."""
    frame, into = rank.frame(b"0123456789"), bytearray(10)
    rank.peer.sendall(frame[: HEADER_BYTES + 3])
    wait = rank.engine._poller.wait

    def deliver(deadline: float) -> object:
        if frame:
            rank.peer.sendall(frame[HEADER_BYTES + 3 :])
        return wait(deadline)

    rank.engine._poller.wait = deliver  # type: ignore[method-assign, assignment]
    rank.engine.run(rank.exchange(b"x" * 10, into))
    assert into == b"0123456789"
    assert len(ordinary) == 1


def test_other_frames_before_the_message_are_heeded(rank: Rank, ordinary: list[Receive]) -> None:
    into = bytearray(3)
    rank.peer.sendall(pack(CLEAR_TO_SEND, tag=9) + rank.frame(b"abc"))
    rank.engine.run(rank.exchange(b"xyz", into))
    assert into == b"abc"
    assert len(ordinary) == 1


def test_what_comes_behind_the_message_stays_for_the_next(rank: Rank, ordinary: list[Receive]) -> None:
    first, second = bytearray(3), bytearray(4)
    rank.peer.sendall(rank.frame(b"abc") + rank.frame(b"defg", operation=2))
    rank.engine.run(rank.exchange(b"xyz", first))
    rank.engine.run(rank.exchange(b"wxyz", second))
    assert (first, second) == (b"abc", b"defg")
    assert ordinary == []


@pytest.mark.parametrize(("data", "call"), [(b"abc", OTHER), (b"abcd", CALL)])
def test_another_call_or_size_is_a_disagreement_as_on_the_ordinary_path(rank: Rank, data: bytes, call: bytes) -> None:
    rank.peer.sendall(rank.frame(data, call=call))
    job = rank.exchange(b"xyz", bytearray(3))
    if call == OTHER:
        with pytest.raises(CollectiveMismatchError):
            rank.engine.run(job)
    else:
        with pytest.raises(Exception, match="4"):
            rank.engine.run(job)


def test_the_end_of_the_link_has_its_name(rank: Rank) -> None:
    rank.peer.close()
    with pytest.raises(PeerLostError) as caught:
        rank.engine.run(rank.exchange(b"xyz", bytearray(3)))
    assert caught.value.peer == 1


class Narrow(SocketStream):
    """Of what it is given at once, the kernel takes little."""

    def __init__(self, of: SocketStream) -> None:
        super().__init__(of._sock)
        self.send = lambda data: self._sock.send(data[:10])  # type: ignore[method-assign,assignment]

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        return self._sock.send(b"".join(buffers)[: HEADER_BYTES + 10])


def narrowed(rank: Rank) -> None:
    assert isinstance(rank.link.stream, SocketStream)
    rank.link.stream = Narrow(rank.link.stream)


@pytest.mark.parametrize("kind", [bytes, memoryview])
@pytest.mark.parametrize("is_narrow", [False, True])
def test_a_swap_sends_the_same_bytes_from_a_copy_and_from_the_array_itself(
    rank: Rank, kind: type[bytes] | type[memoryview], *, is_narrow: bool
) -> None:
    if is_narrow:
        narrowed(rank)
    theirs, ours, into = b"y" * 200, bytes(index & 255 for index in range(300)), bytearray(200)
    for rank.operation in (1, 2):
        rank.peer.sendall(rank.frame(theirs, operation=rank.operation))
        assert rank.engine.swap(kind(ours), memoryview(into), 1, rank.envelope())
        assert into == theirs
        into[:] = bytes(200)
    assert rank.heard() == rank.frame(ours) + rank.frame(ours, operation=2)
    assert rank.engine.traffic() == [(2, 600, 2, 400)]


OURS = bytes(range(256)) * 4096
THEIRS = OURS[::-1][: len(OURS) - 1000]
"""A frame as large as there may be, and one that is not; neither fits a socket."""


class Other:
    """The peer of a swap of large frames: reads what comes, and sends `frame` in pieces when it is told to."""

    def __init__(self, rank: Rank, frame: bytes) -> None:
        self._rank, self._frame = rank, memoryview(frame)
        self.heard = bytearray()

    def __call__(self, count: int) -> None:
        """Sends up to so many bytes, and reads all there is."""
        if count and self._frame:
            with suppress(BlockingIOError):
                self._frame = self._frame[self._rank.peer.send(self._frame[:count]) :]
        with suppress(BlockingIOError):
            while True:
                self.heard += self._rank.peer.recv(1 << 20)


def driven(rank: Rank, other: Other, monkeypatch: pytest.MonkeyPatch, *, step: int, stops_at: int = 0) -> list[str]:
    """Lets the peer move while the rank spins, until that gives up, and then while it sleeps. What it did, in turn."""
    done: list[str] = []
    wait, sent = rank.engine._poller.wait, 0

    def spin() -> None:
        nonlocal sent
        done.append("spin")
        count = min(step, stops_at - sent) if stops_at else step
        if count:  # else it does not read either
            other(count)
        sent += count

    def sleep(deadline: float) -> object:
        done.append("sleep")
        other(50_000)
        return wait(deadline)

    monkeypatch.setattr(os, "sched_yield", spin)
    monkeypatch.setattr(rank.engine._poller, "wait", sleep)
    return done


@pytest.mark.parametrize("step", [50_000, 1 << 20])
def test_a_swap_of_large_frames_takes_the_fast_path_to_its_end(
    rank: Rank, ordinary: list[Receive], monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    rank.operation, into = 1, bytearray(len(THEIRS))
    other = Other(rank, rank.frame(THEIRS))
    done = driven(rank, other, monkeypatch, step=step)
    assert rank.engine.swap(memoryview(OURS), memoryview(into), 1, rank.envelope())
    other(1)
    assert into == THEIRS
    assert other.heard == rank.frame(OURS)
    assert ordinary == []
    assert "sleep" not in done
    assert rank.engine.traffic() == [(1, len(OURS), 1, len(THEIRS))]


def test_a_small_swap_of_which_a_piece_comes_late_is_finished_on_the_ordinary_path(
    rank: Rank, ordinary: list[Receive], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.operation, into = 1, bytearray(200)
    other = Other(rank, rank.frame(b"z" * 200))
    done = driven(rank, other, monkeypatch, step=50, stops_at=50)
    assert rank.engine.swap(b"x" * 300, memoryview(into), 1, rank.envelope())
    other(1)
    assert into == b"z" * 200
    assert other.heard == rank.frame(b"x" * 300)
    assert len(ordinary) == 1
    assert "sleep" in done
    assert rank.engine.traffic() == [(1, 300, 1, 200)]


@pytest.mark.parametrize("stops_at", [10, HEADER_BYTES, HEADER_BYTES + 1, 300_000, HEADER_BYTES + len(THEIRS) - 1])
def test_a_swap_that_is_held_up_is_finished_on_the_ordinary_path(
    rank: Rank, ordinary: list[Receive], monkeypatch: pytest.MonkeyPatch, stops_at: int
) -> None:
    rank.operation, into = 1, bytearray(len(THEIRS))
    frame = rank.frame(THEIRS)
    other = Other(rank, frame)
    done = driven(rank, other, monkeypatch, step=min(stops_at, 50_000), stops_at=stops_at)
    assert rank.engine.swap(memoryview(OURS), memoryview(into), 1, rank.envelope())
    other(1)
    assert into == THEIRS
    assert other.heard == rank.frame(OURS)
    assert len(ordinary) == 1
    assert "sleep" in done
    assert rank.engine.traffic() == [(1, len(OURS), 1, len(THEIRS))]
    # And the next one finds the link as it should be.
    rank.peer.sendall(rank.frame(b"abc", operation=2))
    rank.operation = 2
    assert rank.engine.swap(b"xyz", memoryview(into)[:3], 1, rank.envelope())
    assert into[:3] == b"abc"


def test_a_swap_that_another_call_answers_is_a_disagreement(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.operation = 1
    driven(rank, Other(rank, rank.frame(THEIRS, call=OTHER)), monkeypatch, step=1 << 20)
    with pytest.raises(CollectiveMismatchError):
        rank.engine.swap(memoryview(OURS), memoryview(bytearray(len(THEIRS))), 1, rank.envelope())


def test_a_swap_that_gets_what_makes_no_sense_ends_and_leaves_nothing_behind(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.operation = 1
    driven(rank, Other(rank, b"\xff" * 1000), monkeypatch, step=1 << 20)
    with pytest.raises(ProtocolError, match="rank 1"):
        rank.engine.swap(memoryview(OURS), memoryview(bytearray(len(THEIRS))), 1, rank.envelope())
    assert not rank.engine.table.jobs


def test_a_swap_with_one_who_goes_in_the_middle_says_so(rank: Rank) -> None:
    rank.operation = 1
    rank.peer.send(rank.frame(THEIRS)[:1000])
    rank.peer.close()
    with pytest.raises(PeerLostError) as caught:
        rank.engine.swap(memoryview(OURS), memoryview(bytearray(len(THEIRS))), 1, rank.envelope())
    assert caught.value.peer == 1


def test_a_frame_that_the_kernel_takes_in_part_goes_out_whole(rank: Rank) -> None:
    """Before the call ends: nobody may come to write the rest later."""
    narrowed(rank)
    into = bytearray(20)
    rank.peer.sendall(rank.frame(b"y" * 20))
    rank.engine.run(rank.exchange(b"x" * 20, into))
    rank.peer.sendall(rank.frame(b"w" * 20, operation=2))
    rank.engine.run(rank.exchange(b"z" * 20, into))
    assert rank.heard() == rank.frame(b"x" * 20) + rank.frame(b"z" * 20, operation=2)
    assert into == b"w" * 20


def test_only_small_messages_of_collectives_take_the_fast_path(rank: Rank) -> None:
    def small(size: int, *, is_rendezvous: bool = False, call: bytes = CALL) -> bool:
        job = Job("send", 1.0, 1.0)
        job.send = Send(memoryview(bytes(size)), rank.envelope(call), is_rendezvous=is_rendezvous)
        return is_small(job)

    assert small(LARGEST)
    assert not small(LARGEST + 1)
    assert not small(1, is_rendezvous=True)
    assert not small(1, call=bytes(16))


def test_a_spin_that_pays_goes_on_and_one_that_does_not_ends_soon() -> None:
    spin = Spin()
    most = spin.budget
    for _ in range(50):
        spin.tell(paid=False)
    least = spin.budget
    assert 0 < least < most / 10
    for _ in range(50):
        spin.tell(paid=True)
    assert spin.budget == most
