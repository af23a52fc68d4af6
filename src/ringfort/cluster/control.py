"""`Control`: the control thread's work. Drives the core with what happens on links and carries out what it instructs.

Everything here runs in one asyncio loop; `node.py` has the thread around it. What is decided is decided in `PeerCore`;
where peers are is the `Finder`'s business; who comes is let in by the `Entrance`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Final

from ringfort.cluster.contacts import node_of
from ringfort.cluster.discovery.interfaces import Choice
from ringfort.cluster.discovery.mdns import THIS_MACHINE
from ringfort.cluster.entrance import Entrance
from ringfort.cluster.events import (
    CloneFound,
    ClusterEvent,
    EpochEnded,
    Misbehaved,
    Noted,
    OtherClusters,
    PeerJoined,
    PeerLost,
    Waiting,
)
from ringfort.cluster.finder import Finder, FinderEvents
from ringfort.cluster.forming import Forming
from ringfort.cluster.host import clock
from ringfort.cluster.instructions import Close, Instruction, Learn, Notify, Remember, Send
from ringfort.cluster.line import Line
from ringfort.cluster.messages import AnyMessage, Hello, Member
from ringfort.cluster.peer import PeerCore
from ringfort.cluster.probing import MAX_PROBES, Measurement, answer_probe
from ringfort.cluster.profile import this_machine
from ringfort.cluster.setup import Setup
from ringfort.cluster.speeds import Speeds
from ringfort.cluster.standings import StandingStore
from ringfort.cluster.strangers import ALONE_SECONDS, StrangerWatch
from ringfort.cluster.talk import About, Note, Ways, about, decode, encode
from ringfort.cluster.wire import ControlLink
from ringfort.config import format_address, parse_address
from ringfort.errors import DistributedError, ProtocolError
from ringfort.identity.keypair import peer_id_of
from ringfort.transport import greeting
from ringfort.transport.channel import Channel
from ringfort.transport.greeting import Meet
from ringfort.transport.opening import Opening

_log = logging.getLogger(__name__)

_AFTER_FAILURE: Final = 0.2
"""Seconds."""
_LISTEN_AGAIN: Final = 1.0
"""Seconds before an address that could not be had is tried again."""
MAX_EVENTS: Final = 8
"""Of those that are remembered for the error when nobody comes."""
_LOOK_FOR_STRANGERS: Final = 1.0
"""Seconds between two looks while this peer waits for others."""


class Control:
    """One peer's control thread, inside. Its methods are called in the loop."""

    def __init__(
        self, setup: Setup, publish: Callable[[ClusterEvent], None], work_done: Callable[[], int] | None = None
    ) -> None:
        self.setup = setup
        self.lines: dict[int, Line] = {}
        self.core = PeerCore(
            setup.member(),
            setup.config,
            clock(),
            name=setup.name,
            version=setup.version,
            ring_order=self._ring_order,
            work_done=work_done,
        )
        self.finder = Finder(setup, FinderEvents(self._dialled, self._moved, self._measured))
        self.entrance = Entrance(setup.wall, self._came, self.finder.refused)
        self.forming = Forming(setup, self.finder)
        self.speeds = Speeds(setup, self.core, self.finder)
        self.events: deque[str] = deque(maxlen=MAX_EVENTS)
        """What was reported of peers that were refused, in words."""
        self.waiting_for = ""
        """Why there is no epoch, as the core last said."""
        self.gone: dict[str, str] = {}
        """Peers that were here and are not any more: the name of each and why, in words."""
        self._names: dict[str, str] = {}
        self._publish = publish
        self._store = StandingStore(setup.home, setup.network_id.hex(), setup.peer)
        self._numbers = count(1)
        self._probes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises `ConfigError`, `TransportError` or `IdentityError`; nothing is left open then."""
        config = self.setup.config
        choice = self.finder.choose()
        try:
            self._store.open()
            self.entrance.open(choice.addresses, config.port)
            own = this_machine(self.setup.peer, self.core.me.host)
            self.speeds.describe(replace(own, program=config.program, started=clock()))
            self._tell_addresses()
            self._vouch()
            await self.finder.start(self.entrance.port)
            self._moved(choice)
        except BaseException:
            await self.stop()
            raise
        self._do(self.core.tick(clock()))
        self._begin(self._watch_strangers())

    async def stop(self, why: str = "") -> None:
        """Says goodbye, and closes everything. May be called again."""
        formed = self.core.ledger.standing.formed
        links = [line.link for line in self.lines.values()]
        self._do(self.core.leave(clock(), why))
        if self._timer is not None:
            self._timer.cancel()
        self.entrance.close()
        self.forming.close()
        await self.finder.close()
        for line in self.lines.values():  # those whose peer never said who it is
            line.link.abort()
        for link in links:
            await link.ended.wait()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._store.close(forget=formed is None or len(formed.members) == 1)

    def _vouch(self) -> None:
        for peer, standing in self._store.dead():
            self._do(self.core.vouch(clock(), peer, standing))

    async def _watch_strangers(self) -> None:
        watch = StrangerWatch()
        pause = ALONE_SECONDS
        watch.look(clock(), (), is_waiting=True)
        while True:
            await asyncio.sleep(pause)
            pause = _LOOK_FOR_STRANGERS
            epoch = self.core.epoch
            is_waiting = epoch is None or len(epoch.members) == 1
            # Not this machine: a demo or a test beside this program is nobody that it waits for.
            machines = tuple(one for one in self.finder.strangers() if one != THIS_MACHINE) if is_waiting else ()
            if watch.look(clock(), machines, is_waiting=is_waiting):
                self._happened(OtherClusters(machines))

    # --- what the program wants -------------------------------------------------------------------------------------

    def hold(self, holding: bool) -> None:
        """See `PeerCore.hold`."""
        self._do(self.core.hold(clock(), holding))

    def force_election(self) -> None:
        """See `PeerCore.force_election`."""
        self._do(self.core.force_election(clock()))

    def step_down(self) -> None:
        """See `PeerCore.step_down`."""
        self._do(self.core.step_down(clock()))

    def tell(self, topic: str, body: bytes, peer: str | None) -> None:
        """Sends a note to one peer or to all."""
        for contact in self.core.contacts:
            if peer in (None, contact.peer):
                self.lines[contact.link].link.send(encode(Note(topic, body)))

    # --- connections ------------------------------------------------------------------------------------------------

    def _came(self, sock: socket.socket, opening: Opening, where: str) -> None:
        match opening.purpose:
            case greeting.Control():
                self._begin(self._attach(sock, opening, "", where), sock)
            case greeting.Probe() if self._probes < MAX_PROBES:
                self._begin(self._answer_probe(sock, opening, where), sock)
            case greeting.Probe():
                sock.close()
            case Meet() as said:
                self.forming.came(sock, opening, said)
            case _:
                why = "this is a peer of a cluster; a group with fixed ranks is joined at its rank 0"
                Channel(sock, opening).refuse("group", why)
                self.finder.refused(where, why)

    def _dialled(self, sock: socket.socket, opening: Opening, address: str) -> None:
        self._begin(self._attach(sock, opening, address, address), sock)

    async def _attach(self, sock: socket.socket, opening: Opening, address: str, where: str) -> None:
        number = next(self._numbers)
        link = ControlLink(
            opening,
            lambda body: self._received(number, body),
            lambda by_kernel, why: self._ended(number, by_kernel, why),
        )
        self.lines[number] = Line(link, address, where)
        try:
            await link.attach(sock)
        except (OSError, asyncio.CancelledError) as exc:
            del self.lines[number]
            if isinstance(exc, asyncio.CancelledError):
                raise
            self.finder.failed(address, str(exc))
            return
        node = peer_id_of(opening.identity) if opening.identity else ""
        self._do(self.core.connected(clock(), number, node, initiated=bool(address)))
        link.send(encode(about(self.speeds.own, clock())))

    async def _answer_probe(self, sock: socket.socket, opening: Opening, where: str) -> None:
        self._probes += 1
        try:
            found = await answer_probe(sock, opening, self.setup.peer)
            self._measured(where, found)
        except (DistributedError, asyncio.TimeoutError, TimeoutError) as exc:
            _log.debug("a probe of %s failed: %s", where, exc)
        finally:
            self._probes -= 1

    # --- links ------------------------------------------------------------------------------------------------------

    def _received(self, number: int, body: bytes) -> None:
        line = self.lines.get(number)
        if line is None:
            return
        now = clock()
        try:
            message = decode(body)
        except ProtocolError as exc:
            self._do(self.core.garbled(now, number, str(exc)), line)
            return
        if isinstance(message, (About, Ways, Note)):
            self._talked(line, number, message, now)
            return
        self._do(self.core.received(now, number, message), line)
        if not line.peer:
            self._met(line, message)

    def _met(self, line: Line, message: AnyMessage) -> None:
        """The first message of a link says whose it is."""
        if not isinstance(message, Hello):
            return
        line.peer = message.member.peer
        if line.peer == self.setup.peer:
            self.finder.directory.is_own((line.address,))
            return
        if self.core.contacts.get(line.peer) is None:  # it was refused
            if line.address:
                self.finder.failed(line.address, "it was refused")
            return
        if line.address:
            self.finder.answered(line.address, line.peer)
        self._follow(line.peer)
        self.finder.learn(line.peer, message.member.addresses, line.peer)
        if line.address:
            self._begin(self.speeds.measure(line.peer, line.address))
        if self.setup.slots == 0:
            self._begin(self.speeds.measure_again(line.peer))

    def _follow(self, peer: str) -> None:
        """Tells the directory which way the link with `peer` goes now, if there is one."""
        contact = self.core.contacts.get(peer)
        if contact is not None and contact.link in self.lines:
            self.finder.linked(peer, self.lines[contact.link].address)
        else:
            self.finder.unlinked(peer)

    def _ended(self, number: int, by_kernel: bool, why: str) -> None:
        line = self.lines.pop(number, None)
        if line is None:
            return
        self._do(self.core.closed(clock(), number, by_kernel=by_kernel, why=why))
        if line.peer:
            self._follow(line.peer)
        elif line.address:
            self.finder.failed(line.address, why)

    def _talked(self, line: Line, number: int, message: About | Ways | Note, now: float) -> None:
        contact = self.core.contacts.get(line.peer) if line.peer else None
        if line.is_flooding(now):
            self._do(self.core.garbled(now, number, "it floods: too many messages"), line)
        elif contact is None or contact.link != number or contact.hello is None:
            return
        elif isinstance(message, Note):
            self._publish(Noted(line.peer, message.topic, message.body))
        elif isinstance(message, About):
            self.speeds.heard_about(contact.hello, message, now)
        else:
            self.speeds.heard_ways(line.peer, message)

    def _ring_order(self, members: Sequence[Member]) -> Sequence[int]:
        return self.speeds.ring_order(members)

    # --- measuring --------------------------------------------------------------------------------------------------

    def _measured(self, address: str, found: Measurement) -> None:
        """A control link stays where it is: what it carries is little. The data goes the fastest way."""
        if self.core.is_over:
            return  # the links are closed
        if self.core.contacts.get(found.peer) is not None and self.speeds.measured(found, address):
            ways = encode(self.speeds.ways())
            for contact in self.core.contacts:
                self.lines[contact.link].link.send(ways)

    # --- what the core instructs --------------------------------------------------------------------------------------

    def _do(self, instructions: Sequence[Instruction], line: Line | None = None) -> None:
        events: list[ClusterEvent] = []
        for instruction in instructions:
            match instruction:
                case Send(link=number, message=message):
                    if number in self.lines:
                        self.lines[number].link.send(encode(message))
                case Close(link=number, why=why):
                    self._close(number, why)
                case Learn(peer=peer, addresses=addresses):
                    self.finder.learn(peer, addresses, line.peer if line else "")
                case Remember(standing=standing):
                    self._store.write(standing)
                case Notify(event=event):
                    events.append(event)
        self._set_timer()
        for event in events:  # only now: what the program does about one may make the core speak again
            self._happened(event)

    def _happened(self, event: ClusterEvent) -> None:
        match event:
            case PeerJoined(peer=peer, name=name):
                self._names[peer] = name
                self.gone.pop(peer, None)
            case PeerLost(peer=peer, why=why):
                self.gone[peer] = f"{self._names.pop(peer, '') or peer} ({why})"
                while len(self.gone) > MAX_EVENTS:
                    del self.gone[next(iter(self.gone))]
                self._follow(peer)
                self.speeds.forget(peer)
                if node_of(peer) == node_of(self.setup.peer) and not self.core.is_over:
                    self._vouch()
            case EpochEnded(epoch=epoch, why=why):
                self.forming.ended(epoch, why)
            case Waiting(why=why):
                self.waiting_for = why
            case CloneFound() | Misbehaved() if str(event) not in self.events:
                self.events.append(str(event))
            case _:
                pass
        self._publish(event)

    def _close(self, number: int, why: str) -> None:
        line = self.lines.pop(number, None)
        if line is None:
            return
        line.link.close()
        if line.peer:
            self._follow(line.peer)

    def _set_timer(self) -> None:
        deadline = self.core.deadline
        if self._timer is not None:
            if self._timer_at == deadline and not self._timer.cancelled():
                return
            self._timer.cancel()
        if self.core.is_over:
            return
        self._timer_at = deadline
        self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - clock()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self._do(self.core.tick(clock()))
        except Exception:
            # Not silently and for ever: without its timer a node would neither hear nor be heard.
            _log.exception("the control thread failed; it goes on")
            self._timer = asyncio.get_running_loop().call_later(_AFTER_FAILURE, self._tick)

    # --- addresses ----------------------------------------------------------------------------------------------------

    def _moved(self, choice: Choice) -> None:
        """Listens on the interfaces of `choice`, if they still are the current ones."""
        if choice is not self.finder.choice or self.core.is_over:
            return
        self.speeds.forget()
        troubles = self.entrance.move(choice.addresses)
        if troubles:
            # An IPv6 address cannot be used in its first second, while its machine asks whether another has it.
            _log.info("%s", "; ".join(troubles))
            asyncio.get_running_loop().call_later(_LISTEN_AGAIN, self._moved, choice)
        self._tell_addresses()

    def _tell_addresses(self) -> None:
        self.finder.directory.is_own(self.entrance.addresses)
        self._do(self.core.set_addresses(clock(), [_bare(address) for address in self.entrance.addresses]))

    def _begin(self, work: Coroutine[Any, Any, None], sock: socket.socket | None = None) -> None:
        """Has `work` done; a socket that it was to take over is closed if it is cancelled, perhaps before it began."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if sock is not None:
            task.add_done_callback(lambda done: sock.close() if done.cancelled() else None)


def _bare(address: str) -> str:
    """Without the scope of a link-local address, which means nothing on another machine."""
    host, port = parse_address(address)
    return format_address(host.partition("%")[0], port)
