"""Every collective, described once, for tensors in host memory and on a GPU alike.

A `Call` is one collective with the tensors that it reads and writes. In host memory it runs on the tensors' own memory
(`Call.operation`); for tensors on a GPU, `staging.py` copies chunks of them through pinned memory and runs it on those.
This is the only module of `ringfort.torch` that uses the collectives of `ringfort.collectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from ringfort.backends.group import Group
from ringfort.collectives import native, reduction, signature
from ringfort.collectives.all_gather import all_gather as prepare_all_gather, gather as prepare_gather
from ringfort.collectives.all_reduce import all_reduce as prepare_all_reduce
from ringfort.collectives.all_to_all import all_to_all as prepare_all_to_all
from ringfort.collectives.broadcast import broadcast as prepare_broadcast
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.collectives.plan import Operation
from ringfort.collectives.reduce import reduce as prepare_reduce
from ringfort.collectives.reduce_scatter import reduce_scatter as prepare_reduce_scatter
from ringfort.collectives.reduction import element_type_named
from ringfort.collectives.scatter import scatter as prepare_scatter
from ringfort.collectives.signature import Collective
from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import torch
from ringfort.torch.tensors import to_array, to_moved

Arrays = Sequence[Any]


class Kind(NamedTuple):
    """One row of the table of collectives."""

    collective: Collective
    prepare: Callable[..., Operation]
    """The function of `ringfort.collectives`."""
    reduces: bool = False
    """Whether elements are reduced. Those that are only moved may have any element type."""
    inputs_per_rank: bool = False
    outputs_per_rank: bool = False
    """Whether there is a list with one tensor for each rank, or a single tensor. Where both are single, it is the same
    tensor: the collective works in place."""
    is_rooted: bool = False
    """Whether there is a root. Then only the root has a list."""
    is_whole: bool = False
    """Whether it needs whole tensors: it is not cut into chunks."""

    @property
    def has_any_sizes(self) -> bool:
        """Whether the tensors may differ in size."""
        return self.inputs_per_rank and self.outputs_per_rank

    def make(self, group: Group, call: Call, inputs: Arrays, outputs: Arrays, seconds: float) -> Operation:
        """Prepare the operation on host arrays. An empty list is what ranks that are not the root pass."""
        x = (inputs or None) if self.inputs_per_rank else (inputs or outputs)[0]
        settings: dict[str, Any] = {"root": call.root} if self.is_rooted else {}
        if self.reduces:
            settings["op"] = call.op
        if self.outputs_per_rank:
            settings["out"] = outputs or None
        elif self.inputs_per_rank:
            settings["out"] = outputs[0]
        return self.prepare(group, x, timeout=seconds, **settings)

    def parts(self, rank: int, world_size: int) -> tuple[int, Sequence[int], Sequence[int]]:
        """Return how many parts a staging buffer has, and which of them are the inputs and the outputs.

        Inputs and outputs share parts wherever the collective can run in place.
        """
        every = range(world_size)
        if self.has_any_sizes:
            return 2 * world_size, every, range(world_size, 2 * world_size)
        if not self.inputs_per_rank and not self.outputs_per_rank:
            return 1, (0,), (0,)
        return world_size, every if self.inputs_per_rank else (rank,), every if self.outputs_per_rank else (rank,)


class Call(NamedTuple):
    """One collective, with the tensors that this rank passes."""

    kind: Kind
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    """At ranks that read or write nothing, such as those that are not the root, one of the two is empty."""
    op: Op = ReduceOp.SUM
    root: int = 0
    result: Sequence[Any] | None = None
    """What the caller gets back; None for the outputs."""
    before: Callable[[], object] | None = None
    """Fills the inputs, right before they are read."""
    copies: Sequence[tuple[Any, Any]] = ()
    """Tensors that are written afterwards, each with the one that it is copied from."""

    @property
    def results(self) -> Sequence[Any]:
        """The tensors that the caller gets back."""
        return self.outputs if self.result is None else self.result

    @property
    def device(self) -> Any:
        """The device that the tensors are on."""
        return (self.inputs or self.outputs)[0].device

    def check(self, group: Group) -> None:
        """Raise `InvalidArgumentError` unless the lists have one tensor per rank, all of them alike."""
        kind = self.kind
        if not kind.inputs_per_rank and not kind.outputs_per_rank:
            return
        length = 0 if kind.is_rooted and group.rank != self.root else group.world_size
        if kind.inputs_per_rank:
            _check_length("input", self.inputs, length)
        if kind.outputs_per_rank:
            _check_length("output", self.outputs, length)
        first, *others = (*self.inputs, *self.outputs)
        dtype, device, count = first.dtype, first.device, first.numel()
        for index, tensor in enumerate(others, start=1 - len(self.inputs)):
            is_alike = tensor.dtype is dtype and tensor.device == device
            if not is_alike or (tensor.numel() != count and not kind.has_any_sizes):
                name = f"output[{index}]" if index >= 0 else f"input[{index + len(self.inputs)}]"
                found, expected = (f"{one.dtype} on {one.device}, {one.numel()} elements" for one in (tensor, first))
                raise InvalidArgumentError(name, found, f"must match the other tensors: {expected}")

    def operation(self, group: Group, seconds: float) -> Operation:
        """Prepare the collective on tensors in host memory. Raises if the arguments are invalid."""
        self.check(group)
        read = to_array if self.kind.reduces else to_moved
        inputs = [read(tensor) for tensor in self.inputs]
        outputs = inputs if self.outputs is self.inputs else [read(tensor) for tensor in self.outputs]
        operation = self.kind.make(group, self, inputs, outputs, seconds)
        if self.before is None and not self.copies:
            return operation

        def run() -> None:
            if self.before is not None:
                self.before()
            operation.run()
            with torch.inference_mode():  # inference tensors may not be written to outside of it
                for into, source in self.copies:
                    into.copy_(source)

        return Operation(operation.name, operation.nbytes, run)


def _check_length(name: str, tensors: Sequence[Any], length: int) -> None:
    if len(tensors) != length:
        every, none = f"must have one tensor for each of {length} ranks", "must be empty at ranks that are not the root"
        raise InvalidArgumentError(name, f"list of {len(tensors)}", every if length else none)


# --- the collectives --------------------------------------------------------------------------------------------------

ALL_REDUCE: Final = Kind(Collective.ALL_REDUCE, prepare_all_reduce, reduces=True)
REDUCE: Final = Kind(Collective.REDUCE, prepare_reduce, reduces=True, is_rooted=True)
BROADCAST: Final = Kind(Collective.BROADCAST, prepare_broadcast, is_rooted=True)
ALL_GATHER: Final = Kind(Collective.ALL_GATHER, prepare_all_gather, outputs_per_rank=True)
GATHER: Final = Kind(Collective.GATHER, prepare_gather, outputs_per_rank=True, is_rooted=True)
SCATTER: Final = Kind(Collective.SCATTER, prepare_scatter, inputs_per_rank=True, is_rooted=True)
REDUCE_SCATTER: Final = Kind(Collective.REDUCE_SCATTER, prepare_reduce_scatter, reduces=True, inputs_per_rank=True)
ALL_TO_ALL: Final = Kind(Collective.ALL_TO_ALL_LIST, prepare_all_to_all, inputs_per_rank=True, outputs_per_rank=True)


def all_reduce(tensor: Any, op: Op, **more: Any) -> Call:
    """Describe an all-reduce in place."""
    tensors = [tensor]
    return Call(ALL_REDUCE, tensors, tensors, op, **more)


def reduce(tensor: Any, root: int, op: Op, *, is_root: bool) -> Call:
    """Describe a reduce, in place at the root."""
    tensors = [tensor]
    return Call(REDUCE, tensors, tensors if is_root else (), op, root, result=tensors)


def broadcast(tensor: Any, root: int, *, is_root: bool, result: Sequence[Any] | None = None, **more: Any) -> Call:
    """Describe a broadcast in place."""
    tensors = [tensor]
    result = tensors if result is None else result
    return Call(BROADCAST, tensors if is_root else (), () if is_root else tensors, root=root, result=result, **more)


def barrier(group: Group, seconds: float) -> Operation:
    """Prepare a barrier."""
    group.check_timeout(seconds)
    return Operation("barrier", 0, lambda: group.barrier(seconds))


def in_order(operations: Sequence[Operation]) -> Operation:
    """Run several operations as one."""

    def run() -> None:
        for operation in operations:
            operation.run()

    return Operation(operations[0].name, sum(operation.nbytes for operation in operations), run)


def meet(group: Group, call: Call, dtype: Any, count: int, seconds: float) -> None:
    """Return when every rank has made this call, with `count` elements of `dtype` in each part.

    Raises `CollectiveMismatchError` where a rank has made another one.
    """
    element_type = element_type_named(str(dtype).removeprefix("torch."))
    op = reduction.code_of(call.op) if call.kind.reduces else 0
    said = signature.encode(call.kind.collective, kind=element_type.code, count=count, op=op, root=call.root)
    group.meet(group.envelope(said, seconds))


def by_engine(group: Group, call: Call, timeout: float | None) -> Operation | None:
    """Prepare an all-reduce or broadcast by the group's own engine (NCCL); None where the engine cannot do it."""
    (tensor,) = call.results
    is_reduced, config = call.kind is ALL_REDUCE, group.config.collective
    what, op = ("all_reduce", reduction.summed(call.op)) if is_reduced else ("broadcast", "")
    engine, configured = group.native, config.all_reduce if is_reduced else config.broadcast
    if engine is None or engine.tensors_on != tensor.device.type or not native.may_use_engine(group, configured):
        return None
    if not engine.takes(what, str(tensor.dtype).removeprefix("torch."), op):
        return None
    if is_reduced:
        return prepare_all_reduce(group, tensor, call.op, timeout=timeout)
    return prepare_broadcast(group, tensor, call.root, timeout=timeout)
