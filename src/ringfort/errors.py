"""Every exception Ringfort raises, under one root.

Errors are sorted by whose fault they are, and each also derives from the built-in that an ordinary `except` clause
would name:

- **yours**: a bad argument (`ValueError`), refused at the call before any byte moves;
- **the world's**: a peer that is gone or a network that fails (`ConnectionError`);
- **nobody's yet**: a wait that ran out (`TimeoutError`);
- **the program's**: ranks that disagree about what they are doing (`CollectiveMismatchError`).

Each class takes typed fields and writes its own message. `peer` is a rank, or the address of a peer that has none yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class DistributedError(Exception):
    """The root. `except DistributedError` catches everything that Ringfort raises on purpose."""

    is_recoverable: ClassVar[bool] = False
    """The same call may succeed later in the same group, with nothing rebuilt."""
    is_peer_failure: ClassVar[bool] = False
    """Caused by another process or the way to it; a new group without that peer can go on."""
    is_fatal: ClassVar[bool] = False
    """The group cannot be used again."""

    def __init__(self, message: str, *, peer: int | str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


# --- yours: bad arguments -------------------------------------------------------------------------------------------


class InvalidArgumentError(DistributedError, ValueError):
    """An argument has a value that can never work. Raised at the call, before any byte moves."""

    def __init__(self, name: str, value: object, why: str) -> None:
        super().__init__(f"{name}={value!r}: {why}")
        self.name = name
        self.value = value


class InvalidWorldSizeError(InvalidArgumentError):
    """The number of ranks is not a whole number of at least 1."""

    def __init__(self, world_size: object) -> None:
        super().__init__("world_size", world_size, "must be a whole number of at least 1")


class InvalidRankError(InvalidArgumentError):
    """A rank that is not in the group. (A rank that is there but gone is `PeerLostError`.)"""

    def __init__(
        self, rank: object, world_size: int, *, name: str = "rank", members: Sequence[int] | None = None
    ) -> None:
        known = f"0 to {world_size - 1}" if members is None else ", ".join(map(str, members))
        super().__init__(name, rank, f"the ranks of this group are {known}")
        self.rank = rank
        self.world_size = world_size


class SelfSendError(InvalidArgumentError):
    """A rank named itself as the other end of a message."""

    def __init__(self, rank: int) -> None:
        super().__init__("rank", rank, "a rank cannot send to or receive from itself; copy the array instead")
        self.rank = rank


class UnsupportedOpError(InvalidArgumentError):
    """A reduction that has no meaning for this element type, such as BAND of float32."""

    def __init__(self, op: str, dtype: str, why: str) -> None:
        super().__init__("op", op, f"not defined for {dtype}: {why}")
        self.op = op
        self.dtype = dtype


class UnsupportedArrayError(InvalidArgumentError, TypeError):
    """An argument that is no array, or one whose memory or element type cannot be used here."""


class ConfigError(InvalidArgumentError):
    """A setting, from a keyword or an environment variable, that cannot work."""


class ObjectTooLargeError(InvalidArgumentError):
    """An object's encoded form is larger than `max_object_bytes` allows."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__("object", f"{size} bytes", f"over max_object_bytes={limit}; raise that limit or send an array")
        self.size = size
        self.limit = limit


class SizeMismatchError(DistributedError, ValueError):
    """A message has another size than the buffer it was to go into. The link stays usable: the message is dropped
    whole and the next one is received whole."""

    is_recoverable = True

    def __init__(self, expected: int, got: int, *, peer: int | str | None = None) -> None:
        super().__init__(
            f"expected a message of {expected} bytes from rank {peer}, got {got}; it was dropped, the link is usable",
            peer=peer,
        )
        self.expected = expected
        self.got = got


# --- the world's: peers and networks ---------------------------------------------------------------------------------


class TransportError(DistributedError, ConnectionError):
    """The network or the operating system refused something: the address is in use, the host unknown, the port shut."""

    is_peer_failure = True


class NoConnectionError(TransportError):
    """There is no way to a peer: never connected, or every try failed before the deadline."""


class PeerLostError(TransportError):
    """A peer went away without a word: its process died or its connection broke.

    Contrast `ChannelClosedError`, where one side closed on purpose.
    """

    is_fatal = True

    def __init__(self, peer: int | str, reason: str) -> None:
        super().__init__(f"lost rank {peer}: {reason}", peer=peer)
        self.reason = reason


class ChannelClosedError(TransportError):
    """One side closed its backend on purpose, and this call needed it open."""

    is_fatal = True


class ControlLostError(TransportError):
    """The control process beside this one has ended or does not answer, so this process is no longer a peer of its
    cluster. Make a new `ClusterNode`, or start the program again."""

    is_fatal = True
    is_peer_failure = False


