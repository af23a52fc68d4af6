"""`TorchRun`: the handle of a torch program on a run that machines join and leave.

    run = ringfort.torch.elastic(model, optimizer, batch=512, nodes="2:8", checkpoint="run1")
    for x, y in run.loader(dataset, microbatch=16, epochs=3):
        run.backward(loss_fn(model(x), y))
        run.step()

The program's loop is that of torch: micro-batch by micro-batch. What the run wants next is either a micro-batch, or a
sealed step to apply; `loader` and `step` take turns in asking for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Final, Literal, NamedTuple, cast

from ringfort.config import AutoDiscoveryConfig, DistributedConfig
from ringfort.errors import InvalidArgumentError
from ringfort.telemetry.trace import own_trace
from ringfort.torch.names import torch
from ringfort.torch.training.arguments import (
    DataSettings,
    check_model,
    check_options,
    checked_weight,
    is_read_as_stream,
    schedulers_of,
)
from ringfort.torch.training.generators import seed_model
from ringfort.torch.training.local_rounds import Rounds, RoundState, RoundSum, RoundUpdate
from ringfort.torch.training.model_buffers import ModelBuffers
from ringfort.torch.training.model_state import ModelState
from ringfort.torch.training.optimizer import RunOptimizer
from ringfort.torch.training.requests import IndexedBatches, StreamBatches
from ringfort.torch.training.run_loader import For, RunLoader
from ringfort.torch.training.shards import check_shards
from ringfort.torch.training.share import Share
from ringfort.torch.training.tensor_sum import TensorSum
from ringfort.torch.training.update import OnStep, Update
from ringfort.training.elastic.dealing import Data, RunEnd, Span
from ringfort.training.elastic.handle import RunHandle, failure_of
from ringfort.training.elastic.launched import with_launcher
from ringfort.training.elastic.memory_needs import MemoryNeeds
from ringfort.training.elastic.options import Nonfinite, Options
from ringfort.training.elastic.participant import Participant
from ringfort.training.elastic.rounds import RoundSettings, Sync, round_settings
from ringfort.training.elastic.sample_order import random_key
from ringfort.training.elastic.state_check import own_class
from ringfort.training.elastic.step import Done, Turn

Per = Literal["step", "pass"]
_LOOP: Final = "call run.backward(loss) and run.step() once for each batch of run.loader()"

_ELEMENTWISE: Final = tuple(
    getattr(torch.optim, name)
    for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""Optimizers that change each number by itself, so the number of threads does not matter."""


