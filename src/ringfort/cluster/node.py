"""`ClusterNode`: this process as a peer of its cluster. Starts its control service and speaks with it.

with ClusterNode() as node:
    epoch = node.wait_for_peers(1, timeout=30)
    print(epoch.first_rank(node.peer_id), "of", epoch.world_size)
"""

from __future__ import annotations

import atexit
import logging
import socket
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.core.election import ElectionState
from ringfort.cluster.core.events import ClusterEvent, ControlLost, OtherClusters
from ringfort.cluster.core.gossip import MAX_NOTE_BYTES
from ringfort.cluster.core.health import HealthSummary
from ringfort.cluster.core.peer_messages import Epoch
from ringfort.cluster.core.topology import ClusterTopology, TopologyRecords
from ringfort.cluster.net import ipc
from ringfort.cluster.net.client import ControlClient
from ringfort.cluster.net.hosting import ProcessHost, ThreadHost
from ringfort.cluster.net.setup import Setup
from ringfort.cluster.view import PeerView
from ringfort.config import AutoDiscoveryConfig, check_timeout
from ringfort.errors import (
    ChannelClosedError,
    ControlLostError,
    DistributedError,
    InvalidArgumentError,
    RendezvousTimeoutError,
)
from ringfort.identity.credentials import Credentials
from ringfort.telemetry.steps import own_steps
from ringfort.transport.finalisers import Finaliser, when_gone
from ringfort.transport.locks import Condition
from ringfort.transport.machine import Machine

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

T = TypeVar("T")
Callback = Callable[[ClusterEvent], None]

_ANSWER: Final = 10.0
"""Seconds that a question to the control service may take. It takes 0.2 ms; a machine that swaps may need more."""
_START: Final = 60.0
"""Seconds that the control service may take to start. It takes 0.4 s; a machine that swaps may need more."""
_STOP: Final = 4.0
"""Seconds that the control service has for its goodbye, which takes two at most, before its process is killed."""
_KILLED: Final = 1.0
"""Seconds after which a process that ended, or was killed, is not waited for any more."""


