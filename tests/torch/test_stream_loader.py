"""Micro-batches of a stream that every machine reads for itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from ringfort.errors import InvalidArgumentError
from ringfort.torch.training.stream_loader import StreamLoader, StreamRequest
from ringfort.training.elastic.dealing import Data
from ringfort.training.elastic.sample_order import random_key
from tests.torch import datasets
from tests.torch.test_part_loader import draws, pretended_gpu

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
forms = pytest.mark.parametrize("num_workers", [0, 1])
DATA = Data(samples=20, batch=8, microbatch=3)


def request(step: int, part: int, data: Data = DATA) -> StreamRequest:
    """Part `part` of the step `step`, from 0. A pass of `DATA` has three steps, the last of four samples."""
    steps = -(-data.samples // data.batch)
    span = data.span(step // steps * data.samples + step % steps * data.batch)
    begin = span.begin + part * data.microbatch
    end = min(begin + data.microbatch, span.end)
    return StreamRequest(step, part, span, begin, end, random_key(data.seed, step, part))


def parts(step: int) -> int:
    return DATA.parts(request(step, 0).span)


@contextmanager
def reading(dataset: Any, **options: Any) -> Iterator[StreamLoader]:
    if options.get("num_workers"):
        options = {"multiprocessing_context": "fork", **options}
    loader = StreamLoader(dataset, **options)
    try:
        yield loader
    finally:
        loader.close()


def plain(batch: list[Any]) -> list[list[float]]:
    return [column.tolist() for column in batch]


def everything(num_workers: int, steps: int, **options: Any) -> dict[tuple[int, int], list[list[float]]]:
    with reading(datasets.Numbers(20), num_workers=num_workers, **options) as loader:
        places = [(step, part) for step in range(steps) for part in range(parts(step))]
        return {place: plain(loader.get(request(*place))) for place in places}


@forms
def test_each_sample_comes_once_per_pass_and_each_pass_is_shuffled_anew(num_workers: int) -> None:
    found = everything(num_workers, steps=6)
    passes = [
        [index for place, batch in found.items() if place[0] // 3 == number for index in batch[0]] for number in (0, 1)
    ]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(20))
    assert passes[0] != passes[1]
    assert everything(num_workers, steps=3, seed=1) != everything(num_workers, steps=3)


@forms
def test_machines_that_are_dealt_different_parts_read_the_same_stream(num_workers: int) -> None:
    expected = everything(0, steps=6)
    with reading(datasets.Numbers(20), num_workers=num_workers) as loader:
        draws()  # whatever the program draws meanwhile
        # A part of each step; then another machine dies in step 4, and its parts are dealt to this one.
        for place in [(0, 2), (1, 0), (3, 1), (4, 2), (4, 0), (4, 1), (5, 1)]:
            assert plain(loader.get(request(*place))) == expected[place]
            draws()


@forms
def test_a_machine_that_joins_late_or_goes_back_gets_the_same_samples(num_workers: int) -> None:
    expected = everything(0, steps=6)
    with reading(datasets.Numbers(20), num_workers=num_workers) as loader:
        for place in [(5, 1), (4, 2), (4, 0), (0, 1)]:
            assert plain(loader.get(request(*place))) == expected[place]


@forms
def test_the_generators_of_the_program_are_not_disturbed(num_workers: int) -> None:
    torch.manual_seed(1)
    expected = draws()[0]
    torch.manual_seed(1)
    with reading(datasets.Numbers(20), num_workers=num_workers) as loader:
        loader.get(request(0, 0))
        assert draws()[0] == expected


@forms
def test_a_short_stream_is_read_again_within_a_pass(num_workers: int) -> None:
    with reading(range(6), num_workers=num_workers) as loader:
        found = [loader.get(request(0, part)).tolist() for part in range(3)]
        found += [loader.get(request(1, part)).tolist() for part in range(3)]
    assert [index for batch in found for index in batch] == [place % 6 for place in range(16)]


@forms
def test_an_empty_stream_and_one_that_ends_for_good_are_errors(num_workers: int) -> None:
    with (
        reading([], num_workers=num_workers) as loader,
        pytest.raises(InvalidArgumentError, match="dataset='list': the stream gave no samples"),
    ):
        loader.get(request(0, 0))
    with reading(iter(range(5)), num_workers=num_workers) as loader:
        assert loader.get(request(0, 0)).tolist() == [0, 1, 2]
        assert loader.get(request(0, 1)._replace(end=5)).tolist() == [3, 4]
        with pytest.raises(InvalidArgumentError, match="if it can be read only once"):
            loader.get(request(0, 1))


def test_only_the_current_step_stays_in_memory() -> None:
    data = Data(samples=1 << 40, batch=8, microbatch=3)
    numbers = count()
    with reading(numbers) as loader:
        for step in range(100):
            assert loader.get(request(step, 1, data)).tolist() == [8 * step + 3, 8 * step + 4, 8 * step + 5]
            assert len(loader._window._samples) <= 8
            assert repr(numbers) == f"count({8 * step + 6})"  # nothing was read ahead
        loader.get(request(1000, 0, data))
        assert len(loader._window._samples) <= 8


@forms
def test_an_error_of_the_stream_is_raised_every_time_and_never_taken_for_its_end(num_workers: int) -> None:
    bad = everything(0, steps=1)[0, 1][0][1]
    with reading(datasets.Numbers(20, bad=int(bad)), num_workers=num_workers) as loader:
        good = plain(loader.get(request(0, 0)))
        for _ in range(2):
            with pytest.raises(KeyError, match=f"no sample {int(bad)}"):
                loader.get(request(0, 1))
        assert plain(loader.get(request(0, 0))) == good


def test_a_worker_that_is_killed_is_an_error_and_not_the_end_of_the_stream() -> None:
    deadly = everything(0, steps=1)[0, 0][0][1]
    with (
        reading(datasets.Numbers(20, deadly=int(deadly)), num_workers=1) as loader,
        pytest.raises(RuntimeError, match=r"^DataLoader worker .*(is killed by signal|exited)"),
    ):
        loader.get(request(0, 0))


def test_a_failing_worker_init_fn_is_raised() -> None:
    with (
        reading(range(20), num_workers=1, worker_init_fn=datasets.fail_to_open) as loader,
        pytest.raises(FileNotFoundError, match="no such file"),
    ):
        loader.get(request(0, 0))


@pytest.mark.parametrize("num_workers", [2, -1])
def test_several_workers_are_refused(num_workers: int) -> None:
    with pytest.raises(
        InvalidArgumentError, match=rf"num_workers={num_workers}: a stream is read by one worker at most"
    ):
        StreamLoader(range(9), num_workers=num_workers)


@forms
def test_randomness_of_collate_fn_depends_on_the_micro_batch_alone(num_workers: int) -> None:
    def collate(samples: list[int]) -> tuple[float, float, float]:
        return draws()

    with reading(range(20), collate_fn=collate, num_workers=num_workers) as loader:
        found = [loader.get(request(0, part)) for part in (0, 1, 0)]
    assert found[0] == found[2] != found[1]


@forms
def test_batches_are_pinned(num_workers: int) -> None:
    with (
        pretended_gpu(),
        reading(range(20), num_workers=num_workers, pin_memory=True, collate_fn=datasets.PinnedList) as loader,
    ):
        batch = loader.get(request(0, 1))
        assert batch.is_pinned
        assert batch == [3, 4, 5]
