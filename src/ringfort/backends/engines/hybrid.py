"""`HybridBackend`: the fastest way inside each host, our encrypted links between hosts.

Inside a host that is shared memory and, for tensors on GPUs, NCCL. Collectives go host by host: what crosses the
network crosses it once each way, however many ranks a host has. It works without a GPU.
"""

from __future__ import annotations

import socket
from dataclasses import replace

from ringfort.backends.engines.nccl import NcclNative, has_cuda
from ringfort.backends.engines.torch_groups import TorchNative
from ringfort.backends.sub import SubBackend
from ringfort.backends.tcp import TcpBackend
from ringfort.config import (
    AllReduceStrategy,
    BroadcastStrategy,
    CollectiveConfig,
    DistributedConfig,
    ReduceStrategy,
    Shape,
)
from ringfort.identity.credentials import Credentials


class HybridBackend(TcpBackend):
    """A rank of a group over TCP that goes host by host."""

    device = "cuda"
    """Where the tensors are that go the GPUs' way."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        master: str | None = None,
        *,
        config: DistributedConfig | None = None,
        listener: socket.socket | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """As `TcpBackend`."""
        super().__init__(rank, world_size, master, config=config, listener=listener, credentials=credentials)
        leaders = sorted(set(self.hosts))
        if 1 < len(leaders) < world_size:
            self.config = replace(self.config, collective=_by_host(self.config.collective))
        self.local = SubBackend(self, [peer for peer in range(world_size) if self.hosts[peer] == self.hosts[rank]])
        """The ranks of this host."""
        self.between = SubBackend(self, leaders) if rank in leaders else None
        """The first ranks of all hosts, where this is one."""
        self._inside: TorchNative | None = None
        self._is_left = False

    @property
    def inside(self) -> TorchNative | None:
        """The engine for tensors on this host's GPUs, if there are any."""
        if self._inside is None and not self._is_left and has_cuda():
            self._inside = NcclNative(self.local, self._engine, "")
        return self._inside

    def close(self) -> None:
        """Leaves the group. May be called twice, and from another thread; never raises."""
        inside, self._inside, self._is_left = self._inside, None, True
        super().close()
        if inside is not None:
            inside.close()


def _by_host(chosen: CollectiveConfig) -> CollectiveConfig:
    """Host by host, where nothing else was chosen."""
    return replace(
        chosen,
        all_reduce=AllReduceStrategy.HIERARCHICAL if chosen.all_reduce.shape is Shape.AUTO else chosen.all_reduce,
        reduce=ReduceStrategy.HIERARCHICAL if chosen.reduce.shape is Shape.AUTO else chosen.reduce,
        broadcast=BroadcastStrategy.HIERARCHICAL if chosen.broadcast.shape is Shape.AUTO else chosen.broadcast,
    )
