"""`StateCopy`: copies the state of a run that goes on without this program, and follows it until an epoch seats it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ringfort.cluster.core.peer_messages import Epoch
from ringfort.errors import DistributedError, InvalidArgumentError, NonFiniteStepError, StateTransferError
from ringfort.training.elastic.learner import Fetched, Learner, Replayed
from ringfort.training.elastic.protocol import Mark
from ringfort.training.elastic.state_tree import hashed
from ringfort.training.elastic.step import Done

if TYPE_CHECKING:
    from ringfort.training.elastic.participant import Participant

_log = logging.getLogger(__name__)

_LOOK: Final = 0.2
"""Seconds between two looks of a peer that is in no epoch."""
_FETCH: Final = 600.0
"""Seconds to fetch the state."""
_GRADIENTS: Final = 64 << 20
"""Bytes by which a result may be larger than four times the state."""


class StateCopy:
    """The learning of one participant. `interrupt` is for any thread, the rest for the program's."""

    def __init__(self, participant: Participant) -> None:
        self._run = participant
        self._learner: Learner | None = None
        self.is_copy = False
        """Whether the state is a copy with which no epoch has seated this program yet."""

    def interrupt(self) -> None:
        """End the wait for donors: this program has the state that it needs, or leaves."""
        learner = self._learner
        if learner is not None:
            learner.close()

    def follow(self, left: Epoch | None) -> Iterator[Done]:
        """Copy the state and yield the results that follow it, until an epoch other than `left` seats this program, the
        run has finished, or no member can be asked. `left` is the epoch of a branch that gives way."""
        run = self._run
        if run.members.wait_for_epoch(_LOOK) and left is None:
            return
        donors = run.members.donors(left)
        if not donors:
            return
        limit = 4 * run.state.manifest().nbytes + _GRADIENTS
        self._learner = learner = Learner(donors, limit=limit)
        try:
            if not self._is_seated(left):  # otherwise nobody interrupts the learner
                yield from self._follow(learner, left)
        except DistributedError as exc:
            if isinstance(exc, (InvalidArgumentError, NonFiniteStepError)):
                raise
            _log.info("Copying the state of the run failed: %s", exc)
        finally:
            self._learner = None
            learner.close()

    def _follow(self, learner: Learner, left: Epoch | None) -> Iterator[Done]:
        run, replica = self._run, self._run.replica
        known = [hashed(run.state.image())] if replica.mark.branch else []
        fetched = learner.fetch(self._check, known=known, timeout=_FETCH)
        if self._is_seated(left):
            return
        if fetched.mark != replica.mark:
            self._load(fetched)
        else:
            replica.learn(replica.mark, tuple(replica.history))  # the run went on without what it held
        self.is_copy = True
        if fetched.layout is not None:
            run.local.prepare(fetched.layout)
        # Right after `learn`: an epoch that was accepted with the earlier state is void from here on.
        run.members.learned(fetched.epoch, replica.fence(0), is_ready=False)
        is_told = False
        while not self._is_seated(left) and not run.is_finished and not run.is_leaving:
            replayed = learner.next_result(replica.mark, timeout=_LOOK if is_told else 0.0)
            if replayed is not None:
                is_told = False
                yield self._replay(replayed, fetched.epoch)
            elif not is_told:
                run.members.learned(fetched.epoch, replica.fence(0), is_ready=True)
                is_told = True
            run.others.announce(time.monotonic())

    def _replay(self, replayed: Replayed, epoch: Epoch) -> Done:
        run = self._run
        if run.local.layout is None:  # the donor did not know it yet when it described its image
            raise StateTransferError("the gradients of the run are not known yet", {})
        if not replayed.is_finite and run.raises_nonfinite:
            raise NonFiniteStepError(replayed.result.step, ())
        run.replica.learn(replayed.after, [(replayed.before, replayed.result)])
        run.members.learned(epoch, run.replica.fence(0), is_ready=False)
        return run.done(replayed.result, is_finite=replayed.is_finite)

    def _load(self, fetched: Fetched) -> None:
        run, mine, theirs = self._run, self._run.replica.mark, fetched.mark
        if mine.branch not in ("", theirs.branch):
            told = run.checkpoints.save_apart(mine, fetched.epoch.number, run.state.image())
            run.journal.say(
                f"Two runs of this name have met. This one, at step {mine.step}, gives way to the other, at step "
                f"{theirs.step}; {told}",
                logging.WARNING,
            )
        run.state.load(fetched.image)
        run.replica.learn(theirs, ())
        run.journal.say(f"Copied the state of step {theirs.step} ({fetched.image.manifest.nbytes / 1e6:.1f} MB)")

    def _check(self, fetched: Fetched) -> None:
        """Raise an error if this program cannot use the state, or needs none of it."""
        why = self._run.state.manifest().differences(fetched.image.manifest)
        if why:
            raise InvalidArgumentError("state", "the run's", f"differs from this program's: {why}")
        mine, theirs, last = self._run.replica.mark, fetched.mark, self._run.last_epoch
        has_ended = self.is_copy or mine.lineage in fetched.epoch.ended  # a copy is no run either
        is_run = mine.branch == theirs.branch or (bool(mine.branch) and not has_ended)
        if is_run and _rank(mine) > _rank(theirs):
            raise StateTransferError(f"this program is at step {mine.step}, others at step {theirs.step}", {})
        # What this program holds counts until a later epoch without it has settled the step.
        is_earlier = last is not None and mine.lineage in fetched.epoch.lineages and fetched.epoch.number <= last.number
        if is_earlier or self._run.members.node.peer_id in fetched.epoch.peers:
            raise StateTransferError(f"the run has not gone on without this program: others are in {fetched.epoch}", {})

    def _is_seated(self, left: Epoch | None) -> bool:
        epoch = self._run.members.epoch
        return epoch is not None and epoch != left


def _rank(mark: Mark) -> tuple[int, str]:
    """Of two branches that meet, the one that is higher here stays."""
    return mark.step, mark.branch
