"""Many items over several workers, without any: who gets what, and what becomes of the items of the lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ringfort.errors import RpcNoConnectionError, RpcPeerLostError
from ringfort.rpc.calls import RpcFuture
from ringfort.rpc.mapping import run_map


class Workers:
    """Ends each call at once, as `answer` says, or leaves it under way if that is None."""

    def __init__(self, answer: Callable[[int, int], int | Exception | None]) -> None:
        self.calls: list[tuple[int, int]] = []
        self.futures: list[RpcFuture] = []
        self._answer = answer

    def __call__(self, worker: int, item: int) -> RpcFuture:
        self.calls.append((worker, item))
        assert len(self.calls) < 100, "it goes on for ever"
        answer = self._answer(worker, item)
        if isinstance(answer, RpcNoConnectionError):
            raise answer
        future = RpcFuture(0, worker, "a call", 1.0, lambda _: True)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
        self.futures.append(future)
        return future


@pytest.mark.parametrize("error", [RpcPeerLostError(1, "died"), RpcNoConnectionError("gone", peer=1)])
def test_what_a_lost_worker_had_is_done_by_the_others_and_it_is_asked_no_more(error: Exception) -> None:
    workers = Workers(lambda worker, item: error if worker == 1 else 10 * item)
    assert run_map(workers, range(20), [1, 2], 1, None) == [10 * item for item in range(20)]
    assert [item for worker, item in workers.calls if worker == 1] == [0]
    assert sorted(item for worker, item in workers.calls if worker == 2) == list(range(20))


def test_when_all_are_lost_it_ends_and_says_so() -> None:
    workers = Workers(lambda worker, item: RpcPeerLostError(worker, "died"))
    with pytest.raises(RpcPeerLostError, match="all other workers of this map are lost too"):
        run_map(workers, range(20), [1, 2], 1, None)
    assert sorted(worker for worker, _ in workers.calls) == [1, 2]


def test_what_is_under_way_when_a_call_fails_is_given_up() -> None:
    workers = Workers(lambda worker, item: ValueError("bad") if item == 3 else None)
    with pytest.raises(ValueError, match="bad"):
        run_map(workers, range(20), [1, 2], 2, None)
    assert len(workers.calls) == 4
    assert [future.cancelled() for future in workers.futures] == [True, True, True, False]


def test_nobody_has_more_at_a_time_than_is_allowed() -> None:
    under_way: list[int] = []

    def answer(worker: int, item: int) -> int | Exception | None:
        under_way.append(worker)
        return ValueError("enough") if len(under_way) == 6 else None

    with pytest.raises(ValueError, match="enough"):
        run_map(Workers(answer), range(20), [1, 2], 3, None)
    assert under_way == [1, 2, 1, 2, 1, 2]
