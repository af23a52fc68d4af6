"""`Copying`: how a simulated program copies the state of a run that goes on without it, as `StateCopy` does: the state
block by block, then the results that were sealed since, until an epoch seats it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ringfort.cluster.core.peer_messages import Epoch
from ringfort.training.elastic.protocol import Mark
from tests.helpers.elastic_numbers import applied

if TYPE_CHECKING:
    from tests.helpers.elastic_program import Program

BLOCKS: Final = 4
"""Blocks of the state."""
ALONE: Final = 0.2
"""Seconds in no epoch before a program looks for donors."""
NOTES: Final = 0.2
"""How likely a program is to have heard, at each look, of a run that is ahead of its own."""


@dataclass(eq=False)
class _Copy:
    """One attempt."""

    epoch: Epoch
    """The donors' epoch."""
    mark: Mark
    state: int
    donors: list[Program]
    left: Epoch | None
    """The epoch of a run that gives way."""
    blocks: int = 0
    is_ready: bool = False


class Copying:
    """The copying of one program."""

    def __init__(self, program: Program) -> None:
        self._me = program
        self._world = program.world
        self._copy: _Copy | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether it copies now."""
        return self._copy is not None

    def has_caught_up_with(self, donor: Program) -> bool:
        """Return whether this program has all results of a member that it copies from."""
        copy = self._copy
        return copy is not None and copy.is_ready and donor in copy.donors and self._world.reaches(donor, self._me)

    def gives_way(self, epoch: Epoch) -> bool:
        """Return whether it copies the state of another run, and takes no part in `epoch` any more."""
        return self._copy is not None and self._copy.left == epoch

    def interrupt(self) -> None:
        """It is seated with the state that it has."""
        self._copy = None

    def look(self) -> None:
        """Begin to copy if there is something to copy. Repeated for as long as the program lives."""
        self._world.later(self._me, 0.03, 0.08, self.look)
        if self._copy is None:
            self._begin()

    def _begin(self) -> None:
        me, left = self._me, self._me.peer.core.epoch
        if left is None and self._world.network.now < me.alone_since + ALONE:
            return
        sources = {source.peer for source in me.peer.core.state_sources()}
        others = [p for p in self._world.living() if p.id in sources and self._world.reaches(me, p)]
        donors = [p for p in others if p.replica.mark.branch and p.offers is not None]
        if not donors:
            return
        first = self._world.random.choice(donors)
        mine, theirs = me.replica.mark, first.replica.mark
        is_other = mine.branch not in ("", theirs.branch)
        epoch = first.offers
        assert epoch is not None
        has_ended = me.voter.is_learner or mine.lineage in epoch.ended  # a copy is no run either
        is_run = is_other and not has_ended
        if (is_run or mine.branch == theirs.branch) and (mine.step, mine.branch) > (theirs.step, theirs.branch):
            return
        if (left is not None or is_other) and not (is_other and self._world.random.random() < NOTES):
            return
        last = None if me.voter.is_learner else me.last_epoch
        if last is not None and mine.lineage in epoch.lineages and epoch.number <= last.number:
            return  # the donor is behind
        if left is not None:
            me.end()  # it takes no part in the epoch any more
        same = [p for p in donors if p.offers == epoch]
        self._copy = _Copy(epoch, theirs, first.settled_state, same, left)
        self._next(self._copy)

    def _next(self, copy: _Copy) -> None:
        self._world.later(self._me, 0.002, 0.008, self._go_on, copy)
        self._world.reach(self._me, "transfer" if copy.blocks < BLOCKS else "replay")

    def _go_on(self, copy: _Copy) -> None:
        """One more block, or one more result."""
        if self._copy is not copy:
            return
        copy.donors = [p for p in copy.donors if p.peer.alive]
        epoch = self._me.peer.core.epoch
        if not copy.donors or (epoch is not None and epoch != copy.left):
            self._end(copy)
        elif not any(self._world.reaches(self._me, p) for p in copy.donors):
            self._next(copy)  # the connections are silent
        elif copy.blocks < BLOCKS:
            copy.blocks += 1
            if copy.blocks == BLOCKS:
                self._load(copy)
            self._next(copy)
        else:
            self._replay(copy)

    def _load(self, copy: _Copy) -> None:
        me = self._me
        me.replica.learn(copy.mark, ())
        me.void = ""
        me.state = copy.state
        me.recent.clear()
        self._learned(copy, is_ready=False)

    def _replay(self, copy: _Copy) -> None:
        me, mark = self._me, self._me.replica.mark
        donors = [p for p in copy.donors if self._world.reaches(me, p)]
        found = next((kept for p in donors for kept in p.recent if kept[0] == mark), None)
        if found is not None:
            before, after, result = found
            me.replica.learn(after, [(before, result)])
            me.state = applied(me.state, result)
            self._world.check_result(me, result)
            me.recent.append(found)
            self._learned(copy, is_ready=False)
        elif not any(p.replica.mark.branch == mark.branch and p.replica.mark.step <= mark.step for p in donors):
            self._end(copy)  # no donor has what follows
            return
        elif not copy.is_ready:
            self._learned(copy, is_ready=True)
        if self._copy is copy:
            self._next(copy)

    def _learned(self, copy: _Copy, *, is_ready: bool) -> None:
        copy.is_ready, copy.left = is_ready, None
        self._world.call(self._me.peer, "learned", copy.epoch, self._me.run_state(is_ready=is_ready))

    def _end(self, copy: _Copy) -> None:
        """This attempt has failed, or is not needed any more."""
        self._copy = None
        if copy.left is not None and copy.left == self._me.peer.core.epoch:
            self._world.form_again(copy.left)  # its own run goes on
