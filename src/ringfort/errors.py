"""Every exception that Ringfort raises, under one root, `DistributedError`.

The classes are grouped by cause, and each also derives from the built-in exception that an ordinary `except` clause
would name:

- **arguments**: an invalid argument (`ValueError`), rejected at the call before any byte is sent;
- **peers and networks**: a peer is gone or the network fails (`ConnectionError`);
- **time**: a call did not end within its timeout (`TimeoutError`);
- **the program**: ranks disagree about which operation comes next (`CollectiveMismatchError`).

Each class takes typed fields and writes its own message. `peer` is a rank, or the address of a peer without a rank.

Messages follow one rule, here and wherever an error is raised or a line is logged:

- A message says what happened, to whom, and what to do, in that order, in at most three lines. Long states go on lines
  of their own.
- A message starts with a capital letter, unless its first word is a name that somebody typed: an argument, a function,
  a file, an engine. It ends without a period unless it has more than one sentence. Log lines are the same.
- Texts that become part of a message (`why`, `reason`, `what`, `how`, `state`) are fragments: they start with a
  lower-case letter and have no period at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import ClassVar


class DistributedError(Exception):
    """The base class of all errors that Ringfort raises on purpose.

    Three class attributes tell a program how to continue: `is_recoverable`, `is_peer_failure` and `is_fatal`.
    `peer` is the rank or the address of the other side, or None if the error concerns no single peer.
    """

    is_recoverable: ClassVar[bool] = False
    """Whether the same call may succeed later in the same group, without rebuilding anything."""
    is_peer_failure: ClassVar[bool] = False
    """Whether another process, or the network path to it, is the cause. A new group without that peer can continue."""
    is_fatal: ClassVar[bool] = False
    """Whether the group cannot be used again."""

    def __init__(self, message: str, *, peer: int | str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the known name that it resembles, or else all of them."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"use one of: {', '.join(names)}"


def _named(peer: int | str | None) -> str:
    """Return `peer` as a message names it."""
    return "the other side" if peer is None else f"rank {peer}" if isinstance(peer, int) else peer


def sentence(text: str) -> str:
    """Return `text` with its first letter in upper case."""
    return text[:1].upper() + text[1:]


# --- arguments --------------------------------------------------------------------------------------------------------


class InvalidArgumentError(DistributedError, ValueError):
    """An argument has an invalid value. Raised at the call, before any byte is sent; the group stays usable.

    `name` is the argument and `value` is the rejected value. The message is `name=value: why`.
    """

    def __init__(self, name: str, value: object, why: str) -> None:
        super().__init__(f"{name}={value!r}: {why}")
        self.name = name
        self.value = value


class InvalidWorldSizeError(InvalidArgumentError):
    """The number of ranks is not a whole number of at least 1."""

    def __init__(self, world_size: object) -> None:
        super().__init__("world_size", world_size, "must be a whole number of at least 1")


class InvalidRankError(InvalidArgumentError):
    """A rank is not in the group. (For a member that is gone, see `PeerLostError`.)

    `rank` is the rejected rank, and `world_size` is the number of ranks in the group.
    """

    def __init__(
        self, rank: object, world_size: int, *, name: str = "rank", members: Sequence[int] | None = None
    ) -> None:
        known = f"0 to {world_size - 1}" if members is None else ", ".join(map(str, members))
        super().__init__(name, rank, f"the ranks of this group are {known}")
        self.rank = rank
        self.world_size = world_size


class SelfSendError(InvalidArgumentError):
    """A rank named itself as the other end of a message. `rank` is that rank."""

    def __init__(self, rank: int) -> None:
        super().__init__("rank", rank, "a rank cannot send to or receive from itself; copy the array instead")
        self.rank = rank


class UnsupportedOpError(InvalidArgumentError):
    """A reduction is not defined for this element type, such as BAND of float32.

    `op` is the name of the reduction, and `dtype` is the element type.
    """

    def __init__(self, op: str, dtype: str, why: str) -> None:
        super().__init__("op", op, f"not defined for {dtype}: {why}")
        self.op = op
        self.dtype = dtype


class UnsupportedArrayError(InvalidArgumentError, TypeError):
    """An argument is not an array, or its memory or element type cannot be used by this call."""


class ConfigError(InvalidArgumentError):
    """A setting is invalid. `name` is the keyword or the environment variable that it came from."""


def unknown_keyword(name: str, value: object, function: str, known: Iterable[str]) -> ConfigError:
    """Return the error about a keyword that `function` does not have. It suggests the one that was probably meant."""
    error = ConfigError(name, value, "unknown keyword")
    error.args = (f"Unknown keyword {name!r} for {function}(); {did_you_mean(name, known)}",)
    return error


class ObjectTooLargeError(InvalidArgumentError):
    """The encoded form of an object is larger than `max_object_bytes`. `size` and `limit` are in bytes."""

    def __init__(self, size: int, limit: int) -> None:
        why = f"larger than max_object_bytes={limit}; raise that limit, or send an array"
        super().__init__("object", f"{size} bytes", why)
        self.size = size
        self.limit = limit


class SizeMismatchError(DistributedError, ValueError):
    """A message does not have the size of the buffer that was to receive it.

    The whole message is dropped, and the link stays usable: the next receive gets the next message. `expected` and
    `got` are in bytes.
    """

    is_recoverable = True

    def __init__(self, expected: int, got: int, *, peer: int | str | None = None) -> None:
        super().__init__(
            f"Expected a message of {expected} bytes from {_named(peer)}, got {got} bytes; "
            "the message was dropped, the link is usable",
            peer=peer,
        )
        self.expected = expected
        self.got = got


# --- peers and networks -----------------------------------------------------------------------------------------------


class TransportError(DistributedError, ConnectionError):
    """The network or the operating system failed: for example, an address is in use, or a host name is unknown."""

    is_peer_failure = True


class NoConnectionError(TransportError):
    """There is no connection to a peer: none was made, or every attempt failed before the deadline."""


class PeerLostError(TransportError):
    """A peer is gone without a goodbye: its process died, its connection broke, or its machine does not answer.

    `peer` is its rank, and `reason` says how this rank found out. If the peer closed its backend on purpose, the error
    is `ChannelClosedError`.
    """

    is_fatal = True
    _advice = ". Its own log says why."

    def __init__(self, peer: int | str, reason: str) -> None:
        super().__init__(f"Lost {_named(peer)}: {reason}{self._advice}", peer=peer)
        self.reason = reason


class ChannelClosedError(TransportError):
    """This rank or a peer has closed its backend on purpose, and the call needed it."""

    is_fatal = True


class ControlLostError(TransportError):
    """The control process of this process has ended or does not answer, so this process has left its cluster.

    Make a new `ClusterNode`, or start the program again.
    """

    is_fatal = True
    is_peer_failure = False


class LocalRunError(DistributedError):
    """A rank of `ringfort.local` raised an exception, or its process ended. All ranks of the group were stopped.

    `rank` is the first rank that failed by itself. `type_name`, `message` and `traceback` describe its exception as
    text; `type_name` is empty if the process ended without one. The next `run` starts new ranks.
    """

    is_recoverable = True

    def __init__(self, rank: int, type_name: str, message: str, traceback: str = "") -> None:
        raised = f"raised {type_name}: {message}" if type_name else message
        super().__init__(f"Rank {rank} {raised}\nAll ranks were stopped; the next run() starts new ones.", peer=rank)
        self.rank = rank
        self.type_name = type_name
        self.message = message
        self.traceback = traceback


class LocalRankLostError(DistributedError, ConnectionError):
    """Another local rank has ended, and this machine is one member of an elastic run whose model is sharded over them.

    `peer` is its local rank. Its shards are gone with it, so the machine leaves the run; the other machines continue.
    Start all local ranks again: the machine joins as before.
    """

    is_fatal = True

    def __init__(self, peer: int, reason: str) -> None:
        message = f"Lost local rank {peer}: {reason}. Its own log says why. Start all local ranks again to join the run"
        super().__init__(message, peer=peer)
        self.reason = reason


class BackendUnavailableError(DistributedError, ImportError):
    """An engine is not installed or not supported here. `backend` names it, and `how` says how to get it."""

    def __init__(self, backend: str, how: str) -> None:
        super().__init__(f"{backend} is not available here: {how}")
        self.backend = backend
        self.how = how


# --- time -------------------------------------------------------------------------------------------------------------


class OperationTimeoutError(DistributedError, TimeoutError):
    """A call did not end within its `timeout` (in seconds).

    A point-to-point message may be tried again. After a collective, the group cannot be used again.
    """

    is_recoverable = True

    def __init__(self, what: str, timeout: float, *, peer: int | str | None = None, state: str = "") -> None:
        # torch's own tests, and people who search their logs, look for the word by itself.
        super().__init__(f"Exceeded the timeout of {timeout:g} s: {what}{_state(state)}", peer=peer)
        self.timeout = timeout


def _state(state: str) -> str:
    """Return the end of a message: a short state on the same line, a long one indented on lines of its own."""
    if not state:
        return ""
    return f"; {state}" if "\n" not in state else "".join(f"\n  {line}" for line in state.splitlines())


# --- bootstrap --------------------------------------------------------------------------------------------------------


class RendezvousError(TransportError):
    """The ranks could not form a group."""


class RendezvousTimeoutError(OperationTimeoutError, RendezvousError):
    """Not all ranks came together before the deadline.

    `missing` are the ranks that did not come. The message also lists the processes that were refused, and why.
    """

    is_recoverable = False

    def __init__(self, what: str, timeout: float, *, missing: Sequence[int] = (), state: str = "") -> None:
        super().__init__(what, timeout, state=state)
        self.missing = tuple(missing)


class RefusedError(RendezvousError):
    """The other side refused this process. The subclasses say why."""

    def __init__(self, message: str, *, peer: int | str | None = None) -> None:
        super().__init__(f"Refused by {peer}: {message}" if peer is not None else message, peer=peer)


class VersionMismatchError(RefusedError):
    """The other side uses another version of the protocol. Install the same version of Ringfort on both."""


class WorldSizeMismatchError(RefusedError):
    """The other side was started with another world size."""


class RankTakenError(RefusedError):
    """Another process has already joined with this rank."""


# --- identity and encryption ------------------------------------------------------------------------------------------


class InvalidKeyError(InvalidArgumentError):
    """A secret is invalid: it has the wrong length, or the passphrase is too short.

    Neither the message nor `value`, which is always None, contains the secret.
    """

    def __init__(self, name: str, why: str) -> None:
        DistributedError.__init__(self, f"{name}: {why}")
        self.name = name
        self.value = None


class JoinCodeError(InvalidKeyError):
    """A join code was mistyped or cut. `group` is the group of four with the likely typo, counted from 1, or None.

    The message contains only the groups in doubt. Ringfort never corrects a code by guessing.
    """

    def __init__(self, why: str, *, name: str = "join code", group: int | None = None) -> None:
        super().__init__(name, why)
        self.group = group


class IdentityError(DistributedError, OSError):
    """A key file or its folder cannot be used. `path` is the file, `why` the reason, `mend` the command that helps."""

    def __init__(self, path: object, why: str, mend: str) -> None:
        super().__init__(f"{path}: {why}; to fix it: {mend}")
        self.path = str(path)
        self.why = why
        self.mend = mend


class NamespaceMismatchError(RefusedError):
    """The other side belongs to another cluster: its network id differs."""


class EncryptionMismatchError(RefusedError):
    """One side has encryption on and the other has it off."""


class HandshakeError(TransportError):
    """The other side did not prove that it knows the cluster secret, or sent an invalid handshake.

    If an honest peer says that it belongs to another cluster, the error is `NamespaceMismatchError`.
    """


class TamperedError(TransportError):
    """An encrypted record was changed, cut, repeated or reordered on its way. The link is closed.

    `why` says what was wrong with the record.
    """

    is_fatal = True

    def __init__(self, why: str, *, peer: int | str | None = None) -> None:
        super().__init__(f"The link with {_named(peer)} was tampered with: {why}", peer=peer)
        self.why = why


# --- the program ------------------------------------------------------------------------------------------------------


class CollectiveMismatchError(DistributedError):
    """Ranks of one group called different collectives, or the same one with different sizes, element types or ops.

    All ranks discard the result, and the group cannot be used again, because its ranks no longer agree on what comes
    next. `rank` called `ours`, and `peer` called `theirs`; `operation` is the number of the call in the group.
    """

    is_fatal = True
    _message = (
        "Operation {operation} of this group differs: rank {rank} called {ours}, rank {peer} called {theirs}; "
        "every rank must make the same calls in the same order"
    )

    def __init__(self, rank: int, ours: str, peer: int, theirs: str, *, operation: int) -> None:
        message = self._message.format(operation=operation, rank=rank, ours=ours, peer=peer, theirs=theirs)
        super().__init__(message, peer=peer)
        self.rank = rank
        self.ours = ours
        self.theirs = theirs
        self.operation = operation


class GradientMismatchError(CollectiveMismatchError):
    """Ranks passed different trees to `average_gradients`.

    Every rank raises this error before any array has been sent, so the group stays usable. `operation` is always 0.
    """

    is_fatal = False
    _message = (
        "Gradients differ: rank {rank} has {ours}, rank {peer} has {theirs}; every rank must average the same tree"
    )

    def __init__(self, rank: int, ours: str, peer: int, theirs: str) -> None:
        super().__init__(rank, ours, peer, theirs, operation=0)  # the group has begun no operation


class GradientLayoutError(DistributedError, ValueError):
    """The gradients of a micro-batch differ from those of the run in names, order, shapes or element types.

    Nothing was added up. `leaf` is the first gradient that differs, `ours` is what it is here, and `theirs` what it is
    in the run. (If ranks pass different trees to `average_gradients`, the error is `GradientMismatchError`.)
    """

    def __init__(self, leaf: str, ours: str, theirs: str) -> None:
        super().__init__(
            f"{leaf} is {ours} here and {theirs} in the run; every micro-batch must give the same gradients "
            "on every machine: start the same program everywhere, and pass zeros for a parameter without a gradient"
        )
        self.leaf = leaf
        self.ours = ours
        self.theirs = theirs


class NonFiniteError(DistributedError, ValueError):
    """Gradients that were to be compressed contain infinities or NaNs.

    Every rank raises this error before any array has changed, and the group stays usable: skip the step, or choose
    `on_nonfinite="skip"` or `"clip"`. `name` is the array's name, and `found` is the number of such elements by rank.
    """

    is_recoverable = True

    def __init__(self, name: str, found: dict[int, int]) -> None:
        who = ", ".join(f"{count} at rank {rank}" for rank, count in sorted(found.items()))
        what = f"Array {name!r}" if name else "The array"
        super().__init__(
            f"{what} contains infinite or NaN elements ({who}); skip this step, or pass a GradientCompressor with "
            'on_nonfinite="skip" (counts them as 0) or "clip"'
        )
        self.name = name
        self.found = found


class NonFiniteStepError(NonFiniteError):
    """The gradients of a step of an elastic run contain infinities or NaNs, or its loss is infinite or NaN. Every
    member raises this error.

    `what` is "gradients", "loss" or both: "gradients and loss". `machines` are those whose own gradients or losses are
    not finite; none if only their sum is not, or if the machine has left since.
    """

    is_recoverable = False

    def __init__(self, step: int, machines: Iterable[str], what: str = "gradients") -> None:
        self.step = step
        self.machines = tuple(machines)
        self.what = what
        who = ", ".join(self.machines) or "the sum over all machines, or a machine that has left"
        contain = "is infinite or NaN" if what == "loss" else "contain infinite or NaN elements"
        DistributedError.__init__(
            self,
            f"The {what} of step {step} {contain} ({who}); lower the learning rate, look at that machine, or pass "
            'nonfinite="skip" to leave such steps out',
        )
        self.name = ""
        self.found: dict[int, int] = {}


class DivergedError(DistributedError):
    """Machines of an elastic run that should have the same bits do not, twice in a row.

    Raised on the machines that differ from the majority: they have left the run, and the others continue. Without a
    majority it is raised on all, and the run has ended. `machines` are those that differ, after step `step`. (Gradients
    with infinities or NaNs are a `NonFiniteStepError`.)
    """

    def __init__(
        self, step: int, what: str, machines: Iterable[str], *, has_majority: bool = True, told: str = ""
    ) -> None:
        self.step = step
        self.machines = tuple(machines)
        who = ", ".join(self.machines)
        if has_majority:
            text = (
                f"The {what} on {who} differs from that of most members, twice in a row, so it has left the run. "
                "Test the memory of that machine; the others continue"
            )
        else:
            text = (
                f"The {what} differs between {who}, and none has a majority, so the run has ended. Test their memory, "
                "and see that the program changes its state by step.mean() and step.number alone"
            )
        super().__init__(f"{text}; {told}" if told else text)


class CheckpointError(DistributedError, OSError):
    """A checkpoint cannot be read or written. `path` is its file or folder, and `why` the reason."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"Checkpoint {path}: {why}")
        self.path = path
        self.why = why


