"""Local steps in an elastic torch run (`sync="local"` and `"auto"`): a step of the run is a round, in which each member
trains by itself on the micro-batches that it was dealt. ringfort/training/elastic/rounds.py says how that fits into the
protocol.

A member that gets the micro-batches of a lost one goes on with them where it is. The global weights, the outer momentum
and the plan of the next rounds are the state of the run. The state of the optimizer, the scaler's, and what the codec
has not sent yet are each member's own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import numpy as np

from ringfort.compression.floats import count_nonfinite
from ringfort.context import DistributedContext
from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import torch
from ringfort.torch.training.model_state import ModelState
from ringfort.torch.training.tensor_sum import TensorSum
from ringfort.torch.training.update import Update
from ringfort.training.elastic.rounds import WORDS, RoundPlan, RoundReduction, RoundSettings
from ringfort.training.elastic.sample_order import Array
from ringfort.training.elastic.step import Done
from ringfort.training.local_steps.outer import OuterOptimizer

_KINDS: Final = (torch.float32, torch.float16, torch.bfloat16)


class Rounds:
    """The global weights of a model beside its own, as a flat array, and what belongs to them."""

    def __init__(self, model: Any, optimizer: Any, settings: RoundSettings) -> None:
        """Begin with the model's weights. Raise `InvalidArgumentError` for parameters that cannot be averaged."""
        wanted = {one for group in optimizer.param_groups for one in group["params"] if one.requires_grad}
        self.reduction = RoundReduction(settings)
        self.trained: dict[str, Any] = {}
        """By name, as a state calls them."""
        for name, parameter in getattr(model, "_orig_mod", model).named_parameters():
            if parameter in wanted:
                if parameter.dtype not in _KINDS:
                    kind = str(parameter.dtype).removeprefix("torch.")
                    why = f"is {kind}; with local steps parameters must be float32, float16 or bfloat16"
                    raise InvalidArgumentError("model", name, why)
                self.trained[_plain_name(name)] = parameter
        if not self.trained:
            raise InvalidArgumentError("optimizer", type(optimizer).__name__, "no parameter is trained")
        self.outer = OuterOptimizer(np.concatenate([_numbers(one) for one in self.trained.values()]))
        self.weights, self.velocity = self.cut(self.outer.weights), self.cut(self.outer.velocity)
        """By name, in the memory of the outer optimizer."""
        names = {parameter: name for name, parameter in self.trained.items()}
        every = getattr(model, "_orig_mod", model).named_parameters(remove_duplicate=False)
        self.in_state = {_plain_name(name): self.weights[names[one]] for name, one in every if one in names}
        """The global weights by all names that a state has for them: modules may share a parameter."""
        self.is_moved = False
        """Whether the model has weights of its own: local steps since the last round."""
        self.on_write: Callable[[], None] = lambda: None
        """Called when the weights of the model were written by the run."""

    def cut(self, flat: Array) -> dict[str, Array]:
        """Return the part of each parameter in a flat array, by name."""
        found, begin = dict[str, Array](), 0
        for name, parameter in self.trained.items():
            found[name] = flat[begin : begin + parameter.numel()].reshape(tuple(parameter.shape))
            begin += parameter.numel()
        return found

    def check(self, parameters: Sequence[Any]) -> None:
        """Raise `InvalidArgumentError` if other parameters are trained than at the beginning."""
        if list(map(id, parameters)) != list(map(id, self.trained.values())):
            why = 'other parameters are trained than at the beginning; that needs sync="every_step"'
            raise InvalidArgumentError("model", "frozen or unfrozen", why)

    def restore(self) -> None:
        """Give the model the global weights."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(torch.from_numpy(self.weights[name]))
        self.is_moved = False
        self.on_write()

    def take_over(self) -> None:
        """Make what `on_step` has written into the weights of the model the global weights. All members do the same."""
        for name, parameter in self.trained.items():
            weights, own = self.weights[name].reshape(-1), _numbers(parameter)
            changed = own != self._rounded(name)
            weights[changed] = own[changed]

    def _rounded(self, name: str) -> Array:
        """Return global weights as the model has got them: rounding them to 16 bits is no step."""
        kind = self.trained[name].dtype
        return torch.from_numpy(self.weights[name]).to(kind).float().numpy().reshape(-1)

    def difference(self, weight: float, into: Array) -> None:
        """Write what the local steps have changed, times `weight`, into a flat array."""
        begin = 0
        for name, parameter in self.trained.items():
            part = into[begin : begin + parameter.numel()]
            begin += part.size
            if not self.is_moved or not weight:
                part.fill(0)
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                np.subtract(self._rounded(name), _numbers(parameter), out=part)
                np.multiply(part, np.float32(weight), out=part)

    @contextmanager
    def shown(self) -> Generator[None]:
        """Have the global weights in the model for a while."""
        if not self.is_moved:
            yield
            return
        own = {name: parameter.detach().clone() for name, parameter in self.trained.items()}
        self.restore()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self.trained.items():
                    parameter.copy_(own[name])
            self.is_moved = True
            self.on_write()


class RoundState(ModelState):
    """The state of the run: global weights and outer momentum in place of the model's weights and of what its optimizer
    keeps."""

    def __init__(self, rounds: Rounds, *arguments: Any) -> None:
        self._rounds = rounds
        super().__init__(*arguments)

    def _root(self) -> Any:
        tree = super()._root()
        tree["model"] = {**tree["model"], **self._rounds.in_state}
        tree["optimizer"] = {**tree["optimizer"], "state": {}}
        plan = list(self._rounds.reduction.plan.words)
        return {**tree, "scaler": {}, "outer": self._rounds.velocity, "plan": plan}

    @property
    def planned_steps(self) -> int:
        """The optimizer steps of a round that is opened now."""
        return self._rounds.reduction.plan.steps

    def _take(self, tree: Any) -> None:
        self._rounds.reduction.plan = RoundPlan.of(tree["plan"])
        self._rounds.restore()
        self._optimizer.state.clear()  # it belongs to other weights
        super()._take(tree)

    def _take_optimizer_state(self, tree: dict[str, Any]) -> None:
        """Do nothing: it is each member's own."""


