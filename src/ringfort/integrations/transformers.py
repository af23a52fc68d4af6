"""`RingfortCallback`: what the Trainer of Hugging Face Transformers does, for those who watch a run.

    Trainer(model, arguments, train_dataset=data, callbacks=[RingfortCallback()])

To import this module also lets `TrainingArguments(ddp_backend="ringfort")` work on CPUs: there Accelerate knows its own
two backends alone, and refuses others.
"""

from __future__ import annotations

import functools
from importlib import import_module
from numbers import Real
from typing import TYPE_CHECKING, Any, Final

from ringfort.integrations.versions import require
from ringfort.telemetry.trace import own_trace
from ringfort.torch import BACKEND

require("transformers", "4.46")
require("accelerate", "1.0")

_state: Final[Any] = import_module("accelerate.state")
if TYPE_CHECKING:
    TrainerCallback = object
else:
    TrainerCallback = import_module("transformers").TrainerCallback


class RingfortCallback(TrainerCallback):
    """Shows to `ringfort top` and `ringfort dash` what the Trainer logs (loss, learning rate and the metrics of an
    evaluation), the number of steps, and the samples of each step.

    Steps themselves are seen without it. Samples are those of full batches: the last one of an epoch may be smaller.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say how many steps there will be. A run that was resumed counts on."""
        trace = own_trace()
        if state.max_steps > 0:
            trace.describe(total_steps=state.max_steps)
        if state.global_step:
            trace.set_step(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the samples of this rank in the step that begins."""
        own_trace().add_samples(args.train_batch_size * args.gradient_accumulation_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Show the numbers that the Trainer logs. Other tools get them from the Trainer itself."""
        numbers = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, Real)}
        if numbers:
            own_trace().log(numbers, state.global_step)


def _let_accelerate_have_our_backend() -> None:
    """Keep the backend that a program has named for CPUs, if it is ours. Idempotent."""
    original: Any = _state.PartialState._prepare_backend
    if getattr(original, "knows_ringfort", False):
        return

    @functools.wraps(original)
    def prepare(self: Any, cpu: bool = False, sagemaker_dp: Any = False, backend: str | None = None) -> tuple[Any, Any]:
        found, kind = original(self, cpu, sagemaker_dp, backend)
        is_ours = backend == BACKEND and kind == _state.DistributedType.MULTI_CPU
        return (backend if is_ours else found), kind

    setattr(prepare, "knows_ringfort", True)  # noqa: B010  # functions have no such attribute
    _state.PartialState._prepare_backend = prepare


_let_accelerate_have_our_backend()
