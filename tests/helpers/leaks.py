"""What a test may leave behind: sockets, threads, child processes and shared memory, seen from inside the process."""

from __future__ import annotations

import gc
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest

GRACE = 1.0
"""Seconds. A thread that was joined, a socket that was closed and a child that was killed end a moment later than the
call that ended them; longer than this is a leak."""

POLL = 0.005
"""Seconds between two looks while something is suspected."""

DESCRIPTORS = Path("/dev/fd")
TASKS = Path("/proc/self/task")
SHARED_MEMORY = Path("/dev/shm")
OTHER_PROGRAMS = f"ringfort-{os.getuid()}"
"""Where programs of this user have their traces: whoever runs the demo beside the tests creates it. What tests start
has a folder of its own (tests/conftest.py)."""

Resources = Mapping[tuple[str, int | str], str]
"""What is held, by kind and identity, each in words."""


def snapshot() -> Resources:
    """Everything of the four kinds that this process holds now, and shared memory of whoever has made it. Takes well
    under a millisecond."""
    return dict((*_sockets(), *_threads(), *_children(), *_shared_memory()))


def left_behind(before: Resources, grace: float = GRACE) -> list[str]:
    """What has come since `before` and stays for `grace` seconds, in words."""
    left = {key: words for key, words in snapshot().items() if key not in before and not _is_anothers(*key)}
    if left:
        gc.collect()  # a socket in a reference cycle is closed by this; its ResourceWarning fails the test by itself
    deadline = time.monotonic() + grace
    while left and time.monotonic() < deadline:
        time.sleep(POLL)
        now = snapshot()
        # Only what was there when the test ended, and stays.
        left = {key: words for key, words in left.items() if key in now}
    return sorted(left.values())


@contextmanager
def no_leaks(whose: str) -> Iterator[None]:
    """Fails the test if the block leaves anything behind."""
    before = snapshot()
    yield
    left = left_behind(before)
    if left:
        pytest.fail(f"{whose} left behind: " + "; ".join(left), pytrace=False)


def _sockets() -> Iterator[tuple[tuple[str, int | str], str]]:
    for entry in DESCRIPTORS.iterdir():
        try:
            status = os.fstat(int(entry.name))
        except OSError:  # the descriptor of the listing itself, closed since
            continue
        if stat.S_ISSOCK(status.st_mode):
            yield ("socket", f"{entry.name}/{status.st_ino}"), f"socket (descriptor {entry.name})"


def _threads() -> Iterator[tuple[tuple[str, int | str], str]]:
    for thread in threading.enumerate():
        # Python did not start a dummy (a thread of torch's that once ran Python code), so nobody can end it.
        if not isinstance(thread, threading._DummyThread):
            yield ("thread", id(thread)), f"{'daemon ' if thread.daemon else ''}thread {thread.name!r}"


def _children() -> Iterator[tuple[tuple[str, int | str], str]]:
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)  # multiprocessing's own; lives as long as we do
    for child in _child_numbers():
        if child != tracker:
            yield ("process", child), f"child process {child}"


def _child_numbers() -> list[int]:
    """The children of all threads, running or not yet waited for. Where the kernel lists them, without the cost of a
    look at all processes of the machine."""
    lists = [task / "children" for task in TASKS.glob("*")]
    if not lists or not lists[0].exists():  # macOS, or a kernel without CONFIG_PROC_CHILDREN
        return [child.pid for child in psutil.Process().children()]
    found: list[int] = []
    for path in lists:
        with suppress(OSError):  # the thread has ended since
            found += map(int, path.read_text().split())
    return found


def _shared_memory() -> Iterator[tuple[tuple[str, int | str], str]]:
    for entry in DESCRIPTORS.iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if "memfd:ringfort" in target:
            yield ("shared memory", f"{entry.name}/{entry.stat().st_ino}"), f"shared memory (descriptor {entry.name})"
    if SHARED_MEMORY.is_dir():
        for entry in SHARED_MEMORY.glob("ringfort*"):
            if entry.name == OTHER_PROGRAMS:
                continue
            yield ("shared memory", entry.name), f"shared memory {entry}"


def _is_anothers(kind: str, identity: int | str) -> bool:
    """Whether this is shared memory named for a process that runs and is neither this one nor started by it.

    To be asked of what is new only: a number is given again, so that a file which a killed process left long ago seems
    to be another's at one moment and nobody's at the next.
    """
    number = re.match(r"ringfort-[a-z-]+-(\d+)", str(identity)) if kind == "shared memory" else None
    if number is None or int(number[1]) == os.getpid():
        return False
    try:
        return all(parent.pid != os.getpid() for parent in psutil.Process(int(number[1])).parents())
    except psutil.NoSuchProcess:
        return False
