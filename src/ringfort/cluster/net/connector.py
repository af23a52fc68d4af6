"""`PeerConnector`: finds peers on the network and connects to them. I/O around the address directory: it receives
announcements, resolves names, connects to addresses when they are due, measures, and notices network changes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Final

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.discovery.directory import AddressDirectory, Source
from ringfort.cluster.discovery.interfaces import Choice, choose, reachable
from ringfort.cluster.discovery.mdns import Announcement, MdnsDiscovery, Trouble, machines_of
from ringfort.cluster.discovery.static import parse_peers, resolve
from ringfort.cluster.discovery.system import list_interfaces, watch_interfaces
from ringfort.cluster.net.control_link import connect
from ringfort.cluster.net.host import clock
from ringfort.cluster.net.probing import MAX_PROBES, Measurement, probe
from ringfort.cluster.net.setup import Setup
from ringfort.cluster.net.waiting import within
from ringfort.cluster.tasks import BackgroundTasks
from ringfort.config import format_address, parse_address
from ringfort.errors import ConfigError, DistributedError, NoConnectionError, RefusedError
from ringfort.transport.hello import Control

RESOLVE_AGAIN: Final = 10.0
"""Seconds between two lookups of the configured names: a machine that starts later gets its name then."""
MEASURE_WITHIN: Final = 1.5
"""Seconds that a group waits until the paths between its members are measured. A path that takes longer is not used."""
CONNECT_DELAY: Final = 0.25
"""Seconds that the peer with the higher token waits for the other one to connect: usually both learn of each other at
once, and one link is enough. If the other one has heard nothing, this one connects."""
MAX_REFUSALS: Final = 16
"""Reasons that are kept for the error if no peer is found."""


def key_of(peer: str) -> str:
    """Return a peer's key in the directory: its token, the last part of its id, which announcements have too."""
    return peer.rpartition(".")[2]


