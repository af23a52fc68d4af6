"""The arguments of `ringfort.torch.elastic` and of its run, checked."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, cast

from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import torch
from ringfort.torch.training.shards import is_sharded
from ringfort.training.elastic.dealing import Data, RunEnd
from ringfort.training.elastic.handle import whole_number
from ringfort.training.elastic.local_sum import checked_count
from ringfort.training.elastic.rounds import RoundSettings


class DataSettings:
    """What `elastic` was told about the data."""

    def __init__(self, batch: int, seed: int, rounds: RoundSettings | None = None) -> None:
        """With local steps, a step of the run is a round of several optimizer steps."""
        self._batch = whole_number("batch", batch)
        if self._batch < 1:
            raise InvalidArgumentError("batch", batch, "must be the number of samples per step of the whole run")
        self._seed = whole_number("seed", seed)
        self._local_batch, self._rounds = self._batch, rounds
        if rounds is not None:
            self._batch *= rounds.times

    def cut(
        self,
        dataset: Any,
        microbatch: int,
        epochs: int | None,
        steps: int | RunEnd | None,
        samples: int | None,
        *,
        is_stream: bool,
    ) -> tuple[Data, RunEnd]:
        """Return the data of a run, and where it ends. How many rounds a pass has may be decided while it goes on, so
        the end of the last pass is a cursor."""
        if (epochs is None) == (steps is None):
            raise InvalidArgumentError("epochs", epochs, "pass either epochs= or steps=")
        if is_stream and samples is None:
            samples = _length_of(dataset)
        if is_stream and samples is None:
            is_planned = self._rounds is not None and self._rounds.is_planned
            if steps is None or isinstance(steps, RunEnd) or is_planned:
                raise InvalidArgumentError("samples", samples, "say how many samples a pass over the stream has")
            samples = max(1, whole_number("steps", steps)) * self._batch
        elif not is_stream:
            if samples is not None:
                raise InvalidArgumentError("samples", samples, "is for iterable data sets; this one has a length")
            if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
                why = "must have indices and a length, or be one that can be iterated over again and again"
                raise InvalidArgumentError("dataset", type(dataset).__name__, why)
            samples = len(dataset)
        size = whole_number("microbatch", microbatch)
        if self._rounds is not None and size != self._local_batch:
            why = f"must be the batch ({self._local_batch}) with local steps: each one is an optimizer step"
            raise InvalidArgumentError("microbatch", microbatch, why)
        data = Data(
            whole_number("samples", samples),
            self._batch,
            size,
            self._seed,
            sync="" if self._rounds is None else str(self._rounds),
            is_planned=self._rounds is not None and self._rounds.is_planned,
        )
        if isinstance(steps, RunEnd):
            return data, steps
        name, given = ("steps", steps) if epochs is None else ("epochs", epochs)
        count = whole_number(name, given)
        if count < 0:
            raise InvalidArgumentError(name, given, "must be a whole number of at least 0")
        return data, RunEnd(step=count) if epochs is None else RunEnd(cursor=count * data.samples)


def is_read_as_stream(dataset: Any) -> bool:
    """Return whether a data set is read from its start, because it has no indices. Raise `InvalidArgumentError` for one
    that can be read only once."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return True
    if not hasattr(dataset, "__iter__") or (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return False
    if hasattr(dataset, "__next__"):
        why = "can be read only once, and each pass starts anew; pass an object whose iter() starts at the beginning"
        raise InvalidArgumentError("dataset", type(dataset).__name__, why)
    return True


def _length_of(dataset: Any) -> int | None:
    """Return how many samples a stream has, if it says so."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def schedulers_of(scheduler: Any) -> list[Any]:
    """Return the schedulers that were passed: none, one or several."""
    several = isinstance(scheduler, (list, tuple))
    found = list(cast("Sequence[Any]", scheduler)) if several else [] if scheduler is None else [scheduler]
    for one in found:
        if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau):
            why = "needs a metric: step it in on_step, and pass it in state= so that it is part of the run"
            raise InvalidArgumentError("scheduler", type(one).__name__, why)
        if not hasattr(one, "step") or not hasattr(one, "load_state_dict"):
            raise InvalidArgumentError("scheduler", type(one).__name__, "must be a scheduler of torch.optim")
    return found


def check_model(model: Any, optimizer: Any) -> None:
    """Raise `InvalidArgumentError` for what cannot be trained in a run."""
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError("model", type(model).__name__, "must be a torch.nn.Module")
    if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
        raise InvalidArgumentError("model", type(model).__name__, "pass the model itself; the run averages gradients")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError("optimizer", type(optimizer).__name__, "must be a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgumentError("optimizer", "LBFGS", "evaluates the model several times per step; use another one")
    if isinstance(optimizer, torch.optim.SparseAdam):
        why = "needs sparse gradients, and the mean over all machines is dense; use Adam or SGD"
        raise InvalidArgumentError("optimizer", "SparseAdam", why)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin):
            raise InvalidArgumentError("model", name, "has no shape yet; run the model once before ringfort.elastic()")
        if parameter.device.type == "meta":
            raise InvalidArgumentError("model", name, "is on the device meta; materialize it with model.to_empty()")
        if type(parameter.data) is not torch.Tensor and not is_sharded(parameter):
            why = f"is a {type(parameter.data).__name__}; each machine must have the whole model, as plain tensors"
            raise InvalidArgumentError("model", name, why)


def check_options(scaler: Any, clip_norm: Any, state: Any, on_step: Any, scheduler_per: Any) -> None:
    """Raise `InvalidArgumentError` for options of another kind."""
    if scheduler_per not in ("step", "pass"):
        raise InvalidArgumentError("scheduler_per", scheduler_per, "must be step or pass")
    is_number = isinstance(clip_norm, (int, float)) and not isinstance(clip_norm, bool)
    if clip_norm is not None and not (is_number and isfinite(clip_norm) and clip_norm > 0):
        raise InvalidArgumentError("clip_norm", clip_norm, "must be a number above 0")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InvalidArgumentError("scaler", type(scaler).__name__, "must be a torch.amp.GradScaler")
    if on_step is not None and not callable(on_step):
        raise InvalidArgumentError("on_step", on_step, "must be a function of the gradients and the step")
    names = list(cast("dict[Any, Any]", state)) if isinstance(state, dict) else [None]
    if state is not None and not all(isinstance(name, str) for name in names):
        raise InvalidArgumentError("state", type(cast("Any", state)).__name__, "must be a dict with names as keys")


def checked_weight(weight: Any) -> float:
    """Return a weight as a float: a number, or a tensor of one."""
    is_one = isinstance(weight, torch.Tensor) and weight.numel() == 1
    try:
        return checked_count(weight.item() if is_one else weight)
    except InvalidArgumentError:
        why = "must be the number of samples, or of tokens, of this batch"
        raise InvalidArgumentError("weight", weight, why) from None
