"""The engine in virtual time, against peers that follow a script: timeouts, threads that take turns, and every end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from ringfort.backends.mesh import MeshBackend
from ringfort.backends.simulated import SimulatedBackend
from ringfort.backends.sub import SubBackend
from ringfort.config import MIB, DistributedConfig
from ringfort.errors import (
    AbortedError,
    ChannelClosedError,
    CollectiveMismatchError,
    DistributedError,
    InboxFullError,
    InvalidArgumentError,
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
    SizeMismatchError,
)
from ringfort.testing import VirtualClock, run_ranks
from ringfort.testing.check import pattern
from ringfort.transport.fold import Fold
from ringfort.transport.frames import (
    CANCEL,
    DATA,
    GO,
    GOODBYE,
    HEADER_BYTES,
    WAITING,
    WANTS_GO,
    WINDOW,
    Header,
    pack,
    parse,
)
from ringfort.transport.memory import MemoryPoller, MemoryStream, Pipe
from tests.unit.transport.background import Background

CONFIG = DistributedConfig(inbox_bytes=MIB)


class Peer:
    """The other end of a link, without an engine: writes and reads frames as the test says."""

    def __init__(self, stream: MemoryStream) -> None:
        self._stream = stream
        self._unread = b""

    def write(self, *pieces: bytes) -> None:
        data = memoryview(b"".join(pieces))
        assert self._stream.send(data) == len(data), "the pipe is full"

    def say(self, data: bytes, *, tag: int = 0, wants_go: bool = False) -> None:
        """A whole message in one frame."""
        size = len(data)
        self.write(pack(DATA, tag=tag, length=size, total=size, flags=WANTS_GO if wants_go else 0), data)

    def frames(self) -> list[tuple[Header, bytes]]:
        """All whole frames that have come since the last call."""
        buffer = bytearray(1 << 20)
        try:
            while count := self._stream.recv_into(memoryview(buffer)):
                self._unread += buffer[:count]
        except BlockingIOError:
            pass
        found: list[tuple[Header, bytes]] = []
        while len(self._unread) >= HEADER_BYTES:
            header = parse(self._unread)
            end = HEADER_BYTES + header.length
            if len(self._unread) < end:
                break
            found.append((header, self._unread[HEADER_BYTES:end]))
            self._unread = self._unread[end:]
        return found

    def kinds(self) -> list[int]:
        return [header.kind for header, _ in self.frames()]

    def end(self) -> None:
        self._stream.close()


class Scene:
    """Rank 0 with an engine, and scripted peers from rank 1 on."""

    def __init__(self, peers: int) -> None:
        self.clock = VirtualClock()
        poller = MemoryPoller(self.clock)
        self.peers: dict[int, Peer] = {}
        for rank in range(1, peers + 1):
            there = Pipe(ring_reader=lambda: None, ring_writer=poller.ring)
            back = Pipe(ring_reader=poller.ring, ring_writer=lambda: None)
            poller.streams[rank] = MemoryStream(incoming=back, outgoing=there)
            self.peers[rank] = Peer(MemoryStream(incoming=there, outgoing=back))
        self.me = MeshBackend(0, peers + 1, CONFIG, dict(poller.streams), poller)

    def recv(self, size: int, src: int = 1, *, tag: int = 0, timeout: float = 60) -> Background[bytes]:
        """A receive in a thread of its own, asleep when this returns."""

        def call() -> bytes:
            into = bytearray(size)
            self.me.recv(into, src, tag=tag, timeout=timeout)
            return bytes(into)

        return self.asleep(Background(call))

    def asleep(self, call: Background[bytes]) -> Background[bytes]:
        """`call`, once its message is posted and the leader sleeps."""
        self.clock.wait_for_sleepers(1)
        engine = self.me._engine
        while engine._arrivals:
            self.clock.wait_for_sleepers(1)
        return call

    def close(self) -> None:
        for peer in self.peers.values():
            peer.end()
        self.me.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene(peers=1)
    yield scene
    scene.close()


@pytest.fixture
def wide() -> Iterator[Scene]:
    """With two peers."""
    scene = Scene(peers=2)
    yield scene
    scene.close()


# --- time -------------------------------------------------------------------------------------------------------------


def test_a_receive_times_out_at_its_deadline_and_not_before(scene: Scene) -> None:
    call = scene.recv(5, timeout=60)
    scene.clock.advance(59.5)
    scene.clock.wait_for_sleepers(1)
    assert not call.is_over
    scene.clock.advance(0.5)
    with pytest.raises(OperationTimeoutError, match="60 s") as caught:
        call.result()
    assert (caught.value.peer, caught.value.timeout) == (1, 60)


def test_a_timeout_may_be_longer_than_any_clock_counts(scene: Scene) -> None:
    call = scene.recv(5, timeout=1e300)
    scene.peers[1].say(b"hello")
    assert call.result() == b"hello"


def test_calls_of_several_threads_time_out_each_at_its_own_time(scene: Scene) -> None:
    calls = [scene.recv(1, tag=tag, timeout=10 * (tag + 1)) for tag in (2, 0, 1)]
    for ended in (1, 2, 0):
        assert not calls[ended].is_over
        scene.clock.advance(10)
        with pytest.raises(OperationTimeoutError):
            calls[ended].result()
        if ended != 0:
            scene.clock.wait_for_sleepers(1)


@pytest.mark.parametrize("had", [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 50, HEADER_BYTES + 99])
def test_a_timeout_in_the_middle_of_a_message_drops_it_and_the_next_is_whole(scene: Scene, had: int) -> None:
    call = scene.recv(100, timeout=5)
    message = pack(DATA, length=100, total=100) + pattern(1, 100)
    scene.peers[1].write(message[:had])
    scene.clock.wait_for_sleepers(1)
    scene.clock.advance(5)
    with pytest.raises(OperationTimeoutError, match="the link is usable"):
        call.result()
    scene.peers[1].write(message[had:])
    scene.peers[1].say(pattern(2, 100))
    first = bytearray(100)
    scene.me.recv(first, 1, timeout=5)
    if had < HEADER_BYTES:  # nothing had been matched, so nothing was dropped
        assert first == pattern(1, 100)
        scene.me.recv(first, 1, timeout=5)
    assert first == pattern(2, 100)


def test_a_timeout_between_the_frames_of_a_message_drops_its_rest(scene: Scene) -> None:
    call = scene.recv(20, timeout=5)
    scene.peers[1].write(pack(DATA, length=8, total=20), bytes(8))
    scene.clock.wait_for_sleepers(1)
    scene.clock.advance(5)
    with pytest.raises(OperationTimeoutError):
        call.result()
    scene.peers[1].write(pack(DATA, length=12, total=20), bytes(12))
    scene.peers[1].say(b"next")
    into = bytearray(4)
    scene.me.recv(into, 1, timeout=5)
    assert into == b"next"


def test_a_send_that_times_out_in_the_middle_is_cancelled_and_the_next_is_whole(scene: Scene) -> None:
    call = scene.asleep(Background(scene.me.send, pattern(1, 3 * WINDOW), 1, timeout=5))
    scene.clock.advance(5)
    with pytest.raises(OperationTimeoutError) as caught:
        call.result()
    assert caught.value.peer == 1
    frames = scene.peers[1].frames()
    scene.me.send(b"next", 1, timeout=5)
    while frames[-1][1] != b"next":
        more = scene.peers[1].frames()
        assert more, "the next message does not come"
        frames += more
    assert [header.kind for header, _ in frames[-2:]] == [CANCEL, DATA]


class Trickle:
    """A stream from which one byte comes every second, for ever."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._data = iter(pack(DATA, length=1000, total=1000))

    def recv_into(self, buffer: memoryview, /) -> int:
        self._clock.advance(1)
        buffer[0] = next(self._data, 0)
        return 1

    def send(self, data: memoryview, /) -> int:
        raise BlockingIOError

    def sendmsg(self, buffers: object, /) -> int:
        raise BlockingIOError

    def shut_down(self) -> None: ...

    def close(self) -> None: ...


