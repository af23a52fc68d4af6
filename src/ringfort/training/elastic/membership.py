"""`Membership`: an elastic run's part in the cluster: its node, the group of its epoch, its donors."""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.backend import AutoDiscoveryBackend
from ringfort.cluster.core.events import ClusterEvent, EpochEnded, EpochStarted, Noted
from ringfort.cluster.core.peer_messages import Epoch, RunState
from ringfort.cluster.core.state_sources import StateSource
from ringfort.cluster.node import ClusterNode
from ringfort.cluster.view import PeerView
from ringfort.config import AutoDiscoveryConfig, DistributedConfig
from ringfort.context import DistributedContext
from ringfort.training.elastic.protocol import Standstill
from ringfort.training.elastic.timeline import note
from ringfort.training.elastic.transfer_link import PURPOSE
from ringfort.transport.locks import Condition

_CONNECT: Final = 5.0
"""Seconds to open a stream to a donor."""
_LOOK: Final = 0.2
"""Seconds between two looks at whether an epoch has ended."""
_HEARD: Final = 1.0
"""Seconds that a group which was formed waits at most for the news of its epoch. The news are usually there before."""


def run_state(stands: Standstill, *, is_ready: bool = False) -> RunState:
    """Return what other peers are told of a program that stands there."""
    mark = stands.mark
    digest = blake2b(repr(mark).encode(), digest_size=16).digest() if mark.branch else b""
    return RunState(digest, stands.lineage, mark.step, stands.is_pending, is_ready)


class Membership:
    """The program's node and the group of the current epoch."""

    def __init__(
        self,
        config: AutoDiscoveryConfig,
        group: DistributedConfig,
        fence: Callable[[int, tuple[str, ...]], Standstill],
        on_learner: Callable[[str, Connection], None],
        on_event: Callable[[ClusterEvent], None],
    ) -> None:
        """Prepare it; `open` looks for the run. `fence` is called before an epoch is accepted, `on_learner` with the
        stream of a learner."""
        self._changed = Condition()
        self._news = 0
        self._ended: tuple[tuple[int, str], ...] = ()
        self._heard: tuple[int, str] | None = None
        """The latest epoch of whose start the program has heard."""
        self._tell = on_event
        self._on_learner = on_learner
        self._group = group
        self._backend: AutoDiscoveryBackend | None = None
        self._context: DistributedContext | None = None
        self.node = ClusterNode(config)
        self.node.fence_with(lambda epoch, ended: run_state(fence(epoch, ended)))
        self.node.on_stream(self._take_stream)

    def open(self) -> None:
        """Look for the run. Whoever calls this can already call `close`: an interrupt may come at any moment."""
        self._backend = AutoDiscoveryBackend(group=self._group, node=self.node)
        self._context = DistributedContext(self._backend)
        self.node.subscribe(self._on_event)  # after the backend: a group fails before the program hears of it
        begun = self.node.epoch  # already, so its news may have come before
        if begun is not None:
            self._heard = begun.key

    @property
    def backend(self) -> AutoDiscoveryBackend:
        """The ranks of the group that was formed last."""
        assert self._backend is not None
        return self._backend

    @property
    def context(self) -> DistributedContext:
        """The collectives of the group that was formed last."""
        assert self._context is not None
        return self._context

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that this peer is in, whether its group has been formed or not."""
        return self.node.epoch

    def has_ended(self, epoch: Epoch) -> bool:
        """Return whether this peer is not in `epoch` any more."""
        return epoch.key in self._ended or self.node.epoch != epoch

    def form(self, epoch: Epoch, timeout: float) -> None:
        """Form the group of `epoch`. Raise `DistributedError` if that fails, at once if `epoch` has ended.

        The program has heard of the start of `epoch` then, and of what happened before, such as why a member was lost:
        events come in order, in another thread.
        """
        assert self._backend is not None
        self._backend.establish_epoch(epoch, timeout)
        deadline = time.monotonic() + _HEARD
        with self._changed:
            while self._heard != epoch.key and not self.has_ended(epoch) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    @property
    def news(self) -> int:
        """The number of events so far."""
        return self._news

    def wait_for_news(self, seen: int, seconds: float) -> None:
        """Wait for an event beyond the first `seen`, for so many seconds."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._news == seen and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def wait_for_end(self, epoch: Epoch, seconds: float) -> bool:
        """Wait until `epoch` has ended, for so many seconds. Return whether it has."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self.has_ended(epoch) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, _LOOK))
        return self.has_ended(epoch)

    def has_others(self) -> bool:
        """Return whether another peer of this run is there."""
        return len(self._views()) > 1

    def has_newcomers(self) -> bool:
        """Return whether a peer of this run is there that is in no epoch."""
        return any(not view.is_self and not view.is_member for view in self._views())

    @property
    def seated(self) -> int:
        """The number of peers of this run that are in an epoch."""
        return sum(view.is_member for view in self._views())

    def _views(self) -> list[PeerView]:
        return [view for view in self.node.snapshot() if view.run == self.node.config.run and view.slots]

    def sources(self) -> tuple[StateSource, ...]:
        """Return the members of the run that goes on without this program; none if it does not. Raise
        `ControlLostError` if this peer's control process has died."""
        return self.node.state_sources()

    def open_stream(self, peer: str) -> Connection:
        """Return a stream to a member that may send the state. Raise `DistributedError` if that fails."""
        return self.node.open_stream(peer, PURPOSE, _CONNECT)

    def tell(self, stands: Standstill, *, is_ready: bool) -> None:
        """Tell the other peers where this program is."""
        self.node.set_run_state(run_state(stands, is_ready=is_ready))

    def learned(self, epoch: Epoch, stands: Standstill, *, is_ready: bool) -> None:
        """This program has copied the state of a member of `epoch`; it `is_ready` if it has all that came since. Call
        it right after the copy: until then the law takes this program for one with its earlier state."""
        self.node.learned(epoch, run_state(stands, is_ready=is_ready))

    def give_up(self, epoch: Epoch, stands: Standstill, why: str) -> None:
        """End `epoch`, in which this program cannot go on, though all members are there: another one follows."""
        self.node.give_up(epoch, run_state(stands), why)

    def close(self, why: str = "", *, returns: bool = False) -> None:
        """Leave the cluster, and tell the others why; `returns`: for a while. Idempotent."""
        try:
            self.node.leave(why, returns=returns)
        finally:
            if self._backend is not None:
                self._backend.close()

    def _take_stream(self, peer: str, purpose: str, connection: Connection) -> None:
        if purpose == PURPOSE:
            self._on_learner(peer, connection)
        else:
            connection.close()

    def _on_event(self, event: ClusterEvent) -> None:
        if isinstance(event, EpochEnded):
            self._ended = (*self._ended[-15:], event.epoch.key)  # an epoch never comes back, but this may run for weeks
        if not isinstance(event, Noted):
            note("event: %s", event)
        with self._changed:
            self._news += 1
            self._changed.notify_all()
        self._tell(event)
        if isinstance(event, EpochStarted):
            with self._changed:
                self._heard = event.epoch.key
                self._changed.notify_all()
