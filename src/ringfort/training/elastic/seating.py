"""`Seating`: how members let learners in: when they copy the state for one, and when they wait for one.

A learner that has caught up is seated while all members are at the same mark. They are at it while they compute the
next step, so this is when they say that they are ready. If the learner is not seated by the end of the computing, they
wait for a moment before they reduce: local sums stay valid in the next epoch, so nothing is lost. In a long step a
learner may come and catch up at any time, so they copy the state and say that they are ready in the middle too.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from ringfort.cluster.core.peer_messages import Epoch
from ringfort.training.elastic.protocol import Apply, Fenced, Mark
from ringfort.training.elastic.timeline import note
from ringfort.transport.locks import Thread

if TYPE_CHECKING:
    from ringfort.training.elastic.participant import Participant

_PAUSE: Final = 2.0
"""Seconds that members wait at most for a learner that has caught up."""
_REST: Final = 2.0
"""Seconds that a member rests at most in one step for learners that cannot keep up."""
_LOOK: Final = 0.05
"""Seconds between two looks at whether it is still there."""
_JOIN: Final = 5.0
"""Seconds that a thread may take to get memory for an image."""
_AGAIN: Final = 0.5
"""Seconds until they wait again for one that was not seated, doubled after each failure."""
_MOST_AGAIN: Final = 10.0
"""Limit of these doublings. A learner that never is seated may be of a machine that is too busy."""


_LONG: Final = 0.5
"""Seconds of a step from which on members do something for learners in the middle of it. In shorter ones it would cost
more than it gains: images of the same step serve a learner best, and saying that one is ready takes time too."""


class Backoff:
    """When members may wait for a learner again. Pure."""

    def __init__(self) -> None:
        self._failures = 0
        self._not_before = 0.0

    def is_over(self, now: float) -> bool:
        """Return whether they may."""
        return now >= self._not_before

    def failed(self, now: float) -> None:
        """They have waited in vain."""
        self._not_before = now + min(_MOST_AGAIN, _AGAIN * 2**self._failures)
        self._failures = min(self._failures + 1, 10)

    def succeeded(self) -> None:
        """A learner was seated."""
        self._failures = 0


class Seating:
    """One member's part. For the program's thread."""

    def __init__(self, run: Participant) -> None:
        self._run = run
        self._backoff = Backoff()
        self._wanted_in: Epoch | None = None
        """The epoch in which an image is wanted that was not made yet."""
        self._preparing: Thread | None = None
        self._has_begun = False
        self._open_at: Mark | None = None
        """The mark at which it said, in the middle of a step, that it is ready."""

    def between(self, epoch: Epoch) -> None:
        """The program computes a micro-batch next. Do what a learner needs that would otherwise wait for the end of the
        step, in which the state does not change: copy the state for it, and let it in when it has caught up."""
        run = self._run
        if not run.donor.has_learners:
            return
        if run.donor.wants_image:
            self._want_image(epoch)
            if self._is_long and not self._is_preparing and run.state.is_copied_between:
                self._offer(epoch)
        elif self._open_at != run.replica.mark and run.donor.has_followers and self._is_long and self._has_room(epoch):
            self._open_at = run.replica.mark
            self._tell(is_ready=True)

    def end_computing(self) -> None:
        """The members reduce next: who were let in now would disturb them."""
        if self._open_at == self._run.replica.mark:
            self._tell(is_ready=False)
        self._open_at = None

    @property
    def _is_preparing(self) -> bool:
        return self._preparing is not None and self._preparing.is_alive()

    @property
    def _is_long(self) -> bool:
        return self._run.meter.period >= _LONG * 1e6

    def _has_room(self, epoch: Epoch) -> bool:
        most = self._run.options.most
        return (most is None or len(epoch.holders) < most) and self._backoff.is_over(time.monotonic())

    def look(self, epoch: Epoch) -> None:
        """Say in the next token what learners need."""
        if not self._has_begun and self._run.options.checkpoint is not None:
            self._prepare(1)  # before the first checkpoint is due
        self._has_begun = True
        self._run.state.memory.trim()
        run, donor = self._run, self._run.donor
        run.replica.wants_image = donor.wants_image
        run.replica.is_preparing = self._is_preparing or self._wanted_in != epoch
        run.replica.wants_pause = donor.has_caught_up and self._has_room(epoch)

    def applied(self, apply: Apply, epoch: Epoch) -> None:
        """The program has applied a step. Do what the tokens of any member ask for. An image is made when every member
        has memory for it: one that has none would hold up all others while they wait."""
        if not any(token.wants_image for token in apply.tokens):
            self._wanted_in = None
        elif any(token.is_preparing for token in apply.tokens):
            self._want_image(epoch)
        else:
            self._offer(epoch)
        if any(token.wants_pause for token in apply.tokens):
            self._open_at = apply.after
            self._tell(is_ready=True)
        elif self._run.donor.has_learners:
            self._rest(epoch)

    def _rest(self, epoch: Epoch) -> None:
        """Wait for learners that cannot keep up. The others wait for this member in the next reduction."""
        run = self._run
        with run.trace.left_out():
            seconds = run.donor.rest(_REST, lambda: run.is_going or run.members.has_ended(epoch))
        if seconds:
            run.meter.aside(seconds)  # it is not slow
            note("rested %.2f s for a learner", seconds)

    def close(self) -> None:
        """Wait for what is under way."""
        if self._preparing is not None:
            self._preparing.join(_JOIN)

    def _want_image(self, epoch: Epoch) -> None:
        """Get memory for an image ready, if that was not begun in this epoch."""
        if self._wanted_in != epoch:
            self._wanted_in = epoch
            self._prepare(1 if self._run.options.checkpoint is None else 2)

    def _prepare(self, images: int) -> None:
        """Get memory for so many images ready, in a thread."""
        state = self._run.state
        if not self._is_preparing:
            arguments = (state.manifest().nbytes, images)
            self._preparing = Thread(state.memory.reserve, arguments, name="ringfort-image-memory")
            self._preparing.start()

    def wait(self, epoch: Epoch) -> None:
        """Wait for learners to be seated, or for more members. Raise `Fenced` when the epoch has ended."""
        with self._run.trace.left_out():
            self._wait(epoch)

    def _wait(self, epoch: Epoch) -> None:
        run = self._run
        is_below = len(epoch.holders) < run.options.fewest
        if is_below:
            run.journal.waits(run.options.fewest)
            run.trace.pauses(f"Paused: {len(epoch.holders)} of at least {run.options.fewest} members are here")
            run.is_busy = False  # nothing is to be finished if a signal comes now
        self._tell(is_ready=True)
        deadline = time.monotonic() + _PAUSE
        while (left := deadline - time.monotonic()) > 0 and not run.is_going:
            if run.members.wait_for_end(epoch, min(left, _LOOK)):
                self._backoff.succeeded()
                raise Fenced(f"{epoch} has ended")
            if run.donor.wants_image:  # below the minimum no step ends, with which one would be made
                self._offer(epoch)
            if run.replica.wants_pause and not run.donor.has_caught_up:
                break  # the learner has gone
        if not is_below:
            run.donor.doubt()
            self._backoff.failed(time.monotonic())
            self._tell(is_ready=False)
            note("waited for a learner in vain")
        run.is_busy = True

    def _offer(self, epoch: Epoch) -> None:
        run = self._run
        run.donor.offer(run.state.image(), run.replica.mark, epoch)
        note("image of step %d made", run.replica.mark.step)

    def _tell(self, *, is_ready: bool) -> None:
        self._run.members.tell(self._run.replica.fence(0), is_ready=is_ready)
