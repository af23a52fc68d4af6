"""Shared memory: who can open it, who is refused, and that nothing of it stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringfort.errors import TransportError
from ringfort.transport import segment as module
from ringfort.transport.segment import PAGE, Offer, Segment

SIZE = 3 * PAGE

needs_memfd = pytest.mark.skipif(not module._HAS_MEMFD, reason="only Linux has memory without a name")


@pytest.fixture(params=["memory", "file"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Linux's way and everybody else's."""
    if request.param == "file":
        monkeypatch.setattr(module, "_HAS_MEMFD", False)
        monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    elif not module._HAS_MEMFD:
        pytest.skip("only Linux has memory without a name")
    return request.param


def test_what_one_writes_the_other_reads(kind: str) -> None:
    ours = Segment.create(SIZE)
    theirs = Segment.open(ours.offer, SIZE)
    ours.memory[5:8] = b"abc"
    assert bytes(theirs.memory[4:9]) == b"\0abc\0"
    assert len(ours.memory) == len(theirs.memory) == SIZE
    theirs.close()
    ours.close()


def test_once_settled_nobody_else_can_open_it_and_nothing_is_left(kind: str, tmp_path: Path) -> None:
    ours = Segment.create(SIZE)
    theirs = Segment.open(ours.offer, SIZE)
    ours.settle()
    assert not list(tmp_path.iterdir())
    with pytest.raises(TransportError, match="Cannot open the shared memory of another process"):
        Segment.open(ours.offer, SIZE)
    ours.memory[0] = 7
    assert theirs.memory[0] == 7
    for segment in (ours, theirs):
        segment.close()
        segment.close()


@needs_memfd
def test_memory_without_a_name_is_for_its_owner_alone() -> None:
    ours = Segment.create(SIZE)
    assert Path(ours.offer.path).stat().st_mode & 0o7777 == 0o600
    ours.close()


def test_a_file_is_for_its_owner_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_HAS_MEMFD", False)
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    ours = Segment.create(SIZE)
    path = Path(ours.offer.path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    ours.close()


@needs_memfd
def test_it_ends_with_the_process_that_made_it() -> None:
    code = (
        "import os\nfrom ringfort.transport.segment import Segment\n"
        f"segment = Segment.create({SIZE})\nprint(segment.offer.path, flush=True)\nos.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert killed.returncode == -9
    assert not Path(killed.stdout.strip()).exists()


def test_another_token_another_size_or_another_file_is_refused(kind: str, tmp_path: Path) -> None:
    ours = Segment.create(SIZE)
    path, size, token = ours.offer.path, ours.offer.size, ours.offer.token
    other = tmp_path / "other"
    other.write_bytes(bytes(size))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for offer, asked, why in (
        (Offer(path, size, bytes(32)), SIZE, "not the one"),
        (Offer(path, size, token[:-1]), SIZE, "not the one"),
        (Offer(path, size + 1, token), SIZE, "Cannot open the shared memory of another process"),
        (ours.offer, SIZE + 1, "Cannot open the shared memory of another process"),
        (
            Offer(str(other), size, token),
            SIZE,
            "not the one" if kind == "file" else "Cannot open the shared memory of another process",
        ),
        (
            Offer(str(pipe), size, token),
            SIZE,
            "not a shared-memory file" if kind == "memory" else "not the file that was offered",
        ),
        (Offer(str(tmp_path), size, token), SIZE, "Cannot open the shared memory of another process"),
        (Offer(str(tmp_path / "missing"), size, token), SIZE, "Cannot open the shared memory of another process"),
        (Offer("a\0b", size, token), SIZE, "Cannot open the shared memory of another process"),
    ):
        with pytest.raises(TransportError, match=why):
            Segment.open(offer, asked)
    ours.close()


@needs_memfd
def test_nobody_can_take_the_memory_away_from_the_others() -> None:
    ours = Segment.create(SIZE)
    with Path(ours.offer.path).open("r+b") as file, pytest.raises(PermissionError):
        file.truncate(0)
    ours.close()


def test_memory_that_cannot_be_had_is_said_in_words(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "ftruncate", full)
    with pytest.raises(TransportError, match="No space left"):
        Segment.create(SIZE)