class RoundSum(TensorSum):
    """What local steps have changed, as the sum of one member. `overlaps` has no effect: there is nothing to send
    before the last local step."""

    _words = WORDS

    def __init__(
        self,
        rounds: Rounds,
        names: dict[Any, str],
        optimizer: Any,
        buffers: Any,
        *,
        overlaps: bool,
        state_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._rounds = rounds
        self.local_step: Callable[[], None] = lambda: None
        """Steps the optimizer with the gradients that are there."""
        super().__init__(names, optimizer, buffers, overlaps=False, state_bytes=state_bytes)

    def refresh(self) -> None:
        """Raise `InvalidArgumentError` if other parameters are trained than before."""
        super().refresh()
        self._rounds.check(self.parameters)

    def _watch(self) -> None:
        """Do nothing: gradients stay where the optimizer finds them."""

    def _device(self) -> Any:
        return torch.device("cpu")

    def _on_devices(self, device: Any) -> dict[Any, int]:
        return {}

    def clear(self) -> None:
        """Begin another round with the global weights."""
        super().clear()
        if self._rounds.is_moved:
            self._rounds.restore()

    def backward(self, loss: Any, weight: float, scale: Callable[[Any], Any], **options: Any) -> None:
        """Compute the gradients of a local step from its mean loss."""
        super().backward(loss, weight, lambda weighted: scale(weighted / weight), **options)

    @property
    def has_gradients(self) -> bool:
        """Whether the gradients of the current micro-batch were computed."""
        return self.is_scaled or any(one.grad is not None for one in self.parameters)

    def end(self) -> None:
        """The micro-batch is whole: make a local step."""
        super().end()
        if self.weight:
            self.local_step()

    def reduce(self, context: DistributedContext) -> dict[str, Array]:
        """Add up the differences of all members, out of place. What is no difference is added up exactly."""
        for place, is_touched in enumerate(self._touched[: self._first]):
            if place and not is_touched:
                self._views[place].zero_()
        mine = self.staging.own()
        edge, words = self._beside["float32"], self._plan_words
        self._rounds.difference(self.count, mine["float32"][edge:])
        is_odd = count_nonfinite(mine["float32"][edge:]) > 0
        if is_odd:  # all members find it in the exact part
            mine["float32"][edge:] = 0
        mine["float32"][: words.start] = np.nan if is_odd else 1.0
        mine["float32"][words] = 0
        total = dict[str, Array]()
        for kind, source in mine.items():
            total[kind] = self.staging.memory.take(kind, source.size)
            np.copyto(total[kind], source)
        floats = total["float32"]
        exact = [floats[:edge], *(total[kind] for kind in total if kind != "float32")]
        self._rounds.reduction.add_up(context, floats[words], exact, floats[edge:])
        self._inspection = None
        self._rounds.reduction.reduced(floats)
        return total

    @property
    def _plan_words(self) -> slice:
        """The place of the plan of the next rounds in a result."""
        return slice(len(self.parameters), len(self.parameters) + WORDS)

    def sealed(self, payload: dict[str, Array]) -> RoundPlan:
        """A round counts. Return the plan that it was reduced with."""
        floats = payload["float32"]
        return self._rounds.reduction.sealed(floats, floats[self._plan_words].tolist())

    def moved(self, payload: dict[str, Array], weight: float) -> tuple[Array, list[Any]]:
        """Return the mean difference in a result, and the mean moves of buffers."""
        parts = self._cut({kind: torch.from_numpy(payload[kind]) for kind in self.staging.flats})
        edge = self._beside["float32"]
        mean = np.divide(payload["float32"][edge:], np.float32(weight))
        return mean, [part / weight for part in parts[1 : self._first]]


class RoundUpdate(Update):
    """Makes local steps, and applies sealed rounds."""

    def __init__(self, rounds: Rounds, batch: int, sums: RoundSum, *arguments: Any, **options: Any) -> None:
        """`batch` is the number of samples of one optimizer step."""
        super().__init__(sums, *arguments, **options)
        self._rounds, self._batch, self._round_sum = rounds, batch, sums
        sums.local_step = self._local_step
        rounds.on_write = self.guard.remember

    def _local_step(self) -> None:
        self._is_applying = True
        try:
            if self.scales:
                self._scaler.unscale_(self._optimizer)
            if self._clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self._sums.parameters, self._clip_norm)
            if self.scales:
                self._scaler.step(self._optimizer)
                self._scaler.update()
            else:
                self._optimizer.step()
        finally:
            self._is_applying = False
            self._rounds.is_moved = True
        self._sums.drop_gradients()
        self.guard.remember()

    def apply(self, done: Done, *, ends_pass: bool) -> None:
        """Move the global weights by a sealed round, and give them to the model. A round without a mean changes no
        weights: the local steps of all members are dropped."""
        if done.is_overtaken:
            self._rounds.restore()
            return
        self.guard.check()
        is_applied = done.is_finite and not done.is_empty
        named = dict[str, Any]()
        if is_applied:
            payload = cast("dict[str, Array]", done.result.payload)
            plan = self._round_sum.sealed(payload)
            mean, moves = self._round_sum.moved(payload, done.weight)
            settings = self._rounds.reduction.settings.outer
            self._rounds.outer.step(mean, settings.of_round(plan.every, plan.codec))
            self._buffers.apply(moves)
            named = {name: torch.from_numpy(part) for name, part in self._rounds.cut(mean).items()}
        self._rounds.restore()
        if self._on_step is not None:
            self._is_applying = True
            try:
                self._on_step(named, done.result.step)
                self._rounds.take_over()
                self._buffers.seal_changes()
            finally:
                self._is_applying = False
        self._optimizer._opt_called = True  # by this member or by others, which schedulers ask for
        for _ in range(self._steps_of(done) * is_applied if self._per == "step" else ends_pass):
            self._follow_schedule()
        self._sums.refresh()
        self.guard.remember()

    def _steps_of(self, done: Done) -> int:
        """Return the steps of a schedule in a round: one for each `batch` samples of all machines."""
        end = done.result.cursor
        return end // self._batch - (end - done.samples) // self._batch


def _plain_name(name: str) -> str:
    """Return a name without what torch.compile puts before it."""
    return name.replace("_orig_mod.", "")


def _numbers(parameter: Any) -> Array:
    """Return the elements of a parameter as float32 on the host."""
    return parameter.detach().reshape(-1).to("cpu", torch.float32).numpy()
