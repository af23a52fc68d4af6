"""What the libraries have in common: a `DataLoader` of theirs becomes the loader of a run."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

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
