"""What options of sockets gain on a fast wire: windows, sending without a copy, busy polling, quick acknowledgements.

Two network namespaces are joined by a wire of 10 and then of 25 Gbit/s (`tc ... tbf`), with a process in each. As over
a channel, each sends to the other at the same time, over one connection for each direction, with a thread for each that
blocks. All ways are measured alternately in the same processes. Encryption is left out: what is tried is the kernel's
part. CPU time is told too, because it is what a busy machine has less of, and because it does not depend on what else
runs there.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from struct import Struct
from threading import Thread
from typing import Any, NamedTuple

from benchmarks.namespaces import two_hosts
from benchmarks.parts import table
from ringfort.bench.tables import size

RATES = (10, 25)
"""Gbit/s."""
BURST = 4 << 20
"""Bytes that the shaper lets through at once: its timer may wake up only 1,000 times a second, and 25 Gbit/s are 3 MB
in a millisecond."""
NBYTES = 64 << 20
"""Each way."""
RECORD = 512 << 10
"""Bytes of a call, as over a channel."""
PING = 4 << 10
PINGS = 100
PORT = 29_700
"""Of the first way; each has one of its own."""
SECONDS = 120
"""For a process to end."""

# Linux's numbers, of which Python's socket module has no names.
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
SO_BUSY_POLL = 46
SO_ZEROCOPY, MSG_ZEROCOPY = 60, 0x4000000
_EXTENDED_ERROR = Struct("=IBBBBII")
"""Of struct sock_extended_err: errno, origin, type, code, pad, info, data."""
_COPIED = 1
"""The code that says that the kernel has copied the bytes all the same."""


class Way(NamedTuple):
    """How a connection is used."""

    about: str
    buffer: int = 0
    """Bytes of both socket buffers; 0 leaves them to the kernel."""
    is_uncopied: bool = False
    busy_poll: int = 0
    """Microseconds of SO_BUSY_POLL."""
    spins: bool = False
    """Whether the receiving thread asks again and again in place of sleeping."""
    acknowledges: bool = False
    """Whether TCP_QUICKACK is set before each read, after which the kernel may forget it."""


WAYS = {
    "plain": Way("as channels do: threads that block, buffers left to the kernel"),
    "buffers 256 KiB": Way("SO_SNDBUF and SO_RCVBUF", 256 << 10),
    "buffers 1 MiB": Way("SO_SNDBUF and SO_RCVBUF", 1 << 20),
    "buffers 4 MiB": Way("SO_SNDBUF and SO_RCVBUF", 4 << 20),
    "buffers 16 MiB": Way("SO_SNDBUFFORCE and SO_RCVBUFFORCE, which need root", 16 << 20),
    "zero copy": Way("MSG_ZEROCOPY, and its completions read from the error queue", is_uncopied=True),
    "SO_BUSY_POLL": Way("50 us: the kernel asks the driver before it sleeps", busy_poll=50),
    "spinning": Way("non-blocking reads in a loop", spins=True),
    "quick acks": Way("TCP_QUICKACK before each read", acknowledges=True),
}


class Connection:
    """Two sockets to the other process, used in one way: one to send on and one to receive on."""

    def __init__(self, way: Way, out: socket.socket, into: socket.socket) -> None:
        self.way, self.out, self.into = way, out, into
        self.uncopied = self.copied = self.pending = 0
        for sock in (out, into):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if way.busy_poll:
                sock.setsockopt(socket.SOL_SOCKET, SO_BUSY_POLL, way.busy_poll)
        if way.is_uncopied:
            out.setsockopt(socket.SOL_SOCKET, SO_ZEROCOPY, 1)
        if way.spins:
            into.setblocking(False)

    def send(self, data: memoryview) -> None:
        """Send all of `data`, in records."""
        flags = MSG_ZEROCOPY if self.way.is_uncopied else 0
        for start in range(0, len(data), RECORD):
            record = data[start : start + RECORD]
            while record:
                try:
                    sent = self.out.send(record, flags)
                except OSError:  # ENOBUFS: so many completions wait to be read that the kernel has no memory for more
                    if not self.pending:
                        raise
                    self._complete()
                    continue
                record = record[sent:]
                self.pending += bool(flags)
            self._complete()
        while self.pending:  # only then may the memory be written to again
            self._complete()

    def _complete(self) -> None:
        if not self.pending:
            return
        with suppress(BlockingIOError):
            while True:
                _, messages, _, _ = self.out.recvmsg(0, 128, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
                for _, _, raw in messages:
                    _, _, _, code, _, first, last = _EXTENDED_ERROR.unpack_from(raw)
                    self.pending -= last - first + 1
                    self.copied += (last - first + 1) * (code & _COPIED)
                    self.uncopied += (last - first + 1) * (not code & _COPIED)

    def receive(self, into: memoryview) -> None:
        """Fill `into`, in records."""
        for start in range(0, len(into), RECORD):
            record = into[start : start + RECORD]
            while record:
                if self.way.acknowledges:
                    self.into.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
                try:
                    count = self.into.recv_into(record, 0, 0 if self.way.spins else socket.MSG_WAITALL)
                except BlockingIOError:
                    continue
                if not count:
                    raise ConnectionResetError("the other process has ended")
                record = record[count:]


def measure(rounds: int) -> dict[str, Any]:
    """One cell for each rate and way: milliseconds, CPU milliseconds of both processes, microseconds there and back."""
    cells: list[dict[str, Any]] = []
    for rate in RATES:
        with two_hosts(rate * 10**9, BURST) as hosts:
            processes: list[subprocess.Popen[str]] = []
            try:
                for rank, host in enumerate(hosts):
                    arguments = [str(rank), hosts[0].address, str(rounds)]
                    command = [*host.prefix, sys.executable, "-m", "benchmarks.wire", *arguments]
                    processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
                said = [process.communicate(timeout=SECONDS)[0] for process in processes]
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
        first, second = (json.loads(text) for text in said)
        for name, one in first.items():
            cpu = one["cpu_ms"] + second[name]["cpu_ms"]
            ms = max(one["ms"], second[name]["ms"])
            cells.append({"rate": rate, "way": name, **one, "ms": ms, "cpu_ms": cpu})
    return {"bytes": NBYTES, "record": RECORD, "ping": PING, "rounds": rounds, "cells": cells}


def rank_main(rank: int, address: str, rounds: int) -> None:
    """One process; prints what it found."""
    connections = {
        name: Connection(way, *_connected(rank, (address, PORT + number), way))
        for number, (name, way) in enumerate(WAYS.items())
    }
    data, into = memoryview(bytearray(NBYTES)), memoryview(bytearray(NBYTES))
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in WAYS}
    for turn in range(rounds + 1):  # the first warms up
        for name in list(WAYS)[:: 1 if turn % 2 == 0 else -1]:
            one = connections[name]
            _together(one, data[:1], into[:1])
            cpu, start = time.process_time(), time.perf_counter()
            _together(one, data, into)
            ms, cpu_ms = (time.perf_counter() - start) * 1e3, (time.process_time() - cpu) * 1e3
            taken[name].append((ms, cpu_ms, _round_trip(one, rank, data[:PING], into[:PING])))
    found: dict[str, Any] = {}
    for name, times in taken.items():
        ms, cpu_ms, ping_us = (statistics.median(column) for column in zip(*times[1:], strict=True))
        one = connections[name]
        found[name] = {"ms": ms, "cpu_ms": cpu_ms, "ping_us": ping_us, "copied": one.copied, "uncopied": one.uncopied}
    print(json.dumps(found))


def _connected(rank: int, address: tuple[str, int], way: Way) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets. Buffers are set before, because the window is agreed when a connection is made."""

    def prepared() -> socket.socket:
        sock = socket.socket()
        for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE) if way.buffer else ():
            sock.setsockopt(socket.SOL_SOCKET, option, way.buffer)
        return sock

    made: list[socket.socket] = []
    if rank == 0:
        with prepared() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
            made = [listener.accept()[0] for _ in range(2)]
        return made[0], made[1]
    for _ in range(2):
        until = time.monotonic() + 20
        while True:
            sock = prepared()
            try:
                sock.connect(address)
                break
            except ConnectionRefusedError:  # the other process has not come to this way yet
                sock.close()
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
        made.append(sock)
    return made[1], made[0]


