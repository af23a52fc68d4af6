"""`AutoDiscoveryBackend`: ranks that find each other. A mesh over the members of the cluster's current epoch."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final

from ringfort.backends.base import Backend
from ringfort.backends.group import Group, Traffic
from ringfort.backends.mesh import MeshBackend
from ringfort.bootstrap.connection import Connection
from ringfort.bootstrap.links import links_over
from ringfort.bootstrap.terms import machine_for
from ringfort.cluster.core.events import ClusterEvent, ControlLost, EpochEnded, PeerLost
from ringfort.cluster.core.health import JITTER_ROOM, HealthSummary
from ringfort.cluster.core.peer_messages import Epoch
from ringfort.cluster.core.topology import ClusterTopology
from ringfort.cluster.node import ClusterNode
from ringfort.config import CLUSTER_PATIENCE, AutoDiscoveryConfig, DistributedConfig, check_timeout
from ringfort.errors import (
    ChannelClosedError,
    ConfigError,
    ControlLostError,
    DistributedError,
    EpochEndedError,
    NotEstablishedError,
    RendezvousTimeoutError,
)
from ringfort.identity.credentials import Credentials
from ringfort.transport.finalisers import weakly, when_gone
from ringfort.transport.socket_streams import SocketPoller

if TYPE_CHECKING:
    from typing_extensions import Self

_EPOCHS: Final = 1 << 32
"""A frame has 32 bits for the epoch: enough to tell neighbouring ones apart."""
_PAUSE: Final = 0.05
"""Seconds before a mesh that came to nothing is tried again in the same epoch."""
_LONGER: Final = 2.0
"""Seconds by which a data link is more patient than the control link, which may go another way: who is lost there is
lost first, and by the same word at all members."""


class _EpochBackend(MeshBackend):
    """A rank of the group that was formed in one epoch. It ends with the epoch."""

    epoch: Epoch | None = None
    """None for the world of one that a process is before it has met others."""
    has_lost = False


def _counted(node: ClusterNode) -> Callable[[], int]:
    """Numbers for collectives, which the node counts as work done: among equals, who has done most leads."""
    numbers = count(1)

    def next_operation() -> int:
        node.record_work()
        return next(numbers)

    return next_operation


def _bandwidths(node: ClusterNode, epoch: Epoch) -> dict[int, float]:
    """Bytes per second between this member and others, as the cluster has measured, by their ranks."""
    topology, me = node.topology(), node.peer_id
    links = {rank: topology.link(me, peer) for rank, peer in enumerate(epoch.peers) if peer != me}
    return {rank: link.bandwidth for rank, link in links.items() if link.bandwidth_out or link.bandwidth_in}


class AutoDiscoveryBackend(Backend):
    """A rank of whatever group the machines here have agreed on.

        backend = AutoDiscoveryBackend(AutoDiscoveryConfig())
        backend.wait_for_peers(2)
        backend.establish_ring()

    Until `establish_ring` it is a world of one. When a member is lost, what waits on it raises `PeerLostError`, and
    everything else of the group ends too; `establish_ring` then goes on with those who are left, under new ranks. Each
    time, it makes a group that knows nothing of the one before: what was kept of an old one, such as a sub-group, is
    refused with `EpochEndedError`.
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
        self._waited: Epoch | None = None
        self._forming: tuple[Epoch, tuple[Connection, ...]] | None = None
        """While the members of an epoch agree on their connections: what ends with it, for there is no mesh yet."""
        self._is_closed = False
        self.config = _like_node(group or DistributedConfig(), self.node, encryption)
        self._mesh = _EpochBackend(0, 1, self.config, {}, SocketPoller({}))
        try:
            self.node.start()
        except BaseException:
            self._mesh.close()
            raise
        # The node must not hold this: a group that is dropped ends at once.
        self._unsubscribe = self.node.subscribe(weakly(self._on_event, None))
        self._farewell = None if node is None else when_gone(self, partial(_let_go, node, self._unsubscribe))
        """What ends the use of a node that is not this backend's own; None for its own, which it closes."""

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that the group was formed in; None before the first."""
        return self._mesh.epoch

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

    def wait_for_peers(self, n: int = 1, timeout: float | None = None) -> Epoch:
        """Lets newcomers in until there are at least `n` peers beside this one; see `ClusterNode.wait_for_peers`.

        A group that was formed before ends when somebody comes; call `establish_ring` again then.
        """
        self.node.hold(False)
        epoch = self.node.wait_for_peers(n, timeout)
        formed = self._mesh.epoch
        if len(epoch.members) > 1 and (formed is None or formed.key != epoch.key):
            self._expect(epoch)
        return epoch

    def _expect(self, epoch: Epoch) -> None:
        """There are others: until this rank is connected with them, nothing else of this group can be used."""
        self._waited = epoch
        self._mesh.group.forget()  # so that no plan of the world of one is run in place of asking for the group

    def join_group(self, min_peers: int, timeout: float) -> Self:
        """`wait_for_peers` and `establish_ring` until the ring has at least `min_peers` ranks beside this one: who was
        there in the one may be gone in the other. All of it takes `timeout` seconds at most.

        Raises `RendezvousTimeoutError` that says who was seen, who was refused and why, and what to try.
        """
        check_timeout(timeout)
        deadline = time.monotonic() + timeout
        while True:
            self.wait_for_peers(min_peers, max(0.01, deadline - time.monotonic()))
            self.establish_ring(max(0.01, deadline - time.monotonic()))
            if self.world_size > min_peers:
                return self

    def establish_ring(self, timeout: float | None = None) -> Self:
        """Connects this rank with all members of the current epoch. All of them must call it.

        From then on `rank` and `world_size` are the epoch's, and newcomers wait. Whoever is lost meanwhile is done
        without. Raises `RendezvousTimeoutError` with who did not come, and why.
        """
        timeout = self.node.config.timeout if timeout is None else timeout
        check_timeout(timeout)
        if self._is_closed:
            raise ChannelClosedError("This rank has closed its backend")
        terms = time.monotonic() + timeout
        failure: DistributedError | None = None
        while True:
            self._mesh.group.fail(_replaced(self._mesh.epoch))
            self._mesh.close()
            left = terms - time.monotonic()
            if left <= 0:
                raise RendezvousTimeoutError("establishing the ring", timeout, state=str(failure)) from failure
            epoch = self.node.wait_for_peers(0, left)
            if len(epoch.members) > 1:
                self._expect(epoch)
            # Before anything else: once every member holds, nobody accepts an epoch that only lets others in.
            self.node.hold(True)
            try:
                self._form(epoch, terms)
                self._mesh.barrier(timeout=max(0.01, terms - time.monotonic()))
                self._waited = None
                return self
            except RendezvousTimeoutError:
                raise
            except DistributedError as exc:
                failure = exc
                time.sleep(min(_PAUSE, max(0.0, terms - time.monotonic())))

    def _form(self, epoch: Epoch, deadline: float) -> None:
        left = max(0.01, deadline - time.monotonic())
        connections = self.node.connect_members(epoch, left, machine_for(self.config))
        place = epoch.peers.index(self.node.peer_id)
        self._forming = (epoch, tuple(connections.values()))
        try:
            if self.node.epoch != epoch:  # its end came before there was anything to end
                _shut_down(connections.values())
            links = links_over(place, connections, self.config, self.node.credentials, deadline=deadline)
            mesh = _EpochBackend(
                place,
                len(epoch.members),
                self.config,
                *links,
                epoch=epoch.number % _EPOCHS,
                # The leader's word, which is checked: a ring that leaves somebody out would end every collective.
                ring=epoch.ring if sorted(epoch.ring) == list(range(len(epoch.members))) else (),
                bandwidths=_bandwidths(self.node, epoch),
                is_measured=True,
                next_operation=_counted(self.node),
            )
            mesh.epoch = epoch
            self._mesh = mesh
        finally:
            self._forming = None
        if self.node.epoch != epoch:  # its end came before there was a group to end
            raise EpochEndedError(str(epoch), "a member was lost or came while the ring was formed")

    def _on_event(self, event: ClusterEvent) -> None:
        """In the node's thread of events."""
        forming, mesh = self._forming, self._mesh
        if forming is not None and isinstance(event, EpochEnded) and event.epoch.key == forming[0].key:
            _shut_down(forming[1])  # a member that is silent says nothing more, and nothing else would end the wait
        if mesh.epoch is None:
            return
        if isinstance(event, ControlLost):
            mesh.group.fail(lambda: ControlLostError(event.why))
        elif isinstance(event, PeerLost) and event.peer in mesh.epoch.peers:
            mesh.has_lost = True
            # One that has left may only have been done first; the others may finish, and the engine learns by itself
            # who needed it. Of one that was killed it may not learn: a forked child can keep the connections open.
            if not event.left:
                mesh.group.lose(mesh.epoch.peers.index(event.peer), f"{event.why} ({event.peer})")
        elif isinstance(event, EpochEnded) and event.epoch.key == mesh.epoch.key:
            with suppress(ChannelClosedError):  # it may end because this node leaves
                self.node.hold(False)  # nothing is left to be disturbed: who was cut off may come back
            if not mesh.has_lost:
                epoch, why = str(event.epoch), f"{event.why}; establish_ring() goes on with those who are there"
                mesh.group.fail(lambda: EpochEndedError(epoch, why))

    # --- the group that is there now ------------------------------------------------------------------------------

    @property
    def group(self) -> Group:
        """The group of the epoch that was established last; before that, a world of one.

        Raises `NotEstablishedError` where `wait_for_peers` has found others and `establish_ring` was not called.
        """
        if self._waited is not None:
            raise NotEstablishedError(str(self._waited))
        return self._mesh.group

    @property
    def rank(self) -> int:
        return self._mesh.rank

    @property
    def world_size(self) -> int:
        return self._mesh.world_size

    def traffic(self) -> Traffic:
        return self._mesh.traffic()

    def abort(self, reason: str) -> None:
        self._mesh.abort(reason)

    def kill(self) -> None:
        """Closes all links without a word, as a process that dies does. For fault injection."""
        self._mesh.kill()

    def close(self) -> None:
        """Leaves the group, and the cluster if the node is this backend's own."""
        self._is_closed = True
        self._unsubscribe()
        self._mesh.close()
        if self._farewell is None:
            self.node.close()
        else:
            self._farewell.call_off()
            _let_go(self.node, self._unsubscribe)


