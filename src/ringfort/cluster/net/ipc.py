"""The messages between a `ClusterNode` and its control service, which travel over a Unix socket. Pure.

    node                                    service
    Ask(number, request)             ->
                                     <-     Answer(number, value) or Failed(number, error)
    Cancel(number)                   ->
                                     <-     Connected(number, rank, session) with a socket, before the answer
                                     <-     State, Happened (an event), Logged
                                     <-     Ping
    Pong                             ->

Both ends belong to one user on one machine, so the messages may carry keys. A message is msgpack in a record
without encryption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfort import errors
from ringfort.bootstrap.connection import Session
from ringfort.cluster.core.election import ElectionState
from ringfort.cluster.core.events import ClusterEvent
from ringfort.cluster.core.peer_messages import Epoch
from ringfort.cluster.net.setup import Setup
from ringfort.errors import DistributedError
from ringfort.identity.keypair import NodeIdentity
from ringfort.identity.namespace import NetworkNamespace
from ringfort.transport.machine import Machine

T = TypeVar("T")

MAX_MESSAGE: Final = 64 * 1024 * 1024
"""Bytes: far more than the largest message, a topology of 256 peers."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Start the control plane; the answer is the first `State`."""

    setup: Setup
    log_level: int
    """The lowest level of log records that are forwarded."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave the cluster and end. The service answers by closing the connection."""

    why: str


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """Open a data connection to every other member of `epoch`."""

    epoch: Epoch
    machine: Machine
    timeout: float


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Call one of the functions that `service.py` lists by name. The arguments are plain values."""

    function: str
    arguments: tuple[Any, ...] = ()


AnyRequest = Start | Stop | Connect | Call


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


ToService = Ask | Cancel | Pong


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
    """The exception of `ringfort.errors` that a request raised: its class, message and plain fields."""

    number: int
    kind: str
    message: str
    fields: dict[str, Any]


class Connected(msgspec.Struct, frozen=True, tag="connected"):
    """A data connection to the member with index `rank`. Its descriptor travels with this message."""

    number: int
    rank: int
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


ToNode = State | Answer | Failed | Connected | Happened | Logged | Ping


def _to_plain(value: object) -> object:
    """Encode what msgspec does not know. Settings may contain NumPy numbers."""
    match value:
        case Integral():
            return int(value)
        case Real():
            return float(value)
        case Path():
            return str(value)
        case NodeIdentity():
            return value.private_bytes()
        case NetworkNamespace():
            return value.join_code()
        case X25519PrivateKey():
            return value.private_bytes_raw()
        case _:
            raise TypeError(f"{type(value).__name__} cannot be sent to the control service")


_FROM_PLAIN: Final[dict[type, Callable[[Any], object]]] = {
    Path: Path,
    NodeIdentity: NodeIdentity.from_private_bytes,
    NetworkNamespace: NetworkNamespace.from_join_code,
    X25519PrivateKey: X25519PrivateKey.from_private_bytes,
}


def _from_plain(kind: type, value: Any) -> object:
    return _FROM_PLAIN[kind](value)


decode_for_service: Final = msgspec.msgpack.Decoder[ToService](ToService, dec_hook=_from_plain).decode
"""Returns a message from the node."""
decode_for_node: Final = msgspec.msgpack.Decoder[ToNode](ToNode).decode
"""Returns a message from the service."""


def encode(value: object) -> bytes:
    """Return `value` as msgpack."""
    return msgspec.msgpack.encode(value, enc_hook=_to_plain)


def decode_value(value: msgspec.Raw, kind: type[T]) -> T:
    """Return the value of an `Answer` as a `kind`."""
    return msgspec.msgpack.decode(value, type=kind)


# --- events and errors ----------------------------------------------------------------------------------------------


def happened(event: ClusterEvent) -> Happened:
    """Return an event as a message."""
    return Happened(type(event).__name__, msgspec.Raw(encode(event)))


def event_of(message: Happened) -> ClusterEvent:
    """Return the event in a message."""
    return msgspec.msgpack.decode(message.body, type=_event_classes(ClusterEvent)[message.kind])


def _event_classes(parent: type[ClusterEvent]) -> dict[str, type[ClusterEvent]]:
    found = {parent.__name__: parent}
    for child in parent.__subclasses__():
        found.update(_event_classes(child))
    return found


def failed(number: int, exc: BaseException) -> Failed:
    """Return an exception as a message. The text of a foreign exception, a bug in the service, includes its class."""
    if not isinstance(exc, DistributedError):
        return Failed(number, "DistributedError", f"the control service failed: {type(exc).__name__}: {exc}", {})
    fields = {name: str(value) if isinstance(value, Path) else value for name, value in vars(exc).items()}
    plain = {name: value for name, value in fields.items() if _is_plain(value)}
    return Failed(number, type(exc).__name__, str(exc), plain)


def error_of(message: Failed) -> DistributedError:
    """Return the exception in a message, with the same class, message and fields."""
    kind = getattr(errors, message.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, DistributedError)):
        kind = DistributedError
    exc = kind.__new__(kind)
    exc.args = (message.message,)
    exc.peer = None
    vars(exc).update(message.fields)
    return exc


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in cast("Sequence[object]", value))
    return value is None or isinstance(value, (str, bytes, int, float))
