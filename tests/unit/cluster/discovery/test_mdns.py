"""mDNS as far as one process can tell; between hosts it is tested in tests/cluster/test_discovery.py."""

from __future__ import annotations

import asyncio
import errno
import secrets
from typing import Any

import pytest
from zeroconf import ServiceInfo, ServiceStateChange

from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.discovery import mdns
from ringfort.cluster.discovery.interfaces import Choice, Interface, choose
from ringfort.cluster.discovery.mdns import MAX_HEARD, SERVICE, Announcement, MdnsDiscovery, Trouble
from ringfort.cluster.discovery.system import watch_interfaces

NETWORK = bytes(range(16))
LOOPBACK = choose([Interface(name="lo", addresses=("127.0.0.1",), kind=LinkKind.LOOPBACK)])


class Recorder(MdnsDiscovery):
    """Keeps what it hears, and resolves nothing unless it is started."""

    def __init__(self, token: str = "0" * 16, network: bytes = NETWORK, port: int = 1) -> None:
        self.heard: asyncio.Queue[Announcement] = asyncio.Queue()
        self.gone: asyncio.Queue[str] = asyncio.Queue()
        self.troubles: list[Trouble] = []
        super().__init__(
            network,
            token,
            on_heard=self.heard.put_nowait,
            on_gone=self.gone.put_nowait,
            on_trouble=self.troubles.append,
            port=port,
        )

    def tell(self, name: str, change: ServiceStateChange = ServiceStateChange.Added) -> None:
        self._changed(None, SERVICE, name, change)  # pyright: ignore[reportArgumentType]


def name(token: str, network: bytes = NETWORK) -> str:
    return f"{network.hex()}-{token}.{SERVICE}"


def test_machines_are_counted_and_not_their_programs() -> None:
    choice = choose([Interface(name="e", addresses=("10.0.0.1", "fe80::1%e"), prefixes=(24, 64), hardware=True)])
    announced = [("10.0.0.2", "fe80::2"), ("10.0.0.2", "fe80::2"), ("10.0.0.3",), ("fe80::1",), ()]
    assert mdns.machines_of(announced, choice) == ("10.0.0.2", "10.0.0.3", "this machine")


def test_who_says_goodbye_is_no_stranger_any_more() -> None:
    recorder = Recorder()
    recorder.tell(name("1" * 16, bytes(16)))
    assert len(recorder._others) == 1
    recorder.tell(name("1" * 16, bytes(16)), ServiceStateChange.Removed)
    assert not recorder._others


def test_two_of_one_network_hear_each_other_on_loopback_and_say_goodbye() -> None:
    async def scene() -> None:
        network = secrets.token_bytes(16)
        one, two = Recorder("1" * 16, network, 1001), Recorder("2" * 16, network, 1002)
        stranger = Recorder("3" * 16, secrets.token_bytes(16), 1003)
        await asyncio.gather(*(each.listen(LOOPBACK) for each in (one, two, stranger)))
        assert await asyncio.wait_for(one.heard.get(), 10) == Announcement(
            network.hex(), "2" * 16, ("127.0.0.1",), 1002
        )
        assert await asyncio.wait_for(two.heard.get(), 10) == Announcement(
            network.hex(), "1" * 16, ("127.0.0.1",), 1001
        )
        assert "this machine" in mdns.machines_of((heard.addresses for heard in one.others()), LOOPBACK)
        await two.close()
        assert await asyncio.wait_for(one.gone.get(), 10) == "2" * 16
        await asyncio.gather(one.close(), stranger.close(), two.close())
        assert stranger.heard.empty()
        assert (one.troubles, two.troubles) == ([], [])

    asyncio.run(scene())


class Liar(Recorder):
    """Somebody who has heard the public name of the network and announces what it likes."""

    def __init__(self, token: str, network: bytes, addresses: list[str]) -> None:
        super().__init__(token, network, 53)
        self._lies = addresses

    def _info(self, choice: Choice) -> ServiceInfo:
        info = super()._info(choice)
        return ServiceInfo(SERVICE, info.name, port=53, server=info.server, parsed_addresses=self._lies)


def test_an_address_that_is_on_no_network_of_this_machine_is_not_told() -> None:
    async def scene() -> None:
        network = secrets.token_bytes(16)
        one = Recorder("1" * 16, network)
        troubles: asyncio.Queue[Trouble] = asyncio.Queue()
        one.on_trouble = troubles.put_nowait
        liars = [Liar("2" * 16, network, ["8.8.8.8"]), Liar("3" * 16, network, ["8.8.8.8", "9.9.9.9", "127.0.0.1"])]
        await one.listen(LOOPBACK)
        for liar in liars:
            await liar.listen(LOOPBACK)
        assert await asyncio.wait_for(one.heard.get(), 10) == Announcement(network.hex(), "3" * 16, ("127.0.0.1",), 53)
        trouble = await asyncio.wait_for(troubles.get(), 10)
        await asyncio.gather(one.close(), *(liar.close() for liar in liars))
        assert one.heard.empty()
        assert trouble.fix == "if it is one of yours, name it with --peer"

    asyncio.run(asyncio.wait_for(scene(), 20))


