"""`MeshBackend`: a backend with a link to every other rank. The real ones differ in how they connect."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Final

from ringfort.backends.arenas import Arenas
from ringfort.backends.base import Backend, RingStep, Tag, Traffic, Ways, as_bytes, split_measuring
from ringfort.config import DistributedConfig
from ringfort.errors import DistributedError, InvalidArgumentError
from ringfort.transport import fast_path
from ringfort.transport.arena import Arena
from ringfort.transport.engine import Engine
from ringfort.transport.finalisers import when_gone
from ringfort.transport.forks import WeakGroup
from ringfort.transport.frames import WINDOW
from ringfort.transport.link import Job, Link
from ringfort.transport.locks import Thread
from ringfort.transport.machine import Machine, hosts_of
from ringfort.transport.messages import Envelope, Receive, Send
from ringfort.transport.parallel import end_all
from ringfort.transport.reducer import Reducer
from ringfort.transport.stream import Poller, Stream
from ringfort.transport.tcp import SocketPoller

if TYPE_CHECKING:
    from typing_extensions import Buffer

_ENDING: Final = 20.0
"""Seconds that closing waits for each engine, which has bounds of its own: the last words, and a leader to act."""

describers: list[Callable[[bytes], str]] = []
"""How to put a call's 16 bytes into words. The collectives, which are above this layer, add theirs when imported."""


def _describe(call: bytes) -> str:
    call, is_measuring = split_measuring(call)
    words = describers[-1](call) if describers else call.hex()
    return f"{words}, measuring the links first" if is_measuring else words


_engines: Final[WeakGroup[Engine]] = WeakGroup()
"""Of groups over sockets, one a connection."""
_numbers: Final = count()
os.register_at_fork(after_in_child=_engines.clear)  # the links are the parent's: a child has nothing to say on them


@atexit.register
def _say_goodbye() -> None:
    """On what the program has not closed. Else the peers, which may be busy with the end of the last collective, would
    take its end for a crash and fail, though they need nothing more of it."""
    for engine in sorted(_engines.alive(), key=lambda engine: engine.number):
        with suppress(Exception):  # the program is over: there is nobody to tell
            engine.close(has_ended=True)


