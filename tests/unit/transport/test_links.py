"""The table of links: what the end of one message, communicator or peer means for the others."""

from __future__ import annotations

import pytest

from ringfort.errors import (
    AbortedError,
    ChannelClosedError,
    CollectiveMismatchError,
    InboxFullError,
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
)
from ringfort.transport import abort_reasons
from ringfort.transport.abort_reasons import Aborted, Left, Lost
from ringfort.transport.frames import ABORT, CLEAR_TO_SEND, DATA, GOODBYE, HAS_ENDED, WAITING, WAKE_UP, pack
from ringfort.transport.messages import Envelope
from tests.helpers.scene import TableScene, error_of

CALL, OTHER = b"\x01" + bytes(15), b"\x02" + bytes(15)


@pytest.fixture
def scene() -> TableScene:
    return TableScene(peers=3)


def read_all(scene: TableScene, peer: int) -> None:
    link = scene.table.links[peer]
    while scene.table.read(link):
        pass


def test_a_peer_that_says_goodbye_ends_what_waits_for_it_and_nothing_else(scene: TableScene) -> None:
    waits, other = scene.receive(1), scene.receive(2)
    scene.peers[1].write(pack(GOODBYE))
    scene.peers[1].end()
    read_all(scene, 1)
    assert isinstance(error_of(waits), ChannelClosedError)
    assert not other.is_done
    assert scene.table.links[1].error is not None
    assert scene.table.links[1].goodbye == Left(1)


def test_a_collective_that_needs_nothing_more_of_a_peer_that_left_continues(scene: TableScene) -> None:
    other = scene.receive(2, call=CALL)
    scene.peers[1].write(pack(GOODBYE))
    scene.peers[1].end()
    read_all(scene, 1)
    assert not other.is_done
    assert scene.table.failed_comms == {}


@pytest.mark.parametrize("goodbye", [b"", pack(GOODBYE, flags=HAS_ENDED)], ids=["died", "ended without a close"])
def test_a_collective_that_needs_a_lost_peer_fails_and_its_members_are_told(scene: TableScene, goodbye: bytes) -> None:
    job = scene.receive(1, call=CALL, comm_id=7)
    scene.peers[1].write(goodbye)
    scene.peers[1].end()
    read_all(scene, 1)
    error = error_of(job)
    assert isinstance(error, PeerLostError)
    assert error.peer == 1
    for peer in (2, 3):
        [(header, payload)] = scene.peers[peer].frames()
        told = abort_reasons.decode(payload)
        assert (header.kind, header.comm_id) == (ABORT, 7)
        assert isinstance(told, Lost)
        assert (told.peer, told.by) == (1, 0)


def test_a_lost_peer_ends_collectives_of_which_it_is_a_member_though_they_wait_for_another(scene: TableScene) -> None:
    job, message = scene.receive(2, call=CALL), scene.receive(3)
    scene.table.lose(scene.table.links[1], lambda: PeerLostError(1, "silent"), "silent")
    assert isinstance(error_of(job), PeerLostError)
    assert not message.is_done
    assert scene.table.trouble_of(Envelope(9, 0, 1, CALL, frozenset((0, 1)))) is not None
    assert scene.table.trouble_of(Envelope(9, 0, 1, CALL, frozenset((0, 2)))) is None


def test_a_failed_communicator_is_told_once_and_its_first_reason_stays(scene: TableScene) -> None:
    first = Lost(3, "it died", 2)
    scene.table.fail_comm(5, frozenset(range(4)), first)
    scene.table.fail_comm(5, frozenset(range(4)), Left(2))
    assert scene.table.failed_comms == {5: first}
    assert [scene.peers[peer].kinds() for peer in (1, 2, 3)] == [[ABORT]] * 3
    later = scene.receive(1, call=CALL, comm_id=5)
    assert isinstance(error_of(later), PeerLostError), "what is posted later fails at once"
    assert not scene.receive(1, call=CALL, comm_id=6).is_done


