"""Disks that are slow or full: a promise takes effect when it is on the disk, and the peer goes on meanwhile."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ringfort.cluster.core.events import DiskTrouble, Instruction, Notify, Persist, Send, Waiting
from ringfort.cluster.core.peer_messages import Accept, Beat, Epoch, Lead, Member, Propose, Reject, Term, Votes
from ringfort.cluster.net.durable_votes import DurableVotes
from ringfort.testing.network import SimulatedNetwork, SimulatedPeer
from tests.unit.cluster.core.test_peer import LINE, Bench, sent

EPOCH = Epoch(3, "n0.a", (Member("n0.a"), Member("n1.b", "host1")), (), LINE)
FULL = os.strerror(errno.ENOSPC)


def network(hosts: int, told: list[str] | None = None) -> SimulatedNetwork:
    def observe(peer: SimulatedPeer, instruction: Instruction) -> None:
        if told is not None and isinstance(instruction, Notify) and isinstance(instruction.event, Waiting):
            told.append(f"host{peer.host}: {instruction.event.why}")

    made = SimulatedNetwork(seed=8, hosts=hosts, observer=observe)
    for host in range(hosts):
        made.start(host)
    return made


@pytest.mark.parametrize("slow", [[0], [0, 1, 2]])
def test_with_slow_disks_a_cluster_forms_and_nobody_is_lost(slow: list[int]) -> None:
    net = network(3)
    for host in slow:
        net.hurt_disk(host, 2.5)
    net.run_until(25.0)
    assert net.agreed
    assert all(len(peer.core.sees) == 2 for peer in net.alive)
    epoch = net.alive[0].core.epoch
    net.run_until(40.0)  # and it stays as it is
    assert net.agreed
    assert net.alive[0].core.epoch == epoch


def test_a_peer_whose_disk_is_full_keeps_the_others_waiting_in_words_until_there_is_room() -> None:
    told: list[str] = []
    net = network(3, told)
    net.hurt_disk(1, why=f"its disk fails: {FULL}")
    net.run_until(10.0)
    assert not net.agreed
    assert net.peers[1].votes == Votes()
    assert net.peers[1].core.voter.votes == Votes()
    assert any(FULL in why for why in told), told
    net.hurt_disk(1)
    net.run_until(13.0)
    assert net.agreed


@pytest.fixture
def proposed() -> Bench:
    """The core of `n1.b`, which was just asked to accept `EPOCH`; its disk has not done anything yet."""
    bench = Bench()
    bench.writes = False
    bench.meet(1, "n0.a")
    bench.say(1, Lead(Term(1, "n0.a")), Propose(Term(1, "n0.a"), EPOCH))
    return bench


def promise(bench: Bench) -> Votes:
    return next(i.votes for i in bench.out if isinstance(i, Persist))


def test_a_promise_is_given_when_it_is_on_the_disk_and_heartbeats_go_on_until_then(proposed: Bench) -> None:
    bench = proposed
    out = bench.wait(1.5, 1)
    assert bench.core.voter.votes == Votes()
    assert sum(isinstance(i, Send) and isinstance(i.message, Beat) for i in out) >= 5
    assert not any(isinstance(message, (Accept, Reject)) for message in sent(bench.out, 1))
    assert Accept(3) in sent(bench.core.persisted(bench.now, promise(bench)), 1)
    assert bench.core.voter.votes == promise(bench) == Votes(3, None, (EPOCH,))


def test_a_promise_that_cannot_be_written_is_not_given(proposed: Bench) -> None:
    bench = proposed
    out = bench.core.persisted(bench.now, promise(bench), FULL)
    assert Reject(3, FULL) in sent(out, 1)
    assert bench.core.voter.votes == Votes()


def test_a_peer_that_is_still_writing_promises_nothing_else(proposed: Bench) -> None:
    bench = proposed
    later = Epoch(4, "n0.a", EPOCH.members, (), LINE)
    (answer,) = [m for m in sent(bench.say(1, Propose(Term(1, "n0.a"), later)), 1) if isinstance(m, Reject)]
    assert "my disk is slow" in answer.why


def test_what_became_unlawful_while_the_disk_was_at_work_is_refused(proposed: Bench) -> None:
    bench = proposed
    bench.do(bench.core.hold(bench.now, True))
    bench.do(bench.core.closed(bench.now, 1, "it broke"))
    out = bench.core.persisted(bench.now, promise(bench))
    assert not sent(out, 1)
    assert bench.core.voter.votes == Votes()


# --- the file ---------------------------------------------------------------------------------------------------------

FIRST, SECOND = Votes(3, None, (EPOCH,)), Votes(4, EPOCH)


def reread(home: Path) -> list[Votes]:
    other = DurableVotes(home, "net", "n1.other")
    other.open()
    try:
        return other.recalled()
    finally:
        other.close()


@pytest.mark.parametrize("fails_at", ["write", "short write", "fsync"])
def test_a_write_that_fails_leaves_the_promise_before_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    store = DurableVotes(home, "net", "n1.b")
    store.open()
    store.write(FIRST)
    before = reread(home)
    assert before != []
    write = os.pwrite
    with monkeypatch.context() as patched:
        if fails_at == "write":
            patched.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, FULL)))
        elif fails_at == "short write":
            patched.setattr(os, "pwrite", lambda handle, data, at: write(handle, data[:20], at))
        else:
            patched.setattr(store, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
        with pytest.raises(OSError, match=r"No space|I/O"):
            store.write(SECOND)
    if fails_at != "fsync":  # where the kernel took it and the disk did not, either may be there
        assert reread(home) == before
    store.write(SECOND)
    assert reread(home) not in ([], before)
    store.close()


def test_the_words_for_a_full_disk_name_the_file_and_what_to_do() -> None:
    words = str(DiskTrouble("/home/me/.ringfort/votes/x", FULL))
    assert "/home/me/.ringfort/votes/x: No space left on device" in words
    assert "RINGFORT_HOME" in words
