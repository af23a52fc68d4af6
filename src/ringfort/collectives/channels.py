"""Large all-reduces over channels: a ring whose slices are cut into chunks, each moved by one of the channels.

The chunks of every slice are dealt to the channels in turn, and a chunk stays on its channel all the way round. So no
channel waits for another one, and each element is reduced in the same order however many channels there are: the result
depends neither on their number nor on time.

Where hosts have several ranks, only the rings between hosts go over channels, one ring for each rank of a host: inside
a host there is shared memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NoReturn

import numpy as np

from ringfort.backends.group import Ending, Group, as_bytes
from ringfort.collectives import algorithms, cost_model
from ringfort.collectives.algorithms import HostSteps, Span, Step
from ringfort.collectives.channel_setup import make_channels
from ringfort.collectives.plan import Run
from ringfort.collectives.signature import measuring_for
from ringfort.collectives.steps import Memory, gather_rows, run_steps
from ringfort.config import KIB, MIB
from ringfort.errors import AbortedError, DistributedError, TamperedError
from ringfort.telemetry.trace import own_trace
from ringfort.transport.channels import HEAD, Channels, DisagreedError, Share, Transfer
from ringfort.transport.engine import Engine
from ringfort.transport.machine import cores
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array, Reducer

LEAST: Final = 2 * MIB
"""Bytes of an array from which channels are worth their threads."""
CHUNK: Final = 512 * KIB
"""Bytes moved at once: a record. What is opened, added and sealed again stays in the L2 cache."""
LEAST_CHUNK: Final = 128 * KIB
"""Of small arrays chunks are smaller, so that every channel has several of each slice; with several channels twice as
large as this at least. Each chunk wakes two threads at every rank: with 128 KiB and two channels, 4 MiB of 8 ranks took
twice as long."""
PER_CHANNEL: Final = MIB
"""Bytes of a slice for each channel that an array uses, except that two channels share as much: 4 MiB of 2 ranks were
slower over four channels than over two, and 2 MiB of 4 ranks slower over two than over one."""
_PER_SLICE: Final = 2
"""Chunks of a slice that each channel has at least, if they are not smaller than the least: one is on its way while the
one before is added."""
CORES: Final = 2
"""Of a rank, which one channel can use."""
ALONE: Final = 1.5
"""Cores for each rank from which two threads are faster than one on every processor that was measured."""
MOST: Final = 4
"""Channels that a group opens by itself."""
TRIAL: Final = 24 * MIB
"""Bytes of an array whose times are compared: long enough for a connection to gather speed, and no more than a bucket
of DistributedDataParallel, which has 25 MiB and may be the largest that a program ever sends."""
TRIALS: Final = 4
"""Calls alike that are compared, two of each number: memory and connections are new in the first."""
PAUSE: Final = 200
"""Calls after which the numbers are compared again: the machine may be busier than before."""
WORTH: Final = 1.2
"""How many times as quick another number must be: less is noise."""
_KINDS: Final = 64
"""Of calls that are compared at the same time."""


def are_between_hosts(group: Group) -> bool:
    """Whether channels go only from host to host: there are several, and some have several ranks."""
    return 1 < len(set(group.hosts)) < group.world_size


def rings_of(group: Group) -> tuple[tuple[int, ...], ...]:
    """Return the rings of ranks that channels go round: one of all ranks, or one for each part of an array that the
    hierarchical all-reduce moves between hosts."""
    if are_between_hosts(group):
        return algorithms.lanes(group.hosts)
    return (group.ring or tuple(range(group.world_size)),)


def chunk_bytes(nbytes: int, world_size: int, channels: int, most: int = CHUNK) -> int:
    """Return how large the chunks of an array are, the same at every rank."""
    each, least = nbytes // (world_size * channels * _PER_SLICE), LEAST_CHUNK * min(2, channels)
    return min(most, max(least, each // least * least))


def deal(
    rings: Sequence[Sequence[Step]], reducer_of: Callable[[Step], Reducer | None], size: int, chunk: int
) -> list[Share]:
    """Return what each channel moves, of which `rings` has the steps: every slice of elements of `size` bytes is cut
    into chunks of `chunk` bytes, which are dealt to the channels in turn."""
    channels = len(rings)

    def chunks(span: Span | None, channel: int) -> Iterator[tuple[int, int]]:
        assert span is not None
        start, stop = span[0] * size, span[1] * size
        return ((at, min(at + chunk, stop)) for at in range(start + channel * chunk, stop, channels * chunk))

    shares = [Share() for _ in rings]
    for channel, (steps, share) in enumerate(zip(rings, shares, strict=True)):
        for number, step in enumerate(steps):
            reducer = reducer_of(step)
            share.sends.extend((*at, number > 0, None) for at in chunks(step.out, channel))
            is_passed_on = number < len(steps) - 1
            share.receives.extend((*at, is_passed_on, reducer) for at in chunks(step.into, channel))
    return shares


def wanted(table: Array, asked: int | Literal["auto"]) -> int:
    """Return how many channels a group opens, 0 for none, from the cores for each rank. Pure, so the same everywhere.

    A channel has two threads. Where each rank has a core for itself and not much more, one thread that does everything
    may be faster; where it has less, threads that sleep in the kernel are, because the others need the core (measured
    with 2 and 4 ranks on 2 cores).
    """
    if asked != "auto":
        return asked if asked > 1 else 0
    each = float(table[:, 0].min())
    if each < CORES:
        return 0 if 1 <= each < ALONE else 1
    return min(MOST, int(each // CORES))


def rungs(usual: int, asked: int | Literal["auto"], *, are_apart: bool) -> list[int]:
    """Return the numbers of channels that are compared. Between hosts it may be the network that holds up a single
    connection, whatever the cores do; inside a host only other programs can change what is best."""
    if asked != "auto":
        return [usual]
    return sorted({0, usual, MOST}) if are_apart else [number for number in range(MOST + 1) if number <= max(1, usual)]


class Ladder:
    """How many channels large arrays use: one of some numbers, which are compared with each other now and then. Pure,
    and so the same at all ranks, which take every decision from the same table."""

    def __init__(self, numbers: Sequence[int], start: int) -> None:
        self._numbers = sorted(numbers)
        self._at = self._numbers.index(start)
        self._step = 1 if self._at + 1 < len(numbers) else -1
        self._seconds: dict[bytes, list[float]] = {}
        self._refused = 0  # neighbours that were no better, one after the other
        self._pause = 0  # calls until the next comparison

    @property
    def number(self) -> int:
        """What is used now; 0 for one thread and no channel."""
        return self._numbers[self._at]

    def next(self, call: bytes) -> tuple[int, bool]:
        """Return what the next call uses, and whether its time is to be told: of calls alike, every other one uses the
        neighbour that is compared."""
        other = self._at + self._step
        if self._pause or not 0 <= other < len(self._numbers):
            self._pause = max(0, self._pause - 1)
            return self.number, False
        return self._numbers[other if len(self._seconds.get(call, ())) % 2 else self._at], True

    def took(self, call: bytes, seconds: float) -> tuple[float, float] | None:
        """Take the time of a call. Return the best of either number once there are enough to decide."""
        if call not in self._seconds and len(self._seconds) >= _KINDS:
            self._seconds.clear()
        taken = self._seconds.setdefault(call, [])
        taken.append(seconds)
        return (min(taken[::2]), min(taken[1::2])) if len(taken) == TRIALS else None

    def decide(self, table: Array) -> None:
        """Take the neighbour if it was clearly quicker. `table` has for each rank what `took` returned there."""
        now, other = (float(seconds) for seconds in table.max(axis=0))  # who ends last holds up all
        self._seconds.clear()
        if other * WORTH < now:
            self._at += self._step
            self._refused = 0
        else:
            self._step = -self._step
            self._refused += 1
        if not 0 <= self._at + self._step < len(self._numbers):
            self._step = -self._step
            self._refused += 1
        if self._refused >= 2:
            self._refused, self._pause = 0, PAUSE


class _Kept(Ending):
    """The channels of a group, once it has tried to open them."""

    channels: Channels | None = None
    ladder: Ladder | None = None
    least = 0
    """Bytes of an array from which they are used, if more than `LEAST`."""
    is_tried = False
    has_cores = False

    def end(self) -> None:
        if self.channels is not None:
            self.channels.close()

    def join(self, seconds: float) -> None:
        if self.channels is not None:
            self.channels.join(seconds)


def channels_of(
    group: Group, nbytes: int, call: bytes, timeout: float | None, *, is_sure: bool = True
) -> Channels | None:
    """Return the group's channels for an array of so many bytes, if it has any; unless `is_sure`, only if there are
    cores for some. The first time all ranks open them together: a collective of its own, on behalf of `call`."""
    asked = group.config.collective.connections
    if group.routes is None or not group.is_measured or asked == 1:
        return None
    kept = group.part(_Kept)
    if not kept.is_tried:
        envelope = group.envelope(measuring_for(call), timeout)
        table = gather_rows(group, [cores() / group.ranks_on_host], envelope)
        usual, is_crowded = wanted(table, asked), float(table.min()) < CORES
        if is_crowded and asked == "auto":
            kept.least = cost_model.READY_BYTES + 1  # up to there a persistent chain needs fewer threads
        numbers = rungs(usual, asked, are_apart=len(set(group.hosts)) > 1)
        if max(numbers):
            ring = next((ring for ring in rings_of(group) if group.rank in ring), ())
            both_ways = asked != "auto"
            kept.channels = make_channels(group, ring, max(numbers), CHUNK, envelope, both_ways=both_ways)
            kept.ladder = Ladder(numbers, usual)
        kept.is_tried, kept.has_cores = True, usual > 0
        if kept.channels is not None:
            own_trace().event("connections", f"Large all-reduces use {usual or 'no'} further connections")
    return kept.channels if nbytes >= kept.least and (is_sure or kept.has_cores) else None


def count_for(group: Group, nbytes: int) -> int:
    """Return how many connections an all-reduce of so many bytes uses now."""
    kept = group.part(_Kept)
    if kept.channels is None or kept.ladder is None or nbytes < max(LEAST, kept.least):
        return 1
    return max(1, _number(group, kept.ladder, nbytes))


def _number(group: Group, ladder: Ladder, nbytes: int) -> int:
    """Return how many channels are used: as many as were asked for, or fewer for small arrays."""
    is_asked, rings = group.config.collective.connections != "auto", rings_of(group)
    return ladder.number if is_asked else used(ladder.number, nbytes // len(rings), len(rings[0]))


def used(number: int, nbytes: int, ranks: int) -> int:
    """Return over how many of `number` channels an array of so many bytes goes round a ring of so many ranks."""
    piece = nbytes // ranks // PER_CHANNEL
    return min(number, max(2, piece) if piece else 1)


def all_reduce(
    group: Group,
    channels: Channels,
    call: bytes,
    shape: tuple[int, int],
    reducer_of: Callable[[Step], Reducer | None],
    otherwise: Run,
) -> tuple[Run, Run]:
    """Return what reduces an array over `channels`, in place and from another array. `shape` is the number of elements
    and the bytes of each. `otherwise` does the former with one thread, where that is faster."""
    count, size = shape
    nbytes = count * size
    ladder, rings = group.part(_Kept).ladder, rings_of(group)
    assert ladder is not None
    dealt: dict[int, list[Share]] = {}
    inside = HostSteps()
    if are_between_hosts(group):
        inside = algorithms.hierarchical_phases(group.rank, group.hosts, count)

    def steps_of(channel: int) -> Sequence[Step]:
        if are_between_hosts(group):
            return inside.between
        both_ways = group.config.collective.connections != "auto"
        order = rings[0][::-1] if both_ways and channel % 2 else rings[0]
        return algorithms.ring_all_reduce(group.rank, group.world_size, count, order)

    def shares_of(number: int) -> list[Share]:
        if number not in dealt:
            chunk = chunk_bytes(nbytes // len(rings), len(rings[0]), number, channels.chunk)
            dealt[number] = deal([steps_of(channel) for channel in range(number)], reducer_of, size, chunk)
        return dealt[number]

    def move(flat: Array, source: Array | None, timeout: float | None) -> None:
        number, is_timed = ladder.next(call) if nbytes >= TRIAL else (_number(group, ladder, nbytes), False)
        begun = time.perf_counter()
        if not number:
            if source is not None:
                flat[...] = source
            otherwise(flat, timeout)
        else:
            if source is not None and inside.before:  # which works in place
                flat[...] = source
                source = None
            data = as_bytes(flat, "x", writable=True)
            given = data if source is None else as_bytes(source, "x", writable=False)
            envelope = group.envelope(call, timeout)
            run_steps(group, inside.before, Memory(flat), envelope, reducer=reducer_of)
            if channels.all:
                _move(group, channels, envelope, data, given, shares_of(number))
            run_steps(group, inside.after, Memory(flat), envelope)
        if is_timed:
            best = ladder.took(call, time.perf_counter() - begun)
            if best is not None:
                before = ladder.number
                ladder.decide(gather_rows(group, best, group.envelope(measuring_for(call), timeout)))
                if ladder.number != before:
                    text = f"Large all-reduces use {ladder.number or 'no'} further connections, {before} before"
                    own_trace().event("connections", text)

    def run(flat: Array, timeout: float | None = None) -> None:
        move(flat, None, timeout)

    def run_apart(flat: Array, source: Array, timeout: float | None = None) -> None:
        given: Array | None = source
        if np.may_share_memory(flat, source):  # what is written would be read again as what this rank has
            flat[...] = source
            given = None
        move(flat, given, timeout)

    return run, run_apart


def _move(
    group: Group, channels: Channels, envelope: Envelope, data: memoryview, source: memoryview, shares: Sequence[Share]
) -> None:
    engine = group.engine

    def lose(peer: int, reason: str) -> None:
        goodbye = engine.links[peer].goodbye
        if goodbye is not None:
            engine.end(envelope, goodbye)
        else:
            engine.lose(peer, reason)

    engine.check(envelope)
    if channels.is_busy or channels.is_over:
        raise AbortedError("a call of this group that has not ended uses its channels")
    head = HEAD.pack(envelope.operation, envelope.call)
    transfer = Transfer(data, source, head, engine.wake, lose, 2 * len(shares))
    moving = list(zip(channels.all, shares, strict=False))
    counts = [
        count
        for channel, share in moving
        for count in ((channel.behind, share.nbytes[0], 0), (channel.before, 0, share.nbytes[1]))
    ]
    try:
        channels.is_busy = True
        for channel, share in moving:
            channel.move(transfer, share)
        engine.watch(lambda: transfer.is_ready, moving[0][0].before, envelope, needs_link=False)
        if transfer.failures:
            _raise(engine, *transfer.failures.popleft(), envelope)
        channels.is_busy = False
    except BaseException as exc:
        channels.stop()
        transfer.finish()
        if not isinstance(exc, DistributedError):  # those have ended the group already
            engine.abort("interrupted in the middle of a collective")
        transfer.wait_for_threads()
        raise
    engine.count(*counts)


def _raise(engine: Engine, peer: int, failure: BaseException, envelope: Envelope) -> NoReturn:
    """Raise what a thread of a channel has met, and tell the group."""
    if isinstance(failure, DisagreedError):
        engine.disagree(peer, failure.operation, failure.call, envelope)
    if isinstance(failure, TamperedError):
        why = failure.why
        engine.lose(peer, str(failure), lambda: TamperedError(why, peer=peer))
        raise TamperedError(why, peer=peer)
    raise failure
