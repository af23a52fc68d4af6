"""Multicast DNS: peers of one network announce themselves and hear each other without configuration.

The name of the service is public. It contains the network id, so that other clusters can be ignored without a query,
and a token that is new in every process. A port and addresses follow, but no host name and no identity. Anyone can
announce such names: an announcement is only an address to try, and the handshake decides. Only addresses on a network
of this machine are tried, because multicast reaches no further and an outsider must not be able to make all peers of a
cluster connect to some machine on the internet.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple, cast

from zeroconf import IPVersion, ServiceInfo, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from ringfort.cluster.discovery.interfaces import Choice, is_on_link, reachable
from ringfort.cluster.tasks import BackgroundTasks

SERVICE: Final = "_ringfort._tcp.local."
TOKEN_BYTES: Final = 8
"""Length of the random token. Two processes with the same token would be taken for one until the handshake."""
MAX_HEARD: Final = 256
"""Limit of the announcements of our network that are followed at once, against floods."""
MAX_ADDRESSES: Final = 16
"""Addresses of one announcement that are used."""
THIS_MACHINE: Final = "this machine"
RETRY: Final = 5.0
"""Seconds until mDNS is tried again after the system refused it: another program may have released the port."""
_RESOLVE_MS: Final = 3000
"""Milliseconds to wait for the address of a name; it usually arrives with the name."""
_NAME: Final = re.compile(r"([0-9a-f]{32})-([0-9a-f]{16})\." + re.escape(SERVICE))


class Announcement(NamedTuple):
    """A process that claims to be in a cluster, and its addresses. Nothing of it is proved."""

    network: str
    token: str
    addresses: tuple[str, ...]
    port: int


class Trouble(NamedTuple):
    """Discovery does not work, at least on one interface. Peers that are named by address can still be reached."""

    what: str
    fix: str
    interface: str = ""


_FLOOD: Final = Trouble(
    f"more than {MAX_HEARD} peers are announced for this network; the rest are ignored",
    "someone floods this network with false announcements: name a peer with --peer",
)
_OFF_LINK: Final = Trouble(
    "a peer announces addresses that are on no network of this machine; they are not tried",
    "if it is one of yours, name it with --peer",
)


@dataclass(eq=False)
class MdnsDiscovery:
    """Announces this process and listens for others, in the running asyncio loop.

    The callbacks run in that loop. `on_heard` is called again when an announcement changes.
    """

    network_id: bytes
    token: str
    on_heard: Callable[[Announcement], None]
    on_gone: Callable[[str], None]
    on_trouble: Callable[[Trouble], None]
    port: int = 0
    """Where this process listens; 0 to announce nothing."""
    _choice: Choice | None = None
    _zeroconf: AsyncZeroconf | None = None
    _browser: AsyncServiceBrowser | None = None
    _others: set[str] = field(default_factory=set[str])
    """The names of announced peers of other clusters, at most `MAX_HEARD`."""
    _heard: set[str] = field(default_factory=set[str])
    _said: set[Trouble] = field(default_factory=set[Trouble])
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while opening and closing: a network that changes twice in quick succession must not leave two open."""
    _tasks: BackgroundTasks = field(default_factory=BackgroundTasks)

    async def listen(self, choice: Choice) -> None:
        """Announce and listen on the interfaces of `choice`, and on no others from now on. Failures are reported to
        `on_trouble` and retried."""
        async with self._turn:
            if self._choice is None or choice.interfaces != self._choice.interfaces:
                await self._shut()
                self._open(choice)

    async def close(self) -> None:
        """Withdraw the announcement and stop. Idempotent; `listen` may follow."""
        async with self._turn:
            await self._shut()

    def _open(self, choice: Choice) -> None:
        self._choice = choice
        for trouble in interface_troubles(choice):
            self._say(trouble)
        listeners = _listeners(choice)
        if not listeners:
            return
        try:
            self._zeroconf = AsyncZeroconf(interfaces=listeners)
        except (OSError, RuntimeError) as exc:
            self._say(trouble_of(exc))
            self._tasks.start(self._open_again(choice))
            return
        self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE, handlers=[self._changed])
        # Without probing whether the name is taken, which would take most of a second: the token is unique.
        if self.port:
            self._tasks.start(self._announce(self._zeroconf, self._info(choice)))

    async def _open_again(self, choice: Choice) -> None:
        await asyncio.sleep(RETRY)
        self._open(choice)

    async def _shut(self) -> None:
        zeroconf, self._zeroconf, self._choice = self._zeroconf, None, None
        await self._tasks.cancel()
        if self._browser is not None:
            await self._browser.async_cancel()
            self._browser = None
        if zeroconf is not None:
            with suppress(OSError):  # no goodbye can be sent on an interface that is gone
                await zeroconf.async_close()
        self._heard.clear()
        self._others.clear()
        self._said.clear()

    def _say(self, trouble: Trouble) -> None:
        """Report a trouble once until the interfaces change."""
        if trouble not in self._said:
            self._said.add(trouble)
            self.on_trouble(trouble)

    def _info(self, choice: Choice) -> ServiceInfo:
        bare = [address.partition("%")[0] for address in choice.addresses]
        return ServiceInfo(
            SERVICE,
            f"{self.network_id.hex()}-{self.token}.{SERVICE}",
            port=self.port,
            server=f"ringfort-{self.token}.local.",
            parsed_addresses=bare[:MAX_ADDRESSES],
        )

    async def _announce(self, zeroconf: AsyncZeroconf, info: ServiceInfo) -> None:
        try:
            register = cast("Callable[..., Awaitable[Awaitable[None]]]", zeroconf.async_register_service)  # pyright: ignore[reportUnknownMemberType]
            await (await register(info, cooperating_responders=True))
        except OSError as exc:
            self._say(trouble_of(exc))

    def _changed(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        """Take a change of an announcement. Called by zeroconf, in the loop."""
        match = _NAME.fullmatch(name)
        if match is None or match[2] == self.token:
            return
        network, token = match.groups()
        is_removed = state_change is ServiceStateChange.Removed
        if network != self.network_id.hex():
            if is_removed:
                self._others.discard(name)
            elif len(self._others) < MAX_HEARD:
                self._others.add(name)
        elif is_removed:
            if token in self._heard:
                self._heard.discard(token)
                self.on_gone(token)
        elif token in self._heard or len(self._heard) < MAX_HEARD:
            self._heard.add(token)
            self._tasks.start(self._resolve(zeroconf, name, token))
        else:
            self._say(_FLOOD)

    def others(self) -> list[Announcement]:
        """Return the announced peers of other clusters. No query is sent: what zeroconf has received is enough."""
        found: list[Announcement] = []
        for name in self._others:
            network, token = name.removesuffix(f".{SERVICE}").split("-")
            info = ServiceInfo(SERVICE, name)
            if self._zeroconf is not None:
                info.load_from_cache(self._zeroconf.zeroconf)
            addresses = tuple(info.parsed_scoped_addresses(IPVersion.All)[:MAX_ADDRESSES])
            found.append(Announcement(network, token, addresses, info.port or 0))
        return found

    async def _resolve(self, zeroconf: Zeroconf, name: str, token: str) -> None:
        info = AsyncServiceInfo(SERVICE, name)
        answered = await info.async_request(zeroconf, _RESOLVE_MS)
        if token not in self._heard or self._choice is None:  # it was withdrawn meanwhile
            return
        if not answered:
            self._heard.discard(token)  # so that another announcement can take its place
            return
        usable = reachable(info.parsed_scoped_addresses(IPVersion.All)[:MAX_ADDRESSES], self._choice)
        addresses = tuple(address for address in usable if is_on_link(address, self._choice))
        if usable and not addresses:
            self._say(_OFF_LINK)
        if addresses and info.port:
            self.on_heard(Announcement(self.network_id.hex(), token, addresses[:MAX_ADDRESSES], info.port))


async def browse(choice: Choice, seconds: float) -> tuple[list[Announcement], list[Trouble]]:
    """Return all announced processes, without announcing this one, and what hinders discovery."""
    troubles: list[Trouble] = []
    # A member of no cluster, to which all announcements are of others.
    mdns = MdnsDiscovery(b"", "", lambda _: None, lambda _: None, troubles.append)
    await mdns.listen(choice)
    try:
        await asyncio.sleep(seconds)
        return mdns.others(), troubles
    finally:
        await mdns.close()


def machines_of(announced: Iterable[Sequence[str]], choice: Choice) -> tuple[str, ...]:
    """Return one address of each machine among announcements with these addresses; `this machine` for the one whose
    interfaces are `choice`."""
    own = {address.partition("%")[0] for address in choice.addresses}
    found = {
        THIS_MACHINE if any(one.partition("%")[0] in own for one in addresses) else addresses[0]
        for addresses in announced
        if addresses
    }
    return tuple(sorted(found))


def interface_troubles(choice: Choice) -> list[Trouble]:
    """Return the troubles that are known beforehand: interfaces without multicast, or no interface at all."""
    found = [
        Trouble(
            f"{interface.name} carries no multicast, so no peer is found through it",
            f"ip link set dev {interface.name} multicast on, or name a peer with --peer",
            interface.name,
        )
        for interface in choice.interfaces
        if not (interface.multicast or interface.is_loopback)
    ]
    if not choice.interfaces:
        found.append(Trouble("no interface is up, so no peer can be found", "connect a cable or join a Wi-Fi network"))
    return found


def _listeners(choice: Choice) -> list[str | int]:
    """Return what zeroconf binds to: an IPv4 address of each interface, and its index for IPv6."""
    listeners: list[str | int] = []
    for interface in choice.interfaces:
        listeners += [address for address in interface.addresses if ":" not in address][:1]
        if not interface.is_loopback and any(":" in address for address in interface.addresses):
            listeners.append(interface.index)
    return listeners


def trouble_of(exc: Exception) -> Trouble:
    """Return the trouble that an error of the system means, with its fix."""
    match getattr(exc, "errno", None):
        case errno.EADDRINUSE:
            return Trouble(
                "another program uses the mDNS port 5353 exclusively, so no peer is found",
                "set disallow-other-stacks=no in /etc/avahi/avahi-daemon.conf, or name a peer with --peer",
            )
        case errno.EACCES | errno.EPERM:
            return Trouble(
                "the system denies multicast to this program, so no peer is found",
                "allow it (macOS: Settings, Privacy & Security, Local Network), or name a peer with --peer",
            )
        case errno.ENODEV | errno.ENETUNREACH | errno.EADDRNOTAVAIL | errno.ENETDOWN:
            return Trouble(f"an interface went away ({exc})", "nothing: it is tried again when the network changes")
        case _:
            return Trouble(f"mDNS could not be started ({exc})", "name a peer with --peer")
