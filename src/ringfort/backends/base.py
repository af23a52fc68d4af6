"""`Backend`: how one rank of a group talks to the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from ringfort.backends.group import Group, Traffic
from ringfort.config import DistributedConfig
from ringfort.transport.reducer import Reducer

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

    from ringfort.backends.engines.native import Native


class Backend(ABC):
    """One rank of a group.

    To bring a new wire, subclass `MeshBackend` and give it a stream of bytes to each other rank; everything below is
    then there (docs/backends.md has a complete example). What holds for every backend, and is checked by
    `ringfort.testing.conformance`:

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

    @property
    @abstractmethod
    def group(self) -> Group:
        """The ranks that are a group now, with everything that their links can do: what collectives work on."""

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return self.group.world_size

    @classmethod
    def is_available(cls) -> bool:
        """Return whether this machine has what the backend needs, as far as that can be told at once: nothing is
        imported, started or connected. What turns out to be missing later raises `BackendUnavailableError`."""
        return True

    def send(self, data: Buffer, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Send a message. On return the memory may be used again; the receiver may not have it yet."""
        group = self.group
        group.check_peer(dst, "dst")
        group.send(data, dst, group.tagged(tag, timeout))

    def recv(
        self, into: Buffer, src: int, *, reduce: Reducer | None = None, tag: int = 0, timeout: float | None = None
    ) -> None:
        """Receive a message of exactly the size of `into`; with `reduce`, reduce it into what is there.

        A message of another size raises `SizeMismatchError` and is dropped; the link stays usable. A timeout in the
        middle of a message drops its rest; the link stays usable and the next message is received whole.
        """
        group = self.group
        group.check_peer(src, "src")
        group.recv(into, src, group.tagged(tag, timeout), reduce)

    def recv_timeout(self, into: Buffer, src: int, timeout: float, *, tag: int = 0) -> None:
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
        tag: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Send to one rank and receive from another at the same time, without a thread; with `reduce`, reduce what
        arrives into `into`."""
        group = self.group
        group.check_peer(dst, "dst")
        group.check_peer(src, "src")
        group.exchange(out, dst, into, src, group.tagged(tag, timeout), reduce)

    def barrier(self, *, timeout: float | None = None) -> None:
        """Return when every rank of the group has called it."""
        self.group.barrier(timeout)

    def abort(self, reason: str) -> None:
        """Wake every call of this process on this group with `AbortedError`. Peers learn of it at once."""
        self.group.abort(reason)

    @abstractmethod
    def close(self) -> None:
        """Leave the group. May be called twice, and from another thread; never raises."""

    def native(self) -> Native | None:
        """Return the collectives of another engine (NCCL, Gloo, MPI), or None."""
        return self.group.native

    def traffic(self) -> Traffic:
        """Return what this process has sent and received, over all groups that share its links."""
        return self.group.traffic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.world_size}>"