def test_bytes_that_trickle_do_not_keep_a_call_alive_beyond_its_timeout() -> None:
    clock = VirtualClock()
    me = MeshBackend(0, 2, CONFIG, {1: Trickle(clock)}, MemoryPoller(clock))
    with pytest.raises(OperationTimeoutError):
        me.recv(bytearray(1000), 1, timeout=100)
    assert clock.now() < 200


# --- threads that take turns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(3))
def test_whoever_is_done_leaves_and_the_others_are_served_on(scene: Scene, first: int, second: int) -> None:
    calls = [scene.recv(1, tag=tag) for tag in range(3)]
    peer = scene.peers[1]
    messages = [pack(DATA, tag=tag, length=1, total=1) + bytes([tag]) for tag in range(3)]
    peer.write(*(messages[tag] for tag in dict.fromkeys((first, second))))  # one or two of them in one piece
    for tag in {first, second}:
        assert calls[tag].result() == bytes([tag])
    for tag in {0, 1, 2} - {first, second}:
        assert not calls[tag].is_over
        peer.write(messages[tag])
        assert calls[tag].result() == bytes([tag])


def test_many_threads_share_one_link() -> None:
    a, b = SimulatedBackend.create_group(2)

    def talk(index: int) -> None:
        backend, tag = (a, b)[index % 2], index // 2
        for turn in range(30):
            came = bytearray(500)
            backend.exchange(pattern(100 * tag + turn, 500), 1 - backend.rank, came, 1 - backend.rank, tag=tag)
            assert came == pattern(100 * tag + turn, 500)

    assert run_ranks(range(24), talk) == [None] * 24
    run_ranks([a, b], lambda backend: backend.close())


