"""Where gradients are added up, and how they come to the host and back: `HostStaging` for models on the CPU,
`DeviceStaging` for those on a GPU or another device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, ClassVar

from ringfort.torch.cuda import CudaDevice
from ringfort.torch.names import torch
from ringfort.training.elastic.local_sum import Bucket
from ringfort.training.elastic.sample_order import Array
from ringfort.training.elastic.spare_memory import SpareMemory

Sizes = Mapping[str, int]


class HostStaging:
    """Sums in the memory of the host. They are reduced out of place, because they must outlive a failed reduction."""

    is_host = True
    results: ClassVar[dict[str, Any]] = {}

    def __init__(self, sizes: Sizes, flats: dict[str, Any] | None = None) -> None:
        """`flats` is memory for the sums, if it exists already."""
        self.sizes = sizes
        self.flats = flats or _zeros(sizes, "cpu")
        """The sums, by element type."""
        self._arrays: dict[str, Array] = {kind: flat.numpy() for kind, flat in self.flats.items()}
        self.memory = SpareMemory()
        """For results."""

    def fetch(self, bucket: Bucket, total: Mapping[str, Array]) -> Callable[[], bool] | None:
        """Begin to bring a bucket to the host. Return how to ask whether it is there; None if it is."""
        return None

    def fetched(self, bucket: Bucket, total: Mapping[str, Array]) -> Array:
        """Wait until a bucket is on the host. Return it."""
        return self._arrays[bucket.kind][bucket.begin : bucket.end]

    def own(self) -> dict[str, Array]:
        """Return the sums, on the host."""
        return self._arrays

    def begin(self, total: Mapping[str, Array]) -> None:
        """Do nothing: the optimizer is on the host."""

    def returned(self, bucket: Bucket, total: Mapping[str, Array]) -> None:
        """Do nothing."""

    def settle(self, *, is_sealed: bool) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def load(
        self, payload: Mapping[str, Array], factor: float, beside: Sizes, beside_factor: float
    ) -> Mapping[str, Any]:
        """Write a result times `factor` into the sums; of each type the first `beside` elements, which are no
        gradients, times `beside_factor`. Return the memory that has it now."""
        for kind, flat in self.flats.items():  # by torch, which has threads
            result, end = torch.from_numpy(payload[kind]), beside[kind]
            torch.mul(result[:end], beside_factor, out=flat[:end])
            torch.mul(result[end:], factor, out=flat[end:])
        return self.flats


class DeviceStaging:
    """Sums in the memory of a device. They are copied into the memory of the result, and reduced there in place.

    With memory for results on a GPU, that gets each bucket as soon as it is reduced: when the step is sealed, little is
    left to copy. The sums stay what they are until then.
    """

    is_host = False

    def __init__(self, device: Any, sizes: Sizes, gpu: CudaDevice | None = None, *, has_results: bool = False) -> None:
        """`gpu` copies in streams beside the program's; None for a device that cannot. With `has_results`, there is
        memory for results beside that for the sums."""
        self.sizes = sizes
        self._gpu = gpu
        self._down: Any = None if gpu is None else gpu.stream()
        self._up: Any = None if gpu is None else gpu.stream()
        self.flats = _zeros(sizes, device)
        self.results = _zeros(sizes, device) if has_results and gpu is not None else {}
        self.memory = SpareMemory(self._new)
        self._fetched: dict[Bucket, Any] = {}
        """The events of the buckets that are on the way to the host."""
        self._lock = Lock()
        self._total: Mapping[str, Array] | None = None
        """The result of the last reduction."""
        self._missing = 0
        """Elements of it that are not on the way to the device yet."""

    def _new(self, size: int, kind: str) -> Array:
        # Pinned, so that the GPU copies by itself. The device is given because a program may have set another default.
        is_pinned = self._gpu is not None and torch.cuda.is_available()
        return torch.empty(size, dtype=getattr(torch, kind), device="cpu", pin_memory=is_pinned).numpy()

    def begin(self, total: Mapping[str, Array]) -> None:
        """A reduction begins, whose result will be in `total`. What comes late of the one before is not wanted."""
        with self._lock:
            self._total, self._missing = total, sum(self.sizes.values())

    def fetch(self, bucket: Bucket, total: Mapping[str, Array]) -> Callable[[], bool] | None:
        """Begin to copy a bucket into the memory of the result, in a stream beside the program's."""
        into, sums = torch.from_numpy(_part(total, bucket)), _part(self.flats, bucket)
        if self._gpu is None:
            into.copy_(sums)
            return None
        self._down.wait_event(self._gpu.record(self._gpu.current()))
        self._gpu.copy(self._down, into, sums)
        event = self._fetched[bucket] = self._gpu.record(self._down)
        return event.query

    def fetched(self, bucket: Bucket, total: Mapping[str, Array]) -> Array:
        """Wait until a bucket is on the host. Return it: it is in the memory of the result."""
        event = self._fetched.pop(bucket, None)
        if event is not None:
            event.synchronize()
        return _part(total, bucket)

    def returned(self, bucket: Bucket, total: Mapping[str, Array]) -> None:
        """The result of a bucket is there: begin to copy it to the device. In the thread of the group.

        What was computed with the results before has ended by then: `fetch` has waited for that.
        """
        with self._lock:
            if self.results and self._gpu is not None and self._total is total:
                self._gpu.copy(self._up, _part(self.results, bucket), torch.from_numpy(_part(total, bucket)))
                self._missing -= bucket.end - bucket.begin

    def close(self) -> None:
        """Wait until nothing is copied any more: the memory is somebody else's next."""
        self.begin({})
        if self._gpu is not None:
            for stream in (self._down, self._up):
                self._gpu.record(stream).synchronize()

    def own(self) -> dict[str, Array]:
        """Return the sums, on the host."""
        return {kind: flat.cpu().numpy() for kind, flat in self.flats.items()}

    def load(
        self, payload: Mapping[str, Array], factor: float, beside: Sizes, beside_factor: float
    ) -> Mapping[str, Any]:
        """Do what `HostStaging.load` does, or the same to results that are on the device. The copy ends before the next
        sums of the device are read, so the memory of the result may be used again after that."""
        with self._lock:
            is_there = self._total is payload and not self._missing
            self._total = None
        if is_there and self._gpu is not None:
            self._gpu.current().wait_event(self._gpu.record(self._up))
        loaded = self.results if is_there else self.flats
        for kind, flat in loaded.items():
            if not is_there:
                flat.copy_(torch.from_numpy(payload[kind]), non_blocking=self._gpu is not None)
            if beside_factor != 1:
                flat[: beside[kind]].mul_(beside_factor)
            if factor != 1:
                flat[beside[kind] :].mul_(factor)
        return loaded


def _part(arrays: Mapping[str, Any], bucket: Bucket) -> Any:
    return arrays[bucket.kind][bucket.begin : bucket.end]


def _zeros(sizes: Sizes, device: Any) -> dict[str, Any]:
    return {kind: torch.zeros(size, dtype=getattr(torch, kind), device=device) for kind, size in sizes.items()}
