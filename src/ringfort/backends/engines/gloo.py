"""`GlooBackend`: ranks that talk through torch's Gloo, for sites that ask for it. torch's default group is not touched.

Messages are Gloo's messages between two ranks, with our frames in them; large collectives are Gloo's own. **Gloo does
not encrypt**: whoever is on the network can read and change what the ranks say.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Any

from ringfort.backends.engines.torch_groups import TorchNative, as_tensor, break_group, c10d_with, may_have
from ringfort.backends.mesh import MeshBackend
from ringfort.bootstrap.terms import check_place, warn_once
from ringfort.bootstrap.torch_store import Place, meet_at_store, open_store
from ringfort.config import DistributedConfig
from ringfort.errors import RendezvousError
from ringfort.transport.machine import this_machine
from ringfort.transport.memory import MemoryPoller, RealClock
from ringfort.transport.pumps import Carry, Pumps
from ringfort.transport.stream import Stream

_WARNING = (
    "Gloo does not encrypt: anyone on the network can read and change what the ranks send. "
    "TcpBackend and `ringfort.join()` encrypt."
)
_FOR_EVER = timedelta(days=365)
"""What Gloo is told to wait: our own deadlines are shorter, and a wait of Gloo's that runs out closes all its pairs."""
_LAST_WORDS = 1.0
"""Seconds that a close gives the goodbyes to leave. A peer that runs takes them at once."""
_TAG = 1


class GlooBackend(MeshBackend):
    """A rank of a group over torch's Gloo. It has two threads for each peer, for Gloo can only block."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        master: str | None = None,
        *,
        store: Any = None,
        interface: str | None = None,
        config: DistributedConfig | None = None,
    ) -> None:
        """Return when every rank is linked to every other.

        The ranks meet at a store of torch's: at `master`, `host:port`, where rank 0 opens one, or at `store`. Gloo
        listens on the interface that leads to the others, or on `interface`, by name.

        Raises `BackendUnavailableError` without torch, and else as `TcpBackend` does.
        """
        config = config or DistributedConfig()
        check_place(rank, world_size)
        gloo = c10d_with("ProcessGroupGloo", "gloo", "it comes with torch: pip install 'ringfort[torch]'")
        self._closing = Lock()
        self._pumps: list[Pumps] = []
        place = Place(rank, world_size, this_machine(shares=False), config.timeout)
        poller = MemoryPoller(RealClock())
        streams: dict[int, Stream] = {}
        machines, make = {0: place.machine}, None
        if world_size > 1:
            warn_once(_WARNING)
            store = open_store(place, master, store)
            with meet_at_store(place, store, interface) as found:
                machines, make = found.machines, partial(_make_group, gloo, found.store, found.listen, place)
                self._messages: Any = make("messages")
            for peer in range(world_size):
                if peer != rank:
                    send, recv = (_carrier(call, peer) for call in (self._messages.send, self._messages.recv))
                    pumps = Pumps(f"ringfort-gloo-{rank}-{peer}", send, recv, poller.notify)
                    self._pumps.append(pumps)
                    streams[peer] = poller.streams[peer] = pumps.stream

        super().__init__(rank, world_size, config, streams, poller, machines, is_measured=True)
        if make is not None:
            self.group.native = GlooNative(self.group, partial(make, "collectives"), poller.wake)

    @classmethod
    def is_available(cls) -> bool:
        return may_have("ProcessGroupGloo")

    def close(self) -> None:
        """Leave the group. May be called twice, and from another thread; never raises."""
        super().close()  # which lets go of Gloo's own collectives: they keep the store, and so in rank 0 a port
        with self._closing:
            pumps, self._pumps = self._pumps, []
        if not pumps:
            return
        for pump in pumps:
            pump.join(_LAST_WORDS, sent=True)
        if not all(pump.join(0.0) for pump in pumps):
            break_group(self._messages)
        for pump in pumps:
            pump.join(_LAST_WORDS)
        self._messages = None


def _carrier(call: Callable[..., Any], peer: int) -> Carry:
    """Gloo's `send` or `recv` for the packets of one peer."""
    return lambda packet: call([as_tensor(packet)], peer, _TAG).wait()


class GlooNative(TorchNative):
    """Gloo's collectives, over connections of their own: what breaks there does not break messages."""

    name = "gloo"
    collectives = frozenset({"all_reduce", "broadcast", "all_gather", "all_to_all"})
    sums = frozenset({"float32", "float64", "int8", "uint8", "int32", "int64"})
    orders = sums - {"float32", "float64"}

    def abandon(self) -> None:
        if self.group is not None:
            break_group(self.group)


def _make_group(c10d: Any, store: Any, listen: dict[str, str], place: Place, name: str) -> Any:
    """Make one of Gloo's groups. Every rank has to, with the same name."""
    gloo = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(**listen)]
    options._timeout = _FOR_EVER
    options._threads = 1
    try:
        return gloo(c10d.PrefixStore(name, store), place.rank, place.world_size, options)
    except RuntimeError as exc:
        raise RendezvousError(f"Gloo could not connect the ranks: {exc}") from exc
