"""`SleepWatch`: hears from logind before this machine is suspended, and keeps it awake until the run was left.

logind asks over D-Bus: whoever holds a delay lock (a file descriptor) is told with the signal PrepareForSleep, and the
machine sleeps when all locks are closed, or after a few seconds. https://systemd.io/INHIBITOR_LOCKS

jeepney speaks D-Bus: it is small, pure Python and has no dependencies of its own. (The command-line tools are not
everywhere, and a lock taken through them belongs to another process.) Without it, without a system bus or without
logind, nothing happens: the machine falls silent as if its power failed.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from selectors import EVENT_READ, DefaultSelector
from typing import Any, Final

from ringfort.transport.forks import keep_from_children
from ringfort.transport.locks import Thread

_log = logging.getLogger(__name__)

_ANSWER: Final = 5.0
"""Seconds that the bus and logind may take to answer."""
_JOIN: Final = 2.0
"""Seconds that the thread may take to end."""
_LOGIND: Final = "org.freedesktop.login1"
_PATH: Final = "/org/freedesktop/login1"
_MANAGER: Final = "org.freedesktop.login1.Manager"
_SIGNAL: Final = {"type": "signal", "interface": _MANAGER, "member": "PrepareForSleep", "path": _PATH}
_PENDING: Final = 16
"""Signals that are kept while an earlier one is handled."""


class SleepWatch:
    """Calls `on_sleep` before the machine sleeps, which waits until that has returned, and `on_wake` afterwards. Both
    are called in a thread of this object."""

    def __init__(self, on_sleep: Callable[[], None], on_wake: Callable[[], None]) -> None:
        self._on_sleep = on_sleep
        self._on_wake = on_wake
        self._lock: int | None = None
        """The descriptor that keeps the machine awake."""
        self._pid = os.getpid()
        self._closer, self._closed = socket.socketpair()
        self._thread: Thread | None = None
        for held in (self, self._closer, self._closed):
            keep_from_children(held)
        if sys.platform == "linux":
            self._thread = Thread(self._run, name="ringfort-sleep")
            self._thread.start()

    def close(self) -> None:
        """Stop watching, and let the machine sleep. Idempotent."""
        if os.getpid() == self._pid:
            self._closer.close()
            if self._thread is not None:
                self._thread.join(_JOIN)
            else:
                self._closed.close()

    def abandon(self) -> None:
        """In a forked child: its copy of the lock would keep the machine awake."""
        self._unlock()

    # --- its thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            blocking = import_module("jeepney.io.blocking")
            with blocking.open_dbus_connection(bus="SYSTEM", enable_fds=True) as bus:
                keep_from_children(bus.sock)
                self._watch(bus, import_module("jeepney"))
        except Exception as exc:  # no jeepney, bus or logind, or not allowed: suspending is as it was
            _log.debug("This machine does not say when it goes to sleep: %s: %s", type(exc).__name__, exc)
        finally:
            self._unlock()
            self._closed.close()

    def _watch(self, bus: Any, jeepney: Any) -> None:
        def ask(message: Any) -> tuple[Any, ...]:
            return jeepney.wrappers.unwrap_msg(bus.send_and_get_reply(message, timeout=_ANSWER))

        manager = jeepney.DBusAddress(_PATH, bus_name=_LOGIND, interface=_MANAGER)
        delay = ("sleep", "Ringfort", "The other machines of an elastic run continue without this one", "delay")

        def lock() -> None:
            (descriptor,) = ask(jeepney.new_method_call(manager, "Inhibit", "ssss", delay))
            self._lock = descriptor.to_raw_fd()

        with bus.filter(jeepney.MatchRule(**_SIGNAL), bufsize=_PENDING) as signals:
            ask(jeepney.message_bus.AddMatch(jeepney.MatchRule(**_SIGNAL, sender=_LOGIND)))
            lock()
            while self._receive(bus):
                while signals:
                    signal = signals.popleft()
                    (owner,) = ask(jeepney.message_bus.GetNameOwner(_LOGIND))
                    if signal.header.fields.get(jeepney.HeaderFields.sender) != owner:
                        continue  # anyone may send a signal to one peer
                    if signal.body[0]:
                        self._on_sleep()
                        self._unlock()
                    else:
                        self._on_wake()
                        if self._lock is None:
                            lock()

    def _receive(self, bus: Any) -> bool:
        """Wait for messages, and sort them into the filters. Return False when this object is closed."""
        with DefaultSelector() as selector:
            selector.register(bus.sock, EVENT_READ)
            selector.register(self._closed, EVENT_READ)
            if any(key.fileobj is self._closed for key, _ in selector.select()):
                return False
        with suppress(TimeoutError):
            while True:
                bus.recv_messages(timeout=0)
        return True

    def _unlock(self) -> None:
        descriptor, self._lock = self._lock, None
        if descriptor is not None:
            os.close(descriptor)
