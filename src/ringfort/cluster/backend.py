"""`AutoDiscoveryBackend`: ranks that find each other: a mesh over the members of the cluster's current epoch."""

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
from ringfort.cluster.shown_events import ShownEvents
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
from ringfort.telemetry.trace import own_trace
from ringfort.transport.finalisers import weakly, when_gone
from ringfort.transport.socket_streams import SocketPoller

if TYPE_CHECKING:
    from typing_extensions import Self

_EPOCHS: Final = 1 << 32
"""A frame has 32 bits for the epoch: enough to tell neighbouring ones apart."""
_PAUSE: Final = 0.05
"""Seconds before a mesh that came to nothing is tried again in the same epoch."""
_LONGER: Final = 2.0
"""Seconds by which a data link is more patient than the control link, which may use another path. So a loss is found on
the control link first, with the same reason at all members."""


class _EpochBackend(MeshBackend):
    """A rank of the group of one epoch. It ends with the epoch."""

    epoch: Epoch | None = None
    """None for the group of one rank before the first epoch."""
    has_lost = False
    """A member was lost, so calls end with `PeerLostError` and not with `EpochEndedError`."""


def _counted(node: ClusterNode) -> Callable[[], int]:
    """Return a function that numbers collectives. The node counts them as work done: of equal peers, the one with the
    most work leads."""
    numbers = count(1)

    def next_operation() -> int:
        node.record_work()
        return next(numbers)

    return next_operation


def _bandwidths(node: ClusterNode, epoch: Epoch) -> dict[int, float]:
    """Return the measured bytes per second between this member and others, by rank."""
    topology, me = node.topology(), node.peer_id
    links = {rank: topology.link(me, peer) for rank, peer in enumerate(epoch.holders) if peer != me}
    return {rank: link.bandwidth for rank, link in links.items() if link.bandwidth_out or link.bandwidth_in}


def _speeds_out(node: ClusterNode, epoch: Epoch) -> dict[int, float]:
    """Return the measured bytes per second from this member to others, by rank."""
    topology, me = node.topology(), node.peer_id
    links = {rank: topology.link(me, peer) for rank, peer in enumerate(epoch.holders) if peer != me}
    return {rank: link.bandwidth_out for rank, link in links.items() if link.bandwidth_out}


