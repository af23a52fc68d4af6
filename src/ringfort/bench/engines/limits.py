"""The limits: engines that only move the bytes that an all-reduce has to move, without arithmetic or frames.

A rank of a ring sends 2(n-1)/n of the array to the next rank and receives as much from the previous one. No all-reduce
can move less if each rank computes a part of the sum, so this is the cost of the transport alone.
"""

from __future__ import annotations

import mmap
import select
import socket
from math import prod

import numpy as np

from ringfort.bench.engines.base import Bound, Engine, Seat
from ringfort.bench.options import Case
from ringfort.bench.patterns import Array
from ringfort.config import KIB, format_address, parse_address
from ringfort.transport.tcp import tune

BLOCK = 256 * KIB
"""Bytes per system call: more would not stay in the cache between the two processes."""
COPY_BLOCK = 512 * KIB
"""Bytes per copy: the fastest size from 64 KiB to 1 MiB between two ranks on two cores."""
HALF_PAGE = 2 * KIB
"""Bytes. Large arrays begin 16 bytes into a page; copies between two such places are several times slower."""
COPY_BLOCKS = 2
"""Blocks per rank: it writes one while its neighbour reads the other."""


def on_a_page(nbytes: int) -> memoryview:
    """Memory that begins at a page. That of NumPy and `bytearray` begins 16 bytes later, and receiving 64 MiB there
    took 1.6 times as long: a limit must not depend on that."""
    view = memoryview(mmap.mmap(-1, nbytes))
    np.frombuffer(view, np.uint8).fill(0)  # so that no measured call touches it first
    return view


class SocketsEngine(Engine):
    """Bare non-blocking sockets, with the socket options of `transport.tcp`."""

    name = "sockets"
    about = (
        "the limit of TCP: 2(n-1)/n of the array to the next rank and as much from the previous one, over bare "
        "non-blocking sockets, without arithmetic or frames"
    )
    packages = ("numpy",)

    def setup(self, seat: Seat) -> None:
        """Each rank connects to the next."""
        self._seat = seat
        with socket.create_server((seat.address, 0)) as listener:
            listener.settimeout(60)  # seconds; the parent has given up by then
            addresses = seat.share(format_address(*listener.getsockname()[:2]))
            after = addresses[(seat.rank + 1) % seat.world_size]
            if seat.world_size == 2:  # one connection for both directions
                one = socket.create_connection(parse_address(after), timeout=60) if seat.rank else listener.accept()[0]
                self._out = self._into = tune(one)
            else:
                self._out = tune(socket.create_connection(parse_address(after), timeout=60))
                self._into = tune(listener.accept()[0])
        self._scratch = on_a_page(BLOCK)

    def bind(self, case: Case, source: Array | None) -> Bound:
        """See `Engine.bind`."""
        if case.op != "all_reduce" or source is None or case.world_size < 2:
            raise NotImplementedError("this limit exists only for all_reduce among two ranks or more")
        view = memoryview(source.view(np.uint8))
        half = max(1, case.nbytes * (case.world_size - 1) // case.world_size)
        mine, theirs = view[:half], on_a_page(half)

        def run() -> None:
            self._exchange(mine, None, half)  # what would be added: into a block that stays in the cache
            self._exchange(mine, theirs, half)  # what would be copied: into an array

        return Bound(run, lambda: None)

    def _exchange(self, data: memoryview, into: memoryview | None, nbytes: int) -> None:
        """Send `data` and receive as many bytes, at the same time."""
        send, recv_into = self._out.send, self._into.recv_into
        sent = got = 0
        while sent < nbytes or got < nbytes:
            before = sent + got
            if sent < nbytes:
                try:  # noqa: SIM105  # `suppress` would be measured too
                    sent += send(data[sent : sent + BLOCK])
                except BlockingIOError:
                    pass
            if got < nbytes:
                room = min(BLOCK, nbytes - got)
                try:
                    count = recv_into(self._scratch[:room] if into is None else into[got : got + room])
                    if not count:
                        raise ConnectionResetError("the previous rank closed its connection")
                    got += count
                except BlockingIOError:
                    pass
            if sent + got == before:
                select.select([self._into] if got < nbytes else [], [self._out] if sent < nbytes else [], [])

    def barrier(self) -> object:
        """Each byte from the previous rank means that one more rank has arrived."""
        byte = memoryview(bytearray(1))
        for _ in range(self._seat.world_size - 1):
            self._exchange(byte, byte, 1)
        return None

    def teardown(self) -> None:
        """Close both connections."""
        self._out.close()
        self._into.close()


class MemcpyEngine(SocketsEngine):
    """Copies through shared memory; the sockets are for the barrier alone."""

    name = "memcpy"
    about = (
        "the limit of shared memory: 2(n-1)/n of the array copied into shared memory, and as much out of the "
        "neighbour's, 512 KiB at a time, without arithmetic or waiting"
    )

    def setup(self, seat: Seat) -> None:
        """Map a file in memory, in which every rank has its blocks."""
        super().setup(seat)
        shape = (seat.world_size, COPY_BLOCKS, COPY_BLOCK)
        with (seat.folder / "blocks").open("a+b") as file:
            file.truncate(HALF_PAGE + prod(shape))
            self._map = mmap.mmap(file.fileno(), HALF_PAGE + prod(shape))
        self._blocks = np.frombuffer(self._map, np.uint8, offset=HALF_PAGE).reshape(shape)

    def bind(self, case: Case, source: Array | None) -> Bound:
        """See `Engine.bind`."""
        super().bind(case, source)
        assert source is not None  # checked there
        data = source.view(np.uint8)
        half = max(1, case.nbytes * (case.world_size - 1) // case.world_size)
        mine = self._blocks[self._seat.rank]
        other = self._blocks[(self._seat.rank + 1) % case.world_size]

        def run() -> None:
            for _ in range(2):
                for number, start in enumerate(range(0, half, COPY_BLOCK)):
                    part = data[start : min(start + COPY_BLOCK, half)]
                    np.copyto(mine[number % COPY_BLOCKS, : len(part)], part)
                    np.copyto(part, other[(number + 1) % COPY_BLOCKS, : len(part)])

        return Bound(run, lambda: None)

    def teardown(self) -> None:
        """Release the memory, and close the connections."""
        super().teardown()
        del self._blocks
        self._map.close()
