"""`ClusterNode`: this process as a peer of its cluster. Starts the control thread and speaks with it.

    with ClusterNode(AutoDiscoveryConfig(min_peers=2)) as node:
        epoch = node.wait_for_peers(1, timeout=30)
        print(epoch.first_rank(node.peer_id), "of", epoch.world_size)
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from ringfort.cluster.events import ClusterEvent
from ringfort.cluster.messages import Epoch
from ringfort.cluster.view import PeerView
from ringfort.config import AutoDiscoveryConfig
from ringfort.identity.credentials import Credentials

if TYPE_CHECKING:
    from typing_extensions import Self

Callback = Callable[[ClusterEvent], None]


class ClusterNode:
    """A peer: found by others and finding them, watched and watching, in an epoch or waiting for one.

    All methods may be called from any thread. A node that is closed does not start again.
    """

    def __init__(
        self, config: AutoDiscoveryConfig | None = None, *, slots: int = 1, credentials: Credentials | None = None
    ) -> None:
        """`slots` are the ranks that this process brings. `credentials` are this user's own unless given.

        Raises `InvalidArgumentError` for `slots`, and `IdentityError` if the key or secret cannot be read.
        """
        raise NotImplementedError

    @property
    def peer_id(self) -> str:
        """`node.instance`; known before `start`."""
        raise NotImplementedError

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where this process is found, as `host:port`, best first; empty before `start`."""
        raise NotImplementedError

    def start(self) -> Self:
        """Listens, announces itself and looks for others. Returns at once when the listener is up.

        Raises `ConfigError` for an interface or a peer's address that cannot be, `TransportError` if the port is taken.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Leaves the cluster in words and ends the thread. Idempotent."""
        raise NotImplementedError

    def leave(self, why: str = "") -> None:
        """Says goodbye with a reason, then as `close`."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Starts the node if that was not done yet."""
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that this peer is in now; None while there is none."""
        raise NotImplementedError

    @property
    def leader(self) -> str | None:
        """The leader's peer id, as far as this peer knows."""
        raise NotImplementedError

    def wait_for_peers(self, n: int = 1, timeout: float | None = None) -> Epoch:
        """The epoch, as soon as it has at least `n` members beside this one; `config.timeout` unless told otherwise.

        Raises `RendezvousTimeoutError` that says who was seen, who was refused and why, and what to try.
        """
        raise NotImplementedError

    def wait_for_epoch(self, above: int, timeout: float | None = None) -> Epoch:
        """The first epoch whose number is higher than `above`: after a loss, or when newcomers are let in."""
        raise NotImplementedError

    def snapshot(self) -> tuple[PeerView, ...]:
        """All peers in sight and this one, members in the order of their ranks first."""
        raise NotImplementedError

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Calls `callback` in the control thread with every `ClusterEvent` from now on; it must not wait for anything.
        Returns what ends that."""
        raise NotImplementedError

    def hold(self, holding: bool = True) -> None:
        """While any member of the epoch holds, newcomers wait; the epoch still shrinks when members are lost."""
        raise NotImplementedError

    def tell(self, topic: str, body: bytes, peer: str | None = None) -> None:
        """Sends a note of this program's to `peer`, or to all in sight, where it becomes the event `Noted`. Those who
        cannot be reached do not get it. For what the programs agree on beside the epoch (`ringfort run` does)."""
        raise NotImplementedError  # a Note of talk.py