class ClusterNode:
    """A peer: found by others and finding them, watched and watching, in an epoch or waiting for one.

    The control service, which answers heartbeats and agrees on epochs, runs in a small process of its own. So a program
    that holds its interpreter lock is not taken for dead, and one that is killed is reported at once. All methods may
    be called from any thread. A node that is closed does not start again; after a fork it belongs to the parent alone.
    """

    def __init__(
        self,
        config: AutoDiscoveryConfig | None = None,
        *,
        slots: int = 1,
        credentials: Credentials | None = None,
        encryption: str | None = None,
        control: Literal["process", "thread"] | None = None,
        steps_done: Callable[[], int] | None = None,
    ) -> None:
        """`slots` are the ranks that this process brings. `credentials` are this user's own unless given. `encryption`
        decides where it is given; otherwise `config` and the environment do (see `choose_encryption`). `control` is
        where the control service runs: by default in a process of its own, for an observer (no `slots`) in a thread.
        `steps_done` says how many steps of training the program has done, for `ringfort peers`; by default those that
        this process's optimizers and `average_gradients` have done.

        Raises `InvalidArgumentError` for `slots` and `control`, `ConfigError` where `config` and the environment
        contradict each other, and `IdentityError` if the key or secret cannot be read.
        """
        if control not in (None, "process", "thread"):
            raise InvalidArgumentError("control", control, "must be process or thread")
        self._setup = Setup.make(config, slots, credentials, encryption)
        self._in_process = control == "process" if control else slots > 0
        self._changed = Condition()
        self._callbacks: list[Callback] = []
        self._host: ProcessHost | ThreadHost | None = None
        self._client: ControlClient | None = None
        self._state = ipc.State()
        self._to_warn: OtherClusters | None = None
        """What a program that waits for peers is to be told."""
        self._work = [0]
        """In a list, which outlives the node: the client tells the service, and must not keep the node alive."""
        self._steps_done = steps_done or _own_steps
        self._farewell: Finaliser | None = None
        self._is_over = False
        self._lost: ControlLostError | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    @property
    def config(self) -> AutoDiscoveryConfig:
        """The settings, those from the environment included."""
        return self._setup.config

    @property
    def credentials(self) -> Credentials | None:
        """What its connections are opened with; None with encryption off."""
        return self._setup.wall

    @property
    def peer_id(self) -> str:
        """`node.instance`; known before `start`."""
        return self._setup.peer

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where this process is found, as `host:port`, best first; empty before `start`."""
        return self._state.addresses

    def start(self) -> Self:
        """Listens, announces itself and looks for others. Returns when the listener is up.

        Raises `ConfigError` for an interface or a peer's address that cannot be, `TransportError` if the port is taken.
        """
        if self._is_over:
            raise ChannelClosedError("this node is closed; make a new one")
        if self._client is None:
            ours, theirs = socket.socketpair()
            # Says goodbye even where the program forgets to. For one that is killed, its control process does.
            atexit.register(_close, weakref.ref(self))
            self._host = ProcessHost(theirs) if self._in_process else ThreadHost(theirs)
            node: weakref.ref[ClusterNode] = weakref.ref(self)
            work = self._work
            self._client = ControlClient(
                ours, partial(_take, node), partial(_ended, node), lambda: work[0], self._steps_done
            )
            # One that is dropped leaves as if it had been closed.
            self._farewell = when_gone(self, partial(_end, self._client, self._host, ""))
            level = logging.getLogger("ringfort").getEffectiveLevel()
            try:
                self._state = self._ask(ipc.Start(self._setup.state, level), ipc.State, _START)
            except BaseException:
                self.close()
                raise
        return self

    def close(self) -> None:
        """Leaves the cluster in words and ends the control service, within seconds in any case. Idempotent."""
        self.leave()

    def leave(self, why: str = "") -> None:
        """Says goodbye with a reason, then as `close`."""
        client, host = self._client, self._host
        self._is_over = True
        if client is None or host is None or client.is_forked:
            return
        if self._farewell is not None:
            self._farewell.call_off()
        _end(client, host, why)
        with self._changed:
            self._changed.notify_all()

    def __enter__(self) -> Self:
        """Starts the node if that was not done yet."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the epoch ------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that this peer is in now; None while there is none."""
        return self._state.epoch

    @property
    def leader(self) -> str | None:
        """The leader's peer id, as far as this peer knows."""
        return self._state.leader

    @property
    def election_state(self) -> ElectionState:
        """Where this peer stands: IDLE while it knows no leader, CAMPAIGNING, MASTER, FOLLOWER."""
        return self._state.election

    def force_election(self) -> None:
        """Stands for election now and not in its turn. Whoever leads stays if its claim is better: it has been in the
        group for longer, has done more work or has the lower id. Raises `InvalidArgumentError` for an observer."""
        self._order(ipc.ForceElection())

    def step_down(self) -> None:
        """Leads no more, if this peer does: the others elect one of them. The epoch goes on."""
        self._order(ipc.StepDown())

    @property
    def work_done(self) -> int:
        """By this peer, as `record_work` counted it."""
        return self._work[0]

    def record_work(self, amount: int = 1) -> None:
        """Adds to the work that this peer has done, in a unit that all peers share: of those who have been in the group
        equally long, the one who has done most leads. `AutoDiscoveryBackend` counts its collectives here."""
        if not isinstance(amount, int) or isinstance(amount, bool) or amount < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("amount", amount, "must be a whole number of at least 0")
        self._work[0] += amount  # two threads at once may lose a count, which matters to nobody

    def wait_for_peers(self, n: int = 1, timeout: float | None = None) -> Epoch:
        """The epoch, as soon as it has at least `n` members beside this one; `config.timeout` unless told otherwise.

        Raises `RendezvousTimeoutError` that says who was seen, who was refused and why, and what to try.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("n", n, "must be a whole number of at least 0")
        what = f"waiting for {n} other peer{'' if n == 1 else 's'}" if n else "waiting for an epoch"
        return self._wait(lambda epoch: len(epoch.members) > n, what, timeout)

    def wait_for_epoch(self, above: int, timeout: float | None = None) -> Epoch:
        """The first epoch whose number is higher than `above`: after a loss, or when newcomers are let in."""
        return self._wait(lambda epoch: epoch.number > above, f"waiting for an epoch after {above}", timeout)

    def _wait(self, wanted: Callable[[Epoch], bool], what: str, timeout: float | None) -> Epoch:
        timeout = self.config.timeout if timeout is None else timeout
        check_timeout(timeout)
        self.start()
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                epoch = self.epoch
                self._check()
                if epoch is not None and wanted(epoch):
                    return epoch
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                if self._to_warn is not None:
                    _log.warning("%s: %s", what, self._to_warn)
                    self._to_warn = None
                self._changed.wait(left)
        raise RendezvousTimeoutError(what, timeout, state=self.why_alone())

    def connect_members(self, epoch: Epoch, timeout: float, machine: Machine) -> dict[int, Connection]:
        """A data connection to every other member of `epoch`, by its place there. All members must call this. `machine`
        is what they are told of where this one is.

        Raises `AbortedError` when the epoch ends, `RendezvousTimeoutError` with who is missing and why.
        """
        return self._check().form(ipc.Form(epoch, machine, timeout), timeout + _ANSWER)

    # --- what else is known -----------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[PeerView, ...]:
        """All peers in sight and this one, members in the order of their ranks first."""
        return self._ask(ipc.Peers(), tuple[PeerView, ...])

    def health_summary(self) -> HealthSummary:
        """How all other peers in sight are, in a few numbers."""
        return self._ask(ipc.Health(), HealthSummary)

    def topology(self) -> ClusterTopology:
        """A copy of what is known of all machines and of the links between them, this one's included."""
        return ClusterTopology.from_records(self._ask(ipc.Topology(), TopologyRecords))

    def refusals(self) -> tuple[str, ...]:
        """Who was turned away or turned this peer away, and why; the latest few."""
        return self._ask(ipc.Refusals(), tuple[str, ...])

    def why_alone(self) -> str:
        """In words: who was seen, who was refused and why, and what to try."""
        return self._ask(ipc.WhyAlone(), str)

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Calls `callback` with every `ClusterEvent` from now on, one after the other in a thread of this node. It may
        ask the node, but must not wait for an event. Returns what ends that."""
        self._callbacks = [*self._callbacks, callback]

        def end() -> None:
            self._callbacks = [one for one in self._callbacks if one is not callback]

        return end

    def hold(self, holding: bool = True) -> None:
        """While any member of the epoch holds, newcomers wait; the epoch still shrinks when members are lost."""
        self._order(ipc.Hold(holding))

    def tell(self, topic: str, body: bytes, peer: str | None = None) -> None:
        """Sends a note of this program's to `peer`, or to all in sight, where it becomes the event `Noted`. Those who
        cannot be reached do not get it. For what the programs agree on beside the epoch (`ringfort run` does)."""
        if len(body) > MAX_NOTE_BYTES:
            raise InvalidArgumentError("body", f"{len(body)} bytes", f"a note has at most {MAX_NOTE_BYTES}")
        self._order(ipc.Tell(topic[:256], body, peer))

    # --- the control service ------------------------------------------------------------------------------------------

    def take(self, change: ipc.State | ClusterEvent) -> None:
        """For the node's own client: in the thread of events, in the order in which things happened."""
        if isinstance(change, ipc.State):
            self._state = change
        else:
            if isinstance(change, ControlLost):
                self._state = ipc.State()
            self._publish(change)
        with self._changed:
            if isinstance(change, OtherClusters):
                self._to_warn = change
            self._changed.notify_all()

    def _publish(self, event: ClusterEvent) -> None:
        for callback in self._callbacks:
            try:
                callback(event)
            except Exception:
                _log.exception("a callback failed on: %s", event)

    def ended(self) -> DistributedError:
        """For the node's own client: the control service has closed the connection: on our word, or it has died."""
        host = self._host
        if self._is_over or host is None:
            return ChannelClosedError("this node was closed")
        host.wait(_KILLED)
        self._lost = lost = ControlLostError(f"the {host.name} of this node {host.how_it_ended}")
        _log.error("%s", lost)
        return lost

    def _check(self) -> ControlClient:
        """Raises `ChannelClosedError` where nobody can be asked, `ControlLostError` where that was not our doing."""
        client = self._client
        if client is not None and client.is_forked:
            raise ChannelClosedError(
                "this process was forked from the one that started the node; make a new ClusterNode here"
            )
        if self._lost is not None:
            raise self._lost
        if client is None or self._is_over:
            raise ChannelClosedError(
                "this node was closed" if self._is_over else "this node is not running; call start()"
            )
        return client

    def _order(self, request: ipc.AnyRequest) -> None:
        """As `_ask`, where there is nothing to answer."""
        self._ask(request, type(None))

    def _ask(self, request: ipc.AnyRequest, kind: type[T], timeout: float = _ANSWER) -> T:
        """The service's answer. Raises as `_check`, and what the service raises."""
        return self._check().ask(request, kind, timeout)


def _own_steps() -> int:
    return own_steps().done


def _close(reference: weakref.ref[ClusterNode]) -> None:
    node = reference()
    if node is not None:
        node.close()


def _end(client: ControlClient, host: ProcessHost | ThreadHost, why: str) -> None:
    """Has the service say goodbye and waits for its end. May be called again, as after an interrupt."""
    client.tell(ipc.Stop(why))
    if not host.wait(_STOP):
        host.kill()
        host.wait(_KILLED)
    client.join(_KILLED)


def _take(reference: weakref.ref[ClusterNode], change: ipc.State | ClusterEvent) -> None:
    node = reference()
    if node is not None:
        node.take(change)


def _ended(reference: weakref.ref[ClusterNode]) -> DistributedError:
    node = reference()
    return ChannelClosedError("this node was dropped") if node is None else node.ended()
