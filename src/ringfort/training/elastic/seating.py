"""`Seating`: how members let learners in: when they copy the state for one, and when they wait for one.

A learner that has caught up is seated while all members are at the same mark. They are at it while they compute the
next step, so this is when they say that they are ready. If the learner is not seated by the end of the computing, they
wait for a moment before they reduce: local sums stay valid in the next epoch, so nothing is lost.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from ringfort.cluster.core.peer_messages import Epoch
from ringfort.training.elastic.protocol import Apply, Fenced
from ringfort.training.elastic.timeline import note

if TYPE_CHECKING:
    from ringfort.training.elastic.participant import Participant

_PAUSE: Final = 2.0
"""Seconds that members wait at most for a learner that has caught up."""
_LOOK: Final = 0.05
"""Seconds between two looks at whether it is still there."""
_AGAIN: Final = 0.5
"""Seconds until they wait again for one that was not seated, doubled after each failure."""
_MOST_AGAIN: Final = 10.0
"""Limit of these doublings. A learner that never is seated may be of a machine that is too busy."""


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

    def look(self, epoch: Epoch) -> None:
        """Say in the next token what learners need."""
        run, donor, most = self._run, self._run.donor, self._run.options.most
        has_room = most is None or len(epoch.holders) < most
        run.replica.wants_image = donor.wants_image
        run.replica.wants_pause = has_room and self._backoff.is_over(time.monotonic()) and donor.has_caught_up

    def applied(self, apply: Apply, epoch: Epoch) -> None:
        """The program has applied a step. Do what the tokens of any member ask for."""
        if any(token.wants_image for token in apply.tokens):
            self._offer(epoch)
        if any(token.wants_pause for token in apply.tokens):
            self._tell(is_ready=True)

    def wait(self, epoch: Epoch) -> None:
        """Wait for learners to be seated, or for more members. Raise `Fenced` when the epoch has ended."""
        run = self._run
        is_below = len(epoch.holders) < run.options.fewest
        if is_below:
            run.journal.waits(run.options.fewest)
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
