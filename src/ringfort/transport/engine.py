"""`Engine`: moves the messages of one process over its links, in the threads of the callers.

There is no thread of its own. A caller brings a job: what it wants to send and receive. If nobody is moving data the
caller becomes the **leader** and moves everybody's until its own job is done; else it sleeps as a **follower** and the
leader does its work. The law of this file: **only the leader, the holder of `_lead`, touches the parts below.** Others
append to `_arrivals` and wake the leader. One rank with one thread, the usual case, takes no contended lock and pays no
hand-over between threads.

The engine decides who leads. What the leader does is in its parts:

- `LinkTable` (links.py): the links, the jobs on them, and what the end of one means for the others.
- `Progress` (progress.py): the loop that moves bytes until a job is done.
- `Watchdog` (watchdog.py): deadlines and mismatch detection for blocked jobs.
- `FastPath` (fast_path.py): small messages of collectives.

An interrupt (Ctrl-C) may end a call that leads, and a signal handler or a finaliser may call the engine in the middle
of one. Neither can come between plain assignments (see locks.py). So a call says that it leads by an assignment right
after it took the lead (`_is_led`), and its exception handler begins with an assignment that says that it has ended
(`_is_interrupted`). A call that begins in a thread that holds the lead already can tell by them: either a call further
down the stack still leads (`_is_nested`), or one was interrupted and the engine must `_recover`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from ringfort.errors import AbortedError, ChannelClosedError, PeerLostError, sentence
from ringfort.transport import abort_reasons
from ringfort.transport.abort_reasons import Aborted, AbortReason, Lost
from ringfort.transport.fast_path import FastPath, is_small
from ringfort.transport.forks import FORKED, keep_from_children
from ringfort.transport.frames import WAKE_UP, pack
from ringfort.transport.inbound import Disagreement
from ringfort.transport.links import LinkTable
from ringfort.transport.locks import Signal, is_mine
from ringfort.transport.messages import Envelope, Job, MakeError, Watch
from ringfort.transport.progress import Progress, Spin
from ringfort.transport.stream import Poller, Stream

_LOOK_AGAIN = 0.25
"""Seconds that a follower sleeps at most before it looks whether anybody leads: the leader may have been interrupted
before it could wake its successor."""
_MOST_LATE = 20
"""Sleeps of `_LOOK_AGAIN` after its deadline that a follower forgives the leader, which normally ends it."""
_ANSWER = 10.0
"""Seconds in which the leader must do what another thread asks, such as to close. It takes milliseconds, unless a
reduction takes as long."""


_NESTED = "a signal handler or a finaliser has interrupted a call of this group and cannot call the group itself"


class _Request:
    """What a thread asks of the leader, and waits for."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self.is_done = False
        self.done = Signal()
        self.error: Exception | None = None

    def __call__(self) -> None:
        try:
            self._action()
        except Exception as exc:  # must not end the leader, who has nothing to do with it
            self.error = exc
        self.is_done = True
        self.done.send()


