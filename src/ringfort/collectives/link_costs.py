"""What the links of a group cost, measured in milliseconds: one table, the same at every rank.

All ranks measure at the same time, each against the rank so many places on, because that is how collectives use links:
on a machine with fewer cores than ranks, or where several ranks share one network card, a link costs more among others
than alone. Then all gather what all have measured. The clock is read here; what is made of it is in `auto`, and pure.

Measuring is a collective of its own, and its probes have a communicator id of their own: a rank that takes part in some
other collective finds out at the first message, and nothing that is sent here can be taken for data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from statistics import median_low
from typing import Final

import numpy as np

from ringfort.backends.group import Group
from ringfort.collectives import algorithms, float16
from ringfort.collectives.steps import gather_rows
from ringfort.config import KIB
from ringfort.errors import DistributedError
from ringfort.transport.machine import cores
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array

LATENCY: Final = 40e-6
"""Seconds, if nothing was measured: of loopback on a small machine."""
BANDWIDTH: Final = 2e9
"""Bytes a second, likewise."""
REDUCE: Final = 0.1e-9
"""Seconds a byte, likewise: memory adds at some 10 GB/s."""
START: Final = 25e-6
"""Seconds of Python that a call costs a rank beside its messages, whatever its strategy: on a small machine too. It is
not measured, since no choice depends on it."""

_PROBE_BYTES: Final = 256 * KIB
"""What one system call moves at most. 2 ms on a 1 Gbit/s wire, half a second at the worst over bad Wi-Fi."""
_LARGE, _SMALL, _LAPS = 2, 4, 4
"""Exchanges of that and of 8 bytes with each neighbour in a run, and laps of one message round all. On a host of many
ranks as many as it has ranks: where they share cores, one exchange in so many waits for its turn and the others find
that their messages have come meanwhile. Only all together say what an exchange takes."""
_RUNS, _LOCAL_RUNS = 2, 4
"""Of which the quicker, or the second quickest, counts: what else the machine does can only add, and a choice should
not depend on it. Where all are on one host more of them cost little, and the first find the memory between them cold;
but where ranks share cores, the quickest of many is no more than luck."""
_SAME: Final = 3.0
"""Links between hosts that differ by less, at one distance, are taken as alike: that much is noise."""
SLOW: Final = 125e6
"""Bytes a second, gigabit Ethernet's. Up to here, what the cluster has measured of a link is taken as it is: a probe
would keep such a link busy for long, and again after each change of the group. Faster ones are measured by the ranks:
that takes a few milliseconds, and where the wire is quick, the cluster's figure says more about its control thread."""
_MAX_NEIGHBOURS: Final = 8
"""Up to so many others are all measured; of more only those at distances of powers of two, which rings and halving
use."""


@dataclass(frozen=True, eq=False)
class LinkCosts:
    """Every link of a group. Compared by identity: a group has one."""

    latency: Array
    """Seconds of the smallest exchange, `[from, to]`, while all ranks do the same."""
    per_byte: Array
    """Seconds a further byte takes, likewise."""
    hop: float = 1.0
    """What a message that travels alone costs, as a share of such an exchange."""
    overhead: float = 0.6 * LATENCY
    """Seconds that a rank is busy with a message, so that even those sent at once leave in turn."""
    reducer: tuple[float, float, float] = (REDUCE, 10 * REDUCE, 50 * REDUCE)
    """Seconds that adding a byte takes a rank by itself: of most types, of bfloat16, of float16."""
    start: float = START
    """Seconds that a call costs a rank beside its messages."""
    crowd: float = 1.0
    """Ranks for each core of the fullest host, and at least 1: how many times as long the arithmetic takes, and the
    messages inside a host have been found to take, while all ranks do the same."""

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return len(self.latency)

    @classmethod
    def even(cls, world_size: int, latency: float = LATENCY, bandwidth: float = BANDWIDTH) -> LinkCosts:
        """Return costs that are the same for all links."""
        shape = (world_size, world_size)
        return cls(np.full(shape, latency), np.full(shape, 1 / bandwidth), overhead=0.6 * latency)

    def with_known(self, latency: float | None, bandwidth: float | None) -> LinkCosts:
        """Return the same costs, except for those that the user has set."""
        costs = self
        if latency is not None:
            costs = replace(costs, latency=np.full_like(self.latency, latency), overhead=0.6 * latency)
        if bandwidth is not None:
            costs = replace(costs, per_byte=np.full_like(self.per_byte, 1 / bandwidth))
        return costs

    def reducer_of(self, kind: str) -> float:
        """Return the seconds that adding a byte of elements of `kind` takes."""
        return self.reducer[{"bfloat16": 1, "float16": 2}.get(kind, 0)]


