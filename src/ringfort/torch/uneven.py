"""Uneven machines in torch: a hook for DDP with batches of unequal size, and local steps behind an optimizer.

hook = ringfort.torch.weighted_hook()
ddp.register_comm_hook(None, hook)
for x, y in loader:                       # more samples on a faster machine
    hook.begin(len(x))
    loss_fn(ddp(x), y).backward()         # the mean over the samples of all machines

local = ringfort.torch.local_steps(model, optimizer, samples=batch)
while local.samples < 1_000_000:
    train_one_batch(model, optimizer)     # optimizer.step() counts; weights are averaged now and then
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from numbers import Real
from typing import Any

from ringfort.context import DistributedContext
from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import dist, torch
from ringfort.torch.staged_view import staged_view
from ringfort.training.local_steps.run import LocalSteps


class _Weights:
    """The weights of all ranks in one backward pass after the other."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self._weight: float | None = None
        self._total: Any = None
        self._meeting: Any = None

    def begin(self, weight: float) -> None:
        """Begin a backward pass whose gradients are the mean over `weight` samples, or tokens, on this rank: with
        `no_sync` over all of its micro-batches. A collective: every rank calls it once for each backward pass that
        reduces, before that. It does not wait. A rank with weight 0 contributes nothing, whatever its gradients hold.

        Raises `InvalidArgumentError` for a weight that is no number of at least 0.
        """
        number: Any = weight
        is_number = not isinstance(number, bool) and isinstance(number, Real)
        if not is_number or not isfinite(weight) or weight < 0:
            raise InvalidArgumentError("weight", weight, "must be the number of samples, or of tokens, of this batch")
        self._weight = float(weight)
        device: Any = dist.distributed_c10d._get_object_coll_device(self._group)  # NCCL takes no tensors of the host
        self._total = torch.tensor([self._weight], dtype=torch.float64, device=device)
        self._meeting = dist.all_reduce(self._total, group=self._group, async_op=True)

    def _share(self, *, is_last: bool) -> float:
        """Return what this rank's gradients are multiplied by before they are added."""
        if self._weight is None:
            raise InvalidArgumentError("weighted_hook", None, "call hook.begin(number of samples) before backward()")
        if self._meeting is not None:
            self._meeting.wait()
            self._meeting = None
        weight, total = self._weight, float(self._total)
        if not total:
            raise InvalidArgumentError("weight", 0, "the weights of all ranks add up to 0; no mean exists")
        if is_last:
            self._weight = None
        return weight / total

    def reduce(self, state: Any, bucket: Any) -> Any:
        """Begin to average one bucket of gradients. Return the future of the result."""
        buffer, share = bucket.buffer(), self._share(is_last=bucket.is_last())
        if share:
            buffer.mul_(share)
        else:
            buffer.zero_()  # the mean over nothing may be NaN
        work = dist.all_reduce(buffer, group=self._group if state is None else state, async_op=True)
        return work.get_future().then(_first)


def _first(future: Any) -> Any:
    return future.value()[0]


def weighted_hook(group: Any = None) -> Callable[[Any, Any], Any]:
    """Return a hook for `DistributedDataParallel.register_comm_hook(None, hook)` with batches of unequal size: it
    averages the gradients over the samples of all ranks, where DDP averages over ranks. So machines may have batches in
    proportion to their speed, and the result is that of one large batch.

    Call `hook.begin(number of samples)` before each backward pass. Works with every backend of torch; `group` is the
    process group of the model, by default the default one. BatchNorm's statistics stay those of each rank.

    A missing `begin`, and weights that are all 0, raise `InvalidArgumentError`, which torch passes on as a
    `RuntimeError`.
    """
    weights = _Weights(group)

    def hook(state: Any, bucket: Any) -> Any:
        return weights.reduce(state, bucket)

    hook.__annotations__ = {}  # torch checks annotations, and does not take the text that they are here for its types
    hook.begin = weights.begin  # pyright: ignore[reportFunctionMemberAccess]
    return hook


class _LocalSteps(LocalSteps):
    """Also of tensors on a GPU or another device."""

    _view_of = staticmethod(staged_view)


def local_steps(
    model: Any,
    optimizer: Any,
    *,
    samples: float | Callable[[], float] = 1,
    ctx: DistributedContext | None = None,
    **options: Any,
) -> LocalSteps:
    """Return `ringfort.LocalSteps` over the parameters of a model that are trained: each `optimizer.step()` counts as a
    local step, and the last one of a round averages the weights. A `GradScaler` that leaves out a step leaves it out
    here too; clip as you like. Do not wrap the model in DDP.

    `samples` is the number of samples in a step, or a function that returns it. `ctx` is the group, by default that of
    `init_process_group("ringfort")`. Other keywords are those of `LocalSteps`. The hook stays until
    `local.remove_hook()`. Buffers, such as BatchNorm's statistics, stay those of each rank. After freezing, unfreezing
    or adding parameters, make another one. Parameters on a GPU or another device are copied to the host at the end of a
    round, and back; the global weights, and what a codec has not sent yet, are on the host.

    Raises `InvalidArgumentError` for an optimizer without step hooks, a model in DDP and parameters that are not
    floating point, and what `LocalSteps` raises. `optimizer.step()` raises what `LocalSteps.step` does, and
    `InvalidArgumentError` if the optimizer trains other parameters than are averaged.
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise InvalidArgumentError("model", "DistributedDataParallel", "averages gradients; pass the model itself")
    if not hasattr(optimizer, "register_step_post_hook"):
        why = "has no register_step_post_hook; call step() of ringfort.LocalSteps after each of its steps"
        raise InvalidArgumentError("optimizer", type(optimizer).__name__, why)
    if ctx is None:
        ctx = getattr(dist.group.WORLD, "context", None)
        if not isinstance(ctx, DistributedContext):
            why = 'pass the context of ringfort.init(), or call dist.init_process_group("ringfort") first'
            raise InvalidArgumentError("ctx", ctx, why)
    tree = {name: one for name, one in model.named_parameters() if one.requires_grad}
    local = _LocalSteps(ctx, tree, **options)

    def stepped(*_: Any) -> None:
        _check_trained(optimizer, tree)
        local.step(samples=samples() if callable(samples) else samples)

    _check_trained(optimizer, tree)
    local.remove_hook = optimizer.register_step_post_hook(stepped).remove
    return local


def _check_trained(optimizer: Any, tree: dict[str, Any]) -> None:
    """Raise `InvalidArgumentError` for a parameter that is trained and not averaged, which would be another one at each
    rank, and for one that was frozen, which outer momentum would move."""
    averaged = set(tree.values())
    others = (one for group in optimizer.param_groups for one in group["params"] if one not in averaged)
    if any(one.requires_grad for one in others):
        why = "trains a parameter that is not averaged: of another module, or unfrozen or added later; make local_steps"
        raise InvalidArgumentError("optimizer", type(optimizer).__name__, f"{why} of all that are trained")
    for name, one in tree.items():
        if not one.requires_grad:
            raise InvalidArgumentError(f"model[{name!r}]", "frozen", "was trained before; make another local_steps")
