"""`HostCopies`: collectives and messages on tensors of devices without CUDA's streams and pinned memory, such as `mps`.
They go through plain copies in host memory.

Only the caller's threads touch the device: to copy down when a call is issued, and to copy up when it is waited for.
Apple's `mps` ends the process if two threads use it at once (pytorch/pytorch#197805), and the streams of other devices
belong to threads. So the network alone runs in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Any

from ringfort.errors import UnsupportedArrayError
from ringfort.torch.hooks import untraced
from ringfort.torch.names import torch
from ringfort.torch.operations import Call
from ringfort.torch.tensors import to_moved
from ringfort.torch.work import RingfortWork

Pair = tuple[Any, Any]
"""A tensor on the device, and the one in host memory that stands for it."""


@untraced
class CopiedWork(RingfortWork):
    """A call on copies in host memory, whose results are copied up by whoever waits for it."""

    def __init__(self, copy_up: Callable[[], object], *arguments: Any, **more: Any) -> None:
        """The other arguments are those of `RingfortWork`. A call that is done is copied up at once."""
        super().__init__(*arguments, **more)
        self._lock = Lock()
        self._copy_up: Callable[[], object] | None = copy_up
        if self._work is None:
            self._finish()

    @property
    def is_copied(self) -> bool:
        """Whether the results are on the device."""
        return self._copy_up is None

    def _finish(self) -> None:
        with self._lock:
            copy_up, self._copy_up = self._copy_up, None
            if copy_up is not None:
                copy_up()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the call has ended, raise what it raised, and copy its results up."""
        super().wait(timeout)
        self._finish()
        return True

    def is_completed(self) -> bool:
        """Return whether the call has ended; then its results are on the device."""
        if not super().is_completed():
            return False
        if self.exception() is None:
            self._finish()
        return True

    def get_future(self) -> Any:
        """Wait for the call, and return a future that is complete. One that completes later would have to copy up in
        another thread."""
        with suppress(Exception):  # the future has it
            self.wait()
        return super().get_future()


class HostCopies:
    """Serves the tensors of one group that are on such a device."""

    def __init__(self, device: Any) -> None:
        """Raise `UnsupportedArrayError` if torch cannot copy from the device, such as from `meta`."""
        try:
            torch.empty(1, device=device).cpu()
        except (RuntimeError, NotImplementedError) as exc:
            why = f"torch cannot copy it to the host ({str(exc).splitlines()[0]}); move it to the CPU"
            raise UnsupportedArrayError("tensor", f"tensor on {device}", why) from exc
        self._unfinished: dict[int, CopiedWork] = {}
        """By the memory on the device that a call under way will write to."""

    def moved(self, calls: Sequence[Call]) -> tuple[list[Call], Callable[..., CopiedWork]]:
        """Return the calls with copies in host memory, and what makes torch's work of the one that runs them."""
        on_host: list[Call] = []
        finals: list[Pair] = []
        for one in {id(one): one for call in calls for one in (*call.inputs, *call.outputs)}.values():
            self._wait_for(one)
        for call in calls:
            if call.before is not None:
                call.before()
            copies = {id(one): _copied_down(one) for one in call.inputs}
            copies |= {id(one): _room_for(one) for one in call.outputs if id(one) not in copies}
            inputs = [copies[id(one)] for one in call.inputs]
            # The same list says that the collective is in place.
            outputs = inputs if call.outputs is call.inputs else [copies[id(one)] for one in call.outputs]
            on_host.append(call._replace(inputs=inputs, outputs=outputs, result=None, before=None, copies=()))
            finals += [(into.detach(), source) for into, source in zip(call.outputs, outputs, strict=True)]
            finals += [(into.detach(), source) for into, source in call.copies]
        return on_host, partial(self._new_work, finals)

    def _wait_for(self, tensor: Any) -> None:
        """Let an earlier call write its result to `tensor` before another one uses it."""
        work = self._unfinished.pop(_memory_of(tensor), None)
        if work is not None:
            work.wait()

    def _new_work(self, finals: Sequence[Pair], *arguments: Any, **more: Any) -> CopiedWork:
        work = CopiedWork(partial(self._copy_up, finals), *arguments, **more)
        if not work.is_copied:
            self._unfinished.update((_memory_of(into), work) for into, _ in finals)
        return work

    def _copy_up(self, finals: Sequence[Pair]) -> None:
        with torch.inference_mode():  # inference tensors may not be written to outside of it
            for into, source in finals:
                self._unfinished.pop(_memory_of(into), None)
                into.copy_(source)

    def outgoing(self, tensor: Any) -> tuple[Any, None, Callable[..., RingfortWork]]:
        """Return a copy of `tensor` to send, nothing to wait for, and what makes torch's work of the one that sends."""
        self._wait_for(tensor)
        return to_moved(_copied_down(tensor)), None, partial(RingfortWork, [tensor])

    def incoming(self, tensor: Any) -> tuple[Any, Callable[..., RingfortWork]]:
        """Return memory to receive in, and what makes torch's work of the one that receives."""
        self._wait_for(tensor)
        room = _room_for(tensor)
        return to_moved(room), partial(self._new_work, [(tensor.detach(), room)], [tensor])

    def shutdown(self) -> None:
        """Forget the calls that nobody has waited for."""
        self._unfinished.clear()


def _copied_down(tensor: Any) -> Any:
    """Return a copy in host memory. That waits for the kernels that the caller issued before."""
    return tensor.detach().cpu().contiguous()


def _room_for(tensor: Any) -> Any:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _memory_of(tensor: Any) -> int:
    return tensor.untyped_storage()._cdata
