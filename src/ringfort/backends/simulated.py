"""`SimulatedBackend`: a whole group in one process, over memory, with every rule of the real ones."""

from __future__ import annotations

from collections.abc import Sequence

from ringfort.backends.mesh import MeshBackend
from ringfort.config import DistributedConfig
from ringfort.errors import InvalidWorldSizeError
from ringfort.transport.machine import Machine, check_hosts
from ringfort.transport.memory import Clock, MemoryPoller, MemoryStream, Pipe, RealClock
from ringfort.transport.stream import Stream


class SimulatedBackend(MeshBackend):
    """One rank of a group that lives in one process. Use each from a thread of its own.

    It runs the engine, the frames and the matching of the real backends; only the bytes go through memory, and the
    clock may be a virtual one. `kill` and `cut` make the faults that a process and a cable have.
    """

    def __init__(
        self,
        rank: int,
        config: DistributedConfig,
        poller: MemoryPoller,
        world_size: int,
        hosts: tuple[int, ...] | None = None,
    ) -> None:
        streams: dict[int, Stream] = dict(poller.streams)
        machines = {r: Machine(b"%d" % host) for r, host in enumerate(hosts or range(world_size))}
        super().__init__(rank, world_size, config, streams, poller, machines)
        self._streams = poller.streams

    @classmethod
    def create_group(
        cls,
        world_size: int,
        *,
        config: DistributedConfig | None = None,
        clock: Clock | None = None,
        hosts: Sequence[int] | None = None,
    ) -> list[SimulatedBackend]:
        """All ranks of a new group, in order. `hosts` names for each rank the lowest on its host; without it every
        rank has a host of its own."""
        check_world_size(world_size)
        places = None if hosts is None else check_hosts(hosts, world_size)
        clock = clock or RealClock()
        config = config or DistributedConfig()
        pollers = [MemoryPoller(clock) for _ in range(world_size)]
        pipes = {
            (a, b): Pipe(ring_reader=pollers[b].ring, ring_writer=pollers[a].ring)
            for a in range(world_size)
            for b in range(world_size)
            if a != b
        }
        for a in range(world_size):
            for b in range(world_size):
                if a != b:
                    pollers[a].streams[b] = MemoryStream(incoming=pipes[b, a], outgoing=pipes[a, b])
        return [cls(rank, config, poller, world_size, places) for rank, poller in enumerate(pollers)]

    def kill(self) -> None:
        """Ends this rank as a killed process ends: links close without a goodbye."""
        self._engine.drop()

    def cut(self, peer: int, *, is_cut: bool = True) -> None:
        """Pulls the cable to `peer`, both ways: nothing arrives and nobody is told. `is_cut=False` mends it."""
        self.check_peer(peer, "peer")
        self._streams[peer].incoming.cut(is_cut=is_cut)
        self._streams[peer].outgoing.cut(is_cut=is_cut)


def check_world_size(world_size: int) -> None:
    """Raises `InvalidWorldSizeError` unless `world_size` is a whole number of at least 1."""
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidWorldSizeError(world_size)
