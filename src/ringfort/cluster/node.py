"""`ClusterNode`: this process as a peer of its cluster. Starts the control thread and speaks with it.

with ClusterNode() as node:
    epoch = node.wait_for_peers(1, timeout=30)
    print(epoch.first_rank(node.peer_id), "of", epoch.world_size)
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ringfort.cluster import explain
from ringfort.cluster.control import Control
from ringfort.cluster.election import ElectionState
from ringfort.cluster.events import ClusterEvent, OtherClusters
from ringfort.cluster.health import HealthSummary
from ringfort.cluster.messages import Epoch
from ringfort.cluster.setup import Setup
from ringfort.cluster.talk import MAX_NOTE_BYTES
from ringfort.cluster.topology import ClusterTopology
from ringfort.cluster.view import PeerView
from ringfort.config import AutoDiscoveryConfig, check_timeout
from ringfort.errors import ChannelClosedError, InvalidArgumentError, RendezvousTimeoutError
from ringfort.identity.credentials import Credentials
from ringfort.transport.channel import Channel
from ringfort.transport.machine import Machine

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

T = TypeVar("T")
Callback = Callable[[ClusterEvent], None]

_ANSWER: Final = 10.0
"""Seconds that a question to the control thread may take. It takes microseconds; a machine that swaps may need more."""


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
        self._setup = Setup.make(config, slots, credentials)
        self._changed = threading.Condition()
        self._callbacks: list[Callback] = []
        self._thread: threading.Thread | None = None
        self._control: Control | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._why_leaving = ""
        self._to_warn: OtherClusters | None = None
        """What a program that waits for peers is to be told."""
        self._work = 0
        self._is_over = False

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
        return () if self._control is None else self._control.core.me.addresses

    def start(self) -> Self:
        """Listens, announces itself and looks for others. Returns at once when the listener is up.

        Raises `ConfigError` for an interface or a peer's address that cannot be, `TransportError` if the port is taken.
        """
        if self._is_over:
            raise ChannelClosedError("this node is closed; make a new one")
        if self._thread is None:
            ready: Future[None] = Future()
            self._thread = threading.Thread(
                target=lambda: asyncio.run(self._main(ready)), name="ringfort-control", daemon=True
            )
            self._thread.start()
            try:
                ready.result()
            except BaseException:
                self._is_over = True
                self._thread.join()
                raise
            # Says goodbye even where the program forgets to; a killed one cannot, and is missed all the same.
            atexit.register(_close, weakref.ref(self))
        return self

    async def _main(self, ready: Future[None]) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        try:
            control = Control(self._setup, self._publish, lambda: self.work_done)
            await control.start()
        except BaseException as exc:
            ready.set_exception(exc)
            return
        self._control = control
        ready.set_result(None)
        await self._stopping.wait()
        await control.stop(self._why_leaving)

    def close(self) -> None:
        """Leaves the cluster in words and ends the thread. Idempotent."""
        self.leave()

    def leave(self, why: str = "") -> None:
        """Says goodbye with a reason, then as `close`."""
        thread, stopping = self._thread, self._stopping
        if not self._is_over:
            self._is_over, self._why_leaving = True, why
            if self._loop is not None and stopping is not None and thread is not None and thread.is_alive():
                self._loop.call_soon_threadsafe(stopping.set)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
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
        return None if self._control is None else self._control.core.epoch

    @property
    def leader(self) -> str | None:
        """The leader's peer id, as far as this peer knows."""
        return None if self._control is None else self._control.core.leader

    @property
    def election_state(self) -> ElectionState:
        """Where this peer stands: IDLE while it knows no leader, CAMPAIGNING, MASTER, FOLLOWER."""
        return ElectionState.IDLE if self._control is None else self._control.core.election.state

    def force_election(self) -> None:
        """Stands for election now and not in its turn. Whoever leads stays if its claim is better: it has been in the
        group for longer, has done more work or has the lower id. Raises `InvalidArgumentError` for an observer."""
        self._ask(lambda control: control.force_election())

    def step_down(self) -> None:
        """Leads no more, if this peer does: the others elect one of them. The epoch goes on."""
        self._ask(lambda control: control.step_down())

    @property
    def work_done(self) -> int:
        """By this peer, as `record_work` counted it."""
        return self._work

    def record_work(self, amount: int = 1) -> None:
        """Adds to the work that this peer has done, in a unit that all peers share: of those who have been in the group
        equally long, the one who has done most leads. `AutoDiscoveryBackend` counts its collectives here."""
        if not isinstance(amount, int) or isinstance(amount, bool) or amount < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("amount", amount, "must be a whole number of at least 0")
        self._work += amount  # two threads at once may lose a count, which matters to nobody

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
                if self._is_over:
                    raise ChannelClosedError("this node was closed")
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

    def connect_members(self, epoch: Epoch, timeout: float, machine: Machine) -> dict[int, Channel]:
        """A data channel to every other member of `epoch`, by its place there. All members must call this. `machine` is
        what they are told of where this one is.

        Raises `AbortedError` when the epoch ends, `RendezvousTimeoutError` with who is missing and why.
        """
        if self._loop is None or self._control is None or self._is_over:
            raise ChannelClosedError("this node is not running")
        control = self._control
        formed = asyncio.run_coroutine_threadsafe(control.forming.form(epoch, machine), self._loop)
        try:
            return formed.result(timeout)
        except (CancelledError, FutureTimeoutError, asyncio.TimeoutError) as exc:
            missing = self._ask(lambda control: control.forming.missing())
            formed.cancel()
            state = "; ".join(f"rank {rank}: {why}" for rank, why in missing.items())
            raise RendezvousTimeoutError(f"connecting {epoch}", timeout, missing=tuple(missing), state=state) from exc
        except BaseException:
            formed.cancel()
            raise

    # --- what else is known -----------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[PeerView, ...]:
        """All peers in sight and this one, members in the order of their ranks first."""
        return self._ask(explain.view_peers)

    def health_summary(self) -> HealthSummary:
        """How all other peers in sight are, in a few numbers."""
        return self._ask(lambda control: control.core.health_summary())

    def topology(self) -> ClusterTopology:
        """A copy of what is known of all machines and of the links between them, this one's included."""
        return self._ask(lambda control: control.speeds.known())

    def refusals(self) -> tuple[str, ...]:
        """Who was turned away or turned this peer away, and why; the latest few."""
        return self._ask(lambda control: tuple(control.finder.refusals))

    def why_alone(self) -> str:
        """In words: who was seen, who was refused and why, and what to try."""
        return self._ask(explain.why_alone)

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Calls `callback` in the control thread with every `ClusterEvent` from now on; it must not wait for anything.
        Returns what ends that."""
        self._callbacks = [*self._callbacks, callback]

        def end() -> None:
            self._callbacks = [one for one in self._callbacks if one is not callback]

        return end

    def hold(self, holding: bool = True) -> None:
        """While any member of the epoch holds, newcomers wait; the epoch still shrinks when members are lost."""
        self._ask(lambda control: control.hold(holding))

    def tell(self, topic: str, body: bytes, peer: str | None = None) -> None:
        """Sends a note of this program's to `peer`, or to all in sight, where it becomes the event `Noted`. Those who
        cannot be reached do not get it. For what the programs agree on beside the epoch (`ringfort run` does)."""
        if len(body) > MAX_NOTE_BYTES:
            raise InvalidArgumentError("body", f"{len(body)} bytes", f"a note has at most {MAX_NOTE_BYTES}")
        self._ask(lambda control: control.tell(topic[:256], body, peer))

    # --- the control thread -----------------------------------------------------------------------------------------

    def _publish(self, event: ClusterEvent) -> None:
        for callback in self._callbacks:
            try:
                callback(event)
            except Exception:
                _log.exception("a callback failed on: %s", event)
        with self._changed:
            if isinstance(event, OtherClusters):
                self._to_warn = event
            self._changed.notify_all()

    def _ask(self, question: Callable[[Control], T]) -> T:
        """Runs `question` in the control thread. Raises `ChannelClosedError` where there is none."""
        control, loop = self._control, self._loop
        if control is None or loop is None or self._is_over:
            raise ChannelClosedError("this node is not running; call start()")
        if threading.current_thread() is self._thread:
            return question(control)
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(question(control))
            except BaseException as exc:
                answer.set_exception(exc)

        try:
            loop.call_soon_threadsafe(run)
        except RuntimeError as exc:
            raise ChannelClosedError("this node was closed") from exc
        return answer.result(_ANSWER)


def _close(reference: weakref.ref[ClusterNode]) -> None:
    node = reference()
    if node is not None:
        node.close()
