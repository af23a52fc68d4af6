"""`ClusterNode`: this process as a peer of its cluster. It starts its control service and sends it requests.

with ClusterNode() as node:
    epoch = node.wait_for_peers(1, timeout=30)
    print(epoch.first_rank(node.peer_id), "of", epoch.world_size)
"""

from __future__ import annotations

import atexit
import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.core.election import ElectionState
from ringfort.cluster.core.events import ClusterEvent, ControlLost, OtherClusters
from ringfort.cluster.core.gossip import MAX_NOTE_BYTES
from ringfort.cluster.core.health import HealthSummary
from ringfort.cluster.core.peer_messages import Epoch, RunState
from ringfort.cluster.core.state_sources import StateSource
from ringfort.cluster.core.topology import ClusterTopology, TopologyRecords
from ringfort.cluster.net import ipc
from ringfort.cluster.net.client import ControlClient
from ringfort.cluster.net.peer_streams import MAX_STREAM_PURPOSE
from ringfort.cluster.net.service_host import ProcessHost, ThreadHost
from ringfort.cluster.net.setup import Setup
from ringfort.cluster.view import PeerView
from ringfort.config import AutoDiscoveryConfig, check_timeout
from ringfort.errors import (
    ChannelClosedError,
    ControlLostError,
    DistributedError,
    InvalidArgumentError,
    NoConnectionError,
    RendezvousTimeoutError,
)
from ringfort.identity.credentials import Credentials
from ringfort.telemetry.trace import own_trace
from ringfort.transport import tcp
from ringfort.transport.finalisers import Finaliser, weakly, when_gone
from ringfort.transport.forks import keep_from_children
from ringfort.transport.hello import Ready
from ringfort.transport.locks import Condition
from ringfort.transport.machine import Machine

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

T = TypeVar("T")
Callback = Callable[[ClusterEvent], None]
StreamCallback = Callable[[str, str, Connection], None]

_ANSWER: Final = 10.0
"""Seconds that a request to the control service may take. It usually takes 0.2 ms, but longer on a machine that
swaps."""
_START: Final = 60.0
"""Seconds that the control service may take to start. It usually takes 0.4 s, but longer on a machine that swaps."""
_ACCEPTED: Final = 1.0
"""Seconds for the answer to a new stream, which has room for it."""
_STOP: Final = 4.0
"""Seconds before a control process that does not stop is killed. Its goodbye takes two at most."""
_KILLED: Final = 1.0
"""Seconds to wait for a process that has ended or was killed."""