class MeshBackend(Backend):
    """A rank with a link to every other rank."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        config: DistributedConfig,
        streams: dict[int, Stream],
        poller: Poller,
        machines: Mapping[int, Machine] | None = None,
        connections: Sequence[tuple[dict[int, Stream], Poller]] = (),
        ways: Ways | None = None,
        *,
        epoch: int = 0,
    ) -> None:
        """`connections` are further streams to the same ranks, in sets of one to each."""
        super().__init__(rank, world_size, config)
        machines = machines or dict.fromkeys(range(world_size), Machine())
        self._hosts = hosts_of(machines)
        self._machines = machines
        self._ways = ways
        self._engine = Engine(rank, streams, poller, inbox_bytes=config.inbox_bytes, epoch=epoch, describe=_describe)
        self._others = tuple(
            MeshBackend(rank, world_size, config, *connection, machines, epoch=epoch) for connection in connections
        )
        # A group that is dropped and not closed ends too: else its peers would wait for the whole timeout.
        self._farewell = when_gone(self, self._engine.let_go)
        self._all_arenas: list[Arenas] = []
        self._arenas = self.arenas_for(self)
        if isinstance(poller, SocketPoller):
            self._engine.number = next(_numbers)
            _engines.add(self._engine)

    def send(self, data: Buffer, dst: int, *, tag: Tag = 0, timeout: float | None = None) -> None:
        self.check_peer(dst, "dst")
        job = self._job("send", tag, timeout)
        self._add_send(job, data, dst, tag)
        self._engine.run(job)

    def recv(
        self, into: Buffer, src: int, *, reduce: Reducer | None = None, tag: Tag = 0, timeout: float | None = None
    ) -> None:
        self.check_peer(src, "src")
        job = self._job("recv", tag, timeout)
        self._add_receive(job, into, src, tag, reduce)
        self._engine.run(job)

    def exchange(
        self,
        out: Buffer,
        dst: int,
        into: Buffer,
        src: int,
        *,
        reduce: Reducer | None = None,
        tag: Tag = 0,
        timeout: float | None = None,
    ) -> None:
        self.check_peer(dst, "dst")
        self.check_peer(src, "src")
        job = self._job("exchange", tag, timeout)
        self._add_send(job, out, dst, tag)
        self._add_receive(job, into, src, tag, reduce)
        self._engine.run(job)

    def pipelined_ring(
        self, ring_steps: Sequence[RingStep], dst: int, src: int, *, tag: Tag = 0, timeout: float | None = None
    ) -> None:
        is_small = all(
            len(as_bytes(ring_step.out, "out", writable=False)) <= fast_path.LARGEST for ring_step in ring_steps
        )
        if is_small or not isinstance(tag, Envelope) or tag.members is None:
            # The fast path is faster for small messages; and only in a collective are all sizes known to be right.
            super().pipelined_ring(ring_steps, dst, src, tag=tag, timeout=timeout)
            return
        self.check_peer(dst, "dst")
        self.check_peer(src, "src")
        job = self._job("pipelined ring", tag, timeout)
        before: list[tuple[Send | Receive, Link]] = []
        source: Receive | None = None
        for ring_step in ring_steps:
            before.extend(job.halves())
            self._add_send(job, ring_step.out, dst, tag, source)
            self._add_receive(job, ring_step.into, src, tag, ring_step.reduce)
            source = job.receive
        job.before = tuple(before)
        self._engine.run(job)

    def swap(self, data: bytes | memoryview, into: memoryview, peer: int, envelope: Envelope) -> None:
        if not self._engine.swap(data, into, peer, envelope):
            super().swap(data, into, peer, envelope)

    @property
    def hosts(self) -> tuple[int, ...]:
        return self._hosts

    @property
    def ways(self) -> Ways | None:
        return self._ways

    @property
    def connections(self) -> tuple[MeshBackend, ...]:
        # Every other one goes round the other way: between hosts that are joined by cables, a ring uses only one
        # direction of each.
        back = tuple(reversed(self.ring or range(self.world_size)))
        for number, connection in enumerate(self._others, start=1):
            connection.ring = back if number % 2 else self.ring
        return (self, *self._others)

    def share_failure(self, failed: Envelope, envelope: Envelope) -> None:
        abort_reason = self._engine.abort_reason_of(failed)
        if abort_reason is not None:
            self._engine.end(envelope, abort_reason)

    def end_connections(self, failed: int, envelope: Envelope, error: BaseException) -> None:
        end_all([connection._engine for connection in self.connections], failed, envelope, error)

    def arenas_for(self, group: Backend) -> Arenas:
        """The way of `group`, which is this one or a sub-group of it, to a arena."""
        machines = [self._machines[member] for member in group.members]
        is_possible = (
            len(machines) > 1
            and len({self._hosts[member] for member in group.members}) == 1
            and all(machine.shares and machine.is_ordered for machine in machines)
        )
        neighbours = self._hosts.count(self._hosts[self.rank])
        arenas = Arenas(group, self._engine, is_possible=is_possible, neighbours=neighbours)
        self._all_arenas.append(arenas)
        return arenas

    @property
    def shares_memory(self) -> bool:
        return self._arenas.is_possible

    def arena(self, envelope: Envelope) -> Arena | None:
        return self._arenas.get(envelope)

    def now(self) -> float:
        return self._engine.now()

    def _job(self, what: str, tag: Tag, timeout: float | None) -> Job:
        return Job(what, *self.time_of(tag, timeout))

    def _add_send(self, job: Job, data: Buffer, dst: int, tag: Tag, source: Receive | None = None) -> None:
        envelope = self.check_tag(tag)
        view = as_bytes(data, "data", writable=False)
        # In a pipelined ring the first one's clear-to-send is for all of them: their receives are posted together.
        is_rendezvous = source is None and (envelope.sync or len(view) > WINDOW)
        job.send = Send(view, envelope, is_rendezvous=is_rendezvous, source=source)
        job.send_link = self._engine.links[dst]

    def _add_receive(self, job: Job, into: Buffer, src: int, tag: Tag, reducer: Reducer | None) -> None:
        envelope = self.check_tag(tag)
        view = as_bytes(into, "into", writable=True)
        if reducer is not None and len(view) % reducer.dtype.itemsize:
            raise InvalidArgumentError("into", f"{len(view)} bytes", f"is no whole number of {reducer.dtype} elements")
        job.receive = Receive(view, envelope, reducer)
        job.receive_link = self._engine.links[src]

    def abort(self, reason: str) -> None:
        if not isinstance(reason, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("reason", reason, "must be a text that says why")
        self._on_all(lambda engine: engine.abort(reason))

    def close(self) -> None:
        self._on_all(lambda engine: engine.close())
        self._farewell.call_off()
        for connection in self._others:
            connection._farewell.call_off()
        for arenas in self._all_arenas:
            arenas.close()

    def fail(self, error: Callable[[], DistributedError]) -> None:
        """Ends every call of this process on this group and its sub-groups, now and later, with `error`. The peers are
        not told. Returns at once."""
        self.group.end(error)
        for connection in self.connections:
            connection._engine.fail(error)

    def lose(self, peer: int, reason: str) -> None:
        """`peer` was found to be gone: ends what waits for it, and every collective that it is part of. Returns at
        once."""
        for connection in self.connections:
            connection._engine.lose(peer, reason)

    def drop(self) -> None:
        """Closes all links without a word, as a process that dies does. For fault injection."""
        self._on_all(lambda engine: engine.drop())

    def _on_all(self, end: Callable[[Engine], None]) -> None:
        """Ends all engines at the same time: each may wait a moment for last words to be taken."""
        threads = [Thread(end, (connection._engine,), name="ringfort-end") for connection in self._others]
        for thread in threads:
            thread.start()
        end(self._engine)
        for thread in threads:
            thread.join(_ENDING)

    def traffic(self) -> Traffic:
        return Traffic(*map(sum, zip(*(connection._engine.traffic() for connection in self.connections), strict=True)))
