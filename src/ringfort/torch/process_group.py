"""`RingfortProcessGroup`: a `torch.distributed` process group over a `DistributedContext`.

Torch calls a method here for every collective, with lists of tensors and an options object, and waits on the `Work`
that comes back. Since torch 2.8 the options say whether the caller will wait at once (`asyncOp`): then all is done in
its own thread before this returns. Everything else runs in the order it was issued, in the thread of whoever waits for
it first or in the group's own. Where torch has changed the name of a method, both are here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

from ringfort.collectives import landing, movements, reductions
from ringfort.collectives.operation import Operation
from ringfort.collectives.ops import Op
from ringfort.context import DistributedContext
from ringfort.torch import several, sparse
from ringfort.torch.arguments import (
    at_least_one,
    list_of_root,
    only,
    only_list,
    op_of,
    options_of,
    pairs_of,
    root_of,
    root_tensor_of,
)
from ringfort.torch.callbacks import current, origin_of
from ringfort.torch.cuda import CudaEngine
from ringfort.torch.devices import BEFORE_2_13, OURS, make_engine, named, named_for, routed
from ringfort.torch.init_method import forget
from ringfort.torch.monitored import monitored_barrier
from ringfort.torch.names import dist, torch
from ringfort.torch.point_to_point import Messages
from ringfort.torch.sparse import is_sparse
from ringfort.torch.steps import count_steps
from ringfort.torch.tensors import rows, to_array, to_moved, to_seconds
from ringfort.torch.untraced import untraced
from ringfort.torch.work import RingfortWork, Several

_RECORDS_CALLS = "_maybe_attach_flight_recorder"
"""The function of torch's that does."""


