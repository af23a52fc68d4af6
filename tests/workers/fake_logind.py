"""A logind for tests, on the bus of DBUS_SYSTEM_BUS_ADDRESS: `python -m tests.workers.fake_logind`.

It gives out delay locks. On a line `sleep` it sends PrepareForSleep and says in JSON when all locks are closed, or that
they were not in time; on `wake` it says that the machine is awake again.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from contextlib import suppress
from typing import Any

import jeepney
from jeepney.io.blocking import open_dbus_connection

MANAGER = "org.freedesktop.login1.Manager"
PATH = "/org/freedesktop/login1"
DELAY = 5.0
"""Seconds: logind's InhibitDelayMaxSec."""


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


class Logind:
    def __init__(self, bus: Any) -> None:
        self.bus = bus
        self.locks: list[int] = []
        """The ends that see when the other is closed."""
        self.holder = ""
        """The name of the last one that took a lock."""

    def serve(self) -> None:
        """Answer calls that have come."""
        while True:
            try:
                message = self.bus.receive(timeout=0)
            except TimeoutError:
                return
            if message.header.fields.get(jeepney.HeaderFields.member) == "Inhibit":
                what, who, _, mode = message.body
                ours, theirs = os.pipe()
                self.locks.append(ours)
                self.holder = message.header.fields[jeepney.HeaderFields.sender]
                self.bus.send(jeepney.new_method_return(message, "h", (theirs,)))
                os.close(theirs)
                say(lock=[what, who, mode])

    def tell(self, is_sleeping: bool) -> None:
        self.bus.send(self._signal(is_sleeping))

    def fake(self) -> None:
        """Send the signal as somebody else, who needs no rights to send it to one peer."""
        with open_dbus_connection(bus="SYSTEM") as other:
            signal = self._signal(True)
            signal.header.fields[jeepney.HeaderFields.destination] = self.holder
            other.send(signal)
        say(impostor=True)

    def _signal(self, is_sleeping: bool) -> Any:
        emitter = jeepney.DBusAddress(PATH, interface=MANAGER)
        return jeepney.new_signal(emitter, "PrepareForSleep", "b", (is_sleeping,))

    def sleep(self) -> None:
        begin = time.monotonic()
        self.tell(True)
        while self.locks and time.monotonic() < begin + DELAY:
            for lock in select.select(self.locks, [], [], 0.05)[0]:
                os.close(lock)
                self.locks.remove(lock)
        say(asleep=not self.locks, seconds=time.monotonic() - begin)


def main() -> None:
    with open_dbus_connection(bus="SYSTEM", enable_fds=True) as bus:
        logind = Logind(bus)
        bus.send_and_get_reply(jeepney.message_bus.RequestName("org.freedesktop.login1"))
        say(ready=True)
        while True:
            readable, _, _ = select.select([bus.sock, sys.stdin], [], [])
            if bus.sock in readable:
                logind.serve()
            if sys.stdin in readable:
                match sys.stdin.readline().strip():
                    case "sleep":
                        logind.sleep()
                    case "wake":
                        logind.tell(False)
                    case "impostor":
                        logind.fake()
                    case _:
                        return


if __name__ == "__main__":
    with suppress(ConnectionResetError):  # the test is over, and the bus was closed first
        main()
