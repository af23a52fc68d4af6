"""`RingfortWork`: what torch waits on, over a `Work` of ours."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ringfort.collectives.work import Work
from ringfort.torch.callbacks import Origin, follow
from ringfort.torch.names import dist, torch
from ringfort.torch.tensors import to_seconds
from ringfort.torch.untraced import untraced


@untraced
class RingfortWork(dist._Work):
    """An operation that is done (no `work`) or under way, and the tensors that it writes to."""

    def __init__(
        self,
        tensors: Sequence[Any],
        work: Work | None = None,
        source: int | None = None,
        *,
        origin: Origin | None = None,
    ) -> None:
        """`origin` says which collective it is, for those that callbacks of its future issue."""
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  # torch's
        self._tensors = tensors
        self._work = work
        self._future: Any = None
        self._source = source
        self._origin = origin

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until it has ended; raises what it raised. True, as torch wants it."""
        if self._work is not None:
            seconds = to_seconds(timeout, 0.0)
            result = self._work.wait(seconds) if seconds else self._work.wait()
            if isinstance(result, int):
                self._source = result
        return True

    def synchronize(self) -> None:
        """The same: the host waits, as on any CPU."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._work is None or self._work.is_completed()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What it raised; None if it has not ended or ended well."""
        return None if self._work is None else self._work.exception()

    def result(self) -> list[Any]:
        """The tensors, once it has ended."""
        self.wait()
        return list(self._tensors)

    def source_rank(self) -> int:
        """The rank that a message came from."""
        self.wait()
        return -1 if self._source is None else self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A torch future of the list of tensors. An error becomes a RuntimeError in C++, with its name and words."""
        if self._future is None:
            ended = self._new_future()
            # Torch's own set_exception is for Python alone: C++ would take the exception for the result.
            self._future = self._followed(ended.then(self._result_of))
            if self._work is None:
                ended.set_result(None)
            else:
                self._work.add_done_callback(lambda _: ended.set_result(None))
        return self._future

    def _followed(self, future: Any) -> Any:
        if self._origin is not None:
            follow(future, self._origin)
        return future

    def _new_future(self) -> Any:
        return torch.futures.Future()

    def _result_of(self, _: Any) -> list[Any]:
        return self.result()

    def __repr__(self) -> str:
        return f"<RingfortWork {'done' if self._work is None else self._work!r}>"


@untraced
class Several(RingfortWork):
    """Several works as one: done when all are. Raises what the first that failed raised."""

    def __init__(self, works: Sequence[RingfortWork]) -> None:
        origin = works[0]._origin if works else None
        super().__init__(
            [tensor for work in works for tensor in work._tensors], origin=None if origin is None else origin.next()
        )
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((work.exception() for work in self._works if work.exception() is not None), None)

    def get_future(self) -> Any:
        if self._future is None:
            collected = torch.futures.collect_all([work.get_future() for work in self._works])
            self._future = self._followed(collected.then(self._result_of))
        return self._future
