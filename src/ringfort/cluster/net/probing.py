"""How fast an address is: a connection of its own, a short burst there, one back, and what each side saw of it.

    initiator                                  responder
    burst, end                           ->
                                         <-    who I am and how fast that came; burst, end
    how fast that came                   ->

The speed is that of the whole burst or of what came after its first part (`speed_of`). A burst ends after
`BURST_BYTES` or `BURST_SECONDS`, whichever is first, so that it disturbs nobody for long.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from ringfort.cluster.core.contacts import node_of
from ringfort.cluster.core.peer_messages import PeerId
from ringfort.cluster.net.control_link import dial
from ringfort.cluster.net.waiting import within
from ringfort.config import KIB
from ringfort.errors import ProtocolError
from ringfort.identity.credentials import Credentials
from ringfort.identity.keypair import peer_id_of
from ringfort.transport.handshake import Handshake, sealed
from ringfort.transport.hello import Probe
from ringfort.transport.records import LENGTH, MAX_OVERHEAD

BURST_BYTES: Final = 4096 * KIB
"""34 ms of gigabit Ethernet."""
BURST_SECONDS: Final = 0.04
"""What a slow link is kept busy for, and what its buffers hold beyond that."""
PROBE_TIMEOUT: Final = 2.0
"""Seconds for all of it, after the connection is open."""
MAX_PROBES: Final = 4
"""That are answered at once."""
_PIECE: Final = bytes(64 * KIB - MAX_OVERHEAD)
"""Smaller ones would measure the interpreter: each costs it some 50 microseconds."""
SETTLING: Final = 4
"""The first of so many parts of a burst may be too quick or, where TCP starts slowly, too slow."""
_SHORTEST: Final = 1e-6
_SEND_BUFFER: Final = 64 * KIB
"""Bytes: otherwise the kernel takes the whole burst at once, whatever the link, and the time limit limits nothing."""
_FASTEST: Final = 1e12

Speed = Annotated[float, msgspec.Meta(gt=0, le=_FASTEST)]


class _Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    peer: PeerId
    speed: Speed


_decoder = msgspec.msgpack.Decoder(_Said)


@dataclass(frozen=True)
class Measurement:
    """What a probe found, seen from this side; bytes a second."""

    peer: str
    bandwidth_out: float
    bandwidth_in: float

    @property
    def bandwidth(self) -> float:
        """Of the slower direction."""
        return min(self.bandwidth_out, self.bandwidth_in)

    round_trip: float | None = None
    """Seconds to connect and open: about two round trips and the arithmetic of a handshake. None at the responder."""


async def probe(host: str, port: int, credentials: Credentials | None, me: str, turn: asyncio.Lock) -> Measurement:
    """Measures the way to an address, in its `turn` once it is connected: who does not answer keeps nobody waiting.
    Raises as `dial` does, and `ProtocolError` or `TimeoutError` for what answers something else or too late."""
    begun = time.perf_counter()
    sock, handshake = await dial(host, port, credentials, Probe())
    round_trip = time.perf_counter() - begun

    async def measure() -> Measurement:
        way = _Way(sock, handshake)
        await way.burst()
        said = way.parse(await way.read())
        speed = await way.sink()
        await way.write(msgspec.msgpack.encode(_Said(me, speed)))
        return Measurement(said.peer, said.speed, speed, round_trip)

    with sock:
        async with turn:
            return await within(PROBE_TIMEOUT, measure())


async def answer_probe(sock: socket.socket, handshake: Handshake, me: str) -> Measurement:
    """The responder's side, which closes the socket. Raises as `probe` does."""

    async def measure() -> Measurement:
        way = _Way(sock, handshake)
        speed = await way.sink()
        await way.write(msgspec.msgpack.encode(_Said(me, speed)))
        await way.burst()
        said = way.parse(await way.read())
        return Measurement(said.peer, said.speed, speed)

    with sock:
        return await within(PROBE_TIMEOUT, measure())


