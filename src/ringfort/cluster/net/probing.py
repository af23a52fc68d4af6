"""Measuring how fast an address is: over a connection of its own, a short burst in each direction.

    initiator                                  responder
    burst, end                           ->
                                         <-    peer id and speed of that burst; burst, end
    peer id and speed of that burst      ->

The speed is that of the whole burst or of what came after its first part (`speed_of`). A burst ends after
`BURST_BYTES` or `BURST_SECONDS`, whichever is first, so that it disturbs other traffic only for a moment.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import msgspec

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.core.contacts import node_of
from ringfort.cluster.core.peer_messages import PeerId
from ringfort.cluster.net.control_link import connect
from ringfort.cluster.net.waiting import within
from ringfort.config import KIB
from ringfort.errors import DistributedError, ProtocolError
from ringfort.identity.credentials import Credentials
from ringfort.identity.keypair import peer_id_of
from ringfort.transport.handshake import RecordReader, sealed
from ringfort.transport.hello import Probe
from ringfort.transport.records import MAX_OVERHEAD

BURST_BYTES: Final = 4096 * KIB
"""34 ms of gigabit Ethernet."""
BURST_SECONDS: Final = 0.04
"""For how long a slow link is kept busy, beside what its buffers hold."""
PROBE_TIMEOUT: Final = 2.0
"""Seconds for a whole probe, once connected."""
MAX_PROBES: Final = 4
"""Probes that are answered at the same time."""
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


class Measurement(NamedTuple):
    """What a probe found, seen from this side; bytes a second."""

    peer: str
    bandwidth_out: float
    bandwidth_in: float
    round_trip: float | None = None
    """Seconds for connecting: about two round trips and the arithmetic of a handshake. None at the responder."""

    @property
    def bandwidth(self) -> float:
        """Of the slower direction."""
        return min(self.bandwidth_out, self.bandwidth_in)


async def probe(host: str, port: int, credentials: Credentials | None, me: str, turn: asyncio.Lock) -> Measurement:
    """Measure the path to an address. Takes `turn` only once it is connected, so that an address that does not answer
    delays no other.

    Raises as `connect`, and `ProtocolError` or `TimeoutError` for a wrong or late answer.
    """
    begun = time.perf_counter()
    connection = await connect(host, port, credentials, Probe())
    round_trip = time.perf_counter() - begun
    with connection.sock:
        async with turn:
            return await within(PROBE_TIMEOUT, _measure(connection, me, round_trip))


async def answer_probe(connection: Connection, me: str) -> Measurement:
    """Do the responder's side, and close the connection. Raises as `probe`."""
    with connection.sock:
        return await within(PROBE_TIMEOUT, _measure(connection, me))


async def _measure(connection: Connection, me: str, round_trip: float | None = None) -> Measurement:
    """Do one side of a probe. The initiator, which has measured the round trip, begins."""
    messages = _Messages(connection, me)
    try:
        if round_trip is None:
            speed = await messages.receive_burst()
            said = await messages.send_burst()
        else:
            said = await messages.send_burst()
            speed = await messages.receive_burst()
    except DistributedError:
        raise
    except OSError as exc:
        raise ProtocolError(f"a probe broke off: {exc.strerror or exc}") from exc
    return Measurement(said.peer, said.speed, speed, round_trip)


class _Messages:
    """The messages of a probe by the peer `me`."""

    def __init__(self, connection: Connection, me: str) -> None:
        self._sock, self._sealer, self._identity = connection.sock, connection.sealer, connection.identity
        self._reader = RecordReader(connection.opener, len(_PIECE))
        self._me = me
        self._loop = asyncio.get_running_loop()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)

    async def _write(self, body: bytes) -> None:
        await self._loop.sock_sendall(self._sock, sealed(self._sealer, body))

    async def _read(self) -> bytes:
        while (body := self._reader.next()) is None:
            data = await self._loop.sock_recv(self._sock, 4 * len(_PIECE))
            if not data:
                raise ProtocolError("a probe ended too early")
            self._reader.feed(data)
        return body

    async def receive_burst(self) -> float:
        """Receive a burst, tell the other side how fast it was, and return that."""
        arrivals: list[float] = []
        while len(await self._read()) == len(_PIECE):
            arrivals.append(time.perf_counter())
            if len(arrivals) * len(_PIECE) > 2 * BURST_BYTES:
                raise ProtocolError("a burst has no end")
        if not arrivals:
            raise ProtocolError("a burst was empty")
        speed = speed_of(arrivals, time.perf_counter(), len(_PIECE))
        await self._write(msgspec.msgpack.encode(_Said(self._me, speed)))
        return speed

    async def send_burst(self) -> _Said:
        """Send a burst and return what the other side measured. Raises `ProtocolError` if it claims to be a peer that
        it is not."""
        until = time.perf_counter() + BURST_SECONDS
        for _ in range(BURST_BYTES // len(_PIECE)):
            await self._write(_PIECE)
            if time.perf_counter() >= until:
                break
        await self._write(b".")
        try:
            said = _decoder.decode(await self._read())
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise ProtocolError(f"malformed answer to a probe: {exc}") from exc
        proved = peer_id_of(self._identity) if self._identity else ""
        if proved and node_of(said.peer) != proved:
            raise ProtocolError(f"a probe claims to be of {said.peer} and proved to be of {proved}")
        return said


def speed_of(arrivals: Sequence[float], ended: float, piece: int) -> float:
    """Bytes a second of a burst whose pieces came at `arrivals`, the lower of two means. Pure.

    Rate limits and buffers let a bucketful pass at once, so what came in the beginning must not count. But a busy
    machine stands still for milliseconds and then finds much at once, and if that was in the beginning the rest looks
    too quick. (Medians of short spans were tried: on busy cores they measure how fast a buffer is emptied, four times
    a limit of 900 Mbit/s.) Pauses of the sender still make a burst look slow: see `LinkMetrics.bandwidths`.
    """
    if len(arrivals) == 1:
        arrivals = [*arrivals, ended]
    steady = arrivals[min(len(arrivals) // SETTLING, len(arrivals) - 2) :]
    speed = min(_mean(arrivals, piece), _mean(steady, piece))
    return min(_FASTEST, max(1.0, speed))


def _mean(arrivals: Sequence[float], piece: int) -> float:
    return (len(arrivals) - 1) * piece / max(arrivals[-1] - arrivals[0], _SHORTEST)
