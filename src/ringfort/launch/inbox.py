"""`Inbox`: signals and cluster events for a launcher, in one queue that it can wait for with its ranks' output."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final

from ringfort.cluster.core.events import ClusterEvent

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals by which a user or the system asks a program to end."""


Item = signal.Signals | ClusterEvent


class Inbox:
    """A queue with a descriptor to wait for. `put` may be called from any thread and from signal handlers."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.reader, self._writer = os.pipe()
        for end in (self.reader, self._writer):
            os.set_blocking(end, False)

    def put(self, item: Item) -> None:
        """Add an item and wake the reader."""
        self._items.put(item)
        with suppress(BlockingIOError, OSError):  # full: the reader wakes anyway; closed: there is no reader
            os.write(self._writer, b"\0")

    def items(self) -> Iterator[Item]:
        """Take all items, in the order in which they came."""
        with suppress(BlockingIOError):
            os.read(self.reader, 4096)
        while True:
            try:
                yield self._items.get_nowait()
            except queue.Empty:
                return

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.reader)
        os.close(self._writer)


@contextmanager
def signals_to(inbox: Inbox) -> Generator[None, None, None]:
    """Send signals to `inbox` inside the block. Signals that were ignored stay so, as `nohup` wants."""

    def handle(number: int, _: FrameType | None) -> None:
        inbox.put(signal.Signals(number))

    before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
