"""`RingfortWork`: torch's handle of a call, over a `Work` of ours."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ringfort.collectives.work import Work
from ringfort.torch.callbacks import Origin, follow
from ringfort.torch.future_waits import future_waits
from ringfort.torch.hooks import untraced
from ringfort.torch.names import dist, torch
from ringfort.torch.tensors import to_seconds


@untraced
class RingfortWork(dist._Work):
    """A call that is done (no `work`) or under way, and the tensors that it writes to."""

    def __init__(
        self,
        tensors: Sequence[Any],
        work: Work | None = None,
        source: int | None = None,
        *,
        origin: Origin | None = None,
    ) -> None:
        """`source` is the rank that a message comes from. `origin` identifies the call, for collectives that callbacks
        of its future issue."""
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  # torch's
        self._tensors = tensors
        self._work = work
        self._future: Any = None
        self._source = source
        self._origin = origin

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the call has ended, and raise what it raised. Returns True, as torch expects."""
        if self._work is not None:
            seconds = to_seconds(timeout, 0.0)
            result = self._work.wait(seconds) if seconds else self._work.wait()
            if isinstance(result, int):
                self._source = result
        return True

    def synchronize(self) -> None:
        """Do the same as `wait`: the host waits, as on any CPU."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call has ended, with a result or an error."""
        return self._work is None or self._work.is_completed()

    def is_success(self) -> bool:
        """Return whether the call has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return what the call raised; None if it has not ended or ended without an error."""
        return None if self._work is None else self._work.exception()

    def result(self) -> list[Any]:
        """Wait for the call and return the tensors."""
        self.wait()
        return list(self._tensors)

    def source_rank(self) -> int:
        """Wait for the call and return the rank that its message came from."""
        self.wait()
        return -1 if self._source is None else self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a torch future of the list of tensors. C++ gets an error as a RuntimeError with its name and text."""
        if self._future is None:
            # By `then`: torch's own set_exception is for Python alone, C++ would take the exception for the result.
            self._future = self._future_of_end().then(self._result_of)
            if self._origin is not None:
                follow(self._future, self._origin)
        return self._future

    def _future_of_end(self) -> Any:
        """Return a future that completes when the call ends."""
        ended = self._new_future()
        if self._work is None:
            ended.set_result(None)
            return ended
        count_end = future_waits.issued()

        def complete(_: Work) -> None:
            count_end()  # before those who wait continue, and perhaps end the step
            ended.set_result(None)

        self._work.add_done_callback(complete)
        return ended

    def _result_of(self, _: Any) -> list[Any]:
        return self.result()

    def _new_future(self) -> Any:
        return torch.futures.Future()

    def __repr__(self) -> str:
        return f"<RingfortWork {'done' if self._work is None else self._work!r}>"


@untraced
class Several(RingfortWork):
    """Several works as one: done when all are. Raises what the first that failed raised."""

    def __init__(self, works: Sequence[RingfortWork]) -> None:
        origin = works[0]._origin if works else None
        tensors = [tensor for work in works for tensor in work._tensors]
        super().__init__(tensors, origin=None if origin is None else origin.next())
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((work.exception() for work in self._works if work.exception() is not None), None)

    def _future_of_end(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self._works])
