"""Sums on a device other than the host, with a stand-in: the host itself, taken for a device."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ringfort.backends.simulated import SimulatedBackend  # noqa: E402
from ringfort.context import DistributedContext  # noqa: E402
from ringfort.torch.training.inspector import Inspector  # noqa: E402
from ringfort.torch.training.reduction import Reduction  # noqa: E402
from ringfort.torch.training.staging import DeviceStaging, HostStaging  # noqa: E402
from ringfort.training.elastic.local_sum import Gradient, Layout  # noqa: E402
from tests.torch.pretend import PretendDevice, Stream  # noqa: E402

LEAVES = (Gradient("used", "float32", (2,)), Gradient("a", "float32", (1000,)), Gradient("b", "float64", (10,)))
LAYOUT = Layout(LEAVES, {one.path: None for one in LEAVES}, 400)


class Device(PretendDevice):
    """One whose copies to it can be held up."""

    def __init__(self) -> None:
        super().__init__()
        self.may_copy = threading.Event()
        self.may_copy.set()

    def copy(self, stream: Stream, into: Any, source: Any) -> None:
        stream.put(lambda: self.may_copy.wait(20))
        super().copy(stream, into, source)


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.may_copy.set()
    made.close()


def reduce(context: DistributedContext, staging: DeviceStaging) -> dict[str, Any]:
    """Reduce the sums 0, 1, 2, ..."""
    for kind, flat in staging.flats.items():
        flat.copy_(torch.arange(flat.numel(), dtype=getattr(torch, kind)))
    return Reduction(context, LAYOUT.buckets(), staging, Inspector()).finish(lambda bucket: None)


def wait_for_copies(staging: DeviceStaging) -> None:
    """Wait until the thread of the group has asked for the last copy."""
    deadline = time.monotonic() + 20
    while staging._missing and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not staging._missing


def test_results_are_on_the_device_when_the_step_is_sealed_and_the_sums_are_still_there(device: Device) -> None:
    (backend,) = SimulatedBackend.create_group(1)
    staging = DeviceStaging(torch.device("cpu"), LAYOUT.sizes, device, has_results=True)
    with DistributedContext(backend) as context:
        total = reduce(context, staging)
        wait_for_copies(staging)
        device.synchronize()
        assert staging.own()["float32"][-1] == 1001
        loaded = staging.load(total, 1, {"float32": 1, "float64": 0}, 1)
        assert loaded is staging.results
        device.synchronize()
        for kind, flat in loaded.items():
            assert flat.tolist() == total[kind].tolist()


def test_a_result_that_came_another_way_is_copied_as_a_whole(device: Device) -> None:
    (backend,) = SimulatedBackend.create_group(1)
    staging = DeviceStaging(torch.device("cpu"), LAYOUT.sizes, device, has_results=True)
    with DistributedContext(backend) as context:
        other = {kind: array + 1 for kind, array in reduce(context, staging).items()}
        loaded = staging.load(other, 0.5, {"float32": 1, "float64": 0}, 1)
    assert loaded is staging.flats
    assert loaded["float32"][:3].tolist() == [1, 1, 1.5]


def test_what_comes_late_of_a_failed_reduction_does_not_get_into_the_next(device: Device) -> None:
    (backend,) = SimulatedBackend.create_group(1)
    staging = DeviceStaging(torch.device("cpu"), LAYOUT.sizes, device, has_results=True)
    stale = {kind: np.full(size, 7, kind) for kind, size in LAYOUT.sizes.items()}
    staging.begin(stale)
    with DistributedContext(backend) as context:
        total = reduce(context, staging)
        wait_for_copies(staging)
        for bucket in LAYOUT.buckets():
            staging.returned(bucket, stale)
        loaded = staging.load(total, 1, {"float32": 1, "float64": 0}, 1)
        device.synchronize()
    assert loaded["float64"].tolist() == list(range(10))


def test_who_closes_waits_for_copies(device: Device) -> None:
    """Afterwards the memory may be somebody else's."""
    (backend,) = SimulatedBackend.create_group(1)
    staging = DeviceStaging(torch.device("cpu"), LAYOUT.sizes, device, has_results=True)
    with DistributedContext(backend) as context:
        total = reduce(context, staging)
        wait_for_copies(staging)
        device.may_copy.clear()
        staging.begin(total)
        staging.returned(LAYOUT.buckets()[0], total)
        closing = threading.Thread(target=staging.close)
        closing.start()
        closing.join(0.1)
        assert closing.is_alive()
        device.may_copy.set()
        closing.join(20)
        assert not closing.is_alive()


def stagings() -> list[Any]:
    return [HostStaging(LAYOUT.sizes), DeviceStaging(torch.device("cpu"), LAYOUT.sizes)]


@pytest.mark.parametrize("staging", stagings(), ids=["host", "device"])
def test_sums_survive_their_reduction_and_the_result_is_loaded_times_a_factor(staging: Any) -> None:
    (backend,) = SimulatedBackend.create_group(1)
    with DistributedContext(backend) as context:
        for kind, flat in staging.flats.items():
            flat.copy_(torch.arange(flat.numel(), dtype=getattr(torch, kind)))
        reduction = Reduction(context, LAYOUT.buckets(), staging, Inspector())

        def complete(bucket: Any) -> None:
            bucket[:2] = 7

        total = reduction.finish(complete)
    assert total["float32"][:4].tolist() == [7, 7, 2, 3]
    assert total["float32"][-1] == 1001
    assert total["float64"].tolist() == list(range(10))
    assert staging.own()["float32"][-1] == 1001  # what a failed reduction would be repeated with
    staging.load(total, 0.5, {"float32": 1, "float64": 0}, 3.0)
    assert staging.flats["float32"][:3].tolist() == [21, 3.5, 1]
    assert staging.flats["float32"][-1].item() == 500.5
    assert np.array_equal(total["float64"], np.arange(10))


def test_a_gradient_that_comes_after_its_bucket_was_sent_is_found() -> None:
    (backend,) = SimulatedBackend.create_group(1)
    with DistributedContext(backend) as context:
        reduction = Reduction(context, LAYOUT.buckets(), HostStaging(LAYOUT.sizes), Inspector())
        assert reduction.is_free(1)
        reduction.arrived(1)
        assert not reduction.is_free(1)
        assert reduction.is_free(2)
        reduction.finish(lambda bucket: None)
