"""Multicast DNS: peers of one network that announce themselves and hear each other, with nothing configured.

What is public is in the name of the service: the network id, so that other clusters are passed over unasked, and a
token that is new in every process. There are also a port and addresses, and nothing else: no host name, no identity.
Whoever wants may announce such names; what is heard is only an address to try, and the handshake decides. Only
addresses on a network of this machine are tried: multicast reaches no further, and a stranger must not be able to have
all peers of a cluster connect to whatever machine on the internet it names.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, cast

from zeroconf import IPVersion, ServiceInfo, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from ringfort.cluster.discovery.interfaces import Choice, is_on_link, reachable

SERVICE: Final = "_ringfort._tcp.local."
TOKEN_BYTES: Final = 8
"""Random, in every process. Two processes with the same would be taken for one until the handshake."""
MAX_HEARD: Final = 256
"""Announcements of our network that are followed at once: more than a home has, and a bound for whoever floods."""
MAX_ADDRESSES: Final = 16
"""Of one announcement that are used."""
THIS_MACHINE: Final = "this machine"
RETRY: Final = 5.0
"""Seconds until mDNS is tried again where the system refused it: another program may have let go of the port."""
_RESOLVE_MS: Final = 3000
"""Milliseconds to ask for the address of a name that was heard; the answer usually came with it."""
_NAME: Final = re.compile(r"([0-9a-f]{32})-([0-9a-f]{16})\." + re.escape(SERVICE))


@dataclass(frozen=True)
class Announcement:
    """Somebody who says it is of our network, and where. Nothing of it is proved."""

    token: str
    addresses: tuple[str, ...]
    port: int


@dataclass(frozen=True)
class Trouble:
    """Discovery does not work, or not everywhere; peers that are named by address still do."""

    what: str
    fix: str
    interface: str = ""


_OFF_LINK: Final = Trouble(
    "a peer is announced at addresses that are on no network of this machine; they are not tried",
    "if it is one of yours, name it with --peer",
)


class MdnsDiscovery:
    """Announces this process and listens for the others, in the running asyncio loop.

    The callbacks are called in that loop. `on_heard` is called again when an announcement changes.
    """

    def __init__(
        self,
        network_id: bytes,
        token: str,
        port: int,
        *,
        on_heard: Callable[[Announcement], None],
        on_gone: Callable[[str], None],
        on_trouble: Callable[[Trouble], None],
    ) -> None:
        self._network = network_id.hex()
        self._token = token
        self._port = port
        self._on_heard = on_heard
        self._on_gone = on_gone
        self._on_trouble = on_trouble
        self._choice = Choice(())
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._others: set[str] = set()
        """The names of peers of other clusters that announce themselves here, at most `MAX_HEARD`."""
        self.off_link = 0
        """Addresses that were announced and are on no network of this machine. They are not tried."""
        self._heard: set[str] = set()
        self._said: set[Trouble] = set()
        self._turn = asyncio.Lock()
        """Of opening and shutting: a network that changes twice in a moment must not leave two of them open."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, choice: Choice) -> None:
        """Announce and listen on the interfaces of `choice`. Raises nothing: what fails goes to `on_trouble`, and is
        tried again now and then."""
        async with self._turn:
            self._open(choice)

    async def update(self, choice: Choice) -> None:
        """The interfaces have changed: announce and listen on these from now on."""
        async with self._turn:
            if choice.interfaces != self._choice.interfaces:
                await self._shut()
                self._open(choice)

    async def close(self) -> None:
        """Say goodbye and stop. May be called again, and started again."""
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
            self._begin(self._open_again(choice))
            return
        self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE, handlers=[self._changed])
        # No probing whether the name is taken, which would take most of a second: the token is nobody else's.
        self._begin(self._announce(self._zeroconf, self._info()))

    async def _open_again(self, choice: Choice) -> None:
        await asyncio.sleep(RETRY)
        self._open(choice)

    async def _shut(self) -> None:
        zeroconf, self._zeroconf = self._zeroconf, None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._browser is not None:
            await self._browser.async_cancel()
            self._browser = None
        if zeroconf is not None:
            with suppress(OSError):  # an interface that has gone cannot be said goodbye on
                await zeroconf.async_close()
        self._heard.clear()
        self._others.clear()
        self._said.clear()

    def _say(self, trouble: Trouble) -> None:
        """Once until the interfaces change."""
        if trouble not in self._said:
            self._said.add(trouble)
            self._on_trouble(trouble)

    def _info(self) -> ServiceInfo:
        bare = [address.partition("%")[0] for address in self._choice.addresses]
        return ServiceInfo(
            SERVICE,
            f"{self._network}-{self._token}.{SERVICE}",
            port=self._port,
            server=f"ringfort-{self._token}.local.",
            parsed_addresses=bare[:MAX_ADDRESSES],
        )

    async def _announce(self, zeroconf: AsyncZeroconf, info: ServiceInfo) -> None:
        try:
            register = cast("Callable[..., Awaitable[Awaitable[None]]]", zeroconf.async_register_service)  # pyright: ignore[reportUnknownMemberType]
            sent = await register(info, cooperating_responders=True)
            await sent
        except OSError as exc:
            self._say(trouble_of(exc))

    def _changed(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        """Called by zeroconf, in the loop."""
        match = _NAME.fullmatch(name)
        if match is None or match[2] == self._token:
            return
        if match[1] != self._network:
            if state_change is ServiceStateChange.Removed:
                self._others.discard(name)
            elif len(self._others) < MAX_HEARD:
                self._others.add(name)
            return
        token = match[2]
        if state_change is ServiceStateChange.Removed:
            if token in self._heard:
                self._heard.discard(token)
                self._on_gone(token)
        elif token in self._heard or len(self._heard) < MAX_HEARD:
            self._heard.add(token)
            self._begin(self._resolve(zeroconf, name, token))
        else:
            self._say(
                Trouble(
                    f"more than {MAX_HEARD} peers are announced for this network; the rest are passed over",
                    "somebody floods this network with false ones: name a peer with --peer",
                )
            )

    def other_clusters(self) -> tuple[str, ...]:
        """The machines from which peers of other clusters announce themselves, an address for each; `this machine` for
        the own one. Asks nobody: what zeroconf has heard is enough."""
        if self._zeroconf is None:
            return ()
        return machines_of((_cached_addresses(self._zeroconf.zeroconf, name) for name in self._others), self._choice)

    async def _resolve(self, zeroconf: Zeroconf, name: str, token: str) -> None:
        info = AsyncServiceInfo(SERVICE, name)
        answered = await info.async_request(zeroconf, _RESOLVE_MS)
        if token not in self._heard:  # it has gone meanwhile
            return
        if not answered:
            self._heard.discard(token)  # it keeps no place that another may need
            return
        usable = reachable(info.parsed_scoped_addresses(IPVersion.All)[:MAX_ADDRESSES], self._choice)
        addresses = tuple(address for address in usable if is_on_link(address, self._choice))
        self.off_link += len(usable) - len(addresses)
        if usable and not addresses:
            self._say(_OFF_LINK)
        if addresses and info.port:
            self._on_heard(Announcement(token, addresses[:MAX_ADDRESSES], info.port))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(frozen=True)
class Heard:
    """Somebody who announces itself, of whichever network."""

    network: str
    token: str
    addresses: tuple[str, ...]


async def browse(choice: Choice, seconds: float) -> set[Heard]:
    """Who is announced, without announcing oneself. Raises `OSError` if mDNS is refused."""
    names: set[str] = set()

    def add(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is ServiceStateChange.Removed:
            names.discard(name)
        elif len(names) < MAX_HEARD:
            names.add(name)

    try:
        zeroconf = AsyncZeroconf(interfaces=_listeners(choice))
    except RuntimeError as exc:
        raise OSError(errno.ENODEV, str(exc)) from exc
    browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=[add])
    try:
        await asyncio.sleep(seconds)
        return {
            Heard(match[1], match[2], _cached_addresses(zeroconf.zeroconf, name))
            for name in names
            if (match := _NAME.fullmatch(name)) is not None
        }
    finally:
        await browser.async_cancel()
        await zeroconf.async_close()


def _cached_addresses(zeroconf: Zeroconf, name: str) -> tuple[str, ...]:
    """Those that came with the announcement, IPv4 first."""
    info = ServiceInfo(SERVICE, name)
    info.load_from_cache(zeroconf)
    return tuple(info.parsed_scoped_addresses(IPVersion.All)[:MAX_ADDRESSES])


def machines_of(announced: Iterable[Sequence[str]], choice: Choice) -> tuple[str, ...]:
    """One address for each machine among the announcements with these addresses; `this machine` for the one whose
    interfaces are `choice`."""
    own = {address.partition("%")[0] for address in choice.addresses}
    found = {
        THIS_MACHINE if any(one.partition("%")[0] in own for one in addresses) else addresses[0]
        for addresses in announced
        if addresses
    }
    return tuple(sorted(found))


def interface_troubles(choice: Choice) -> list[Trouble]:
    """What can be known beforehand: interfaces that carry no multicast, and there being none at all."""
    found = [
        Trouble(
            f"{interface.name} carries no multicast, so nobody is found through it",
            f"ip link set dev {interface.name} multicast on, or name a peer with --peer",
            interface.name,
        )
        for interface in choice.interfaces
        if not (interface.multicast or interface.is_loopback)
    ]
    if not choice.interfaces:
        found.append(Trouble("no interface is up, so nobody can be found", "connect a cable or join a Wi-Fi network"))
    return found


def _listeners(choice: Choice) -> list[str | int]:
    """What zeroconf is to bind to: an IPv4 address of each interface, and its index for IPv6."""
    listeners: list[str | int] = []
    for interface in choice.interfaces:
        listeners += [address for address in interface.addresses if ":" not in address][:1]
        if not interface.is_loopback and any(":" in address for address in interface.addresses):
            listeners.append(interface.index)
    return listeners


def trouble_of(exc: Exception) -> Trouble:
    """What the system said, with the fix."""
    number = exc.errno if isinstance(exc, OSError) else None
    match number:
        case errno.EADDRINUSE:
            return Trouble(
                "another program keeps the mDNS port 5353 to itself, so nobody is found",
                "set disallow-other-stacks=no in /etc/avahi/avahi-daemon.conf, or name a peer with --peer",
            )
        case errno.EACCES | errno.EPERM:
            return Trouble(
                "the system refuses multicast to this program, so nobody is found",
                "allow it (macOS: Settings, Privacy & Security, Local Network), or name a peer with --peer",
            )
        case errno.ENODEV | errno.ENETUNREACH | errno.EADDRNOTAVAIL | errno.ENETDOWN:
            return Trouble(f"an interface went away ({exc})", "nothing: it is tried again when the network changes")
        case _:
            return Trouble(f"mDNS could not be started ({exc})", "name a peer with --peer")