class StateTransferError(DistributedError):
    """A joining process could not get the state of a run. `reasons` says for each member why it could not send it.

    Members that are there later may be asked again.
    """

    is_recoverable = True
    is_peer_failure = True

    def __init__(self, what: str, reasons: Mapping[str, str]) -> None:
        told = "".join(f"\n  {peer}: {why}" for peer, why in reasons.items())
        super().__init__(f"{sentence(what)}{told}")
        self.reasons = dict(reasons)


class AbortedError(DistributedError):
    """The group was aborted: by `abort()` on this rank, or by `peer`, for the `reason` that it gave."""

    is_fatal = True

    def __init__(self, reason: str, *, peer: int | str | None = None) -> None:
        super().__init__(f"Aborted{'' if peer is None else f' by {_named(peer)}'}: {reason}", peer=peer)
        self.reason = reason


class EpochEndedError(AbortedError):
    """The `epoch` in which this group or sub-group was formed has ended.

    Call `establish_ring()` to form a group of the current members, and make the sub-groups again from the context.
    """

    def __init__(self, epoch: str, why: str) -> None:
        super().__init__(f"{epoch} has ended: {why}")
        self.epoch = epoch


class NotEstablishedError(DistributedError):
    """This process is in an `epoch` with other peers but has not connected with them. Call `establish_ring()`."""

    def __init__(self, epoch: str) -> None:
        super().__init__(
            f"This process is in {epoch} and has not connected with the others; "
            "call establish_ring() after wait_for_peers()"
        )
        self.epoch = epoch


