"""`ringfort.log`: what a program wants to be seen, such as its loss; and `ringfort.loading`, which times its data."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any, Final, Generic, SupportsIndex, TypeVar

from ringfort.errors import InvalidArgumentError
from ringfort.telemetry.forward import Forwarder, Writer
from ringfort.telemetry.trace import own_trace

T = TypeVar("T")

_forwarder: Final = Forwarder()


def log(step: SupportsIndex | None = None, *, samples: SupportsIndex | None = None, **values: Any) -> None:
    """Show numbers to those who watch this run: `ringfort.log(loss=loss, lr=0.1)`.

    Each value is a number, or something that `float()` takes, such as a tensor with one element. (To read one from a
    GPU waits for the GPU.) `step` is by default the step that was done last. `samples` is not shown: it counts the
    samples that this rank has computed for the current step, for the throughput.

    At rank 0 the values also go to Weights & Biases, MLflow and TensorBoard, as far as one of them is active in this
    program: `wandb.run`, `mlflow.active_run()`, and the one open `SummaryWriter` (see `log_to` if there are several).
    What goes wrong there is a warning in the log.

    Raises `InvalidArgumentError` for a value that is not one number.
    """
    numbers = {name: _number(name, value) for name, value in values.items()}
    number = None if step is None else _whole("step", step)
    trace = own_trace()
    if samples is not None:
        trace.add_samples(_whole("samples", samples))
    if numbers:
        trace.log(numbers, number)
        if trace.header.rank <= 0:
            _forwarder.send(numbers, trace.step if number is None else number)


def log_to(writer: Writer | None) -> None:
    """Choose where `log` sends its values beside those who watch, in place of the open `SummaryWriter` of TensorBoard:
    anything with `add_scalar(name, value, step)`. None goes back to that one."""
    if writer is not None and not callable(getattr(writer, "add_scalar", None)):
        raise InvalidArgumentError("writer", type(writer).__name__, "must have add_scalar(name, value, step)")
    _forwarder.writer = writer


class Loading(Generic[T]):
    """An iterable whose waits are counted. Made by `loading`."""

    def __init__(self, iterable: Iterable[T]) -> None:
        self._iterable = iterable

    def __iter__(self) -> Iterator[T]:
        trace = own_trace()
        with trace.loading():
            iterator = iter(self._iterable)
        while True:
            try:
                with trace.loading():
                    item = next(iterator)
            except StopIteration:
                return
            yield item

    def __len__(self) -> int:
        return len(self._iterable)  # pyright: ignore[reportArgumentType]  # raises TypeError, as it should


def loading(iterable: Iterable[T]) -> Loading[T]:
    """Return an iterable over the same items, which counts the time that the program waits for them as loading of data:
    `for batch in ringfort.loading(batches):`.

    Loaders of `ringfort.torch.elastic`, and torch's DataLoader in programs with a Ringfort process group, are counted
    without it.
    """
    return Loading(iterable)


def _number(name: str, value: Any) -> float:
    item: Any = getattr(value, "item", None)  # of a NumPy array or a tensor, with any number of axes
    try:
        number: Any = item() if callable(item) else value
        return float(number)
    except (TypeError, ValueError, OverflowError, RuntimeError) as exc:
        why = f"must be one number, such as a float or a tensor with one element ({exc})"
        raise InvalidArgumentError(name, type(value).__name__, why) from None


def _whole(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        why = "must be a whole number of at least 0; give values by name, such as ringfort.log(loss=0.3)"
        raise InvalidArgumentError(name, value, why)
    return number