class AutoDiscoveryBackend(Backend):
    """A rank of the group that the machines of the cluster have agreed on.

        backend = AutoDiscoveryBackend(AutoDiscoveryConfig())
        backend.wait_for_peers(2)
        backend.establish_ring()

    Until `establish_ring`, it is a group of one rank. When a member is lost, calls that wait for it raise
    `PeerLostError`, and the whole group ends. `establish_ring` then continues with the members that are left, under new
    ranks. Each call of it makes a new group: sub-groups and other parts of an old one raise `EpochEndedError`.
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
        """Start to look for peers, and return. `group` has the settings of the groups that are made.

        With `node`, use that node and leave it open in the end. Otherwise make one with `config`, `credentials` and
        `encryption`; see `choose_encryption` for what applies without the last one. Raise as `ClusterNode` and its
        `start` do.
        """
        self.node = node or ClusterNode(config, credentials=credentials, encryption=encryption)
        self._waited: Epoch | None = None
        self._forming: tuple[Epoch, tuple[Connection, ...]] | None = None
        """An epoch whose group is being made, and its connections, which are shut down if it ends meanwhile."""
        self._holds = False
        """Whether it has asked that new peers wait."""
        self._is_closed = False
        self._shown = ShownEvents() if node is None else None
        """What those who watch this process are told. Whoever has a node of its own tells it itself."""
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
        """Releases the node if that is not this backend's own. None for its own node, which `close` closes."""

    @property
    def epoch(self) -> Epoch | None:
        """The epoch of the current group; None before the first."""
        return self._mesh.epoch

    @property
    def peer_id(self) -> str:
        """The id of this process in the cluster."""
        return self.node.peer_id

    def health_summary(self) -> HealthSummary:
        """Return a summary of the health of all connected peers."""
        return self.node.health_summary()

    def topology(self) -> ClusterTopology:
        """Return the known machines and the links between them."""
        return self.node.topology()

    def wait_for_peers(self, n: int = 1, timeout: float | None = None) -> Epoch:
        """Admit new peers until there are at least `n` besides this one; see `ClusterNode.wait_for_peers`.

        A group that was established before ends when a peer joins; call `establish_ring` again then.
        """
        self.node.hold(False)
        epoch = self.node.wait_for_peers(n, timeout)
        formed = self._mesh.epoch
        if len(epoch.holders) > 1 and (formed is None or formed.key != epoch.key):
            self._expect(epoch)
        return epoch

    def _expect(self, epoch: Epoch) -> None:
        """Note that there are other members: until this rank is connected with them, the group cannot be used."""
        self._waited = epoch
        self._mesh.group.forget()  # otherwise a plan of the group of one rank would run

    def join_group(self, min_peers: int, timeout: float) -> Self:
        """Repeat `wait_for_peers` and `establish_ring` until the ring has at least `min_peers` ranks besides this one,
        because a peer may be lost between the two. All of it takes at most `timeout` seconds.

        Raise `RendezvousTimeoutError`, which says which peers were seen, which were refused and why, and what to try.
        """
        check_timeout(timeout)
        deadline = time.monotonic() + timeout
        while True:
            self.wait_for_peers(min_peers, max(0.01, deadline - time.monotonic()))
            self.establish_ring(max(0.01, deadline - time.monotonic()))
            if self.world_size > min_peers:
                return self

    def establish_ring(self, timeout: float | None = None) -> Self:
        """Connect this rank with all members of the current epoch. All of them must call it.

        Afterwards `rank` and `world_size` are those of the epoch, and new peers wait. If a member is lost meanwhile,
        the ring is established without it. Raise `RendezvousTimeoutError` with the members that are missing, and why.
        """
        timeout = self.node.config.timeout if timeout is None else timeout
        deadline = self._deadline(timeout)
        while True:
            self._mesh.group.fail(_replaced(self._mesh.epoch))
            self._mesh.close()
            epoch = self.node.wait_for_peers(0, max(0.01, deadline - time.monotonic()))
            # First of all: once every member holds, none accepts an epoch that only adds peers.
            self._holds = True
            self.node.hold(True)
            failure = self._try_connect(epoch, deadline)
            if failure is None:
                return self
            _pause(failure, timeout, deadline)

    def establish_epoch(self, epoch: Epoch, timeout: float) -> Self:
        """Connect this rank with all members of `epoch`, for a program that follows the epochs itself and needs nothing
        more of the group before. All of them must call it, and may call it again. New peers need not wait. Its links
        are not measured, which could take longer than all the rest: `group.measure_links()` makes up for that.

        Raise `EpochEndedError` as soon as `epoch` has ended, and `RendezvousTimeoutError` as `establish_ring` does.
        """
        deadline = self._deadline(timeout)
        while True:
            self._mesh.group.fail(_replaced(self._mesh.epoch))
            # Not `close`, which waits until the peers have closed their side: a frozen one never does.
            self._mesh.group.let_go()
            failure = self._try_connect(epoch, deadline, is_measured=False)
            if failure is None:
                return self
            if self.node.epoch != epoch:
                raise EpochEndedError(str(epoch), str(failure)) from failure
            _pause(failure, timeout, deadline)

    def _deadline(self, timeout: float) -> float:
        """Return when `timeout` has passed, if it is valid and this backend is open."""
        check_timeout(timeout)
        if self._is_closed:
            raise ChannelClosedError("This rank has closed its backend")
        return time.monotonic() + timeout

    def _try_connect(self, epoch: Epoch, deadline: float, *, is_measured: bool = True) -> DistributedError | None:
        """Connect this rank with all members of `epoch`. Return the error if it may be tried again."""
        if len(epoch.holders) > 1:
            self._expect(epoch)
        try:
            self._form(epoch, deadline, is_measured=is_measured)
            self._mesh.barrier(timeout=max(0.01, deadline - time.monotonic()))
        except RendezvousTimeoutError:
            raise
        except DistributedError as exc:
            return exc
        self._waited = None
        return None

    def _form(self, epoch: Epoch, deadline: float, *, is_measured: bool = True) -> None:
        left = max(0.01, deadline - time.monotonic())
        connections = self.node.connect_members(epoch, left, machine_for(self.config))
        place = epoch.holders.index(self.node.peer_id)
        self._forming = (epoch, tuple(connections.values()))
        try:
            if self.node.epoch != epoch:  # it ended before `_forming` was set
                _shut_down(connections.values())
            links = links_over(place, connections, self.config, self.node.credentials, deadline=deadline)
            mesh = _EpochBackend(
                place,
                len(epoch.holders),
                self.config,
                *links,
                epoch=epoch.number % _EPOCHS,
                # Checked, because it comes from the leader: no collective could complete on a ring without a member.
                ring=epoch.ring if sorted(epoch.ring) == list(range(len(epoch.holders))) else (),
                bandwidths=_bandwidths(self.node, epoch),
                speeds_out=_speeds_out(self.node, epoch),
                is_measured=is_measured,
                next_operation=_counted(self.node),
            )
            mesh.epoch = epoch
            self._mesh = mesh
        finally:
            self._forming = None
        if self.node.epoch != epoch:  # it ended before there was a group to fail
            raise EpochEndedError(str(epoch), "a member was lost or joined while the ring was established")

    def _on_event(self, event: ClusterEvent) -> None:
        """Called in the node's callback thread."""
        for kind, text in () if self._shown is None else self._shown.take(event):
            own_trace().event(kind, text)
        forming, mesh = self._forming, self._mesh
        if forming is not None and isinstance(event, EpochEnded) and event.epoch.key == forming[0].key:
            _shut_down(forming[1])  # a silent member sends nothing, so nothing else would end the wait
        if mesh.epoch is None:
            return
        if isinstance(event, ControlLost):
            mesh.group.fail(lambda: ControlLostError(event.why))
        elif isinstance(event, PeerLost) and event.peer in mesh.epoch.holders:
            mesh.has_lost = True
            # A peer that has left may only have finished first: the engine learns by itself which calls still need it.
            # Of a peer that was killed it may not learn, because a forked child can keep the connections open.
            if not event.left:
                mesh.group.lose(mesh.epoch.holders.index(event.peer), f"{event.why} ({event.peer})")
        elif isinstance(event, EpochEnded) and event.epoch.key == mesh.epoch.key:
            if self._holds:
                with suppress(ChannelClosedError):  # it may end because this node leaves
                    self.node.hold(False)  # peers that were cut off may come back
            if not mesh.has_lost:
                epoch, why = str(event.epoch), f"{event.why}; establish_ring() continues with the peers that are there"
                mesh.group.fail(lambda: EpochEndedError(epoch, why))

    # --- the current group ------------------------------------------------------------------------------------------

    @property
    def group(self) -> Group:
        """The group that was established last; before that, a group of one rank.

        Raise `NotEstablishedError` if `wait_for_peers` has found peers and `establish_ring` was not called since.
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
        """Close all links without a goodbye, as a process that dies does. For fault injection."""
        self._mesh.kill()

    def close(self) -> None:
        """Leave the group, and the cluster if the node is this backend's own."""
        self._is_closed = True
        self._unsubscribe()
        self._mesh.close()
        if self._farewell is None:
            self.node.close()
        else:
            self._farewell.call_off()
            _let_go(self.node, self._unsubscribe)


