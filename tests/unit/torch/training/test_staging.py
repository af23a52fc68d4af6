"""Sums on a device other than the host, with a stand-in: the host itself, taken for a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ringfort.backends.simulated import SimulatedBackend  # noqa: E402
from ringfort.context import DistributedContext  # noqa: E402
from ringfort.torch.training.reduction import Reduction  # noqa: E402
from ringfort.torch.training.staging import DeviceStaging, HostStaging  # noqa: E402
from ringfort.training.elastic.local_sum import Gradient, Layout  # noqa: E402

LEAVES = (Gradient("used", "float32", (2,)), Gradient("a", "float32", (1000,)), Gradient("b", "float64", (10,)))
LAYOUT = Layout(LEAVES, {one.path: None for one in LEAVES}, 400)


def stagings() -> list[Any]:
    return [HostStaging(LAYOUT.sizes), DeviceStaging(torch.device("cpu"), LAYOUT.sizes)]


@pytest.mark.parametrize("staging", stagings(), ids=["host", "device"])
def test_sums_survive_their_reduction_and_the_result_is_loaded_times_a_factor(staging: Any) -> None:
    (backend,) = SimulatedBackend.create_group(1)
    with DistributedContext(backend) as context:
        for kind, flat in staging.flats.items():
            flat.copy_(torch.arange(flat.numel(), dtype=getattr(torch, kind)))
        reduction = Reduction(context, LAYOUT.buckets(), staging)

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
        reduction = Reduction(context, LAYOUT.buckets(), HostStaging(LAYOUT.sizes))
        assert reduction.is_free(1)
        reduction.arrived(1)
        assert not reduction.is_free(1)
        assert reduction.is_free(2)
        reduction.finish(lambda bucket: None)