class ClusterNode:
    """A peer of the cluster: it finds other peers, watches them, and is in an epoch or waits for one.

    The control service, which answers heartbeats and agrees on epochs, runs in a small process of its own. So a program
    that holds its interpreter lock is not taken for dead, and one that is killed is reported at once. All methods are
    thread-safe. A closed node cannot be started again. After a fork, the node belongs to the parent alone.
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
        telemetry: Path | None = None,
        listens: bool = True,
    ) -> None:
        """Prepare a node; `start` starts it.

        `slots` is the number of ranks of this process; 0 makes it an observer, or with `config.elastic` a witness of
        the run `config.run`. `credentials` default to this user's own. `encryption` overrides `config` and the
        environment (see `choose_encryption`). `control` says where the control service runs: by default in a process of
        its own, for an observer or a witness in a thread. `steps_done` returns the training steps done so far, for
        `ringfort peers`; by default, the steps of this process's optimizers and of `average_gradients`. `telemetry` is
        the folder with the traces of a launcher's ranks. Viewers in the cluster see those, and this process's own. An
        observer that only looks passes `listens=False`: it opens no port, is not announced, and connects to the others
        itself.

        Raises `InvalidArgumentError` for `slots`, `control` and `listens`, `ConfigError` if `config` and the
        environment contradict each other, and `IdentityError` if the key or secret cannot be read.
        """
        if control not in (None, "process", "thread"):
            raise InvalidArgumentError("control", control, "must be process or thread")
        self._setup = Setup.make(config, slots, credentials, encryption, telemetry, listens=listens)
        if not listens and (slots or self.config.elastic):
            raise InvalidArgumentError("listens", listens, "ranks and witnesses must listen; only observers need not")
        self._in_process = control == "process" if control else slots > 0
        self._changed = Condition()
        self._callbacks: list[Callback] = []
        self._stream_callback: StreamCallback | None = None
        self._fences: Callable[[int, tuple[str, ...]], RunState] = lambda _epoch, _ended: RunState()
        self._host: ProcessHost | ThreadHost | None = None
        self._client: ControlClient | None = None
        self._state = ipc.State()
        self._to_warn: OtherClusters | None = None
        """A warning for the program that waits for peers."""
        self._work = [0]
        """In a list, because the client reads it and must not keep the node alive."""
        self._steps_done = steps_done or (lambda: own_trace().step)
        self._farewell: Finaliser | None = None
        self._is_over = False
        self._lost: ControlLostError | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    @property
    def config(self) -> AutoDiscoveryConfig:
        """The settings, including those from the environment."""
        return self._setup.config

    @property
    def credentials(self) -> Credentials | None:
        """The credentials of its connections; None with encryption off."""
        return self._setup.wall

    @property
    def peer_id(self) -> str:
        """This peer's id, `node.instance`. Known before `start`."""
        return self._setup.peer

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of this process, as `host:port`, best first; empty before `start` and if it does not listen."""
        return self._state.addresses

    def start(self) -> Self:
        """Listen, announce this peer and look for others. Return when the listener is up. With `listens=False` it only
        looks for others.

        Raises `ConfigError` for an unknown interface or an invalid peer address, `TransportError` if the port is taken.
        """
        if self._is_over:
            raise ChannelClosedError("this node is closed; make a new one")
        if self._client is None:
            ours, theirs = socket.socketpair()
            # Leaves the cluster even if the program forgets to. For a killed program, its control process does.
            atexit.register(weakly(self.close, None))
            self._host = ProcessHost(theirs) if self._in_process else ThreadHost(theirs)
            work, dropped = self._work, ChannelClosedError("this node was dropped")
            self._client = ControlClient(
                ours,
                weakly(self._take, None),
                weakly(self._ended, dropped),
                lambda: work[0],
                self._steps_done,
                _own_trace,
                _refusing(weakly(self._take_stream, False)),
                weakly(self._fence, RunState()),
            )
            # A node that is garbage-collected leaves as if it had been closed.
            self._farewell = when_gone(self, partial(_end, self._client, self._host, ""))
            level = logging.getLogger("ringfort").getEffectiveLevel()
            try:
                self._state = self._client.ask(ipc.Start(self._setup.with_accelerators(), level), ipc.State, _START)
            except BaseException:
                self.close()
                raise
        return self

    def close(self) -> None:
        """Leave the cluster and end the control service, within a few seconds. Idempotent."""
        self.leave()

    def leave(self, why: str = "", *, returns: bool = False) -> None:
        """Do as `close` does, and tell the other peers why. `returns`: the program of an elastic run keeps its state,
        and comes back with it as another peer. That one is bound by the votes of this one, as after a crash: otherwise
        nobody could tell that the run has ended, if all members are away at the same time."""
        client, host = self._client, self._host
        self._is_over = True
        if client is None or host is None or client.is_forked:
            return
        if self._farewell is not None:
            self._farewell.call_off()
        _end(client, host, why, returns=returns)
        with self._changed:
            self._changed.notify_all()

    def __enter__(self) -> Self:
        """Start the node if it is not running yet."""
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- the epoch ------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that this peer is in now, or None."""
        return self._state.epoch

    @property
    def leader(self) -> str | None:
        """The peer id of the leader that this peer follows, or None."""
        return self._state.leader

    @property
    def election_state(self) -> ElectionState:
        """This peer's part in the election: IDLE while it knows no leader, CAMPAIGNING, MASTER or FOLLOWER."""
        return self._state.election

    def force_election(self) -> None:
        """Stand for election now. The present leader stays if its claim is better: it has been in the group for longer,
        has done more work or has the lower id. Raise `InvalidArgumentError` for an observer."""
        self._call(type(None), "force_election")

    def step_down(self) -> None:
        """Stop leading, if this peer leads, so that the others elect a leader among themselves. The epoch continues."""
        self._call(type(None), "step_down")

    @property
    def work_done(self) -> int:
        """The work that this peer has done, as counted by `record_work`."""
        return self._work[0]

    def record_work(self, amount: int = 1) -> None:
        """Add to the work that this peer has done, in a unit that all peers share. Of the peers that have been in the
        group equally long, the one with the most work leads. `AutoDiscoveryBackend` counts its collectives here."""
        if not isinstance(amount, int) or isinstance(amount, bool) or amount < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("amount", amount, "must be a whole number of at least 0")
        self._work[0] += amount  # two threads at once may lose a count, which matters to nobody

    def wait_for_peers(self, n: int = 1, timeout: float | None = None) -> Epoch:
        """Wait for an epoch with at least `n` other members and return it. `timeout` defaults to `config.timeout`.

        Raises `RendezvousTimeoutError`, which says who was seen, who was refused and why, and what to try.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("n", n, "must be a whole number of at least 0")
        what = f"waiting for {n} other peer{'' if n == 1 else 's'}" if n else "waiting for an epoch"
        return self._wait(lambda epoch: len(epoch.holders) > n, what, timeout)

    def wait_for_epoch(self, above: int, timeout: float | None = None) -> Epoch:
        """Wait for an epoch with a number above `above`, as follows a loss or the arrival of a new peer, and return
        it."""
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
        """Return a data connection to every other member of `epoch`, by its index. All members must call this.
        `machine` tells them which machine this process is on.

        Raises `AbortedError` if the epoch ends, `RendezvousTimeoutError` with the members that are missing and why.
        """
        return self._check().connect(ipc.Connect(epoch, machine, timeout), timeout + _ANSWER)

    # --- streams ----------------------------------------------------------------------------------------------------

    def open_stream(self, peer: str, purpose: str, timeout: float) -> Connection:
        """Return a new connection to the program of `peer`, outside any epoch, for a `purpose` that its program knows.
        The caller owns it.

        Raises `NoConnectionError` if `peer` is of another run or not connected to this one, `RefusedError` if its
        program takes no streams, `OperationTimeoutError` after `timeout` seconds.
        """
        check_timeout(timeout)
        if not 0 < len(purpose) <= MAX_STREAM_PURPOSE:
            raise InvalidArgumentError("purpose", purpose, f"must have 1 to {MAX_STREAM_PURPOSE} characters")
        connection = self._check().connect(ipc.OpenStream(peer, purpose, timeout), timeout + _ANSWER)[0]
        keep_from_children(connection.sock)
        return connection

    def on_stream(self, callback: StreamCallback) -> Callable[[], None]:
        """Call `callback(peer, purpose, connection)` with every stream that another peer opens to this one, in the
        thread of `subscribe`. The callback owns the connection; without one, streams are refused. Return a function
        that ends the subscription. Raise `InvalidArgumentError` if there is one already."""
        if self._stream_callback is not None:
            raise InvalidArgumentError("callback", callback, "another one takes the streams of this node; end it first")
        self._stream_callback = callback

        def end() -> None:
            if self._stream_callback is callback:
                self._stream_callback = None

        return end

    # --- queries ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[PeerView, ...]:
        """Return a view of this peer and all connected ones: members first, in the order of their ranks."""
        return self._call(tuple[PeerView, ...], "snapshot")

    def health_summary(self) -> HealthSummary:
        """Return a summary of the health of all connected peers."""
        return self._call(HealthSummary, "health_summary")

    def topology(self) -> ClusterTopology:
        """Return the known machines, including this one, and the links between them."""
        return ClusterTopology.from_records(self._call(TopologyRecords, "topology"))

    def refusals(self) -> tuple[str, ...]:
        """Return the latest refusals, in either direction, each with its reason."""
        return self._call(tuple[str, ...], "refusals")

    def why_alone(self) -> str:
        """Say who was seen, who was refused and why, and what to try."""
        return self._call(str, "why_alone")

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call `callback` with every `ClusterEvent` from now on, one at a time, in a thread of this node. It may call
        methods of the node, but must not wait for an event. Return a function that ends the subscription."""
        self._callbacks = [*self._callbacks, callback]

        def end() -> None:
            self._callbacks = [one for one in self._callbacks if one is not callback]

        return end

    def hold(self, holding: bool = True) -> None:
        """Keep new peers waiting while any member of the epoch holds. The epoch still shrinks when members are lost."""
        self._call(type(None), "hold", holding)

    # --- elastic runs -------------------------------------------------------------------------------------------------

    def fence_with(self, fence: Callable[[int, tuple[str, ...]], RunState]) -> None:
        """Set the function that fences the program of an elastic run: see `cluster.core.events.Fence`. It is called in
        the thread of `subscribe`, and this peer accepts no epoch before it has returned."""
        self._fences = fence

    def _fence(self, epoch: int, ended: tuple[str, ...]) -> RunState:
        return self._fences(epoch, ended)

    def set_run_state(self, state: RunState) -> None:
        """Tell the other peers where the program of an elastic run is, when it is idle there."""
        self._call(type(None), "set_run_state", state)

    def learned(self, epoch: Epoch, state: RunState) -> None:
        """Tell the cluster that the program has copied the state of a member of `epoch`."""
        self._call(type(None), "learned", epoch, state)

    def state_sources(self) -> tuple[StateSource, ...]:
        """Return the members of an elastic run that goes on without this peer, from which its program may copy the
        state."""
        return self._call(tuple[StateSource, ...], "state_sources")

    def give_up(self, epoch: Epoch, state: RunState, why: str) -> None:
        """Leave `epoch`, if this peer is in it, because the program of an elastic run cannot go on there, though all
        members are present. Another epoch follows, usually of the same members."""
        self._call(type(None), "give_up", epoch.number, state, why)

    # --- notes --------------------------------------------------------------------------------------------------------

    def tell(self, topic: str, body: bytes, peer: str | None = None) -> None:
        """Send a note to the program of `peer`, or of all connected peers, where it becomes the event `Noted`. It is
        lost for peers that cannot be reached. `ringfort run` uses notes to agree on attempts."""
        if len(body) > MAX_NOTE_BYTES:
            raise InvalidArgumentError("body", f"{len(body)} bytes", f"a note has at most {MAX_NOTE_BYTES}")
        self._call(type(None), "tell", topic[:256], body, peer)

    # --- the control service ------------------------------------------------------------------------------------------

    def _take(self, change: ipc.State | ClusterEvent) -> None:
        """Called in the callback thread, in the order in which things happened."""
        if isinstance(change, ipc.State):
            self._state = change
        else:
            if isinstance(change, ControlLost):
                self._state = ipc.State()
            for callback in self._callbacks:
                try:
                    callback(change)
                except Exception:
                    _log.exception("A callback failed for the event: %s", change)
        with self._changed:
            if isinstance(change, OtherClusters):
                self._to_warn = change
            self._changed.notify_all()

    def _take_stream(self, peer: str, purpose: str, connection: Connection) -> bool:
        """Called in the callback thread. Return False if nobody takes the stream."""
        callback = self._stream_callback
        if callback is None or self._is_over:
            return False
        try:
            connection.say(Ready(), time.monotonic() + _ACCEPTED)
            callback(peer, purpose, connection)
        except NoConnectionError:
            connection.close()  # the peer has gone
        except Exception:
            # Before the connection ends: who notices that looks into this log.
            _log.exception("A callback failed for a stream from %s for %s", peer, purpose)
            connection.close()
        return True

    def _ended(self) -> DistributedError:
        """Return why the control service has closed the connection: because of `close`, or because it died."""
        host = self._host
        if self._is_over or host is None:
            return ChannelClosedError("this node was closed")
        host.wait(_KILLED)
        self._lost = lost = ControlLostError(f"the {host.name} of this node {host.how_it_ended}")
        _log.error("%s", lost)
        return lost

    def _check(self) -> ControlClient:
        """Raise `ChannelClosedError` if the node is not running, `ControlLostError` if its service has died."""
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

    def _call(self, kind: type[T], function: str, *arguments: object) -> T:
        """Call a function of the service and return its result, which is a `kind`. Raise as `_check` does, or what the
        service raised."""
        return self._check().ask(ipc.Call(function, arguments), kind, _ANSWER)


def _refusing(take: Callable[[str, str, Connection], bool]) -> StreamCallback:
    """Return a function that refuses the streams that `take` does not take."""

    def take_or_refuse(peer: str, purpose: str, connection: Connection) -> None:
        if tcp.is_ended(connection.sock):
            connection.close()  # the peer's patience is over
        elif not take(peer, purpose, connection):
            connection.refuse("stream", "its program takes no streams")

    return take_or_refuse


def _own_trace() -> str:
    path = own_trace().path
    return "" if path is None else str(path)


def _end(client: ControlClient, host: ProcessHost | ThreadHost, why: str, *, returns: bool = False) -> None:
    """Have the service leave the cluster, and wait for its end. May be called again, for example after an interrupt."""
    client.post(ipc.Stop(why, returns))
    if not host.wait(_STOP):
        host.kill()
        host.wait(_KILLED)
    client.join(_KILLED)