def _let_go(node: ClusterNode, unsubscribe: Callable[[], None]) -> None:
    """Release the node of a backend that has no reference left, as closing it would."""
    unsubscribe()
    with suppress(ChannelClosedError, ControlLostError):  # the node has ended
        node.hold(False)


def _pause(failure: DistributedError, timeout: float, deadline: float) -> None:
    """Wait before the next try. Raise `RendezvousTimeoutError` if there is no time for one."""
    left = deadline - time.monotonic()
    if left <= _PAUSE:
        raise RendezvousTimeoutError("establishing the ring", timeout, state=str(failure)) from failure
    time.sleep(_PAUSE)


def _shut_down(connections: Iterable[Connection]) -> None:
    """End the waits of another thread on these connections; that thread closes them."""
    for connection in connections:
        with suppress(OSError):  # the peer has closed it already
            connection.sock.shutdown(socket.SHUT_RDWR)


def _replaced(epoch: Epoch | None) -> Callable[[], DistributedError]:
    """Return what a call on the group of `epoch` raises once another group has replaced it."""
    name = "the group of one rank before the first epoch" if epoch is None else str(epoch)
    why = "establish_ring() was called since; create sub-groups again from the context"
    return lambda: EpochEndedError(name, why)


def _like_node(group: DistributedConfig, node: ClusterNode, keyword: str | None) -> DistributedConfig:
    """Return `group` with the node's encryption and a little more than its patience. Raise `ConfigError` if `group`
    asks for another encryption and no keyword decides."""
    if keyword is None and group.encryption not in (None, node.config.encryption):
        why = f"in `group`, but the node has encryption {node.config.encryption}, by its configuration or by"
        raise ConfigError("encryption", group.encryption, f"{why} RINGFORT_ENCRYPTION; set the same for both")
    patience = (node.config.health.patience or CLUSTER_PATIENCE) + JITTER_ROOM + _LONGER
    return replace(group, encryption=node.config.encryption, patience=patience)
