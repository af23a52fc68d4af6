"""What a launcher must react to beside its ranks: signals and events of the cluster, in one place it can wait for."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Final

from ringfort.cluster.core.events import ClusterEvent

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Those by which a person or a system asks a program to end."""


@dataclass(frozen=True)
class Signalled:
    """The launcher got a signal."""

    number: int

    @property
    def name(self) -> str:
        """Such as SIGINT."""
        return signal.Signals(self.number).name


Item = Signalled | ClusterEvent


class Inbox:
    """A queue with a descriptor to wait for. `put` may be called from any thread and from signal handlers."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.reader, self._writer = os.pipe()
        for end in (self.reader, self._writer):
            os.set_blocking(end, False)

    def put(self, item: Item) -> None:
        """Add an item and wake whoever waits."""
        self._items.put(item)
        with suppress(BlockingIOError, OSError):  # full: it wakes anyway. Closed: nobody waits
            os.write(self._writer, b"\0")

    def items(self) -> Iterator[Item]:
        """What is there, in the order it came."""
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
    """Meanwhile signals go to `inbox`. What was ignored stays so: `nohup` means it."""

    def handle(number: int, _: FrameType | None) -> None:
        inbox.put(Signalled(number))

    before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
