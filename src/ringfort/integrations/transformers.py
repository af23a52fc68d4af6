"""`RingfortCallback`: what the Trainer of Hugging Face Transformers does, for those who watch a run.

    Trainer(model, arguments, train_dataset=data, callbacks=[RingfortCallback()])

To import this module also lets `TrainingArguments(ddp_backend="ringfort")` work on CPUs: there Accelerate knows its own
two backends alone, and refuses others.
"""

from __future__ import annotations

import functools
import inspect
from importlib import import_module
from importlib.metadata import version
from numbers import Real
from typing import TYPE_CHECKING, Any, Final

from ringfort.errors import BackendUnavailableError
from ringfort.integrations.versions import require
from ringfort.telemetry.trace import own_trace
from ringfort.torch import BACKEND

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
