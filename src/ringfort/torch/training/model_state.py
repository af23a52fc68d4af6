"""`ModelState`: what a machine needs to continue the training of a torch model, as a tree of tensors and plain values.

    {"model": {name: tensor}, "trainable": names, "optimizer": {"groups": [...], "state": {name: {...}}, ...},
     "scheduler": [...], "scaler": {...}, "user": {...}}

Parameters are known by their names, because the order of an optimizer's parameters is no more than a convention.
Tensors are written in place wherever they exist already. What an optimizer has created in its first step, or a program
while it trains (parameter groups, unfrozen parameters), is created at a machine that joins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np

from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.collectives.reduction import element_type_named
from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import torch
from ringfort.training.elastic.state_tree import Entry, Manifest, Plain, Slot, StateTree

_BETWEEN: Final = "\n"
"""Between the names in a list of parameters: such a list is one value, however long."""
_PLAIN: Final = (bool, int, float, str, type(None))
_COMPILED: Final = "_orig_mod."
"""What torch.compile puts before the names of a module's tensors: a compiled member has the same state as others."""


class ModelState(StateTree):
    """The state of a model, its optimizer and what belongs to them. Tensors may be on any device."""

    def __init__(
        self, model: Any, optimizer: Any, schedulers: Sequence[Any], scaler: Any, user: dict[str, Any] | None
    ) -> None:
        """Raise `InvalidArgumentError` for an optimizer of other parameters than the model's, and for what cannot be
        part of a state."""
        self._model = getattr(model, "_orig_mod", model)
        self._optimizer = optimizer
        self._schedulers = schedulers
        self._scaler = scaler
        self._user = {} if user is None else user
        self.names: dict[Any, str] = {}
        """The name of each parameter of the model."""
        for name, parameter in self._model.named_parameters():
            self.names[parameter] = name.replace(_COMPILED, "")
        self._by_name = {name: parameter for parameter, name in self.names.items()}
        for place, group in enumerate(optimizer.param_groups):
            if any(parameter not in self.names for parameter in group["params"]):
                why = f"group {place} has a parameter that is not the model's; put all modules into one nn.Module"
                raise InvalidArgumentError("optimizer", type(optimizer).__name__, why)
        self.on_load: Callable[[], None] = lambda: None
        """Called after an image was loaded."""
        self._remember_first()

    # --- as StateTree needs it ----------------------------------------------------------------------------------------

    def misfit(self, manifest: Manifest) -> str:
        """Return in words why an image with that manifest is not of this program's state; empty if it can be loaded."""
        why = super().misfit(manifest)
        if why:
            return why
        known = {path for path in self.manifest().leaves() if path.startswith("state['model']")}
        extra = next(
            (e.path for e in manifest.entries if e.path.startswith("state['model']") and e.path not in known), ""
        )
        return f"{extra} is missing here" if extra else ""

    def _root(self) -> Any:
        return {
            "model": module_tensors(self._model, "model"),
            "trainable": _BETWEEN.join(name for name, one in self._by_name.items() if one.requires_grad),
            "optimizer": {
                "groups": [self._group(place, group) for place, group in enumerate(self._optimizer.param_groups)],
                "state": {
                    self._key(key): as_tree(value, f"optimizer.state[{self._key(key)!r}]")
                    for key, value in self._optimizer.state.items()
                },
            },
            "scheduler": [as_tree(one.state_dict(), "scheduler") for one in self._schedulers],
            "scaler": {} if self._scaler is None else as_tree(self._scaler.state_dict(), "scaler"),
            "user": {key: _user_tree(value, f"state[{key!r}]") for key, value in self._user.items()},
        }

    def _group(self, place: int, group: dict[str, Any]) -> dict[str, Any]:
        where = f"optimizer.param_groups[{place}]"
        tree = {key: as_tree(value, f"{where}[{key!r}]") for key, value in group.items() if key not in _LEFT_OUT}
        for parameter in group["params"]:
            if parameter not in self.names:
                raise InvalidArgumentError(where, "params", "has a parameter that is not the model's")
        return {**tree, "params": _BETWEEN.join(self.names[parameter] for parameter in group["params"])}

    def _key(self, key: Any) -> str:
        """Return what an entry of the optimizer's state belongs to: a parameter, or all of them."""
        name = self.names.get(key)
        return str(key) if name is None else name

    def _leaf(self, slot: Slot, *, needs_data: bool = True) -> ArrayView | Plain:
        tensor = slot.child
        if not isinstance(tensor, torch.Tensor) or tensor.device.type == "cpu":
            return super()._leaf(slot, needs_data=needs_data)
        if not needs_data:
            kind = element_type_named(str(tensor.dtype).removeprefix("torch."))
            nothing = np.broadcast_to(np.zeros(1, kind.storage), tensor.numel())
            return ArrayView(nothing, kind, tuple(tensor.shape), finish=lambda: tensor)
        copy = tensor.detach().cpu().contiguous()
        view = as_view(copy, slot.path)

        def finish() -> Any:
            tensor.copy_(copy)
            return tensor

        return ArrayView(view.flat, view.kind, view.shape, finish=finish)

    def _made(self, entry: Entry) -> Any:
        return torch.empty(entry.shape, dtype=getattr(torch, entry.kind)) if entry.kind else None

    def _take(self, tree: Any) -> None:
        """Give plain values and what was created to their owners; the other tensors have been written in place."""
        trainable = set(tree["trainable"].split(_BETWEEN))
        for name, parameter in self._by_name.items():
            if parameter.requires_grad != (name in trainable):
                parameter.requires_grad_(name in trainable)
        self._take_groups(tree["optimizer"]["groups"])
        self._take_optimizer_state(tree["optimizer"]["state"])
        for scheduler, one in zip(self._schedulers, tree["scheduler"], strict=True):
            scheduler.load_state_dict(restored(scheduler.state_dict(), one))
        if self._scaler is not None and tree["scaler"]:
            self._scaler.load_state_dict(tree["scaler"])
        for key, one in tree["user"].items():
            mine: Any = self._user.get(key)
            if isinstance(mine, torch.nn.Module):
                continue
            if hasattr(mine, "load_state_dict"):
                mine.load_state_dict(restored(mine.state_dict(), one))
            else:
                self._user[key] = _put_back(mine, one)
        self.on_load()

    def _take_groups(self, groups: list[dict[str, Any]]) -> None:
        own = self._optimizer.param_groups
        for place, tree in enumerate(groups):
            values = {key: value for key, value in tree.items() if key != "params"}
            names = [name for name in tree["params"].split(_BETWEEN) if name]
            parameters = [self._by_name[name] for name in names]
            shown = self._shown_names(parameters)
            if place == len(own):
                new = parameters if shown is None else list(zip(shown, parameters, strict=True))
                self._optimizer.add_param_group({"params": new, **values})
            group = own[place]
            group["params"] = parameters
            if shown is not None:
                group["param_names"] = shown
            for key, value in values.items():
                group[key] = restored(group.get(key), value)
        del own[len(groups) :]

    def _shown_names(self, parameters: list[Any]) -> list[str] | None:
        """Return the names of parameters in this optimizer, which are those of the model for what it did not have; None
        if it was made without names."""
        groups = self._optimizer.param_groups
        if not any("param_names" in group for group in groups):
            return None
        shown = dict[Any, str]()
        for group in groups:
            shown.update(zip(group["params"], group.get("param_names", ()), strict=False))
        return [shown.get(parameter, self.names[parameter]) for parameter in parameters]

    def _take_optimizer_state(self, tree: dict[str, Any]) -> None:
        state = self._optimizer.state
        keys = {self._key(key): key for key in state}
        for name in keys.keys() - tree.keys():
            del state[keys[name]]
        on_device = {
            parameter: group.get("capturable") or group.get("fused")
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }
        for name, values in tree.items():
            key = self._by_name.get(name, name)
            found = restored(state.get(key), values)
            if isinstance(key, torch.Tensor):
                found = _moved_to(key, found, moves_step=bool(on_device.get(key)))
            state[key] = found


