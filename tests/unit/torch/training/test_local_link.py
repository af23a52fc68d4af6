"""How the local ranks of a machine work in step, over real sockets and real shared memory."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from threading import Thread

import pytest

pytest.importorskip("torch")

from ringfort.errors import LocalRankLostError, ProtocolError
from ringfort.torch.training.local_link import Follower, Leader
from ringfort.torch.training.local_orders import Clear, Collect, End
from ringfort.transport.locks import Event

WAIT = 10.0


class Machine:
    """Local rank 0 and two followers, in one process."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.leader = Leader({rank: pair[0] for rank, pair in enumerate(pairs, 1)})
        self.followers = [Follower(rank, 3, pair[1]) for rank, pair in enumerate(pairs, 1)]

    def close(self) -> None:
        self.leader.close()
        for follower in self.followers:
            follower.close()


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    made.close()


def followed(follower: Follower, heard: list[object]) -> Thread:
    """Follow in a thread up to the end."""

    def follow() -> None:
        while not isinstance(heard[-1] if heard else None, (End, LocalRankLostError)):
            try:
                heard.append(follower.next())
            except LocalRankLostError as exc:
                heard.append(exc)

    thread = Thread(target=follow)
    thread.start()
    return thread


def test_followers_get_all_orders_in_order(machine: Machine) -> None:
    heard: list[list[object]] = [[], []]
    threads = [followed(*both) for both in zip(machine.followers, heard, strict=True)]
    machine.leader.tell(Clear())
    machine.leader.tell(Collect())
    machine.leader.wait()
    assert heard == [[Clear(), Collect()]] * 2  # both have done the last one
    machine.leader.end()
    for thread in threads:
        thread.join(WAIT)
    assert heard == [[Clear(), Collect(), End()]] * 2


def test_memory_of_the_leader_is_that_of_the_followers(machine: Machine) -> None:
    mine = machine.leader.new_memory(100)
    theirs = [follower.new_memory(100) for follower in machine.followers]
    mine.memory[3] = 7
    assert [one.memory[3] for one in theirs] == [7, 7]
    machine.leader.new_memory(100)
    with pytest.raises(ProtocolError, match="Local rank 0 sent Memory in place of 50 bytes"):
        machine.followers[0].new_memory(50)
    for segment in (mine, *theirs):
        segment.close()


def test_the_leader_learns_at_once_that_a_follower_is_gone(machine: Machine) -> None:
    lost, told = Event(), list[LocalRankLostError]()

    def on_lost(error: LocalRankLostError) -> None:
        told.append(error)
        lost.set()

    machine.leader.on_lost = on_lost
    machine.followers[1].close()
    assert lost.wait(WAIT)
    assert told[0].peer == 2
    with pytest.raises(LocalRankLostError, match="Lost local rank 2"):
        machine.leader.tell(Clear())


def test_followers_learn_why_the_leader_has_left(machine: Machine) -> None:
    machine.leader.fail("its program failed with ZeroDivisionError")
    machine.leader.close()
    with pytest.raises(LocalRankLostError, match="Lost local rank 0: its program failed with ZeroDivisionError"):
        machine.followers[0].next()
    with pytest.raises(LocalRankLostError, match="Lost local rank 0"):
        machine.followers[0].next()


def test_a_follower_may_ask_to_leave_and_says_by_which_signal_it_was_asked(machine: Machine) -> None:
    asked, numbers = Event(), list[int]()

    def on_leave(number: int) -> None:
        numbers.append(number)
        if len(numbers) == 2:
            asked.set()

    machine.leader.on_leave = on_leave
    machine.followers[0].ask_to_leave()
    machine.followers[1].ask_to_leave(signal.SIGTERM)
    assert asked.wait(WAIT)
    assert sorted(numbers) == [0, signal.SIGTERM]
