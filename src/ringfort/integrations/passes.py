"""What the libraries have in common: a `DataLoader` of theirs becomes the loader of a run, one pass per `for`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Protocol

from ringfort.errors import InvalidArgumentError

_KEPT: Final = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
)
"""What the loader of a run takes over. The run has its own order and its own random numbers."""


@dataclass(frozen=True)
class Source:
    """What a `DataLoader` was made of."""

    dataset: Any
    microbatch: int
    options: dict[str, Any]

    @classmethod
    def of(cls, loader: Any) -> Source:
        """Raise `InvalidArgumentError` for a loader that a run cannot deal out: the run decides who computes what."""
        data: Any = import_module("torch.utils.data")
        if not isinstance(loader, data.DataLoader):
            raise InvalidArgumentError("loader", type(loader).__name__, "must be a torch.utils.data.DataLoader")
        if isinstance(loader.dataset, data.IterableDataset) or not hasattr(loader.dataset, "__len__"):
            raise InvalidArgumentError("dataset", type(loader.dataset).__name__, "must have a length and an index")
        if loader.batch_sampler is None:
            raise InvalidArgumentError("batch_size", None, "must be the samples per micro-batch")
        plain = (data.RandomSampler, data.SequentialSampler)
        microbatch: Any = loader.batch_size
        which = loader.sampler if microbatch else loader.batch_sampler
        if type(which) not in plain:
            raise InvalidArgumentError(
                "sampler", type(which).__name__, "must be the default: the run has its own order"
            )
        if getattr(loader.sampler, "replacement", False) or len(loader.sampler) != len(loader.dataset):
            why = "must give each sample once per pass, not a part of them or with replacement"
            raise InvalidArgumentError("sampler", type(loader.sampler).__name__, why)
        size = len(loader.dataset)
        if loader.drop_last and size % microbatch:
            why = "must be False: the last batch of a pass is smaller, and counts by its samples"
            raise InvalidArgumentError("drop_last", True, why)
        return cls(loader.dataset, microbatch, {name: getattr(loader, name) for name in _KEPT})

    def steps(self, batch: int) -> int:
        """Return the steps of one pass."""
        return -(-len(self.dataset) // batch)


class _Counted(Protocol):
    """What is needed of a run."""

    @property
    def number(self) -> int: ...

    @property
    def next_number(self) -> int: ...


class Passes:
    """The micro-batches of a run, one pass per `for`.

    A member without a part in the last step of a pass gets the first micro-batch of the next pass instead. That one is
    kept for the next `for`.
    """

    def __init__(self, run: _Counted, batches: Iterator[Any], steps: int, total: int) -> None:
        """`steps` are those of one pass, and `total` those of the run."""
        self._run = run
        self._batches = batches
        self._steps = steps
        self._total = total
        self._next: list[Any] = []
        """At most one."""
        self.is_over = False
        """Whether the run has finished, or this program has left it."""

    @property
    def number(self) -> int:
        """The pass of the next micro-batch, from 0."""
        return (self._run.next_number - 1) // self._steps

    def look(self) -> bool:
        """Wait for the next micro-batch, which stays. Return False if there is none."""
        if not self._next and not self.is_over:
            try:
                self._next.append(next(self._batches))
            except StopIteration:
                self.is_over = True
        return bool(self._next)

    def take(self) -> Any:
        """Return the next micro-batch, after `look`."""
        return self._next.pop()

    def __iter__(self) -> Iterator[Any]:
        if not self.look():
            return
        begun = self.number
        while self.number == begun and self.look() and self.number == begun:
            yield self.take()
        self.finish()

    def finish(self) -> None:
        """After the last step of the run, wait until those who still need something from this member have it."""
        if self._run.number >= self._total:
            self.look()
