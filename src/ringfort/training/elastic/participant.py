"""`Participant`: one program's life in a run: one epoch after the other, and in between the copying of its state.

epoch_driver.py carries out the steps of an epoch, state_copy.py the copying. The life is one generator, which yields
what the program has to do. An error that only ends an epoch stays inside; any other ends the generator, and every later
call raises it again.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Final

import numpy as np

from ringfort.cluster.core.events import ClusterEvent, EpochStarted, PeerLost, Waiting
from ringfort.cluster.core.peer_messages import Epoch
from ringfort.cluster.core.proposer import TOO_FEW
from ringfort.errors import AbortedError, ChannelClosedError, DistributedError, DivergedError, InvalidArgumentError
from ringfort.training.elastic.absence import ASLEEP, SLOW, Absence
from ringfort.training.elastic.dealing import Data, RunEnd
from ringfort.training.elastic.digests import Known, has_changed
from ringfort.training.elastic.divergence import Divergence
from ringfort.training.elastic.donor import KEPT, Donor
from ringfort.training.elastic.epoch_driver import EpochDriver
from ringfort.training.elastic.exchange import SUMS, inspect, sample_of
from ringfort.training.elastic.finish import Finish
from ringfort.training.elastic.journal import Journal
from ringfort.training.elastic.local_sum import GradientSum
from ringfort.training.elastic.membership import Membership
from ringfort.training.elastic.options import Options
from ringfort.training.elastic.origin import Origin
from ringfort.training.elastic.other_runs import OtherRuns, Place
from ringfort.training.elastic.protocol import Differs, Fenced, Mark, Replica, Result, Standstill
from ringfort.training.elastic.run_checkpoints import RunCheckpoints
from ringfort.training.elastic.run_note import TOPIC, note_of
from ringfort.training.elastic.run_trace import RunTrace
from ringfort.training.elastic.sample_order import Array
from ringfort.training.elastic.seating import Seating
from ringfort.training.elastic.sleep_watch import SleepWatch
from ringfort.training.elastic.speed_meter import SpeedMeter
from ringfort.training.elastic.state_check import own_class
from ringfort.training.elastic.state_copy import StateCopy
from ringfort.training.elastic.state_tree import StateTree
from ringfort.training.elastic.step import Done, Turn
from ringfort.training.elastic.timeline import note

_log = logging.getLogger(__name__)

_FORM: Final = 20.0
"""Seconds to form the group of an epoch; after a failure it is tried again."""
_NOTICE: Final = 0.5
"""Seconds until the cluster has noticed why a group failed. If it has not, the group is formed again, which ends as
soon as it has."""
_FAILURES: Final = 10
"""Times that the group of one epoch may fail before the run is given up: the machines see each other, and still cannot
work together."""


class Participant:
    """This program's part in a run."""

    def __init__(
        self, options: Options, state: StateTree, local: GradientSum, data: Data, end: RunEnd, journal: Journal
    ) -> None:
        """Prepare it; `open` looks for the run, which goes on up to `end`."""
        self.data, self.state, self.end, self.journal = data, state, end, journal
        self.local = local
        self.checkpoints = RunCheckpoints(options.checkpoint, options.every, options.keep, options.name, f"{data}")
        self.origin = Origin(state, self.checkpoints, journal.say)
        self.replica = Replica(
            data, self.origin.result, self._digest, self._sample, planned=lambda: state.planned_steps
        )
        self.replica.saved = self.origin.step
        self._inspected: tuple[Result, Known] | None = None
        """The last result, and the digests of the blocks of it that were looked at."""
        self._lent: tuple[Result, str] | None = None
        """The result that the program has got as a mean, and what the program calls that."""
        self.is_leaving = False
        self.absence = Absence()
        self.was_slow = False
        """Whether it was set aside as slow, and is not fast enough yet."""
        self.is_busy = False
        """Whether it is in an epoch: then there may be a step to finish."""
        self.is_in_step = False
        """Whether the program was given a micro-batch and no result since."""
        self.options = options
        manifest = state.manifest()
        self._note = note_of(options.name, data, options.rules, manifest, socket.gethostname())
        self.trace = RunTrace(options.name, end.step or (0 if data.is_planned else data.steps_to(end.cursor)))
        self.meter = SpeedMeter()
        self.driver = EpochDriver(self)
        self.seating = Seating(self)
        self._failures: tuple[Epoch | None, int] = (None, 0)
        self.last_epoch: Epoch | None = None
        """The last epoch that it took part in."""
        self._error: BaseException | None = None
        self._pid = os.getpid()
        self._opened_at = time.monotonic()
        self.donor = Donor(
            lambda: self.local.layout,
            kept_bytes=min(KEPT, manifest.nbytes),
            busy=lambda: self.driver.is_reducing,
        )
        self.copy = StateCopy(self, options.join_timeout)
        self.others = OtherRuns(self._note, self._where, self._tell, self._opened_at)
        self.divergence = Divergence(self, self.driver.exchange, options.machine_class or own_class())
        self.members = self._join()
        self._finish = Finish(self)
        self._sleep = SleepWatch(self._falls_asleep, self.absence.wake_up)
        self._script = self._live()

    # --- called by the program's thread -------------------------------------------------------------------------------

    def open(self) -> None:
        """Start to look for the run."""
        self.members.open()

    def advance(self) -> Turn | Done | None:
        """Return what the program has to do next; None after the last step, or when it leaves."""
        if os.getpid() != self._pid:
            raise ChannelClosedError(
                "This process was forked from the one that is in the run; only that one may use it"
            )
        if self._error is not None:
            raise self._error
        self.meter.called()
        try:
            self._take_back()
            found = next(self._script, None)
        except Exception as exc:
            if getgeneratorstate(self._script) == GEN_RUNNING:  # so the error only says that another thread is in it
                why = "another thread is in the loop of this run; use the run in one thread"
                raise InvalidArgumentError("step", self.replica.mark.step, why) from None
            self._error = exc
            raise
        except BaseException:  # Ctrl-C, anywhere
            self._error = ChannelClosedError("This program was interrupted, so it has left the run")
            raise
        self.is_in_step = isinstance(found, Turn)
        self.meter.resume()
        return found

    def samples_of(self, turn: Turn) -> Array:
        """Return the samples of a micro-batch, and begin to measure the time that it takes."""
        samples = self.data.part(turn.compute.span, turn.compute.part)
        self.meter.begin(len(samples))
        return samples

    def random_of(self, turn: Turn) -> np.random.Generator:
        """Return a new random generator for a micro-batch."""
        return self.data.random(turn.compute.step, turn.compute.part)

    def unit_of(self, turn: Turn) -> int:
        """Return the number of samples whose weight is 1."""
        return turn.compute.span.unit

    def part_seconds(self) -> float:
        """Return what a micro-batch takes here; 0 if unknown."""
        return self.data.microbatch / self.meter.speed if self.meter.speed else 0.0

    def begin(self) -> None:
        """The program adds to the local sum next."""
        if not self.replica.covered:
            self.local.begin()

    def has_added(self, turn: Turn) -> bool:
        """Return whether the local sum includes a micro-batch already."""
        return turn.compute.part in self.replica.covered and turn.mark == self.replica.mark

    def added(self, turn: Turn) -> None:
        """The local sum includes a micro-batch."""
        self.replica.add(turn.compute.part, turn.mark)
        self.meter.end()

    def aside(self, seconds: float) -> None:
        """The program has used so many seconds for something else."""
        self.journal.aside(seconds)
        self.meter.aside(seconds)

    def lend(self, result: Result, what: str) -> None:
        """The program has got the memory of a result as `what`, and must not change it."""
        self._lent = result, what

    def _take_back(self) -> None:
        """Raise `InvalidArgumentError` if the program has written into a mean that is the result itself, which other
        machines may still need. Its arrays cannot be written, but tensors that torch makes of them can."""
        lent, self._lent = self._lent, None
        if lent is not None and self._inspected is not None:
            (result, known), (given, what) = self._inspected, lent
            if result is given and has_changed(result.payload, known):
                why = "was changed in place; other machines need it as it was, so change a copy"
                raise InvalidArgumentError(what, f"the mean of step {given.step}", why)

    @property
    def raises_nonfinite(self) -> bool:
        """Whether gradients with infinities or NaNs are an error."""
        return self.options.nonfinite == "error"

    @property
    def is_finished(self) -> bool:
        """Whether the last step was applied."""
        return self.ends_with(self.replica.mark)

    def ends_with(self, mark: Mark) -> bool:
        """Return whether the step that led to `mark` was the last one of the run."""
        return self.end.is_reached(mark.step, mark.cursor)

    def linger(self) -> None:
        """Serve learners of a finished run, for a bounded time. The state must be that of the last step."""
        self._finish.linger(self.last_epoch)

    def close(self, why: str) -> None:
        """Leave the cluster. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        if self._error is None:
            self._error = ChannelClosedError("This run is closed")
        with suppress(ValueError):  # another thread is in it; its wait ends with the node
            self._script.close()
        try:
            self._sleep.close()
            self.copy.interrupt()
            self.donor.close()
            self.seating.close()
        finally:
            try:
                self.members.close(why)
            finally:
                self.checkpoints.close()
                self.trace.close()

    # --- called by the thread of `SleepWatch` -------------------------------------------------------------------------

    def _falls_asleep(self) -> None:
        self.absence.fall_asleep(lambda: self.members.close(ASLEEP, returns=True))

    # --- called by the node's callback thread -------------------------------------------------------------------------

    def _fence(self, epoch: int, ended: tuple[str, ...]) -> Standstill:
        note("fenced for epoch %d", epoch)
        stands = self.replica.fence(epoch)
        if stands.lineage and stands.lineage in ended:
            self.origin.run_ended(stands.mark)
            self.replica.saved = self.origin.step
            self.replica.learn(Mark(), ())
            stands = self.replica.fence(epoch)
        return stands

    def _on_event(self, event: ClusterEvent) -> None:
        self.others.on_event(event)
        self.trace.on_event(event)
        match event:
            case EpochStarted():
                self.copy.interrupt()  # it is seated with the state that it has
            case PeerLost(peer=peer, why=why):
                self.journal.lost(peer, why)
            case Waiting(why=why) if not (why.endswith(TOO_FEW) and self.replica.mark.branch):  # `waits` says that
                self.journal.say(f"Waiting: {why}")
                self.trace.event("waiting", f"{platform.node()} waits: {why}")
            case _:
                pass

    def _where(self) -> Place:
        ended = () if self.last_epoch is None else self.last_epoch.ended
        return Place(self.replica.mark, self.copy.is_copy, ended)

    def _tell(self, body: bytes, peer: str | None) -> None:
        self.members.node.tell(TOPIC, body, peer)

    # --- the life of the run ------------------------------------------------------------------------------------------

    def _live(self) -> Generator[Turn | Done, None, None]:
        while not self.is_finished and not self.is_leaving:
            try:
                yield from self._live_on()
            except DistributedError as exc:
                if not self.absence.why or isinstance(exc, ValueError):
                    raise
                _log.info("Left the run in the middle of a step: %s", exc)
            if self.absence.why and not self.is_finished:
                self._be_away()
        if self.is_in_step:
            # The run has finished, or cannot go on when this member wants to leave. The program applies zeros, and
            # what that may change, such as a momentum, is undone.
            mark, image = self.replica.mark, self.state.image()
            yield Done(Result(mark.branch, mark.step, mark.cursor), 0.0, 0.0, is_overtaken=True)
            self.state.load(image)

    def _live_on(self) -> Iterator[Turn | Done]:
        self._finish.take_saved()
        if self.is_finished:
            return
        epoch = self.members.epoch
        self.others.announce(time.monotonic())
        self.check_others(epoch)
        gives_way = epoch is not None and bool(self.others.better())
        if epoch is None or gives_way:
            yield from self.copy.follow(epoch)
            return
        try:
            self.members.form(epoch, _FORM)
            self.trace.formed(self.members.backend, epoch)
            note("group of %s formed", epoch)
            self.is_busy, self.last_epoch, self.copy.is_copy = True, epoch, False
            yield from self.driver.take_part(epoch)
        except DistributedError as exc:
            self._end_of(epoch, exc)
        finally:
            self.is_busy = False

    def _be_away(self) -> None:
        """Say goodbye, and join the cluster again when the absence is over."""
        why = self.absence.why
        self.was_slow |= why == SLOW
        self.donor.dismiss()
        self.members.close(why, returns=True)
        self.replica.leave()
        self.last_epoch, self.copy.is_copy = None, False  # it comes back as another peer, which holds nothing
        if why == ASLEEP:
            self.journal.say("This machine goes to sleep: it has left the run, and comes back when it is awake")
        self.absence.left()

        def is_over() -> bool:
            return self.is_leaving or self._error is not None

        self.absence.wait_for_end(is_over)
        if not is_over():
            self.members = self._join()
            self.members.open()
            self.members.tell(self.replica.fence(0), is_ready=False)

    def _join(self) -> Membership:
        options = self.options
        return Membership(
            options.discovery(self._note.run),
            options.group_config,
            self._fence,
            self.donor.serve,
            self._on_event,
        )

    @property
    def is_going(self) -> bool:
        """Whether this member leaves after its step, for a while or for good."""
        return self.is_leaving or bool(self.absence.why)

    def check_others(self, epoch: Epoch | None) -> None:
        """Raise `InvalidArgumentError` if another run has this one's name and stays."""
        timeout = self.options.join_timeout
        if epoch is not None or time.monotonic() > self._opened_at + timeout:
            why = self.others.different()
            if why:
                raise InvalidArgumentError(
                    "name", self.options.name, f"{why}. Start the same program there and here, or pass another name"
                )

    def _end_of(self, epoch: Epoch, exc: DistributedError) -> None:
        """Return if `exc` only ends the epoch; raise it if it ends the run."""
        is_word = isinstance(exc, (Fenced, Differs, AbortedError))
        # Invalid arguments and gradients stay so in every epoch.
        if self.absence.why or isinstance(exc, (ValueError, DivergedError)):
            raise exc
        if not (is_word or exc.is_peer_failure or self.members.has_ended(epoch)):
            raise exc
        _log.info("%s has ended here: %s", epoch, exc)
        note("%s ends here: %s", epoch, exc)
        if isinstance(exc, Differs):
            self.divergence.void(epoch, exc)
        if not self.others.better() and not self.members.wait_for_end(epoch, _NOTICE):
            before, count = self._failures
            self._failures = (epoch, count + 1 if before == epoch else 1)
            if self._failures[1] >= _FAILURES:
                raise exc
        self.members.tell(self.replica.fence(0), is_ready=False)

    def done(self, result: Result, before: Mark, *, is_finite: bool) -> Done:
        """Return what the program is given to apply, at the mark `before`."""
        weight, loss = (float(value) for value in result.payload[SUMS])
        return Done(result, weight, loss, is_finite, samples=result.cursor - before.cursor)

    # --- called by the replica ----------------------------------------------------------------------------------------

    def _digest(self, result: Result, me: int, size: int) -> int:
        begun, known = self.driver.exchange.inspection_of(result), Known()
        digest, self.replica.is_finite = inspect(result, me, size, begun, known)
        self._inspected = result, known
        return digest

    def _sample(self, result: Result) -> int:
        inspected = self._inspected
        return sample_of(result, inspected[1] if inspected is not None and inspected[0] is result else None)
