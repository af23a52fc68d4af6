"""`StreamLoader`: the batches of the micro-batches that this machine was dealt, from a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import torch
from ringfort.torch.training.generators import OwnGenerators, seed_generators, undisturbed
from ringfort.torch.training.loader_workers import (
    WorkerStart,
    are_alive,
    as_it_is,
    explained,
    own_generator,
    stop_workers,
)
from ringfort.torch.training.stream_order import SampleWindow, read_pass
from ringfort.training.elastic.dealing import Span


class StreamRequest(NamedTuple):
    """One micro-batch that this machine computes: places `begin` to `end` of a pass."""

    step: int
    part: int
    span: Span
    """The pass, and the places that the whole step covers. What lies before them is sealed."""
    begin: int
    end: int
    seed: int
    """64 bits for its randomness: `random_key(seed of the run, step, part)`."""

    @property
    def microbatch(self) -> int:
        """The number of samples of a full micro-batch; the last one of a step may be shorter."""
        return (self.begin - self.span.begin) // self.part if self.part else self.end - self.begin


class StreamLoader:
    """Reads a stream from its start and takes from it what this machine was dealt.

    Samples of the current step stay in memory: they may be dealt to this machine if another one dies. After an error,
    the next `get` reads the stream again from its start.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int = 0,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: Any = None,
        timeout: float = 0,
    ) -> None:
        """Make a loader. `seed` is that of the run. The options are those of DataLoader, but `prefetch_factor` counts
        micro-batches, also those of other machines; by default those of one step.

        Raises `InvalidArgumentError` for more than one worker.
        """
        if num_workers not in (0, 1):
            why = (
                "a stream is read by one worker at most, because several would give its samples in another order than "
                "that of the other machines; use 0 or 1"
            )
            raise InvalidArgumentError("num_workers", num_workers, why)
        self._dataset = dataset
        self._seed = seed
        self._collate: Callable[[list[Any]], Any] = collate_fn or torch.utils.data.default_collate
        self._pin_memory = pin_memory
        self._has_worker = num_workers == 1
        self._prefetch_factor = prefetch_factor
        self._options = {
            "worker_init_fn": WorkerStart(worker_init_fn),
            "multiprocessing_context": multiprocessing_context,
            "timeout": timeout,
        }
        self._number = -1
        self._window = SampleWindow(0)
        self._generators = OwnGenerators()
        self._chunks: Iterator[list[Any]] | None = None

    def get(self, request: StreamRequest) -> Any:
        """Return the collated batch of `request`; read the stream up to its end for that.

        Raises what the data set or `collate_fn` raised, as DataLoader does, `RuntimeError` if the worker died or did
        not answer within `timeout`, and `InvalidArgumentError` if the stream has no samples.
        """
        is_here = request.span.number == self._number and request.begin >= self._window.begin
        if self._chunks is None or not is_here or not are_alive(self._chunks):
            self._restart(request)
        try:
            self._window.add([], request.span.begin)
            with nullcontext() if self._has_worker else self._generators.active():
                while self._window.end < request.end:
                    self._window.add(self._read(), request.span.begin)
        except BaseException:  # a part of the stream may be lost, and the rest would be at wrong places
            self.close()
            raise
        with undisturbed():
            seed_generators(request.seed)
            batch = self._collate(self._window.take(request.begin, request.end))
        return self._pinned(batch) if self._pin_memory else batch

    def close(self) -> None:
        """Stop reading; end the worker, and wait for it. Idempotent."""
        chunks, self._chunks = self._chunks, None
        stop_workers(chunks)

    def _restart(self, request: StreamRequest) -> None:
        self.close()
        span, size = request.span, request.microbatch
        self._number, self._window = span.number, SampleWindow(span.begin)
        feed = _Feed(self._dataset, span.number, span.begin, self._seed, size if self._has_worker else 1)
        if self._has_worker:
            loader = torch.utils.data.DataLoader(
                feed,
                batch_size=None,
                num_workers=1,
                collate_fn=as_it_is,
                prefetch_factor=self._prefetch_factor or max(2, -(-span.samples // size)),
                generator=own_generator(),
                **self._options,
            )
            self._chunks = iter(loader)
        else:
            self._chunks = iter(feed)

    def _read(self) -> list[Any]:
        assert self._chunks is not None
        try:
            return next(self._chunks)
        except StopIteration:
            why = "the stream gave no samples; if it can be read only once, pass an object whose iter() starts it anew"
            raise InvalidArgumentError("dataset", type(self._dataset).__name__, why) from None
        except Exception as exc:
            if not self._has_worker:
                raise
            raise explained(exc)  # noqa: B904  # mostly the same error

    def _pinned(self, batch: Any) -> Any:
        # A DataLoader of one batch: so pinning is torch's own, also where the batch is a class of the program.
        loader = torch.utils.data.DataLoader(
            [batch], batch_size=None, collate_fn=as_it_is, pin_memory=True, generator=own_generator()
        )
        return next(iter(loader))


class _Feed(torch.utils.data.IterableDataset):
    """A pass of a stream from a place on, in lists of `size` samples."""

    def __init__(self, dataset: Any, number: int, begin: int, seed: int, size: int) -> None:
        self.dataset = dataset
        self.failure: Exception | None = None
        self._number = number
        self._begin = begin
        self._seed = seed
        self._size = size

    def __iter__(self) -> Iterator[list[Any]]:
        if self.failure is not None:
            raise self.failure
        chunk: list[Any] = []
        for sample in read_pass(
            self.dataset, self._number, self._begin, seed=self._seed, seed_generators=seed_generators
        ):
            chunk.append(sample)
            if len(chunk) == self._size:
                yield chunk
                chunk = []
        if chunk:
            yield chunk
