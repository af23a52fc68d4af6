"""`SimulatedBackend`: a whole group in one process, over memory, with every rule of the real ones."""

from __future__ import annotations

from collections.abc import Sequence

from ringfort.backends.mesh import MeshBackend
from ringfort.bootstrap.links import Routes
from ringfort.bootstrap.more_connections import wanted
from ringfort.config import DistributedConfig, check_world_size
from ringfort.identity.credentials import Credentials
from ringfort.identity.keypair import NodeIdentity
from ringfort.identity.namespace import NetworkNamespace
from ringfort.transport.machine import Machine, check_hosts
from ringfort.transport.memory import Clock, MemoryPoller, MemoryStream, Pipe, RealClock
from ringfort.transport.stream import Poller, Stream

_LOOPBACK = "127.0.0.1"


class SimulatedBackend(MeshBackend):
    """One rank of a group that lives in one process. Use each from a thread of its own.

    It runs the engine, the frames and the matching of the real backends; only the bytes go through memory, and the
    clock may be a virtual one. `kill` and `cut` make the faults that a process and a cable have.

    Examples:
        >>> backends = SimulatedBackend.create_group(2)
        >>> run_ranks(backends, lambda backend: DistributedContext(backend).all_reduce(np.ones(1)))
        [array([2.]), array([2.])]
        >>> for backend in backends:
        ...     backend.close()
    """

    def __init__(
        self,
        rank: int,
        config: DistributedConfig,
        pollers: Sequence[MemoryPoller],
        world_size: int,
        hosts: tuple[int, ...] | None = None,
    ) -> None:
        machines = {r: Machine(b"%d" % host) for r, host in enumerate(hosts or range(world_size))}
        links: list[tuple[dict[int, Stream], Poller]] = [(dict(poller.streams), poller) for poller in pollers]
        super().__init__(rank, world_size, config, *links[0], machines, links[1:])
        self._pollers = pollers

    @classmethod
    def create_group(
        cls,
        world_size: int,
        *,
        config: DistributedConfig | None = None,
        clock: Clock | None = None,
        hosts: Sequence[int] | None = None,
    ) -> list[SimulatedBackend]:
        """Return all ranks of a new group, in order. `hosts` has, for each rank, the lowest rank on its host; without
        it every rank has a host of its own."""
        check_world_size(world_size)
        places = None if hosts is None else check_hosts(hosts, world_size)
        clock = clock or RealClock()
        config = config or DistributedConfig()
        connections = wanted(config.collective, dict.fromkeys(range(world_size), Machine()))
        meshes = [_mesh(world_size, clock) for _ in range(max(1, connections))]
        ranks = enumerate(zip(*meshes, strict=True))
        backends: list[SimulatedBackend] = [cls(rank, config, each, world_size, places) for rank, each in ranks]
        # Nobody else can join, and nothing is written to disk.
        secret = Credentials(NodeIdentity.ephemeral(), NetworkNamespace.generate("simulated"))
        for rank, backend in enumerate(backends):
            others = {peer: (_LOOPBACK, _LOOPBACK) for peer in range(world_size) if peer != rank}
            backend.group.routes = Routes(others, None if config.encryption == "off" else secret)
        return backends

    def cut(self, peer: int, *, is_cut: bool = True) -> None:
        """Cut the connection to `peer`, in both directions: nothing arrives, and nobody is told. `is_cut=False`
        restores it."""
        self.group.check_peer(peer, "peer")
        for poller in self._pollers:
            poller.streams[peer].incoming.cut(is_cut=is_cut)
            poller.streams[peer].outgoing.cut(is_cut=is_cut)


def _mesh(world_size: int, clock: Clock) -> list[MemoryPoller]:
    """Return the pollers of all ranks, with a stream between every two."""
    pollers = [MemoryPoller(clock) for _ in range(world_size)]
    pipes = {
        (a, b): Pipe(wake_reader=pollers[b].notify, wake_writer=pollers[a].notify)
        for a in range(world_size)
        for b in range(world_size)
        if a != b
    }
    for (a, b), outgoing in pipes.items():
        pollers[a].streams[b] = MemoryStream(incoming=pipes[b, a], outgoing=outgoing)
    return pollers
