"""`Backend`: how one rank of a group talks to the others. Everything above is built on these few methods."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from ringfort.backends.group import Group
from ringfort.bootstrap.links import Routes as Ways
from ringfort.config import DistributedConfig, check_timeout
from ringfort.errors import InvalidArgumentError, InvalidRankError, SelfSendError, UnsupportedArrayError
from ringfort.transport.arena import Arena
from ringfort.transport.locks import Thread
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array, Reducer

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

    from ringfort.backends.engines.native import Native

MAX_TAG = 2**31 - 1
"""The largest tag a caller may use; what is above is for the library."""

Tag = int | Envelope
"""A caller's tag is a number; sub-groups and collectives address theirs with an envelope."""


class Traffic(NamedTuple):
    """What a process has moved since its group was formed."""

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0


class Ready:
    """An all-reduce that is kept ready for the next one like it (collectives/persistent.py)."""

    __slots__ = ("durations", "metrics", "run")

    def __init__(self, run: Callable[[Array], None]) -> None:
        self.run = run
        """Raises as `all_reduce` does; the array has the element type and size of the one before."""
        self.metrics: object = None
        """Whose `durations` are."""
        self.durations: list[float] = []
        """Where to say how many seconds it took."""


class RingStep(NamedTuple):
    """One `exchange` of a `pipelined ring`."""

    out: Buffer
    into: Buffer
    reduce: Reducer | None = None