@pytest.mark.parametrize("how", ["abort", "close", "kill"])
def test_an_end_at_the_same_moment_as_calls_ends_every_one_of_them(how: str) -> None:
    for _ in range(60):
        a, b = SimulatedBackend.create_group(2)
        start = threading.Barrier(5)

        def call(tag: int, a: SimulatedBackend = a, start: threading.Barrier = start) -> None:
            start.wait()
            if tag == 4:
                a.abort("enough") if how == "abort" else a.close() if how == "close" else a.kill()
            elif tag % 2:
                a.recv(bytearray(1), 1, tag=tag)
            else:
                a.send(bytes(2 * WINDOW), 1, tag=tag)

        outcomes = run_ranks(range(5), call, timeout=10)
        assert outcomes[4] is None
        assert all(isinstance(outcome, (AbortedError, ChannelClosedError)) for outcome in outcomes[:4])
        b.kill()
        a.close()


def test_an_abort_wakes_leader_and_followers(scene: Scene) -> None:
    calls = [scene.recv(1, tag=tag) for tag in range(4)]
    scene.me.abort("enough")
    for call in calls:
        with pytest.raises(AbortedError, match="enough") as caught:
            call.result()
        assert caught.value.peer is None
    with pytest.raises(AbortedError):
        scene.me.send(b"x", 1)


@pytest.mark.parametrize("reason", [None, 5, b"bytes"])
def test_a_reason_that_is_no_text_is_refused_and_the_group_stays_as_it_was(scene: Scene, reason: object) -> None:
    with pytest.raises(InvalidArgumentError, match="reason"):
        scene.me.abort(reason)  # type: ignore[arg-type]
    scene.peers[1].say(b"still here")
    into = bytearray(10)
    scene.me.recv(into, 1, timeout=5)
    assert into == b"still here"


def test_a_reason_that_cannot_be_encoded_still_aborts(scene: Scene) -> None:
    scene.me.abort("file \udc80 is gone")
    call = Background(scene.me.recv, bytearray(1), 1)
    with pytest.raises(AbortedError, match="file"):
        call.result()


# --- ends ---------------------------------------------------------------------------------------------------------------