def distances(hosts: tuple[int, ...]) -> list[int]:
    """Return the distances of the ranks that each rank measures against. On one host, all links are alike."""
    world_size = len(hosts)
    if len(set(hosts)) == 1:
        return [1]
    if world_size <= _MAX_NEIGHBOURS + 1:
        return list(range(1, world_size))
    powers = {1 << bit for bit in range(world_size.bit_length()) if 1 << bit < world_size}
    return sorted(powers | {world_size - power for power in powers})


class _Known:
    """What the ranks of a group knew of their links before it was formed: the same at all of them."""

    speeds: Array | None = None


def known_speeds(group: Group, envelope: Envelope) -> Array:
    """Bytes a second of each link, `[from, to]`, as the ranks at its ends know it; 0 where none of them does. Called by
    all ranks, in the collective of `envelope`: the first time, each tells the others what it knows. Every rank is in
    that collective when this returns."""
    known = group.part(_Known)
    if known.speeds is None:
        own = [group.bandwidths.get(peer, 0.0) for peer in range(group.world_size)]
        known.speeds = agree_on(gather_rows(group, own, envelope))
    else:
        group.meet(envelope)
    return known.speeds


def agree_on(table: Array) -> Array:
    """Return one figure for each link: the lower of what the ranks at its ends say. Pure, so the same on every rank."""
    said = np.where(table > 0, table, np.inf)
    lower = np.minimum(said, said.T)
    return np.where(np.isfinite(lower), lower, 0.0)


def shared_per_byte(speeds: Array, hosts: tuple[int, ...], distance: int) -> Array:
    """For each rank, seconds that a byte takes from the rank `distance` places before it while all ranks send so far;
    0 for a link that is to be measured. The speeds are of links that nobody else used: the ranks of a host share
    them."""
    n = len(hosts)
    pairs = [((rank - distance) % n, rank) for rank in range(n)]
    crossing = [(hosts[src], hosts[dst]) for src, dst in pairs if hosts[src] != hosts[dst]]
    leaving, coming = [a for a, _ in crossing], [b for _, b in crossing]
    found = np.zeros(n)
    for src, dst in pairs:
        if hosts[src] != hosts[dst] and 0 < speeds[src, dst] <= SLOW:
            found[dst] = max(leaving.count(hosts[src]), coming.count(hosts[dst])) / speeds[src, dst]
    return found


@contextmanager
def probing(group: Group, envelope: Envelope) -> Generator[Envelope, None, None]:
    """Give an envelope for the probes of the collective of `envelope`, with a communicator id of their own. An error in
    the block also ends that collective, in which others may wait."""
    text = b"measuring" + envelope.comm_id.to_bytes(8, "little")
    probes = envelope._replace(comm_id=int.from_bytes(blake2b(text, digest_size=8).digest(), "little") or 1)
    try:
        yield probes
    except DistributedError:
        group.share_failure(probes, envelope)
        raise


def measure(group: Group, envelope: Envelope) -> LinkCosts:
    """Measure the links; all ranks call it, in the collective of `envelope`, and get the same. Raises as
    `Backend.exchange`."""
    speeds = known_speeds(group, envelope)
    with probing(group, envelope) as probes:
        found = _probe(group, speeds, probes)
    return combine(gather_rows(group, found, envelope), group.hosts)


def _probe(group: Group, speeds: Array, envelope: Envelope) -> list[float]:
    rank, n, hosts = group.rank, group.world_size, group.hosts
    fullest = max(map(hosts.count, hosts))
    runs = _LOCAL_RUNS if fullest == n else _RUNS
    small, large = (np.zeros(8, np.uint8), np.zeros(8, np.uint8)), (_room(), _room())
    found: list[float] = []
    for distance in distances(hosts):
        dst, src = (rank + distance) % n, (rank - distance) % n
        known = shared_per_byte(speeds, hosts, distance)

        def exchange(dst: int = dst, src: int = src) -> None:
            group.exchange(small[0], dst, small[1], src, envelope)

        def move(dst: int = dst, src: int = src, known: Array = known) -> None:
            if known[dst] and known[rank]:
                return
            if known[dst]:
                group.recv(large[1], src, envelope)
            elif known[rank]:
                group.send(large[0], dst, envelope)
            else:
                group.exchange(large[0], dst, large[1], src, envelope)

        quick = _steady(runs, max(_SMALL, fullest), exchange)
        slow = _steady(runs, max(_LARGE, fullest), move)
        found += quick, float(known[rank]) or max(slow - quick, 0.1 * slow) / _PROBE_BYTES
    burst = _steady(runs, max(_LAPS, fullest), lambda: _burst(group, envelope))
    lap = quickest(_LAPS, lambda: _lap(group, envelope))  # of which that of rank 0 counts
    return [*found, lap, burst, float(cores()), *_fold_costs()]