class BackendUnavailableError(DistributedError, ImportError):
    """An engine that is not installed or not supported here; the message says how to get it."""

    def __init__(self, backend: str, how: str) -> None:
        super().__init__(f"{backend} is not available here: {how}")
        self.backend = backend
        self.how = how


# --- nobody's yet: time -----------------------------------------------------------------------------------------------


class OperationTimeoutError(DistributedError, TimeoutError):
    """A call did not end within its timeout. A point-to-point message may be tried again; a collective may not."""

    is_recoverable = True

    def __init__(self, what: str, timeout: float, *, peer: int | str | None = None, state: str = "") -> None:
        super().__init__(f"{what}: timeout after {timeout:g} s{_state(state)}", peer=peer)
        self.timeout = timeout


def _state(state: str) -> str:
    """A short state ends the line; one of several lines stands below it, indented."""
    if not state:
        return ""
    return f"; {state}" if "\n" not in state else "".join(f"\n  {line}" for line in state.splitlines())


# --- who may join -----------------------------------------------------------------------------------------------------


class RendezvousError(TransportError):
    """The group could not be formed."""


class RendezvousTimeoutError(OperationTimeoutError, RendezvousError):
    """Not all ranks came together before the deadline. Says who is missing and who was refused."""

    is_recoverable = False

    def __init__(self, what: str, timeout: float, *, missing: Sequence[int] = (), state: str = "") -> None:
        super().__init__(what, timeout, state=state)
        self.missing = tuple(missing)


class RefusedError(RendezvousError):
    """The other side answered and said no. The children say why."""

    def __init__(self, message: str, *, peer: int | str | None = None) -> None:
        super().__init__(f"refused by {peer}: {message}" if peer is not None else message, peer=peer)


class VersionMismatchError(RefusedError):
    """The other side speaks another version of the protocol."""


class WorldSizeMismatchError(RefusedError):
    """The other side was started with another world size."""


class RankTakenError(RefusedError):
    """Another process has already joined with this rank."""


# --- the wall: identity, secrets and strangers ------------------------------------------------------------------------


class InvalidKeyError(InvalidArgumentError):
    """A secret that cannot be used: a wrong length, a weak passphrase. Neither message nor `value` ever shows it."""

    def __init__(self, name: str, why: str) -> None:
        DistributedError.__init__(self, f"{name}: {why}")
        self.name = name
        self.value = None


class JoinCodeError(InvalidKeyError):
    """A join code that was mistyped or cut. `group` is the group of four with the likely error, counted from 1.

    It shows no more of the code than the groups in doubt; a code is never mended by a guess.
    """

    def __init__(self, why: str, *, name: str = "join code", group: int | None = None) -> None:
        super().__init__(name, why)
        self.group = group


class IdentityError(DistributedError, OSError):
    """A key file or its folder cannot be used. `mend` is the command that mends it."""

    def __init__(self, path: object, why: str, mend: str) -> None:
        super().__init__(f"{path}: {why}; to mend it: {mend}")
        self.path = str(path)
        self.why = why
        self.mend = mend


class NamespaceMismatchError(RefusedError):
    """The other side belongs to another cluster: its network id differs."""


class EncryptionMismatchError(RefusedError):
    """One side has encryption on and the other has it off."""


class HandshakeError(TransportError):
    """The other side did not prove that it knows the cluster secret, or sent what is no handshake.

    Contrast `NamespaceMismatchError`, where an honest peer says that it belongs elsewhere.
    """


class TamperedError(TransportError):
    """A record did not open: somebody on the way changed, cut, repeated or reordered it. The link is closed."""

    is_fatal = True

    def __init__(self, why: str, *, peer: int | str | None = None) -> None:
        super().__init__(f"the link{'' if peer is None else f' with {peer}'} was tampered with: {why}", peer=peer)
        self.why = why


# --- the program's: ranks that disagree -------------------------------------------------------------------------------


class CollectiveMismatchError(DistributedError):
    """Ranks of one group called different collectives, or the same one with other sizes, element types or ops.

    Nobody's result is used, and the group cannot be used again: its ranks no longer agree on what comes next.
    """

    is_fatal = True

    def __init__(self, rank: int, ours: str, peer: int, theirs: str, *, operation: int) -> None:
        super().__init__(
            f"operation {operation} of this group differs: rank {rank} called {ours}, rank {peer} called {theirs}; "
            "every rank must make the same calls in the same order",
            peer=peer,
        )
        self.rank = rank
        self.ours = ours
        self.theirs = theirs
        self.operation = operation


class GradientMismatchError(CollectiveMismatchError):
    """Ranks gave `average_gradients` different trees. Unlike its parent it leaves the group usable: every rank raises
    it, before any array has moved."""

    is_fatal = False

    def __init__(self, rank: int, ours: str, peer: int, theirs: str) -> None:
        what = f"gradients differ: rank {rank} has {ours}, rank {peer} has {theirs}"
        DistributedError.__init__(self, f"{what}; every rank must average the same tree", peer=peer)
        self.rank = rank
        self.ours = ours
        self.theirs = theirs
        self.operation = 0  # none of the group's operations was begun


