"""SIGTERM and Ctrl-C let a member finish its step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from ringfort.training.elastic.leaving import LeaveOnSignal


def test_the_first_signal_is_kept_until_the_step_is_over_and_the_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    asked = list[str]()
    signals = LeaveOnSignal(lambda name: not asked.append(name))
    signals.install()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked == ["SIGTERM"]
    finally:
        signals.restore()
        signals.restore()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    with pytest.raises(SystemExit) as caught:
        signals.act()
    assert caught.value.code == 143


def test_a_second_ctrl_c_and_one_with_nothing_to_finish_act_at_once() -> None:
    for answers in ([True, True], [False]):
        left = list(answers)
        signals = LeaveOnSignal(lambda _, left=left: left.pop(0))
        signals.install()
        try:
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                for _ in answers:
                    os.kill(os.getpid(), signal.SIGINT)
        finally:
            signals.restore()


def test_handlers_of_the_program_and_other_threads_are_left_alone() -> None:
    mine, before = (lambda *_: None), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, mine)
    try:
        signals = LeaveOnSignal(lambda _: True)
        thread = threading.Thread(target=signals.install)
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
        signals.install()
        assert signal.getsignal(signal.SIGTERM) is mine
        signals.restore()
        assert signal.getsignal(signal.SIGTERM) is mine
        signals.act()
    finally:
        signal.signal(signal.SIGTERM, before)


FORKING = """
import os, signal
from ringfort.training.elastic.leaving import LeaveOnSignal

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # so a child begins after it was signalled
asked = []
signals = LeaveOnSignal(lambda name: not asked.append(name))
signals.install()
for number in [signal.SIGTERM] * 20:
    if not (child := os.fork()):
        signal.pause()
        os._exit(0)
    os.kill(child, number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
os.kill(os.getpid(), signal.SIGTERM)
assert asked == ["SIGTERM"]
"""


def test_a_child_that_is_signalled_before_it_begins_ends_and_the_parent_still_finishes_its_step() -> None:
    subprocess.run([sys.executable, "-c", FORKING], check=True, timeout=60)
