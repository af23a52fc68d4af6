"""`RunHandle`: a program's handle on a run: how it enters and leaves it, and what it can ask about it.

What a program's loop looks like is up to the interface: run.py has that for arrays, ringfort/torch/training/run.py that
for torch.
"""

from __future__ import annotations

import logging
import operator
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ringfort.cluster.shown_events import names_of
from ringfort.errors import InvalidArgumentError
from ringfort.telemetry.trace import own_trace
from ringfort.training.elastic.dealing import Data, RunEnd
from ringfort.training.elastic.journal import Journal
from ringfort.training.elastic.leaving import Farewell, LeaveOnSignal
from ringfort.training.elastic.local_sum import GradientSum
from ringfort.training.elastic.options import Options
from ringfort.training.elastic.participant import Participant
from ringfort.training.elastic.state_tree import StateTree
from ringfort.training.elastic.step import Done, Turn

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger("ringfort.elastic")

_STOPPED: Final = "its program has stopped"
T = TypeVar("T")


class RunHandle:
    """A run that machines join and leave.

    A program that asks for the next step has applied the one before. One that breaks out of the loop leaves the run at
    once; the others continue. After a fork, the run belongs to the parent alone.
    """

    def __init__(self, state: StateTree, options: Options) -> None:
        self.state = state
        self._options = options
        self._journal = Journal(_log.log)
        self._participant: Participant | None = None
        self._pid = os.getpid()
        """The process that is in the run."""
        self._signals = LeaveOnSignal(self._asked_to_leave)
        self._is_entered = False
        self._is_closed = False
        self._has_asked_to_leave = False
        self._farewell: Farewell | None = None
        self._leaving = RLock()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _check_first(self) -> None:
        """Raise `InvalidArgumentError` if the program has had its loop."""
        if self._participant is not None or self._is_closed:
            raise InvalidArgumentError("steps", "a second loop", "a run has one loop; make another run for another one")

    def _live(
        self,
        end: RunEnd,
        data: Data,
        local: GradientSum,
        each: Callable[[Participant, Turn | Done], Iterator[T]],
    ) -> Iterator[T]:
        """Take part in the run up to its `end`. `each` is called with what the program has to do next, and yields
        what the program's loop gets."""
        why = _STOPPED
        Farewell.hurry()
        self._signals.install()
        try:
            self._pid = os.getpid()
            options, state, journal = self._options, self.state, self._journal
            self._participant = participant = Participant(options, state, local, data, end, journal)
            participant.is_leaving |= self._has_asked_to_leave
            participant.open()  # not before it can be closed: an interrupt may come at any moment
            while (first := participant.advance()) is not None:
                yield from each(participant, first)
            if participant.is_finished:
                why = "it has finished"
                participant.linger()
            else:
                why = "it leaves"
        except GeneratorExit:
            # A `break`, or an error in the loop: only `__exit__` is told which. At the end of the program no thread can
            # start any more.
            if self._is_entered and not sys.is_finalizing():
                self._farewell = Farewell(lambda: self._leave(_STOPPED))
                why = ""
            raise
        except BaseException as exc:
            why = failure_of(type(exc))
            raise
        finally:
            try:
                if why:
                    self._leave(why)
            finally:
                self._signals.restore()
        self._signals.act()

    def leave(self) -> None:
        """Leave the run after the current step; then the loop ends. The others continue and compute nothing again. If
        the loop has not begun, it has no steps. May be called from any thread."""
        self._has_asked_to_leave = True
        if self._participant is not None:
            self._participant.is_leaving = True

    @contextmanager
    def aside(self) -> Generator[None]:
        """Do something else in the loop, such as an evaluation on one member. The others wait for this member in the
        step, for an hour at most; it is not taken for slow meanwhile, and the time is not counted in its `goodput`."""
        start = time.perf_counter()
        try:
            with own_trace().time.paused():
                yield
        finally:
            if self._participant is not None:
                self._participant.aside(time.perf_counter() - start)

    # --- what it is doing ---------------------------------------------------------------------------------------------

    def _sealed(self) -> int:
        """Return the number of the last step that was sealed: this program has applied it, or is about to."""
        return 0 if self._participant is None else max(self._participant.replica.mark.step, 0)

    @property
    def members(self) -> tuple[str, ...]:
        """The names of the machines in the current epoch; for several processes of one machine, with their ids."""
        epoch = None if self._participant is None else self._participant.members.epoch
        return () if epoch is None else tuple(names_of(epoch).values())

    @property
    def is_first(self) -> bool:
        """Whether this is the one member that reports and saves for all. That may change with every epoch."""
        if self._participant is None:
            return False
        members = self._participant.members
        epoch = members.epoch
        return epoch is not None and epoch.holders[0] == members.node.peer_id

    @property
    def events(self) -> list[str]:
        """What happened, in words, newest last: who came, who went and what it cost. The last 1000 lines, which the
        logger `ringfort.elastic` gets too."""
        return list(self._journal.events)

    @property
    def goodput(self) -> float:
        """The samples of sealed steps divided by what the members could have computed in that time, by their own
        measured speeds: from 0 to 1. What is missing went into communication, waiting and lost machines."""
        return self._journal.goodput

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the run now. Idempotent."""
        self._is_closed = True
        try:
            self._leave("its program has closed the run")
        finally:
            self._signals.restore()

    def __enter__(self) -> Self:
        self._is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        self._is_entered = False
        try:
            self._leave(_STOPPED if kind is None else failure_of(kind))
        finally:
            self._signals.restore()
        if kind is None and os.getpid() == self._pid:
            self._signals.act()  # the loop ended by a `break` after one came, so nobody has done it

    def _leave(self, why: str) -> None:
        """Leave the run, if this program is in it. The first reason counts."""
        if os.getpid() != self._pid:  # in a forked child, where a thread that is gone may have taken the lock
            return
        with self._leaving:
            if self._participant is not None:
                self._participant.close(why)
        if self._farewell is not None:  # not before: an interrupt may have come
            self._farewell.cancel()

    def _asked_to_leave(self, signal: str) -> bool:
        """In the handler of a signal. Return whether there is a step to finish."""
        participant = self._participant
        if participant is None:
            return False
        participant.is_leaving = True
        if participant.is_busy:
            _log.info("%s: leaving after this step; once more to stop at once", signal)
        return participant.is_busy


def failure_of(kind: type[BaseException]) -> str:
    """Return in words why a program leaves that an exception has ended."""
    if issubclass(kind, KeyboardInterrupt):
        return "its program was interrupted"
    return f"its program has failed with {kind.__name__}" if issubclass(kind, Exception) else _STOPPED


def data_of(samples: Any, batch: Any, batch_per_member: Any, microbatch: Any, seed: Any) -> Data:
    """Return the data set of a run, from what a program has passed."""
    if (batch is None) == (batch_per_member is None):
        why = "pass either batch= (samples per step) or batch_per_member= (samples per step and member)"
        raise InvalidArgumentError("batch", batch, why)
    name, size = ("batch", batch) if batch_per_member is None else ("batch_per_member", batch_per_member)
    return Data(
        whole_number("samples", samples),
        whole_number(name, size),
        whole_number("microbatch", microbatch),
        whole_number("seed", seed),
        is_per_member=batch is None,
    )


def whole_number(name: str, value: Any) -> int:
    """Return a whole number of any type, such as a NumPy integer, as an int."""
    try:
        if type(value) is not bool:
            return operator.index(value)
    except TypeError:
        pass
    raise InvalidArgumentError(name, value, "must be a whole number")
