"""`HybridBackend`: the fastest way inside each host, our encrypted links between hosts.

Inside a host that is shared memory and, for tensors on GPUs, NCCL. Collectives go host by host: what crosses the
network crosses it once each way, however many ranks a host has. It works without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ringfort.backends.engines.native import ByHost
from ringfort.backends.engines.nccl import NcclNative
from ringfort.backends.group import Group
from ringfort.backends.tcp import TcpBackend
from ringfort.config import CollectiveConfig, Shape


class HybridBackend(TcpBackend):
    """A rank of a group over TCP that goes host by host. Raises as `TcpBackend` does."""

    def _start_engine(self, master: str | Sequence[str] | None) -> None:
        group = self.group
        leaders = sorted(set(group.hosts))
        if 1 < len(leaders) < group.world_size:
            self.config = group.config = replace(self.config, collective=_by_host(self.config.collective))
        local = group.sub_group([peer for peer, host in enumerate(group.hosts) if host == group.hosts[group.rank]])
        between = group.sub_group(leaders) if group.rank in leaders else None
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
    strategies = {name: getattr(chosen, name) for name in ("all_reduce", "reduce", "broadcast")}
    left_open = {name: strategy for name, strategy in strategies.items() if strategy.shape is Shape.AUTO}
    return replace(chosen, **{name: replace(auto, shape=Shape.HIERARCHICAL) for name, auto in left_open.items()})
