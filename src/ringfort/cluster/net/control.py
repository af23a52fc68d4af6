"""`Control`: one peer's control plane. It connects the parts; each decides or does one thing.

    core: PeerCore                      decides who leads, who is lost and which epoch follows. No I/O
    driver: CoreDriver                  tells the core what happens and carries out its instructions
    links: ControlLinks                    the open control links
    connector, listener                 dial peers and accept their connections
    votes: VoteWriter                   keeps the core's votes on the disk
    link_metrics: LinkMetrics           measured speeds, and the ring order that follows from them
    epoch_connections                   the data connections between the members of an epoch
    streams: PeerStreams                connections between the programs of two peers, outside an epoch
    telemetry: TelemetrySender          sends reports of the ranks to viewers that look

Everything runs in one asyncio loop, which `service.py` owns.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from ringfort.bootstrap.connection import CLOSED_BY, Connection
from ringfort.bootstrap.listener import Listener
from ringfort.cluster.core.contacts import node_of
from ringfort.cluster.core.events import (
    ClusterEvent,
    ConnectionRefused,
    EpochEnded,
    Fence,
    Noted,
    OtherClusters,
    PeerLost,
)
from ringfort.cluster.core.gossip import Gossip, MachineReport, Note, decode
from ringfort.cluster.core.other_clusters import OtherClusterWatch
from ringfort.cluster.core.peer import PeerCore
from ringfort.cluster.core.peer_messages import AnyMessage, Hello, Member
from ringfort.cluster.core.topology import NodeProfile
from ringfort.cluster.diagnosis.recent_events import RecentEvents
from ringfort.cluster.discovery.interfaces import Choice
from ringfort.cluster.discovery.mdns import THIS_MACHINE
from ringfort.cluster.net.connector import PeerConnector
from ringfort.cluster.net.control_link import ControlLink, ControlLinks
from ringfort.cluster.net.control_listener import ControlListener
from ringfort.cluster.net.core_driver import CoreDriver
from ringfort.cluster.net.durable_votes import KEPT_FOR, DurableVotes, VoteWriter
from ringfort.cluster.net.epoch_connections import EpochConnections
from ringfort.cluster.net.host import clock
from ringfort.cluster.net.link_metrics import LinkMetrics
from ringfort.cluster.net.peer_streams import PeerStreams
from ringfort.cluster.net.probing import MAX_PROBES, Measurement, answer_probe
from ringfort.cluster.net.profile import this_machine
from ringfort.cluster.net.setup import Setup
from ringfort.cluster.net.telemetry_sender import TelemetrySender
from ringfort.cluster.tasks import BackgroundTasks
from ringfort.errors import DistributedError, HandshakeError, ProtocolError
from ringfort.transport import hello

_log = logging.getLogger(__name__)

_LISTEN_AGAIN: Final = 1.0
"""Seconds before another attempt to listen on an address that was not available."""
STOP_WITHIN: Final = 2.0
"""Seconds that a goodbye may take. The last messages of a link may take one."""
_LOOK_FOR_OTHER_CLUSTERS: Final = 0.5
"""Seconds between two looks for other clusters."""


@dataclass(eq=False)
class Control:
    """One peer's control plane. Call its methods in the loop."""

    setup: Setup
    publish: Callable[[ClusterEvent], None]
    """Receives every event."""
    work_done: Callable[[], int] | None = None
    on_change: Callable[[], object] = lambda: None
    """Called before `publish`, and whenever the core may have changed."""
    before_tick: Callable[[], None] = lambda: None
    """Called before every heartbeat."""
    on_stream: Callable[[str, str, Connection], None] = lambda _peer, _purpose, connection: connection.close()
    """Takes over the streams that peers open."""
    on_fence: Callable[[Fence], None] = lambda _: None
    """Fences the program of an elastic run."""

    def __post_init__(self) -> None:
        setup = self.setup
        self.core = PeerCore(
            setup.member(),
            setup.config,
            clock(),
            name=setup.name,
            version=setup.version,
            ring_order=self._ring_order,
            work_done=self.work_done,
        )
        self.links = ControlLinks()
        self.connector = PeerConnector(setup, self._attach, self._moved, self._measured)
        self.listener = ControlListener(Listener(setup.wall, on_refused=self._refused), self._accepted)
        self.epoch_connections = EpochConnections(setup, self.connector)
        self.streams = PeerStreams(setup, self.connector, self.core.contacts, self.on_stream)
        self.telemetry = TelemetrySender(self.send_note, self.core.me.host, setup.name, setup.telemetry)
        self.link_metrics = LinkMetrics(NodeProfile(peer=setup.peer), self.core, self.connector)
        kept_for = inf if setup.config.elastic else KEPT_FOR
        store = DurableVotes(setup.home, setup.vote_scope, setup.peer, kept_for=kept_for)
        self.votes = VoteWriter(
            store, lambda votes, why: self.driver.call(self.core.persisted, votes, why), self._on_event
        )
        self.driver = CoreDriver(
            self.core,
            send=self.links.send,
            close=self._close,
            learn=self.connector.learn,
            persist=self.votes.write,
            fence=self.on_fence,
            publish=self._on_event,
            changed=self.on_change,
            before_tick=self._before_tick,
        )
        self.recent = RecentEvents()
        self._probing = asyncio.Semaphore(MAX_PROBES)
        self._tasks = BackgroundTasks()

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen, announce this peer and look for others.

        Raises `ConfigError`, `TransportError` or `IdentityError`; nothing is left open then.
        """
        setup = self.setup
        choice = self.connector.choose()
        try:
            # Before the core hears of any peer: the disk may be slow, and no cluster may be founded meanwhile.
            self.driver.call(self.core.recall, await self.votes.open())
            if setup.listens:
                self.listener.open(choice.addresses, setup.config.port)
            own = this_machine(setup.peer, self.core.me.host, setup.accelerators, setup.version)
            self.link_metrics.describe(replace(own, program=setup.config.program[:256], started=clock()))
            self._tell_addresses()
            await self._vouch()
            await self.connector.start(self.listener.port)
            self._moved(choice)
        except BaseException:
            await self.stop()
            raise
        self.driver.call(self.core.tick)
        self._tasks.start(self._watch_other_clusters())

    async def stop(self, why: str = "", *, died: bool = False) -> None:
        """Say goodbye and close everything, within about two seconds. `died`: the program ended without closing its
        node. May be called again."""
        links = list(self.links)
        self.driver.call(self.core.leave, why, died=died)
        self.driver.stop()
        self.listener.close()
        self.epoch_connections.close()
        for link in self.links.open.values():  # their peers never said who they are; the core has closed the others
            link.abort()
        ends: list[Awaitable[object]] = [self.connector.close(), self.votes.finish(), self.telemetry.stop()]
        ends += [link.ended.wait() for link in links]
        # Not `wait_for`, which waits without limit for what it has cancelled: zeroconf sometimes ignores cancellation.
        endings = [asyncio.ensure_future(end) for end in ends]
        await asyncio.wait(endings, timeout=STOP_WITHIN)
        for ending in endings:
            ending.cancel()
        await self._tasks.cancel(timeout=1.0)
        for link in (*links, *self.links):  # also those that were accepted before the end and attached after it
            link.abort()
        await asyncio.sleep(0)  # a transport closes its socket in the loop's next turn
        self.votes.close(is_released=self.core.is_released)

    def _before_tick(self) -> None:
        self.before_tick()
        self.votes.store.touch()

    async def _vouch(self) -> None:
        """Report the processes of this node that have ended."""
        for peer, votes in await self.votes.ended_processes():
            self.driver.call(self.core.vouch, peer, votes)

    async def _watch_other_clusters(self) -> None:
        watch = OtherClusterWatch()
        while True:
            epoch = self.core.epoch
            is_waiting = epoch is None or len(epoch.members) == 1
            # Not this machine: a demo or a test that runs beside this program is not what it waits for.
            machines = tuple(m for m in self.connector.other_clusters() if m != THIS_MACHINE) if is_waiting else ()
            if watch.look(clock(), machines, is_waiting=is_waiting):
                self._on_event(OtherClusters(machines))
            await asyncio.sleep(_LOOK_FOR_OTHER_CLUSTERS)

    # --- connections ------------------------------------------------------------------------------------------------

    def _accepted(self, connection: Connection) -> None:
        """Hand over an incoming connection by its purpose."""
        match connection.purpose:
            case hello.Control():
                self._attach(connection)
            case hello.Probe():
                self._tasks.start(self._answer_probe(connection), connection.sock)
            case hello.OpenStream() as said:
                self.streams.accepted(connection, said)
            case hello.Meet() as said:
                self.epoch_connections.accepted(connection, said)
            case _:
                why = "this is a peer of a cluster; a group with fixed ranks is joined at its rank 0"
                connection.refuse("group", why)
                self._refused(connection.address, why)

    def _refused(self, address: str, why: str) -> None:
        if self.connector.refused(address, why) and not why.startswith(CLOSED_BY):
            self._on_event(ConnectionRefused(address.rpartition(":")[0], why))

    def _attach(self, connection: Connection, dialled: str = "") -> None:
        """Begin a control link on an open connection."""
        self._tasks.start(self._attaching(connection, dialled), connection.sock)

    async def _attaching(self, connection: Connection, dialled: str) -> None:
        link = ControlLink(
            connection, lambda body: self._received(number, body), lambda why: self._link_ended(number, why), dialled
        )
        try:
            node = self.setup.proved(connection.identity)
        except HandshakeError as exc:
            connection.close()
            self._refused(link.remote, str(exc))
            self.connector.failed(dialled, str(exc))
            return
        number = self.links.add(link)
        try:
            await link.attach()
        except OSError as exc:
            self.links.open.pop(number, None)
            self.connector.failed(dialled, str(exc))
            return
        self.driver.call(self.core.connected, number, node, initiated=bool(dialled))
        self.links.send(number, MachineReport.of(self.link_metrics.own, clock()))

    async def _answer_probe(self, connection: Connection) -> None:
        if self._probing.locked():
            connection.close()
            return
        async with self._probing:
            try:
                self._measured(connection.address, await answer_probe(connection, self.setup.peer))
            except (DistributedError, TimeoutError) as exc:
                _log.debug("A probe from %s failed: %s", connection.address, exc)

    # --- links ------------------------------------------------------------------------------------------------------

    def _received(self, number: int, body: bytes) -> None:
        link = self.links.open.get(number)
        if link is None:
            return
        try:
            message = decode(body)
        except ProtocolError as exc:
            self.driver.call(self.core.garbled, number, str(exc))
            return
        if isinstance(message, Gossip):
            self._on_gossip(number, link, message)
            return
        self.driver.call(self.core.received, number, message)
        if not link.peer:
            self._on_first_message(link, message)

    def _on_first_message(self, link: ControlLink, message: AnyMessage) -> None:
        """Learn from the first message who is at the other end of a link."""
        if not isinstance(message, Hello):
            return
        peer = link.peer = message.member.peer
        if peer == self.setup.peer:
            self.connector.directory.is_own((link.dialled,))
            return
        if self.core.contacts.get(peer) is None:
            self.connector.failed(link.dialled, "it was refused")
            return
        if link.dialled:
            self.connector.answered(link.dialled, peer)
            self._tasks.start(self.link_metrics.measure(peer))
        self._update_directory(peer)
        self.connector.learn(peer, message.member.addresses, peer)
        if self.setup.slots == 0 and not self.setup.config.elastic:
            self._tasks.start(self.link_metrics.measure_range(peer))

    def _on_gossip(self, number: int, link: ControlLink, message: Gossip) -> None:
        now = clock()
        contact = self.core.contacts.get(link.peer) if link.peer else None
        if link.is_flooding(now):
            self.driver.call(self.core.garbled, number, "it floods this peer with messages")
        elif contact is None or contact.link != number or contact.hello is None:
            return
        elif isinstance(message, Note):
            if not self.telemetry.takes(link.peer, message.topic, message.body):
                self.publish(Noted(link.peer, message.topic, message.body))
        elif isinstance(message, MachineReport):
            self.link_metrics.on_machine_report(contact.hello, message, now)
        else:
            self.link_metrics.on_link_report(link.peer, message)

    def send_note(self, topic: str, body: bytes, peer: str | None) -> None:
        """Send a note to the program of one peer, or of all."""
        self.links.broadcast((c for c in self.core.contacts if peer in (None, c.peer)), Note(topic, body))

    def _link_ended(self, number: int, why: str) -> None:
        link = self.links.open.pop(number, None)
        if link is None:
            return
        self.driver.call(self.core.closed, number, why)
        if link.peer:
            self._update_directory(link.peer)
        else:
            self.connector.failed(link.dialled, why)

    def _close(self, number: int) -> None:
        link = self.links.close(number)
        if link is not None and link.peer:
            self._update_directory(link.peer)

    def _update_directory(self, peer: str) -> None:
        """Tell the address directory which address the link with `peer` uses now, if there is a link."""
        contact = self.core.contacts.get(peer)
        link = None if contact is None else self.links.open.get(contact.link)
        self.connector.linked(peer, None if link is None else link.dialled)

    def _measured(self, address: str, found: Measurement) -> None:
        """Share the result of a probe. A control link stays on its path: only data follows the fastest one."""
        is_linked = self.core.contacts.get(found.peer) is not None
        if not self.core.is_over and is_linked and self.link_metrics.add(found, address):
            self.links.broadcast(self.core.contacts, self.link_metrics.link_report())

    def _ring_order(self, members: Sequence[Member]) -> Sequence[int]:
        return self.link_metrics.ring_order(members)  # the metrics need the core, so they exist after it

    # --- events and addresses -----------------------------------------------------------------------------------------

    def _on_event(self, event: ClusterEvent) -> None:
        self.recent.add(event)
        if isinstance(event, PeerLost):
            self._update_directory(event.peer)
            self.link_metrics.forget(event.peer)
            if node_of(event.peer) == node_of(self.setup.peer) and not self.core.is_over:
                self._tasks.start(self._vouch())
        elif isinstance(event, EpochEnded):
            self.epoch_connections.ended(event.epoch, event.why)
        self.publish(event)

    def _moved(self, choice: Choice) -> None:
        """Listen on the interfaces of `choice`, if they are still the current ones."""
        if choice is not self.connector.choice or self.core.is_over:
            return
        self.link_metrics.forget_all()
        troubles = self.listener.move(choice.addresses) if self.setup.listens else []
        if troubles:
            # An IPv6 address is not available in its first second, during duplicate address detection.
            _log.info("%s", "; ".join(troubles))
            asyncio.get_running_loop().call_later(_LISTEN_AGAIN, self._moved, choice)
        self._tell_addresses()

    def _tell_addresses(self) -> None:
        self.connector.directory.is_own(self.listener.addresses)
        # The scope of a link-local address, as in [fe80::1%eth0]:52415, means nothing on another machine.
        told = [re.sub("%[^]]*", "", address) for address in self.listener.addresses]
        self.driver.call(self.core.set_addresses, told)
