"""`Founding`: with which state a branch of the run begins, if nobody is in one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringfort.training.elastic.protocol import Mark, Result, Standstill

if TYPE_CHECKING:
    from ringfort.training.elastic.participant import Participant


class Founding:
    """What one participant can found a branch with. `fence` is for the node's callback thread, the rest for the
    program's."""

    def __init__(self, participant: Participant) -> None:
        self._run = participant
        self._fork: tuple[int, int] | None = None
        """Step and cursor of a state in memory whose run has ended."""

    def fence(self, epoch: int, ended: tuple[str, ...]) -> Standstill:
        """Fence the replica. If its lineage is one of those that have `ended`, its state is only good for founding."""
        replica = self._run.replica
        stands = replica.fence(epoch)
        if stands.lineage and stands.lineage in ended:
            mark = stands.mark
            if mark.branch:
                self._fork = (mark.step, mark.cursor)
                replica.saved = max(replica.saved, mark.step)
            replica.learn(Mark(), ())
            stands = replica.fence(epoch)
        return stands

    def found(self, branch: str) -> Result:
        """Return the first state of a branch: that of a run that has ended, the newest checkpoint, or what the program
        began with."""
        run, saved = self._run, self._run.checkpoints.saved
        if self._fork is not None and (saved is None or self._fork[0] >= saved.stamp.step):
            step, cursor = self._fork
            image = run.state.image()
        elif saved is not None:
            step, cursor, image = saved.stamp.step, saved.stamp.cursor, saved.read()
            run.journal.say(f"The run continues with {saved.path}")
        else:
            step, cursor, image = 0, 0, run.state.image()
        return Result(branch, step, cursor, image, is_state=True)

    def founded(self, result: Result) -> None:
        """A branch was founded with this state."""
        self._run.state.load(result.payload)
        self._fork, self._run.checkpoints.saved = None, None
