"""The engine in virtual time: when calls end, and threads that take turns to move the data of all."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import pytest

from ringfort.backends.mesh import MeshBackend
from ringfort.backends.simulated import SimulatedBackend
from ringfort.errors import AbortedError, ChannelClosedError, InvalidArgumentError, OperationTimeoutError
from ringfort.testing import VirtualClock, run_ranks
from ringfort.testing.check import pattern
from ringfort.transport.engine import Engine
from ringfort.transport.frames import CANCEL, CLEAR_TO_SEND, DATA, HEADER_BYTES, NO_CALL, WINDOW, pack, parse
from ringfort.transport.memory import MemoryPoller
from ringfort.transport.stream import Ready
from tests.helpers.background import Background
from tests.helpers.scene import CONFIG, Scene, scene_with


@pytest.fixture
def scene() -> Iterator[Scene]:
    with scene_with(peers=1) as scene:
        yield scene


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
    following = Background(scene.me.send, b"next", 1, timeout=5)
    frames = scene.peers[1].frames()
    while not following.is_over:
        frames += scene.peers[1].frames()
    following.result()
    frames += scene.peers[1].frames()
    assert frames[-1][1] == b"next"
    assert [header.kind for header, _ in frames[-2:]] == [CANCEL, DATA]


class Trickle(MemoryPoller):
    """A stream from which one byte comes every second, for ever; and a poller that always finds it ready."""

    chunk = 1 << 18
    has_pending = False

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self._time = clock
        self._data = iter(pack(DATA, length=1000, total=1000))

    def wait(self, deadline: float) -> list[Ready]:
        return [Ready(1, readable=True, writable=False)]

    def recv_into(self, buffer: memoryview, /) -> int:
        self._time.advance(1)
        buffer[0] = next(self._data, 0)
        return 1

    def send(self, data: memoryview, /) -> int:
        raise BlockingIOError

    def sendmsg(self, buffers: object, /) -> int:
        raise BlockingIOError

    def shut_down(self) -> None: ...


def test_bytes_that_trickle_do_not_keep_a_call_alive_beyond_its_timeout() -> None:
    clock = VirtualClock()
    trickle = Trickle(clock)
    me = MeshBackend(0, 2, CONFIG, {1: trickle}, trickle)
    with pytest.raises(OperationTimeoutError):
        me.recv(bytearray(1000), 1, timeout=100)
    assert clock.now() < 200


# --- a message that waits for its clear-to-send -----------------------------------------------------------------------


class Flood:
    """A stream that brings one message, a little at every read, and never has nothing."""

    chunk, has_pending = 1 << 18, False

    def __init__(self, size: int) -> None:
        self._data = memoryview(pack(DATA, length=size, total=size) + bytes(size))
        self.reads = 0

    def recv_into(self, buffer: memoryview, /) -> int:
        self.reads += 1
        count = min(len(buffer), 500, len(self._data))
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        return count

    def send(self, data: memoryview, /) -> int:
        return len(data)

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        return sum(map(len, buffers))

    def shut_down(self) -> None: ...
    def close(self) -> None: ...


class Granting(Flood):
    """A stream that takes all that it is given and answers the first frame with its clear-to-send, at once or `late`:
    only when it was asked in vain so often since the window was used up."""

    def __init__(self, beside: Flood, late: int = 0) -> None:
        super().__init__(0)
        self._data = memoryview(b"")
        self._beside = beside
        self._late = late
        self.taken = 0
        self.reads_beside = 0
        """What `beside` had been read when the last bytes came."""

    def recv_into(self, buffer: memoryview, /) -> int:
        if not self._data:
            raise BlockingIOError
        if self._late:
            self._late -= self.taken >= WINDOW
            raise BlockingIOError
        return super().recv_into(buffer)

    def send(self, data: memoryview, /) -> int:
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        buffers = tuple(buffers)
        if not self.taken:
            asked = parse(buffers[0])
            self._data = memoryview(
                pack(CLEAR_TO_SEND, comm_id=asked.comm_id, tag=asked.tag, operation=asked.operation)
            )
        count = sum(map(len, buffers))
        self.taken += count
        self.reads_beside = self._beside.reads
        return count


class AlwaysReady(MemoryPoller):
    """Finds both streams ready: the engine sleeps on neither."""

    def wait(self, deadline: float) -> list[Ready]:
        return [Ready(1, readable=True, writable=True), Ready(2, readable=True, writable=False)]


class NeverAsked(MemoryPoller):
    """Fails who sleeps."""

    def wait(self, deadline: float) -> list[Ready]:
        raise AssertionError("slept in place of looking for the clear-to-send")


def test_a_rank_that_only_sends_looks_for_its_clear_to_send_before_it_sleeps() -> None:
    granting = Granting(Flood(0), late=2)  # after the last frame of the window, and when there was nothing to write
    me = MeshBackend(0, 2, CONFIG, {1: granting}, NeverAsked(VirtualClock()))
    me.send(bytes(3 * WINDOW), 1)
    assert granting.taken >= 3 * WINDOW


def test_a_clear_to_send_is_read_while_data_flow_on_another_link() -> None:
    """As in a ring: what is sent goes to one neighbour and what is received comes from the other, so that nothing else
    makes this rank read the link on which it is told to send on."""
    flood = Flood(1 << 20)
    granting = Granting(flood)
    me = MeshBackend(0, 3, CONFIG, {1: granting, 2: flood}, AlwaysReady(VirtualClock()))
    me.exchange(bytes(3 * WINDOW), 1, bytearray(1 << 20), 2)
    assert granting.taken >= 3 * WINDOW
    assert granting.reads_beside < 100, "the rest was sent only when nothing flowed any more"
    assert flood.reads > 2000


# --- threads that take turns ------------------------------------------------------------------------------------------


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


class _HandedOver:
    """The lock of the lead, as a call finds it that comes while another leads: taken at first, and free when the other
    has done its job."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lock, self._tries = engine, threading.RLock(), 0

    def acquire(self, *, blocking: bool) -> bool:
        self._tries += 1
        if self._tries == 1:
            return False
        if self._tries == 2:
            progress, table = self._engine._progress, self._engine.table
            progress.admit()
            table.write(table.links[1])
            progress._wake_done()
        return self._lock.acquire(blocking=blocking)

    def release(self) -> None:
        self._lock.release()

    def _is_owned(self) -> bool:
        return self._lock._is_owned()


def test_a_small_message_that_the_leader_has_sent_is_not_sent_again_by_its_caller(scene: Scene) -> None:
    group = scene.me.group
    engine = group.engine
    engine._lead = _HandedOver(engine)
    group.send(b"once", 1, group.envelope(b"c" * len(NO_CALL)))
    assert engine.traffic() == [(1, 4, 0, 0)]


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
    for _ in range(8 if how == "close" else 60):  # a close waits a moment for the other side to end too
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
