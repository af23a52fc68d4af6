"""`torchrun --rdzv-backend=ringfort`: the agents of torchrun find each other as peers of a cluster, with no endpoint.

Each round of workers has a store of its own, over the cluster's control links. An agent that restarts its workers says
so in the store of the round before, where the others look.
"""

from __future__ import annotations

import time
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from ringfort.cluster.node import ClusterNode
from ringfort.config import AutoDiscoveryConfig, launched_run, parse_address, set_for_this_process
from ringfort.errors import DistributedError
from ringfort.telemetry.launched_traces import LaunchedTraces
from ringfort.torch.cluster_store import ClusterStore

JOIN_TIMEOUT: Final = 600
"""Seconds to wait for other machines, as torchrun's own rendezvous does. `--rdzv-conf=join_timeout=60` changes it."""
_RESTART: Final = "again"
_CLOSED: Final = "closed"
_DONE: Final = "done "
"""Before the id of an agent that will send no more requests."""
_LINGER: Final = 5.0
"""Seconds that the owner of the store waits for agents that are there and not done."""
_POLL: Final = 0.2
"""Seconds between two looks whether all agents have come."""

api: Any = import_module("torch.distributed.elastic.rendezvous.api")


class RingfortRendezvous(api.RendezvousHandler):
    """The rendezvous of one agent."""

    def __init__(self, parameters: Any) -> None:
        """Take torchrun's parameters: how many nodes at least and at most, the run's id, and the option
        `join_timeout`."""
        self._parameters = parameters
        self._timeout = float(parameters.get("join_timeout", JOIN_TIMEOUT))
        # Workers get the environment of their agent, so viewers in the cluster see their steps.
        self._traces = LaunchedTraces(launched_run())
        set_for_this_process(self._traces.variables)
        self._node = ClusterNode(
            AutoDiscoveryConfig(
                min_peers=parameters.min_nodes - 1,
                max_peers=parameters.max_nodes - 1,
                timeout=self._timeout,
                peers=[parameters.endpoint] if parameters.endpoint else [],
            ),
            steps_done=self._traces.step,
            telemetry=self._traces.folder,
        )
        self._store: ClusterStore | None = None
        self._epoch: tuple[int, str] | None = None
        self._peers: tuple[str, ...] = ()
        self._round = 0
        self._is_closed = False

    def get_backend(self) -> str:
        """Return the name of the rendezvous."""
        return "ringfort"

    def get_run_id(self) -> str:
        """Return torchrun's `--rdzv-id`."""
        return self._parameters.run_id

    def next_rendezvous(self) -> Any:
        """Wait until enough agents are ready; return rank, world size and store."""
        if self._is_closed:
            raise api.RendezvousClosedError
        deadline = time.monotonic() + self._timeout
        self._traces.clear()
        self._tell(_RESTART)
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
        """Try to start a round in the current epoch; return None if the epoch ends first."""
        self._node.start().hold(False)
        epoch = self._node.wait_for_peers(self._parameters.min_nodes - 1, max(0.01, deadline - time.monotonic()))
        self._node.hold(True)
        self._round = self._round + 1 if epoch.key == self._epoch else 0
        self._epoch, self._peers = epoch.key, tuple(epoch.peers)
        if self._store is not None:
            self._store.close()
        store = self._store = ClusterStore(
            self._node, epoch.peers[0], f"/{self.get_run_id()}/{epoch.key}/{self._round}"
        )
        rank, world_size = epoch.peers.index(self._node.peer_id), len(epoch.members)
        ready = store.add("here", 1)
        while ready < world_size:
            if self._node.epoch is None or self._node.epoch.key != epoch.key:
                return None
            if time.monotonic() > deadline:
                raise api.RendezvousTimeoutError(
                    f"Only {ready} of {world_size} machines run torchrun with --rdzv-id={self.get_run_id()}; "
                    "start torchrun on all of them, with the same id"
                )
            time.sleep(_POLL)
            ready = store.add("here", 0)
        address = self._parameters.local_addr or parse_address(self._node.addresses[0])[0]
        info = api.RendezvousStoreInfo.build(rank, store, address if world_size > 1 else "127.0.0.1")
        return api.RendezvousInfo(store, rank, world_size, info)

    def num_nodes_waiting(self) -> int:
        """Return how many wait for the next round: new machines, and agents that restart their workers."""
        if self._store is None or self._node.epoch is None:
            return 0
        new = sum(1 for view in self._node.snapshot() if not view.is_member and view.slots)
        try:
            return new + self._store.add(_RESTART, 0)
        except DistributedError:
            return new + 1  # the owner of the store is lost: only a new round helps

    def is_closed(self) -> bool:
        """Return whether an agent has said that the run is over."""
        if not self._is_closed and self._store is not None:
            with suppress(DistributedError):
                self._is_closed = self._store.check([_CLOSED])
        return self._is_closed

    def set_closed(self) -> None:
        """Say that the run is over."""
        self._is_closed = True
        self._tell(_CLOSED)

    def _tell(self, word: str) -> None:
        if self._store is not None:
            with suppress(DistributedError):  # the owner of the store is lost, and the round with it
                self._store.add(word, 1)

    def shutdown(self) -> bool:
        """Leave the cluster. May be called twice.

        The owner of the store leaves last: others that have just met in it may still send requests.
        """
        if self._store is not None:
            self._tell(_DONE + self._node.peer_id)
            if self._node.peer_id == self._peers[0]:
                self._wait_for_others(self._store)
            self._store.close()
            self._store = None
        self._node.close()
        self._traces.close()
        return True

    def _wait_for_others(self, store: ClusterStore) -> None:
        deadline = time.monotonic() + _LINGER
        while time.monotonic() < deadline:
            here = {view.peer for view in self._node.snapshot()}
            if all(store.check([_DONE + peer]) for peer in self._peers if peer in here):
                return
            time.sleep(_POLL / 10)
