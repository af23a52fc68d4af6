"""`Control`: one peer's control plane. Drives the core with what happens on links and carries out what it instructs.

Everything here runs in one asyncio loop; `service.py` has what is around it. What is decided is decided in `PeerCore`;
where peers are is the `Finder`'s business; who comes is let in by the `ControlListener`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any, Final, TypeVar, cast

from ringfort.bootstrap.connection import Connection
from ringfort.bootstrap.listener import Listener
from ringfort.cluster.core.contacts import node_of
from ringfort.cluster.core.events import (
    CloneFound,
    ClusterEvent,
    DiskTrouble,
    EpochEnded,
    EpochStarted,
    Misbehaved,
    Noted,
    OtherClusters,
    PeerJoined,
    PeerLost,
    Waiting,
)
from ringfort.cluster.core.gossip import About, Note, Ways, about, decode, encode
from ringfort.cluster.core.instructions import Close, Instruction, Learn, Notify, Remember, Send
from ringfort.cluster.core.peer import PeerCore
from ringfort.cluster.core.peer_messages import AnyMessage, Hello, Member, Standing
from ringfort.cluster.core.strangers import ALONE_SECONDS, StrangerWatch
from ringfort.cluster.discovery.interfaces import Choice
from ringfort.cluster.discovery.mdns import THIS_MACHINE
from ringfort.cluster.net.connector import Finder, FinderEvents
from ringfort.cluster.net.control_link import ControlLink
from ringfort.cluster.net.control_listener import ControlListener
from ringfort.cluster.net.durable_votes import StandingStore
from ringfort.cluster.net.epoch_connections import EpochConnections
from ringfort.cluster.net.host import clock
from ringfort.cluster.net.line import Line
from ringfort.cluster.net.link_metrics import Speeds
from ringfort.cluster.net.probing import MAX_PROBES, Measurement, answer_probe
from ringfort.cluster.net.profile import this_machine
from ringfort.cluster.net.setup import Setup
from ringfort.config import format_address, parse_address
from ringfort.errors import DistributedError, HandshakeError, ProtocolError
from ringfort.transport import hello
from ringfort.transport.hello import Meet

_log = logging.getLogger(__name__)

T = TypeVar("T")

_AFTER_FAILURE: Final = 0.2
"""Seconds."""
_LISTEN_AGAIN: Final = 1.0
"""Seconds before an address that could not be had is tried again."""
SLOW_DISK: Final = 1.0
"""Seconds after which people are told that a promise is not on the disk yet."""
STOP_WITHIN: Final = 2.0
"""Seconds that a goodbye may take. A link's last words have one."""
MAX_EVENTS: Final = 8
"""Of those that are remembered for the error when nobody comes."""
_LOOK_FOR_STRANGERS: Final = 1.0
"""Seconds between two looks while this peer waits for others."""