def test_a_message_that_times_out_leaves_the_link_usable(scene: TableScene) -> None:
    job = scene.receive(1, timeout=3)
    scene.table.time_out(job)
    error = error_of(job)
    assert isinstance(error, OperationTimeoutError)
    assert (error.peer, error.timeout) == (1, 3)
    assert scene.table.links[1].error is None
    assert scene.table.failed_comms == {}


def test_a_collective_that_times_out_fails_for_all_its_members(scene: TableScene) -> None:
    job = scene.receive(1, call=CALL, comm_id=4, timeout=3)
    scene.table.time_out(job)
    assert isinstance(error_of(job), OperationTimeoutError)
    assert scene.peers[3].kinds() == [ABORT]


def test_another_call_fails_the_communicator_with_what_each_side_called(scene: TableScene) -> None:
    job = scene.receive(1, call=CALL)
    scene.peers[1].write(pack(DATA, operation=1, call=OTHER, length=1, total=1), b"x")
    read_all(scene, 1)
    error = error_of(job)
    assert isinstance(error, CollectiveMismatchError)
    assert error.peer == 1


def test_an_abort_ends_everything_and_is_passed_on_to_the_others(scene: TableScene) -> None:
    jobs = [scene.receive(peer) for peer in (1, 2)]
    why = abort_reasons.encode(Aborted(1, "enough"))
    scene.peers[1].write(pack(ABORT, length=len(why)), why)
    read_all(scene, 1)
    assert all(isinstance(error_of(job), AbortedError) for job in jobs)
    assert scene.peers[1].kinds() == []
    assert scene.peers[2].kinds() == [ABORT]


def test_garbage_ends_its_link_only(scene: TableScene) -> None:
    bad, good = scene.receive(1), scene.receive(2)
    scene.peers[1].write(bytes(64))
    read_all(scene, 1)
    error = error_of(bad)
    assert isinstance(error, ProtocolError)
    assert error.peer == 1
    assert not good.is_done


def test_a_wake_up_and_what_a_peer_waits_in_end_nothing(scene: TableScene) -> None:
    job = scene.receive(1, call=CALL)
    scene.peers[1].write(pack(WAKE_UP), pack(WAITING, comm_id=8, operation=3, call=OTHER))
    read_all(scene, 1)
    assert not job.is_done
    assert scene.table.links[1].waits_in == {8: (3, OTHER)}
    assert not scene.table.has_trouble


def test_a_message_that_wants_a_clear_to_send_gets_it_when_its_receive_is_posted(scene: TableScene) -> None:
    scene.peers[1].say(b"x", is_rendezvous=True)
    read_all(scene, 1)
    assert scene.peers[1].kinds() == []
    assert scene.receive(1).is_done
    assert scene.peers[1].kinds() == [CLEAR_TO_SEND]


def test_a_full_inbox_fails_what_waits_behind_it_when_the_table_looks(scene: TableScene) -> None:
    job, other = scene.receive(1), scene.receive(2)
    for _ in range(4):
        scene.peers[1].say(bytes(1 << 18), tag=7)
        read_all(scene, 1)
    scene.table.update_watch(scene.table.links[1])
    assert isinstance(error_of(job), InboxFullError)
    assert not other.is_done
    assert scene.table.links[1].error is None


def test_a_drop_closes_without_a_word(scene: TableScene) -> None:
    job = scene.receive(1)
    scene.table.drop(lambda: ChannelClosedError("killed"))
    assert isinstance(error_of(job), ChannelClosedError)
    assert all(peer.kinds() == [] for peer in scene.peers.values())
    assert all(link.error is not None for link in scene.table.links.values())


def test_a_close_says_goodbye_and_may_be_repeated(scene: TableScene) -> None:
    job = scene.receive(1)
    for peer in scene.peers.values():
        peer.write(pack(GOODBYE))
    scene.table.close(linger=0.0)
    scene.table.close()
    assert isinstance(error_of(job), ChannelClosedError)
    assert all(peer.kinds() == [GOODBYE] for peer in scene.peers.values())
    assert scene.table.is_closed