def combine(table: Array, hosts: tuple[int, ...]) -> LinkCosts:
    """Return the costs, from a row of figures for each rank. Pure, so the same on every rank."""
    n = len(table)
    away = distances(hosts)
    latency, per_byte = np.zeros((n, n)), np.zeros((n, n))
    for place, distance in enumerate(away):
        for rank in range(n):
            src = (rank - distance) % n
            latency[src, rank], per_byte[src, rank] = table[rank, 2 * place : 2 * place + 2]
    crosses = np.not_equal.outer(np.array(hosts), np.array(hosts))
    latency, per_byte = (_smooth(figure, away, crosses) for figure in (latency, per_byte))
    rest = table[:, 2 * len(away) :]
    lap = float(rest[0, 0])
    plain, bfloat16, half = map(float, rest[:, 3:].max(axis=0))  # the slowest adder holds up all
    crowd = max(1.0, *(hosts.count(host) / float(rest[rank, 2]) for rank, host in enumerate(hosts)))
    burst = float(np.median(rest[:, 1]))
    around = [float(latency[rank, (rank + 1) % n]) for rank in range(n)]
    alone = max(around)
    overhead = max(burst - alone, 0.1 * alone) / (n - 2) if n > 2 else 0.6 * alone
    hop = min(1.0, lap / sum(around))
    return LinkCosts(latency, per_byte, hop, overhead, (plain, bfloat16, half), crowd=crowd)


def _smooth(figure: Array, away: list[int], crosses: Array) -> Array:
    """Return the measurements without noise: a link is as fast as the faster of its directions, and as similar
    links."""
    n = len(figure)
    ranks = np.arange(n)
    known = np.zeros((n, n), bool)
    for distance in away:
        known[ranks, (ranks + distance) % n] = True
    both = np.where(known & known.T, np.minimum(figure, figure.T), np.maximum(figure, figure.T))
    inside = known & ~crosses
    if inside.any():  # one machine's memory and cores: they differ by chance alone
        both[inside] = np.median(both[inside])
    for distance in away:
        on = (ranks + distance) % n
        alike = crosses[ranks, on]
        if alike.any():
            there = both[ranks[alike], on[alike]]
            usual = float(np.median(there))
            both[ranks[alike], on[alike]] = np.where(there < _SAME * usual, usual, there)
    for kind in (crosses, ~crosses):  # what was not measured is like the worst of its kind that was
        both[kind & ~known] = both[kind & known].max(initial=0.0) or both[known].max(initial=0.0)
    return both


def _room() -> Array:
    return np.zeros(_PROBE_BYTES, np.uint8)


def quickest(count: int, work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of `count` calls."""
    return min(_timed(1, work) for _ in range(count))


def _steady(runs: int, count: int, work: Callable[[], object]) -> float:
    """Return the seconds per call of `count` calls, the lower median of `runs` runs."""
    return median_low(_timed(count, work) for _ in range(runs)) / count


def _timed(count: int, work: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(count):
        work()
    return time.perf_counter() - start


def _burst(group: Group, envelope: Envelope) -> None:
    """Send a small message to each of the others at once."""
    message = bytearray(8)
    for dst, _ in algorithms.exchange_order(group.rank, group.world_size):
        group.send(message, dst, envelope)
    for _, src in algorithms.exchange_order(group.rank, group.world_size):
        group.recv(message, src, envelope)


def _lap(group: Group, envelope: Envelope) -> None:
    """Pass one message round all ranks, from rank 0 to rank 0."""
    rank, n = group.rank, group.world_size
    token = bytearray(8)
    if rank != 0:
        group.recv(token, rank - 1, envelope)
    group.send(token, (rank + 1) % n, envelope)
    if rank == 0:
        group.recv(token, n - 1, envelope)


def _fold_costs() -> tuple[float, float, float]:
    """Seconds a byte of adding float32, bfloat16 and float16. The first, which memory holds up, on as much as arrives
    at once: on what fits the innermost cache it looked twice as quick as it is."""
    size = 8192
    whole, arrived = _room().view(np.float32), _room().view(np.float32)
    bits: Array = np.zeros(size, np.uint16)
    floats: Array = np.zeros(size, np.float16)
    return (
        quickest(5, lambda: np.add(whole, arrived, out=whole)) / whole.nbytes,
        quickest(5, lambda: float16.reducer(float16.BFLOAT16, np.add, bits, bits)) / bits.nbytes,
        quickest(5, lambda: float16.reducer(float16.FLOAT16, np.add, floats, floats)) / floats.nbytes,
    )
