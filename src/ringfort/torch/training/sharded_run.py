"""`ShardedRun`: a run of a model that is sharded over the local ranks of a machine. The machine is the member.

Local rank 0 takes part in the run. What it has to do next it tells the others, so all of them go through the same loop:
each computes its share of every micro-batch, and applies every step to its shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from signal import Signals
from types import TracebackType
from typing import Any, cast

from ringfort.errors import DistributedError, InvalidArgumentError, LocalRankLostError
from ringfort.torch.training.local_link import Follower, Leader, Link, connect
from ringfort.torch.training.local_orders import (
    ApplyStep,
    Clear,
    Collect,
    ComputePart,
    End,
    GatherState,
    LoadState,
)
from ringfort.torch.training.local_worker import LocalWorker
from ringfort.torch.training.run import Parts, TorchRun
from ringfort.torch.training.sharded_state import ShardedState
from ringfort.torch.training.sharded_sum import ShardedSum
from ringfort.torch.training.share import Share
from ringfort.training.elastic.dealing import Data, RunEnd
from ringfort.training.elastic.launched import tell_of_machine
from ringfort.training.elastic.participant import Participant
from ringfort.training.elastic.protocol import Result
from ringfort.training.elastic.step import Done, Turn

Life = Iterator[tuple[Participant, Turn | Done]]


def sharded_parts(model: Any) -> Parts:
    """Connect the local ranks, and return what a run of a sharded model is made of. Every local rank calls it."""
    link = connect()
    tell_of_machine()
    return Parts(
        partial(ShardedState, link),
        partial(ShardedSum, link, model),
        partial(ShardedRun, link),
        # An update of shards may round otherwise than one of whole tensors.
        f" in {link.size} shards" if link.size > 1 else "",
    )


class ShardedRun(TorchRun):
    """A run at one local rank. `members` and `is_first` are about the machine: all its local ranks see the same."""

    def __init__(self, link: Link, *parts: Any) -> None:
        super().__init__(*parts)
        self._link = link
        self._share = Share(link.rank, link.size)
        self._members: tuple[str, ...] = ()
        self._is_first = False
        self._step = self._cursor = 0
        self._has_begun = False
        if isinstance(link, Leader):
            link.on_lost = lambda lost: self._leave(f"its local rank {lost.peer} has ended")
            link.on_leave = self._follower_leaves

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _check_first(self) -> None:
        super()._check_first()
        if self._has_begun:
            raise InvalidArgumentError(
                "steps", "a second loop", "a run has one loop; make another with ringfort.torch.elastic()"
            )
        self._has_begun = True

    def _new_life(self, end: RunEnd, data: Data) -> Life:
        if isinstance(self._link, Leader):
            return self._lead(super()._new_life(end, data), self._link)
        return self._follow(data, self._link)

    def _lead(self, life: Life, link: Leader) -> Life:
        """Take part in the run, and tell the other local ranks what to do."""
        try:
            for run, doing in life:
                self._tell(link, run, doing)
                yield run, doing
            link.end()
        except (SystemExit, KeyboardInterrupt):  # the machine has left, because it was asked to
            link.end(self._signals.got)
            raise
        except BaseException as exc:
            has_left = isinstance(exc, GeneratorExit)
            link.fail("its program has left the loop" if has_left else f"its program failed with {type(exc).__name__}")
            if isinstance(exc, DistributedError) and link.lost is not None:
                raise link.lost from exc  # which has closed the run
            raise
        finally:
            cast("Any", life).close()
            link.close()

    def _tell(self, link: Leader, run: Participant, doing: Turn | Done) -> None:
        link.wait()  # until nobody reads the result of the step before
        self._members, self._is_first = super().members, super().is_first
        if isinstance(doing, Turn):
            self._step, self._cursor = max(doing.mark.step, 0), doing.mark.cursor
            compute, replica = doing.compute, run.replica
            what = (compute.step, compute.part, compute.span, doing.mark)
            told = (list(replica.deals), frozenset(replica.covered), self._members, self._is_first)
            link.tell(ComputePart(*what, *told))
            return
        result = doing.result
        self._step, self._cursor = result.step, result.cursor
        if not doing.is_overtaken:
            cast("ShardedSum", self._sums).put(result.payload)
        flags = (doing.is_finite, doing.is_overtaken, self._members, self._is_first)
        link.tell(ApplyStep(result.step, result.cursor, doing.weight, doing.loss, *flags))

    def _follow(self, data: Data, link: Follower) -> Life:
        """Do what local rank 0 says."""
        sums, state = cast("ShardedSum", self._sums), cast("ShardedState", self.state)
        worker = LocalWorker(data, sums)
        run = cast("Participant", worker)
        self._signals.install()
        try:
            while not isinstance(order := link.next(), End):
                match order:
                    case ComputePart():
                        self._seen(order.mark.step, order.mark.cursor, order)
                        yield run, worker.take(order)
                    case ApplyStep():
                        self._seen(order.step, order.cursor, order)
                        result = Result("", order.step, order.cursor, sums.staging.own())
                        flags = (order.is_finite, order.is_overtaken)
                        yield run, Done(result, order.weight, order.loss, *flags)
                    case Clear():
                        sums.clear()
                    case Collect():
                        sums.deposit()
                    case GatherState():
                        state.contribute(order)
                    case LoadState():
                        state.follow(order)
                    case _:
                        raise AssertionError(order)
        finally:
            link.close()
            self._signals.restore()
        if order.signal:
            self._signals.take(order.signal)
        self._signals.act()

    def _seen(self, step: int, cursor: int, order: ComputePart | ApplyStep) -> None:
        self._step, self._cursor = max(step, 0), cursor
        self._members, self._is_first = order.members, order.is_first

    # --- what it is doing ---------------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """The number of the last step that was sealed."""
        return self._step

    @property
    def cursor(self) -> int:
        """The samples of all sealed steps."""
        return self._cursor

    @property
    def members(self) -> tuple[str, ...]:
        """The names of the machines in the current epoch."""
        return self._members

    @property
    def is_first(self) -> bool:
        """Whether this machine is the one that reports and saves for all: the same at all its local ranks, because all
        of them are needed to gather whole tensors."""
        return self._is_first

    # --- the end ------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the run after the current step, with all local ranks."""
        if isinstance(self._link, Leader):
            super().leave()
        else:
            with suppress(LocalRankLostError):
                self._link.ask_to_leave()

    def _asked_to_leave(self, signal: str) -> bool:
        if isinstance(self._link, Leader):
            return super()._asked_to_leave(signal)
        with suppress(LocalRankLostError):
            self._link.ask_to_leave(Signals[signal])
        return True

    def _follower_leaves(self, number: int) -> None:
        if number:
            self._signals.take(number)
        self.leave()

    def close(self) -> None:
        """Leave the run now. Idempotent."""
        try:
            super().close()
        finally:
            self._release()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, exc, trace)
        finally:
            self._release()

    def _release(self) -> None:
        cast("ShardedSum", self._sums).release()
        self._link.close()
