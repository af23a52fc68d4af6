"""Children: what they write is read whole, they end together, and nothing that they started outlives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing

import psutil
import pytest

from ringfort.errors import DistributedError
from ringfort.launch.processes import Children

LEAVES_A_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
"""
"""A program that ends, or fails, and leaves a process behind that holds its standard output open."""

HOLDS_A_CHILD = LEAVES_A_CHILD + "import signal; signal.pause()"

LAUNCHER = """
import sys
from contextlib import closing
from ringfort.launch.processes import Children
with closing(Children()) as children:
    children.start(0, [sys.executable, "-c", sys.argv[1]], {})
    while True:
        for output in children.poll():
            for line in output.lines():
                print(output.child.process.pid, line.decode(), flush=True)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def collect(children: Children) -> list[tuple[int, bool, bytes]]:
    """Until all have ended: (child, is_error, line)."""
    found: list[tuple[int, bool, bytes]] = []
    while not children.is_over:
        found += [(output.child.number, output.is_error, line) for output in children.poll() for line in output.lines()]
    return found


def wait_until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_lines_are_whole_and_of_the_stream_they_were_written_to() -> None:
    code = "import sys; print('x' * 200_000); print('to error', file=sys.stderr); sys.stdout.write('no end')"
    with closing(Children()) as children:
        children.start(7, python(code), {})
        found = collect(children)
    assert sorted(found) == [(7, False, b"no end"), (7, False, b"x" * 200_000), (7, True, b"to error")]


def test_a_secret_among_the_variables_is_in_no_command_line() -> None:
    with closing(Children()) as children:
        child = children.start(0, python("pass"), {"SECRET": "hunter2"})
        assert child.process.args == python("pass")  # all that `ps` could ever show
        collect(children)


def test_variables_are_added_to_what_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "1")
    with closing(Children()) as children:
        children.start(0, python("import os; print(os.environ['OURS'], os.environ['NEW'])"), {"NEW": "a b=c"})
        assert collect(children) == [(0, False, b"1 a b=c")]


def test_the_last_words_of_one_that_failed_are_read_before_it_counts_as_failed() -> None:
    with closing(Children()) as children:
        children.start(0, python("print('word\\n' * 100_000 + 'last'); raise SystemExit(3)"), {})
        lines: list[bytes] = []
        while not children.failed:
            lines += [line for output in children.poll() for line in output.lines()]
        assert children.failed[0].exit_code == 3
        assert lines[-1] == b"last"


@pytest.mark.parametrize("end", ["", "raise SystemExit(1)"], ids=["ends", "fails"])
def test_what_a_child_started_ends_with_it(end: str) -> None:
    with closing(Children()) as children:
        children.start(0, python(LEAVES_A_CHILD + end), {})
        [(_, _, pid)] = collect(children)
        wait_until(lambda: is_gone(int(pid)))


def test_closing_ends_what_the_children_started_too() -> None:
    with closing(Children()) as children:
        children.start(0, python(HOLDS_A_CHILD), {})
        lines: list[bytes] = []
        while not lines:
            lines = [line for output in children.poll() for line in output.lines()]
    wait_until(lambda: is_gone(int(lines[0])))


def test_one_that_ignores_sigterm_is_killed_after_its_grace() -> None:
    with closing(Children()) as children:
        code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); signal.pause()"
        child = children.start(0, python(code), {})
        while not children.poll():
            pass
        list(children.finish(grace=0.1))
        assert child.exit_code == -signal.SIGKILL


def test_what_is_written_while_ending_is_read() -> None:
    code = "import signal; signal.signal(15, lambda *_: exit(print('bye'))); print(1, flush=True); signal.pause()"
    with closing(Children()) as children:
        children.start(0, python(code), {})
        while not children.poll():
            pass
        assert [line for output in children.finish(grace=10) for line in output.lines()] == [b"bye"]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_parent_that_dies_leaves_nobody_behind(signum: int) -> None:
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, HOLDS_A_CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(is_gone(pid) for pid in pids)
        os.kill(parent.pid, signum)
        wait_until(lambda: all(is_gone(pid) for pid in pids))


def test_a_killed_reaper_disturbs_nobody() -> None:
    with closing(Children()) as children:
        children.start(0, python("input()"), {}, stdin=subprocess.PIPE)
        [reaper] = [child for child in psutil.Process().children() if "reaper.py" in " ".join(child.cmdline())]
        reaper.kill()
        stdin = children.children[0].process.stdin
        assert stdin is not None
        stdin.write(b"go on\n")
        stdin.close()
        assert collect(children) == []
        assert not children.failed


def test_one_that_is_over_can_be_forgotten_and_its_number_taken_by_another() -> None:
    with closing(Children()) as children:
        first = children.start(0, python("import sys; sys.exit(3)"), {})
        collect(children)
        children.forget(first)
        assert (children.children, children.failed, children.is_over) == ([], [], True)
        assert children.poll(0.0) == []
        children.start(0, python("print('second')"), {})
        assert collect(children) == [(0, False, b"second")]


def test_closing_twice_is_closing() -> None:
    children = Children()
    children.start(0, python("input()"), {})
    children.close()
    children.close()
    assert children.is_over


def test_what_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with closing(Children()) as children, pytest.raises(DistributedError, match="cannot start"):
        children.start(0, ["/no/such/python"], {})
