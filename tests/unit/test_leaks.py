"""The leak check sees each kind of leak, and nothing in a test that cleans up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import psutil
import pytest

from tests.helpers import leaks


@contextmanager
def open_socket() -> Iterator[None]:
    with socket.socket():
        yield


@contextmanager
def running_thread() -> Iterator[None]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten", daemon=True)
    thread.start()
    yield
    end.set()
    thread.join()


@contextmanager
def running_child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


@contextmanager
def unreaped_child() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "print('bye')"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read()  # ends when the child does
        yield


@contextmanager
def shared_segment() -> Iterator[None]:
    segment = leaks.SHARED_MEMORY / f"ringfort-leak-check-{os.getpid()}"
    segment.touch()
    yield
    segment.unlink()


@pytest.mark.parametrize(
    ("hold", "words"),
    [
        (open_socket, "socket (descriptor "),
        (running_thread, "daemon thread 'forgotten'"),
        (running_child, "child process "),
        (unreaped_child, "child process "),
        pytest.param(
            shared_segment,
            "ringfort-leak-check",
            marks=pytest.mark.skipif(not leaks.SHARED_MEMORY.is_dir(), reason="shared memory has no folder here"),
        ),
    ],
)
def test_what_is_held_is_reported_until_it_is_released(
    hold: Callable[[], AbstractContextManager[None]], words: str
) -> None:
    before = leaks.snapshot()
    with hold():
        [left] = leaks.left_behind(before, grace=0)
        assert words in left
    assert leaks.left_behind(before) == []


@pytest.mark.skipif(not leaks.SHARED_MEMORY.is_dir(), reason="shared memory has no folder here")
@pytest.mark.parametrize(("owner", "is_ours"), [("parent", False), ("child", True), ("dead", True)])
def test_shared_memory_of_a_process_that_the_tests_did_not_start_is_not_theirs(owner: str, is_ours: bool) -> None:
    before = leaks.snapshot()
    with running_child() if owner == "child" else nullcontext() as child:
        number = {"parent": os.getppid(), "child": getattr(child, "pid", 0), "dead": 2**22 + 1}[owner]
        segment = leaks.SHARED_MEMORY / f"ringfort-leak-check-{number}-x{os.getpid()}"
        segment.touch()
        try:
            found = [left for left in leaks.left_behind(before, grace=0) if "shared memory" in left]
        finally:
            segment.unlink()
    assert len(found) == is_ours


@pytest.mark.skipif(not leaks.SHARED_MEMORY.is_dir(), reason="shared memory has no folder here")
def test_an_old_file_is_not_reported_when_a_process_that_had_its_number_by_chance_ends() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        stranger = psutil.Process(int(parent.stdout.readline()))
        parent.kill()  # the other is nobody's child now
        parent.wait()
        segment = leaks.SHARED_MEMORY / f"ringfort-leak-check-{stranger.pid}-x{os.getpid()}"
        segment.touch()
        try:
            before = leaks.snapshot()
            stranger.kill()
            stranger.wait()
            assert leaks.left_behind(before, grace=0) == []
        finally:
            segment.unlink()


def test_what_was_there_before_is_not_reported() -> None:
    with socket.socket(), running_thread():
        assert leaks.left_behind(leaks.snapshot(), grace=0) == []


def test_what_goes_away_within_the_grace_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = leaks.snapshot()
    late = socket.socket()
    monkeypatch.setattr(leaks.time, "sleep", lambda _seconds: late.close())
    assert leaks.left_behind(before) == []


def test_a_test_that_leaks_fails_and_says_what(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    (tmp_path / "conftest.py").write_text((root / "tests" / "conftest.py").read_text())
    (tmp_path / "test_leaky.py").write_text(
        "import socket\nheld = []\ndef test_leaky():\n    held.append(socket.socket())\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", root / "pyproject.toml", "--rootdir", tmp_path, tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert "test_leaky left behind: socket (descriptor " in run.stdout
    assert run.returncode == 1
