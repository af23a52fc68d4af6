"""`AutoDiscoveryBackend`: ranks that find each other. A mesh over the members of the cluster's current epoch."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ringfort.backends.mesh import MeshBackend
from ringfort.backends.tcp import links_over, machine_for
from ringfort.cluster.events import ClusterEvent, ControlLost, EpochEnded, PeerLost
from ringfort.cluster.health import JITTER_ROOM, HealthSummary
from ringfort.cluster.messages import Epoch
from ringfort.cluster.node import ClusterNode
from ringfort.cluster.topology import ClusterTopology
from ringfort.config import CLUSTER_PATIENCE, AutoDiscoveryConfig, DistributedConfig, check_timeout
from ringfort.errors import (
    AbortedError,
    ChannelClosedError,
    ConfigError,
    ControlLostError,
    DistributedError,
    RendezvousTimeoutError,
)
from ringfort.identity.credentials import Credentials
from ringfort.transport import tcp
from ringfort.transport.engine import Engine

if TYPE_CHECKING:
    from typing_extensions import Self

_EPOCHS: Final = 1 << 32
"""A frame has 32 bits for the epoch: enough to tell neighbouring ones apart."""
_PAUSE: Final = 0.05
"""Seconds before a mesh that came to nothing is tried again in the same epoch."""
_LONGER: Final = 2.0
"""Seconds by which a data link is more patient than the control link, which may go another way: who is lost there is
lost first, and by the same word at all members."""


class AutoDiscoveryBackend(MeshBackend):
    """A rank of whatever group the machines here have agreed on.

        backend = AutoDiscoveryBackend(AutoDiscoveryConfig())
        backend.wait_for_peers(2)
        backend.establish_ring()

    Until `establish_ring` it is a world of one. When a member is lost, what waits on it raises `PeerLostError`, and
    everything else of the group ends too; `establish_ring` then goes on with those who are left, under new ranks.
    """

    def __init__(
        self,
        config: AutoDiscoveryConfig | None = None,
        *,
        group: DistributedConfig | None = None,
        node: ClusterNode | None = None,
        credentials: Credentials | None = None,
        encryption: str | None = None,
    ) -> None:
        """Starts to look for peers and returns. `group` has the settings of the groups that are formed. A `node` that
        is given is used and not closed in the end; otherwise one is made with `config`, `credentials` and `encryption`,
        which decides where it is given (else see `choose_encryption`).

        Raises as `ClusterNode` and its `start` do.
        """
        self.node = node or ClusterNode(config, credentials=credentials, encryption=encryption)
        self._owns_node = node is None
        self._group: tuple[Epoch, Engine] | None = None
        self._has_lost = False
        self._is_closed = False
        settings = _like_node(group or DistributedConfig(), self.node, encryption)
        super().__init__(0, 1, settings, {}, tcp.SocketPoller({}))
        try:
            self.node.start()
        except BaseException:
            super().close()
            raise
        self._unsubscribe = self.node.subscribe(self._on_event)

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that the group was formed in; None before the first."""
        return None if self._group is None else self._group[0]

    @property
    def peer_id(self) -> str:
        """This process's name in the cluster."""
        return self.node.peer_id

    def health_summary(self) -> HealthSummary:
        """How all other peers in sight are, in a few numbers."""
        return self.node.health_summary()

    def topology(self) -> ClusterTopology:
        """What is known of all machines in sight and of the links between them."""
        return self.node.topology()

    def next_operation(self) -> int:
        self.node.record_work()  # who has done most leads, among equals
        return super().next_operation()

    def wait_for_peers(self, n: int = 1, timeout: float | None = None) -> Epoch:
        """Lets newcomers in until there are at least `n` peers beside this one; see `ClusterNode.wait_for_peers`.

        A group that was formed before ends when somebody comes; call `establish_ring` again then.
        """
        self.node.hold(False)
        return self.node.wait_for_peers(n, timeout)

    def establish_ring(self, timeout: float | None = None) -> Self:
        """Connects this rank with all members of the current epoch. All of them must call it.

        From then on `rank` and `world_size` are the epoch's, and newcomers wait. Whoever is lost meanwhile is done
        without. Raises `RendezvousTimeoutError` with who did not come, and why.
        """
        timeout = self.node.config.timeout if timeout is None else timeout
        check_timeout(timeout)
        if self._is_closed:
            raise ChannelClosedError("this rank's backend is closed")
        terms = time.monotonic() + timeout
        failure: DistributedError | None = None
        while True:
            super().close()
            left = terms - time.monotonic()
            if left <= 0:
                raise RendezvousTimeoutError("establishing the ring", timeout, state=str(failure)) from failure
            epoch = self.node.wait_for_peers(0, left)
            # Before anything else: once every member holds, nobody accepts an epoch that only lets others in.
            self.node.hold(True)
            try:
                self._form(epoch, max(0.01, terms - time.monotonic()))
                self.barrier(timeout=max(0.01, terms - time.monotonic()))
                return self
            except RendezvousTimeoutError:
                raise
            except DistributedError as exc:
                failure = exc
                time.sleep(min(_PAUSE, max(0.0, terms - time.monotonic())))

    def _form(self, epoch: Epoch, timeout: float) -> None:
        channels = self.node.connect_members(epoch, timeout, machine_for(self.config))
        place = epoch.peers.index(self.node.peer_id)
        links = links_over(place, channels, self.config, self.node.credentials)
        super().__init__(place, len(epoch.members), self.config, *links, epoch=epoch.number % _EPOCHS)
        # The leader's word, which is checked: a ring that leaves somebody out would end every collective.
        self.ring = epoch.ring if sorted(epoch.ring) == list(range(self.world_size)) else ()
        self._has_lost, self._group = False, (epoch, self._engine)
        if self.node.epoch != epoch:  # its end came before there was a group to end
            raise AbortedError(f"{epoch} has ended")

    def _on_event(self, event: ClusterEvent) -> None:
        """In the node's thread of events."""
        if self._group is None:
            return
        epoch, engine = self._group
        if isinstance(event, ControlLost):
            engine.fail(lambda: ControlLostError(event.why))
        elif isinstance(event, PeerLost) and event.peer in epoch.peers:
            self._has_lost = True
            # Of one that has ended the engine learns by itself; and if it was only done first, the others may finish.
            if not event.died:
                engine.lose(epoch.peers.index(event.peer), f"{event.why} ({event.peer})")
        elif isinstance(event, EpochEnded) and event.epoch.key == epoch.key:
            with suppress(ChannelClosedError):  # it may end because this node leaves
                self.node.hold(False)  # nothing is left to be disturbed: who was cut off may come back
            if not self._has_lost:
                why = f"{event.epoch} has ended: {event.why}; establish_ring() goes on with those who are there"
                engine.fail(lambda: AbortedError(why))

    def close(self) -> None:
        """Leaves the group, and the cluster if the node is this backend's own."""
        self._is_closed = True
        self._unsubscribe()
        super().close()
        if self._owns_node:
            self.node.close()
        else:
            with suppress(ChannelClosedError):
                self.node.hold(False)


def _like_node(group: DistributedConfig, node: ClusterNode, keyword: str | None) -> DistributedConfig:
    """Links of a group are opened as the node opens all of its connections, and are a little more patient. Raises
    `ConfigError` if `group` asks for something else, and no keyword decides."""
    if keyword is None and group.encryption not in (None, node.config.encryption):
        why = f"in `group`, but the node has encryption {node.config.encryption}, by its configuration or by"
        raise ConfigError("encryption", group.encryption, f"{why} RINGFORT_ENCRYPTION; set the same for both")
    patience = (node.config.health.patience or CLUSTER_PATIENCE) + JITTER_ROOM + _LONGER
    return replace(group, encryption=node.config.encryption, patience=patience)