class ProtocolError(TransportError):
    """Received bytes are invalid in the Ringfort protocol: a corrupt length or an unknown kind. The link is closed."""

    is_fatal = True


class InboxFullError(DistributedError, BufferError):
    """A peer has sent more messages than its inbox holds, so the awaited message cannot be read.

    Receive the other messages first; the link is usable. `limit` is the size of the inbox in bytes (the setting
    `inbox_bytes`).
    """

    is_recoverable = True

    def __init__(self, limit: int, *, peer: int | str | None = None) -> None:
        super().__init__(
            f"The inbox for {_named(peer)} is full ({limit / 2**20:g} MiB of messages that nobody has received); "
            "receive those first",
            peer=peer,
        )
        self.limit = limit


# --- remote procedure calls -------------------------------------------------------------------------------------------


class RpcError(DistributedError):
    """A remote call failed. `peer` is the rank that was called; the subclasses say why. Other calls continue."""


class FunctionNotFoundError(RpcError, LookupError):
    """The rank that was called has no function of that `name`. `known` are the names that it has."""

    def __init__(self, name: str, known: Sequence[str], *, peer: int | str | None = None) -> None:
        have = f"it has {', '.join(sorted(known))}" if known else "it has none; call barrier() after registering"
        super().__init__(f"{sentence(_named(peer))} has no function {name!r}; {have}", peer=peer)
        self.name = name
        self.known = tuple(known)


