"""The progress loop: moves the leader's job to its end, serves the others, and takes up what other threads bring."""

from __future__ import annotations

import pytest

from ringfort.errors import ChannelClosedError, OperationTimeoutError
from ringfort.transport.frames import pack
from ringfort.transport.locks import Signal
from ringfort.transport.messages import Envelope, Job, Receive
from ringfort.transport.progress import Progress, Spin
from tests.helpers.background import Background
from tests.helpers.scene import TableScene, error_of


@pytest.fixture
def scene() -> TableScene:
    return TableScene(peers=2)


@pytest.fixture
def progress(scene: TableScene) -> Progress:
    return Progress(scene.table, Spin())


def unposted(scene: TableScene, src: int, tag: int = 0) -> Job:
    job = Job("recv", 5, scene.clock.now() + 5, turn=Signal())
    job.receive = Receive(memoryview(bytearray(1)), Envelope(0, tag), None)
    job.receive_link = scene.table.links[src]
    return job


def test_a_job_that_can_move_is_driven_to_its_end_without_sleeping(scene: TableScene, progress: Progress) -> None:
    job = scene.receive(1, 3)
    scene.peers[1].say(b"abc")
    progress.drive(job)
    assert job.receive is not None
    assert bytes(job.receive.into) == b"abc"
    assert scene.table.jobs == []
    assert scene.clock.now() == 0.0


def test_a_leader_that_sleeps_serves_the_jobs_of_followers(scene: TableScene, progress: Progress) -> None:
    own, follower = scene.receive(1), unposted(scene, 2)
    progress.arrivals.append(follower)
    scene.peers[2].say(b"x")
    leader = Background(progress.drive, own)
    assert follower.turn is not None
    assert follower.turn.wait(20), "a follower is woken when its job is done"
    assert follower.is_done
    assert not leader.is_over
    scene.peers[1].say(b"y")
    leader.result()


def test_a_leader_ends_at_the_deadline_of_its_job(scene: TableScene, progress: Progress) -> None:
    job = scene.receive(1, timeout=5)
    Background(progress.drive, job).wait(scene.clock).result()
    assert isinstance(error_of(job), OperationTimeoutError)


def test_what_arrives_is_taken_up_in_order_and_the_first_follower_leads_next(
    scene: TableScene, progress: Progress
) -> None:
    done: list[str] = []
    first, second = unposted(scene, 1, tag=1), unposted(scene, 1, tag=2)
    progress.arrivals.extend((lambda: done.append("one"), first, second, lambda: done.append("two")))
    assert progress.hand_over() is first.turn
    assert done == ["one", "two"]
    assert scene.table.jobs == [first, second]
    assert not progress.arrivals


def test_an_action_that_is_interrupted_is_still_there_and_one_that_fails_is_not(progress: Progress) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    def fails() -> None:
        raise ValueError("a mistake")

    progress.arrivals.append(interrupted)
    with pytest.raises(KeyboardInterrupt):
        progress.admit()
    assert list(progress.arrivals) == [interrupted]
    progress.arrivals.clear()
    progress.arrivals.append(fails)
    with pytest.raises(ValueError, match="a mistake"):
        progress.admit()
    assert not progress.arrivals


def test_nobody_leads_next_where_all_are_done(scene: TableScene, progress: Progress) -> None:
    job = unposted(scene, 1)
    scene.peers[1].write(pack(1, length=1, total=1), b"x")
    scene.table.read(scene.table.links[1])
    progress.arrivals.append(job)
    assert progress.hand_over() is None
    assert job.is_done
    assert job.turn is not None
    assert job.turn.wait(0)


def test_a_recovery_ends_what_was_posted_and_what_had_only_arrived(scene: TableScene, progress: Progress) -> None:
    posted, arrived = scene.receive(1), unposted(scene, 2)
    progress.arrivals.append(arrived)
    scene.table.drop(lambda: ChannelClosedError("interrupted"))
    progress.hand_over()
    scene.table.jobs.clear()
    assert all(isinstance(error_of(job), ChannelClosedError) for job in (posted, arrived))
    assert scene.table.jobs == []
