"""`torchrun --rdzv-backend=ringfort`: the agents of torchrun find each other as a cluster's peers do, with no endpoint.

Each round of workers has a store of its own, over the cluster's control links. An agent that starts its workers anew
says so in the store of the round before, where the others look.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from ringfort.cluster.node import ClusterNode
from ringfort.config import AutoDiscoveryConfig, parse_address
from ringfort.errors import DistributedError
from ringfort.torch.cluster_store import ClusterStore

JOIN_TIMEOUT: Final = 600
"""Seconds that machines are waited for; torchrun's own rendezvous waits as long. `--rdzv-conf=join_timeout=60`."""
_AGAIN: Final = "again"
_CLOSED: Final = "closed"
_DONE: Final = "done "
"""Before the id of an agent that will ask nothing more."""
_SEE_OFF: Final = 5.0
"""Seconds that the keeper of the store waits for agents that are there and not done."""
_LOOK: Final = 0.2
"""Seconds between two looks whether all have come."""

api: Any = import_module("torch.distributed.elastic.rendezvous.api")


def handler() -> Callable[[Any], RingfortRendezvous]:
    """What the entry point of torchrun gives: a maker of handlers."""
    return RingfortRendezvous


class RingfortRendezvous(api.RendezvousHandler):
    """One agent's part."""

    def __init__(self, parameters: Any) -> None:
        """`parameters` are torchrun's: nodes at least and at most, the run's id, and `join_timeout` in its options."""
        self._run_id: str = parameters.run_id
        self._timeout = float(parameters.get("join_timeout", JOIN_TIMEOUT))
        self._local_addr: str | None = parameters.local_addr
        self._fewest: int = parameters.min_nodes
        self._node = ClusterNode(
            AutoDiscoveryConfig(
                min_peers=parameters.min_nodes - 1,
                max_peers=parameters.max_nodes - 1,
                timeout=self._timeout,
                peers=[parameters.endpoint] if parameters.endpoint else [],
            )
        )
        self._store: ClusterStore | None = None
        self._epoch: tuple[int, str] | None = None
        self._peers: tuple[str, ...] = ()
        self._round = 0
        self._is_closed = False

    def get_backend(self) -> str:
        """Its name."""
        return "ringfort"

    def get_run_id(self) -> str:
        """Torchrun's `--rdzv-id`."""
        return self._run_id

    def next_rendezvous(self) -> Any:
        """Waits until enough agents are there, all of them ready; gives rank, world size and store."""
        if self._is_closed:
            raise api.RendezvousClosedError
        deadline = time.monotonic() + self._timeout
        if self._store is not None:
            self._say(_AGAIN)
        try:
            while True:
                found = self._try_round(deadline)
                if found is not None:
                    return found
        except DistributedError as exc:
            if isinstance(exc, TimeoutError):
                raise api.RendezvousTimeoutError(str(exc)) from exc
            raise api.RendezvousConnectionError(str(exc)) from exc

    def _try_round(self, deadline: float) -> Any:
        """One try, in one epoch; None if that ends first."""
        self._node.start().hold(False)
        epoch = self._node.wait_for_peers(self._fewest - 1, max(0.01, deadline - time.monotonic()))
        self._node.hold(True)
        self._round = self._round + 1 if epoch.key == self._epoch else 0
        self._epoch, self._peers = epoch.key, tuple(epoch.peers)
        if self._store is not None:
            self._store.close()
        store = self._store = ClusterStore(self._node, epoch.peers[0], f"/{self._run_id}/{epoch.key}/{self._round}")
        rank, world_size = epoch.peers.index(self._node.peer_id), len(epoch.members)
        store.add("here", 1)
        while int(store.add("here", 0)) < world_size:
            if self._node.epoch is None or self._node.epoch.key != epoch.key:
                return None
            if time.monotonic() > deadline:
                why = f"{store.add('here', 0)} of {world_size} machines run torchrun with --rdzv-id={self._run_id}"
                raise api.RendezvousTimeoutError(f"{why}; start it on all of them, with the same id")
            time.sleep(_LOOK)
        address = self._local_addr or parse_address(self._node.addresses[0])[0]
        info = api.RendezvousStoreInfo.build(rank, store, address if world_size > 1 else "127.0.0.1")
        return api.RendezvousInfo(store, rank, world_size, info)

    def num_nodes_waiting(self) -> int:
        """How many wait for the next round: newcomers, and agents whose workers have to start anew."""
        if self._store is None or self._node.epoch is None:
            return 0
        newcomers = sum(1 for view in self._node.snapshot() if not view.is_member and view.slots)
        try:
            return newcomers + int(self._store.add(_AGAIN, 0))
        except DistributedError:
            return newcomers + 1  # the keeper of the store is gone: nothing but a new round helps

    def is_closed(self) -> bool:
        """Whether an agent has said that the run is over."""
        if not self._is_closed and self._store is not None:
            try:
                self._is_closed = bool(self._store.check([_CLOSED]))
            except DistributedError:
                return False
        return self._is_closed

    def set_closed(self) -> None:
        """Says that the run is over."""
        self._is_closed = True
        self._say(_CLOSED)

    def _say(self, word: str) -> None:
        try:
            if self._store is not None:
                self._store.add(word, 1)
        except DistributedError:
            pass  # the keeper has gone, and the round with it

    def shutdown(self) -> bool:
        """Leaves the cluster. Who keeps the store goes last: one who has just met the others in it may yet ask. May be
        called twice."""
        if self._store is not None:
            self._say(_DONE + self._node.peer_id)
            if self._node.peer_id == self._peers[0]:
                self._see_off(self._store)
            self._store.close()
            self._store = None
        self._node.close()
        return True

    def _see_off(self, store: ClusterStore) -> None:
        deadline = time.monotonic() + _SEE_OFF
        while time.monotonic() < deadline:
            here = {view.peer for view in self._node.snapshot()}
            if all(store.check([_DONE + peer]) for peer in self._peers if peer in here):
                return
            time.sleep(_LOOK / 10)