class NonFiniteError(DistributedError, ValueError):
    """Gradients that were to be compressed hold infinities or NaNs. Every rank raises it, before any array has changed,
    and the group stays usable: skip the step, or choose `on_nonfinite="skip"` or `"clip"`."""

    is_recoverable = True

    def __init__(self, name: str, found: dict[int, int]) -> None:
        who = ", ".join(f"{count} at rank {rank}" for rank, count in sorted(found.items()))
        what = f"{name!r} holds" if name else "the array holds"
        super().__init__(
            f"{what} elements that are infinite or not a number ({who}); skip this step, or pass a GradientCompressor "
            'with on_nonfinite="skip" (they count as 0) or "clip"'
        )
        self.name = name
        self.found = found


class AbortedError(DistributedError):
    """The group was aborted: by `abort()` here, or by a peer that gave up and said so."""

    is_fatal = True

    def __init__(self, reason: str, *, peer: int | str | None = None) -> None:
        super().__init__(f"aborted{'' if peer is None else f' by rank {peer}'}: {reason}", peer=peer)
        self.reason = reason


class EpochEndedError(AbortedError):
    """The epoch that this group or sub-group was formed in is over. Call `establish_ring()` for the ranks that are
    there now, and make sub-groups anew from the context."""

    def __init__(self, epoch: str, why: str) -> None:
        super().__init__(f"{epoch} has ended: {why}")
        self.epoch = epoch


class NotEstablishedError(DistributedError):
    """There are other peers, but this process has not connected with them: `establish_ring()` is missing."""

    def __init__(self, epoch: str) -> None:
        super().__init__(
            f"This process is in {epoch} and has not connected with the others; "
            "call establish_ring() after wait_for_peers()"
        )
        self.epoch = epoch


class ProtocolError(TransportError):
    """What arrived is not the Ringfort protocol: a corrupt or oversized length, an unknown kind. The link is closed."""

    is_fatal = True


class InboxFullError(DistributedError, BufferError):
    """A peer has sent so much that nobody here has received that the message waited for cannot be reached.

    Receive the other messages first; the link is usable.
    """

    is_recoverable = True

    def __init__(self, limit: int, *, peer: int | str | None = None) -> None:
        super().__init__(
            f"{limit} bytes of messages from rank {peer} wait for a receive that nobody has made; receive those first",
            peer=peer,
        )
        self.limit = limit


# --- calls ------------------------------------------------------------------------------------------------------------


class RpcError(DistributedError):
    """A call did not end well. `peer` is the rank that was called; the children say why. Other calls go on."""


class FunctionNotFoundError(RpcError, LookupError):
    """The rank that was called has no function of that name. Says which it has."""

    def __init__(self, name: str, known: Sequence[str], *, peer: int | str | None = None) -> None:
        have = ", ".join(sorted(known)) if known else "none at all"
        hint = "" if known else " (yet? A barrier after registering makes sure)"
        super().__init__(f"rank {peer} has no function {name!r}; it has {have}{hint}", peer=peer)
        self.name = name
        self.known = tuple(known)


class InvalidMessageError(RpcError, ValueError):
    """Arguments or a result that cannot be sent, are too large, or are not what the function asks for. The function was
    not run, or its result was not sent."""


class RemoteError(RpcError):
    """The function raised. `type_name` and `message` are what it raised there and `traceback` where, as text: nothing
    of it is rebuilt here. The text is shown as this error's cause."""

    def __init__(self, type_name: str, message: str, traceback: str, *, peer: int | str | None = None) -> None:
        super().__init__(f"rank {peer} raised {type_name}: {message}", peer=peer)
        self.type_name = type_name
        self.message = message
        self.traceback = traceback


class RpcTimeoutError(RpcError, OperationTimeoutError):
    """A call did not end within its timeout. The rank that was called is told, and stops working on it."""

    def __init__(self, what: str, timeout: float, *, peer: int | str | None = None, state: str = "") -> None:
        OperationTimeoutError.__init__(self, what, timeout, peer=peer, state=state)


class RpcOverloadedError(RpcError):
    """Too many calls, or too many bytes, are under way: here, or at the rank that was called. Nothing was run; wait for
    some of them to end, and call again."""

    is_recoverable = True


class RpcPeerLostError(RpcError, PeerLostError):
    """The rank that was called died or closed its agent before the call had ended: it may have run or not. Unlike its
    parent it ends nothing else: calls to other ranks go on."""

    is_fatal = False

    def __init__(self, peer: int | str, reason: str) -> None:
        PeerLostError.__init__(self, peer, reason)


class RpcNoConnectionError(RpcError, NoConnectionError):
    """There is no way to the rank that was called: it was lost or closed before, or this agent is closed. Nothing was
    sent."""

    is_fatal = False