def test_a_peer_that_ends_without_a_word_is_lost(wide: Scene) -> None:
    call = wide.recv(1, src=1)
    wide.peers[1].end()
    with pytest.raises(PeerLostError) as caught:
        call.result()
    assert caught.value.peer == 1
    with pytest.raises(PeerLostError):
        wide.me.send(b"x", 1)
    wide.peers[2].say(b"hello")  # the other one is still there
    into = bytearray(5)
    wide.me.recv(into, 2, timeout=5)
    assert into == b"hello"


def test_a_peer_that_said_goodbye_has_closed(scene: Scene) -> None:
    scene.peers[1].say(b"last words", tag=3)
    scene.peers[1].write(pack(GOODBYE))
    scene.peers[1].end()
    with pytest.raises(ChannelClosedError) as caught:
        scene.me.recv(bytearray(1), 1)
    assert caught.value.peer == 1
    into = bytearray(10)
    scene.me.recv(into, 1, tag=3)
    assert into == b"last words"


def test_a_wrong_size_is_still_told_apart_when_the_peer_has_closed(scene: Scene) -> None:
    scene.peers[1].say(b"last words", tag=3)
    scene.peers[1].write(pack(GOODBYE))
    scene.peers[1].end()
    with pytest.raises(ChannelClosedError):
        scene.me.recv(bytearray(1), 1)
    with pytest.raises(SizeMismatchError):
        scene.me.recv(bytearray(1), 1, tag=3)


@pytest.mark.parametrize(
    "garbage",
    [
        bytes(HEADER_BYTES),
        b"GET / HTTP/1.1\r\n".ljust(HEADER_BYTES),
        pack(DATA, length=2**32 - 1, total=2**64 - 1),
        pack(DATA, length=5, total=10) + bytes(5) + pack(DATA, length=100, total=1000) + bytes(100),
        pack(DATA, length=1, total=1, epoch=9) + b"x",
        pack(4, length=3) + b"\xc1\xc1\xc1",
    ],
    ids=["zeros", "http", "too large", "does not continue", "another epoch", "no notice"],
)
@pytest.mark.parametrize("is_awaited", [True, False])
def test_garbage_closes_that_link_with_an_error_that_names_the_peer(
    wide: Scene, garbage: bytes, is_awaited: bool
) -> None:
    call = wide.recv(10, src=1 if is_awaited else 2)
    wide.peers[1].write(garbage)
    if not is_awaited:
        wide.clock.wait_for_sleepers(1)
        wide.peers[2].say(bytes(10))
        assert call.result() == bytes(10)
        call = Background(wide.me.recv, bytearray(10), 1)  # type: ignore[arg-type]
    with pytest.raises((ProtocolError, PeerLostError)) as caught:
        call.result()
    assert caught.value.peer == 1
    with pytest.raises(DistributedError):
        wide.me.send(b"x", 1)
    wide.me.send(b"x", 2)


def test_a_fault_in_a_fold_ends_the_group_for_it_cannot_be_undone(scene: Scene) -> None:
    def fault(into: object, span: object) -> None:
        raise FloatingPointError("in the fold")

    scene.peers[1].say(bytes(8))
    with pytest.raises(FloatingPointError):
        scene.me.recv(np.zeros(1), 1, reduce=Fold(np.dtype(np.float64), fault))
    with pytest.raises(AbortedError, match="interrupted"):
        scene.me.send(b"x", 1)


# --- the inbox ----------------------------------------------------------------------------------------------------------



