"""`MeshBackend`: a backend with a stream of bytes to every other rank. The real ones differ in how they connect."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final

from ringfort.backends.base import Backend
from ringfort.backends.group import Group
from ringfort.bootstrap.links import Routes
from ringfort.config import DistributedConfig
from ringfort.transport.engine import Engine
from ringfort.transport.finalisers import when_gone
from ringfort.transport.forks import WeakGroup
from ringfort.transport.machine import Machine
from ringfort.transport.socket_streams import SocketPoller
from ringfort.transport.stream import Poller, Stream

_engines: Final[WeakGroup[Engine]] = WeakGroup()
"""The engines of groups over sockets."""
_numbers: Final = count()
os.register_at_fork(after_in_child=_engines.clear)  # the links are the parent's: a child has nothing to say on them


@atexit.register
def _say_goodbye() -> None:
    """On what the program has not closed. Else the peers, which may be busy with the end of the last collective, would
    take its end for a crash and fail, though they need nothing more of it."""
    for engine in sorted(_engines.alive(), key=lambda engine: engine.number):
        with suppress(Exception):  # the program is over: there is nobody to tell
            engine.close(has_ended=True)


class MeshBackend(Backend):
    """A rank with a stream to every other rank. Subclass this to bring a new wire."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        config: DistributedConfig,
        streams: dict[int, Stream],
        poller: Poller,
        machines: Mapping[int, Machine] | None = None,
        connections: Sequence[tuple[dict[int, Stream], Poller]] = (),
        routes: Routes | None = None,
        *,
        epoch: int = 0,
        **settings: Any,
    ) -> None:
        """`streams` has one to each other rank, and `poller` sleeps on them. `machines` says where each rank runs;
        without it every rank has a host of its own. `connections` are further streams to the same ranks, in sets of one
        to each. `settings` are further ones of `Group`."""
        self.config = config
        engines = [
            Engine(rank, *each, inbox_bytes=config.inbox_bytes, epoch=epoch)
            for each in ((streams, poller), *connections)
        ]
        machines = machines or dict.fromkeys(range(world_size), Machine())
        self._group = Group(rank, config, engines, machines, routes=routes, **settings)
        if isinstance(poller, SocketPoller):
            for engine in engines:
                engine.number = next(_numbers)
                _engines.add(engine)
        # A group that is dropped and not closed ends too: else its peers would wait for the whole timeout.
        self._farewell = when_gone(self, self._group.let_go)

    @property
    def group(self) -> Group:
        return self._group

    def close(self) -> None:
        self._group.close()
        self._farewell.call_off()

    def kill(self) -> None:
        """Close all links without a word, as a process that dies does. For fault injection."""
        self._group.drop()
