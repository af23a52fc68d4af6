"""What Accelerate and Lightning share: the `DataLoader` that is taken over, and a run that is given out in passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from ringfort.errors import InvalidArgumentError
from ringfort.integrations.passes import Source
from ringfort.torch.training.passes import Passes

STEPS = 3
"""Steps of a pass."""


class Run:
    """A member's view of a run: `parts` are the steps of its micro-batches. Other steps pass it by, as those do in
    which it has no part."""

    def __init__(self, parts: list[int], total: int) -> None:
        self.number = 0
        self.total = total
        self.parts = parts
        self._part: int | None = None
        self.is_left = False
        """Whether the program has left its loop with a micro-batch that it has not computed."""
        self.asked_at = list[int]()
        """The last step at each request for a micro-batch."""

    def batches(self) -> Iterator[int]:
        for place, step in enumerate(self.parts):
            self.asked_at.append(self.number)
            self.number, self._part = max(self.number, step - 1), step
            yield step
            if self.parts[place + 1 : place + 2] != [step]:
                assert self.number == step, "the program has not stepped"
        self.asked_at.append(self.number)
        self.number, self._part = self.total, None

    def compute(self, step: int, left: list[int]) -> None:
        """What the program does with a micro-batch; the last one of a step seals it."""
        self._part = step
        if left[:1] != [step]:
            self.number, self._part = step, None

    def begin_again(self) -> bool:
        was_left, self.is_left = self.is_left, False
        return was_left

    @property
    def epoch(self) -> int:
        return (self.number if self._part is None else self._part - 1) // STEPS

    @property
    def is_finished(self) -> bool:
        return self.number >= self.total


@given(st.lists(st.integers(1, 4 * STEPS)).map(sorted), st.integers(0, STEPS))
def test_each_micro_batch_is_given_once_and_a_pass_has_its_own_alone(parts: list[int], more: int) -> None:
    total = max(parts, default=0) + more
    run = Run(parts, total)
    passes = Passes(run, run.batches())
    seen, rounds = list[int](), list[set[int]]()
    while not passes.is_over:
        rounds.append(set())
        for step in passes:
            seen.append(step)
            rounds[-1].add((step - 1) // STEPS)
            assert passes.number == (step - 1) // STEPS
            run.compute(step, parts[len(seen) :])
    assert seen == parts
    assert all(len(one) <= 1 for one in rounds)
    assert [one for one in rounds if one] == [{number} for number in sorted({(step - 1) // STEPS for step in parts})]
    assert list(passes) == []


def test_a_machine_that_joins_begins_with_the_pass_of_the_run() -> None:
    run = Run([8, 8, 8, 9], 9)
    passes = Passes(run, run.batches())
    assert passes.look()
    run.number = 0  # its speed is tried before it has the state
    assert passes.number == 2
    seen = list[int]()
    for step in passes:
        seen.append(step)
        run.compute(step, run.parts[len(seen) :])
    assert seen == run.parts


def test_the_end_of_a_pass_asks_for_nothing_but_the_end_of_the_run_does() -> None:
    run = Run([1, 2, 3, 4, 5, 6], 6)
    passes = Passes(run, run.batches())
    for step in passes:
        run.compute(step, [step + 1])
    assert (run.asked_at, passes.is_over) == ([0, 1, 2], False)  # so a validation holds up nobody
    for step in passes:
        run.compute(step, [step + 1])
    assert (run.asked_at, passes.is_over) == ([0, 1, 2, 3, 4, 5, 6], True)  # those who need the last step get it


@pytest.mark.parametrize("is_computed", [False, True])
def test_a_pass_that_was_left_is_continued_with_what_was_not_computed(is_computed: bool) -> None:
    run = Run([1, 2, 3, 4, 5, 6], 6)
    passes = Passes(run, run.batches())
    seen = list[list[int]]()
    for _ in range(4):
        seen.append([])
        for step in passes:
            seen[-1].append(step)
            if step == 2 and len(seen) == 1 and not is_computed:
                run.is_left = True
                break
            run.compute(step, [step + 1])
            if step == 2 and len(seen) == 1:
                break
    assert seen == [[1, 2], [3] if is_computed else [2, 3], [4, 5, 6], []]


def test_a_run_that_has_ended_has_no_passes() -> None:
    run = Run([], 6)
    passes = Passes(run, run.batches())
    assert (passes.look(), passes.look(), passes.is_over, passes.number) == (False, False, True, 2)
    assert list(passes) == []


# --- the DataLoader ---------------------------------------------------------------------------------------------------


def loader(samples: int = 20, **options: Any) -> Any:
    data = pytest.importorskip("torch.utils.data")
    return data.DataLoader(list(range(samples)), **options)


def test_what_a_loader_was_made_of_is_taken_over() -> None:
    def collate(samples: list[int]) -> list[int]:
        return samples

    source = Source.of(loader(batch_size=4, shuffle=True, collate_fn=collate, num_workers=2, prefetch_factor=3))
    assert (list(source.dataset), source.microbatch) == (list(range(20)), 4)
    assert {name: source.options[name] for name in ("collate_fn", "num_workers", "prefetch_factor")} == {
        "collate_fn": collate,
        "num_workers": 2,
        "prefetch_factor": 3,
    }
    assert [source.steps(batch) for batch in (7, 10, 20, 64)] == [3, 2, 1, 1]


def test_a_loader_that_drops_nothing_may_drop_the_last() -> None:
    assert Source.of(loader(batch_size=4, drop_last=True)).microbatch == 4
    with pytest.raises(InvalidArgumentError, match="drop_last=True: must be False"):
        Source.of(loader(batch_size=3, drop_last=True))


def test_what_a_run_cannot_deal_out_is_refused() -> None:
    data = pytest.importorskip("torch.utils.data")

    class Stream(data.IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    weighted = data.WeightedRandomSampler([1.0] * 20, 20)
    refused = {
        "must be a torch.utils.data.DataLoader": [1, 2],
        "must have a length and an index": data.DataLoader(Stream()),
        "batch_size=None": loader(batch_size=None),
        "sampler='WeightedRandomSampler': must be the default": loader(sampler=weighted),
        "sampler='RandomSampler': .* with replacement": loader(sampler=data.RandomSampler(range(20), replacement=True)),
        "sampler='list'": loader(batch_sampler=[[1, 2], [3]]),
    }
    for words, one in refused.items():
        with pytest.raises(InvalidArgumentError, match=words):
            Source.of(one)
