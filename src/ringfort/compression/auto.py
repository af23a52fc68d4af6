"""The automatic choice of a strategy: a cost model of links and codecs, fed with measurements.

Every rank must choose the same, so the ranks share what they measure (the slowest counts), and the rest is arithmetic.
With n ranks, N elements of S bytes, latency a per message, b seconds per byte, and a codec that takes e and d seconds
to encode and decode an element and encodes N elements in B bytes:

    none        2(n-1) a + 2(n-1)/n S b
    quantized   2(n-1) m a + 2(n-1)/n B b + N e + (2n-1)/n N d, with m messages per part
    topk        (n-1) a + (n-1) B b + N e + n N d; sparse too
    powersgd    4(n-1) a + 2(n-1)/n B b + N e + N d

Where ranks share hosts, n is the number of hosts, N the elements of a lane (`hosts.py`), and b that of a host's wire
times the lanes, which share it. Adding up inside a host of h ranks and handing out take 2(h-1) N S c more, with c
seconds per byte between its ranks; without compression too, for the all-reduce then goes by hosts as well. PowerSGD
does that with its factors, and encodes whole arrays.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Final, NamedTuple

import numpy as np

from ringfort.backends.group import BARRIER_CALL, Group
from ringfort.collectives.algorithms import groups_of
from ringfort.collectives.link_costs import BANDWIDTH, LATENCY, known_speeds, probing, quickest, shared_per_byte
from ringfort.collectives.signature import measuring_for
from ringfort.collectives.steps import gather_rows
from ringfort.compression import encoded, lowrank
from ringfort.compression.chunked import ChunkedTopK
from ringfort.compression.exchange import segment_of
from ringfort.compression.hosts import compresses_by_hosts, hosts_of
from ringfort.compression.quantize import codec_of
from ringfort.compression.sparse import TopK
from ringfort.compression.strategy import CompressionStrategy, Method
from ringfort.config import KIB, MIB
from ringfort.telemetry.trace import own_trace
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array

GAIN: Final = 0.9
"""Compression must take less than this fraction of the time without: predictions err, and exact sums have a value."""
PROBES: Final = (256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB)
"""Bytes to exchange to measure the bandwidth, until an exchange takes `LONG_ENOUGH`. Large ones, because a link may let
a burst pass at any speed: half a MiB is usual for a shaper or a cheap switch."""
LONG_ENOUGH: Final = 0.1
"""Seconds."""
_SAMPLE: Final = 256 * KIB
"""Elements to time a codec with: 1 MiB."""
_SMALL: Final = 8
_INSIDE: Final = 1 * MIB
"""Bytes to exchange with a neighbour on the same host."""
_REMEMBERED: Final = 1024
"""Choices to cache per group: programs repeat the same few buckets."""

logger = logging.getLogger("ringfort.compression")


class Speed(NamedTuple):
    """The measured cost and error of a codec."""

    write: float
    """Seconds per element to encode, with error feedback."""
    read: float
    """Seconds per element to decode."""
    error: float
    """The relative error for normally distributed values."""


NOMINAL: Final = {
    CompressionStrategy.parse(name): speed
    for name, speed in {
        "fp16": Speed(1.8e-9, 0.5e-9, 0.0003),
        "bf16": Speed(1.2e-9, 0.4e-9, 0.002),
        "int8": Speed(1.6e-9, 0.6e-9, 0.011),
        "int4": Speed(2.4e-9, 0.9e-9, 0.17),
        "onebit": Speed(2.0e-9, 1.3e-9, 0.61),
        "topk(0.01)+int4": Speed(0.8e-9, 0.3e-9, 0.97),
        "powersgd(4)": Speed(3e-9, 2e-9, 0.99),
        "sparse": Speed(12e-9, 1.5e-9, 0.93),
    }.items()
}
"""For groups with virtual time: the figures of one core of an AMD EPYC of 2023."""
CANDIDATES: Final = (CompressionStrategy.NONE, *(name for name in NOMINAL if name.method is not Method.SPARSE))
"""The strategies to choose from. Of equally fast ones the first is chosen. SPARSE is for the differences of many steps:
its error feedback forgets."""


@dataclass(frozen=True)
class Table:
    """The measurements of a group's links and codecs: the same on every rank."""

    hosts: tuple[int, ...]
    """For each rank the lowest rank on its host."""
    latency: float
    per_byte: float
    """Seconds per byte that leaves a host."""
    speeds: dict[CompressionStrategy, Speed]
    inside: float = 0.0
    """Seconds per byte between ranks of one host, while all of them send."""

    def predict(self, strategy: CompressionStrategy, shapes: Sequence[tuple[int, ...]]) -> float:
        """Predict the seconds that an all-reduce of tensors of these shapes takes."""
        n, lanes, neighbours = len(self.hosts), 1, 0
        if compresses_by_hosts(self.hosts):
            sizes = [len(members) for members in groups_of(self.hosts)]
            n, lanes, neighbours = len(sizes), min(sizes), max(sizes) - 1
        whole, total = 2 * (n - 1) / n, sum(prod(shape) for shape in shapes)
        count = -(-total // lanes)
        a, b = self.latency, self.per_byte * lanes
        among = 2 * neighbours * 4 * count * self.inside
        if strategy.method is Method.NONE:
            return 2 * (n - 1) * a + whole * 4 * count * b + among
        speed = self.speeds[strategy]
        if strategy.method in (Method.TOP_K, Method.SPARSE):
            k = strategy.kept(count)
            is_sparse = strategy.method is Method.SPARSE
            size = (ChunkedTopK() if is_sparse else TopK(k, codec_of(strategy.values))).nbytes(count)
            return (n - 1) * (a + size * b) + count * speed.write + n * count * speed.read + among
        if strategy.method is Method.POWER_SGD:
            size = 4 * sum(_factor_elements(shape, strategy.rank) for shape in shapes) / lanes
            moved = whole * size * b + 2 * neighbours * size * self.inside
            return 4 * (n - 1) * a + moved + total * (speed.write + speed.read)
        codec = codec_of(strategy.values)
        part = -(-count // n)
        turns = max(1, -(-part // segment_of(codec)))
        work = count * (speed.write + (2 * n - 1) / n * speed.read)
        return 2 * (n - 1) * turns * a + whole * codec.nbytes(count) * b + work + among


@dataclass(frozen=True)
class Choice:
    """What AUTO chooses, and why."""

    strategy: CompressionStrategy
    why: str
    predicted: dict[CompressionStrategy, float]
    """The predicted seconds of each candidate; empty if there was nothing to choose."""


class _Choices(dict[tuple[CompressionStrategy, tuple[tuple[int, ...], ...]], Choice]):
    """The choices of a group."""

    last: CompressionStrategy | None = None
    """The latest, which those who watch were told."""


def choose(
    group: Group,
    asked: CompressionStrategy,
    shapes: Sequence[tuple[int, ...]],
    call: bytes = BARRIER_CALL,
    timeout: float | None = None,
) -> Choice:
    """Return the fastest strategy within the error that `asked` allows. All ranks call it at the same place among their
    collectives. The first call measures, which is a collective and takes half a second on a link of 100 Mbit/s that the
    cluster has not measured."""
    known = group.part(_Choices)
    key = asked, tuple(shapes)
    found = known.get(key)
    if found is None:
        if len(known) >= _REMEMBERED:
            known.clear()
        if group.shares_memory or len(set(group.hosts)) == 1:
            what = "share memory" if group.shares_memory else "are on one host"
            why = f"the ranks {what}, where uncompressed data is the fastest"
            found = Choice(CompressionStrategy.NONE, why, {})
        else:
            found = _fastest(table_of(group, call, timeout), asked, shapes)
        known[key] = found
        logger.info("Compression auto chose %s for %d elements: %s", found.strategy, sum(map(prod, shapes)), found.why)
        if found.strategy != known.last:
            known.last = found.strategy
            own_trace().event("compression", f"Compression auto chose {found.strategy}: {found.why}")
    return found


def _fastest(table: Table, asked: CompressionStrategy, shapes: Sequence[tuple[int, ...]]) -> Choice:
    predicted = {
        strategy: table.predict(strategy, shapes)
        for strategy in CANDIDATES
        if strategy.method is Method.NONE or table.speeds[strategy].error <= asked.max_error
    }
    plain = predicted[CompressionStrategy.NONE]
    best = min(predicted, key=predicted.__getitem__)
    if predicted[best] >= GAIN * plain:
        best = CompressionStrategy.NONE
    rate = f"{8e-6 / table.per_byte:.0f} Mbit/s"
    if best.method is Method.NONE:
        others = min((seconds for strategy, seconds in predicted.items() if strategy != best), default=plain)
        why = f"at {rate}, no compression takes {_ms(plain)}, and the best that max_error allows takes {_ms(others)}"
    else:
        why = f"at {rate}, {best} takes {_ms(predicted[best])}, and no compression takes {_ms(plain)}"
    return Choice(best, why, predicted)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


# --- measuring --------------------------------------------------------------------------------------------------------


def table_of(group: Group, call: bytes = BARRIER_CALL, timeout: float | None = None) -> Table:
    """Return the group's measurements. The first call measures: a collective of all ranks, on behalf of `call`, within
    `timeout`."""

    return group.part(Table, lambda: _measured(group, call, timeout))


def measure_again(group: Group, call: bytes = BARRIER_CALL, timeout: float | None = None) -> Table:
    """Measure links and codecs now, whatever is known: a collective, which takes some 0.2 s."""
    return _measured(group, call, timeout, forgets=True)


def _measured(group: Group, call: bytes, timeout: float | None, *, forgets: bool = False) -> Table:
    config = group.config.collective
    if group.is_measured:
        envelope = group.envelope(measuring_for(call), timeout)
        speeds_of_links = known_speeds(group, envelope)
        if forgets:
            speeds_of_links = np.zeros_like(speeds_of_links)
        with probing(group, envelope) as probes:
            latency, per_byte = _measure_links(group, speeds_of_links, probes)
            inside = _measure_inside(group, probes)
        own = [number for speed in codec_speeds().values() for number in speed]
        slowest = gather_rows(group, own, envelope).max(axis=0).reshape(-1, 3)
        speeds = {name: Speed(*map(float, row)) for name, row in zip(codec_speeds(), slowest, strict=True)}
    else:  # where time is virtual
        latency, per_byte, inside, speeds = LATENCY, 1 / BANDWIDTH, 1 / BANDWIDTH, dict(NOMINAL)
    if config.latency is not None:
        latency = config.latency
    if config.bandwidth is not None:
        per_byte = 1 / config.bandwidth
    return Table(group.hosts, latency, per_byte, speeds, inside)


def _measure_links(group: Group, speeds: Array, envelope: Envelope) -> tuple[float, float]:
    """Measure the latency and the seconds per byte that leaves a host, by the slowest link while all ranks send at
    once, as collectives do. `speeds` is what is known about the links: if it covers them all, nothing large is
    sent."""
    rank, n = group.rank, group.world_size
    dst, src = (rank + 1) % n, (rank - 1) % n

    def slowest(size: int, times: int) -> float:
        """Return the seconds of the fastest of some exchanges, at the rank where that takes the longest."""
        out, into = np.zeros((2, size), np.uint8)
        own = quickest(times, lambda: group.exchange(out, dst, into, src, envelope))
        return float(gather_rows(group, [own], envelope).max())

    latency = slowest(_SMALL, 5)
    between_hosts = [(a, (a + 1) % n) for a, host in enumerate(group.hosts) if host != group.hosts[(a + 1) % n]]
    leaving = [group.hosts[a] for a, _ in between_hosts]
    sharers = max(map(leaving.count, leaving), default=1)
    """Of the slowest wire: what one of them measures is so many times what a byte takes."""
    per_byte = float(shared_per_byte(speeds, group.hosts, 1).max())
    if per_byte and all(speeds[link] for link in between_hosts):
        return latency, per_byte / sharers
    for size in PROBES:
        taken = slowest(size, 1)
        per_byte = max(taken - latency, 0.1 * taken) / size
        if taken >= LONG_ENOUGH:
            break
    return latency, per_byte / sharers


def _measure_inside(group: Group, envelope: Envelope) -> float:
    """Measure the seconds per byte between ranks of one host while all of them send; 0 if none shares a host, or
    all."""
    hosts = hosts_of(group)
    if hosts is None:
        return 0.0
    inside, own = hosts.inside, 0.0
    if inside.world_size > 1:
        out, into = np.zeros((2, _INSIDE), np.uint8)
        dst, src = (inside.rank + 1) % inside.world_size, (inside.rank - 1) % inside.world_size
        own = quickest(3, lambda: inside.exchange(out, dst, into, src, envelope)) / _INSIDE
    return float(gather_rows(group, [own], envelope).max())


@cache
def codec_speeds() -> dict[CompressionStrategy, Speed]:
    """Time every candidate but NONE on this machine: some 50 ms, once per process."""
    sample = np.random.default_rng(1).standard_normal(_SAMPLE).astype(np.float32)
    return {strategy: _time(strategy, sample) for strategy in NOMINAL}


def codec_seconds(nbytes: int, world_size: int) -> dict[str, float]:
    """Return the seconds that `int8` and `int4` would take here for gradients of so many bytes of float32, in a group
    of so many ranks: by what was measured if AUTO has done that in this process, else by `NOMINAL`. Measures
    nothing."""
    speeds = codec_speeds() if codec_speeds.cache_info().currsize else NOMINAL
    n, count = max(1, world_size), nbytes // 4
    return {
        str(strategy): count * (speeds[strategy].write + (2 * n - 1) / n * speeds[strategy].read)
        for strategy in map(CompressionStrategy.parse, ("int8", "int4"))
    }


def _time(strategy: CompressionStrategy, sample: Array) -> Speed:
    shape = (512, sample.size // 512)
    work, data = sample.copy(), np.empty(0, np.uint8)

    def write() -> None:
        nonlocal data
        work[...] = sample
        data, _ = encoded.write(strategy, work, shape, None, 0, keep_error=True)

    write_seconds = quickest(3, write)
    read_seconds = quickest(3, lambda: encoded.read(data))
    error = float(np.linalg.norm(work) / np.linalg.norm(sample))
    return Speed(write_seconds / sample.size, read_seconds / sample.size, error)


def _factor_elements(shape: tuple[int, ...], rank: int) -> int:
    matrix = lowrank.matrix_shape(shape, rank)
    return prod(shape) if matrix is None else rank * sum(matrix)
