"""Signals that ask a program to end: the member finishes its step first and leaves after the seal."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Final

_ASKED: Final = (signal.SIGTERM, signal.SIGINT)
_DEFAULTS: Final = (signal.SIG_DFL, signal.default_int_handler)


class LeaveOnSignal:
    """Takes SIGTERM and the first Ctrl-C while it is installed. A second signal acts at once.

    Only in the main thread, which alone may set handlers, and only for signals that the program does not handle itself.
    """

    def __init__(self, asked: Callable[[str], bool]) -> None:
        """`asked` is called in the handler with the name of the signal. It returns False if there is nothing to finish:
        then the signal acts at once."""
        self._asked = asked
        self._got: int | None = None
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()

    def install(self) -> None:
        """Take the signals from now on."""
        if threading.current_thread() is threading.main_thread():
            for number in _ASKED:
                before = signal.getsignal(number)
                if before in _DEFAULTS:
                    self._before[number] = before
                    signal.signal(number, self._handle)

    def restore(self) -> None:
        """Put the handlers back that were there before. Idempotent; does nothing in a forked child."""
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:  # the program may have set its own since
                    signal.signal(number, before)
            self._before = {}

    def act(self) -> None:
        """Do now what the signal that came would have done: raise `KeyboardInterrupt`, or `SystemExit` with 143. Do
        nothing if none came."""
        if self._got == signal.SIGINT:
            raise KeyboardInterrupt
        if self._got is not None:
            raise SystemExit(128 + self._got)

    def _handle(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:  # a forked child, such as a worker of a data loader, is no member
            signal.signal(number, self._before.get(number, signal.SIG_DFL))
            os.kill(os.getpid(), number)
            return
        is_second, self._got = self._got is not None, number
        if is_second or not self._asked(signal.Signals(number).name):
            self.act()
