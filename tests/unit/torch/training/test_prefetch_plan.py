"""Which micro-batches are loaded ahead, kept and dropped, for any deals and changes of them."""

from __future__ import annotations

from collections import deque

from hypothesis import given, strategies as st

from ringfort.torch.training.prefetch_plan import PrefetchPlan, Request


def request(number: int) -> Request:
    return Request(step=number // 4, part=number % 4, indices=(number,), seed=number)


def requests(*numbers: int) -> list[Request]:
    return [request(number) for number in numbers]


class Queue:
    """Does with a plan what a DataLoader does: it takes requests ahead, and one more for each batch that it returns."""

    def __init__(self, depth: int) -> None:
        self.plan: PrefetchPlan[str] = PrefetchPlan(depth)
        self.loading: deque[Request | None] = deque()
        self.loaded: list[Request] = []
        """Every request that was handed out."""
        self._depth = depth

    def get(self, current: Request, upcoming: list[Request]) -> str:
        self.plan.want(current, upcoming)
        for turn in range(100):
            if self.plan.has(current):
                break
            assert turn <= self._depth + 1, "what is wanted now does not come next"
            self._receive()
        batch = self.plan.take(current)
        while self.plan.is_idle():
            self._receive()
        return batch

    def _receive(self) -> None:
        if not self.loading:
            for _ in range(self._depth):
                self._hand_out()
        self._hand_out()
        head = self.loading.popleft()
        assert self.plan.receive(f"batch of {head}") == head

    def _hand_out(self) -> None:
        number, given_out = self.plan.hand_out()
        self.loading.append(given_out)
        assert number == self.plan.head + len(self.loading) - 1
        if given_out is not None:
            self.loaded.append(given_out)


def test_what_is_known_is_loaded_ahead_and_once() -> None:
    queue = Queue(depth=3)
    order = requests(*range(8))
    for number, current in enumerate(order):
        assert queue.get(current, order[number:]) == f"batch of {current}"
        assert len(queue.loaded) == min(number + 1 + 3, 8)
    assert queue.loaded == order


def test_without_a_queue_only_what_is_wanted_now_is_loaded() -> None:
    queue = Queue(depth=0)
    for number in range(3):
        queue.get(request(number), requests(*range(number, 9)))
        assert queue.loaded == requests(*range(number + 1))


def test_a_new_deal_is_loaded_next_and_what_was_loaded_for_the_old_one_is_used_if_it_is_in_both() -> None:
    queue = Queue(depth=2)
    queue.get(request(0), requests(0, 1, 2, 3))
    assert queue.loaded == requests(0, 1, 2)
    assert queue.get(request(9), requests(9, 2, 3)) == f"batch of {request(9)}"
    assert queue.get(request(2), requests(2, 3)) == f"batch of {request(2)}"
    assert queue.loaded == requests(0, 1, 2, 9, 3)


def test_a_micro_batch_with_other_samples_is_another_one() -> None:
    queue = Queue(depth=2)
    queue.get(request(0), requests(0, 1))
    other = request(1)._replace(indices=(5, 6))
    assert queue.get(other, []) == f"batch of {other}"


def test_a_micro_batch_can_be_asked_for_again() -> None:
    queue = Queue(depth=2)
    for _ in range(3):
        assert queue.get(request(0), requests(0)) == f"batch of {request(0)}"


def test_what_becomes_known_late_is_handed_out_before_it_is_asked_for() -> None:
    queue = Queue(depth=4)
    queue.get(request(0), requests(0))
    queue.get(request(1), requests(1, 2, 3, 4))
    assert queue.loaded == requests(0, 1, 2, 3, 4)
    assert [one for one in queue.loading if one is not None] == requests(2, 3, 4)


def test_after_a_restart_everything_in_flight_is_handed_out_again() -> None:
    queue = Queue(depth=2)
    queue.get(request(0), requests(0, 1, 2))
    queue.plan.restart()
    queue.loading.clear()
    assert queue.get(request(1), requests(1, 2)) == f"batch of {request(1)}"
    assert queue.loaded == requests(0, 1, 2, 1, 2)


@given(
    depth=st.integers(0, 6),
    deals=st.lists(st.tuples(st.lists(st.integers(0, 15), max_size=12), st.integers(0, 15)), min_size=1, max_size=30),
)
def test_whatever_is_dealt_every_batch_comes_and_memory_is_bounded(
    depth: int, deals: list[tuple[list[int], int]]
) -> None:
    queue = Queue(depth)
    for upcoming, current in deals:
        assert queue.get(request(current), requests(*upcoming)) == f"batch of {request(current)}"
        assert len(queue.plan._kept) <= depth
        assert queue.plan.in_flight == len(queue.loading) <= depth


@given(
    depth=st.integers(1, 6),
    order=st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=40),
    known=st.lists(st.integers(0, 10), min_size=1),
)
def test_without_a_change_of_the_deal_nothing_is_loaded_twice(depth: int, order: list[int], known: list[int]) -> None:
    queue = Queue(depth)
    far = 0
    for number, current in enumerate(order):
        far = max(far, number + known[number % len(known)])  # what was known stays known
        queue.get(request(current), requests(*order[number:far]))
    assert queue.loaded == requests(*order)