def crowd(scene: Scene) -> Background[bytes]:
    """Fills the inbox of peer 1, two halves at a time: a pipe holds half a MiB."""
    call = scene.recv(5, tag=1)
    for _ in range(4):
        if not call.is_over:
            scene.clock.wait_for_sleepers(1)
        scene.peers[1].say(bytes(MIB // 4), tag=7)
    return call


def test_a_receive_behind_a_full_inbox_says_so_and_the_link_is_usable(scene: Scene) -> None:
    call = crowd(scene)
    with pytest.raises(InboxFullError, match=str(MIB)) as caught:
        call.result()
    assert caught.value.peer == 1
    scene.peers[1].say(b"hello", tag=1)
    with pytest.raises(InboxFullError):
        scene.me.recv(bytearray(5), 1, tag=1)
    for _ in range(4):
        scene.me.recv(bytearray(MIB // 4), 1, tag=7)
    into = bytearray(5)
    scene.me.recv(into, 1, tag=1)
    assert into == b"hello"


def test_a_full_inbox_ends_only_what_needs_that_link(wide: Scene) -> None:
    def exchange() -> bytes:
        into = bytearray(5)
        wide.me.exchange(b"to rank 1", 1, into, 2, timeout=60)
        return bytes(into)

    call = wide.asleep(Background(exchange))
    for _ in range(4):
        wide.peers[1].say(bytes(MIB // 4), tag=7)
        wide.clock.wait_for_sleepers(1)
    wide.peers[2].say(b"hello")
    assert call.result() == b"hello"


def test_what_came_before_a_clean_close_is_received_though_the_inbox_was_full(scene: Scene) -> None:
    call = crowd(scene)
    with pytest.raises(InboxFullError):
        call.result()
    scene.peers[1].say(b"one more", tag=7)
    scene.peers[1].write(pack(GOODBYE))
    scene.peers[1].end()
    for _ in range(4):
        scene.me.recv(bytearray(MIB // 4), 1, tag=7)
    into = bytearray(8)
    scene.me.recv(into, 1, tag=7)
    assert into == b"one more"


# --- collectives ----------------------------------------------------------------------------------------------------------


def test_a_rank_that_has_waited_in_a_collective_for_a_while_says_so_once() -> None:
    clock = VirtualClock()
    scene = Scene(1)
    clock = scene.clock
    call = scene.asleep(Background(scene.me.barrier, timeout=60))  # type: ignore[arg-type]
    scene.peers[1].frames()
    clock.advance(0.05)
    clock.wait_for_sleepers(1)
    assert scene.peers[1].kinds() == []
    clock.advance(0.05)
    clock.wait_for_sleepers(1)
    assert scene.peers[1].kinds() == [WAITING]
    clock.advance(10)
    clock.wait_for_sleepers(1)
    assert scene.peers[1].kinds() == []
    scene.me.abort("enough")
    with pytest.raises(AbortedError):
        call.result()
    scene.close()


def test_a_rank_that_waits_in_another_collective_is_told() -> None:
    clock = VirtualClock()
    a, b = SimulatedBackend.create_group(2, clock=clock)
    other_call = b"\x0a" + bytes(15)

    def wait(backend: SimulatedBackend) -> None:
        if backend.rank == 0:
            backend.barrier()
        else:
            backend.recv(bytearray(1), 0, tag=backend.envelope(other_call))

    calls = [Background(wait, backend) for backend in (a, b)]
    clock.wait_for_sleepers(1)
    for _ in range(20):  # the two go to sleep a moment after each other, and each speaks up in its own time
        clock.advance(0.1)
    for call in calls:
        with pytest.raises(CollectiveMismatchError):
            call.result()
    run_ranks([a, b], lambda backend: backend.kill())


def test_a_timeout_in_a_collective_is_told_to_all_its_members_and_to_nobody_else() -> None:
    clock = VirtualClock()
    group = SimulatedBackend.create_group(4, clock=clock)
    pairs = [SubBackend(backend, [0, 1]) if backend.rank < 2 else SubBackend(backend, [2, 3]) for backend in group]
    first = Background(pairs[0].barrier, timeout=5)
    others = [Background(pairs[rank].barrier, timeout=60) for rank in (2,)]
    clock.wait_for_sleepers(2)
    clock.advance(5)
    with pytest.raises(OperationTimeoutError):
        first.result()
    with pytest.raises(AbortedError) as caught:
        pairs[1].barrier(timeout=5)
    assert caught.value.peer == 0
    assert not others[0].is_over
    pairs[3].barrier(timeout=60)
    others[0].result()
    run_ranks(group, lambda backend: backend.kill())


def test_a_go_is_sent_when_a_large_message_is_received(scene: Scene) -> None:
    call = scene.recv(10)
    scene.peers[1].say(bytes(10), wants_go=True)
    assert call.result() == bytes(10)
    assert scene.peers[1].kinds() == [GO]
