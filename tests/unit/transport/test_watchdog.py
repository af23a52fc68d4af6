"""The watchdog: deadlines and mismatches of blocked jobs, in virtual time and without an engine."""

from __future__ import annotations

import pytest

from ringfort.errors import CollectiveMismatchError, OperationTimeoutError, PeerLostError
from ringfort.transport.frames import DATA, WAITING, pack
from ringfort.transport.watchdog import SAY_AFTER, Watchdog
from tests.helpers.scene import TableScene, error_of

CALL, OTHER = b"\x01" + bytes(15), b"\x02" + bytes(15)


@pytest.fixture
def scene() -> TableScene:
    return TableScene(peers=2)


@pytest.fixture
def watchdog(scene: TableScene) -> Watchdog:
    return Watchdog(scene.table)


def test_only_jobs_whose_time_is_over_expire(scene: TableScene, watchdog: Watchdog) -> None:
    short, long = scene.receive(1, timeout=5), scene.receive(2, timeout=9)
    assert watchdog.next_look() == scene.clock.now() + 5
    scene.clock.advance(4.9)
    watchdog.expire()
    assert not short.is_done
    scene.clock.advance(0.1)
    watchdog.expire()
    assert isinstance(error_of(short), OperationTimeoutError)
    assert not long.is_done


def test_nothing_is_due_where_nothing_is_posted(watchdog: Watchdog) -> None:
    watchdog.look()
    watchdog.expire()
    assert watchdog.next_look() == 0.0


def test_a_peer_is_told_once_what_is_waited_for_and_only_in_collectives(scene: TableScene, watchdog: Watchdog) -> None:
    scene.receive(1, call=CALL, comm_id=3, operation=8)
    scene.receive(2)
    watchdog.look()
    assert watchdog.next_look() == pytest.approx(scene.clock.now() + SAY_AFTER)
    assert scene.peers[1].frames() == []
    for _ in range(3):
        scene.clock.advance(SAY_AFTER)
        watchdog.look()
    [(header, _)] = scene.peers[1].frames()
    assert (header.kind, header.comm_id, header.operation, header.call) == (WAITING, 3, 8, CALL)
    assert scene.peers[2].frames() == []


@pytest.mark.parametrize(
    ("operation", "call", "is_mismatch"),
    [(5, OTHER, True), (5, CALL, False), (4, OTHER, False), (6, OTHER, False)],
)
def test_a_peer_that_waits_in_another_call_of_the_same_operation_is_a_mismatch(
    scene: TableScene, watchdog: Watchdog, operation: int, call: bytes, *, is_mismatch: bool
) -> None:
    job = scene.receive(1, call=CALL, operation=5)
    scene.peers[2].write(pack(WAITING, operation=operation, call=call))
    scene.table.read(scene.table.links[2])
    watchdog.look()
    assert isinstance(error_of(job), CollectiveMismatchError) == is_mismatch
    assert job.is_done == is_mismatch


@pytest.mark.parametrize(
    ("operation", "call", "is_mismatch"), [(5, OTHER, True), (5, CALL, False), (4, CALL, True), (6, OTHER, False)]
)
def test_an_unclaimed_message_of_another_call_or_of_an_earlier_operation_is_a_mismatch(
    scene: TableScene, watchdog: Watchdog, operation: int, call: bytes, *, is_mismatch: bool
) -> None:
    job = scene.receive(1, call=CALL, operation=5)
    scene.peers[2].write(pack(DATA, tag=9, operation=operation, call=call, length=1, total=1), b"x")
    scene.table.read(scene.table.links[2])
    watchdog.look()
    assert job.is_done == is_mismatch


def test_a_silent_machine_is_lost(scene: TableScene, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, other = scene.receive(1), scene.receive(2)
    monkeypatch.setattr(scene.table.poller, "silent", lambda: [(1, 12.0)])
    watchdog.look()
    error = error_of(lost)
    assert isinstance(error, PeerLostError)
    assert "12.0 s" in str(error)
    assert not other.is_done