class TorchRun(RunHandle):
    """A run that machines join and leave, for a torch model. Made by `ringfort.torch.elastic`."""

    def __init__(
        self, state: ModelState, sums: TensorSum, update: Update, options: Options, optimizer: Any, data: DataSettings
    ) -> None:
        super().__init__(state, options)
        self._sums = sums
        self._update = update
        self._settings = data
        self.optimizer = RunOptimizer(optimizer, self)
        """A stand-in for the optimizer, for loops that stay as they are: its `step` is that of the run."""
        self._share = Share()
        self._life: Iterator[tuple[Participant, Turn | Done]] | None = None
        self._run: Participant | None = None
        """What the program works for, once it has something to do."""
        self._turn: Turn | None = None
        """The micro-batch that the program has, or gets next."""
        self._is_added = True
        self._data: Data | None = None
        self._end: RunEnd | None = None
        self._loss = 0.0
        self.rounds: Rounds | None = None

    # --- the loop -----------------------------------------------------------------------------------------------------

    def loader(
        self,
        dataset: Any,
        *,
        microbatch: int,
        epochs: int | None = None,
        steps: int | RunEnd | None = None,
        samples: int | None = None,
        per: For = "run",
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: Any = None,
        timeout: float = 0,
    ) -> RunLoader:
        """Return a loader of the micro-batches that this machine computes, for `epochs` passes over the data set or up
        to step number `steps`, from wherever the run is. Each has `microbatch` samples, the last of a pass perhaps
        fewer. Call `backward` and `step` for each.

        One `for` over the loader is the whole run; who breaks out of it leaves the run. With `per="pass"` one `for` is
        one pass, as in programs that loop over epochs; such a program calls `close` if it ends before the run does.

        The samples come in an order that depends on the run's seed; each counts once in each pass, whichever machines
        come and go. Before each micro-batch the generators of torch are seeded with a number that depends on the run's
        seed, the step and the micro-batch alone, so dropout and augmentation are the same whoever computes it. The
        other options are those of `DataLoader`.

        A data set without indices is read by every member in the same order, and not shuffled. `samples` is then the
        number of samples of a pass, by default its length if it has one; without that, `steps` says when the run ends.

        With local steps, a step is a round; `epochs` are passes all the same. How many micro-batches there are is then
        unknown if the rounds are planned and `steps` is given, and `len` raises `TypeError`.

        Raises `InvalidArgumentError` for invalid arguments, and while the program iterates, if the cluster has a run of
        this name with other data or another model.
        """
        is_stream = is_read_as_stream(dataset)
        data, end = self._settings.cut(dataset, microbatch, epochs, steps, samples, is_stream=is_stream)
        self._check_first()
        options = {
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
            "timeout": timeout,
        }
        batches = (StreamBatches if is_stream else IndexedBatches)(dataset, data, self._share, **options)
        loader = RunLoader(self, self._batches(batches), dataset, data, end, per=per)
        self._data, self._end = data, end
        self._life = self._new_life(end, data)
        return loader

    def _new_life(self, end: RunEnd, data: Data) -> Iterator[tuple[Participant, Turn | Done]]:
        return self._live(end, data, self._sums, lambda run, first: iter([(run, first)]))

    def _batches(self, batches: IndexedBatches | StreamBatches) -> Iterator[Any]:
        with closing(batches), closing(cast("Any", self._life)):
            while True:
                while self._turn is None:
                    if not self._advance():
                        return
                run, turn = cast("Participant", self._run), self._turn
                run.samples_of(turn)
                with own_trace().loading():
                    batch = batches.get(run, turn)
                self._begin(run, turn)
                self._update.guard.begin()
                yield batch
                if not self._is_added:
                    raise InvalidArgumentError("run.loader()", f"step {self.number + 1}", _LOOP)

    def _begin(self, run: Participant, turn: Turn) -> None:
        """The program gets a micro-batch."""
        seed_model(self._share.key(random_key(run.data.seed, turn.compute.step, turn.compute.part)))
        run.begin()
        self._sums.open(self._share.samples(run.meter.samples) / run.unit_of(turn))
        self._is_added = False

    def begin_again(self) -> bool:
        """Begin the current micro-batch anew, if the program has left its loop before it had gradients. Return whether
        there is one."""
        if self._run is None or self._turn is None or self._is_added or self._sums.has_gradients:
            return False
        self._run.samples_of(self._turn)
        self._begin(self._run, self._turn)
        return True

    def backward(self, loss: Any, weight: Any = None, **options: Any) -> None:
        """Compute the gradients of the current micro-batch. `loss` is the mean over its samples. It counts with
        `weight`, by default the number of samples; with tokens of unequal number, pass that. With 0, as for a
        micro-batch of padding alone, nothing is computed. Other options are those of `Tensor.backward`.

        Raises `InvalidArgumentError` outside the loop over `loader`, and for a loss that is not one number.
        """
        run, turn = self._current("backward")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise InvalidArgumentError("loss", type(loss).__name__, "must be a tensor of one number, the mean loss")
        count = checked_weight(self._share.samples(run.meter.samples) if weight is None else weight)
        self._sums.backward(loss.reshape(()), count / run.unit_of(turn), self._update.scaled, **options)

    def step(self) -> bool:
        """End the current micro-batch. Return whether that was the last of the step here: then the step was sealed, and
        the optimizer has stepped (unless the step was skipped because gradients were not finite).

        Raises `InvalidArgumentError` if the micro-batch has no gradients.
        """
        run, turn = self._current("step")
        if not self._sums.has_gradients:
            raise InvalidArgumentError("step", turn.compute.step, f"this batch has no gradients; {_LOOP}")
        if self._update.scales and not self._sums.is_scaled:
            why = "must scale the loss: call run.backward(loss) in place of loss.backward()"
            raise InvalidArgumentError("scaler", turn.compute.step, why)
        self._update.guard.check()
        self._sums.end()
        run.added(turn)
        self._is_added, self._turn = True, None
        self._advance()
        return self._turn is None

    def _current(self, what: str) -> tuple[Participant, Turn]:
        if self._run is None or self._turn is None or self._is_added:
            raise InvalidArgumentError(f"run.{what}", self.number, f"no batch is being computed; {_LOOP}")
        return self._run, self._turn

    def _advance(self) -> bool:
        """Get what the run wants next: a micro-batch, or a sealed step, which is applied here. Return whether the run
        goes on."""
        assert self._life is not None
        found = next(self._life, None)
        if found is None:
            return False
        run, doing = found
        if self._run is None and self.rounds is not None:
            self.rounds.reduction.step_seconds = run.part_seconds
        self._run = run
        if isinstance(doing, Turn):
            self._turn = doing
        else:
            if not doing.is_overtaken:
                self._loss = doing.loss / doing.weight if doing.weight else 0.0
            self._update.lend = partial(run.lend, what="a gradient")
            self._apply(run, doing)
        return True

    def _apply(self, run: Participant, done: Done) -> None:
        # An optimizer or `on_step` may draw numbers too, and the members have computed different micro-batches.
        seed_model(random_key(run.data.seed, done.result.step))
        try:
            self._update.apply(done, ends_pass=done.result.cursor % run.data.samples == 0)
        except BaseException as exc:  # the step is half applied: this state must not go on
            self._leave(failure_of(type(exc)))
            raise

    # --- what it is doing ---------------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """The number of the last step that was sealed."""
        return self._sealed()

    @property
    def next_number(self) -> int:
        """The number of the step that the current batch of `loader` is a part of; without a batch, that of the next
        step. A machine that joins tries its speed on a batch of the run's step before it has the state."""
        return self.number + 1 if self._turn is None else self._turn.compute.step

    @property
    def epoch(self) -> int:
        """The pass over the data set, from 0, that the current batch of `loader` is a part of; without a batch, that of
        the next step."""
        return self.next_span.number

    @property
    def next_span(self) -> Span:
        """What the step covers that the current batch of `loader` is a part of; without a batch, an empty place after
        the last step."""
        if self._turn is not None:  # before it has the state, a machine that joins is at no step
            return self._turn.compute.span
        number, begin = (0, 0) if self._data is None else divmod(self.cursor, self._data.samples)
        return Span(number, begin, begin)

    @property
    def cursor(self) -> int:
        """The samples of all sealed steps, each pass anew."""
        return 0 if self._participant is None else self._participant.replica.mark.cursor

    @property
    def is_finished(self) -> bool:
        """Whether the last step of the run was sealed."""
        return self._end is not None and self._end.is_reached(self.number, self.cursor)

    @property
    def loss(self) -> float:
        """The mean loss over all samples of the last step; 0 if the program computes gradients without `backward`."""
        return self._loss

    @contextmanager
    def global_weights(self) -> Generator[None]:
        """Have the weights of the last sealed step in the model, for an evaluation or to save them: with `sync="local"`
        those that all machines have, without the local steps since. In every other run the model has them anyway."""
        if self.rounds is None:
            yield
            return
        with self.aside(), self.rounds.shown():
            yield

    @property
    def memory(self) -> MemoryNeeds:
        """The memory that the run takes on this machine beside the program's own. `print(run.memory)` says it in words,
        before the first step too; the state is as large as it is now."""
        return self._sums.memory

    def _leave(self, why: str) -> None:
        """Leave the run, and give model and optimizer back to the program."""
        try:
            super()._leave(why)
        finally:
            self._update.close()


