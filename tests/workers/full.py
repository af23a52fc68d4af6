"""`python -m tests.workers.full blocking|asyncio` listens, uses up its file descriptors, and says how often it tries
to accept a connection in half a second; and, once it has some again, who came. Its input is the cluster's join code."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from contextlib import suppress

from ringfort.bootstrap.connection import Connection
from ringfort.bootstrap.listener import Listener
from ringfort.cluster.net.control_listener import ControlListener
from ringfort.identity.namespace import NetworkNamespace
from ringfort.transport.tcp import listen
from tests.helpers.handshakes import member

SECONDS = 0.5


def say(what: object) -> None:
    print(what, flush=True)


def use_up() -> list[int]:
    """Takes all descriptors that this process may have."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    taken: list[int] = []
    with suppress(OSError):
        while True:
            taken.append(os.dup(0))
    return taken


def blocking(cluster: NetworkNamespace) -> None:
    listener = Listener(member(cluster), listen("127.0.0.1", 0))
    taken = use_up()
    say(listener.address[1])
    turns, end = 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        listener.wait(end)
        turns += 1
    say(turns)
    for each in taken:
        os.close(each)
    accepted = []
    while not accepted:
        accepted = listener.wait(time.monotonic() + 60)
    say(type(accepted[0].purpose).__name__)


async def in_asyncio(cluster: NetworkNamespace) -> None:
    came = asyncio.Event()
    core = Counting(member(cluster), on_refused=lambda *_: None)
    listener = ControlListener(core, lambda _: came.set())
    listener.open(["127.0.0.1"], 0)
    taken = use_up()
    say(listener.port)
    await asyncio.sleep(SECONDS)
    say(core.turns)
    for each in taken:
        os.close(each)
    await came.wait()
    say("Join")


class Counting(Listener):
    turns = 0

    def wait(self, deadline: float) -> list[Connection]:
        self.turns += 1
        return super().wait(deadline)


def main() -> None:
    cluster = NetworkNamespace.from_join_code(sys.stdin.readline().strip())
    if sys.argv[1] == "blocking":
        blocking(cluster)
    else:
        asyncio.run(in_asyncio(cluster))


if __name__ == "__main__":
    main()
