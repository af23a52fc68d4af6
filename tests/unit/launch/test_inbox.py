"""Signals and events come to one place, in order, and wake who waits."""

from __future__ import annotations

import select
import signal
from collections.abc import Iterator
from contextlib import closing

import pytest

from ringfort.cluster.core.events import PeerLost
from ringfort.launch.inbox import SIGNALS, Inbox, signals_to


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_come_to_the_inbox_and_wake_who_waits() -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with closing(Inbox()) as inbox:
        assert select.select([inbox.reader], [], [], 0)[0] == []
        with signals_to(inbox):
            for number in SIGNALS:
                signal.raise_signal(number)
        assert select.select([inbox.reader], [], [], 0)[0] == [inbox.reader]
        assert list(inbox.items()) == list(SIGNALS)
        assert select.select([inbox.reader], [], [], 0)[0] == []
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_what_was_ignored_stays_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with closing(Inbox()) as inbox, signals_to(inbox):
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert list(inbox.items()) == []


def test_more_than_a_pipe_holds_waits_in_order() -> None:
    with closing(Inbox()) as inbox:
        many = [PeerLost("n1.1", str(number), died=False) for number in range(100_000)]
        for item in many:
            inbox.put(item)
        assert list(inbox.items()) == many