class Control:
    """One peer's control plane. Its methods are called in the loop."""

    def __init__(
        self,
        setup: Setup,
        publish: Callable[[ClusterEvent], None],
        work_done: Callable[[], int] | None = None,
        *,
        on_change: Callable[[], object] = lambda: None,
        before_tick: Callable[[], None] = lambda: None,
    ) -> None:
        """`publish` gets every event. `on_change` is called before that and whenever the core may have changed,
        `before_tick` before every heartbeat."""
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
        self.finder = Finder(setup, FinderEvents(self._connected, self._moved, self._measured))
        self.listener = ControlListener(Listener(setup.wall, on_refused=self.finder.refused), self._accepted)
        self.forming = EpochConnections(setup, self.finder)
        self.speeds = Speeds(setup, self.core, self.finder)
        self.events: deque[str] = deque(maxlen=MAX_EVENTS)
        """What was reported of peers that were refused, in words."""
        self.waiting_for = ""
        """Why there is no epoch, as the core last said."""
        self.gone: dict[str, str] = {}
        """Peers that were here and are not any more: the name of each and why, in words."""
        self._names: dict[str, str] = {}
        self.disk_trouble: DiskTrouble | None = None
        """Why promises cannot be written, if they cannot."""
        self._to_write: deque[Standing] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._publish = publish
        self._on_change = on_change
        self._before_tick = before_tick
        self._store = StandingStore(setup.home, setup.lineage, setup.peer)
        self._numbers = count(1)
        self._probes = 0
        self._closing: list[ControlLink] = []
        """Links whose last words may still be under way: `stop` sees them to their end."""
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
            # Before the core hears of anything or anybody: the disk may be slow, and nothing must be founded meanwhile.
            recalled = await _in_thread(self._store.recalled)
            self._do(self.core.recall(clock(), recalled))
            self.listener.open(choice.addresses, config.port)
            own = this_machine(self.setup.peer, self.core.me.host, self.setup.accelerators, self.setup.version)
            self.speeds.describe(replace(own, program=config.program, started=clock()))
            self._tell_addresses()
            await self._vouch()
            await self.finder.start(self.listener.port)
            self._moved(choice)
        except BaseException:
            await self.stop()
            raise
        self._do(self.core.tick(clock()))
        self._begin(self._watch_strangers())

    async def stop(self, why: str = "", *, died: bool = False) -> None:
        """Says goodbye, and closes everything, within about two seconds. `died`: the program did not want to go. May be
        called again."""
        links = [*self._closing, *(line.link for line in self.lines.values())]
        self._do(self.core.leave(clock(), why, died=died))
        if self._timer is not None:
            self._timer.cancel()
        self.listener.close()
        self.forming.close()
        for line in self.lines.values():  # those whose peer never said who it is
            line.link.abort()
        ends: list[Awaitable[object]] = [self.finder.close(), *(link.ended.wait() for link in links)]
        if self._writer is not None:
            self._to_write.clear()
            ends.append(asyncio.shield(self._writer))
        # Not `wait_for`, which waits without limit for what it has cancelled: zeroconf swallows that now and then.
        endings = [asyncio.ensure_future(end) for end in ends]
        await asyncio.wait(endings, timeout=STOP_WITHIN)
        for ending in endings:
            ending.cancel()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        # Also those that were accepted before the end and attached after it.
        for link in (*links, *(line.link for line in self.lines.values())):
            link.abort()
        await asyncio.sleep(0)  # a transport closes its socket in the loop's next turn
        if self._writer is None:  # else the file is in use, and stays locked until the process ends
            self._store.close(is_released=self.core.is_released)

    async def _vouch(self) -> None:
        for peer, standing in await _in_thread(self._store.dead):
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

    def set_busy(self, busy: bool) -> None:
        """See `PeerCore.set_busy`."""
        self._do(self.core.set_busy(clock(), busy))

    def set_step(self, step: int) -> None:
        """See `PeerCore.set_step`."""
        self.core.set_step(step)

    def tell(self, topic: str, body: bytes, peer: str | None) -> None:
        """Sends a note to one peer or to all."""
        for contact in self.core.contacts:
            if peer in (None, contact.peer):
                self.lines[contact.link].link.send(encode(Note(topic, body)))

    # --- connections ------------------------------------------------------------------------------------------------

    def _accepted(self, connection: Connection) -> None:
        match connection.purpose:
            case hello.Control():
                self._begin(self._attach(connection, "", connection.address), connection.sock)
            case hello.Probe() if self._probes < MAX_PROBES:
                self._begin(self._answer_probe(connection), connection.sock)
            case hello.Probe():
                connection.close()
            case Meet() as said:
                self.forming.accepted(connection, said)
            case _:
                why = "this is a peer of a cluster; a group with fixed ranks is joined at its rank 0"
                connection.refuse("group", why)
                self.finder.refused(connection.address, why)

    def _connected(self, connection: Connection, address: str) -> None:
        self._begin(self._attach(connection, address, address), connection.sock)

    async def _attach(self, connection: Connection, address: str, where: str) -> None:
        try:
            node = self.setup.proved(connection.identity)
        except HandshakeError as exc:
            connection.close()
            self.finder.refused(where, str(exc))
            self.finder.failed(address, str(exc))
            return
        number = next(self._numbers)
        link = ControlLink(
            connection,
            lambda body: self._received(number, body),
            lambda why: self._ended(number, why),
        )
        self.lines[number] = Line(link, address, where)
        try:
            await link.attach()
        except (OSError, asyncio.CancelledError) as exc:
            del self.lines[number]
            if isinstance(exc, asyncio.CancelledError):
                raise
            self.finder.failed(address, str(exc))
            return
        self._do(self.core.connected(clock(), number, node, initiated=bool(address)))
        link.send(encode(about(self.speeds.own, clock())))

    async def _answer_probe(self, connection: Connection) -> None:
        self._probes += 1
        try:
            found = await answer_probe(connection, self.setup.peer)
            self._measured(connection.address, found)
        except (DistributedError, asyncio.TimeoutError, TimeoutError) as exc:
            _log.debug("a probe of %s failed: %s", connection.address, exc)
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

    def _ended(self, number: int, why: str) -> None:
        line = self.lines.pop(number, None)
        if line is None:
            return
        self._do(self.core.closed(clock(), number, why))
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
        if self.core.is_over:  # what was measured while this peer left is told to nobody
            return
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
                    self._to_write.append(standing)
                    if self._writer is None:
                        self._writer = asyncio.ensure_future(self._write_all())
                case Notify(event=event):
                    events.append(event)
        self._set_timer()
        self._on_change()
        for event in events:  # only now: what the program does about one may make the core speak again
            self._happened(event)

    async def _write_all(self) -> None:
        """Writes promises one after the other, in a thread: heartbeats go on while the disk is slow."""
        loop = asyncio.get_running_loop()
        while self._to_write:
            standing = self._to_write.popleft()
            slow = loop.call_later(SLOW_DISK, self._disk_is, f"the disk has taken {SLOW_DISK:g} s and is not done")
            try:
                await _in_thread(lambda standing=standing: self._store.write(standing))
                why = ""
            except OSError as exc:
                why = exc.strerror or str(exc)
            except Exception as exc:
                _log.exception("a promise could not be written")
                why = str(exc)
            slow.cancel()
            if why:
                self._disk_is(why)
            else:
                self.disk_trouble = None
            self._do(self.core.remembered(clock(), standing, f"its disk fails: {why}" if why else ""))
        self._writer = None

    def _disk_is(self, why: str) -> None:
        """Tells of it once, until a write succeeds again."""
        trouble = DiskTrouble(str(self._store.path), why)
        if trouble != self.disk_trouble:
            self.disk_trouble = trouble
            _log.warning("%s", trouble)
            self._happened(trouble)

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
                    self._begin(self._vouch())
            case EpochStarted():
                self.waiting_for = ""
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
        self._closing = [link for link in (*self._closing, line.link) if not link.ended.is_set()]
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
            self._before_tick()
            self._store.touch()
            self._do(self.core.tick(clock()))
        except Exception:
            # Not silently and for ever: without its timer a node would neither hear nor be heard.
            _log.exception("the control service failed; it goes on")
            self._timer = asyncio.get_running_loop().call_later(_AFTER_FAILURE, self._tick)

    # --- addresses ----------------------------------------------------------------------------------------------------

    def _moved(self, choice: Choice) -> None:
        """Listens on the interfaces of `choice`, if they still are the current ones."""
        if choice is not self.finder.choice or self.core.is_over:
            return
        self.speeds.forget()
        troubles = self.listener.move(choice.addresses)
        if troubles:
            # An IPv6 address cannot be used in its first second, while its machine asks whether another has it.
            _log.info("%s", "; ".join(troubles))
            asyncio.get_running_loop().call_later(_LISTEN_AGAIN, self._moved, choice)
        self._tell_addresses()

    def _tell_addresses(self) -> None:
        self.finder.directory.is_own(self.listener.addresses)
        self._do(self.core.set_addresses(clock(), [_bare(address) for address in self.listener.addresses]))

    def _begin(self, work: Coroutine[Any, Any, None], sock: socket.socket | None = None) -> None:
        """Has `work` done; a socket that it was to take over is closed if it is cancelled, perhaps before it began."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if sock is not None:
            task.add_done_callback(lambda done: sock.close() if done.cancelled() else None)


async def _in_thread(work: Callable[[], T]) -> T:
    """What `work` gives, done in a thread of its own. Not in a pool: the end of a program waits for those, and a disk
    may never answer."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, exc: BaseException | None) -> None:
        if not done.cancelled():
            done.set_result(cast("T", value)) if exc is None else done.set_exception(exc)

    def run() -> None:
        value: T | None = None
        failure: BaseException | None = None
        try:
            value = work()
        except BaseException as exc:
            failure = exc
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=run, name="ringfort-disk", daemon=True).start()
    return await done


def _bare(address: str) -> str:
    """Without the scope of a link-local address, which means nothing on another machine."""
    host, port = parse_address(address)
    return format_address(host.partition("%")[0], port)