class Engine:
    """Moves what callers want moved. Its methods may be called from any thread."""

    number = 0
    """Its place among the engines of the process, in the order in which they were made: the same at every rank."""

    def __init__(
        self, rank: int, streams: dict[int, Stream], poller: Poller, *, inbox_bytes: int, epoch: int = 0
    ) -> None:
        table = LinkTable(rank, streams, poller, inbox_bytes=inbox_bytes, epoch=epoch)
        spin = Spin()
        self.rank = rank
        self.now = poller.now
        self.links = table.links
        self._poller = poller
        self.table = table
        """For the leader. Any thread may read `has_trouble`."""
        self._progress = Progress(table, spin)
        self._fast_path = FastPath(table, spin)
        self._jobs = table.jobs
        self._arrivals = self._progress.arrivals
        self._lead = threading.RLock()
        self._is_led = False  # the holder of `_lead` touches the parts, or was interrupted while it did
        self._is_interrupted = False  # the latter; the links cannot be trusted any more
        keep_from_children(self)

    # --- callers --------------------------------------------------------------------------------------------------

    def run(self, job: Job) -> None:
        """Block until `job` is done; raise what it failed with."""
        leads = False
        try:
            if self._is_led and self._is_nested():
                raise AbortedError(_NESTED)
            if self._lead.acquire(blocking=False) or self._follow(job):
                self._is_led = leads = True
                if (
                    job.is_posted  # the leader before had taken it up, and may have done it
                    or self._jobs
                    or self._arrivals
                    or self.table.has_trouble
                    or job.before
                    or not is_small(job)
                    or not self._fast_path.run(job)
                ):
                    self._progress.drive(job)
                self._is_led = leads = False
                self._release()
        except BaseException:
            if leads:
                self._is_interrupted = True
            self._unwind()
            raise
        _raise_error_of(job)

    def swap(self, data: bytes | memoryview, into: memoryview, peer: int, envelope: Envelope) -> bool:
        """Send `data`, a message of a collective that is one frame, to `peer` and receive what fills `into`. Return
        False, with nothing done, if the fast path cannot be taken."""
        link, leads = self.links[peer], False
        try:
            if self._is_led or not self._lead.acquire(blocking=False):
                return False
            if (
                self._jobs
                or self._arrivals
                or self.table.has_trouble
                or not link.outbound.is_idle
                or not link.inbound.is_idle_for(envelope[:2])
            ):
                self._release()
                return False
            self._is_led = leads = True
            left = self._fast_path.swap(link, data, into, envelope)
            if left is not None:
                self._progress.drive(left)
            self._is_led = leads = False
            self._release()
        except BaseException:
            if leads:
                self._is_interrupted = True
            self._unwind()
            raise
        if left is not None:
            _raise_error_of(left)
        return True

    def watch(self, is_ready: Callable[[], bool], peer: int, envelope: Envelope, *, needs_link: bool = True) -> None:
        """Block until `is_ready()`, which is looked at whenever something arrives, and after `wake`; raise what ends a
        collective that waits for `peer`. Without `needs_link` a goodbye of the peer does not end it."""
        receive = Watch(envelope, is_ready, needs_link=needs_link)
        self.run(
            Job("watch", envelope.timeout, envelope.deadline or 0.0, receive=receive, receive_link=self.links[peer])
        )

    def look(self) -> None:
        """Read what has come, so that `check` knows of it."""

        def read() -> None:
            for link in self.links.values():
                self.table.read(link)

        self._soon(read)

    def wake(self) -> None:
        """Make this process look at what it watches."""
        self._poller.wake()

    def nudge(self, peer: int) -> None:
        """Make `peer` look at what it watches."""
        link, table = self.links[peer], self.table

        def wake_up() -> None:
            if link.error is None:
                link.outbound.control(pack(WAKE_UP, epoch=table.epoch))
                table.push(link)

        self._as_leader(wake_up)

    def disagree(self, peer: int, operation: int, call: bytes, envelope: Envelope) -> NoReturn:
        """End the collective of `envelope`, because `peer` is in another; raise `CollectiveMismatchError`, or what
        ended it before."""
        link, disagreement = self.links[peer], Disagreement(envelope, operation, call)
        self._as_leader(lambda: self.table.mismatch(link, disagreement))
        raise abort_reasons.to_error(self.table.failed_comms[envelope.comm_id], self.rank)

    def check(self, envelope: Envelope) -> None:
        """Raise what keeps a collective from beginning, if `table.has_trouble`. What needs a peer finds out about that
        peer by itself."""
        error = self.table.trouble_of(envelope) if self.table.has_trouble else None
        if error is not None:
            raise error()

    def abort_reason_of(self, envelope: Envelope) -> AbortReason | None:
        """Return why collectives of this communicator have failed here; None if they have not."""
        return self.table.failed_comms.get(envelope.comm_id)

    def end(self, envelope: Envelope, abort_reason: AbortReason) -> None:
        """End the collectives of this communicator here too, and tell its members over these links."""
        self._as_leader(lambda: self.table.fail_comm(envelope.comm_id, envelope.members, abort_reason))

    def abort(self, reason: str) -> None:
        """End every call of this process and tell the peers."""
        self._as_leader(lambda: self.table.abort(Aborted(self.rank, reason)))

    def close(self, *, has_ended: bool = False) -> None:
        """Say goodbye and close all links. Calls that wait end with `ChannelClosedError`. If the program `has_ended`
        without a close, peers that still need this rank have lost it."""
        self._as_leader(lambda: self.table.close(has_ended=has_ended))

    def let_go(self) -> None:
        """`close` for a group that nobody holds any more; waits for nothing. Peers that still need this rank have lost
        it."""
        if not self.table.is_closed:
            self._soon(lambda: self.table.close(has_ended=True, linger=0.0))

    def drop(self) -> None:
        """Close all links without a goodbye, as a process that dies does. For fault injection."""
        self._as_leader(lambda: self.table.drop(lambda: ChannelClosedError("This rank was killed on purpose")))

    def lose(self, peer: int, reason: str, error: MakeError | None = None) -> None:
        """Take `peer` for lost, as somebody who watches it has found: end what waits for it, and every collective that
        it is part of, with `error` or a `PeerLostError`. Return at once."""
        link = self.links[peer]
        self._soon(lambda: self.table.lose(link, error or (lambda: PeerLostError(peer, reason)), reason))

    def fail(self, error: MakeError) -> None:
        """End every call of this process, now and later, with `error`. The peers are not told. Return at once."""
        self._soon(lambda: self.table.fail_all(error))

    def count(self, *moved: tuple[int, int, int]) -> None:
        """Add to the traffic what was moved beside the links: for each peer the bytes sent and received."""

        def add() -> None:
            for peer, sent, received in moved:
                link = self.links[peer]
                for half, size in ((link.outbound, sent), (link.inbound, received)):
                    if size:
                        half.count(size)

        self._soon(add)

    def traffic(self) -> list[tuple[int, int, int, int]]:
        """Return for each link the messages and bytes sent and those received, since the start."""
        halves = [(link.outbound, link.inbound) for link in self.links.values()]
        return [(out.messages, out.bytes, into.messages, into.bytes) for out, into in halves]

    def abandon(self) -> None:
        """In a forked child: make every later call raise. The locks may be held by threads that do not exist here."""
        self._lead = threading.RLock()
        self._is_led = self._is_interrupted = False
        self._arrivals.clear()
        self.table.abandon(lambda: ChannelClosedError(sentence(FORKED)))

    # --- leading and following ------------------------------------------------------------------------------------

    def _follow(self, job: Job) -> bool:
        """Have the leader do `job`. Returns True if the leader has handed over before it was done: then this thread
        leads."""
        job.turn = Signal()
        self._arrivals.append(job)
        self._poller.wake()
        late = 0
        try:
            while not self._lead.acquire(blocking=False):
                job.turn.wait(_LOOK_AGAIN)
                if job.is_done:
                    return False
                late = late + 1 if self.now() > job.deadline else 0
                if late > _MOST_LATE:
                    raise ChannelClosedError("The thread that moves the messages of this process has stopped")
        except BaseException:  # Ctrl-C while asleep: the caller takes its memory back, the others continue
            if not is_mine(self._lead):
                self._as_leader(lambda: job.fail(lambda: ChannelClosedError("The call was interrupted")))
            raise
        job.turn = None
        return True

    def _release(self) -> None:
        """Stop leading; a follower that is not done takes over. The order matters: a follower first queues itself,
        then tries the lock; the leader first frees the lock, then looks. So one of the two always sees the other."""
        while True:
            successor = None
            if self._arrivals or self._jobs:
                self._is_led = True
                try:
                    successor = self._progress.hand_over()
                except BaseException:
                    self._is_interrupted = True
                    raise
                self._is_led = False
            self._lead.release()
            if successor is not None:
                successor.send()
                return
            if not self._arrivals or not self._lead.acquire(blocking=False):
                return

    def _as_leader(self, action: Callable[[], None]) -> None:
        """Run `action` as the leader, in this thread or in the leader's, before this returns; raise what it raises.
        Where this interrupts a call of the same thread that leads, that call runs `action` when it continues, after
        this has returned."""
        request = _Request(action)
        try:
            self._soon(request)
            until = time.monotonic() + _ANSWER
            while not (request.is_done or self._is_nested() or request.done.wait(0.01)):
                if self._lead.acquire(blocking=False):
                    self._release()
                elif time.monotonic() > until:
                    # The leader is stuck: its links end here, so that at least the peers continue.
                    self.table.drop(
                        lambda: ChannelClosedError("The thread that moves the messages of this process is stuck")
                    )
                    return
        except BaseException:
            self._unwind()
            raise
        if request.error is not None:
            raise request.error

    def _soon(self, action: Callable[[], None]) -> None:
        """Run `action` as the leader: here if nobody leads, else in the leader's thread, a moment later. A leader that
        is just stopping sees it too: see `_release`."""
        self._arrivals.append(action)
        try:
            if not self._is_nested() and self._lead.acquire(blocking=False):
                self._release()
            else:
                self._poller.wake()
        except BaseException:
            self._unwind()
            raise

    # --- interrupts -----------------------------------------------------------------------------------------------

    def _unwind(self) -> None:
        """End what an exception found under way. Called by each call that can lead, on its way out."""
        if is_mine(self._lead) and (self._is_interrupted or not self._is_led):
            self._recover()

    def _recover(self) -> None:
        """Ctrl-C, or a fault in a reduction, has ended a call of this thread that led: a read may be half accounted
        for, so no link can be trusted any more. Fails all that waits, and gives up the lead. If that is interrupted
        too, the next call of this thread does it again."""
        abort_reason = Aborted(self.rank, "interrupted while it moved data")
        self._is_led = self._is_interrupted = True
        self.table.drop(lambda: abort_reasons.to_error(abort_reason, self.rank))
        self._progress.hand_over()  # ends what had arrived too
        self._jobs.clear()
        self._is_led = self._is_interrupted = False
        while is_mine(self._lead):
            self._lead.release()

    def _is_nested(self) -> bool:
        """Whether a call of this thread, further down its stack, leads: a signal handler or a finaliser has suspended
        it and makes this call. If that call was interrupted and is gone, recovers from it."""
        if self._is_led and is_mine(self._lead):
            if not self._is_interrupted:
                return True
            self._recover()
        return False


def _raise_error_of(job: Job) -> None:
    for half, _ in job.halves():
        if half.error is not None:
            try:
                raise half.error
            finally:
                # Its traceback knows this frame, which must not know it: else all that the caller holds, such as
                # shared memory, would stay until the garbage collector comes.
                half.error = None


def end_all(engines: Sequence[Engine], failed: int, envelope: Envelope, error: BaseException) -> None:
    """End the collective of `envelope` on all engines of a process that share it, because `error` ended it on the one
    with the number `failed`."""
    abort_reason = engines[failed].abort_reason_of(envelope)
    if abort_reason is None and isinstance(error, PeerLostError) and isinstance(error.peer, int):
        abort_reason = Lost(error.peer, error.reason, engines[failed].rank)
    for engine in (*engines[:failed], *engines[failed + 1 :]):
        if abort_reason is not None:
            engine.end(envelope, abort_reason)
        else:  # this process cannot continue, whatever the group: it was interrupted, aborted or closed
            engine.abort(str(error) or type(error).__name__)