@untraced
class RingfortProcessGroup(dist.ProcessGroup):
    """One group of torch's. `context` is this rank's handle on the same group outside torch."""

    supports_coalescing = True
    supports_splitting = False
    supports_shrinking = False
    supports_time_estimate = False
    supports_tensor_alloc = False

    def __init__(self, store: Any, context: DistributedContext, timeout: float) -> None:
        # Not with the store: torch would make what cannot be subclassed.
        super().__init__(context.rank, context.world_size)  # pyright: ignore[reportUnknownMemberType]
        self._store = store
        self.context = context
        self._timeout = timeout
        self._name = self._description = ""
        self._sequence = 0
        self._messages = Messages(context)
        self._coalesced: list[RingfortWork] | None = None
        self._engines: dict[str, Any] = {}
        count_steps()

    # --- collectives ----------------------------------------------------------------------------------------------

    @routed
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> RingfortWork:
        """Every rank's tensor becomes the reduction of all, in place. Several tensors per rank are reduced with each
        other too. Sparse ones can be summed."""
        tensors, op, opts = at_least_one(tensors), op_of(opts), options_of(opts, timeout)
        if len(tensors) > 1 or is_sparse(tensors[0]):
            reduced = sparse.all_reduce if is_sparse(tensors[0]) else several.all_reduce
            return self._issue(tensors, opts, lambda seconds: [reduced(self._current.backend, tensors, op, seconds)])
        if not getattr(opts, "asyncOp", True) and self._coalesced is None:
            context, seconds = self._next(), to_seconds(opts.timeout, self._timeout)
            context.all_reduce(to_array(tensors[0]), op, timeout=None if seconds == context.config.timeout else seconds)
            return RingfortWork(tensors)
        return self._issue(tensors, opts, lambda seconds: [self._all_reduce(tensors[0], op, seconds)])

    @routed
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> RingfortWork:
        """Each of several tensors becomes the reduction of those of all ranks in its place. Where some share memory,
        all are read before one is written."""
        tensors, op = at_least_one(tensors), op_of(opts)
        copies = several.apart(tensors)

        def prepare(seconds: float) -> Sequence[Operation]:
            return several.around(tensors, copies, [self._all_reduce(copy, op, seconds) for copy in copies])

        return self._issue(tensors, opts, prepare)

    @routed
    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> RingfortWork:
        """The root's tensor becomes the reduction of all."""
        tensor, root = only(tensors, "tensors"), root_of(opts)
        kind, opts = op_of(opts if op is None else op), options_of(opts, timeout)
        root_tensor_of(opts, [tensor])

        def prepare(seconds: float) -> list[Operation]:
            return [reductions.reduce(self._current.backend, to_array(tensor), root, kind, timeout=seconds)]

        return self._issue([tensor], opts, prepare)

    @routed
    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> RingfortWork:
        """Every rank's tensor becomes the root's, in place. Of several tensors, the root's is `opts.rootTensor`."""
        tensors, root, opts = at_least_one(tensors), root_of(opts), options_of(opts, timeout)
        index = root_tensor_of(opts, tensors)

        def prepare(seconds: float) -> list[Operation]:
            if len(tensors) > 1:
                return [several.broadcast(self._current.backend, tensors, root, index, seconds)]
            return [movements.broadcast(self._current.backend, to_moved(tensors[0]), root, timeout=seconds)]

        return self._issue(tensors, opts, prepare)

    @routed
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """The list of outputs becomes every rank's input. For several inputs there is a list for each, with all."""
        if len(sources := at_least_one(inputs)) > 1:
            return self._issue(
                outputs, opts, lambda seconds: [several.all_gather(self._current.backend, outputs, sources, seconds)]
            )
        source, places = sources[0], only_list(outputs)
        return self._issue(places, opts, lambda seconds: [self._all_gather(places, source, seconds)])

    @routed
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """`allgather` for several inputs; `outputs[r]` is the list for those of rank r."""
        pairs = pairs_of(list(zip(*outputs, strict=True)), at_least_one(inputs))
        written = [tensor for places, _ in pairs for tensor in places]
        return self._issue(written, opts, lambda seconds: (self._all_gather(*pair, seconds) for pair in pairs))

    @routed
    def all_gather_single(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """One output with every rank's input, one after the other."""
        return self.all_gather_single_coalesced([outputs], [inputs], opts)

    @routed
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """The same for several."""
        pairs = pairs_of(outputs, inputs)

        def prepare(seconds: float) -> Iterable[Operation]:
            for output, source in pairs:
                places = rows(output, self._current.world_size, "output")
                yield landing.all_gather(self._current.backend, to_moved(source, "input"), places, timeout=seconds)

        return self._issue(outputs, opts, prepare)

    @named
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> RingfortWork:
        """At the root, the list of outputs becomes every rank's input."""
        source, root = only(inputs, "input"), root_of(opts)
        if not source.is_cpu:  # not by `routed`: away from the root there are no outputs to look at
            return self.engine_for(source.device).gather(outputs, inputs, opts)
        opts = options_of(opts, timeout)
        places = list_of_root(outputs, "outputs", is_root=self._current.rank == root)

        def prepare(seconds: float) -> list[Operation]:
            into = None if places is None else [to_moved(tensor, "output") for tensor in places]
            return [landing.gather(self._current.backend, to_moved(source, "input"), into, root, timeout=seconds)]

        return self._issue(places or [], opts, prepare)

    @routed
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> RingfortWork:
        """Every rank's output becomes its part of the root's list of inputs."""
        place, root, opts = only(outputs, "output"), root_of(opts), options_of(opts, timeout)
        sources = list_of_root(inputs, "inputs", is_root=self._current.rank == root)

        def prepare(seconds: float) -> list[Operation]:
            parts = None if sources is None else [to_moved(tensor, "input") for tensor in sources]
            return [landing.scatter(self._current.backend, parts, to_moved(place, "output"), root, timeout=seconds)]

        return self._issue([place], opts, prepare)

    @routed
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """Every rank's output becomes the reduction of its parts of all ranks' lists of inputs."""
        place, sources, op = only(outputs, "output"), only_list(inputs), op_of(opts)

        def prepare(seconds: float) -> list[Operation]:
            parts = [to_array(tensor, "input") for tensor in sources]
            return [landing.reduce_scatter(self._current.backend, parts, to_array(place), op, timeout=seconds)]

        return self._issue([place], opts, prepare)

    @routed
    def reduce_scatter_single(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """The same with all parts in one input, one after the other."""
        return self.reduce_scatter_single_coalesced([outputs], [inputs], opts)

    @routed
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """The same for several."""
        pairs, op = pairs_of(outputs, inputs), op_of(opts)

        def prepare(seconds: float) -> Iterable[Operation]:
            for output, source in pairs:
                parts = rows(source, self._current.world_size, "input")
                yield landing.reduce_scatter(self._current.backend, parts, to_array(output), op, timeout=seconds)

        return self._issue(outputs, opts, prepare)

    @routed
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """Output r becomes rank r's input for this rank."""

        def prepare(seconds: float) -> list[Operation]:
            parts, into = [to_moved(t, "input") for t in inputs], [to_moved(t, "output") for t in outputs]
            return [landing.all_to_all(self._current.backend, parts, into, timeout=seconds)]

        return self._issue(outputs, opts, prepare)

    @routed
    def all_to_all_single(
        self, outputs: Any, inputs: Any, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> RingfortWork:
        """The same with all parts in one tensor, cut along its first axis: evenly, or in so many rows."""

        def prepare(seconds: float) -> list[Operation]:
            parts = rows(inputs, self._current.world_size, "input", input_sizes)
            into = rows(outputs, self._current.world_size, "output", output_sizes)
            return [landing.all_to_all(self._current.backend, parts, into, timeout=seconds)]

        return self._issue([outputs], opts, prepare)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> RingfortWork:
        """Done when every rank has called it."""
        opts = options_of(opts, timeout)
        return self._issue([], opts, lambda seconds: [movements.barrier(self._current.backend, timeout=seconds)])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier in which rank 0 names those who did not come: the first, or with `wait_all_ranks` all of them."""
        self._sequence += 1
        monitored_barrier(self.context.backend, to_seconds(timeout, self._timeout), wait_all_ranks=wait_all_ranks)

    # --- between two ranks ----------------------------------------------------------------------------------------

    @routed
    def send(self, tensors: Any, dst: int, tag: int = 0) -> RingfortWork:
        """Sends one tensor to `dst`, which may be this rank."""
        tensor = only(tensors, "tensors")
        return self._keep(RingfortWork([tensor], self._messages.send(to_moved(tensor), dst, tag, self._timeout)))

    @routed
    def recv(self, tensors: Any, src: int, tag: int = 0) -> RingfortWork:
        """Receives one tensor from `src`, which may be this rank."""
        tensor = only(tensors, "tensors")
        work = self._messages.recv(to_moved(tensor), src, tag, self._timeout)
        return self._keep(RingfortWork([tensor], work, source=src))

    @routed
    def recv_anysource(self, tensors: Any, tag: int = 0) -> RingfortWork:
        """Receives one tensor from whoever sends first; `source_rank` of the work tells who that was."""
        tensor = only(tensors, "tensors")
        return self._keep(RingfortWork([tensor], self._messages.recv_any(to_moved(tensor), tag, self._timeout)))

    # --- what the group is ----------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802  # the name by which C++ asks
        """What `get_backend` says."""
        return "ringfort"

    def getGroupName(self) -> str:  # noqa: N802
        """Torch's name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Torch gives it one."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """What the group is for, in the program's words."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """As `new_group` was told."""
        self._description = description

    def getRank(self) -> int:  # noqa: N802
        """This process's place in the group."""
        return self.context.rank

    def getSize(self) -> int:  # noqa: N802
        """How many ranks the group has."""
        return self.context.world_size

    rank = getRank
    size = getSize

    def get_group_store(self) -> Any:
        """Torch's store, for this group."""
        return self._store

    @property
    def _device_types(self) -> list[Any]:
        # Torch 2.15 records the calls of groups made of its own engines, which it knows by their devices. It would fail
        # over another: only one that says that it has none is left alone.
        asking = inspect.currentframe()
        if asking is not None and asking.f_back is not None and asking.f_back.f_code.co_name == _RECORDS_CALLS:
            return []
        return [torch.device(name) for name in named_for(self) or {"cpu": OURS}]

    def _get_backend(self, device: Any) -> Any:
        name = named_for(self).get(torch.device(device).type, OURS)
        return self if name == OURS else self.engine_for(torch.device(device))._get_backend(device)

    def engine_for(self, device: Any) -> Any:
        """Who serves tensors on `device`, which is not the CPU. Raises as `make_engine`."""
        if device.type not in self._engines:
            self._engines[device.type] = make_engine(self, device, self._timeout)
        return self._engines[device.type]

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        pass  # it starts at 0 everywhere

    def _enable_collectives_timing(self) -> None:
        pass  # the context's metrics have it

    def set_timeout(self, timeout: timedelta) -> None:
        """Bounds every call that is given no timeout of its own, from now on."""
        self._timeout = to_seconds(timeout, self._timeout)

    _set_default_timeout = set_timeout  # by this name at engines such as Gloo's

    @property
    def options(self) -> Any:
        """What torch's engines call their options. Of them, the timeout."""
        return torch._C._distributed_c10d.Backend.Options(OURS, timedelta(seconds=self._timeout))

    def _start_coalescing(self, device: Any = None) -> None:
        if self._coalesced is None:
            self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> RingfortWork:
        works, self._coalesced = self._coalesced or [], None
        return Several(works)

    def abort(self) -> None:
        """Wakes every call of this process with `AbortedError`, and tells the peers."""
        self.context.abort("the process group was aborted")

    def shutdown(self) -> None:
        """Leaves the group. What is under way ends with an error. May be called twice."""
        for engine in self._engines.values():
            engine.shutdown()
        self._messages.close()
        self.context.close()
        forget(self.context.backend)

    # --- how things run -------------------------------------------------------------------------------------------

    def _issue(self, tensors: Any, opts: Any, prepare: Callable[[float], Iterable[Operation]]) -> RingfortWork:
        """Runs the operations of one call: at once where torch says that it waits, else in their turn."""
        context = self._next()
        for engine in self._engines.values():
            if isinstance(engine, CudaEngine):
                engine.check()
        operations = list(prepare(to_seconds(getattr(opts, "timeout", None), self._timeout)))
        is_async = self._coalesced is not None or getattr(opts, "asyncOp", True)
        if not is_async:
            for operation in operations:
                context.issue(operation, False)
            return RingfortWork(tensors)
        operation = several.as_one(operations)
        origin = origin_of(self.context, self._sequence)
        return self._keep(RingfortWork(tensors, context.issue(operation, True), origin=origin))

    def _next(self) -> DistributedContext:
        """Where the next collective runs. Those of callbacks do not count: they come at another time at each rank."""
        context = self._current
        if context is self.context:
            self._sequence += 1
        return context

    @property
    def _current(self) -> DistributedContext:
        """Where collectives that are issued now run."""
        return current(self.context)

    def _keep(self, work: RingfortWork) -> RingfortWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _all_reduce(self, tensor: Any, op: Op, seconds: float) -> Operation:
        return reductions.all_reduce(self._current.backend, to_array(tensor), op, timeout=seconds)

    def _all_gather(self, places: Sequence[Any], source: Any, seconds: float) -> Operation:
        into = [to_moved(tensor, "output") for tensor in places]
        return landing.all_gather(self._current.backend, to_moved(source, "input"), into, timeout=seconds)


for _new, _old in BEFORE_2_13.items():
    setattr(RingfortProcessGroup, _old, getattr(RingfortProcessGroup, _new))
