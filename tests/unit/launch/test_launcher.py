"""Signals come to the launcher's queue, in order, and only inside the block."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from ringfort.launch.launcher import SIGNALS, signals_to


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_are_passed_on_in_order_and_handlers_come_back() -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    seen: list[signal.Signals] = []
    with signals_to(seen.append):
        for number in SIGNALS:
            signal.raise_signal(number)
    assert seen == list(SIGNALS)
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_what_was_ignored_stays_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    seen: list[signal.Signals] = []
    with signals_to(seen.append):
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert seen == []