class Backend(ABC):
    """One rank of a group.

    What holds for every backend, and is checked by `ringfort.testing.conformance`:

    - Messages between two ranks keep their order within a tag. Different tags, sub-groups and their parent may be used
      from different threads at once and never mix.
    - `timeout` is in seconds and bounds the whole call; without one, `config.timeout` does.
    - Every method raises before a byte moves: `InvalidRankError` for a rank outside the group, `SelfSendError` for this
      rank, `InvalidArgumentError` for a bad tag or timeout, `UnsupportedArrayError` for memory that is not contiguous
      or, to receive into, not writable.
    - While it waits, every method may raise `PeerLostError` (a peer died), `ChannelClosedError` (it, or this rank,
      closed its backend), `OperationTimeoutError`, or `AbortedError` (after `abort` here or at a peer).
    """

    config: DistributedConfig
    is_measured: bool = False
    """Whether AUTO measures the links before it first chooses. Not where time is virtual."""
    shared: Arena | None = None
    """What `arena` has found, for those in a hurry."""
    ring: tuple[int, ...] = ()
    """The order in which rings visit the ranks, the same on all; that of their numbers where it is empty."""
    speeds: Mapping[int, float] = MappingProxyType({})
    """Bytes a second between this rank and others, where they were measured before the group was formed."""

    def __init__(self, rank: int, world_size: int, config: DistributedConfig, *, group: Group | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.config = config
        self.group = group or Group()
        """What is true only for this set of ranks."""
        self.persistent: dict[object, Ready] = {}
        """All-reduces that are kept ready (collectives/persistent.py), by what tells them apart."""
        self._operations = count(1)
        self._member_set = frozenset(range(world_size))
        self._lock = threading.Lock()
        self._sub_groups: dict[tuple[int, ...], int] = {}

    @classmethod
    def is_available(cls) -> bool:
        """Return whether this machine has what the backend needs, as far as that can be told at once: nothing is
        imported, started or connected. What turns out to be missing later raises `BackendUnavailableError`."""
        return True

    # --- what a backend must do -----------------------------------------------------------------------------------

    @abstractmethod
    def send(self, data: Buffer, dst: int, *, tag: Tag = 0, timeout: float | None = None) -> None:
        """Sends a message. On return the memory may be used again; the receiver may not have it yet."""

    @abstractmethod
    def recv(
        self, into: Buffer, src: int, *, reduce: Reducer | None = None, tag: Tag = 0, timeout: float | None = None
    ) -> None:
        """Receives a message of exactly the size of `into`; with `reduce`, reduces it into what is there.

        One of another size raises `SizeMismatchError` and is dropped; the link stays usable. A timeout in the middle of
        a message drops its rest; the link stays usable and the next message is received whole.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Wakes every call of this process on this group with `AbortedError`. Peers learn of it at once."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the group. May be called twice, and from another thread; never raises."""

    # --- what it may do better ------------------------------------------------------------------------------------

    def recv_timeout(self, into: Buffer, src: int, timeout: float, *, tag: Tag = 0) -> None:
        """`recv` with a timeout that cannot be forgotten."""
        self.recv(into, src, tag=tag, timeout=timeout)

    def exchange(
        self,
        out: Buffer,
        dst: int,
        into: Buffer,
        src: int,
        *,
        reduce: Reducer | None = None,
        tag: Tag = 0,
        timeout: float | None = None,
    ) -> None:
        """Sends to one peer and receives from another at the same time; with `reduce`, reduces what arrives into
        `into`.

        The step that rings, trees and pairwise collectives are made of. This form, for backends that have nothing
        better, sends in a helper thread.
        """
        self.check_peer(dst, "dst")
        self.check_peer(src, "src")
        as_bytes(into, "into", writable=True)
        failure: list[BaseException] = []

        def send() -> None:
            try:
                self.send(out, dst, tag=tag, timeout=timeout)
            except BaseException as exc:  # handed to the caller's thread below
                failure.append(exc)

        sender = Thread(send, name="ringfort-exchange")
        try:
            sender.start()
            self.recv(into, src, reduce=reduce, tag=tag, timeout=timeout)
        except Exception:
            raise
        except BaseException as exc:  # Ctrl-C: nobody needs what is still being sent
            self.abort(str(exc) or type(exc).__name__)
            raise
        finally:
            while sender.is_alive():  # ends by its own timeout
                sender.join(1.0)
        if failure:
            raise failure[0]

    def pipelined_ring(
        self, ring_steps: Sequence[RingStep], dst: int, src: int, *, tag: Tag = 0, timeout: float | None = None
    ) -> None:
        """`exchange` after `exchange`, each of which sends what the one before has received: its `out` is the other's
        `into`. So it may be on its way while it arrives; what is sent before must not be needed afterwards, for what
        comes later may overwrite it as soon as the peers have it."""
        for ring_step in ring_steps:
            self.exchange(ring_step.out, dst, ring_step.into, src, reduce=ring_step.reduce, tag=tag, timeout=timeout)

    def swap(self, data: bytes | memoryview, into: memoryview, peer: int, envelope: Envelope) -> None:
        """An `exchange` with one peer, in a collective, of messages that are a frame each."""
        self.exchange(data, peer, into, peer, tag=envelope)

    def barrier(self, *, timeout: float | None = None) -> None:
        """Returns when every rank of the group has called it. Rounds of empty messages at doubling distances."""
        call = self.envelope(BARRIER_CALL, timeout)
        arena = self.arena(call) if self.shares_memory else None
        if arena is not None:
            with arena:
                arena.sign(call)
                arena.publish()
                arena.wait_signed(call)
            return
        self.meet(call)

    def meet(self, envelope: Envelope) -> None:
        """Returns when every rank is in the collective of `envelope`; raises if one is in another."""
        distance = 1
        while distance < self.world_size:
            dst, src = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
            self.exchange(b"", dst, bytearray(), src, tag=envelope)
            distance *= 2

    def native(self) -> Native | None:
        """The engine's own collectives (NCCL's, Gloo's, MPI's), or None."""
        return None

    def traffic(self) -> Traffic:
        """What this process has sent and received, over all groups that share its links."""
        return Traffic()

    # --- what groups and collectives need -------------------------------------------------------------------------

    @property
    def current(self) -> Backend:
        """The backend of the ranks that are a group now: this one, unless groups follow each other in it. What is begun
        on it never reaches the ranks of a later group. Raises if there is no such group yet."""
        return self

    @property
    def comm_id(self) -> int:
        """What keeps this group's messages apart from those of groups over the same links."""
        return 0

    @property
    def members(self) -> tuple[int, ...]:
        """This group's ranks, as the outermost group numbers them."""
        return tuple(range(self.world_size))

    @property
    def hosts(self) -> tuple[int, ...]:
        """For each rank the lowest rank of this group on the same host. A backend that knows no better says that every
        rank has a host of its own."""
        return tuple(range(self.world_size))

    @property
    def ways(self) -> Ways | None:
        """How the ranks reach each other, where the backend has connected them itself."""
        return None

    @property
    def connections(self) -> tuple[Backend, ...]:
        """This group over each of the connections that its ranks have with each other; the first is the group itself.
        They may be used from different threads at once, for parts of one collective."""
        return (self,)

    def share_failure(self, failed: Envelope, envelope: Envelope) -> None:  # noqa: B027  # it may do better
        """What ended the messages of `failed`, if anything has, ends the collective of `envelope` at all ranks. Nothing
        happens where the backend cannot tell: then the ranks find out by themselves."""

    def end_connections(self, failed: int, envelope: Envelope, error: BaseException) -> None:
        """What ended the collective of `envelope` on one of the `connections` ends it on all. Here, where nothing
        better is known, with everything else."""
        self.abort(str(error))

    def arena(self, envelope: Envelope) -> Arena | None:
        """The memory that the ranks of this group share, if they do. Called by all of them, in a collective: the first
        time, they make it together."""
        return None

    @property
    def shares_memory(self) -> bool:
        """Whether there may be a `arena`: the same at every rank."""
        return False

    def envelope(self, call: bytes, timeout: float | None = None) -> Envelope:
        """The envelope of the messages of the group's next collective, which `timeout` bounds as a whole."""
        return self.envelope_of(self.next_operation(), call, timeout)

    def next_operation(self) -> int:
        """The number of the group's next collective."""
        return next(self._operations)  # whole, whatever other threads do

    def numbering(self) -> Callable[[], int]:
        """`next_operation`, as a function that does not hold this backend: for what the backend itself keeps."""
        return self._operations.__next__

    def envelope_of(self, operation: int, call: bytes, timeout: float | None = None) -> Envelope:
        """`envelope` for a collective that has its number."""
        seconds = self.check_timeout(timeout)
        return Envelope(
            self.comm_id, COLLECTIVE_TAG, operation, call, self._member_set, False, seconds, self.now() + seconds
        )

    def now(self) -> float:
        """Seconds on the clock that timeouts are measured by."""
        return time.monotonic()

    def count_sub_group(self, members: tuple[int, ...]) -> int:
        """How many sub-groups of exactly these members there were before: keeps twins apart."""
        with self._lock:
            twins = self._sub_groups.get(members, 0)
            self._sub_groups[members] = twins + 1
            return twins

    # --- checks ---------------------------------------------------------------------------------------------------

    def check_peer(self, peer: int, name: str) -> None:
        """Raises unless `peer` is another rank of this group."""
        if not isinstance(peer, int) or isinstance(peer, bool) or not 0 <= peer < self.world_size:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRankError(peer, self.world_size, name=name)
        if peer == self.rank:
            raise SelfSendError(peer)

    def check_tag(self, tag: Tag) -> Envelope:
        """The envelope of a message with `tag`."""
        if isinstance(tag, Envelope):
            return tag
        if not isinstance(tag, int) or isinstance(tag, bool) or not 0 <= tag <= MAX_TAG:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("tag", tag, f"must be a whole number from 0 to {MAX_TAG}")
        return Envelope(self.comm_id, tag)

    def time_of(self, tag: Tag, timeout: float | None) -> tuple[float, float]:
        """Seconds a call may take, and until when: a collective's messages share the time of the whole."""
        if isinstance(tag, Envelope) and tag.deadline is not None:
            return tag.timeout, tag.deadline
        seconds = self.check_timeout(timeout)
        return seconds, self.now() + seconds

    def check_timeout(self, timeout: float | None) -> float:
        """Seconds to wait."""
        if timeout is None:
            return self.config.timeout
        check_timeout(timeout)
        return timeout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.world_size}>"


