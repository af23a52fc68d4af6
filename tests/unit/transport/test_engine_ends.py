"""The engine and the ends of peers, of room and of agreement: typed errors that name who, and the rest goes on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ringfort.backends.simulated import SimulatedBackend
from ringfort.backends.sub import SubBackend
from ringfort.config import MIB
from ringfort.errors import (
    AbortedError,
    ChannelClosedError,
    CollectiveMismatchError,
    DistributedError,
    InboxFullError,
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
    SizeMismatchError,
)
from ringfort.testing import VirtualClock, run_ranks
from ringfort.transport import abort_reasons
from ringfort.transport.abort_reasons import Aborted, Lost
from ringfort.transport.frames import ABORT, CLEAR_TO_SEND, DATA, GOODBYE, HEADER_BYTES, WAITING, pack
from ringfort.transport.reducer import Reducer
from tests.helpers.background import Background
from tests.helpers.scene import FOREVER, Scene, scene_with


@pytest.fixture
def scene() -> Iterator[Scene]:
    with scene_with(peers=1) as scene:
        yield scene


@pytest.fixture
def wide() -> Iterator[Scene]:
    with scene_with(peers=2) as scene:
        yield scene


# --- ends -------------------------------------------------------------------------------------------------------------


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


def test_the_others_are_told_who_was_lost_and_by_whom(wide: Scene) -> None:
    call = wide.asleep(Background(wide.me.barrier, timeout=60))  # type: ignore[arg-type]
    wide.peers[1].end()
    with pytest.raises(PeerLostError):
        call.result()
    [told] = [abort_reasons.decode(payload) for header, payload in wide.peers[2].frames() if header.kind == ABORT]
    assert isinstance(told, Lost)
    assert (told.peer, told.by) == (1, 0)


def test_a_peer_that_somebody_else_found_lost_ends_what_waits_on_it_and_nothing_else(wide: Scene) -> None:
    call = wide.recv(1, src=1)
    wide.me.group.engine.lose(1, "silent for 1.0 s")
    with pytest.raises(PeerLostError, match="silent for") as caught:
        call.result()
    assert caught.value.peer == 1
    wide.peers[2].say(b"hello")
    into = bytearray(5)
    wide.me.recv(into, 2, timeout=5)
    assert into == b"hello"


def test_a_group_that_somebody_else_ended_fails_everything_now_and_later(wide: Scene) -> None:
    call = wide.recv(1, src=1)
    wide.me.group.engine.fail(lambda: AbortedError("the epoch has ended"))
    with pytest.raises(AbortedError, match="the epoch has ended"):
        call.result()
    with pytest.raises(AbortedError, match="the epoch has ended"):
        wide.me.send(b"x", 2)


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


def test_what_a_peer_said_before_its_end_is_heard_also_by_one_who_only_sends(scene: Scene) -> None:
    why = abort_reasons.encode(Aborted(1, "no room on the disk"))
    scene.peers[1].write(pack(ABORT, length=len(why)), why)
    scene.peers[1].end()
    with pytest.raises(AbortedError, match="no room on the disk"):
        scene.me.send(b"x", 1, timeout=5)


def test_one_who_hears_of_an_abort_passes_it_on_once_and_before_its_goodbye(wide: Scene) -> None:
    why = abort_reasons.encode(Aborted(1, "enough"))
    wide.peers[1].write(pack(ABORT, length=len(why)), why, pack(ABORT, length=len(why)), why)
    with pytest.raises(AbortedError):
        wide.me.recv(bytearray(1), 1)
    Background(wide.me.close).wait(wide.clock).result()
    [(abort, payload), (goodbye, _)] = wide.peers[2].frames()
    assert (abort.kind, goodbye.kind) == (ABORT, GOODBYE)
    assert abort_reasons.decode(payload) == Aborted(1, "enough")
    assert wide.peers[1].kinds() == [GOODBYE], "who has told us knows"


def test_an_abort_is_passed_on_before_what_is_found_out_while_telling_it() -> None:
    with scene_with(peers=3) as scene:
        why = abort_reasons.encode(Aborted(1, "enough"))
        scene.peers[1].write(pack(ABORT, length=len(why)), why)
        scene.peers[2].end()
        with pytest.raises(AbortedError):
            Background(scene.me.barrier, timeout=5).wait(scene.clock).result()
        heard = [abort_reasons.decode(payload) for header, payload in scene.peers[3].frames() if header.kind == ABORT]
        assert heard[0] == Aborted(1, "enough")


def test_an_abort_that_comes_late_is_heard_from_one_who_leaves_because_of_it() -> None:
    clock = VirtualClock()
    group = SimulatedBackend.create_group(3, clock=clock)
    first, second, third = group
    first.cut(1)  # as slow as can be
    call = Background(second.recv, bytearray(1), 2, timeout=FOREVER)
    clock.wait_for_sleepers(1)
    Background(first.abort, "enough").wait(clock).result()
    with pytest.raises(AbortedError):
        third.recv(bytearray(1), 0)
    Background(third.close).wait(clock).result()
    with pytest.raises(AbortedError, match="enough") as caught:
        call.wait(clock).result()
    assert caught.value.peer == 0
    run_ranks(group, lambda backend: backend.kill())


def test_a_collective_that_needs_one_who_has_closed_is_told_to_the_others(wide: Scene) -> None:
    wide.peers[1].write(pack(GOODBYE))
    wide.peers[1].end()
    with pytest.raises(ChannelClosedError):
        wide.me.recv(bytearray(1), 1)
    wide.peers[2].frames()
    with pytest.raises(ChannelClosedError):
        wide.me.barrier(timeout=5)
    assert ABORT in wide.peers[2].kinds()


def test_a_peer_that_cannot_be_told_of_an_abort_sees_its_link_end(scene: Scene) -> None:
    call = Background(scene.me.send, bytes(MIB), 1, timeout=FOREVER)  # more than the pipe holds, and nobody reads
    scene.clock.wait_for_sleepers(1)
    abort = Background(scene.me.abort, "enough")
    abort.wait(scene.clock).result()
    with pytest.raises(AbortedError):
        call.wait(scene.clock).result()
    while scene.peers[1]._stream.recv_into(memoryview(bytearray(MIB))):
        pass


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
    ids=["zeros", "http", "too large", "does not continue", "another epoch", "no abort reason"],
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


def test_a_fault_in_a_reduce_ends_the_group_for_it_cannot_be_undone(scene: Scene) -> None:
    def fault(into: object, span: object) -> None:
        raise FloatingPointError("in the reduce")

    scene.peers[1].say(bytes(8))
    with pytest.raises(FloatingPointError):
        scene.me.recv(np.zeros(1), 1, reduce=Reducer(np.dtype(np.float64), fault))
    with pytest.raises(AbortedError, match="interrupted"):
        scene.me.send(b"x", 1)


# --- the inbox --------------------------------------------------------------------------------------------------------


def crowd(scene: Scene) -> Background[bytes]:
    """Fills the inbox of peer 1, two halves at a time: a pipe holds half a MiB."""
    call = scene.recv(5, tag=1, timeout=FOREVER)
    for _ in range(4):
        scene.clock.wait_for_sleepers(1)
        scene.peers[1].say(bytes(MIB // 4), tag=7)
    return call.wait(scene.clock)


def test_a_receive_behind_a_full_inbox_says_so_and_the_link_is_usable(scene: Scene) -> None:
    call = crowd(scene)
    with pytest.raises(InboxFullError, match=r"inbox for rank 1 is full \(1 MiB of messages") as caught:
        call.result()
    assert caught.value.peer == 1
    scene.peers[1].say(b"hello", tag=1)
    with pytest.raises(InboxFullError):
        scene.recv(5, tag=1, timeout=FOREVER, is_asleep=False).wait(scene.clock).result()
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


# --- collectives ------------------------------------------------------------------------------------------------------


def test_a_rank_that_has_waited_in_a_collective_for_a_while_says_so_once() -> None:
    scene = Scene(1)
    clock = scene.clock
    call = scene.asleep(Background(scene.me.barrier, timeout=60))  # type: ignore[arg-type]
    scene.peers[1].frames()
    said: list[float] = []
    while clock.now() < 10:
        clock.advance(0.02)
        clock.wait_for_sleepers(1)
        said += [clock.now()] * scene.peers[1].kinds().count(WAITING)
    assert len(said) == 1
    assert 0.08 < said[0] < 0.3
    scene.me.abort("enough")
    with pytest.raises(AbortedError):
        call.result()
    scene.close()


def test_a_rank_that_waits_in_another_collective_is_told() -> None:
    clock = VirtualClock()
    a, b = SimulatedBackend.create_group(2, clock=clock)

    def wait(backend: SimulatedBackend) -> None:
        other = 1 - backend.rank
        backend.group.recv(bytearray(1), other, backend.group.envelope(bytes([10 + other]) + bytes(15), FOREVER))

    for call in [Background(wait, backend) for backend in (a, b)]:
        with pytest.raises(CollectiveMismatchError):
            call.wait(clock).result()
    run_ranks([a, b], lambda backend: backend.kill())


def test_a_timeout_in_a_collective_is_told_to_all_its_members_and_to_nobody_else() -> None:
    clock = VirtualClock()
    group = SimulatedBackend.create_group(4, clock=clock)
    pairs = [SubBackend(backend, [0, 1]) if backend.rank < 2 else SubBackend(backend, [2, 3]) for backend in group]
    first = Background(pairs[0].barrier, timeout=5)
    other = Background(pairs[2].barrier, timeout=60)
    clock.wait_for_sleepers(2)
    clock.advance(5)
    with pytest.raises(OperationTimeoutError):
        first.result()
    pairs[1].barrier(timeout=5)  # what rank 0 had to do for this one had been done
    with pytest.raises(AbortedError) as caught:
        pairs[1].barrier(timeout=5)
    assert caught.value.peer == 0
    assert not other.is_over
    pairs[3].barrier(timeout=60)
    other.result()
    run_ranks(group, lambda backend: backend.kill())


def test_a_clear_to_send_is_sent_when_a_large_message_is_received(scene: Scene) -> None:
    call = scene.recv(10)
    scene.peers[1].say(bytes(10), is_rendezvous=True)
    assert call.result() == bytes(10)
    assert scene.peers[1].kinds() == [CLEAR_TO_SEND]
