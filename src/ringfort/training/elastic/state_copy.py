"""`StateCopy`: copies the state of a run that goes on without this program, and follows it until an epoch seats it."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from math import inf
from typing import TYPE_CHECKING, Final

from ringfort.cluster.core.peer_messages import Epoch
from ringfort.errors import DistributedError, InvalidArgumentError, NonFiniteStepError, StateTransferError
from ringfort.training.elastic.donor_search import DonorSearch
from ringfort.training.elastic.exchange import nonfinite_of
from ringfort.training.elastic.learner import Fetched, Learner, Replayed
from ringfort.training.elastic.practice import Practice
from ringfort.training.elastic.protocol import Compute, Mark
from ringfort.training.elastic.state_check import UNKNOWN
from ringfort.training.elastic.state_tree import Image, hashed
from ringfort.training.elastic.step import Done, Turn
from ringfort.training.elastic.timeline import note
from ringfort.training.elastic.transfer import size_limit

if TYPE_CHECKING:
    from ringfort.training.elastic.participant import Participant

_log = logging.getLogger(__name__)

_LOOK: Final = 0.2
"""Seconds between two looks of a peer that is in no epoch, if no event comes before."""
_CONNECT: Final = 5.0
"""Seconds for the first member to answer."""
_FETCH: Final = 600.0
"""Seconds to fetch the state."""


class StateCopy:
    """The learning of one participant. `interrupt` is for any thread, the rest for the program's."""

    def __init__(self, participant: Participant, patience: float) -> None:
        """After `patience` seconds in which it has found nobody, it says why."""
        self._run = participant
        self._explain_at = time.monotonic() + patience
        self._learner: Learner | None = None
        self.is_copy = False
        """Whether the state is a copy with which no epoch has seated this program yet."""

    def interrupt(self) -> None:
        """End the wait for donors: this program has the state that it needs, or leaves."""
        learner = self._learner
        if learner is not None:
            learner.close()

    def follow(self, left: Epoch | None) -> Iterator[Turn | Done]:
        """Copy the state and yield the results that follow it, and micro-batches for practice, until an epoch other
        than `left` seats this program, the run has finished, or no member can be asked. `left` is the epoch of a branch
        that gives way."""
        run = self._run
        seen = run.members.news
        sources = run.members.sources()
        if not sources:
            if not self._is_seated(left):
                self._explain()
                self._serve()
                run.members.wait_for_news(seen, _LOOK)
            return
        self._learner = learner = Learner({}, limit=size_limit(run.state.manifest().nbytes))
        search = DonorSearch(learner, run.members)
        try:
            if self._is_seated(left):  # nobody interrupts the learner any more
                return
            note("%d members may have the state", len(sources))
            search.start(sources)
            if search.has_found(_CONNECT):
                yield from self._follow(learner, sources[0].epoch, left)
        except DistributedError as exc:
            if isinstance(exc, (InvalidArgumentError, NonFiniteStepError)):
                raise
            note("copying the state failed: %s", exc)
            _log.info("Copying the state of the run failed: %s", exc)
        finally:
            self._learner = None
            search.close()
            learner.close()

    def _serve(self) -> None:
        """Offer the state to a member of the last epoch that has given its own up: no epoch may follow without it."""
        run, mark, last = self._run, self._run.replica.mark, self._run.last_epoch
        if run.donor.wants_image and mark.branch and last is not None and not self.is_copy:
            run.donor.offer(run.state.image(), mark, last)

    def _explain(self) -> None:
        """Say once why this program has not found the run: it was refused for its version, for example."""
        if time.monotonic() > self._explain_at and not self._run.replica.mark.branch:
            self._explain_at = inf
            self._run.journal.say(f"Still waiting. {self._run.members.node.why_alone()}", logging.WARNING)

    def _follow(self, learner: Learner, epoch: Epoch, left: Epoch | None) -> Iterator[Turn | Done]:
        """`epoch` is that of the donors."""
        run, replica = self._run, self._run.replica
        run.trace.follows()
        is_near, replayed = self._look_for_missed(learner)
        fetched = None if is_near else (yield from self._fetch(learner, left))
        if self._is_seated(left):
            return
        if fetched is not None:
            epoch = self._take(fetched)
        else:
            self._check_later(epoch)
            replica.learn(replica.mark, tuple(replica.history))  # what it held belongs to no epoch any more
        self.is_copy = True
        # Right after `learn`: an epoch that was accepted with the earlier state is void from here on.
        run.members.learned(epoch, replica.fence(0), is_ready=False)
        # Without a layout nothing can be practised: a sum of other gradients than the run's must not exist.
        practice = Practice(was_slow=run.was_slow, is_measured=run.local.layout is None or run.meter.speed > 0)
        is_told = False
        while not self._is_seated(left) and not run.is_finished and not run.is_going:
            now, part = time.monotonic(), self._free_part()
            is_wanted = practice.is_fit or run.members.seated < run.options.fewest
            is_due = not is_wanted and part is not None and practice.is_due(now, replica.mark.step)
            is_idle = is_told if is_wanted else not is_due
            if replayed is None:
                replayed = learner.next_result(replica.mark, timeout=_LOOK if is_idle else 0.0, wants_seat=is_wanted)
            if replayed is not None:
                is_told = False
                yield self._replay(replayed, epoch)
                replayed = None
            elif is_due:
                assert part is not None
                yield from self._practise(practice, part, replica.mark)
            elif is_wanted and not is_told:
                self._back_from_slow()
                run.members.learned(epoch, replica.fence(0), is_ready=True)
                note("ready at step %d", replica.mark.step)
                is_told = True
            run.others.announce(now)

    def _fetch(self, learner: Learner, left: Epoch | None) -> Generator[Turn | Done, None, Fetched]:
        """Fetch the state. While it comes, a program that has none yet warms up: with its own weights, in no sum."""
        run, replica = self._run, self._run.replica
        fetching = learner.fetching(self._check, known=self._known(), timeout=_FETCH)
        with closing(fetching):
            while True:
                try:
                    described = next(fetching)
                except StopIteration as done:
                    return done.value
                is_new = not replica.mark.branch and not replica.covered  # one with a local sum must not add to it
                has_steps = not run.ends_with(described.mark)  # in a finished run it would be left inside a step
                practice = Practice(was_slow=run.was_slow, is_measured=run.meter.speed > 0)
                layout = described.layout
                if is_new and has_steps and layout is not None and run.local.fits(layout):
                    run.local.prepare(layout)
                    while practice.is_due(time.monotonic(), described.mark.step) and not self._is_seated(left):
                        yield from self._practise(practice, 0, described.mark)

    def _practise(self, practice: Practice, part: int, mark: Mark) -> Iterator[Turn]:
        """Have the program compute a micro-batch of the step after `mark`, and measure it."""
        run = self._run
        run.meter.forget()
        yield Turn(Compute(mark.step + 1, part, run.data.span(mark.cursor)), mark)
        run.replica.speed = run.meter.speed
        if run.meter.speed:
            seconds = run.meter.overhead / 1e6 + run.data.microbatch / run.meter.speed
            practice.done(time.monotonic(), mark.step, seconds)

    def _free_part(self) -> int | None:
        """Return a micro-batch of the next step for practice. It stays in no sum, unless this program is seated before
        the step is sealed, and the step has as many samples as one member alone would open: then it counts."""
        run, mark = self._run, self._run.replica.mark
        parts = run.data.parts(run.data.span(mark.cursor))
        return next((part for part in range(parts) if part not in run.replica.covered), None)

    def _back_from_slow(self) -> None:
        if self._run.was_slow:
            self._run.was_slow = False
            self._run.journal.say("This machine is fast enough again and asks for its place in the run")

    def _look_for_missed(self, learner: Learner) -> tuple[bool, Replayed | None]:
        """Return whether members have all results that this program missed, and those are no larger than the state; and
        the first of them, if there is one."""
        run, mark = self._run, self._run.replica.mark
        if not mark.branch or run.local.layout is None:
            return False, None
        try:
            first = learner.next_result(mark, timeout=0.0)
        except StateTransferError as exc:
            note("an image is needed: %s", exc)
            return False, None
        missed = 0 if first is None else (first.behind + 1) * first.nbytes
        note("%d bytes of results were missed", missed)
        is_near = missed <= run.state.manifest().nbytes
        return is_near, first if is_near else None

    def _known(self) -> list[Image]:
        run = self._run
        return [hashed(run.state.image())] if run.replica.mark.branch else []

    def _take(self, fetched: Fetched) -> Epoch:
        """Take over a state. Return the epoch of its donor."""
        run, replica = self._run, self._run.replica
        note("image of step %d fetched", fetched.mark.step)
        if fetched.mark != replica.mark:
            self._load(fetched)
        else:
            replica.learn(replica.mark, tuple(replica.history))
        if fetched.layout is not None:
            run.local.prepare(fetched.layout)
        return fetched.epoch

    def _replay(self, replayed: Replayed, epoch: Epoch) -> Done:
        run = self._run
        if run.local.layout is None:  # the donor did not know it yet when it described its image
            raise StateTransferError("the gradients of the run are not known yet", {})
        if not replayed.is_finite and run.raises_nonfinite:
            raise NonFiniteStepError(replayed.result.step, (), nonfinite_of(replayed.result.payload))
        run.meter.end_step(is_replayed=True)
        run.replica.learn(replayed.after, [(replayed.before, replayed.result)])
        run.donor.begin(replayed.after)  # it keeps nothing: nobody asks a learner, and the next results need the memory
        note("step %d replayed, %d behind", replayed.result.step, replayed.behind)
        run.trace.replayed(replayed.result.step)
        run.members.learned(epoch, run.replica.fence(0), is_ready=False)
        return run.done(replayed.result, replayed.before, is_finite=replayed.is_finite)

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
        run.divergence.origin = UNKNOWN
        run.replica.learn(theirs, ())
        run.origin.has_copy()
        run.donor.begin(theirs)
        what = f"the state of step {theirs.step} ({fetched.image.manifest.nbytes / 1e6:.1f} MB)"
        run.journal.say(f"Copied {what}")
        run.trace.event("learner", f"{platform.node()} has copied {what}")

    def _check(self, fetched: Fetched) -> None:
        """Raise an error if this program cannot use the state, or needs none of it."""
        why = self._run.state.misfit(fetched.image.manifest)
        if why:
            raise InvalidArgumentError("state", "the run's", f"differs from this program's: {why}")
        mine, theirs = self._run.replica.mark, fetched.mark
        has_ended = self.is_copy or mine.lineage in fetched.epoch.ended  # a copy is no run either
        is_run = mine.branch == theirs.branch or (bool(mine.branch) and not has_ended)
        if is_run and _rank(mine) > _rank(theirs):
            raise StateTransferError(f"this program is at step {mine.step}, others at step {theirs.step}", {})
        self._check_later(fetched.epoch)

    def _check_later(self, epoch: Epoch) -> None:
        """Raise an error if the run has not gone on without this program: what it holds counts until a later epoch
        without it has settled the step. (With a copy it holds nothing, and its last epoch may be of another run.)"""
        if self.is_copy:
            return
        mine, last = self._run.replica.mark, self._run.last_epoch
        is_earlier = last is not None and mine.lineage in epoch.lineages and epoch.number <= last.number
        if is_earlier or self._run.members.node.peer_id in epoch.peers:
            raise StateTransferError(f"the run has not gone on without this program: others are in {epoch}", {})

    def _is_seated(self, left: Epoch | None) -> bool:
        epoch = self._run.members.epoch
        return epoch is not None and epoch != left


def _rank(mark: Mark) -> tuple[int, str]:
    """Of two branches that meet, the one that is higher here stays."""
    return mark.step, mark.branch
