"""CUDA tensors through a process group of ours: what torch's methods do for tensors that are on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from ringfort.collectives.ops import Op
from ringfort.collectives.work import Work
from ringfort.config import Environment
from ringfort.context import DistributedContext
from ringfort.errors import InvalidArgumentError
from ringfort.torch.arguments import list_of_root, only, only_list, op_of, options_of, pairs_of, root_of
from ringfort.torch.staged_point_to_point import StagedMessages
from ringfort.torch.staging import Stage, Transfer
from ringfort.torch.streams import CudaDevice
from ringfort.torch.tensors import pieces, to_seconds
from ringfort.torch.transfers import Transfers
from ringfort.torch.untraced import untraced
from ringfort.torch.work import RingfortWork, Several


@untraced
class CudaWork(RingfortWork):
    """A call whose result is there after an event of the device."""

    def __init__(
        self,
        device: Any,
        tensors: Sequence[Any],
        work: Work,
        ended: Callable[[], Any],
        source: int | None = None,
        *,
        held_by: Stage | None = None,
    ) -> None:
        """`ended` gives the event after which nothing touches the tensors any more: None while the work is under way,
        unless the stream waits for it, `held_by` a stage. `source` is who sent it."""
        super().__init__(tensors, work, source)
        self._device, self._ended, self._held_by = device, ended, held_by

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the network has done its part, as with Gloo; raises what it raised. Then the current stream
        waits for the rest. If streams wait for the network the host does not, unless it is told for how long."""
        try:
            if self._held_by is None or to_seconds(timeout, 0.0):
                return super().wait(timeout)
            self._held_by.check()
            return True
        finally:
            ended = self._ended()
            if ended is not None:
                self._device.current().wait_event(ended)

    def is_completed(self) -> bool:
        """Whether the result is there, or an error."""
        return super().is_completed() and (self.exception() is not None or self._ended().query())

    def block_current_stream(self) -> None:
        """`wait`, by the name of what it does."""
        self.wait()

    def get_future(self) -> Any:
        """One that knows about streams: who waits for it makes the current one wait. If streams wait for the network it
        is done at once, as NCCL's is, and knows of no error."""
        if self._future is None and self._held_by is not None:
            self._held_by.check()
            self._future = self._new_future()
            self._device.complete(self._future, list(self._tensors), self._held_by.up)
        return super().get_future()

    def _new_future(self) -> Any:
        return self._device.future()


def begin(stage: Stage, transfer: Transfer, seconds: float) -> CudaWork:
    """Begins `transfer`; raises what is wrong with it."""
    work, call = stage.issue(transfer, seconds)
    return CudaWork(stage.device, transfer.result, work, lambda: call.ended, held_by=stage if stage.is_held else None)


def new_stage(context: DistributedContext, device: Any, *, is_whole: bool = False) -> Stage:
    """A stage as the environment wants it."""
    is_held = Environment.from_mapping().cuda_wait == "stream"
    return Stage(context, device, is_held=is_held, is_whole=is_whole)


