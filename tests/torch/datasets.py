"""Data sets for the tests of the loaders. Here, so that spawned workers find them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Noisy(torch.utils.data.Dataset[Any]):
    """Sample i is i, with one number of each generator."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(()).item(), random.random(), np.random.random()  # noqa: NPY002


class Bulk(torch.utils.data.Dataset[Any]):
    """Gives a micro-batch at a time."""

    def __getitem__(self, index: int) -> int:
        raise AssertionError("not by single samples")

    def __getitems__(self, indices: list[int]) -> list[int]:
        assert isinstance(indices, list)
        return [10 * index for index in indices]


class Recorded(torch.utils.data.Dataset[Any]):
    """Writes each index that it is asked for, and who was asked, to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getitem__(self, index: int) -> int:
        with self.path.open("a") as file:
            file.write(f"{index} {os.getpid()}\n")
        return index

    def loaded(self) -> list[int]:
        return [int(line.split()[0]) for line in self.path.read_text().splitlines()]

    def workers(self) -> set[int]:
        return {int(line.split()[1]) for line in self.path.read_text().splitlines()}


class Broken(torch.utils.data.Dataset[Any]):
    """Some samples raise; others end the worker that loads them, take half a second, or interrupt the program."""

    def __init__(
        self, *, bad: frozenset[int] = frozenset(), deadly: int = -1, slow: int = -1, interrupting: int = -1
    ) -> None:
        self.bad = bad
        self.deadly = deadly
        self.slow = slow
        self.interrupting = interrupting

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise KeyError(f"no sample {index}")
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.slow:
            time.sleep(0.5)
        if index == self.interrupting:
            os.kill(os.getppid(), signal.SIGINT)
        return index


class Prepared(torch.utils.data.Dataset[Any]):
    """Works only in workers where `open_file` has prepared it."""

    def __init__(self) -> None:
        self.handle: str | None = None

    def __getitem__(self, index: int) -> str:
        info: Any = torch.utils.data.get_worker_info()
        assert info.dataset is self
        return f"{self.handle} {index}"


def open_file(worker_id: int) -> None:
    """A `worker_init_fn` as programs write it."""
    info: Any = torch.utils.data.get_worker_info()
    info.dataset.handle = f"handle of {worker_id}/{info.num_workers}"


def fail_to_open(worker_id: int) -> None:
    """A `worker_init_fn` that fails."""
    raise FileNotFoundError("no such file")


class PinnedList(list[Any]):
    """A batch of the program's own class, which knows whether it is in pinned memory."""

    is_pinned = False

    def pin_memory(self) -> PinnedList:
        other = PinnedList(self)
        other.is_pinned = True
        return other


class Numbers(torch.utils.data.IterableDataset[Any]):
    """A stream of the numbers below `length`, shuffled and with noise of all generators."""

    def __init__(self, length: int, *, bad: int = -1, deadly: int = -1) -> None:
        self.length = length
        self.bad = bad
        self.deadly = deadly

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(self.length).tolist():
            if index == self.bad:
                raise KeyError(f"no sample {index}")
            if index == self.deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            yield index, random.random(), np.random.random()  # noqa: NPY002
