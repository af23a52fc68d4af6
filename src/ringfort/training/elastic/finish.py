"""`Finish`: the end of a run, for machines that come late: members still serve them for a while, and a machine finds
the final state on its own disk."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from ringfort.training.elastic.protocol import Mark

if TYPE_CHECKING:
    from ringfort.cluster.core.peer_messages import Epoch
    from ringfort.training.elastic.participant import Participant

_LINGER: Final = 30.0
"""Seconds for which a finished member still serves learners, and for which a machine with the final state on its disk
waits for others that lack it to be enough for an epoch."""
_EXPECT: Final = 3.0
"""Seconds for which it waits for one that it has not seen, or that has not asked yet."""
_LOOK: Final = 0.02


class Finish:
    """The end of one participant's run. For the program's thread."""

    def __init__(self, participant: Participant) -> None:
        self._run = participant
        self._begun_at = time.monotonic()

    def linger(self, epoch: Epoch | None) -> None:
        """Serve learners of a finished run, whose last epoch is given, for a bounded time. The state must be that of
        the last step."""
        run, begin = self._run, time.monotonic()
        while epoch is not None and not run.is_leaving and time.monotonic() < begin + _LINGER:
            if run.donor.wants_image:
                run.donor.offer(run.state.image(), run.replica.mark, epoch)
            is_expecting = time.monotonic() < begin + _EXPECT and run.members.has_newcomers()
            if not run.donor.learners and not is_expecting:
                return
            time.sleep(_LOOK)

    def take_saved(self) -> None:
        """Take the final state from this machine's disk, if it is there and nobody needs it: otherwise the run would
        wait for members that have finished long ago. With other machines an epoch is founded, in which they get it."""
        run, saved = self._run, self._run.checkpoints.saved
        if saved is None or not run.ends_with(saved.stamp.mark) or run.replica.mark.branch or run.members.seated:
            return  # where members are, they know better
        waited = time.monotonic() - self._begun_at
        if waited < _EXPECT or (waited < _LINGER and run.members.has_others()):
            return
        run.state.load(saved.read())
        stamp, run.checkpoints.saved = saved.stamp, None
        run.replica.learn(Mark(stamp.branch, stamp.step, stamp.chain, stamp.cursor), ())
        run.journal.say(f"The run has finished with step {stamp.step}; its final state is from {saved.path}")
