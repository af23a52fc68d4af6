"""A pipelined ring: what a rank passes on leaves while it arrives, and nothing leaves that has not arrived."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ringfort.backends.group import RingStep
from ringfort.config import KIB
from ringfort.errors import AbortedError, PeerLostError
from ringfort.testing.check import pattern
from ringfort.transport.frames import CANCEL, DATA, pack
from ringfort.transport.messages import LEAST_FORWARDED, Envelope, Receive, Scratch, Send
from ringfort.transport.outbound import Outbound
from ringfort.transport.reducer import Reducer
from tests.helpers.background import Background
from tests.helpers.scene import FOREVER, Scene, scene_with

SIZE = 4 * LEAST_FORWARDED
CALL = b"\x7f" * 16
ADD = Reducer(np.dtype(np.uint8), lambda into, span: np.add(into, span, out=into), np.add)
BEFORE, BEHIND = 1, 2


@pytest.fixture
def scene() -> Iterator[Scene]:
    with scene_with(peers=2) as scene:
        yield scene


def envelope_of(scene: Scene) -> Envelope:
    return scene.me.group.envelope_of(1, CALL, FOREVER)


def pipelined_ring(
    scene: Scene, own: bytearray, passed: bytearray, last: bytearray, reducer: Reducer | None = None
) -> Background[bytes]:
    """Sends `own`, passes on what comes into `passed`, and keeps what comes then."""

    def call() -> bytes:
        ring_steps = [RingStep(own, passed, reducer), RingStep(passed, last)]
        scene.me.group.pipelined_ring(ring_steps, BEHIND, BEFORE, envelope_of(scene))
        return bytes(last)

    return scene.asleep(Background(call))


def say(scene: Scene, data: bytes, *, total: int = SIZE) -> None:
    """A frame of the peer before."""
    envelope = envelope_of(scene)
    frame = pack(
        DATA, comm_id=envelope.comm_id, tag=envelope.tag, operation=1, call=CALL, length=len(data), total=total
    )
    scene.peers[BEFORE].write(frame, data)


def came(scene: Scene, *, is_over: bool = False) -> bytes:
    """What the peer behind has got since it was last looked at, once nothing more happens."""
    if not is_over:
        scene.clock.wait_for_sleepers(1)
    return b"".join(body for header, body in scene.peers[BEHIND].frames() if header.kind == DATA)


@pytest.mark.parametrize("reducer", [None, ADD], ids=["as it is", "reduced"])
def test_what_has_arrived_is_passed_on_before_the_rest_comes(scene: Scene, reducer: Reducer | None) -> None:
    own, ours, theirs = pattern(1, SIZE), pattern(2, SIZE), pattern(3, SIZE)
    whole = bytes(np.frombuffer(ours, np.uint8) + np.frombuffer(theirs, np.uint8)) if reducer else theirs
    call = pipelined_ring(scene, bytearray(own), bytearray(ours), bytearray(SIZE), reducer)
    assert came(scene) == own
    half = SIZE // 2
    say(scene, theirs[:half])
    assert came(scene) == whole[:half]
    say(scene, theirs[half:])
    assert came(scene) == whole[half:]
    say(scene, pattern(4, SIZE))
    assert call.result() == pattern(4, SIZE)


def test_a_peer_that_is_lost_in_the_middle_ends_the_whole_pipelined_ring(scene: Scene) -> None:
    call = pipelined_ring(scene, bytearray(SIZE), bytearray(SIZE), bytearray(SIZE))
    say(scene, bytes(SIZE // 2))
    scene.peers[BEFORE].end()
    with pytest.raises(PeerLostError) as caught:
        call.result()
    assert caught.value.peer == BEFORE
    assert not scene.me.group.engine.table.jobs
    assert all(not link.outbound._queues for link in scene.me.group.engine.links.values())


def test_a_sender_that_gives_up_ends_the_pipelined_ring_and_nothing_unfinished_is_passed_on(scene: Scene) -> None:
    call = pipelined_ring(scene, bytearray(SIZE), bytearray(SIZE), bytearray(SIZE), ADD)
    assert came(scene) == bytes(SIZE)
    say(scene, b"\x01" * LEAST_FORWARDED)
    envelope = envelope_of(scene)
    scene.peers[BEFORE].write(pack(CANCEL, comm_id=envelope.comm_id, tag=envelope.tag))
    with pytest.raises(AbortedError, match="gave up"):
        call.result()
    assert came(scene, is_over=True) == b"\x01" * LEAST_FORWARDED


def test_too_little_is_not_worth_a_frame_but_the_end_always_is() -> None:
    source = Receive(memoryview(bytearray(SIZE)), Envelope(0, 0), None)
    send = Send(source.into, Envelope(0, 0), is_rendezvous=False, source=source)
    outbound, scratch = Outbound(), Scratch()
    outbound.post(send)
    assert not outbound.is_active
    source.filled(LEAST_FORWARDED - 1, scratch)
    assert not outbound.is_active
    source.filled(1, scratch)
    head, body = outbound.pieces()
    assert len(body) == LEAST_FORWARDED
    outbound.wrote(len(head) + len(body))
    assert not outbound.is_active
    source.filled(1, scratch)
    source.error, source.done = AbortedError("no more comes"), True
    assert not outbound.is_active, "what failed is never passed on"
    source.error, source.seen = None, SIZE
    assert outbound.is_active
    head, body = outbound.pieces()
    outbound.wrote(len(head) + len(body))
    assert send.done


def test_small_messages_go_one_after_the_other(scene: Scene) -> None:
    size = 4 * KIB
    call = pipelined_ring(scene, bytearray(pattern(1, size)), bytearray(size), bytearray(size))
    assert came(scene) == pattern(1, size)
    say(scene, pattern(2, size), total=size)
    assert came(scene) == pattern(2, size)
    say(scene, pattern(3, size), total=size)
    assert call.result() == pattern(3, size)