@dataclass(eq=False)
class PeerConnector:
    """Lives in the control service's loop."""

    setup: Setup
    on_connected: Callable[[Connection, str], None]
    """Takes over a new control connection to the address."""
    on_moved: Callable[[Choice], None]
    """The interfaces have changed."""
    on_measured: Callable[[str, Measurement], None]
    """An address was measured."""
    choice: Choice = field(default_factory=lambda: Choice(()))
    directory: AddressDirectory = field(default_factory=AddressDirectory)
    refusals: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_REFUSALS))
    troubles: dict[str, Trouble] = field(default_factory=dict[str, Trouble])
    _tasks: BackgroundTasks = field(default_factory=BackgroundTasks)
    _measuring: asyncio.Lock = field(default_factory=asyncio.Lock)
    _probing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_PROBES - 1))
    """As many as the other side answers at once, and room for it."""
    _wake: asyncio.TimerHandle | None = None
    _is_over: bool = False

    def __post_init__(self) -> None:
        self._named = parse_peers(self.setup.config.peers)
        self._mdns = MdnsDiscovery(
            self.setup.network_id, self.setup.token, self._heard, self.directory.withdraw, self._trouble
        )

    def choose(self) -> Choice:
        """Return the interfaces to use. Raises `ConfigError` for a configured one that does not exist."""
        self.choice = self.directory.choice = choose(list_interfaces(), self.setup.config.interfaces)
        return self.choice

    async def start(self, port: int) -> None:
        """Begin to look for peers; this one listens at `port`, or not at all if that is 0."""
        self._mdns.port = port
        if self.setup.config.multicast:
            await self._mdns.listen(self.choice)
        self._tasks.start(watch_interfaces(self.choice, self.setup.config.interfaces, self._moved))
        if self._named:
            self._tasks.start(self._resolve_named())
        self.look()

    async def close(self) -> None:
        """Stop, and withdraw the announcement."""
        self._is_over = True
        if self._wake is not None:
            self._wake.cancel()
        await self._tasks.cancel()
        await self._mdns.close()

    # --- what is heard --------------------------------------------------------------------------------------------

    def learn(self, peer: str, addresses: Iterable[str], introducer: str) -> None:
        """Note that `peer` is at `addresses`, according to `introducer`."""
        self._learn(key_of(peer), self._usable(addresses), Source.EXCHANGE, introducer)

    def other_clusters(self) -> tuple[str, ...]:
        """The machines from which peers of other clusters announce themselves, an address for each."""
        return machines_of((one.addresses for one in self._mdns.others()), self.choice)

    def _heard(self, heard: Announcement) -> None:
        addresses = tuple(format_address(host, heard.port) for host in heard.addresses)
        self.directory.withdraw(heard.token, keep=addresses)
        self._learn(heard.token, addresses, Source.MDNS)

    def _learn(self, token: str, addresses: Sequence[str], source: Source, introducer: str = "") -> None:
        def learn() -> None:
            self.directory.learn(addresses, source, clock(), claim=token, introducer=introducer)
            self.look()

        if not self.setup.listens or self.setup.token < token or token in self.directory.linked_peers:
            learn()
        else:
            asyncio.get_running_loop().call_later(CONNECT_DELAY, learn)

    def _trouble(self, trouble: Trouble) -> None:
        self.troubles[trouble.interface] = trouble

    def _usable(self, addresses: Iterable[str]) -> list[str]:
        """Return the addresses as this machine can use them, without those that are malformed."""
        found: list[str] = []
        for address in addresses:
            try:
                host, port = parse_address(address)
            except ConfigError:
                continue
            if port:
                found += [format_address(one, port) for one in reachable((host,), self.choice)]
        return found

    async def _resolve_named(self) -> None:
        while True:
            for host, port in self._named:
                found = await resolve(host, port)
                self.directory.learn(found, Source.STATIC, clock(), claim=f"{host}:{port}")
                if not found:
                    self._refused(f"{host}:{port}", "its name is not known")
            self.look()
            await asyncio.sleep(RESOLVE_AGAIN)

    def _moved(self, choice: Choice) -> None:
        self.choice = self.directory.choice = choice
        self.directory.network_changed(clock())
        self.on_moved(choice)
        if self.setup.config.multicast:
            self._tasks.start(self._mdns.listen(choice))
        self.look()

    # --- connecting -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Connect to the addresses that are due, and set a timer for the rest."""
        if self._is_over:
            return
        now = clock()
        self.directory.forget(now)
        for address in self.directory.due(now):
            self._tasks.start(self._try(address))
        if self._wake is not None:
            self._wake.cancel()
        deadline = self.directory.deadline
        if deadline < inf:
            loop = asyncio.get_running_loop()
            self._wake = loop.call_later(max(0.01, deadline - clock()), self.look)

    async def _try(self, address: str) -> None:
        linked = [token for token in self.directory.linked_peers if address in self.directory.addresses(token)]
        if not linked:
            await self._connect(address)
        elif self._is_known_way(linked[0], address):
            self.directory.skip(address, clock())
        else:
            await self.measure(address)
        self.look()

    async def _connect(self, address: str) -> None:
        host, port = parse_address(address)
        try:
            connection = await connect(host, port, self.setup.wall, Control())
        except DistributedError as exc:
            self.directory.failed(address, clock(), str(exc))
            if not isinstance(exc, NoConnectionError):
                self._refused(address, str(exc))
        else:
            self.on_connected(connection, address)

    def _refused(self, address: str, why: str) -> None:
        line = f"{address}: {why}"
        if line not in self.refusals:
            self.refusals.append(line)

    def refused(self, address: str, why: str) -> bool:
        """Note that a client was refused. Return whether that is news: for one that keeps connecting, the last port is
        enough."""
        host = address.rpartition(":")[0]
        known = [line for line in self.refusals if line.startswith(f"{host}:") and line.endswith(why)]
        for line in known:
            self.refusals.remove(line)
        self._refused(address, why)
        return not known

    # --- measuring ------------------------------------------------------------------------------------------------

    async def measure(self, address: str) -> Measurement | None:
        """Measure how fast an address is; one at a time, so that they do not measure each other."""
        host, port = parse_address(address)
        async with self._probing:
            try:
                found = await probe(host, port, self.setup.wall, self.setup.peer, self._measuring)
            except (DistributedError, TimeoutError) as exc:
                self.directory.failed(address, clock(), str(exc) or "it did not answer a probe in time")
                if isinstance(exc, RefusedError):
                    self._refused(address, str(exc))
                return None
        self.directory.answered(address, key_of(found.peer), clock(), found.round_trip, found.bandwidth)
        self.on_measured(address, found)
        return found

    async def ways_to(self, peer: str, addresses: Sequence[str]) -> list[str]:
        """Return all addresses of `peer`, the fastest first. If there are several paths, unmeasured ones are measured
        now."""
        token = key_of(peer)
        self.directory.learn(self._usable(addresses), Source.EXCHANGE, clock(), claim=token, introducer=peer)
        if len({self.choice.interface_at(address) for address in self.directory.addresses(token)}) > 1:
            with suppress(TimeoutError):
                await within(MEASURE_WITHIN, self.measure_ways(peer))
        return self.directory.addresses(token) or self._usable(addresses)

    async def measure_ways(self, peer: str) -> None:
        """Measure one address of `peer` on each interface that leads to it: others there take the same path."""
        token = key_of(peer)
        for address in self.directory.addresses(token):
            if not self._is_known_way(token, address) and not self.directory.has_failed(address):
                await self.measure(address)

    def _is_known_way(self, token: str, address: str) -> bool:
        way = self.choice.interface_at(address)
        known = (other for other in self.directory.addresses(token) if self.choice.interface_at(other) == way)
        return any(self.directory.is_measured(other) for other in known)

    # --- links ----------------------------------------------------------------------------------------------------

    def answered(self, address: str, peer: str) -> None:
        """Note that the link to `address` leads to `peer`."""
        self.directory.answered(address, key_of(peer), clock())

    def failed(self, address: str, why: str) -> None:
        """Note that the link to `address` failed; empty if the peer opened it."""
        self.directory.failed(address, clock(), why)
        self.look()

    def linked(self, peer: str, address: str | None) -> None:
        """Note that the link with `peer` goes to `address`, empty if the peer opened it; None if there is no link."""
        if address is not None:
            self.directory.linked(key_of(peer), address)
        elif key_of(peer) in self.directory.linked_peers:
            self.directory.unlinked(key_of(peer), clock())
            self.look()
