"""Micro-batches of a data set with indices, loaded by real DataLoaders while the deal changes."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from ringfort.torch.training.part_loader import PartLoader
from ringfort.torch.training.prefetch_plan import Request
from ringfort.training.elastic.sample_order import random_key
from tests.torch import datasets

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than this machine has cores
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
forms = pytest.mark.parametrize("num_workers", [0, 1, 2])


class Deal:
    """What this machine computes next."""

    def __init__(self, *parts: int, size: int = 3) -> None:
        self.size = size
        self.now = list(parts)

    def __call__(self) -> list[Request]:
        return [self.request(part) for part in self.now]

    def request(self, part: int) -> Request:
        indices = tuple(range(part * self.size, (part + 1) * self.size))
        return Request(part // 4, part % 4, indices, random_key(0, part // 4, part % 4))


@contextmanager
def loading(dataset: Any, deal: Deal, **options: Any) -> Iterator[Callable[[int], Any]]:
    """What gets the batch of a part, which is then no longer to come."""
    if options.get("num_workers"):
        options = {"multiprocessing_context": "fork", **options}
    loader = PartLoader(dataset, deal, **options)

    def get(part: int) -> Any:
        batch = loader.get(deal.request(part))
        deal.now = [other for other in deal.now if other != part]
        return batch

    try:
        yield get
    finally:
        loader.close()


@forms
def test_every_micro_batch_comes_in_the_order_of_the_deal(num_workers: int) -> None:
    with loading(range(1000), Deal(*range(12)), num_workers=num_workers) as get:
        for part in range(12):
            assert get(part).tolist() == [3 * part, 3 * part + 1, 3 * part + 2]


@forms
def test_a_changed_deal_is_followed_and_no_wanted_batch_is_lost(num_workers: int, tmp_path: Path) -> None:
    dataset = datasets.Recorded(tmp_path / "loaded")
    deal = Deal(0, 1, 2, 3, 8, 9, size=1)
    with loading(dataset, deal, num_workers=num_workers) as get:
        assert get(0).tolist() == [0]
        deal.now = [5, 1, 8, 9, 10]  # parts 2 and 3 go to another machine, 5 and 10 come
        for part in (5, 1, 8, 9, 10):
            assert get(part).tolist() == [part]
        deal.now = []
        assert get(77).tolist() == [77]  # nobody knew of it
    loaded = dataset.loaded()
    assert loaded.count(1) == loaded.count(8) == loaded.count(9) == 1
    if num_workers == 0:
        assert loaded == [0, 5, 1, 8, 9, 10, 77]


def test_what_is_known_is_loaded_by_all_workers_while_the_program_computes(tmp_path: Path) -> None:
    dataset = datasets.Recorded(tmp_path / "loaded")
    with loading(dataset, Deal(*range(20), size=1), num_workers=2, prefetch_factor=2) as get:
        for part in range(16):
            get(part)
    assert len(dataset.workers()) == 2
    assert max(dataset.loaded()) <= 19
    assert sorted(dataset.loaded())[:16] == list(range(16))
    assert len(dataset.loaded()) == len(set(dataset.loaded()))


def test_no_more_than_the_queue_is_loaded_ahead(tmp_path: Path) -> None:
    dataset = datasets.Recorded(tmp_path / "loaded")
    with loading(dataset, Deal(*range(100), size=1), num_workers=1, prefetch_factor=3) as get:
        for part in range(10):
            get(part)
    assert max(dataset.loaded()) <= 9 + 3


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), np.random.random()  # noqa: NPY002


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 2}, {"num_workers": 1, "start": "spawn"}])
def test_randomness_depends_on_the_micro_batch_alone(options: dict[str, Any]) -> None:
    if start := options.get("start"):
        options = {"num_workers": 1, "multiprocessing_context": start}
    with loading(datasets.Noisy(), Deal(0, 1, 2, 3, 4)) as get:
        expected = {part: get(part) for part in range(5)}
    with loading(datasets.Noisy(), Deal(4, 1), **options) as get:
        for part in (4, 2, 1, 3, 0):  # in another order, and some without notice
            for mine, theirs in zip(get(part), expected[part], strict=True):
                assert mine.tolist() == theirs.tolist()
    assert len({number for batch in expected.values() for values in batch[1:] for number in values.tolist()}) == 45


@forms
def test_the_generators_of_the_program_are_not_disturbed(num_workers: int) -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    expected = [draws(), draws()]
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    with loading(datasets.Noisy(), Deal(0, 1), num_workers=num_workers) as get:
        get(0)
        assert draws() == expected[0]
        get(1)
    assert draws() == expected[1]


@forms
def test_a_data_set_that_gives_many_samples_at_once_is_asked_so(num_workers: int) -> None:
    with loading(datasets.Bulk(), Deal(1), num_workers=num_workers) as get:
        assert get(1).tolist() == [30, 40, 50]


@forms
def test_the_batch_is_what_collate_fn_returns(num_workers: int) -> None:
    def collate(samples: Sequence[int]) -> dict[str, Any]:
        return {"ids": np.array(samples), "seen": draws()}

    with loading(range(100), Deal(0), num_workers=num_workers, collate_fn=collate) as get:
        first = get(0)
    assert isinstance(first["ids"], np.ndarray)
    with loading(range(100), Deal(0), collate_fn=collate) as get:
        assert get(0)["seen"] == first["seen"]


@forms
def test_an_error_of_the_data_set_is_raised_for_its_micro_batch_alone(num_workers: int) -> None:
    deal = Deal(0, 1, 2, 3, 4, 5, size=1)
    dataset = datasets.Broken(bad=frozenset({1, 3, 4}))
    with loading(dataset, deal, num_workers=num_workers) as get:
        assert get(0).tolist() == [0]
        with pytest.raises(KeyError, match="no sample 1") as caught:
            get(1)
        assert ("in DataLoader worker process" in str(caught.value)) == (num_workers > 0)
        deal.now = [2, 5, 4]  # 3 went to another machine
        assert get(2).tolist() == [2]
        assert get(5).tolist() == [5]
        for _ in range(2):  # it may be tried again
            with pytest.raises(KeyError, match="no sample 4"):
                get(4)
        assert get(7).tolist() == [7]


def get_all(get: Callable[[int], Any], count: int) -> None:
    for part in range(count):
        get(part)


def test_a_worker_that_is_killed_is_an_error_and_the_next_get_starts_others() -> None:
    deal = Deal(0, 1, 2, 3, size=1)
    # Lists: a tensor comes through a socket, and torch may raise its error just when Python has opened that.
    with loading(datasets.Broken(deadly=2), deal, num_workers=1, collate_fn=list) as get:
        with pytest.raises(RuntimeError, match=r"^DataLoader worker .*(is killed by signal|exited)"):
            get_all(get, 3)
        deal.now = [8]
        assert get(7) == [7]


def test_a_worker_that_does_not_answer_in_time_is_an_error_that_says_what_to_do() -> None:
    with (
        loading(datasets.Broken(slow=1), Deal(size=1), num_workers=1, timeout=0.1) as get,
        pytest.raises(RuntimeError, match=r"timed out after 0\.1 seconds\. A worker is stuck, or slower"),
    ):
        get(1)


def test_a_failing_worker_init_fn_is_raised_whatever_is_wanted() -> None:
    deal = Deal(0, 1, size=1)
    with loading(range(100), deal, num_workers=2, worker_init_fn=datasets.fail_to_open) as get:
        for part in (0, 5, 6):
            with pytest.raises(FileNotFoundError, match="no such file"):
                get(part)


def test_worker_init_fn_finds_the_data_set_of_the_program() -> None:
    with loading(datasets.Prepared(), Deal(0, size=1), num_workers=1, worker_init_fn=datasets.open_file) as get:
        assert get(0) == ["handle of 0/1 0"]


def test_signals_for_the_process_group_do_not_reach_the_workers() -> None:
    with loading(range(100), Deal(0, 1, size=1), num_workers=2) as get:
        get_all(get, 2)  # one of each worker: now both have started
        workers = {worker.pid for worker in multiprocessing.active_children()}
        assert len(workers) == 2
        assert {os.getpgid(worker) for worker in workers} == workers


def test_an_interrupted_get_mixes_up_nothing() -> None:
    dataset = datasets.Broken(interrupting=1)  # lists, as above
    with loading(dataset, Deal(0, 2, 3, 4, size=1), num_workers=1, prefetch_factor=4, collate_fn=list) as get:
        assert get(0) == [0]
        with pytest.raises(KeyboardInterrupt):
            get(1)
        for part in (4, 2, 3):
            assert get(part) == [part]


def test_a_batch_that_was_taken_behind_its_back_mixes_up_nothing() -> None:
    deal = Deal(*range(9), size=1)
    with closing(PartLoader(range(100), deal, num_workers=1, multiprocessing_context="fork")) as loader:
        for part in range(8):
            if part in (2, 5):
                next(loader._iterator)  # as if a signal handler had raised an error just when this returned
            assert loader.get(deal.request(part)).tolist() == [part]


def test_workers_that_died_after_their_last_batch_are_replaced() -> None:
    with loading(range(100), Deal(0, 1, 2, size=1), num_workers=2) as get:
        get_all(get, 2)  # one of each worker: now both have started
        workers = multiprocessing.active_children()
        for worker in workers:
            worker.terminate()  # by its parent: it ends without an error
            worker.join()
        for part in (2, 3):
            assert get(part).tolist() == [part]
        assert not set(workers) & set(multiprocessing.active_children())


@contextmanager
def pretended_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        patch.setattr(torch.accelerator, "set_device_index", lambda _: None)
        yield


@forms
def test_batches_are_pinned(num_workers: int) -> None:
    options = {"num_workers": num_workers, "pin_memory": True, "collate_fn": datasets.PinnedList}
    with pretended_gpu(), loading(range(100), Deal(0, 1), **options) as get:
        assert get(0).is_pinned
        assert get(9) == [27, 28, 29]  # with workers, after some requests for nothing
        assert get(1).is_pinned


def test_a_loader_that_was_closed_can_be_closed_again_and_used_again() -> None:
    deal = Deal(0, 1, size=1)
    loader = PartLoader(range(100), deal, num_workers=1, multiprocessing_context="fork")
    loader.close()
    assert loader.get(deal.request(0)).tolist() == [0]
    loader.close()
    loader.close()
    assert not multiprocessing.active_children()
    assert loader.get(deal.request(1)).tolist() == [1]
    loader.close()
