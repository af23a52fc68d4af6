"""What one `for` over the loader of a run is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ringfort.errors import InvalidArgumentError
from ringfort.torch.training.run_loader import RunLoader
from ringfort.training.elastic.dealing import Data, RunEnd

DATA = Data(samples=6, batch=2, microbatch=1)


class Run:
    """A member that computes each micro-batch of two steps of a pass as it comes."""

    def __init__(self) -> None:
        self.number = 0
        self.is_open = False

    @property
    def epoch(self) -> int:
        return self.number // 3

    @property
    def is_finished(self) -> bool:
        return self.number >= 6

    def begin_again(self) -> bool:
        return False

    def batches(self, total: int) -> Iterator[int]:
        self.is_open = True
        try:
            while self.number < total:
                yield self.number + 1
                self.number += 1
        finally:
            self.is_open = False


def loader(run: Run, **options: Any) -> RunLoader:
    return RunLoader(run, run.batches(6), range(6), DATA, RunEnd(6), **options)


def test_one_for_is_the_whole_run_and_a_second_one_is_told_so() -> None:
    run = Run()
    made = loader(run)
    assert list(made) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(InvalidArgumentError, match=r"all its passes; pass per=\"pass\""):
        list(made)


def test_who_breaks_out_of_the_whole_run_leaves_it_even_if_the_loader_is_kept() -> None:
    run = Run()
    made = loader(run)
    for number in made:
        if number == 2:
            assert run.is_open
            break
    assert not run.is_open


def test_with_per_pass_a_break_leaves_nothing_and_the_next_for_goes_on() -> None:
    run = Run()
    made = loader(run, per="pass")
    for number in made:
        if number == 1:
            break
    assert run.is_open


@pytest.mark.parametrize(
    ("data", "end", "length"),
    [
        (Data(1024, 32, 8), RunEnd(step=40), 160),
        (Data(90, 32, 8), RunEnd(cursor=180), 24),
        (Data(1000, 32 * 16, 32), RunEnd(cursor=3000), 96),  # rounds of 16 steps
        (Data(1000, 32 * 16, 32), RunEnd(step=3), 48),
        (Data(1000, 32, 32, is_planned=True), RunEnd(cursor=3000), 96),
        (Data(1000, 32, 32, is_planned=True), RunEnd(step=3), None),
    ],
)
def test_the_length_is_the_micro_batches_up_to_the_end_if_anybody_knows(
    data: Data, end: RunEnd, length: int | None
) -> None:
    run = Run()
    whole, one = RunLoader(run, iter(()), [], data, end), RunLoader(run, iter(()), [], data, end, per="pass")
    assert len(one) == -(-data.samples // data.microbatch)
    if length is not None:
        assert len(whole) == length
        return
    with pytest.raises(TypeError, match="planned rounds"):
        len(whole)
