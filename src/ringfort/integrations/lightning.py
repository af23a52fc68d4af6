"""Strategies for the `Trainer` of Lightning. To import this module gives them names:

    Trainer(strategy="ringfort", ...)             # DistributedDataParallel over Ringfort
    Trainer(strategy="ringfort_elastic", ...)     # an elastic run; or with settings:
    Trainer(strategy=ElasticStrategy(batch=256, nodes="2:8"), max_epochs=3)

In an elastic run, a batch of the `Trainer` is a step of the run: its counters, `max_steps`, loggers and callbacks count
steps, which are the same on all members. `training_step` is called for each micro-batch of the step that this member
computes.

With local steps (`sync="local"` or `"auto"`) a batch of the `Trainer` is a round, and its counters count optimizer
steps of `batch` samples, of all members together: they go on by the steps of a round at once, and what is done every so
many steps is done where a round ends with such a step.
"""

from __future__ import annotations

import signal
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from threading import current_thread, main_thread
from typing import Any, Final

from ringfort.errors import BackendUnavailableError, InvalidArgumentError
from ringfort.integrations.passes import Source
from ringfort.integrations.versions import require
from ringfort.torch import BACKEND
from ringfort.torch.names import torch
from ringfort.torch.training.passes import Passes
from ringfort.torch.training.run import TorchRun, elastic
from ringfort.training.elastic.dealing import RunEnd

require("lightning", "2.4")
try:
    from lightning.fabric.utilities import rank_zero
    from lightning.pytorch import callbacks
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as exc:
    raise BackendUnavailableError("lightning", f"pip install --upgrade lightning ({exc})") from exc

_RUNS: Final = (
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_before_optimizer_step",
    "optimizer_step",
)
"""Hooks of a module that are not called: the run does what they are for, in steps that it replays too."""
_PARTS: Final = 8
"""The micro-batches of a step if the program has given no `batch`: so many machines can have a part."""
_REFUSED: Final = {
    "StochasticWeightAveraging": "averages weights and changes learning rates",
    "WeightAveraging": "averages weights",
    "BaseFinetuning": "freezes and unfreezes layers",
    "GradientAccumulationScheduler": "changes the size of a step, which batch= is",
    "ModelPruning": "changes weights",
    "LearningRateFinder": "trains before the run begins",
    "BatchSizeFinder": "trains before the run begins",
}
"""Callbacks that change the training of one machine alone: one that joins does not run them for the steps it missed."""


class RingfortStrategy(DDPStrategy):
    """Trains with DistributedDataParallel over Ringfort. The options are those of `DDPStrategy`."""

    strategy_name = "ringfort"

    def __init__(self, **options: Any) -> None:
        super().__init__(process_group_backend=BACKEND, **options)  # pyright: ignore[reportUnknownMemberType]


