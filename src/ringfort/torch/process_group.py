"""`RingfortProcessGroup`: a `torch.distributed` process group over a `DistributedContext`.

Torch calls a method for every collective, with lists of tensors and an options object, and waits on the `Work` that it
gets back. Each method turns its arguments into the calls of `operations.py`, whatever device the tensors are on. Since
torch 2.8 the options say whether the caller waits at once (`asyncOp`): then the call runs in the caller's thread before
the method returns. All other calls run in the order of their issue, in the thread of whoever waits for them first or in
the group's own. Methods that torch has renamed are here under both names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from ringfort.backends.group import Group
from ringfort.context import DistributedContext
from ringfort.torch import BACKEND, operations, several
from ringfort.torch.arguments import at_least_one, only, only_list, op_of, options_of, pairs_of, root_tensor_of
from ringfort.torch.callbacks import current, follow_futures, origin_of
from ringfort.torch.devices import BEFORE_2_13, make_engine, named_for, routed
from ringfort.torch.hooks import untraced, watch_training
from ringfort.torch.host_copies import HostCopies
from ringfort.torch.linked_store import forget
from ringfort.torch.names import dist, torch
from ringfort.torch.operations import ALL_GATHER, ALL_TO_ALL, GATHER, REDUCE_SCATTER, SCATTER, Call, Operation
from ringfort.torch.point_to_point import Messages, monitored_barrier
from ringfort.torch.tensors import split, to_array, to_moved, to_seconds
from ringfort.torch.work import RingfortWork, Several


@untraced
class RingfortProcessGroup(dist.ProcessGroup):
    """A process group of torch. `context` is this rank's handle on the same group outside torch."""

    supports_coalescing = True
    supports_splitting = False
    supports_shrinking = False
    supports_time_estimate = False
    supports_tensor_alloc = False

    def __init__(self, store: Any, context: DistributedContext, timeout: float) -> None:
        # Without the store: torch's constructor that takes it makes an object that cannot be subclassed.
        super().__init__(context.rank, context.world_size)  # pyright: ignore[reportUnknownMemberType]
        self._store = store
        self.context = context
        self._timeout = timeout
        self._name = self._description = ""
        self._sequence = 0
        self._messages = Messages(context)
        self._coalesced: list[RingfortWork] | None = None
        self.engines: dict[str, Any] = {"cpu": None}
        """What serves tensors on each type of device; None for host memory. Others are made when first needed."""
        watch_training()
        follow_futures()

    # --- collectives ----------------------------------------------------------------------------------------------

    @routed
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> RingfortWork:
        """Reduce one tensor over all ranks, in place. Several tensors per rank are reduced with each other too. Sparse
        ones can be summed."""
        tensors, opts = at_least_one(tensors), options_of(opts, timeout)
        op, in_host_memory = op_of(opts), self.engine_for(tensors[0].device) is None
        if in_host_memory and tensors[0].layout is torch.sparse_coo:
            return self._run(opts, tensors, lambda group, limit: several.all_reduce_sparse(group, tensors, op, limit))
        if len(tensors) > 1:
            return self._issue(opts, [several.all_reduce(tensors, op)])
        if in_host_memory and not self._is_async(opts):
            # The context has the fastest way for small arrays, with its usual timeout.
            context, seconds = self._next(), to_seconds(opts.timeout, self._timeout)
            context.all_reduce(to_array(tensors[0]), op, timeout=None if seconds == context.config.timeout else seconds)
            return RingfortWork(tensors)
        return self._issue(opts, [operations.all_reduce(tensors[0], op)])

    @routed
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> RingfortWork:
        """Reduce each of several tensors over all ranks, in place. Where some share memory, all are read before one is
        written."""
        opts = options_of(opts)
        return self._issue(opts, several.all_reduce_each(at_least_one(tensors), op_of(opts)))

    @routed
    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> RingfortWork:
        """Reduce one tensor over all ranks, in place at the root."""
        tensor, opts = only(tensors, "tensors"), options_of(opts, timeout, op)
        root_tensor_of(opts, [tensor])
        is_root = self.context.rank == opts.rootRank
        return self._issue(opts, [operations.reduce(tensor, opts.rootRank, op_of(opts), is_root=is_root)])

    @routed
    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> RingfortWork:
        """Copy the root's tensor to all ranks, in place. Of several tensors, the root's is `opts.rootTensor`."""
        tensors, opts = at_least_one(tensors), options_of(opts, timeout)
        index, root, is_root = root_tensor_of(opts, tensors), opts.rootRank, self.context.rank == opts.rootRank
        if len(tensors) > 1:
            return self._issue(opts, [several.broadcast(tensors, root, index, is_root=is_root)])
        return self._issue(opts, [operations.broadcast(tensors[0], root, is_root=is_root)])

    @routed
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """Gather every rank's input in the list of outputs. For several inputs there is a list for each, with all."""
        sources = at_least_one(inputs)
        if len(sources) > 1:
            return self._issue(opts, several.all_gather(outputs, sources, self.size()))
        return self._issue(opts, [Call(ALL_GATHER, sources, only_list(outputs))])

    @routed
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """Gather several inputs of every rank; `outputs[r]` is the list for those of rank r."""
        pairs = pairs_of(list(zip(*outputs, strict=True)), at_least_one(inputs))
        return self._issue(opts, [Call(ALL_GATHER, [source], places) for places, source in pairs])

    @routed
    def all_gather_single(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """Gather every rank's input in one output, one after the other."""
        return self.all_gather_single_coalesced([outputs], [inputs], opts)

    @routed
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """Do the same for several inputs, each with its output."""
        calls = [
            Call(ALL_GATHER, [source], split(output, self.size(), "output"), result=[output])
            for output, source in pairs_of(outputs, inputs)
        ]
        return self._issue(opts, calls)

    @routed
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> RingfortWork:
        """Gather every rank's input in the root's list of outputs."""
        source, opts = only(inputs, "input"), options_of(opts, timeout)
        return self._issue(opts, [Call(GATHER, [source], only_list(outputs), root=opts.rootRank)])

    @routed
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> RingfortWork:
        """Copy to every rank's output its part of the root's list of inputs."""
        place, opts = only(outputs, "output"), options_of(opts, timeout)
        return self._issue(opts, [Call(SCATTER, only_list(inputs), [place], root=opts.rootRank)])

    @routed
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """Reduce the ranks' lists of inputs; rank r gets part r."""
        opts = options_of(opts)
        return self._issue(opts, [Call(REDUCE_SCATTER, only_list(inputs), [only(outputs, "output")], op_of(opts))])

    @routed
    def reduce_scatter_single(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """Do the same with all parts in one input, one after the other."""
        return self.reduce_scatter_single_coalesced([outputs], [inputs], opts)

    @routed
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """Do the same for several inputs, each with its output."""
        opts = options_of(opts)
        calls = [
            Call(REDUCE_SCATTER, split(source, self.size(), "input"), [output], op_of(opts))
            for output, source in pairs_of(outputs, inputs)
        ]
        return self._issue(opts, calls)

    @routed
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """Copy input r to rank r, which gets it as its output number of this rank."""
        return self._issue(opts, [Call(ALL_TO_ALL, inputs, outputs)])

    @routed
    def all_to_all_single(
        self, outputs: Any, inputs: Any, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> RingfortWork:
        """Do the same with all parts in one tensor, split along its first axis: evenly, or into the given sizes."""
        parts = split(inputs, self.size(), "input", input_sizes)
        places = split(outputs, self.size(), "output", output_sizes)
        return self._issue(opts, [Call(ALL_TO_ALL, parts, places, result=[outputs])])

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> RingfortWork:
        """Wait until every rank has called it."""
        return self._run(options_of(opts, timeout), [], operations.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank has called it. Rank 0 raises an error that names the missing ranks: the first one, or
        with `wait_all_ranks` all of them."""
        self._sequence += 1
        monitored_barrier(self.context.group, to_seconds(timeout, self._timeout), wait_all_ranks=wait_all_ranks)

    # --- point-to-point -------------------------------------------------------------------------------------------

    @routed
    def send(self, tensors: Any, dst: int, tag: int = 0) -> RingfortWork:
        """Send one tensor to `dst`, which may be this rank."""
        tensor = only(tensors, "tensors")
        engine = self.engine_for(tensor.device)
        if engine is None:
            array, copied, as_work = to_moved(tensor), None, partial(RingfortWork, [tensor])
        else:
            array, copied, as_work = engine.outgoing(tensor)
        return self._keep(as_work(self._messages.send(array, dst, tag, self._timeout, before=copied)))

    @routed
    def recv(self, tensors: Any, src: int, tag: int = 0) -> RingfortWork:
        """Receive one tensor from `src`, which may be this rank."""
        array, as_work = self._incoming(tensors)
        return self._keep(as_work(self._messages.recv(array, src, tag, self._timeout), source=src))

    @routed
    def recv_anysource(self, tensors: Any, tag: int = 0) -> RingfortWork:
        """Receive one tensor from the rank that sends first; the work's `source_rank` is that rank."""
        array, as_work = self._incoming(tensors)
        return self._keep(as_work(self._messages.recv_any(array, tag, self._timeout)))

    def _incoming(self, tensors: Any) -> tuple[Any, Callable[..., RingfortWork]]:
        tensor = only(tensors, "tensors")
        engine = self.engine_for(tensor.device)
        return (to_moved(tensor), partial(RingfortWork, [tensor])) if engine is None else engine.incoming(tensor)

    # --- the group ---------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802  # torch's C++ calls it by this name
        """Return what `get_backend` returns."""
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802
        """Return torch's name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set torch's name of the group."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return what the group is for, as the program describes it."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set what the group is for, from `new_group(group_desc=...)`."""
        self._description = description

    def getRank(self) -> int:  # noqa: N802
        """Return the rank of this process in the group."""
        return self.context.rank

    def getSize(self) -> int:  # noqa: N802
        """Return how many ranks the group has."""
        return self.context.world_size

    rank = getRank
    size = getSize

    def get_group_store(self) -> Any:
        """Return the part of torch's store that belongs to this group."""
        return self._store

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device(name) for name in named_for(self) or {"cpu": BACKEND}]

    def _get_backend(self, device: Any) -> Any:
        name = named_for(self).get(torch.device(device).type, BACKEND)
        return self if name == BACKEND else self.engine_for(torch.device(device))._get_backend(device)

    def engine_for(self, device: Any) -> Any:
        """Return what serves tensors on `device`; None for host memory. Raises as `make_engine`."""
        kind = device.type
        if kind not in self.engines:
            self.engines[kind] = make_engine(self, device, self._timeout)
        return self.engines[kind]

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        pass  # it starts at 0 at every rank

    def _enable_collectives_timing(self) -> None:
        pass  # the context's metrics have it

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of calls that are given none."""
        self._timeout = to_seconds(timeout, self._timeout)

    _set_default_timeout = set_timeout  # the name that engines such as Gloo's have

    @property
    def options(self) -> Any:
        """Return what torch's engines call their options, of which Ringfort has the timeout."""
        return torch._C._distributed_c10d.Backend.Options(BACKEND, timedelta(seconds=self._timeout))

    def _start_coalescing(self, device: Any = None) -> None:
        if self._coalesced is None:
            self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> RingfortWork:
        works, self._coalesced = self._coalesced or [], None
        return Several(works)

    def abort(self) -> None:
        """Wake every call of this process with `AbortedError`, and tell the peers."""
        self.context.abort("the process group was aborted")

    def shutdown(self) -> None:
        """Leave the group. Calls under way end with an error. May be called twice."""
        for engine in self.engines.values():
            if engine is not None:
                engine.shutdown()
        self._messages.close()
        self.context.close()
        forget(self.context.backend)

    # --- how calls run --------------------------------------------------------------------------------------------

    def _issue(self, opts: Any, calls: Sequence[Call]) -> RingfortWork:
        """Run the collectives of one call of torch, one after the other."""
        if not calls:
            return RingfortWork([])
        engine, tensors = self.engine_for(calls[0].device), [tensor for call in calls for tensor in call.results]
        as_work: Callable[..., RingfortWork] = RingfortWork
        if isinstance(engine, HostCopies):
            calls, as_work = engine.moved(calls)
        elif engine is not None:
            seconds = to_seconds(getattr(opts, "timeout", None), self._timeout)
            work = engine.issue(calls, seconds, is_async=self._is_async(opts))
            self._sequence += 1
            return self._keep(work)
        if len(calls) == 1:
            return self._run(opts, tensors, calls[0].operation, as_work)

        def prepare(group: Group, seconds: float) -> Operation:
            return operations.in_order([call.operation(group, seconds) for call in calls])

        return self._run(opts, tensors, prepare, as_work)

    def _run(
        self,
        opts: Any,
        tensors: Sequence[Any],
        prepare: Callable[[Group, float], Operation],
        as_work: Callable[..., RingfortWork] = RingfortWork,
    ) -> RingfortWork:
        """Run an operation on host memory: at once if the caller waits for it, else after those issued before it."""
        context = self._next()
        operation = prepare(context.group, to_seconds(getattr(opts, "timeout", None), self._timeout))
        if not self._is_async(opts):
            context.issue(operation, False)
            return as_work(tensors)
        origin = origin_of(self.context, self._sequence)
        return self._keep(as_work(tensors, context.issue(operation, True), origin=origin))

    def _is_async(self, opts: Any) -> bool:
        return self._coalesced is not None or getattr(opts, "asyncOp", True)

    def _next(self) -> DistributedContext:
        """Return where the next collective runs. Those of callbacks are not counted: each rank issues them at another
        time."""
        context = current(self.context)
        if context is self.context:
            self._sequence += 1
        return context

    def _keep(self, work: RingfortWork) -> RingfortWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


for _new, _old in BEFORE_2_13.items():
    setattr(RingfortProcessGroup, _old, getattr(RingfortProcessGroup, _new))
