"""`prepare`: an elastic run in the loop of Hugging Face Accelerate.

    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, batch=256, epochs=3, nodes="2:8")

The loop stays as it is: `accelerator.backward(loss)`, `optimizer.step()`, `optimizer.zero_grad()`.

Accelerate takes LOCAL_RANK, which `ringfort run --elastic` sets, for a sign of a group of fixed size. So under that
launcher the accelerator is made by `new_accelerator()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, Final

from ringfort.config import Environment, hidden
from ringfort.errors import InvalidArgumentError
from ringfort.integrations.passes import Source
from ringfort.integrations.versions import require
from ringfort.torch.names import torch
from ringfort.torch.training.passes import Passes
from ringfort.torch.training.run import TorchRun, elastic
from ringfort.torch.training.run_loader import RunLoader

_PLACE: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""The place of a process in a group of fixed size, which an elastic run does not have."""


def new_accelerator(**options: Any) -> Any:
    """Return an `accelerate.Accelerator` that sees this process alone, under `ringfort run --elastic` too. Each process
    of a machine has a GPU of its own."""
    require("accelerate", "1.0")
    local = Environment.from_mapping().local_rank
    if local is not None and torch.cuda.is_available():
        torch.cuda.set_device(local % torch.cuda.device_count())
    with hidden(*_PLACE):
        return import_module("accelerate").Accelerator(**options)


class Loader:
    """The micro-batches of a run, on the accelerator's device. With `epochs=` one `for` is one pass, as with a
    `DataLoader`; with `steps=` it is the whole run. A `for` that was left in the middle is continued by the next."""

    def __init__(self, run: TorchRun, loader: RunLoader, batches: Iterable[Any], accelerator: Any) -> None:
        self.run = run
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self._loader = loader
        self._batches = batches
        self._accelerator = accelerator

    def __len__(self) -> int:
        """Return the micro-batches of one `for`, of all machines together: so many come if this machine is alone.
        Raise `TypeError` if nobody knows: with `steps=` and planned rounds."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        send: Any = import_module("accelerate.utils").send_to_device
        for batch in self._batches:
            yield send(batch, self._accelerator.device) if self._accelerator.device_placement else batch


class _Scheduler:
    """Stands for a scheduler that the run steps."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def step(self, *_: Any, **__: Any) -> None:
        """Do nothing: the run has stepped it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def prepare(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    loader: Any,
    scheduler: Any = None,
    *,
    batch: int,
    epochs: int | None = None,
    steps: int | None = None,
    clip_norm: float | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Begin an elastic run, in place of `accelerator.prepare`. Return model, optimizer and loader, and the scheduler if
    there is one. `loader.run` is the run.

    `batch` is the number of samples per step of the whole run, and the `batch_size` of the loader that of a
    micro-batch. The run takes `epochs` passes or `steps` steps; with local
    steps a step is a round, and `batch` the `batch_size`. The other options are those of
    `ringfort.torch.elastic`.

    Raise `InvalidArgumentError` for an accelerator with several processes or with gradient accumulation, and for a
    loader with a sampler of its own.
    """
    _check(accelerator)
    source = Source.of(loader)
    if (epochs is None) == (steps is None):
        raise InvalidArgumentError("epochs", epochs, "give either epochs= or steps=")
    prepared = accelerator.prepare_model(model)
    run = elastic(
        model, optimizer, batch=batch, scheduler=scheduler, scaler=accelerator.scaler, clip_norm=clip_norm, **options
    )
    loader = run.loader(
        source.dataset,
        microbatch=source.microbatch,
        epochs=epochs,
        steps=steps,
        per="run" if epochs is None else "pass",
        **source.options,
    )
    # With steps= the whole run is as one pass.
    batches = loader if steps is None else Passes(run, iter(loader), is_one=True)
    accelerator.backward = run.backward
    accelerator.clip_grad_norm_ = _Clipping(clip_norm)
    accelerator.clip_grad_value_ = _refuse_values
    found = (prepared, run.optimizer, Loader(run, loader, batches, accelerator))
    return found if scheduler is None else (*found, _Scheduler(scheduler))


def _check(accelerator: Any) -> None:
    if accelerator.num_processes != 1:
        why = (
            "must be 1: make it with ringfort.integrations.accelerate.new_accelerator(), which ignores other launchers"
        )
        raise InvalidArgumentError("num_processes", accelerator.num_processes, why)
    if accelerator.gradient_accumulation_steps != 1:
        why = "must be 1: batch= is the size of a step, and the run accumulates"
        raise InvalidArgumentError("gradient_accumulation_steps", accelerator.gradient_accumulation_steps, why)


class _Clipping:
    """Stands for `accelerator.clip_grad_norm_`: the run clips the mean gradients, in the steps that it replays too."""

    def __init__(self, clip_norm: float | None) -> None:
        self._clip_norm = clip_norm

    def __call__(self, parameters: Any, max_norm: float, norm_type: float = 2) -> None:
        """Raise `InvalidArgumentError` if the run does not clip in this way."""
        if max_norm != self._clip_norm or norm_type != 2:
            why = f"the run clips with clip_norm={self._clip_norm}; pass clip_norm={max_norm} to prepare()"
            raise InvalidArgumentError("max_norm", max_norm, why if norm_type == 2 else "only norm_type=2 is supported")


def _refuse_values(*_: Any, **__: Any) -> None:
    raise InvalidArgumentError("clip_value", "...", "a run clips by norm alone; pass clip_norm= to prepare()")
