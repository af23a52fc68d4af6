"""`ElasticRun`: the handle of a program on a run that machines join and leave.

    with ringfort.elastic(state, nodes="2:8", checkpoint="run1") as run:
        for step in run.steps(10_000, samples=len(x), batch=512, microbatch=32, seed=0):
            for part in step:
                step.add({"w": gradient(w, x[part])}, count=len(part))
            update(state, step.mean(), lr(step.number))

protocol.py says what happens and keeps it safe; participant.py carries it out on the group of the current epoch.
"""

from __future__ import annotations

import logging
import operator
import os
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from ringfort.config import AutoDiscoveryConfig, DistributedConfig
from ringfort.errors import InvalidArgumentError
from ringfort.training.elastic.dealing import Data
from ringfort.training.elastic.journal import Journal, names_of
from ringfort.training.elastic.launched import with_launcher
from ringfort.training.elastic.leaving import Farewell, LeaveOnSignal
from ringfort.training.elastic.options import Nonfinite, Options
from ringfort.training.elastic.participant import Participant
from ringfort.training.elastic.state_tree import StateTree
from ringfort.training.elastic.step import Step

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger("ringfort.elastic")

_STOPPED: Final = "its program has stopped"


class ElasticRun:
    """A run that machines join and leave. Made by `ringfort.elastic`.

    A program that asks for the next step has applied the one before. One that breaks out of the loop leaves the run at
    once; the others continue. After a fork, the run belongs to the parent alone.
    """

    def __init__(self, state: Any, options: Options) -> None:
        self.state = StateTree(state)
        self._options = options
        self._journal = Journal(_log.log)
        self._participant: Participant | None = None
        self._pid = os.getpid()
        """The process that is in the run."""
        self._signals = LeaveOnSignal(self._asked_to_leave)
        self._is_entered = False
        self._is_closed = False
        self._farewell: Farewell | None = None
        self._leaving = RLock()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def steps(self, total: int, *, samples: int, batch: int, microbatch: int, seed: int = 0) -> Iterator[Step]:
        """Return an iterator over the steps of the run up to number `total`, from wherever the run is. The program
        applies each step before it asks for the next.

        When the last step is applied, or after `leave()`, this machine has left the run, and the loop ends. A machine
        that comes when the run has finished gets the final state, and its loop has no steps.

        SIGTERM and the first Ctrl-C let the machine finish its step and leave after that; then `SystemExit` or
        `KeyboardInterrupt` is raised. A second one acts at once.

        Raises `InvalidArgumentError` for invalid arguments, and if the cluster has a run of this name with other data
        or another state; `GradientLayoutError` and `NonFiniteError` for gradients that the run cannot use.
        """
        given = {"samples": samples, "batch": batch, "microbatch": microbatch, "seed": seed}
        data = Data(**{name: _whole(name, value) for name, value in given.items()})
        total = _whole("total", total)
        if total < 0:
            raise InvalidArgumentError("total", total, "must be a whole number of at least 0")
        if self._participant is not None or self._is_closed:
            raise InvalidArgumentError("steps", total, "a run has one loop; make another with ringfort.elastic()")
        return self._steps(total, data)

    def _steps(self, total: int, data: Data) -> Iterator[Step]:
        why = _STOPPED
        Farewell.hurry()
        self._signals.install()
        try:
            self._pid = os.getpid()
            self._participant = participant = Participant(self._options, self.state, data, total, self._journal)
            participant.open()  # not before it can be closed: an interrupt may come at any moment
            while (first := participant.advance()) is not None:
                step = Step(participant, first)
                yield step
                step.end()
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
            why = _failure(type(exc))
            raise
        finally:
            try:
                if why:
                    self._leave(why)
            finally:
                self._signals.restore()
        self._signals.act()

    def leave(self) -> None:
        """Leave the run after the current step; then the loop ends. The others continue and compute nothing again. May
        be called from any thread."""
        if self._participant is not None:
            self._participant.is_leaving = True

    @contextmanager
    def aside(self) -> Generator[None]:
        """Do something else in the loop, such as an evaluation on one member. The others wait for this member in the
        step, for an hour at most; it is not taken for slow meanwhile, and the time is not counted in its `goodput`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._participant is not None:
                self._participant.aside(time.perf_counter() - start)

    # --- what it is doing ---------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of the last step that was sealed: this program has applied it, or is about to."""
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
            self._leave(_STOPPED if kind is None else _failure(kind))
        finally:
            self._signals.restore()

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


def _failure(kind: type[BaseException]) -> str:
    """Return in words why a program leaves that an exception has ended."""
    if issubclass(kind, KeyboardInterrupt):
        return "its program was interrupted"
    return f"its program has failed with {kind.__name__}" if issubclass(kind, Exception) else _STOPPED


def _whole(name: str, value: Any) -> int:
    """Return a whole number of any type, such as a NumPy integer, as an int."""
    try:
        if type(value) is not bool:
            return operator.index(value)
    except TypeError:
        pass
    raise InvalidArgumentError(name, value, "must be a whole number")


def elastic(
    state: Any,
    *,
    nodes: str | int | None = None,
    name: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 100,
    keep: int = 3,
    patience: float | None = None,
    nonfinite: Nonfinite = "error",
    machine_class: str = "",
    config: AutoDiscoveryConfig | None = None,
    group: DistributedConfig | None = None,
) -> ElasticRun:
    """Return the handle on a run that machines join and leave while it goes on.

    `state` is a dict or a list of arrays and plain values, which the program changes in place: everything that a
    machine needs to continue. `nodes` is the least and the largest number of members, such as `"2:8"` (by default 1 and
    no limit). Programs with the same `name` (by default the script's), state and data are members of one run. With
    `checkpoint`, a folder on this machine's disk, the state is saved every `checkpoint_every` steps, and a run that
    lost all its members continues with the newest. `patience` is how many seconds a silent machine is waited for. What
    is left out of the three comes from `ringfort run --elastic`, if that has started the program.

    Gradients with infinities or NaNs are an error at every member, which names the machine. With `nonfinite="skip"`
    all members skip such a step instead (`Step.skipped`), as programs with a loss scaler need it.

    Machines of one `machine_class` must have the same bits in their state; a difference is damage. By default it is the
    processor, its vector instructions and the versions of NumPy and torch. Say it if your update runs on something
    else, such as a GPU: `machine_class="cuda H200 torch 2.5"`.

    Raises `InvalidArgumentError` and `UnsupportedArrayError` for invalid arguments, and `ConfigError` if they
    contradict the options of `ringfort run --elastic`.
    """
    told = with_launcher(nodes, name, patience)
    options = Options(
        name=told.name,
        nodes=told.nodes,
        checkpoint=checkpoint,
        every=checkpoint_every,
        keep=keep,
        patience=told.patience,
        nonfinite=nonfinite,
        config=config,
        group=group,
        machine_class=machine_class,
    )
    return ElasticRun(state, options)
