"""How a program leaves a run: signals that ask it to end, after which the member finishes its step first and leaves
after the seal; and a `break` or an error in its loop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Final

from ringfort.transport.locks import Signal, Thread

_ASKED: Final = (signal.SIGTERM, signal.SIGINT)
_DEFAULTS: Final = (signal.SIG_DFL, signal.default_int_handler)
_WORD: Final = 0.2
"""Seconds that an error in the loop may take to reach the end of the program's `with` block."""


class LeaveOnSignal:
    """Takes SIGTERM and the first Ctrl-C while it is installed. A second signal acts at once.

    Only in the main thread, which alone may set handlers, and only for signals that the program does not handle itself.
    A forked child, such as a worker of a pool, is no member: it has the handlers of before.
    """

    _installed: ClassVar[set[LeaveOnSignal]] = set()
    _mask: ClassVar[threading.local] = threading.local()
    """The signals that a thread which forks had blocked before."""

    def __init__(self, asked: Callable[[str], bool]) -> None:
        """`asked` is called in the handler with the name of the signal. It returns False if there is nothing to finish:
        then the signal acts at once."""
        self._asked = asked
        self.got: int | None = None
        """The signal that came."""
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Take the signals from now on."""
        if threading.current_thread() is threading.main_thread():
            for number in _ASKED:
                before = signal.getsignal(number)
                if before in _DEFAULTS:
                    self._before[number] = before
                    signal.signal(number, self._handle)
            self._installed.add(self)

    def restore(self) -> None:
        """Put the handlers back that were there before. Idempotent."""
        if threading.current_thread() is threading.main_thread():
            self._installed.discard(self)
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:  # the program may have set its own since
                    signal.signal(number, before)
            self._before = {}

    def take(self, number: int) -> None:
        """The signal came to another process of this member: `act` does the same here."""
        if self.got is None:
            self.got = number

    def act(self) -> None:
        """Do now what the signal that came would have done: raise `KeyboardInterrupt`, or `SystemExit` with 143. Do
        nothing if none came, or if that was done already."""
        got, self.got = self.got, None
        if got == signal.SIGINT:
            raise KeyboardInterrupt
        if got is not None:
            raise SystemExit(128 + got)

    def _handle(self, number: int, frame: Any) -> None:
        is_second, self.got = self.got is not None, number
        if is_second or not self._asked(signal.Signals(number).name):
            self.act()

    # A forked child begins with the handlers of its parent, and CPython drops what comes before it runs Python. So a
    # pool that ended its workers at once waited for ever for one that had not begun. Signals now wait for the end of
    # the fork, and find the handlers of before in the child.

    @classmethod
    def before_fork(cls) -> None:
        """Keep the signals from the thread that forks, and so from its child."""
        cls._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKED) if cls._installed else None

    @classmethod
    def after_in_parent(cls) -> None:
        """Let the signals come again."""
        if (mask := getattr(cls._mask, "before", None)) is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @classmethod
    def after_in_child(cls) -> None:
        """Put the handlers back, then let the signals come."""
        for one in tuple(cls._installed):
            one.restore()
        cls.after_in_parent()


os.register_at_fork(
    before=LeaveOnSignal.before_fork,
    after_in_parent=LeaveOnSignal.after_in_parent,
    after_in_child=LeaveOnSignal.after_in_child,
)


class Farewell:
    """Leaves the run a moment after the program has left the loop.

    When a loop ends by a `break` or by an error, its generator is closed, and cannot know which it was. The block
    `with run:` is told, and ends at once after an error: so the others hear what has happened. After a `break` the
    program may go on for long, and the others would wait for it.
    """

    _pending: ClassVar[set[Farewell]] = set()

    def __init__(self, leave: Callable[[], None]) -> None:
        """Call `leave` in a thread, unless `cancel` comes first."""
        self._leave = leave
        self._cancelled = Signal()
        self._pending.add(self)
        Thread(self._run, name="ringfort-farewell").start()

    def cancel(self) -> None:
        """The program has left."""
        self._pending.discard(self)
        self._cancelled.send()

    @classmethod
    def hurry(cls) -> None:
        """Leave all runs that the program has left the loop of. A run that it begins now may be the same one, and would
        take this program for one that is still at work in it."""
        for one in tuple(cls._pending):
            one._leave()

    def _run(self) -> None:
        try:
            if not self._cancelled.wait(_WORD):
                self._leave()
        finally:
            self._pending.discard(self)
