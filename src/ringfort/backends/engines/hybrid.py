"""`HybridBackend`: the fastest way inside each host, our encrypted links between hosts.

Inside a host that is shared memory and, for tensors on GPUs, NCCL. Collectives go host by host: what crosses the
network crosses it once each way, however many ranks a host has. It works without a GPU.
"""

from __future__ import annotations

import socket
from dataclasses import replace

from ringfort.backends.engines.native import ByHost
from ringfort.backends.engines.nccl import NcclNative
from ringfort.backends.group import Group
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
        group = self.group
        leaders = sorted(set(group.hosts))
        if 1 < len(leaders) < world_size:
            self.config = group.config = replace(self.config, collective=_by_host(self.config.collective))
        local = group.sub_group([peer for peer in range(world_size) if group.hosts[peer] == group.hosts[rank]])
        between = group.sub_group(leaders) if rank in leaders else None
        self._nccl = group.native = HybridNative(local, between)

    def close(self) -> None:
        super().close()
        self._nccl.close()


class HybridNative(NcclNative):
    """NCCL inside this host, for tensors on its GPUs. It is started when it is first used."""

    collectives = frozenset({"all_reduce", "broadcast"})

    def __init__(self, local: Group, between: Group | None) -> None:
        super().__init__(local, "")
        self.by_host = ByHost(local, between)


def _by_host(chosen: CollectiveConfig) -> CollectiveConfig:
    """Host by host, where nothing else was chosen."""
    return replace(
        chosen,
        all_reduce=AllReduceStrategy.HIERARCHICAL if chosen.all_reduce.shape is Shape.AUTO else chosen.all_reduce,
        reduce=ReduceStrategy.HIERARCHICAL if chosen.reduce.shape is Shape.AUTO else chosen.reduce,
        broadcast=BroadcastStrategy.HIERARCHICAL if chosen.broadcast.shape is Shape.AUTO else chosen.broadcast,
    )
