"""`Participant`: carries the protocol of a run out: one epoch after the other, and in between the copying of its state.

It is one generator, which yields what the program has to do. An error that only ends an epoch stays inside; any other
ends the generator, and every later call raises it again.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any, Final

from ringfort.cluster.core.events import ClusterEvent, EpochStarted, PeerLost, Waiting
from ringfort.cluster.core.peer_messages import Epoch
from ringfort.cluster.core.proposer import TOO_FEW
from ringfort.errors import AbortedError, ChannelClosedError, DistributedError, InvalidArgumentError, NonFiniteStepError
from ringfort.training.elastic.dealing import Data
from ringfort.training.elastic.donor import Donor
from ringfort.training.elastic.exchange import SUMS, Exchange, digest_of, is_share_finite
from ringfort.training.elastic.journal import Journal, names_of
from ringfort.training.elastic.local_sum import LocalSum, is_finite
from ringfort.training.elastic.membership import Membership
from ringfort.training.elastic.options import Options
from ringfort.training.elastic.other_runs import OtherRuns
from ringfort.training.elastic.protocol import (
    Apply,
    Compute,
    Fenced,
    Gather,
    Instruction,
    Mark,
    Pause,
    Reduce,
    Replica,
    Report,
    Result,
    Share,
    Standstill,
    Token,
)
from ringfort.training.elastic.run_checkpoints import RunCheckpoints
from ringfort.training.elastic.run_note import TOPIC, note_of
from ringfort.training.elastic.sample_order import Array
from ringfort.training.elastic.state_copy import StateCopy
from ringfort.training.elastic.state_tree import StateTree
from ringfort.training.elastic.step import Done, Turn
from ringfort.training.elastic.token_codec import TokenCodec

_log = logging.getLogger(__name__)

_FORM: Final = 20.0
"""Seconds to form the group of an epoch; after a failure it is tried again."""
_PAUSE: Final = 1.0
"""Seconds that members wait at the end of a step for a learner that has caught up."""
_LOOK: Final = 0.1
"""Seconds between two looks at whether a learner has come meanwhile."""
_NO_PAUSE: Final = 10.0
"""Seconds until the next pause, if a learner was not seated: it may be of a machine that is too busy."""
_NOTICE: Final = 5.0
"""Seconds until the cluster has noticed why a group failed."""
_FAILURES: Final = 10
"""Times that the group of one epoch may fail before the run is given up: the machines see each other, and still cannot
work together."""
_LINGER: Final = 30.0
"""Seconds for which a finished member still serves learners."""
_EXPECT: Final = 3.0
"""Seconds for which it waits for a newcomer that has not asked yet."""
_FADING: Final = 0.8
"""How much of earlier micro-batches stays in the measured speed after each step."""


class Participant:
    """This program's part in a run."""

    def __init__(self, options: Options, state: StateTree, data: Data, total: int, journal: Journal) -> None:
        """Prepare it; `open` looks for the run. `total` is its last step."""
        self.data, self.state, self.total, self.journal = data, state, total, journal
        self.local = LocalSum()
        self.replica = Replica(data, self._found, self._digest)
        self.is_leaving = False
        self.is_busy = False
        """Whether it is in an epoch: then there may be a step to finish."""
        self.is_in_step = False
        """Whether the program was given a micro-batch and no result since."""
        self._options = options
        note = note_of(options.name, data, state.manifest(), socket.gethostname())
        self._exchange = Exchange(self.local, TokenCodec(data.parts(data.span(0))))
        self._fork: tuple[int, int] | None = None
        """Step and cursor of a state in memory whose run has ended."""
        self._timing: tuple[Turn, int, float] | None = None
        self._computed: tuple[float, float] = (0.0, 0.0)
        """Samples and the seconds that they took."""
        self._is_reducing = False
        self._no_pause_before = 0.0
        self._failures: tuple[Epoch | None, int] = (None, 0)
        self._last_epoch: Epoch | None = None
        self._error: BaseException | None = None
        self._pid = os.getpid()
        self._opened_at = time.monotonic()
        self.checkpoints = RunCheckpoints(options.checkpoint, options.every, options.keep, options.name, f"{data}")
        self.replica.saved = self.checkpoints.step
        self.donor = Donor(lambda: self.local.layout, busy=lambda: self._is_reducing)
        self.others = OtherRuns(note, lambda: self.replica.mark, self._tell, self._opened_at)
        self.copy = StateCopy(self, options.join_timeout)
        self.members = Membership(
            options.discovery(note.run), options.group_config, self._fence, self.donor.serve, self._on_event
        )
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
        try:
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
        return found

    def samples_of(self, turn: Turn) -> Array:
        """Return the samples of a micro-batch, and begin to measure the time that it takes."""
        samples = self.data.part(self.data.span(turn.mark.cursor), turn.compute.part)
        self._timing = (turn, len(samples), time.perf_counter())
        return samples

    def add(self, turn: Turn, gradients: Any, count: float | None, loss: float) -> None:
        """Add the gradients of a micro-batch to the local sum."""
        assert self._timing is not None
        _, samples, start = self._timing
        weight = float(samples) if count is None else count
        if not self.replica.covered:
            self.local.begin()
            self._exchange.loss = 0.0
        self.local.add(gradients, weight)
        self._exchange.loss += weight * loss
        self.replica.add(turn.compute.part, turn.mark)
        computed, seconds = self._computed
        self._computed = (computed + samples, seconds + time.perf_counter() - start)

    def aside(self, seconds: float) -> None:
        """The program has used so many seconds for something else."""
        self.journal.aside(seconds)
        if self._timing is not None:
            turn, samples, start = self._timing
            self._timing = (turn, samples, start + seconds)

    def mean_of(self, done: Done) -> Any:
        """Return the mean gradients of a sealed step."""
        if done.is_overtaken:
            if self.local.layout is None:
                raise InvalidArgumentError("step", done.result.step, "no micro-batch was computed here")
            self.local.clear()
            return self.local.mean(self.local.buffers, 1.0)
        return self.local.mean(done.result.payload, done.weight)

    @property
    def raises_nonfinite(self) -> bool:
        """Whether gradients with infinities or NaNs are an error."""
        return self._options.nonfinite == "error"

    @property
    def is_finished(self) -> bool:
        """Whether the last step was applied."""
        return self.replica.mark.step >= self.total

    def linger(self) -> None:
        """Serve learners of a finished run, for a bounded time. The state must be that of the last step."""
        begin = time.monotonic()
        while not self.is_leaving and time.monotonic() < begin + _LINGER:
            if self.donor.wants_image and self._last_epoch is not None:
                self.donor.offer(self.state.image(), self.replica.mark, self._last_epoch)
            is_expecting = time.monotonic() < begin + _EXPECT and self.members.has_newcomers()
            if not self.donor.learners and not is_expecting:
                return
            time.sleep(0.02)

    def close(self, why: str) -> None:
        """Leave the cluster. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        if self._error is None:
            self._error = ChannelClosedError("This run is closed")
        with suppress(ValueError):  # another thread is in it; its wait ends with the node
            self._script.close()
        try:
            self.copy.interrupt()
            self.donor.close()
        finally:
            try:
                self.members.close(why)
            finally:
                self.checkpoints.close()

    # --- called by the node's callback thread -------------------------------------------------------------------------

    def _fence(self, epoch: int, ended: tuple[str, ...]) -> Standstill:
        stands = self.replica.fence(epoch)
        if stands.lineage and stands.lineage in ended:
            mark = stands.mark
            if mark.branch:
                self._fork = (mark.step, mark.cursor)
                self.replica.saved = max(self.replica.saved, mark.step)
            self.replica.learn(Mark(), ())
            stands = self.replica.fence(epoch)
        return stands

    def _on_event(self, event: ClusterEvent) -> None:
        self.others.on_event(event)
        match event:
            case EpochStarted():
                self.copy.interrupt()  # it is seated with the state that it has
            case PeerLost(peer=peer, why=why):
                self.journal.lost(peer, why)
            case Waiting(why=why) if not (why.endswith(TOO_FEW) and self.replica.mark.branch):  # `waits` says that
                self.journal.say(f"Waiting: {why}")
            case _:
                pass

    def _tell(self, body: bytes, peer: str | None) -> None:
        self.members.node.tell(TOPIC, body, peer)

    # --- the life of the run ------------------------------------------------------------------------------------------

    def _live(self) -> Generator[Turn | Done, None, None]:
        while not self.is_finished and not self.is_leaving:
            epoch = self.members.epoch
            self.others.announce(time.monotonic())
            self._check_others(epoch)
            gives_way = epoch is not None and bool(self.others.better())
            if epoch is None or gives_way:
                yield from self.copy.follow(epoch)
                continue
            try:
                epoch = self.members.form(_FORM)
                yield from self._take_part(epoch)
            except DistributedError as exc:
                self._end_of(epoch, exc)
            finally:
                self.is_busy = False
        if self.is_in_step:
            # The run has finished, or cannot go on when this member wants to leave. The program applies zeros, and
            # what that may change, such as a momentum, is undone.
            mark, image = self.replica.mark, self.state.image()
            yield Done(Result(mark.branch, mark.step, mark.cursor), 0.0, 0.0, is_overtaken=True)
            self.state.load(image)

    def _check_others(self, epoch: Epoch | None) -> None:
        """Raise `InvalidArgumentError` if another run has this one's name and stays."""
        timeout = self._options.join_timeout
        if epoch is not None or time.monotonic() > self._opened_at + timeout:
            why = self.others.different()
            if why:
                raise InvalidArgumentError(
                    "name", self._options.name, f"{why}. Start the same program there and here, or pass another name"
                )

    def _end_of(self, epoch: Epoch, exc: DistributedError) -> None:
        """Return if `exc` only ends the epoch; raise it if it ends the run."""
        is_word = isinstance(exc, (Fenced, AbortedError))
        if isinstance(exc, ValueError):  # invalid arguments and gradients: they stay invalid in every epoch
            raise exc
        if not (is_word or exc.is_peer_failure or self.members.has_ended(epoch)):
            raise exc
        _log.info("%s has ended here: %s", epoch, exc)
        if not self.others.better() and not self.members.wait_for_end(epoch, _NOTICE):
            before, count = self._failures
            self._failures = (epoch, count + 1 if before == epoch else 1)
            if self._failures[1] >= _FAILURES:
                raise exc
        self.members.tell(self.replica.fence(0), is_ready=False)

    def _take_part(self, epoch: Epoch) -> Iterator[Turn | Done]:
        self.is_busy, self._last_epoch = True, epoch
        me, size = epoch.holders.index(self.members.node.peer_id), len(epoch.holders)
        self._exchange.begin()
        self.journal.began(names_of(epoch))
        script = self.replica.epoch(epoch.number, me, size, epoch.lineages[0], self._options.fewest)
        context, value = self.members.context, None
        while True:
            instruction: Instruction = script.send(value)
            value = None
            match instruction:
                case Compute() | Reduce() if self.is_finished or (self.is_leaving and not self.is_in_step):
                    return
                case Compute():
                    yield from self._compute(instruction, epoch)
                case Gather(value=Report() as mine):
                    value = self._exchange.reports(context, mine)
                case Gather(value=Token() as mine):
                    value = self._exchange.tokens(context, mine)
                case Reduce():
                    value = self._reduce()
                case Share(root=root, result=result):
                    value = self._exchange.share(context, root, result, self.state.manifest())
                case Apply():
                    yield from self._apply(instruction, epoch, me)
                case Pause():
                    self._pause(epoch)
                    if self.is_leaving:
                        return
                case _:
                    raise AssertionError(instruction)

    def _compute(self, compute: Compute, epoch: Epoch) -> Iterator[Turn]:
        """Have a micro-batch computed, however often the program must be asked."""
        mark = self.replica.mark
        while compute.part not in self.replica.covered:
            if self.members.has_ended(epoch) or mark != self.replica.mark or self.others.better():
                raise Fenced(f"{epoch} has ended")
            yield Turn(compute, mark)

    def _reduce(self) -> dict[str, Array]:
        context, replica = self.members.context, self.replica
        if not replica.covered:
            self.local.clear()
            self._exchange.loss = 0.0
        samples, seconds = self._computed
        replica.speed = max(1, int(samples / seconds)) if seconds > 0 else 0
        self._computed = (samples * _FADING, seconds * _FADING)
        in_use = [result.payload for _, result in tuple(replica.history)]
        if replica.held is not None:
            in_use.append(replica.held.result.payload)
        self._is_reducing = True
        try:
            self._exchange.agree(context)
            return self._exchange.reduce(context, in_use)
        finally:
            self._is_reducing = False

    def _apply(self, apply: Apply, epoch: Epoch, me: int) -> Iterator[Done]:
        result = apply.result
        if result.is_state:
            self.state.load(result.payload)
            self._fork, self.checkpoints.saved = None, None
        else:
            speeds = [token.speed for token in apply.tokens]
            self.journal.sealed(result.step, result.cursor - apply.before.cursor, speeds, time.monotonic())
            if not apply.is_finite and self.raises_nonfinite:
                raise self._nonfinite(result.step, epoch)
            self.donor.sealed(apply.before, result, apply.digest, is_finite=apply.is_finite)
            yield self.done(result, is_finite=apply.is_finite)
        # The program has applied it: the state is that of the mark.
        mark, now = apply.after, time.monotonic()
        self.replica.wants_image = self.donor.wants_image
        has_room = self._options.most is None or len(epoch.holders) < self._options.most
        self.replica.wants_pause = has_room and now >= self._no_pause_before and self.donor.has_caught_up
        if any(token.wants_image for token in apply.tokens):
            self.donor.offer(self.state.image(), mark, epoch)
        self.checkpoints.save(mark, epoch, me, self.state, is_last=mark.step >= self.total and not result.is_state)
        self.others.announce(now)
        self._check_others(epoch)

    def done(self, result: Result, *, is_finite: bool) -> Done:
        """Return what the program is given to apply."""
        weight, loss = (float(value) for value in result.payload[SUMS])
        return Done(result, weight, loss, is_finite)

    def _nonfinite(self, step: int, epoch: Epoch) -> NonFiniteStepError:
        """Return the error that names the machines whose own gradients are not finite."""
        names, found = list(names_of(epoch).values()), list[str]()
        try:
            flags = self._exchange.flags(self.members.context, is_finite(self.local.buffers))
            found = [name for name, fine in zip(names, flags, strict=True) if not fine]
        except DistributedError as exc:  # the step is sealed: the run has ended for all, whoever is still there
            _log.info("Cannot ask whose gradients they are: %s", exc)
        return NonFiniteStepError(step, found)

    def _pause(self, epoch: Epoch) -> None:
        """Wait at the end of a step for learners to be seated, or for more members."""
        if len(epoch.holders) < self._options.fewest:
            self.journal.waits(self._options.fewest)
        self.is_busy = False  # nothing is to be finished if a signal comes now
        self.members.tell(self.replica.fence(0), is_ready=True)
        deadline = time.monotonic() + _PAUSE
        while (left := deadline - time.monotonic()) > 0:
            if self.members.wait_for_end(epoch, min(left, _LOOK)):
                raise Fenced(f"{epoch} has ended")
            if self.donor.wants_image:  # below the minimum no step ends, with which one would be made
                self.donor.offer(self.state.image(), self.replica.mark, epoch)
        self.is_busy = True
        self.members.tell(self.replica.fence(0), is_ready=False)
        self._no_pause_before = time.monotonic() + _NO_PAUSE
        self.replica.wants_pause = False

    # --- called by the replica ----------------------------------------------------------------------------------------

    def _found(self, branch: str) -> Result:
        """Return the first state of a branch: that of a run that has ended, the newest checkpoint, or what the program
        began with."""
        saved = self.checkpoints.saved
        if self._fork is not None and (saved is None or self._fork[0] >= saved.stamp.step):
            step, cursor = self._fork
            image = self.state.image()
        elif saved is not None:
            step, cursor, image = saved.stamp.step, saved.stamp.cursor, saved.read()
            self.journal.say(f"The run continues with {saved.path}")
        else:
            step, cursor, image = 0, 0, self.state.image()
        return Result(branch, step, cursor, image, is_state=True)

    def _digest(self, result: Result, me: int, size: int) -> int:
        self.replica.is_finite = is_share_finite(result, me, size)
        return digest_of(result, me, size)
