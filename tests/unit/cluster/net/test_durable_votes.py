"""What a process has promised outlives it, binds the next one, and nobody vouches for one that may live."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import shutil
import time
from pathlib import Path

import pytest

from ringfort.cluster.core.peer_messages import Epoch, Member, Votes
from ringfort.cluster.net import durable_votes
from ringfort.cluster.net.durable_votes import FOLDER, KEPT_FOR, MAX_VOUCHED, TOUCHED_EVERY, DurableVotes
from ringfort.errors import IdentityError
from ringfort.identity.hosts import HostMarks

HERE = HostMarks("this", ("card", "arena"), "boot 1")


def promise(peer: str, number: int = 7) -> Votes:
    return Votes(number, Epoch(number, peer, (Member(peer), Member("other.2")), (), ("node.1#7",)))


PROMISE = promise("node.1")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    return folder


def store(home: Path, peer: str, network: str = "net", host: HostMarks = HERE) -> DurableVotes:
    made = DurableVotes(home, network, peer, host)
    made.open()
    return made


def ended(home: Path, peer: str, votes: Votes, *, is_released: bool = False, network: str = "net") -> Path:
    """The file of a process that promised `votes` and has ended."""
    made = store(home, peer, network)
    made.write(votes)
    made.close(is_released=is_released)
    return home / FOLDER / f"{network}-{peer}"


def test_nobody_vouches_for_a_process_that_lives_but_the_next_one_keeps_to_what_it_promised(home: Path) -> None:
    one, two = store(home, "node.1"), store(home, "node.2")
    one.write(PROMISE)
    assert two.ended() == []
    assert two.recalled() == [PROMISE]
    one.close()
    assert two.ended() == [("node.1", PROMISE)]
    assert two.recalled() == [PROMISE]
    two.close()


def test_one_that_left_in_the_sight_of_all_is_vouched_for_and_binds_nobody(home: Path) -> None:
    ended(home, "node.1", PROMISE, is_released=True)
    two = store(home, "node.2")
    assert two.ended() == [("node.1", PROMISE)]
    assert two.recalled() == []
    two.close()


def test_one_that_is_just_coming_is_not_taken_for_one_that_has_ended(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under load, when the machine turns to another process of the node right after the file was made."""
    one, lock = store(home, "node.1"), fcntl.flock
    looked: list[object] = []

    def turned_away(handle: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        looked.append(one.ended())
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", turned_away)
    two = store(home, "node.2")
    assert looked == [[]]
    assert one.ended() == []
    two.write(promise("node.2"))
    two.close()
    assert one.ended() == [("node.2", promise("node.2"))]
    one.close()
    assert [path.name for path in (home / FOLDER).iterdir()] == ["net-node.2"]


def test_the_last_promise_counts_though_it_is_shorter(home: Path) -> None:
    one, two = store(home, "node.1"), store(home, "node.2")
    one.write(Votes(7, PROMISE.formed, (Epoch(8, "node.1", (Member("node.1"),) * 9, (), ("x#1",)),)))
    one.write(PROMISE)
    one.close()
    assert two.ended() == [("node.1", PROMISE)]
    two.close()


@pytest.mark.parametrize(
    "votes",
    [
        Votes(),
        Votes(7, Epoch(7, "node.1", (Member("node.1"),))),
        Votes(7, None, (Epoch(7, "node.0", (Member("node.0"), Member("other.2")), (), ("node.0#7",)),)),
    ],
    ids=["promised nothing", "was alone", "only recalled"],
)
def test_nothing_is_left_of_one_that_nobody_could_be_split_from(home: Path, votes: Votes) -> None:
    assert not ended(home, "node.1", votes).exists()
    killed = store(home, "node.1")
    killed.write(votes)
    os.close(killed._handle)
    two = store(home, "node.2")
    assert (two.ended(), two.recalled()) == ([], [])
    two.close()
    assert list((home / FOLDER).iterdir()) == []


def test_other_nodes_and_other_clusters_are_not_vouched_for(home: Path) -> None:
    for peer, network in (("else.1", "net"), ("node.1", "other")):
        ended(home, peer, promise(peer), network=network)
    two = store(home, "node.2")
    assert (two.ended(), two.recalled()) == ([], [])
    two.close()


def test_what_is_old_or_damaged_is_not_vouched_for(home: Path) -> None:
    path = ended(home, "node.2", promise("node.2"))
    before = path.stat().st_mtime - KEPT_FOR - 1
    os.utime(path, (before, before))
    for content in (b"", b"\xff", b"\xff" * 100, b"\4\0\0\0\x81\xa1a\1"):
        ended(home, "node.3", promise("node.3")).write_bytes(content)
        mine = store(home, "node.4")
        assert (mine.ended(), mine.recalled()) == ([], [])
        mine.close()
    assert not path.exists()


def test_votes_of_an_elastic_run_bind_however_old_they_are(home: Path) -> None:
    path = ended(home, "node.2", promise("node.2"))
    os.utime(path, (time.time() - 400 * KEPT_FOR,) * 2)
    mine = store(home, "node.4")
    mine.kept_for = math.inf
    assert [peer for peer, _ in mine.ended()] == ["node.2"]
    assert mine.recalled() == [promise("node.2")]
    mine.close()


def test_what_was_written_before_the_clock_was_set_is_not_taken_for_old(home: Path) -> None:
    os.utime(ended(home, "node.a", promise("node.a")), (3600, 3600))
    mine = store(home, "node.b")
    assert [peer for peer, _ in mine.ended()] == ["node.a"]
    mine.close()


def test_a_long_run_is_not_forgotten(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(durable_votes.time, "monotonic", lambda: now[0])
    one = store(home, "node.1")
    one.write(PROMISE)
    path = home / FOLDER / "net-node.1"
    os.utime(path, (0, 0))
    one.touch()
    assert path.stat().st_mtime == 0
    now[0] += TOUCHED_EVERY
    one.touch()
    assert path.stat().st_mtime > 0
    one.close()


def test_only_the_latest_are_vouched_for(home: Path) -> None:
    for number in range(MAX_VOUCHED + 5):
        path = ended(home, f"node.{number}", promise(f"node.{number}"))
        when = path.stat().st_mtime - 1000 + number
        os.utime(path, (when, when))
    mine = store(home, "node.me")
    assert [peer for peer, _ in mine.ended()] == [f"node.{n}" for n in reversed(range(5, MAX_VOUCHED + 5))]
    mine.close()


# --- files of other machines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "vouches"),
    [
        (HERE, True),
        (HostMarks("this", ("card", "dongle"), "boot 2"), True),  # restarted, with another adapter plugged in
        (HostMarks("this", ("other card",), "boot 2"), False),  # an image cloned to another machine
        (HostMarks("that", ("card",), "boot 2"), False),
        (HostMarks("this", (), "boot 2"), False),  # a container: in doubt
        (HostMarks("", (), ""), False),
    ],
)
def test_a_file_of_another_machine_vouches_for_nobody_and_is_named(
    home: Path, host: HostMarks, vouches: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = ended(home, "node.1", PROMISE)
    mine = store(home, "node.2", host=host)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert mine.ended() == ([("node.1", PROMISE)] if vouches else [])
    assert mine.recalled() == [PROMISE], "it may be this machine's: it is kept to all the same"
    assert [record.getMessage().count(str(path)) for record in caplog.records] == ([] if vouches else [2])
    mine.close()


@pytest.mark.parametrize("boot", ["boot 1", "boot 2"])
def test_a_copied_file_vouches_for_nobody(home: Path, tmp_path: Path, boot: str) -> None:
    living = store(home, "node.1")
    living.write(PROMISE)
    copy = tmp_path / "copy"
    shutil.copytree(home, copy)
    mine = store(copy, "node.2", host=HostMarks(HERE.machine, HERE.hardware, boot))
    assert mine.ended() == []
    mine.close()
    living.close()


def test_a_folder_that_others_may_use_is_refused_with_the_command_that_mends_it(home: Path) -> None:
    (home / FOLDER).mkdir(mode=0o755)
    (home / FOLDER).chmod(0o755)
    with pytest.raises(IdentityError, match="chmod 700"):
        store(home, "node.1")
