"""Waiting for what a peer does elsewhere than on its link: woken by WAKE_UP, ended by all that ends a collective."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringfort.errors import ChannelClosedError, CollectiveMismatchError, OperationTimeoutError, PeerLostError
from ringfort.transport import abort_reasons
from ringfort.transport.frames import ABORT, GOODBYE, WAITING, WAKE_UP, pack
from ringfort.transport.messages import Envelope
from tests.helpers.background import Background
from tests.helpers.scene import Scene, scene_with

CALL, OTHER = b"\x01" + bytes(15), b"\x02" + bytes(15)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with scene_with(2) as scene:
        yield scene


def watch(scene: Scene, ready: list[bool], peer: int = 1, timeout: float = 10) -> Background[bytes]:
    envelope = Envelope(0, 1 << 63, 1, CALL, frozenset(range(3)), False, timeout, scene.clock.now() + timeout)
    return scene.asleep(Background(scene.me.group.engine.watch, lambda: bool(ready), peer, envelope))


def test_a_wake_up_makes_a_watcher_look(scene: Scene) -> None:
    ready: list[bool] = []
    call = watch(scene, ready)
    scene.peers[1].write(pack(WAKE_UP))
    scene.clock.wait_for_sleepers(1)
    assert not call.is_over
    ready.append(True)
    scene.peers[2].write(pack(WAKE_UP))  # whoever sends it, the watcher looks
    call.result()


def test_what_is_there_already_is_not_waited_for_even_if_the_peer_has_left(scene: Scene) -> None:
    scene.peers[1].write(pack(GOODBYE))
    scene.peers[1].end()
    scene.recv(1, src=2)  # reads the goodbye, and goes on
    envelope = Envelope(5, 0, 1, CALL, frozenset((0, 1)), False, 10, scene.clock.now() + 10)
    Background(scene.me.group.engine.watch, lambda: True, 1, envelope).result()
    with pytest.raises(ChannelClosedError):
        Background(scene.me.group.engine.watch, lambda: False, 1, envelope).result()


def test_a_nudge_is_a_wake_up(scene: Scene) -> None:
    scene.me.group.engine.nudge(1)
    assert scene.peers[1].kinds() == [WAKE_UP]
    assert scene.peers[2].kinds() == []


@pytest.mark.parametrize("goodbye", [pack(GOODBYE), b""], ids=["said goodbye", "died then"])
def test_a_peer_that_tells_who_was_lost_and_ends_is_not_blamed_itself(scene: Scene, goodbye: bytes) -> None:
    payload = abort_reasons.encode(abort_reasons.Lost(2, "it died"))
    call = watch(scene, [])
    # The watcher tells it on, and finds in the middle of that that the one who told it has gone.
    scene.peers[1].write(pack(ABORT, length=len(payload)), payload, goodbye)
    scene.peers[1].end()
    with pytest.raises(PeerLostError) as caught:
        call.result()
    assert caught.value.peer == 2


def test_a_watched_peer_that_dies_is_named(scene: Scene) -> None:
    call = watch(scene, [])
    scene.peers[2].end()
    with pytest.raises(PeerLostError) as caught:
        call.result()
    assert caught.value.peer == 2


def test_a_watch_times_out_and_the_group_is_told(scene: Scene) -> None:
    call = watch(scene, [], timeout=5)
    scene.clock.advance(5)
    with pytest.raises(OperationTimeoutError) as caught:
        call.result()
    assert caught.value.peer == 1
    assert ABORT in scene.peers[2].kinds()


def test_a_peer_that_waits_in_another_call_is_a_disagreement(scene: Scene) -> None:
    call = watch(scene, [])
    scene.peers[2].write(pack(WAITING, tag=1 << 63, operation=1, call=OTHER))
    with pytest.raises(CollectiveMismatchError) as caught:
        call.wait(scene.clock).result()
    assert caught.value.peer == 2


def test_a_disagreement_found_elsewhere_ends_the_group(scene: Scene) -> None:
    envelope = Envelope(0, 1 << 63, 1, CALL, frozenset(range(3)), False, 10, 1e9)
    with pytest.raises(CollectiveMismatchError, match="rank 2"):
        scene.me.group.engine.disagree(2, 1, OTHER, envelope)
    assert scene.peers[1].kinds() == [ABORT]
    with pytest.raises(CollectiveMismatchError):
        scene.me.group.engine.check(envelope)
    scene.me.group.engine.check(envelope._replace(comm_id=7))
