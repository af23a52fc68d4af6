"""What the workers of a DataLoader need here: a start of their own, and errors that say what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from ringfort.torch.names import torch

_worker: Final[Any] = import_module("torch.utils.data._utils.worker")

_DIED: Final = (
    "If nothing above says why, the system has ended it for lack of memory: use fewer num_workers, or a smaller "
    "prefetch_factor or microbatch"
)
_LATE: Final = "A worker is stuck, or slower than timeout= allows: raise it, or use more num_workers"


class WorkerStart:
    """Runs first in each worker: a `worker_init_fn`."""

    def __init__(self, function: Callable[[int], object] | None) -> None:
        """`function` is the program's own `worker_init_fn`."""
        self._function = function

    def __call__(self, worker_id: int) -> None:
        """Prepare worker `worker_id`, whose data set is a wrapper: it has the program's as `dataset`, and raises what
        is in `failure`."""
        # Ctrl-C and the launcher's SIGTERM go to the whole process group. The training process finishes its step then,
        # and needs the workers for that. They end when it tells them, or a few seconds after its death.
        os.setpgid(0, 0)
        info: Any = torch.utils.data.get_worker_info()
        wrapper = info.dataset
        # The program's function, and its data set, expect to find the data set there and not a wrapper.
        _worker._worker_info = type(info)(
            id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=wrapper.dataset
        )
        try:
            if self._function is not None:
                self._function(worker_id)
        except Exception as exc:  # torch would tell the first request only, which perhaps nobody wants any more
            wrapper.failure = exc


def as_it_is(data: Any) -> Any:
    """Return `data`. As a `collate_fn`: by default a DataLoader converts arrays to tensors where it does not batch."""
    return data


def are_alive(iterator: Any) -> bool:
    """Whether all workers of the iterator of a DataLoader live, if it has any."""
    return all(worker.is_alive() for worker in getattr(iterator, "_workers", ()))


def stop_workers(iterator: Any) -> None:
    """End the workers of the iterator of a DataLoader, and wait for them. Idempotent; fine for one without workers."""
    # Not left to the garbage collector: the traceback of an error may hold the iterator for long.
    stop: Callable[[], None] = getattr(iterator, "_shutdown_workers", lambda: None)
    stop()


def is_about_workers(error: Exception) -> bool:
    """Whether torch speaks of the workers themselves, and not of what the data set raised in one of them."""
    return isinstance(error, RuntimeError) and str(error).startswith(
        "DataLoader "
    )  # not "Caught KeyError in DataLoader"


def explained(error: Exception) -> Exception:
    """Return an error of `next` on the iterator of a DataLoader with workers, with what to do if it is about them."""
    # Tensors come through sockets of the worker. Torch passes on their errors if the worker is not quite dead yet. What
    # the data set raised begins with "Caught".
    if isinstance(error, (ConnectionError, EOFError, FileNotFoundError)) and not str(error).startswith("Caught "):
        cause, error = error, RuntimeError("DataLoader worker exited while it sent a batch")
        error.__cause__ = cause
    if is_about_workers(error):
        text = str(error).rstrip(". ")
        error.args = (f"{text}. {_LATE if 'timed out' in text else _DIED}",)
    return error


def own_generator() -> Any:
    """Return a generator for a DataLoader, which would draw from the program's otherwise."""
    return torch.Generator()
