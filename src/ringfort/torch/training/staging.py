"""Where gradients are added up, and how they come to the host and back: `HostStaging` for models on the CPU,
`DeviceStaging` for those on a GPU or another device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ringfort.torch.names import torch
from ringfort.training.elastic.local_sum import Bucket
from ringfort.training.elastic.sample_order import Array
from ringfort.training.elastic.spare_memory import SpareMemory

Sizes = Mapping[str, int]


class HostStaging:
    """Sums in the memory of the host. They are reduced out of place, because they must outlive a failed reduction."""

    is_host = True

    def __init__(self, sizes: Sizes, flats: dict[str, Any] | None = None) -> None:
        """`flats` is memory for the sums, if it exists already."""
        self.sizes = sizes
        self.flats = flats or {kind: torch.zeros(size, dtype=getattr(torch, kind)) for kind, size in sizes.items()}
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

    def load(self, payload: Mapping[str, Array], factor: float, beside: Sizes, beside_factor: float) -> None:
        """Write a result times `factor` into the sums; of each type the first `beside` elements, which are no
        gradients, times `beside_factor`."""
        for kind, array in self._arrays.items():
            end, kind_of = beside[kind], payload[kind].dtype.type
            np.multiply(payload[kind][:end], kind_of(beside_factor), out=array[:end])
            np.multiply(payload[kind][end:], kind_of(factor), out=array[end:])


class DeviceStaging:
    """Sums in the memory of a device. They are copied into the memory of the result, and reduced there in place."""

    is_host = False

    def __init__(self, device: Any, sizes: Sizes) -> None:
        self.sizes = sizes
        self._is_cuda = device.type == "cuda"
        self._device = device
        self.flats = {
            kind: torch.zeros(size, dtype=getattr(torch, kind), device=device) for kind, size in sizes.items()
        }
        self.memory = SpareMemory(self._new)
        self._stream: Any = torch.cuda.Stream(device) if self._is_cuda else None
        self._events: dict[Bucket, Any] = {}

    def _new(self, size: int, kind: str) -> Array:
        # Pinned, so that the GPU copies by itself. The device is given because a program may have set another default.
        return torch.empty(size, dtype=getattr(torch, kind), device="cpu", pin_memory=self._is_cuda).numpy()

    def fetch(self, bucket: Bucket, total: Mapping[str, Array]) -> Callable[[], bool] | None:
        """Begin to copy a bucket into the memory of the result, in a stream beside the program's."""
        into = torch.from_numpy(total[bucket.kind][bucket.begin : bucket.end])
        sums = self.flats[bucket.kind][bucket.begin : bucket.end]
        if not self._is_cuda:
            into.copy_(sums)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            into.copy_(sums, non_blocking=True)
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
        self._events[bucket] = event
        return event.query

    def fetched(self, bucket: Bucket, total: Mapping[str, Array]) -> Array:
        """Wait until a bucket is on the host. Return it: it is in the memory of the result."""
        event = self._events.pop(bucket, None)
        if event is not None:
            event.synchronize()
        return total[bucket.kind][bucket.begin : bucket.end]

    def own(self) -> dict[str, Array]:
        """Return the sums, on the host."""
        return {kind: flat.cpu().numpy() for kind, flat in self.flats.items()}

    def load(self, payload: Mapping[str, Array], factor: float, beside: Sizes, beside_factor: float) -> None:
        """Do what `HostStaging.load` does. The copy ends before the next sums of the device are read, so the memory of
        the result may be used again after that."""
        for kind, flat in self.flats.items():
            flat.copy_(torch.from_numpy(payload[kind]), non_blocking=self._is_cuda)
            if beside_factor != 1:
                flat[: beside[kind]].mul_(beside_factor)
            if factor != 1:
                flat[beside[kind] :].mul_(factor)