def _moved_to(parameter: Any, value: Any, *, moves_step: bool) -> Any:
    """Return what an optimizer keeps for a parameter on the device of that, however deep it lies in dicts and lists.
    Torch keeps the count of steps on the host, unless the optimizer runs on the device as a whole."""
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value)
        for key, child in items.items():
            if key != "step" or moves_step:
                items[key] = _moved_to(parameter, child, moves_step=moves_step)
        return items
    if isinstance(value, (list, tuple)):
        moved = [_moved_to(parameter, child, moves_step=moves_step) for child in cast("list[Any]", value)]
        return tuple(moved) if isinstance(value, tuple) else moved
    return _laid_out_like(parameter, value.to(parameter.device)) if isinstance(value, torch.Tensor) else value


def _laid_out_like(parameter: Any, value: Any) -> Any:
    """Return what an optimizer keeps for a parameter in the memory format of that, such as channels last: fused
    optimizers go through the memory of both."""
    if value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


_LEFT_OUT: Final = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Entries of a parameter group that are not sent as they are: its parameters, which are known by their names; and how
this machine computes, because a machine of another kind may do that differently."""


def module_tensors(module: Any, what: str) -> dict[str, Any]:
    """Return the parameters and buffers of a module as its `state_dict` names them. Raise `InvalidArgumentError` for
    what is no tensor, such as the extra state of a module."""
    found = dict[str, Any]()
    for name, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor):
            why = f"{name} is a {type(value).__name__}; only parameters and buffers can be part of a run's state"
            raise InvalidArgumentError(what, type(module).__name__, why)
        found[name.replace(_COMPILED, "")] = value
    return found


def _user_tree(value: Any, where: str) -> Any:
    if isinstance(value, torch.nn.Module):
        return module_tensors(value, where)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return as_tree(value.state_dict(), where)
    return as_tree(value, where)


def as_tree(value: Any, where: str) -> Any:
    """Return a value of dicts, lists, tuples, tensors, arrays and plain values as a tree for `StateTree`. Raise
    `InvalidArgumentError` for anything else."""
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {key: as_tree(child, f"{where}[{key!r}]") for key, child in items}
    if isinstance(value, (list, tuple)):
        return [as_tree(child, f"{where}[{place}]") for place, child in enumerate(cast("list[Any]", value))]
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.generic):
        return cast("Any", value.item())
    if isinstance(value, np.ndarray):
        return cast("Any", value)
    if type(value) in _PLAIN:
        return value
    for plain in (bool, int, float, str):  # such as an enumeration
        if isinstance(value, plain):
            return plain(value)
    why = "cannot be part of a run's state; use tensors, numbers, strings, dicts and lists"
    raise InvalidArgumentError(where, type(value).__name__, why)


def restored(mine: Any, tree: Any) -> Any:
    """Return `tree` with the types that `mine` has: tuples, counters, and tensors that were written in place."""
    if isinstance(tree, dict):
        old = cast("dict[Any, Any]", mine) if isinstance(mine, Mapping) else dict[Any, Any]()
        found = {key: restored(old.get(key), child) for key, child in cast("dict[Any, Any]", tree).items()}
        return Counter(found) if isinstance(mine, Counter) else found
    if isinstance(tree, list):
        children = cast("list[Any]", tree)
        olds = list(cast("list[Any]", mine)) if isinstance(mine, (list, tuple)) else []
        olds += [None] * (len(children) - len(olds))
        items = [restored(old, child) for old, child in zip(olds, children, strict=False)]
        return tuple(items) if isinstance(mine, tuple) else items
    if isinstance(mine, torch.Tensor) and isinstance(tree, torch.Tensor):
        return mine if mine.data_ptr() == tree.data_ptr() and mine.shape == tree.shape else tree
    return tree


def _put_back(mine: Any, tree: Any) -> Any:
    """Do as `restored`, but write into the dicts and lists of `mine`, to which the program may have references."""
    if isinstance(mine, dict) and isinstance(tree, dict):
        own, new = cast("dict[Any, Any]", mine), cast("dict[Any, Any]", tree)
        for key in own.keys() - new.keys():
            del own[key]
        own.update({key: _put_back(own.get(key), child) for key, child in new.items()})
        return own
    if isinstance(mine, list) and isinstance(tree, list):
        items, children = cast("list[Any]", mine), cast("list[Any]", tree)
        olds = [*items, *[None] * (len(children) - len(items))]
        items[:] = [_put_back(old, child) for old, child in zip(olds, children, strict=False)]
        return items
    return restored(mine, tree)
