"""`DistributedContext`: one handle for a backend, its collectives and its metrics. Made by `startup.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringfort.backends.base import Backend
from ringfort.backends.group import Group, Traffic
from ringfort.backends.sub import SubBackend
from ringfort.collectives import objects
from ringfort.collectives.all_gather import all_gather, gather
from ringfort.collectives.all_reduce import all_reduce
from ringfort.collectives.all_to_all import all_to_all
from ringfort.collectives.arrays import as_view
from ringfort.collectives.broadcast import broadcast
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.collectives.plan import Operation, Plan
from ringfort.collectives.reduce import reduce
from ringfort.collectives.reduce_scatter import reduce_scatter
from ringfort.collectives.scatter import scatter
from ringfort.collectives.work import Runner, Work
from ringfort.compression import collective as compressed
from ringfort.compression.auto import codec_seconds
from ringfort.compression.calls import describe
from ringfort.compression.collective import Compression
from ringfort.compression.compressor import GradientCompressor
from ringfort.compression.strategy import CompressionStrategy
from ringfort.config import MIB, AllReduceStrategy, BroadcastStrategy, DistributedConfig, ReduceStrategy, run_name
from ringfort.errors import InvalidArgumentError, PeerLostError
from ringfort.telemetry.group_trace import describe_group, follow_metrics
from ringfort.telemetry.metrics import MOST_RECENT, DistributedMetrics, MetricsSnapshot
from ringfort.telemetry.step_time import Phase
from ringfort.telemetry.trace import own_trace
from ringfort.transport.forks import keep_from_children
from ringfort.transport.locks import Thread

if TYPE_CHECKING:
    from typing_extensions import Self


_SUM = ReduceOp.SUM
"""To look it up in its class takes as long as two looks at the clock."""
_COPIED: Final = MIB
"""Bytes up to which it is quickest to copy an array to `out=` and to reduce it there."""


def _are_alike(x: Any, out: Any) -> bool:
    return x.dtype == out.dtype and x.shape == out.shape and out.flags.writeable


class DistributedContext:
    """One rank's handle on its group.

    All ranks of the group must call every collective, in the same order. Each collective takes `timeout` (seconds for
    the whole call; default: `config.timeout`) and `async_op`, which returns a `Work` at once. The operations of a group
    run in the order in which they were issued. Invalid arguments raise `InvalidArgumentError` at the call, before any
    byte is sent. Every call may also raise `PeerLostError`, `OperationTimeoutError`, `AbortedError`,
    `ChannelClosedError` and `CollectiveMismatchError`.

    Examples:
        >>> with ringfort.init() as ctx:
        ...     work = ctx.all_reduce(np.full(3, ctx.rank + 1.0), async_op=True)
        ...     ctx.world_size, work.wait(timeout=10)
        (1, array([1., 1., 1.]))
    """

    def __init__(self, backend: Backend, *, metrics: DistributedMetrics | None = None) -> None:
        """Make a context for `backend`. Several contexts may share the same `metrics`; by default each has its own."""
        self.backend = backend
        """What carries the messages of the group."""
        self.metrics = metrics or DistributedMetrics()
        """The counters of this context; `metrics.reset()` sets them to zero."""
        if metrics is None:
            follow_metrics(own_trace(), self.metrics)
        self.compressors: dict[CompressionStrategy, GradientCompressor] = {}
        """The compressors of `average_gradients` by strategy, with their error feedback. That belongs to the tensors,
        not to the ranks, so it stays when one group follows another."""
        self.stages: dict[Any, Any] = {}
        """The staging buffers of tensors on a GPU, by device: see `ringfort.torch.cuda`."""
        self._traffic = Traffic()
        self._runner = Runner(f"ringfort-rank-{backend.rank}")
        self._group: Group | None = None
        self._is_main = False
        """Whether those who watch this process are told of this group."""
        self._lost: set[object] = set()
        """Ranks of the current group of which they were told that those are lost."""
        self._fast_plans: dict[object, Plan] = {}
        keep_from_children(self)

    def abandon(self) -> None:
        """Replace the metrics in a forked child: a thread of the parent may hold their lock. For
        `transport/forks.py`."""
        self.metrics = DistributedMetrics()

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return self.backend.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return self.backend.world_size

    @property
    def group(self) -> Group:
        """The current group of this context. If groups follow each other, as epochs do, the context continues with the
        next group and keeps its metrics and its queue."""
        group = self.backend.group
        if group is not self._group:
            group.describe_calls(describe)
            self._group, self._fast_plans = group, group.fast_plans  # which are cleared when the group ends
            self._lost.clear()
            if self._is_main:
                describe_group(own_trace(), self.backend)
        return group

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0."""
        return self.backend.rank == 0

    @property
    def config(self) -> DistributedConfig:
        """The settings that the backend was made with."""
        return self.backend.config

    # --- collectives ----------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        x: Any,
        op: Op = ReduceOp.SUM,
        *,
        out: Any = None,
        strategy: AllReduceStrategy | None = None,
        compression: Compression | None = None,
        name: str | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce the `x` of all ranks, in place: afterwards, every rank's `x` is the reduction. Return `x`. With `out`,
        an array like `x`, that becomes the reduction and is returned, and `x` is kept.

        With `compression`, a strategy or its name such as `"int8"` or `"auto"`, this approximates the sum or mean with
        lossy compression. A `GradientCompressor` adds what was lost to the next `x` of the same `name` (error
        feedback). With compression, every rank raises `NonFiniteError` if a rank has infinite or NaN elements.
        """
        if compression is not None:
            if strategy is not None:
                why = "cannot be combined with compression; pass one of the two"
                raise InvalidArgumentError("strategy", strategy, why)
            if out is not None:
                raise InvalidArgumentError(
                    "out", type(out).__name__, "cannot be combined with compression; copy x first"
                )
            pieces = None if name is None else [(name, tuple(np.shape(x)))]
            return self.all_reduce_compressed(x, op, compression, pieces, timeout=timeout, async_op=async_op)
        if out is not None:
            if not (type(x) is type(out) is np.ndarray and x.nbytes <= _COPIED and _are_alike(x, out)):
                return self.issue(all_reduce(self.group, x, op, out=out, strategy=strategy, timeout=timeout), async_op)
            np.copyto(out, x)
            x = out
        if (
            type(x) is np.ndarray
            and (strategy is None or strategy is AllReduceStrategy.AUTO)
            and timeout is None
            and not async_op
        ):
            # Like one before it. All in one place: of the 2 us that a tiny one takes, a call more would be a fiftieth.
            key = (x.dtype, x.size) if op is _SUM else (x.dtype, x.size, id(op))  # as collectives/all_reduce.py
            plan, runner = self._fast_plans.get(key), self._runner
            if plan is not None and x.flags.carray and not runner.queue:
                try:
                    with runner.turn:  # which is free, but for what was issued before; not by hand, because of Ctrl-C
                        start = perf_counter()
                        plan.run(x if x.ndim == 1 else x.reshape(-1))
                        seconds = perf_counter() - start
                except BaseException as exc:
                    self._count_failure("all_reduce", exc)
                    raise
                if plan.metrics is not self.metrics:
                    self._count_first(plan, seconds, x.nbytes)
                    return x
                durations = plan.durations
                durations.append(seconds)
                if len(durations) >= MOST_RECENT:
                    self.metrics.count_recent()
                return x
        return self.issue(all_reduce(self.group, x, op, strategy=strategy, timeout=timeout), async_op)

    def all_reduce_compressed(
        self,
        x: Any,
        op: Op,
        compression: Compression,
        tensors: Sequence[tuple[str, tuple[int, ...]]] | None = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Do `all_reduce(x, compression=...)` of several tensors, of these names and shapes, one after the other in
        `x`."""
        operation = compressed.all_reduce(
            self.group, x, op, compression=compression, tensors=tensors, timeout=timeout, metrics=self.metrics
        )
        return self.issue(operation, async_op)

    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: Op = ReduceOp.SUM,
        *,
        strategy: ReduceStrategy | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce the `x` of all ranks into the root's `x`, in place; the others keep theirs. Return `x`."""
        return self.issue(reduce(self.group, x, root, op, strategy=strategy, timeout=timeout), async_op)

    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        strategy: BroadcastStrategy | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Copy the root's `x` to every rank's `x`, in place. Return `x`."""
        return self.issue(broadcast(self.group, x, root, strategy=strategy, timeout=timeout), async_op)

    def all_gather(self, x: Any, *, out: Any = None, timeout: float | None = None, async_op: bool = False) -> Any:
        """Gather every rank's `x` at every rank: a new array of shape `(world_size, *x.shape)`, or `out`, which is such
        an array or a list of one array per rank."""
        return self.issue(all_gather(self.group, x, out=out, timeout=timeout), async_op)

    def gather(
        self, x: Any, root: int = 0, *, out: Any = None, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Gather every rank's `x` at the root as `all_gather` does; return `None` elsewhere. Only the root may pass
        `out`."""
        return self.issue(gather(self.group, x, root, out=out, timeout=timeout), async_op)

    def scatter(
        self, x: Any = None, root: int = 0, *, out: Any = None, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Give each rank its part of the root's `x`.

        The root passes an array with one part per rank along its first axis, or a list of arrays; the others pass
        `None`. Returns this rank's part: in `out`, which then all ranks must pass; else a new array, at the root of the
        same kind as `x`, elsewhere a NumPy array."""
        return self.issue(scatter(self.group, x, root, out=out, timeout=timeout), async_op)

    def reduce_scatter(
        self, x: Any, op: Op = ReduceOp.SUM, *, out: Any = None, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Reduce this rank's part of all ranks' `x`, which has one part per rank along its first axis or is a list of
        arrays. Returns `out`, or a new array; `x` is kept."""
        return self.issue(reduce_scatter(self.group, x, op, out=out, timeout=timeout), async_op)

    def reduce_scatter_compressed(
        self,
        x: Any,
        into: Any,
        op: Op,
        compression: Compression,
        *,
        name: str,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Approximate the sum or mean of this rank's parts of all `x` in `into`, with lossy compression. Return `into`.

        `x` has one part per rank. The strategy must quantize; `name` is the tensor's name, for error feedback."""
        operation = compressed.reduce_scatter(
            self.group, x, into, op, compression=compression, name=name, timeout=timeout, metrics=self.metrics
        )
        return self.issue(operation, async_op)

    def all_to_all(self, x: Any, *, out: Any = None, timeout: float | None = None, async_op: bool = False) -> Any:
        """Exchange parts: part i of rank j's `x` becomes part j of rank i's result, which is `out` or new. With a list
        of arrays, parts may have any shapes and a list is returned."""
        return self.issue(all_to_all(self.group, x, out=out, timeout=timeout), async_op)

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Return when every rank has called it."""
        group = self.group
        group.check_timeout(timeout)
        return self.issue(Operation("barrier", 0, lambda: group.barrier(timeout)), async_op)

    def broadcast_object(
        self, obj: Any = None, root: int = 0, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Return the root's object at every rank. It may contain JSON-like values, bytes and arrays; tuples become
        lists."""
        return self.issue(objects.broadcast_object(self.group, obj, root, timeout=timeout), async_op)

    def all_gather_object(self, obj: Any, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Return a list with every rank's object."""
        return self.issue(objects.all_gather_object(self.group, obj, timeout=timeout), async_op)

    # --- between two ranks ----------------------------------------------------------------------------------------

    def send(
        self, x: Any, dst: int, *, tag: int = 0, timeout: float | None = None, async_op: bool = False
    ) -> Work | None:
        """Send an array to `dst`, which must `recv` one of the same size."""
        view, group = as_view(x, "x"), self.group
        group.check_peer(dst, "dst")
        envelope = group.tagged(tag, timeout)
        return self._between(Operation("send", view.nbytes, lambda: group.send(view.flat, dst, envelope)), async_op)

    def recv(self, into: Any, src: int, *, tag: int = 0, timeout: float | None = None, async_op: bool = False) -> Any:
        """Receive an array from `src` into `into`, and return `into`."""
        view, group = as_view(into, "into", writable=True), self.group
        group.check_peer(src, "src")
        envelope = group.tagged(tag, timeout)

        def run() -> Any:
            group.recv(view.flat, src, envelope)
            return view.finish()

        return self._between(Operation("recv", view.nbytes, run), async_op)

    def sendrecv(
        self,
        out: Any,
        dst: int,
        into: Any,
        src: int,
        *,
        tag: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send `out` to `dst` while receiving `into` from `src`, which may be the same rank. Return `into`."""
        sent, received = as_view(out, "out"), as_view(into, "into", writable=True)
        group = self.group
        group.check_peer(dst, "dst")
        group.check_peer(src, "src")
        envelope = group.tagged(tag, timeout)

        def run() -> Any:
            group.exchange(sent.flat, dst, received.flat, src, envelope)
            return received.finish()

        return self._between(Operation("sendrecv", sent.nbytes + received.nbytes, run), async_op)

    # --- groups and life ------------------------------------------------------------------------------------------

    def sub_group(self, members: Iterable[int]) -> DistributedContext | None:
        """Return a context for some ranks of this group, or `None` if this rank is not one of them.

        Every rank should call it with the same members. The new group can be used at the same time as this one."""
        self.group.check()
        chosen = list(members)
        if self.rank not in chosen:
            for member in chosen:
                self.group.check_rank(member, "members")
            return None
        return DistributedContext(SubBackend(self.backend, chosen))

    def over(self, backend: Backend) -> DistributedContext:
        """Return a context of the same group over another backend. It shares the metrics of this context."""
        return DistributedContext(backend, metrics=self.metrics)

    def show(self, **about: Any) -> Self:
        """Tell those who watch this process that this is its main group. `about` are fields of the trace's header."""
        self._is_main = True
        trace = own_trace()
        describe_group(trace, self.backend, **{"run": run_name(), **about})
        trace.codecs_from(codec_seconds)
        return self

    def let_go(self) -> None:
        """Let the threads end when they have done what is queued: nothing more will be issued. Waits for nothing."""
        self._runner.let_go()

    def metrics_snapshot(self) -> MetricsSnapshot:
        """Return what this context has done since it was made or since `reset_metrics`: count, failures, bytes and
        duration per operation, and the traffic of the process. Contexts that share `metrics` share the counts."""
        now, before = self.backend.traffic()._asdict(), self._traffic._asdict()
        # Groups that follow each other start from nothing.
        since = {name: count - before[name] if count >= before[name] else count for name, count in now.items()}
        return replace(self.metrics.snapshot(), **since)

    def reset_metrics(self) -> None:
        """Set `metrics`, which other contexts may share, and the traffic to zero."""
        self._traffic = self.backend.traffic()
        self.metrics.reset()

    def abort(self, reason: str = "abort() was called") -> None:
        """Wake every call of this process with `AbortedError`, and tell the peers. The group cannot be used again."""
        self.backend.abort(reason)

    def close(self) -> None:
        """Leave the group. Calls in progress end with `ChannelClosedError`. May be called twice."""
        self.backend.close()
        # A sub-group's links stay open, so its operations in progress continue to their end.
        self._runner.close(wait=self._group is None or self._group.comm_id == 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<DistributedContext rank {self.rank} of {self.world_size} on {type(self.backend).__name__}>"

    def issue(self, operation: Operation, async_op: bool) -> Any:
        """Run an operation that was prepared for this group's backend, after all that were issued before. Return its
        result, or with `async_op` its `Work`."""
        if async_op:
            return self._runner.submit(operation.name, lambda: self._measure(operation))
        return self._runner.run(operation.name, lambda: self._measure(operation))

    def _count_first(self, plan: Plan, seconds: float, nbytes: int) -> None:
        """Count the first all-reduce of a kind. The next are counted together, unless there are too many kinds."""
        self.metrics.record_operation("all_reduce", seconds, nbytes)
        own_trace().time.add(Phase.EXCHANGE, seconds)
        durations = self.metrics.recent("all_reduce", nbytes)
        if durations is not None:
            plan.durations, plan.metrics = durations, self.metrics

    def _count_failure(self, name: str, exc: BaseException) -> None:
        self.metrics.record_operation(name, 0.0, 0, failed=True)
        if self._is_main and isinstance(exc, PeerLostError) and exc.peer not in self._lost:
            self._lost.add(exc.peer)
            own_trace().event("lost", str(exc))

    def _between(self, operation: Operation, async_op: bool) -> Any:
        """Run a message between two ranks. It does not queue behind collectives, because the other side may wait for it
        first; for the same reason, a message in the background has its own thread."""
        if not async_op:
            with own_trace().blocked():
                return self._measure(operation)
        work = Work(operation.name)
        Thread(work.run, (lambda: self._measure(operation),), name=f"ringfort-{operation.name}").start()
        return work

    def _measure(self, operation: Operation) -> Any:
        start = perf_counter()
        try:
            result = operation.run()
        except BaseException as exc:
            self._count_failure(operation.name, exc)
            raise
        self.metrics.record_operation(operation.name, perf_counter() - start, operation.nbytes)
        return result
