"""`RingfortCallback`: what the Trainer of Hugging Face Transformers does, for those who watch a run, and checkpoints
that survive the loss of a machine.

    Trainer(model, arguments, train_dataset=data, callbacks=[RingfortCallback()])

To import this module also lets `TrainingArguments(ddp_backend="ringfort")` work on CPUs: there Accelerate knows its own
two backends alone, and refuses others.
"""

from __future__ import annotations

import functools
import inspect
import time
from importlib import import_module
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ringfort.backends.simulated import SimulatedBackend
from ringfort.context import DistributedContext
from ringfort.errors import BackendUnavailableError, InvalidArgumentError
from ringfort.integrations.trainer_checkpoints import TrainerCheckpoints, discard
from ringfort.integrations.versions import require
from ringfort.telemetry.trace import own_trace
from ringfort.torch import BACKEND
from ringfort.torch.names import dist

require("transformers", "4.46")
require("accelerate", "1.0")

_CHOOSER: Final = "_prepare_backend"
"""What Accelerate asks which backend to take."""
_TESTED: Final = "1.15"
"""The latest Accelerate in which that function is known to be there."""
_state: Final[Any] = import_module("accelerate.state")
if TYPE_CHECKING:
    TrainerCallback = object
else:
    TrainerCallback = import_module("transformers").TrainerCallback


class RingfortCallback(TrainerCallback):
    """Shows to `ringfort top` and `ringfort dash` what the Trainer logs (loss, learning rate and the metrics of an
    evaluation), the number of steps, and the samples of each step.

    Steps themselves are seen without it. Samples are those of full batches: the last one of an epoch may be smaller.

    With `keep=`, a run survives the loss of a machine and its disk, without a shared folder. Each machine has the
    Trainer's checkpoints in its own `output_dir`, whole, with the hash of every file, and only the last `keep` of them.
    `last_checkpoint` finds the newest that any machine has. The process group must be Ringfort's.

        callback = RingfortCallback(keep=2)
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.last_checkpoint(arguments))
    """

    def __init__(self, keep: int | None = None) -> None:
        """Raise `InvalidArgumentError` unless `keep` is a whole number of at least 1, and `BackendUnavailableError` for
        a Trainer that cannot continue."""
        if keep is not None:
            if type(keep) is not int or keep < 1:
                raise InvalidArgumentError("keep", keep, "must be a whole number of at least 1")
            # Earlier ones load an optimizer's state to `cpu:0` if several ranks have CPUs, and torch refuses that.
            require("transformers", "5.18")
        self._keep = keep
        self._run: float | None = None
        """When the run began, of which the checkpoints are."""

    def last_checkpoint(self, arguments: Any) -> str | None:
        """Return the newest checkpoint that any machine has, for `Trainer.train(resume_from_checkpoint=...)`, or None.
        Those that lack it get it. Every rank calls this, with its `TrainingArguments`.

        Raise `CheckpointError` for a disk that cannot be read or written, and `InvalidArgumentError` without `keep=`,
        for a group that is not Ringfort's, and for arguments that do not fit.
        """
        found = self._checkpoints(arguments).newest()
        if found is None:
            return None
        self._run, path = found
        return str(path)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say how many steps there will be. A run that was resumed counts on."""
        trace = own_trace()
        if state.max_steps > 0:
            trace.describe(total_steps=state.max_steps)
        if state.global_step:
            trace.set_step(state.global_step)
        if self._keep is not None:
            self._checkpoints(args)  # so that arguments that do not fit are refused now, and not at the first save
            args.save_on_each_node = True
            if self._run is None or not state.global_step:
                self._run = _context_of(args).broadcast_object(time.time())

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Complete and seal what the Trainer has saved, if there is a `keep`."""
        if self._keep is not None and self._run is not None:
            self._checkpoints(args).seal(self._run, state.global_step, state.best_model_checkpoint)

    def _checkpoints(self, args: Any) -> TrainerCheckpoints:
        if self._keep is None:
            raise InvalidArgumentError("keep", None, "must say how many checkpoints stay on each machine")
        if args.save_total_limit is not None:
            why = f"must be left out, because RingfortCallback(keep={self._keep}) removes old checkpoints"
            raise InvalidArgumentError("save_total_limit", args.save_total_limit, why)
        if args.save_only_model:
            raise InvalidArgumentError("save_only_model", True, "must be False: nothing can be continued from a model")
        is_writer = args.local_process_index == 0
        folder = Path(args.output_dir)
        return TrainerCheckpoints(_context_of(args), folder, self._keep, is_writer=is_writer, timeout=args.ddp_timeout)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the samples of this rank in the step that begins."""
        if self._keep is not None and args.local_process_index == 0:
            discard(Path(args.output_dir) / f"checkpoint-{state.global_step + 1}")
        own_trace().add_samples(args.train_batch_size * args.gradient_accumulation_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Show the numbers that the Trainer logs. Other tools get them from the Trainer itself."""
        numbers = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, Real)}
        if numbers:
            own_trace().log(numbers, state.global_step)


def _context_of(args: Any) -> DistributedContext:
    """Return the context of the default group, which `TrainingArguments` make when they are asked for a device. A
    process alone has none."""
    if args.world_size == 1:
        return DistributedContext(SimulatedBackend.create_group(1)[0])
    context = getattr(dist.group.WORLD, "context", None)
    if not isinstance(context, DistributedContext):
        why = "keep= needs a group of Ringfort: ringfort run --torch-backend ringfort, or ddp_backend='ringfort'"
        raise InvalidArgumentError("ddp_backend", args.ddp_backend, why)
    return context


def _let_accelerate_have_our_backend() -> None:
    """Keep the backend that a program has named for CPUs, if it is ours. Idempotent. Raise `BackendUnavailableError`
    for an Accelerate that chooses backends in another way: its function is private, so it may change."""
    if not hasattr(_state.PartialState, _CHOOSER):
        why = f"this is {version('accelerate')}, which chooses backends in another way"
        command = f"pip install 'accelerate=={_TESTED}.*'"
        raise BackendUnavailableError(f"accelerate with PartialState.{_CHOOSER}", f"{why}; {command}")
    original: Any = getattr(_state.PartialState, _CHOOSER)
    if getattr(original, "knows_ringfort", False):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def choose(*given: Any, **keywords: Any) -> tuple[Any, Any]:
        backend = signature.bind(*given, **keywords).arguments.get("backend")
        found, kind = original(*given, **keywords)
        is_ours = backend == BACKEND and kind == _state.DistributedType.MULTI_CPU
        return (backend if is_ours else found), kind

    setattr(choose, "knows_ringfort", True)  # noqa: B010  # functions have no such attribute
    setattr(_state.PartialState, _CHOOSER, choose)


_let_accelerate_have_our_backend()
