"""`ringfort witness`: votes on the members of an elastic run, without a rank or data of its own."""

from __future__ import annotations

import queue
import re
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final

from typer import Option, echo

from ringfort.cli.parameters import Interfaces, Peers
from ringfort.telemetry.words import clean

if TYPE_CHECKING:
    from ringfort.cluster.core.events import ClusterEvent
    from ringfort.cluster.core.peer_messages import Epoch
    from ringfort.cluster.view import PeerView
    from ringfort.config import AutoDiscoveryConfig

LOOK: Final = 0.25
"""Seconds between two looks for a run. Peers are found in tenths of a second."""
GONE: Final = 10.0
"""Seconds without any peer of the run after which another run may be followed."""
_ELASTIC: Final = re.compile(r"(.*)/[0-9a-f]{8}(#\w+)?", re.DOTALL)
"""The name of an elastic run: the one that people give it, and a digest of its settings (run_note.py)."""


def witness(
    name: Annotated[
        str | None, Option(metavar="RUN", help="The name of the run.  [default: the first elastic run that is found]")
    ] = None,
    peer: Peers = None,
    interface: Interfaces = None,
) -> None:
    """Break the tie of two machines in an elastic run: vote on its members from a third device, until Ctrl-C."""
    from ringfort.config import AutoDiscoveryConfig

    config = AutoDiscoveryConfig(peers=tuple(peer or ()), interfaces=tuple(interface or ()))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as a service: it says goodbye, so nobody waits for it
    with suppress(KeyboardInterrupt):
        while True:
            run = _find(config, name)
            _follow(replace(config, run=run, elastic=True), name)


def elastic_runs(views: Iterable[PeerView], name: str | None) -> list[str]:
    """Return the elastic runs of the peers in `views`, with their digests; with `name`, only those of that name."""
    runs = {view.run for view in views if view.slots and not view.is_self}
    named = {run: found[1] for run in runs if (found := _ELASTIC.fullmatch(run))}
    return sorted(run for run in named if name in (None, named[run]))


def _find(config: AutoDiscoveryConfig, name: str | None) -> str:
    """Wait, as an observer, until there is a run to follow."""
    from ringfort.cluster.node import ClusterNode

    echo(f"waiting for the elastic run {name}" if name else "waiting for an elastic run")
    with ClusterNode(config, slots=0) as node:
        while True:
            runs = elastic_runs(node.snapshot(), name)
            if runs:
                if len(runs) > 1:
                    others = ", ".join(clean(run) for run in runs[1:])
                    echo(f"there are more runs: {others}. For one of them, start another `ringfort witness --name RUN`")
                return runs[0]
            time.sleep(LOOK)


def _follow(config: AutoDiscoveryConfig, name: str | None) -> None:
    """Vote in the run `config.run` until it is over."""
    from ringfort.cluster.node import ClusterNode

    echo(f"following the run {clean(config.run)}")
    events: queue.SimpleQueue[ClusterEvent] = queue.SimpleQueue()
    following = Following(config.run, name, time.monotonic())
    # Its votes are durable: if it is closed while members may be at work, the next one is bound by them.
    with ClusterNode(config, slots=0) as node:
        node.subscribe(events.put)
        while not following.is_over(node.snapshot(), time.monotonic()):
            with suppress(queue.Empty):
                line = following.take(events.get(timeout=LOOK))
                if line:
                    echo(clean(line))


class Following:
    """The run that is followed. Pure: events and views in; lines for people, and whether the run is over, out."""

    def __init__(self, run: str, name: str | None, now: float) -> None:
        self._run = run
        self._name = name
        self._seen = now
        self._at_work: set[str] | None = None
        """The holders of the state in the last epoch, without those that have ended; None before the first epoch."""

    def take(self, event: ClusterEvent) -> str:
        """Take an event, and return it in words if people should know it."""
        from ringfort.cluster.core import events

        match event:
            case events.EpochStarted(epoch=epoch):
                self._at_work = set(epoch.holders)
                return f"epoch {epoch.number}: this machine votes with {', '.join(_names(epoch))}"
            case events.PeerLost(peer=peer, died=True):
                self._at_work = self._at_work and self._at_work - {peer}
            case events.EpochEnded() | events.Waiting() | events.DiskTrouble() | events.CloneFound():
                return str(event)
            case _:
                pass
        return ""

    def is_over(self, views: Sequence[PeerView], now: float) -> bool:
        """Return whether to look for a run again: all holders of the state have said goodbye, or nobody of the run has
        been here for a while and no vote binds this machine, or there is another run, perhaps this one with other
        settings."""
        runs = elastic_runs(views, self._name)
        if self._run in runs:
            self._seen = now
        if self._at_work is not None and not self._at_work:
            return True  # at once: the next run begins without these votes, which nobody could refute any more
        return now >= self._seen + GONE and (self._at_work is None or bool(runs))


def _names(epoch: Epoch) -> list[str]:
    return [member.name or member.peer for member in epoch.members if member.slots]
