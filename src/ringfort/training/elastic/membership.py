"""`Membership`: an elastic run's part in the cluster: its node, the group of its epoch, its donors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Final

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.backend import AutoDiscoveryBackend
from ringfort.cluster.core.events import ClusterEvent, EpochEnded
from ringfort.cluster.core.peer_messages import Epoch, RunState
from ringfort.config import AutoDiscoveryConfig, DistributedConfig
from ringfort.context import DistributedContext
from ringfort.errors import DistributedError
from ringfort.training.elastic.protocol import Standstill
from ringfort.training.elastic.transfer_link import PURPOSE

_log = logging.getLogger(__name__)

_CONNECT: Final = 5.0
"""Seconds to open a stream to a donor."""


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
        """`fence` is called before an epoch is accepted, `on_learner` with the stream of a learner."""
        self.backend = AutoDiscoveryBackend(config, group=group)
        self.node = self.backend.node
        self.context = DistributedContext(self.backend)
        self.node.fence_with(lambda epoch, ended: run_state(fence(epoch, ended)))
        self._on_learner = on_learner
        self.node.on_stream(self._take_stream)
        self.node.subscribe(self._on_event)
        self._tell = on_event
        self._ended: set[tuple[int, str]] = set()

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that this peer is in, whether its group has been formed or not."""
        return self.node.epoch

    def has_ended(self, epoch: Epoch) -> bool:
        """Return whether this peer is not in `epoch` any more."""
        return epoch.key in self._ended or self.node.epoch != epoch

    def form(self, timeout: float) -> Epoch:
        """Form the group of the current epoch, and return the epoch. Raise `DistributedError` if that fails."""
        self.backend.establish_ring(timeout)
        epoch = self.backend.epoch
        assert epoch is not None
        return epoch

    def wait_for_end(self, epoch: Epoch, seconds: float) -> bool:
        """Wait until `epoch` has ended, for so many seconds. Return whether it has."""
        deadline = time.monotonic() + seconds
        while not self.has_ended(epoch) and time.monotonic() < deadline:
            with suppress(DistributedError):
                self.node.wait_for_epoch(epoch.number, max(0.01, deadline - time.monotonic()))
        return self.has_ended(epoch)

    def donors(self) -> dict[str, Connection]:
        """Return streams to the members of the run that others are in."""
        found: dict[str, Connection] = {}
        for view in self.node.snapshot():
            if not view.is_self and view.is_member and view.slots and view.run == self.node.config.run:
                try:
                    found[view.peer] = self.node.open_stream(view.peer, PURPOSE, _CONNECT)
                except DistributedError as exc:
                    _log.info("%s cannot send the state: %s", view.name or view.peer, exc)
        return found

    def tell(self, stands: Standstill, *, is_ready: bool) -> None:
        """Tell the other peers where this program is."""
        self.node.set_run_state(run_state(stands, is_ready=is_ready))

    def learned(self, epoch: Epoch, stands: Standstill) -> None:
        """This program has copied the state of a member of `epoch`, and all that came since."""
        self.node.learned(epoch, run_state(stands, is_ready=True))

    def close(self, why: str = "") -> None:
        """Leave the cluster."""
        self.node.leave(why)
        self.backend.close()

    def _take_stream(self, peer: str, purpose: str, connection: Connection) -> None:
        if purpose == PURPOSE:
            self._on_learner(peer, connection)
        else:
            connection.close()

    def _on_event(self, event: ClusterEvent) -> None:
        if isinstance(event, EpochEnded):
            self._ended.add(event.epoch.key)
        self._tell(event)