class InvalidMessageError(RpcError, ValueError):
    """Arguments or a result cannot be sent, are too large, or do not match the signature of the function.

    The function was not run, or its result was not sent.
    """


class RemoteError(RpcError):
    """The function raised an exception on the rank that was called.

    `type_name`, `message` and `traceback` describe that exception as text; the exception itself is not rebuilt. The
    text is shown as the cause of this error.
    """

    def __init__(self, type_name: str, message: str, traceback: str, *, peer: int | str | None = None) -> None:
        super().__init__(f"{sentence(_named(peer))} raised {type_name}: {message}", peer=peer)
        self.type_name = type_name
        self.message = message
        self.traceback = traceback


class RpcTimeoutError(RpcError, OperationTimeoutError):
    """A call did not end within its timeout. The rank that was called is told to stop working on it."""


class RpcOverloadedError(RpcError):
    """Too many calls or too many bytes are in flight, on this rank or on the rank that was called.

    The function was not run. Wait until some calls have ended, and call again.
    """

    is_recoverable = True


class RpcPeerLostError(RpcError, PeerLostError):
    """The rank that was called died or closed its agent before the call ended; the function may or may not have run.

    Unlike after `PeerLostError`, calls to other ranks continue.
    """

    is_fatal = False
    _advice = ""


class RpcNoConnectionError(RpcError, NoConnectionError):
    """There is no connection to the rank that was called: it was lost, or it or this agent is closed.

    Nothing was sent.
    """

    is_fatal = False
