"""`PartLoader`: the batches of the micro-batches that this machine was dealt, from a data set with indices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ringfort.torch.names import torch
from ringfort.torch.training.generators import seed_generators, undisturbed
from ringfort.torch.training.loader_workers import (
    WorkerStart,
    are_alive,
    as_it_is,
    explained,
    is_about_workers,
    own_generator,
    stop_workers,
)
from ringfort.torch.training.prefetch_plan import PrefetchPlan, Request


class _Loaded(NamedTuple):
    """What came of a request: its number and its batch, or the error of the data set."""

    number: int | None
    batch: Any
    error: Exception | None = None


class PartLoader:
    """Loads micro-batches with a real DataLoader, ahead of time if it has workers.

    The deal may change while they load. Then batches that nobody wants are dropped when they come, and the others are
    requested. The workers live until `close`; if they fail, the next `get` starts new ones.
    """

    def __init__(
        self,
        dataset: Any,
        upcoming: Callable[[], Iterable[Request]],
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: Any = None,
        timeout: float = 0,
    ) -> None:
        """Make a loader; the options are those of DataLoader. Workers start with the first `get`.

        `upcoming` returns what this machine computes next, in order, as far as it is known. It is called once for each
        `get`, and may start with the micro-batch that `get` is for.
        """
        self._upcoming = upcoming
        depth = num_workers * (2 if prefetch_factor is None else prefetch_factor)  # 2 is DataLoader's default
        self._plan: PrefetchPlan[_Loaded] = PrefetchPlan(depth)
        self._iterator: Any = None
        self._loader = torch.utils.data.DataLoader(
            _Parts(dataset, collate_fn or torch.utils.data.default_collate),
            batch_size=None,
            sampler=_Sampler(self._plan),
            num_workers=num_workers,
            collate_fn=as_it_is,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            worker_init_fn=WorkerStart(worker_init_fn),
            multiprocessing_context=multiprocessing_context,
            timeout=timeout,
            generator=own_generator(),
        )

    def get(self, request: Request) -> Any:
        """Return the collated batch of `request`; wait for it if it was not loaded ahead.

        Raises what the data set or `collate_fn` raised for this micro-batch, as DataLoader does, and `RuntimeError` if
        a worker died or did not answer within `timeout`.
        """
        if not are_alive(self._iterator):  # the program was told when it happened, and continues nevertheless
            self.close()
        self._plan.want(request, self._upcoming())
        while not self._plan.has(request):
            self._receive()
        loaded = self._plan.take(request)
        while self._plan.is_idle():
            self._receive()
        if loaded.error is not None:
            raise loaded.error
        return loaded.batch

    def close(self) -> None:
        """End the workers, and wait for them. Idempotent."""
        iterator, self._iterator = self._iterator, None
        self._plan.restart()
        stop_workers(iterator)

    def _receive(self) -> None:
        try:
            if self._iterator is None:
                self._iterator = iter(self._loader)
            loaded = self._next()
            if loaded.number not in (None, self._plan.head):  # a signal handler has raised where a batch was taken
                self.close()
            elif self._plan.receive(loaded) is None and loaded.error is not None:
                raise loaded.error  # there was nothing to load: the start of the worker failed
        except BaseException:  # nobody knows what is in the queue now
            self.close()
            raise

    def _next(self) -> _Loaded:
        in_flight = self._plan.in_flight
        try:
            return _Loaded(*next(self._iterator))
        except Exception as exc:
            # If no batch made room for a request, it was not a batch that failed.
            if self._plan.in_flight == in_flight or is_about_workers(exc):
                raise explained(exc)  # noqa: B904  # mostly the same error
            return _Loaded(None, None, exc)


class _Sampler:
    """Hands the requests of a plan to a DataLoader."""

    def __init__(self, plan: PrefetchPlan[_Loaded]) -> None:
        self._plan = plan

    def __iter__(self) -> Iterator[tuple[int, Request | None]]:
        while True:
            yield self._plan.hand_out()


class _Parts(torch.utils.data.Dataset):
    """A data set whose items are the batches of requests, with their numbers."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.failure: Exception | None = None
        self._collate = collate

    def __getitem__(self, numbered: tuple[int, Request | None]) -> tuple[int, Any]:
        number, request = numbered
        if self.failure is not None:
            raise self.failure
        if request is None:
            return number, None
        if torch.utils.data.get_worker_info() is not None:
            return number, self._load(request)
        with undisturbed():  # the program draws from these generators, too
            return number, self._load(request)

    def _load(self, request: Request) -> Any:
        seed_generators(request.seed)
        if getattr(self.dataset, "__getitems__", None):
            samples = self.dataset.__getitems__(list(request.indices))
        else:
            samples = [self.dataset[index] for index in request.indices]
        return self._collate(samples)
