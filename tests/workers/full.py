"""`python -m tests.workers.full door|entrance` listens, uses up its file descriptors, and says how often it tries to
accept a connection in half a second; and, once it has some again, who came. Its input is the cluster's join code."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from contextlib import suppress

from ringfort.cluster.entrance import Entrance
from ringfort.identity.namespace import NetworkNamespace
from ringfort.transport.door import Door
from ringfort.transport.tcp import listen
from tests.helpers.openings import member

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


def at_a_door(cluster: NetworkNamespace) -> None:
    door = Door(listen("127.0.0.1", 0), member(cluster))
    taken = use_up()
    say(door.address[1])
    turns, end = 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        door.wait(end)
        turns += 1
    say(turns)
    for each in taken:
        os.close(each)
    arrivals = []
    while not arrivals:
        arrivals = door.wait(time.monotonic() + 60)[0]
    say(type(arrivals[0].said).__name__)


async def at_an_entrance(cluster: NetworkNamespace) -> None:
    came = asyncio.Event()
    entrance = Counting(member(cluster), lambda *_: came.set(), lambda *_: None)
    entrance.open(["127.0.0.1"], 0)
    taken = use_up()
    say(entrance.port)
    await asyncio.sleep(SECONDS)
    say(entrance.tries)
    for each in taken:
        os.close(each)
    await came.wait()
    say("Join")


class Counting(Entrance):
    tries = 0

    def _accept(self, listener: object) -> None:
        self.tries += 1
        super()._accept(listener)


def main() -> None:
    cluster = NetworkNamespace.from_join_code(sys.stdin.readline().strip())
    if sys.argv[1] == "door":
        at_a_door(cluster)
    else:
        asyncio.run(at_an_entrance(cluster))


if __name__ == "__main__":
    main()