class Parts(NamedTuple):
    """What a run is made of: classes, or what is called like them."""

    state: Callable[..., ModelState] = ModelState
    sums: Callable[..., TensorSum] = TensorSum
    run: Callable[..., TorchRun] = TorchRun
    kind: str = ""
    """What distinguishes the class of this machine."""
    update: Callable[..., Update] = Update


def _parts_for(model: Any, optimizer: Any, settings: RoundSettings | None, batch: int) -> Parts:
    is_sharded = check_shards(model)
    if settings is not None:
        if is_sharded:
            raise InvalidArgumentError("sync", f"{settings}", "a sharded model needs the same weights in every step")
        return _round_parts(Rounds(model, optimizer, settings), batch)
    if not is_sharded:
        return Parts()
    from ringfort.torch.training.sharded_run import sharded_parts  # which builds on this module

    return sharded_parts(model)


def elastic(
    model: Any,
    optimizer: Any,
    *,
    batch: int,
    scheduler: Any = None,
    scheduler_per: Per = "step",
    scaler: Any = None,
    clip_norm: float | None = None,
    state: dict[str, Any] | None = None,
    on_step: OnStep | None = None,
    seed: int = 0,
    overlap: bool = True,
    sync: Sync = "every_step",
    every: int | None = None,
    codec: str | None = None,
    outer_rate: float | None = None,
    outer_momentum: float | None = None,
    nonfinite: Nonfinite | None = None,
    nodes: str | int | None = None,
    name: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 100,
    keep: int = 3,
    patience: float | None = None,
    machine_class: str = "",
    config: AutoDiscoveryConfig | None = None,
    group: DistributedConfig | None = None,
) -> TorchRun:
    """Return the handle on a training run of a torch model that machines join and leave while it goes on.

    `batch` is the number of samples per update of the whole run, however many machines there are. The run calls
    `optimizer.step`, `zero_grad`, `scheduler.step` (after each step, or with `scheduler_per="pass"` after each pass
    over the data), and the `scaler`; it clips the mean gradients of the whole batch to `clip_norm`. Every machine does
    that for every step.

    `on_step(gradients, step)` is called after that, on every machine, with the gradients by the name of their
    parameters: for averages of weights, and for unfreezing. What it changes belongs to `state`: a dict of modules,
    tensors, objects with `state_dict`, and plain values. A machine that joins gets all of it.

    With `sync="local"` a step of the run is a round of `every` optimizer steps (16), of all machines together: each
    machine makes those of its micro-batches by itself, each of `batch` samples, and then the machines average what has
    become of the weights, with `codec` (`none`, `int8`, `int4` or `sparse`; `int8`). So 64 times fewer bytes are sent
    than with exact steps. With `sync="auto"` the machines measure steps, links and codecs, and decide how many steps a
    round has and with which codec, again and again. `outer_rate` and `outer_momentum` are as for `ringfort.LocalSteps`.
    The weights in the state are the global ones; `with run.global_weights():` has them in the model for an evaluation.
    What the optimizer keeps is each machine's own, and begins anew at one that joins. A scheduler makes one step for
    each `batch` samples of all machines, at the end of a round.

    `overlap` reduces gradients while torch computes the others. With `nonfinite="skip"` all machines skip a step whose
    gradients are infinite or NaN, which is the default with a scaler; otherwise it is an error that names the machine.
    The other arguments are those of `ringfort.elastic`.

    Raises `InvalidArgumentError` and `UnsupportedArrayError` for invalid arguments, and `ConfigError` if they
    contradict the options of `ringfort run --elastic`.
    """
    check_model(model, optimizer)
    check_options(scaler, clip_norm, state, on_step, scheduler_per)
    told = with_launcher(nodes, name, patience)
    settings = round_settings(sync, every, codec, outer_rate, outer_momentum)
    plain, schedulers = getattr(model, "_orig_mod", model), schedulers_of(scheduler)
    data = DataSettings(batch, seed, settings)
    parts = _parts_for(plain, optimizer, settings, batch)
    tree = parts.state(model, optimizer, schedulers, scaler, state)
    buffers = ModelBuffers(plain)
    sums = parts.sums(
        tree.names, optimizer, buffers, overlaps=overlap, state_bytes=lambda: tree.manifest().nbytes
    )  # fmt: skip
    update = parts.update(
        sums,
        buffers,
        tree.names,
        optimizer,
        schedulers=schedulers,
        scheduler_per=scheduler_per,
        scaler=scaler,
        clip_norm=clip_norm,
        on_step=on_step,
        state=state,
    )

    def loaded() -> None:
        buffers.seal()
        sums.refresh()
        update.guard.remember()

    tree.on_load = loaded
    options = Options(
        name=told.name,
        nodes=told.nodes,
        checkpoint=checkpoint,
        every=checkpoint_every,
        keep=keep,
        patience=told.patience,
        nonfinite=nonfinite or ("error" if scaler is None else "skip"),
        config=config,
        group=group,
        machine_class=machine_class or _class_of(sums, optimizer) + parts.kind,
        clip_norm=clip_norm,
        scheduler_per=scheduler_per,
    )
    return parts.run(tree, sums, update, options, optimizer, data)


def _round_parts(rounds: Rounds, batch: int) -> Parts:
    return Parts(
        partial(RoundState, rounds),
        partial(RoundSum, rounds),
        partial(_with_rounds, rounds),
        update=partial(RoundUpdate, rounds, batch),
    )


def _with_rounds(rounds: Rounds, *arguments: Any) -> TorchRun:
    run = TorchRun(*arguments)
    run.rounds = rounds
    return run


def _class_of(sums: TensorSum, optimizer: Any) -> str:
    """Return the class of this machine: updates on one device have the same bits on another of the same class."""
    device = sums.parameters[0].device
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)} torch {torch.__version__}"
    if device.type != "cpu":
        return f"{device.type} torch {torch.__version__}"
    # Sums over a tensor, such as norms, are added up in another order with another number of threads.
    return own_class() if type(optimizer) in _ELEMENTWISE else f"{own_class()} {torch.get_num_threads()} threads"
