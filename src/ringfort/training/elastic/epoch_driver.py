"""`EpochDriver`: carries out the instructions of the protocol, `Replica.epoch`, on the group of one epoch."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Final

from ringfort.cluster.core.peer_messages import Epoch
from ringfort.cluster.shown_events import names_of
from ringfort.errors import DistributedError, NonFiniteStepError
from ringfort.training.elastic.absence import SLOW
from ringfort.training.elastic.exchange import Exchange, nonfinite_of
from ringfort.training.elastic.memory_needs import MemoryNeeds
from ringfort.training.elastic.protocol import (
    Apply,
    Compute,
    Fenced,
    Gather,
    Instruction,
    Pause,
    Reduce,
    Report,
    Result,
    Share,
    Token,
)
from ringfort.training.elastic.sample_order import Array
from ringfort.training.elastic.slow_members import SlowMembers
from ringfort.training.elastic.step import Done, Turn
from ringfort.training.elastic.timeline import note
from ringfort.training.elastic.token_codec import TokenCodec

if TYPE_CHECKING:
    from ringfort.training.elastic.participant import Participant

_log = logging.getLogger(__name__)

_CALM: Final = 5
"""Steps of an epoch after which its links are measured, for the choice of algorithms. That takes a few to 100 ms, while
members that have lost or found one wait for the first step."""


class EpochDriver:
    """The epochs of one participant, one after the other. For the program's thread."""

    def __init__(self, participant: Participant) -> None:
        self._run = participant
        self.exchange = Exchange(participant.local, TokenCodec(participant.data.most_parts))
        self.is_reducing = False
        """Whether the members communicate now."""
        self._has_said_memory = False
        self._slow: SlowMembers | None = None
        """Of the current epoch."""

    def take_part(self, epoch: Epoch) -> Iterator[Turn | Done]:
        """Yield what the program has to do in `epoch`, whose group was formed. Returns when the run has finished or
        this member leaves; any other end of the epoch is an error."""
        run, options = self._run, self._run.options
        me, size = epoch.holders.index(run.members.node.peer_id), len(epoch.holders)
        self.exchange.begin()
        run.meter.start()
        self._slow = SlowMembers(run.data.microbatch, size, options.fewest)
        run.journal.began(names_of(epoch))
        self._say_memory()
        script = run.replica.epoch(epoch.number, me, size, epoch.lineages[0], options.fewest)
        try:
            yield from self._carry_out(script, epoch, me, size)
        finally:
            run.local.forget()
            run.replica.deals = ()

    def _carry_out(
        self, script: Generator[Instruction, Any, None], epoch: Epoch, me: int, size: int
    ) -> Iterator[Turn | Done]:
        run, context, options, value = self._run, self._run.members.context, self._run.options, None
        while True:
            instruction: Instruction = script.send(value)
            value = None
            note("%s", type(instruction).__name__)
            match instruction:
                case Compute() | Pause() | Reduce() if run.is_finished or (run.is_going and not run.is_in_step):
                    return
                case Compute():
                    yield from self._compute(instruction, epoch)
                case Gather(value=Report() as mine):
                    value = self.exchange.reports(context, mine)
                case Gather(value=Token() as mine):
                    value = self.exchange.tokens(context, mine)
                    run.trace.has_tokens(*self.exchange.last)
                case Reduce():
                    value = self._reduce()
                    run.seating.look(epoch)
                case Share(root=root, result=result):
                    value = self.exchange.share(context, root, result, run.state)
                case Apply():
                    yield from self._apply(instruction, epoch, me)
                case Pause():
                    run.seating.wait(epoch)
                    if run.is_going and size < options.fewest:
                        return
                case _:
                    raise AssertionError(instruction)

    def _compute(self, compute: Compute, epoch: Epoch) -> Iterator[Turn]:
        """Have a micro-batch computed, however often the program must be asked."""
        run, mark = self._run, self._run.replica.mark
        while compute.part not in run.replica.covered:
            if run.members.has_ended(epoch) or mark != run.replica.mark or run.others.better():
                raise Fenced(f"{epoch} has ended")
            run.seating.between(epoch)
            if compute.is_last:
                self.exchange.expect(run.members.context)
            yield Turn(compute, mark)

    def _reduce(self) -> dict[str, Array]:
        run, replica = self._run, self._run.replica
        run.seating.end_computing()
        if not replica.covered:
            run.local.clear()
        run.meter.end_step()
        replica.speed, replica.overhead, replica.period = run.meter.speed, run.meter.overhead, run.meter.period
        self.is_reducing = True
        try:
            self.exchange.agree(run.members.context)
            self._say_memory()
            total = self.exchange.reduce(run.members.context)
        finally:
            self.is_reducing = False
        run.trace.reduced(sum(run.data.size(replica.span, part) for part in replica.covered))
        return total

    def _say_memory(self) -> None:
        """Say once how much memory the run takes, before it takes most of it."""
        run, layout = self._run, self._run.local.layout
        if self._has_said_memory or layout is None:
            return
        self._has_said_memory = True
        state, local = run.state.manifest().nbytes, run.local
        needs = MemoryNeeds.of(layout, state, local.host_copies, local.device_bytes)
        run.journal.say(str(needs))

    def _apply(self, apply: Apply, epoch: Epoch, me: int) -> Iterator[Done]:
        run, result = self._run, apply.result
        if result.is_state:
            run.state.load(result.payload)
            run.origin.has_founded()
            run.replica.saved = run.origin.step
            run.donor.begin(apply.after)
            run.divergence.origin = result.step
        else:
            speeds = [token.speed for token in apply.tokens]
            run.journal.sealed(result.step, result.cursor - apply.before.cursor, speeds, time.monotonic())
            if not apply.is_finite and run.raises_nonfinite:
                raise self._nonfinite(result, epoch)
            run.donor.sealed(apply.before, result, apply.digest, after=apply.after, is_finite=apply.is_finite)
            if apply.place:
                self._set_aside(apply, epoch, me)
            done = run.done(result, apply.before, is_finite=apply.is_finite)
            run.trace.sealed(result.step, done.loss / done.weight if done.loss and done.weight else None)
            yield done
            run.trace.applied(result.step, len(epoch.holders))
        # The program has applied it: the state is that of the mark.
        if apply.place == _CALM:
            run.members.context.group.measure_links()
        mark = apply.after
        if apply.is_compared:
            run.divergence.compare_states(mark, epoch)
        now = time.monotonic()
        run.seating.applied(apply, epoch)
        run.checkpoints.save(mark, epoch, me, run.state, is_last=run.ends_with(mark) and not result.is_state)
        run.others.announce(now)
        run.check_others(epoch)

    def _set_aside(self, apply: Apply, epoch: Epoch, me: int) -> None:
        """Have the member leave for a while that the others would do better without. All members find the same one."""
        run = self._run
        assert self._slow is not None
        slow = self._slow.sealed(apply.result.cursor - apply.before.cursor, apply.tokens)
        if slow is not None and not run.is_finished:
            name = list(names_of(epoch).values())[slow.rank]
            run.journal.say(f"{name} is too slow and follows as a learner until it is faster: {slow}", logging.WARNING)
            run.trace.event("learner", f"{name} is too slow and follows as a learner until it is faster")
            if slow.rank == me:
                run.absence.begin(SLOW)

    def _nonfinite(self, result: Result, epoch: Epoch) -> NonFiniteStepError:
        """Return the error that names the machines whose own gradients or losses are not finite."""
        run, names, found = self._run, list(names_of(epoch).values()), list[str]()
        try:
            flags = self.exchange.flags(run.members.context, bool(nonfinite_of(self.exchange.own_sums)))
            found = [name for name, is_mine in zip(names, flags, strict=True) if is_mine]
        except DistributedError as exc:  # the step is sealed: the run has ended for all, whoever is still there
            _log.info("Cannot ask whose gradients they are: %s", exc)
        return NonFiniteStepError(result.step, found, nonfinite_of(result.payload))
