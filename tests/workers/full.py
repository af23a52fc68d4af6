"""`python -m tests.workers.full blocking|asyncio` listens, uses up its file descriptors, and says how often it tries
to accept a connection in half a second; and, once it has some again, who came. Its input is the cluster's join code."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from contextlib import suppress

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
    listener = Listener(listen("127.0.0.1", 0), member(cluster))
    taken = use_up()
    say(listener.address[1])
    turns, end = 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        listener.wait(end)
        turns += 1
    say(turns)
    for each in taken:
        os.close(each)
    arrivals = []
    while not arrivals:
        arrivals = listener.wait(time.monotonic() + 60)[0]
    say(type(arrivals[0].said).__name__)


async def in_asyncio(cluster: NetworkNamespace) -> None:
    came = asyncio.Event()
    listener = Counting(member(cluster), lambda *_: came.set(), lambda *_: None)
    listener.open(["127.0.0.1"], 0)
    taken = use_up()
    say(listener.port)
    await asyncio.sleep(SECONDS)
    say(listener.tries)
    for each in taken:
        os.close(each)
    await came.wait()
    say("Join")


class Counting(ControlListener):
    tries = 0

    def _accept(self, listener: object) -> None:
        self.tries += 1
        super()._accept(listener)


def main() -> None:
    cluster = NetworkNamespace.from_join_code(sys.stdin.readline().strip())
    if sys.argv[1] == "blocking":
        blocking(cluster)
    else:
        asyncio.run(in_asyncio(cluster))


if __name__ == "__main__":
    main()