class _Way:
    """Records on a socket, one after the other."""

    def __init__(self, sock: socket.socket, handshake: Handshake) -> None:
        self._sock = sock
        self._sealer, self._opener = handshake.sealer, handshake.opener
        self._identity = handshake.identity
        self._loop = asyncio.get_running_loop()
        self._data = bytearray()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)

    async def write(self, body: bytes) -> None:
        try:
            await self._loop.sock_sendall(self._sock, sealed(self._sealer, body))
        except OSError as exc:
            raise ProtocolError(f"a probe broke off: {exc.strerror or exc}") from exc

    async def read(self) -> bytes:
        while True:
            body = self._next()
            if body is not None:
                return body
            try:
                data = await self._loop.sock_recv(self._sock, 4 * len(_PIECE))
            except OSError as exc:
                raise ProtocolError(f"a probe broke off: {exc.strerror or exc}") from exc
            if not data:
                raise ProtocolError("a probe ended too early")
            self._data += data

    def _next(self) -> bytes | None:
        if len(self._data) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._data)
        if length > len(_PIECE) + MAX_OVERHEAD:
            raise ProtocolError(f"a piece of a probe claims {length} bytes")
        end = LENGTH.size + length
        if len(self._data) < end:
            return None
        record = bytes(self._data[:end])
        del self._data[:end]
        if self._opener is None:
            return record[LENGTH.size :]
        body = bytearray(end - self._opener.overhead)
        self._opener.open(record, memoryview(body))
        return bytes(body)

    async def burst(self) -> None:
        until = time.perf_counter() + BURST_SECONDS
        for _ in range(BURST_BYTES // len(_PIECE)):
            await self.write(_PIECE)
            if time.perf_counter() >= until:
                break
        await self.write(b".")

    async def sink(self) -> float:
        """Takes a burst; returns its speed."""
        arrivals: list[float] = []
        while len(await self.read()) == len(_PIECE):
            arrivals.append(time.perf_counter())
            if len(arrivals) * len(_PIECE) > 2 * BURST_BYTES:
                raise ProtocolError("a burst has no end")
        if not arrivals:
            raise ProtocolError("a burst was empty")
        return speed_of(arrivals, time.perf_counter(), len(_PIECE))

    def parse(self, body: bytes) -> _Said:
        """What the other side says in the end. Raises `ProtocolError` if it speaks for a peer that it is not."""
        try:
            said = _decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise ProtocolError(f"a probe was answered with something else: {exc}") from exc
        proved = peer_id_of(self._identity) if self._identity else ""
        if proved and node_of(said.peer) != proved:
            raise ProtocolError(f"a probe says that it is of {said.peer} and proved to be of {proved}")
        return said


def speed_of(arrivals: Sequence[float], ended: float, piece: int) -> float:
    """Bytes a second of a burst whose pieces came at `arrivals`, the lower of two means. Pure.

    Rate limits and buffers let a bucketful pass at once, so what came in the beginning must not count. But a busy
    machine stands still for milliseconds and then finds much at once, and if that was in the beginning the rest looks
    too quick. (Medians of short spans were tried: on busy cores they measure how fast a buffer is emptied, four times
    a limit of 900 Mbit/s.) Pauses of the sender still make a burst look slow: see `Speeds.bandwidths`.
    """
    if len(arrivals) == 1:
        return _within_limits(piece / max(ended - arrivals[0], _SHORTEST))
    steady = arrivals[min(len(arrivals) // SETTLING, len(arrivals) - 2) :]
    return _within_limits(min(_mean(arrivals, piece), _mean(steady, piece)))


def _mean(arrivals: Sequence[float], piece: int) -> float:
    return (len(arrivals) - 1) * piece / max(arrivals[-1] - arrivals[0], _SHORTEST)


def _within_limits(speed: float) -> float:
    return min(_FASTEST, max(1.0, speed))