class CudaEngine:
    """The methods of a process group for tensors on GPUs. `group` is the process group itself; with `is_whole` other
    ranks of it may have the same tensors in the host's memory."""

    def __init__(self, group: Any, *, is_whole: bool = False, make: Callable[[Any], Any] = CudaDevice) -> None:
        """`make` gives what a device can do."""
        self._group, self._is_whole, self._make = group, is_whole, make
        self._stages: dict[Any, Stage] = {}
        self._mails: dict[Any, StagedMessages] = {}
        self._transfers = Transfers(group.context)

    # --- collectives ----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> RingfortWork:
        """In place."""
        return self.allreduce_coalesced(tensors, options_of(opts, timeout), op_of(opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None, op: Op | None = None) -> RingfortWork:
        """The same for several."""
        op = op_of(opts) if op is None else op
        return self._issue(opts, [self._transfers.all_reduce(tensor, op) for tensor in tensors])

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> RingfortWork:
        """In place at the root."""
        kind = op_of(opts if op is None else op)
        transfer = self._transfers.reduce(only(tensors, "tensors"), root_of(opts), kind)
        return self._issue(options_of(opts, timeout), [transfer])

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> RingfortWork:
        """In place."""
        transfer = self._transfers.broadcast(only(tensors, "tensors"), root_of(opts))
        return self._issue(options_of(opts, timeout), [transfer])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """The list of outputs becomes every rank's input."""
        return self._issue(opts, [self._transfers.all_gather(only_list(outputs), only(inputs, "input"))])

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """`allgather` for several inputs; `outputs[r]` is the list for those of rank r."""
        pairs = pairs_of(list(zip(*outputs, strict=True)), inputs)
        return self._issue(opts, [self._transfers.all_gather(*pair) for pair in pairs])

    def all_gather_single(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """One output with every rank's input, one after the other."""
        return self.all_gather_single_coalesced([outputs], [inputs], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """The same for several."""
        n = self._group.context.world_size
        made = [
            _of(self._transfers.all_gather(pieces(output, (), n, "output"), source), [output])
            for output, source in pairs_of(outputs, inputs)
        ]
        return self._issue(opts, made)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> RingfortWork:
        """At the root, the list of outputs becomes every rank's input."""
        root = root_of(opts)
        places = list_of_root(outputs, "outputs", is_root=self._group.context.rank == root)
        return self._issue(options_of(opts, timeout), [self._transfers.gather(places, only(inputs, "input"), root)])

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> RingfortWork:
        """Every rank's output becomes its part of the root's list of inputs."""
        root = root_of(opts)
        sources = list_of_root(inputs, "inputs", is_root=self._group.context.rank == root)
        return self._issue(options_of(opts, timeout), [self._transfers.scatter(only(outputs, "output"), sources, root)])

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """Every rank's output becomes the reduction of its parts of all ranks' lists of inputs."""
        place, sources = only(outputs, "output"), only_list(inputs)
        return self._issue(opts, [self._transfers.reduce_scatter(place, sources, op_of(opts))])

    def reduce_scatter_single(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """The same with all parts in one input, one after the other."""
        return self.reduce_scatter_single_coalesced([outputs], [inputs], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """The same for several."""
        n, op = self._group.context.world_size, op_of(opts)
        made = [
            self._transfers.reduce_scatter(output, pieces(source, (), n, "input"), op)
            for output, source in pairs_of(outputs, inputs)
        ]
        return self._issue(opts, made)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> RingfortWork:
        """Output r becomes rank r's input for this rank."""
        return self._issue(opts, [self._transfers.all_to_all(outputs, inputs)])

    def all_to_all_single(
        self, outputs: Any, inputs: Any, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> RingfortWork:
        """The same with all parts in one tensor, cut along its first axis: evenly, or in so many rows."""
        n = self._group.context.world_size
        parts, into = pieces(inputs, input_sizes, n, "input"), pieces(outputs, output_sizes, n, "output")
        return self._issue(opts, [_of(self._transfers.all_to_all(into, parts), [outputs])])

    # --- between two ranks ----------------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> RingfortWork:
        """Sends one tensor to `dst`."""
        messages, seconds = self._group._messages, self._group._timeout
        tensor = only(tensors, "tensors")
        begun = self._mail(tensor.device).send(
            tensor, lambda copy, landed: messages.send(copy, dst, tag, seconds, before=landed)
        )
        return self._message(tensor, *begun)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> RingfortWork:
        """Receives one tensor from `src`."""
        messages, seconds = self._group._messages, self._group._timeout
        tensor = only(tensors, "tensors")
        begun = self._mail(tensor.device).recv(tensor, lambda into: messages.recv(into, src, tag, seconds))
        return self._message(tensor, *begun, src)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> RingfortWork:
        """Receives one tensor from whoever sends first."""
        messages, seconds = self._group._messages, self._group._timeout
        tensor = only(tensors, "tensors")
        begun = self._mail(tensor.device).recv(tensor, lambda into: messages.recv_any(into, tag, seconds))
        return self._message(tensor, *begun)

    def _message(self, tensor: Any, work: Work, ended: Callable[[], Any], src: int | None = None) -> RingfortWork:
        return self._group._keep(CudaWork(self._stage(tensor.device).device, [tensor], work, ended, src))

    # --- how things run -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises what a collective has failed with for which the stream waits, so that nobody was told."""
        for stage in self._stages.values():
            stage.check()

    def shutdown(self) -> None:
        """Lets go of the pinned memory, and warns of what failed and nobody was told."""
        stages = list(self._stages.values())
        self._stages.clear()
        self._mails.clear()
        for stage in stages:
            stage.close()

    def _issue(self, opts: Any, transfers: Sequence[Transfer]) -> RingfortWork:
        """Begins the transfers of one call; waits where torch does not do so itself."""
        if not transfers:
            raise InvalidArgumentError("tensors", "empty list", "must have at least one")
        self._group._sequence += 1
        seconds = to_seconds(getattr(opts, "timeout", None), self._group._timeout)
        stages = [self._stage(transfer.example.device) for transfer in transfers]
        is_async = self._group._coalesced is not None or getattr(opts, "asyncOp", True)
        if not is_async and not stages[0].is_held:
            for stage, transfer in zip(stages, transfers, strict=True):
                stage.run(transfer, seconds)
            return RingfortWork([tensor for transfer in transfers for tensor in transfer.result])
        works = [begin(stage, transfer, seconds) for stage, transfer in zip(stages, transfers, strict=True)]
        work = works[0] if len(works) == 1 else Several(works)
        if not is_async:
            work.wait()
        return self._group._keep(work)

    def _stage(self, device: Any) -> Stage:
        if device not in self._stages:
            self._stages[device] = new_stage(self._group.context, self._make(device), is_whole=self._is_whole)
        return self._stages[device]

    def _mail(self, device: Any) -> StagedMessages:
        if device not in self._mails:
            self._mails[device] = StagedMessages(self._stage(device).device)
        return self._mails[device]


def _of(transfer: Transfer, result: Sequence[Any]) -> Transfer:
    transfer.result = result
    return transfer