def _together(one: Connection, data: memoryview, into: memoryview) -> None:
    sender = Thread(target=one.send, args=(data,))
    sender.start()
    one.receive(into)
    sender.join()


def _round_trip(one: Connection, rank: int, data: memoryview, into: memoryview) -> float:
    """Microseconds there and back, the median."""
    steps: list[Callable[[], None]] = [lambda: one.send(data), lambda: one.receive(into)]
    taken: list[float] = []
    for _ in range(PINGS):
        start = time.perf_counter()
        for step in steps[:: 1 if rank == 0 else -1]:
            step()
        taken.append((time.perf_counter() - start) * 1e6)
    return statistics.median(taken)


def wire_part(result: Mapping[str, Any]) -> Iterable[str]:
    """Of each rate the GB/s each way, CPU time for a GB, and a round trip."""
    cells = {(cell["rate"], cell["way"]): cell for cell in result["cells"]}
    rates = list(dict.fromkeys(rate for rate, _ in cells))
    zero = cells[rates[0], "zero copy"]
    sends = zero["copied"] + zero["uncopied"]
    yield (
        f"Two network namespaces, joined by a wire with `tc qdisc ... tbf rate {rates[0]}gbit` and then "
        f"{rates[-1]}gbit. {size(result['bytes'])} each way at the same time, one connection and one thread for each "
        f"direction, without encryption; medians of {result['rounds']} rounds in which all take turns, at a load of "
        f"{result['machine']['load_at_start']:g} when they began. A round trip is of {size(result['ping'])}. "
        "CPU time is that of the two processes, for each GB sent and received. Of the sends without a copy, "
        f"the kernel copied {zero['copied']} of {sends} all the same: a virtual wire has no card that reads memory.\n"
    )
    heads = [f"{rate} Gbit/s: {what}" for rate in rates for what in ("GB/s each way", "CPU s per GB", "round trip")]
    rows: list[list[str]] = []
    for name in dict.fromkeys(name for _, name in cells):
        row = [f"{name}: {WAYS[name].about}"]
        for rate in rates:
            one = cells[rate, name]
            gigabytes = result["bytes"] / 1e9
            row.append(f"{gigabytes / one['ms'] * 1e3:.2f}")
            row.append(f"{one['cpu_ms'] / 1e3 / (2 * gigabytes):.2f}")
            row.append(f"{one['ping_us']:.0f} us")
        rows.append(row)
    yield from table(["way", *heads], rows)


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
