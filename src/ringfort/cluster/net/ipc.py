"""What a `ClusterNode` and its control service say to each other: typed messages over a Unix socket. Pure.

    node                                    service
    Ask(number, request)             ->
                                     <-     Answer(number, value) or Failed(number, error)
    Cancel(number)                   ->
                                     <-     Connected(number, rank, session) and a descriptor, before the answer to Form
                                     <-     State, Happened (an event), Logged: whenever there is something to tell
                                     <-     Ping
    Pong                             ->

Both ends belong to one user on one machine, so the messages may carry keys. A frame is 4 bytes of length and msgpack.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from struct import Struct
from typing import Any, Final, TypeVar, cast

import msgspec

from ringfort import errors
from ringfort.bootstrap.connection import Session
from ringfort.cluster.core.election import ElectionState
from ringfort.cluster.core.events import ClusterEvent
from ringfort.cluster.core.peer_messages import Epoch
from ringfort.cluster.net.setup import SetupState
from ringfort.errors import DistributedError, ProtocolError
from ringfort.transport.machine import Machine

T = TypeVar("T")

LENGTH: Final = Struct("<I")
MAX_FRAME: Final = 64 * 1024 * 1024
"""Bytes. Far above the largest message, a topology of 256 peers: a longer one is a fault of ours."""


class Request(msgspec.Struct, frozen=True, tag=True):
    """The parent of what a node asks of its service."""


class Start(Request, frozen=True, tag="start"):
    """Begin; the answer is the first `State`."""

    setup: SetupState
    log_level: int
    """From which level on log records are passed on."""


class Stop(Request, frozen=True, tag="stop"):
    """Say goodbye and end; there is no answer but the end of the connection."""

    why: str


class Hold(Request, frozen=True, tag="hold"):
    """See `PeerCore.hold`."""

    holding: bool


class ForceElection(Request, frozen=True, tag="force"):
    """See `PeerCore.force_election`."""


class StepDown(Request, frozen=True, tag="step down"):
    """See `PeerCore.step_down`."""


class Tell(Request, frozen=True, tag="tell"):
    """Send a note to one peer or to all."""

    topic: str
    body: bytes
    peer: str | None


class Form(Request, frozen=True, tag="form"):
    """Connect this peer with all members of `epoch`; see `EpochConnections.connect`."""

    epoch: Epoch
    machine: Machine
    timeout: float


class Peers(Request, frozen=True, tag="peers"):
    """A view of every peer."""


class Health(Request, frozen=True, tag="health"):
    """A summary of all peers' health."""


class Topology(Request, frozen=True, tag="topology"):
    """What is known of machines and links."""


class Refusals(Request, frozen=True, tag="refusals"):
    """Who was turned away, and why."""


class WhyAlone(Request, frozen=True, tag="why alone"):
    """In words: who was seen and what to try."""


AnyRequest = (
    Start | Stop | Hold | ForceElection | StepDown | Tell | Form | Peers | Health | Topology | Refusals | WhyAlone
)


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A request. `work` is what the program has done so far; it travels with everything the node says."""

    number: int
    request: AnyRequest
    work: int = 0


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Nobody waits for the answer to `number` any more."""

    number: int


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The answer to `Ping`: the program's interpreter runs, and how far it is."""

    work: int = 0
    step: int = 0


ToService = Ask | Cancel | Pong


class State(msgspec.Struct, frozen=True, tag="state"):
    """What a node knows without asking. Sent whenever it changes, before the events that tell of the change."""

    epoch: Epoch | None = None
    leader: str | None = None
    election: ElectionState = ElectionState.IDLE
    addresses: tuple[str, ...] = ()


class Error(msgspec.Struct, frozen=True):
    """An exception of `ringfort.errors`: its class, its message, and those of its fields that are plain values."""

    kind: str
    message: str
    fields: dict[str, Any]


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What a request gives; its type follows from the request."""

    number: int
    value: msgspec.Raw


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A request raised."""

    number: int
    error: Error


class Connected(msgspec.Struct, frozen=True, tag="connected"):
    """A data connection to the member at place `rank`; its descriptor comes with this message."""

    number: int
    rank: int
    session: Session


class Happened(msgspec.Struct, frozen=True, tag="happened"):
    """An event: the name of its class, and its fields."""

    kind: str
    body: msgspec.Raw


class Logged(msgspec.Struct, frozen=True, tag="logged"):
    """A log record of the service's process."""

    logger: str
    level: int
    text: str


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Does the program's interpreter run?"""


ToNode = State | Answer | Failed | Connected | Happened | Logged | Ping

_to_service: msgspec.msgpack.Decoder[ToService] = msgspec.msgpack.Decoder(ToService)
_to_node: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)


def encode(value: object) -> bytes:
    """msgpack. Numbers that are not Python's own (a setting may be NumPy's) become those."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def frame(message: ToService | ToNode) -> bytes:
    """A message as it goes over the socket."""
    body = encode(message)
    return LENGTH.pack(len(body)) + body


def decode_for_service(body: bytes) -> ToService:
    """A message of the node."""
    return _to_service.decode(body)


def decode_for_node(body: bytes) -> ToNode:
    """A message of the service."""
    return _to_node.decode(body)


def decode_value(value: msgspec.Raw, kind: type[T]) -> T:
    """What an `Answer` gives, as a `kind`."""
    return msgspec.msgpack.decode(value, type=kind)


class Frames:
    """Cuts what arrives into the bodies of frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are complete now. Raises `ProtocolError` for a length that no message has."""
        self._data += data
        bodies: list[bytes] = []
        at = 0
        while len(self._data) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._data, at)
            if length > MAX_FRAME:
                raise ProtocolError(f"a message of {length} bytes between a node and its control service")
            if len(self._data) - at < LENGTH.size + length:
                break
            bodies.append(bytes(self._data[at + LENGTH.size : at + LENGTH.size + length]))
            at += LENGTH.size + length
        del self._data[:at]
        return bodies


# --- events and errors ----------------------------------------------------------------------------------------------


def happened(event: ClusterEvent) -> Happened:
    """An event as a message."""
    return Happened(type(event).__name__, msgspec.Raw(encode(event)))


def event_of(message: Happened) -> ClusterEvent:
    """The event of a message."""
    return msgspec.msgpack.decode(message.body, type=_event_classes(ClusterEvent)[message.kind])


def _event_classes(parent: type[ClusterEvent]) -> dict[str, type[ClusterEvent]]:
    found = {parent.__name__: parent}
    for child in parent.__subclasses__():
        found.update(_event_classes(child))
    return found


def pack_error(exc: BaseException) -> Error:
    """An exception as a message. One that is not Ringfort's own is a fault of the service: its class goes along."""
    if not isinstance(exc, DistributedError):
        return Error("DistributedError", f"the control service failed: {type(exc).__name__}: {exc}", {})
    fields = {name: str(value) if isinstance(value, Path) else value for name, value in vars(exc).items()}
    plain = {name: value for name, value in fields.items() if _is_plain(value)}
    return Error(type(exc).__name__, str(exc), plain)


def unpack_error(error: Error) -> DistributedError:
    """The exception of a message, of the same class and with the same words."""
    kind = getattr(errors, error.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, DistributedError)):
        kind = DistributedError
    exc = kind.__new__(kind)
    exc.args = (error.message,)
    exc.peer = None
    vars(exc).update(error.fields)
    return exc


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in cast("Sequence[object]", value))
    return value is None or isinstance(value, (str, bytes, int, float))


def _plain(value: object) -> object:
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} cannot be sent to the control service")