COLLECTIVE_TAG = 1 << 63
"""The tag of all messages of collectives: their order within a group tells them apart."""

BARRIER_CALL = b"\x01" + bytes(15)
"""See collectives/signature.py: the code of a barrier, which has no arguments."""

_MEASURING: Final = 0x80
"""In a call's first byte: this is the collective that finds out what `call` has to know before it runs."""


def measuring_for(call: bytes) -> bytes:
    """The call of a collective that measures what `call` needs. No rank takes the one for the other, and whoever called
    something else is told of `call`, which is what the program wrote."""
    return bytes((call[0] | _MEASURING,)) + call[1:]


def split_measuring(call: bytes) -> tuple[bytes, bool]:
    """The call that the program made, and whether this is the measuring for it. Undoes `measuring_for`."""
    return bytes((call[0] & ~_MEASURING,)) + call[1:], bool(call[0] & _MEASURING)


def as_bytes(data: Buffer, name: str, *, writable: bool) -> memoryview:
    """The memory of `data` as flat bytes, not copied."""
    try:
        view = memoryview(cast("Any", data))
        if writable and view.readonly:
            raise UnsupportedArrayError(name, type(data).__name__, "is read-only and cannot be received into")
        return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")
    except TypeError as exc:
        if isinstance(exc, UnsupportedArrayError):
            raise
        # An array without elements cannot be cast; it has no bytes either.
        if getattr(data, "size", None) == 0:
            return memoryview(bytearray())
        raise UnsupportedArrayError(
            name, type(data).__name__, f"must be contiguous memory with the buffer protocol ({exc})"
        ) from exc
