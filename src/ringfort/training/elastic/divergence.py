"""`Divergence`: what a member does when copies that should have the same bits do not: of a result, or of the state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ringfort.cluster.core.peer_messages import Epoch
from ringfort.cluster.shown_events import names_of
from ringfort.errors import DivergedError
from ringfort.telemetry.trace import own_trace
from ringfort.training.elastic.exchange import Exchange
from ringfort.training.elastic.protocol import Differs, Mark, Result
from ringfort.training.elastic.state_check import UNKNOWN, Leaves, Verdict, Word, judge, leaves_of

if TYPE_CHECKING:
    from ringfort.training.elastic.participant import Participant

_log = logging.getLogger(__name__)

_TIMES: Final = 2
"""Times in a row that a machine differs before it leaves. Once may be a flipped bit, which is repaired."""


class Divergence:
    """The comparisons of one participant. For the program's thread."""

    def __init__(self, participant: Participant, exchange: Exchange, machine_class: str) -> None:
        self._run = participant
        self._exchange = exchange
        self._class = machine_class
        self.origin = UNKNOWN
        """The step after which this state was last set to that of all others; see `Word.origin`."""
        self._damaged = 0
        """Comparisons in a row at which this member's state was damaged."""
        self._drifters: set[str] = set()
        """Machines of which was said that they drift."""

    # --- results ------------------------------------------------------------------------------------------------------

    def void(self, epoch: Epoch, differs: Differs) -> None:
        """End the epoch, because its members have different copies of a result: the next one reduces the step again.
        The second time in a row, the machines that differ leave: raise `DivergedError` if this is one of them."""
        what = f"result of step {differs.step}"
        if differs.times >= _TIMES:
            self._expel(epoch, differs.ranks, differs.step, what, has_majority=differs.has_majority)
        else:
            who = ", ".join(_names(epoch, differs.ranks))
            self._say(f"The copies of the {what} differ ({who}); it is reduced again")
        self._run.members.give_up(epoch, self._run.replica.fence(0), f"the copies of the {what} differ")

    # --- states -------------------------------------------------------------------------------------------------------

    def compare_states(self, mark: Mark, epoch: Epoch) -> None:
        """Compare the states of all members, which are at `mark`. Members whose state differs take that of the others.

        Raise `DivergedError` at all members if no state has a majority, and at a member that was damaged twice in a
        row.
        """
        mine = self._leaves()
        kind, digest = mine.word
        words = self._exchange.words(self._run.members.context, Word(kind, self.origin, digest))
        verdict = judge(words)
        if verdict.is_same:
            known = words[verdict.root].origin
            self.origin, self._damaged = (mark.step if known == UNKNOWN else known), 0
            return
        self._tell(verdict, self._exchange.leaves(self._run.members.context, mine), mark, epoch)
        me = self._rank(epoch)
        theirs = self._share(verdict.root, mark, is_mine=me == verdict.root)
        is_like_theirs = True
        if me in verdict.damaged or me in verdict.drifted:
            self._run.state.load(theirs.payload)
            is_like_theirs = self._leaves().word[1] == words[verdict.root].digest
        self.origin = mark.step
        self._damaged = self._damaged + 1 if me in verdict.damaged else 0
        if self._damaged >= _TIMES or not is_like_theirs:
            self._expel(epoch, [me], mark.step, f"state after step {mark.step}")

    def _leaves(self) -> Leaves:
        return leaves_of(self._class, self._run.state)

    def _share(self, root: int, mark: Mark, *, is_mine: bool) -> Result:
        """Send the state of `root` to all. Not in the way of learners: they would leave the epoch for it, and members
        of another class would do so at every comparison."""
        state, mine = self._run.state, None
        if is_mine:
            mine = Result(mark.branch, mark.step, mark.cursor, state.image(), is_state=True)
        return self._exchange.share(self._run.members.context, root, mine, state)

    def _tell(self, verdict: Verdict, leaves: Sequence[Leaves], mark: Mark, epoch: Epoch) -> None:
        """Say who differs in what. Raise `DivergedError` if no state has a majority."""
        run, theirs = self._run, leaves[verdict.root]
        where = [theirs.differences(one) for one in leaves]
        if not verdict.has_majority:
            told = run.checkpoints.save_apart(mark, epoch.number, run.state.image())
            what = f"state after step {mark.step} ({next(where[rank] for rank in verdict.damaged if where[rank])})"
            self._expel(epoch, verdict.damaged, mark.step, what, has_majority=False, told=told)
        for rank, name in zip(verdict.damaged, _names(epoch, verdict.damaged), strict=True):
            what = f"The state of {name} after step {mark.step} differs from that of the others in {where[rank]}"
            self._say(f"{what}; it takes theirs")
        for rank, name in zip(verdict.drifted, _names(epoch, verdict.drifted), strict=True):
            what = f"The state of {name} ({leaves[rank].kind}) has drifted up to step {mark.step} in {where[rank]}"
            if name in self._drifters:  # it drifts again and again
                _log.debug("%s", what)
            else:
                run.journal.say(f"{what}; from now on it takes that of machines with {theirs.kind}")
            self._drifters.add(name)

    # --- leaving ------------------------------------------------------------------------------------------------------

    def _expel(
        self, epoch: Epoch, ranks: Sequence[int], step: int, what: str, *, has_majority: bool = True, told: str = ""
    ) -> None:
        """The machines of `ranks` leave the run; without a majority, all do. Raise the error if this one does."""
        error = DivergedError(step, what, _names(epoch, ranks), has_majority=has_majority, told=told)
        if self._rank(epoch) in ranks or not has_majority:
            own_trace().event("diverged", str(error))
            self._run.close(f"its {what} differs from that of the others")
            raise error
        self._say(str(error))

    def _say(self, text: str) -> None:
        self._run.journal.say(text, logging.WARNING)
        own_trace().event("diverged", text)

    def _rank(self, epoch: Epoch) -> int:
        return epoch.holders.index(self._run.members.node.peer_id)


def _names(epoch: Epoch, ranks: Sequence[int]) -> list[str]:
    names = list(names_of(epoch).values())
    return [names[rank] for rank in ranks]
