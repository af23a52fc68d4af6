"""What a process has promised outlives it, and nobody vouches for one that lives."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from ringfort.cluster.messages import Epoch, Member, Standing
from ringfort.cluster.standings import FOLDER, KEPT_FOR, MAX_VOUCHED, StandingStore
from ringfort.errors import IdentityError

PROMISE = Standing(7, Epoch(7, "node.1", (Member("node.1"), Member("other.2")), (), ("node.1#7",)))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    return folder


def store(home: Path, peer: str, network: str = "net") -> StandingStore:
    made = StandingStore(home, network, peer)
    made.open()
    return made


def test_nobody_vouches_for_a_process_that_lives(home: Path) -> None:
    one, two = store(home, "node.1"), store(home, "node.2")
    one.write(PROMISE)
    assert two.dead() == []
    one.close(forget=False)
    assert two.dead() == [("node.1", PROMISE)]
    two.close(forget=True)


def test_one_that_is_just_coming_is_not_taken_for_one_that_has_ended(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under load, when the machine turns to another process of the node right after the file was made."""
    one, lock = store(home, "node.1"), fcntl.flock
    looked: list[object] = []

    def turned_away(handle: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        looked.append(one.dead())
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", turned_away)
    two = store(home, "node.2")
    assert looked == [[]]
    assert one.dead() == []
    two.close(forget=False)
    assert one.dead() == [("node.2", Standing())]
    one.close(forget=True)
    assert [path.name for path in (home / FOLDER).iterdir()] == ["net-node.2"]


def test_the_last_promise_counts_though_it_is_shorter(home: Path) -> None:
    one, two = store(home, "node.1"), store(home, "node.2")
    one.write(PROMISE)
    one.write(Standing(8))
    one.close(forget=False)
    assert two.dead() == [("node.1", Standing(8))]
    two.close(forget=True)


def test_one_that_ended_before_it_promised_anything_promised_nothing(home: Path) -> None:
    store(home, "node.1").close(forget=False)
    two = store(home, "node.2")
    assert two.dead() == [("node.1", Standing())]
    two.close(forget=True)


def test_other_nodes_and_other_clusters_are_not_vouched_for(home: Path) -> None:
    for peer, network in (("else.1", "net"), ("node.1", "other")):
        store(home, peer, network).close(forget=False)
    two = store(home, "node.2")
    assert two.dead() == []
    two.close(forget=True)


def test_what_is_forgotten_or_old_or_damaged_is_not_vouched_for(home: Path) -> None:
    store(home, "node.1").close(forget=True)
    for peer in ("node.2", "node.3"):
        old = store(home, peer)
        old.write(PROMISE)
        old.close(forget=False)
    path = home / FOLDER / "net-node.2"
    before = path.stat().st_mtime - KEPT_FOR - 1
    os.utime(path, (before, before))
    (home / FOLDER / "net-node.3").write_bytes(b"\xff" * 100)
    mine = store(home, "node.4")
    assert mine.dead() == []
    assert not path.exists()
    mine.close(forget=True)
    assert not (home / FOLDER / "net-node.4").exists()


def test_only_the_latest_are_vouched_for(home: Path) -> None:
    for number in range(MAX_VOUCHED + 5):
        store(home, f"node.{number}").close(forget=False)
        path = home / FOLDER / f"net-node.{number}"
        when = path.stat().st_mtime - 1000 + number
        os.utime(path, (when, when))
    mine = store(home, "node.me")
    assert [peer for peer, _ in mine.dead()] == [f"node.{n}" for n in reversed(range(5, MAX_VOUCHED + 5))]
    mine.close(forget=True)


def test_a_folder_that_others_may_use_is_refused_with_the_command_that_mends_it(home: Path) -> None:
    (home / FOLDER).mkdir(mode=0o755)
    (home / FOLDER).chmod(0o755)
    with pytest.raises(IdentityError, match="chmod 700"):
        store(home, "node.1")