def _let_go(node: ClusterNode, unsubscribe: Callable[[], None]) -> None:
    """A backend that nobody holds any more leaves its node as closing it would."""
    unsubscribe()
    with suppress(ChannelClosedError):
        node.hold(False)


def _shut_down(connections: Iterable[Connection]) -> None:
    """Ends what waits on them in another thread, which then closes them."""
    for connection in connections:
        with suppress(OSError):  # the peer has gone already
            connection.sock.shutdown(socket.SHUT_RDWR)


def _replaced(epoch: Epoch | None) -> Callable[[], DistributedError]:
    """What a call on the group of `epoch` raises, once another has taken its place."""
    name = "the world of one before the first epoch" if epoch is None else str(epoch)
    why = "establish_ring() was called since; make sub-groups anew from the context"
    return lambda: EpochEndedError(name, why)


def _like_node(group: DistributedConfig, node: ClusterNode, keyword: str | None) -> DistributedConfig:
    """Links of a group are opened as the node opens all of its connections, and are a little more patient. Raises
    `ConfigError` if `group` asks for something else, and no keyword decides."""
    if keyword is None and group.encryption not in (None, node.config.encryption):
        why = f"in `group`, but the node has encryption {node.config.encryption}, by its configuration or by"
        raise ConfigError("encryption", group.encryption, f"{why} RINGFORT_ENCRYPTION; set the same for both")
    patience = (node.config.health.patience or CLUSTER_PATIENCE) + JITTER_ROOM + _LONGER
    return replace(group, encryption=node.config.encryption, patience=patience)