@pytest.mark.parametrize(
    "heard",
    [
        name("0" * 16),  # ourselves
        name("1" * 16, bytes(16)),  # another network
        name("1" * 15),
        name("G" * 16),
        f"printer.{SERVICE}",
        name("1" * 16).replace("_ringfort", "_ipp"),
        "",
    ],
)
def test_names_of_others_are_passed_over(heard: str) -> None:
    async def scene() -> None:
        recorder = Recorder()
        recorder.tell(heard)
        recorder.tell(heard, ServiceStateChange.Removed)
        assert not recorder._tasks
        assert recorder.gone.empty()

    asyncio.run(scene())


def test_a_flood_is_followed_to_a_limit_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: Any) -> None:
        return None

    async def scene() -> None:
        recorder = Recorder()
        monkeypatch.setattr(recorder, "_resolve", nothing)
        for number in range(1, 2 * MAX_HEARD):
            recorder.tell(name(f"{number:016x}"))
        assert len(recorder._tasks) == MAX_HEARD
        assert len(recorder.troubles) == 1
        assert "flood" in recorder.troubles[0].fix
        recorder.tell(name(f"{1:016x}"), ServiceStateChange.Removed)
        recorder.tell(name("f" * 16))
        assert len(recorder._tasks) == MAX_HEARD + 1
        await recorder.close()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EADDRINUSE, "in use"), "port 5353"),
        (PermissionError(errno.EPERM, "no"), "denies multicast"),
        (OSError(errno.ENODEV, "no such device"), "went away"),
        (RuntimeError("No adapter found"), "could not be started (No adapter found)"),
    ],
)
def test_what_the_system_refuses_is_a_trouble_with_a_fix_and_no_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setattr(mdns, "AsyncZeroconf", refuse)

    async def scene() -> None:
        recorder = Recorder()
        await recorder.listen(LOOPBACK)
        await recorder.close()
        assert [words in trouble.what and bool(trouble.fix) for trouble in recorder.troubles] == [True]

    asyncio.run(scene())


def test_mdns_that_was_refused_is_tried_again_and_the_trouble_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    real = mdns.AsyncZeroconf

    def refuse_twice(**options: Any) -> object:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.EADDRINUSE, "in use")
        return real(**options)

    monkeypatch.setattr(mdns, "AsyncZeroconf", refuse_twice)
    monkeypatch.setattr(mdns, "RETRY", 0.0)

    async def scene() -> None:
        network = secrets.token_bytes(16)
        late, other = Recorder("1" * 16, network), Recorder("2" * 16, network)
        await late.listen(LOOPBACK)
        while len(tries) < 3:
            await asyncio.sleep(0)
        await other.listen(LOOPBACK)
        await asyncio.wait_for(late.heard.get(), 10)
        await asyncio.gather(late.close(), other.close())
        assert len(late.troubles) == 1

    asyncio.run(scene())


def test_two_changes_at_once_leave_the_last_one_and_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, ...]] = []
    real = mdns.AsyncZeroconf

    def count(interfaces: Any) -> object:
        made.append(tuple(interfaces))
        return real(interfaces=interfaces)

    monkeypatch.setattr(mdns, "AsyncZeroconf", count)

    async def scene() -> None:
        recorder = Recorder(network=secrets.token_bytes(16))
        await recorder.listen(LOOPBACK)
        await asyncio.gather(recorder.listen(Choice(())), recorder.listen(LOOPBACK))
        assert len(made) == 2
        await asyncio.gather(recorder.close(), recorder.close())

    asyncio.run(scene())


def test_without_any_interface_there_is_a_trouble_and_nothing_else() -> None:
    async def scene() -> None:
        recorder = Recorder()
        await recorder.listen(Choice(()))
        await recorder.close()
        assert ["no interface is up" in trouble.what for trouble in recorder.troubles] == [True]

    asyncio.run(scene())


def test_a_change_of_the_network_is_told_once() -> None:
    card = Interface(name="eth0", addresses=("10.0.0.1",), kind=LinkKind.ETHERNET)
    listings = [[card], [card], [], [], [card]]

    async def scene() -> None:
        told: list[Choice] = []
        done = asyncio.Event()

        def read() -> list[Interface]:
            if not listings:
                done.set()
            return listings.pop(0) if listings else [card]

        watching = asyncio.ensure_future(watch_interfaces(choose([card]), (), told.append, period=0, read=read))
        await asyncio.wait_for(done.wait(), 10)
        watching.cancel()
        assert [choice.addresses for choice in told] == [(), ("10.0.0.1",)]

    asyncio.run(scene())