class ElasticStrategy(SingleDeviceStrategy):
    """Trains in an elastic run.

    `batch` is the number of samples per step of the whole run, and the `batch_size` of the training `DataLoader` that
    of a micro-batch. Without `batch`, the `batch_size` is that of a step, as on one machine, and a micro-batch is an
    eighth of it. With local steps both are one: each micro-batch is an optimizer step. The other options are those of
    `ringfort.torch.elastic`, except for the scheduler, the scaler and `clip_norm`, which come from the module and the
    `Trainer`.
    """

    strategy_name = "ringfort_elastic"

    def __init__(self, *, batch: int | None = None, **options: Any) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.parallel_devices: Any = None
        """Set by the `Trainer`."""
        self.run: TorchRun | None = None
        """The run, once `fit` has begun."""
        self._batch = batch
        self._options = options
        self._source: Source | None = None
        self._passes: Passes | None = None
        self._is_first = True
        self._aside = ExitStack()

    # --- what the Trainer asks ----------------------------------------------------------------------------------------

    @property
    def root_device(self) -> Any:
        """The device of this process. Raise `InvalidArgumentError` if the `Trainer` has several."""
        devices = self.parallel_devices or [super().root_device]
        if len(devices) != 1:
            raise InvalidArgumentError("devices", len(devices), "must be 1: start one process per device")
        return devices[0]

    @property
    def is_global_zero(self) -> bool:
        """Whether this member reports and saves for all. That may change with every member that comes or goes."""
        return self._is_first

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader of the run in place of that for the training; others stay as they are."""
        if not self._trainer.training:
            return dataloader
        if self._source is not None:
            raise InvalidArgumentError("train_dataloader", "several", "must be one DataLoader, made once")
        self._source = Source.of(dataloader)
        if self._batch is None:
            self._batch = self._source.microbatch
            if self._options.get("sync", "every_step") == "every_step":
                self._source = replace(self._source, microbatch=-(-self._batch // _PARTS))
        return _Steps(self, self._source.steps(self._batch))

    def setup(self, trainer: Any) -> None:
        """Make the run. Raise `InvalidArgumentError` for what a run cannot do."""
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        if self.run is not None:
            why = (
                "this strategy has had its run; to train for longer, make another Trainer with another "
                "ElasticStrategy, a larger max_epochs and the same checkpoint="
            )
            raise InvalidArgumentError("fit", "called again", why)
        _check(trainer)
        if self._batch is None:  # the loader says it
            trainer.fit_loop.setup_data()
        assert self._batch is not None
        configs, self.lr_scheduler_configs = self.lr_scheduler_configs, []
        intervals = {config.interval for config in configs}
        for config in configs:
            if config.reduce_on_plateau or config.frequency != 1 or len(intervals) > 1:
                why = "must step once per step or once per epoch, all alike, and without a metric"
                raise InvalidArgumentError("lr_scheduler", type(config.scheduler).__name__, why)
        # Loggers of learning rates look at them; with this frequency the Trainer never steps them.
        self.lr_scheduler_configs = [replace(config, frequency=sys.maxsize) for config in configs]
        self.run = elastic(
            self.lightning_module,
            self.optimizers[0],
            batch=self._batch,
            scheduler=[config.scheduler for config in configs] or None,
            scheduler_per="pass" if intervals == {"epoch"} else "step",
            scaler=getattr(self.precision_plugin, "scaler", None),
            clip_norm=trainer.gradient_clip_val or None,
            **self._options,
        )

    # --- the loop -----------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Join the run, and begin with its pass."""
        trainer, source = self._trainer, self._source
        assert source is not None
        steps = source.steps(self._step_size)
        limits = [limit for limit in (trainer.max_steps, trainer.max_epochs * steps) if limit >= 0]
        if not limits:
            raise InvalidArgumentError("max_epochs", -1, "must be limited: a run has a last step")
        passes, rest = divmod(min(limits), steps)
        end = RunEnd(cursor=passes * len(source.dataset) + rest * self._step_size)
        run = self._joined
        batches = run.loader(source.dataset, microbatch=source.microbatch, steps=end, **source.options)
        self._passes = Passes(run, iter(batches))
        self._take_signals()
        self._passes.look()
        self._count(0)

    def _take_signals(self) -> None:
        """Leave SIGTERM to the run, which answers it while it waits for others too, unless the program handles it."""
        before = self._trainer._signal_connector._original_handlers.get(signal.SIGTERM)
        if before == signal.SIG_DFL and current_thread() is main_thread():
            signal.signal(signal.SIGTERM, before)

    def steps(self) -> Iterator[Any]:
        """Yield the first micro-batch of each step of a pass in which this member has a part."""
        assert self._passes is not None
        assert self._source is not None
        number = self._passes.number
        for batch in self._passes:
            number = self._passes.number
            self._count(1)
            yield batch
        if self._passes.is_over:  # perhaps several passes later, of which this member has seen no part
            number = max(number, (self._joined.cursor - 1) // len(self._source.dataset))
        self._count_rest(number)
        if self._passes.is_over:
            self._trainer.should_stop = True

    def _count(self, begun: int) -> None:
        """Set the counters of the `Trainer` to those of the run, which goes on while a member is away. `begun` is 1
        inside of a pass, and 0 before it. Of the optimizer steps of a round, the `Trainer` sees the last one."""
        span, size = self._joined.next_span, self._step_size
        first = span.begin // size
        self._set_counters(span.number, begun, first, -(-span.end // size) - 1 if begun else first)

    def _count_rest(self, number: int) -> None:
        """Set the counters at the end of pass `number`: this member may have had no part in its last steps."""
        span = self._joined.next_span
        place = self._trainer.fit_loop.max_batches if span.number > number else span.begin // self._step_size
        if place:
            self._set_counters(number, 1, place, place)

    def _set_counters(self, number: int, begun: int, first: int, place: int) -> None:
        fit = self._trainer.fit_loop
        step = number * fit.max_batches + place
        _set(fit.epoch_progress.current, number + begun, number)
        _set(fit.epoch_loop.batch_progress.current, place, place)
        _set(fit.epoch_loop.batch_progress.total, step, step)
        _set(fit.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total, step, step)
        # The Trainer logs after every so many steps: a round in which that is one of the steps is logged as that one.
        every = self._trainer.log_every_n_steps or 1
        logged = (step + 1) // every * every - 1
        fit.epoch_loop._batches_that_stepped = logged if logged >= step - place + first else step
        fit._data_fetcher.fetched = place
        self._is_first = self._joined.is_first
        told: Any = rank_zero.rank_zero_only
        told.rank = 0 if self._is_first else 1

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Add the gradients of a micro-batch to those of the step."""
        plugin, module = self.precision_plugin, self._module
        # The plugin's own would scale the loss, as the run does.
        loss = Precision.pre_backward(plugin, closure_loss, module)
        self._joined.backward(loss, *args, **kwargs)
        return Precision.post_backward(plugin, loss, module)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Compute the micro-batches of a step, until the step is applied."""
        first = loss = closure()
        while not self._step(loss):
            loss = self._compute_another(optimizer)
        return first

    def _step(self, loss: Any) -> bool:
        """End a micro-batch. Without a loss, because `training_step` has returned None, it counts with no weight."""
        if loss is None:
            self._joined.backward(torch.zeros(()), weight=0)
        return self._joined.step()

    def _compute_another(self, optimizer: Any) -> Any:
        """Do with another micro-batch of the step what the `Trainer` has done with the first. Return its loss."""
        assert self._passes is not None
        self._passes.look()
        trainer = self._trainer
        batch = trainer.precision_plugin.convert_input(self._passes.take())
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = self.batch_to_device(batch)
        trainer._logger_connector.on_batch_start(batch)
        loop = trainer.fit_loop.epoch_loop
        kwargs = loop._build_kwargs(OrderedDict(), batch, loop.batch_idx)
        return loop.automatic_optimization._make_closure(kwargs, optimizer, loop.batch_idx)()

    def on_validation_start(self) -> None:
        """Keep this member from counting as slow while it validates."""
        if self.run is not None:
            self._aside.enter_context(self.run.aside())

    def on_validation_end(self) -> None:
        """Go on with the run."""
        self._aside.close()

    # --- the end ------------------------------------------------------------------------------------------------------

    def on_train_end(self) -> None:
        """Stay after the last step of the run, until all others have it."""
        if self._passes is not None:
            self._passes.finish()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the others why this member leaves."""
        if self.run is not None:
            self.run.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self) -> None:
        """Leave the run, if it has not ended."""
        self._aside.close()
        if self.run is not None:
            self.run.close()
        self._source = self._passes = None
        super().teardown()

    @property
    def _joined(self) -> TorchRun:
        assert self.run is not None, "only while the Trainer fits"
        return self.run

    @property
    def _step_size(self) -> int:
        """The samples of an optimizer step."""
        assert self._batch is not None
        return self._batch

    @property
    def _module(self) -> Any:
        return self.lightning_module

    @property
    def _trainer(self) -> Any:
        return self._module.trainer


class _Steps:
    """The training loader that the `Trainer` sees: one batch per step of a pass."""

    def __init__(self, strategy: ElasticStrategy, count: int) -> None:
        self._strategy = strategy
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return self._strategy.steps()


_names: Any = StrategyRegistry
_names.register("ringfort", RingfortStrategy, "DistributedDataParallel over Ringfort", override=True)
_names.register("ringfort_elastic", ElasticStrategy, "machines that come and go", override=True)


def _set(progress: Any, begun: int, ended: int) -> None:
    """Set a counter of the `Trainer`; not all have all of its four values."""
    for name, value in (("ready", begun), ("started", begun), ("processed", ended), ("completed", ended)):
        if hasattr(progress, name):
            setattr(progress, name, value)


def _check(trainer: Any) -> None:
    """Raise `InvalidArgumentError` if the `Trainer` or the module asks for what a run cannot do."""
    module = trainer.lightning_module
    for hook in _RUNS:
        if is_overridden(hook, module):
            why = "is not called in a run: use gradient_clip_val= of the Trainer, or on_step= of ElasticStrategy"
            raise InvalidArgumentError(hook, type(module).__name__, why)
    refused = {
        "automatic_optimization": (module.automatic_optimization, True, "must be True"),
        "accumulate_grad_batches": (trainer.accumulate_grad_batches, 1, "must be 1: batch= is the size of a step"),
        "limit_train_batches": (trainer.limit_train_batches, 1.0, "must be 1.0: give max_steps"),
        "overfit_batches": (trainer.overfit_batches, 0.0, "must be 0: the run has its own order of samples"),
        "reload_dataloaders_every_n_epochs": (trainer.reload_dataloaders_every_n_epochs, 0, "must be 0"),
        "ckpt_path": (trainer.ckpt_path, None, "must be None: a run continues with its own checkpoint="),
    }
    for name, (value, wanted, why) in refused.items():
        if value != wanted or type(value) is not type(wanted):
            raise InvalidArgumentError(name, value, why)
    for callback in trainer.callbacks:
        for name, what in _REFUSED.items():
            kind = getattr(callbacks, name, None)  # not every version has all of them
            if kind is not None and isinstance(callback, kind):
                why = f"{what}, on one machine alone; do that in on_step= of ElasticStrategy, which runs on all"
                raise InvalidArgumentError("callbacks", type(callback).__name__, why)
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        raise InvalidArgumentError("gradient_clip_algorithm", "value", "a run clips by norm alone")
