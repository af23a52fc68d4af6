"""The messages between a `ClusterNode` and its control service, which travel over a Unix socket. Pure.

    node                                    service
    Ask(number, request)             ->
                                     <-     Answer(number, value) or Failed(number, error)
    Cancel(number)                   ->
                                     <-     Connected(number, rank, session) with a socket, before the answer
                                     <-     Streamed(peer, purpose, session) with a socket
    StreamTaken                      ->
                                     <-     State, Happened (an event), Logged
                                     <-     Ping
    Pong                             ->
                                     <-     Fence
    Fenced                           ->
    Stop                             ->

Both ends belong to one user on one machine, so the messages may carry keys. A message is msgpack in a record
without encryption.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfort import errors
from ringfort.bootstrap.connection import Session
from ringfort.cluster.core.election import ElectionState
from ringfort.cluster.core.events import ClusterEvent
from ringfort.cluster.core.peer_messages import Epoch, RunState
from ringfort.cluster.net.setup import Setup
from ringfort.errors import DistributedError
from ringfort.identity.keypair import NodeIdentity
from ringfort.identity.namespace import NetworkNamespace
from ringfort.transport.machine import Machine

MAX_MESSAGE: Final = 64 * 1024 * 1024
"""Bytes: far more than the largest message, a topology of 256 peers."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Start the control plane; the answer is the first `State`."""

    setup: Setup
    log_level: int
    """The lowest level of log records that are forwarded."""


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """Open a data connection to every other member of `epoch`."""

    epoch: Epoch
    machine: Machine
    timeout: float


class OpenStream(msgspec.Struct, frozen=True, tag="open_stream"):
    """Open a connection to the program of `peer`."""

    peer: str
    purpose: str
    timeout: float


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Call one of the functions that `service.py` lists by name. The arguments are plain values."""

    function: str
    arguments: tuple[Any, ...] = ()


AnyRequest = Start | Connect | OpenStream | Call


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A request. `work` is the work that the program has done so far."""

    number: int
    request: AnyRequest
    work: int = 0


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Give up request `number`."""

    number: int


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The answer to `Ping`, with the progress of the program."""

    work: int = 0
    step: int = 0
    trace: str = ""
    """Where the program writes down its steps; empty until it does."""


class StreamTaken(msgspec.Struct, frozen=True, tag="stream_taken"):
    """The program has taken a stream, or has closed it."""


class Fenced(msgspec.Struct, frozen=True, tag="fenced"):
    """The answer to `Fence`: where the program of an elastic run is."""

    epoch: int
    state: RunState


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave the cluster and end. The service answers by closing the connection."""

    why: str
    returns: bool = False
    """The program comes back as another peer, which takes over the votes of this one."""


ToService = Ask | Cancel | Pong | StreamTaken | Fenced | Stop


class State(msgspec.Struct, frozen=True, tag="state"):
    """The part of the state that a node keeps a copy of. Sent when it changes, before the events of the change."""

    epoch: Epoch | None = None
    leader: str | None = None
    election: ElectionState = ElectionState.IDLE
    addresses: tuple[str, ...] = ()


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The result of a request, whose type follows from the request."""

    number: int
    value: msgspec.Raw


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The exception of `ringfort.errors` that a request raised: its class, message and fields."""

    number: int
    kind: str
    message: str
    fields: dict[str, Any]


class Connected(msgspec.Struct, frozen=True, tag="connected"):
    """A connection that was asked for: to the member with index `rank`, or a stream, with 0. Its descriptor travels
    with this message."""

    number: int
    rank: int
    session: Session


class Streamed(msgspec.Struct, frozen=True, tag="streamed"):
    """A stream that `peer` has opened. Its descriptor travels with this message."""

    peer: str
    purpose: str
    session: Session


class Happened(msgspec.Struct, frozen=True, tag="happened"):
    """An event: the name of its class and its fields."""

    kind: str
    body: msgspec.Raw


class Logged(msgspec.Struct, frozen=True, tag="logged"):
    """A log record of the control process."""

    logger: str
    level: int
    text: str


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Checks that the program's interpreter responds."""


class Fence(msgspec.Struct, frozen=True, tag="fence"):
    """Fence the program of an elastic run (`cluster.core.events.Fence`)."""

    epoch: int
    ended: tuple[str, ...]


ToNode = State | Answer | Failed | Connected | Streamed | Happened | Logged | Ping | Fence


_PLAIN: Final[dict[type, tuple[Callable[[Any], object], Callable[[Any], object]]]] = {
    Integral: (int, int),
    Real: (float, float),
    Path: (str, Path),
    NodeIdentity: (NodeIdentity.private_bytes, NodeIdentity.from_private_bytes),
    NetworkNamespace: (NetworkNamespace.join_code, NetworkNamespace.from_join_code),
    X25519PrivateKey: (lambda key: key.private_bytes_raw(), X25519PrivateKey.from_private_bytes),
}
"""How to encode and decode what msgspec does not know. Settings may contain NumPy numbers."""


def _to_plain(value: object) -> object:
    for kind, (to_plain, _) in _PLAIN.items():
        if isinstance(value, kind):
            return to_plain(value)
    raise TypeError(f"{type(value).__name__} cannot be sent to the control service")


def _from_plain(kind: type, value: Any) -> object:
    return _PLAIN[kind][1](value)


decode_for_service: Final = msgspec.msgpack.Decoder[ToService](ToService, dec_hook=_from_plain).decode
"""Returns a message from the node."""
decode_for_node: Final = msgspec.msgpack.Decoder[ToNode](ToNode).decode
"""Returns a message from the service."""


def encode(value: object) -> bytes:
    """Return `value` as msgpack."""
    return msgspec.msgpack.encode(value, enc_hook=_to_plain)


# --- events and errors ----------------------------------------------------------------------------------------------


def happened(event: ClusterEvent) -> Happened:
    """Return an event as a message."""
    return Happened(type(event).__name__, msgspec.Raw(encode(event)))


def event_of(message: Happened) -> ClusterEvent:
    """Return the event in a message."""
    kinds = {kind.__name__: kind for kind in ClusterEvent.__subclasses__()}
    return msgspec.msgpack.decode(message.body, type=kinds[message.kind])


def failed(number: int, exc: BaseException) -> Failed:
    """Return an exception as a message. The text of a foreign exception, a bug in the service, includes its class."""
    if not isinstance(exc, DistributedError):
        exc = DistributedError(f"the control service failed: {type(exc).__name__}: {exc}")
    fields = msgspec.to_builtins(vars(exc), builtin_types=(bytes,), enc_hook=_to_plain_or_text)
    return Failed(number, type(exc).__name__, str(exc), fields)


def error_of(message: Failed) -> DistributedError:
    """Return the exception in a message, with the same class, message and fields."""
    kind: type[DistributedError] = getattr(errors, message.kind)
    exc = kind.__new__(kind)
    exc.args = (message.message,)
    vars(exc).update(message.fields)
    return exc


def _to_plain_or_text(value: object) -> object:
    """Encode a field of an exception, whose value may be any object that a program has passed."""
    return float(value) if isinstance(value, Real) else str(value)
