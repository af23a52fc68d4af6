"""Tensors on a device without CUDA's streams, such as Apple's `mps`: copies in host memory, with real processes. The
device is a stand-in, see `far_device`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torch.zygote import Zygote

PATIENCE = 110.0
"""Seconds for what takes three on an idle machine."""
FAR: dict[str, Any] = {"FAR": "1", "patience": PATIENCE}
ALL_FAR: dict[str, Any] = {"DEVICE": "far", "patience": PATIENCE}


@pytest.mark.parametrize("scenario", ["torch.far_scenarios.collectives", "coalesced", "messages", "works"])
def test_all_calls_do_what_they_do_in_host_memory(zygote: Zygote, scenario: str) -> None:
    zygote.run(scenario, 2, **ALL_FAR)


def test_callbacks_may_issue_collectives(zygote: Zygote) -> None:
    zygote.run("torch.callback_scenarios.nested", 2, **ALL_FAR)


def test_only_the_callers_thread_uses_the_device(zygote: Zygote) -> None:
    for where, collisions, seen in zygote.run("torch.far_scenarios.several_at_once", 3, **FAR):
        assert (where, collisions, seen) == ("MainThread", [], ["MainThread"])


def test_calls_on_the_same_memory_see_each_others_results(zygote: Zygote) -> None:
    zygote.run("torch.far_scenarios.waits_in_any_order", 2, **FAR)


def test_what_fails_fails_at_whoever_waits(zygote: Zygote) -> None:
    (meta, lost), (other,) = zygote.run("torch.far_scenarios.errors", 2, **FAR)
    for words in (meta, other):
        assert "tensor='tensor on meta': torch cannot copy it to the host" in words
    assert "rank 1" in lost


def test_ddp_learns_what_it_learns_in_host_memory(zygote: Zygote) -> None:
    plain = zygote.run("torch.far_scenarios.ddp", 3, ["cpu", "cpu", "cpu"], **FAR)
    found = zygote.run("torch.far_scenarios.ddp", 3, ["far", "far", "cpu"], 0.0002, **FAR)
    for (losses, collisions, seen), (expected, *_) in zip(found, plain, strict=True):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert collisions == []
        assert not any("ringfort" in name for name in seen)  # that of torch's backward is there
    assert found[0][2]


@pytest.mark.parametrize("fragments", [pytest.param(1, marks=pytest.mark.stress), 2])
def test_compressed_gradients_and_local_steps_are_what_they_are_in_host_memory(zygote: Zygote, fragments: int) -> None:
    plain = zygote.run("torch.far_scenarios.compressed", 2, ["cpu", "cpu"], fragments, **FAR)
    found = zygote.run("torch.far_scenarios.compressed", 2, ["far", "cpu"], fragments, **FAR)
    assert found[0][3] == found[1][3], "the ranks' weights differ"
    for (losses, parts, evaluated, _, collisions), (expected, _, weights, _, _) in zip(found, plain, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert parts == pytest.approx([3.0, 1.5], rel=0.01)
        assert evaluated == pytest.approx(weights, rel=1e-4)
        assert collisions == []


@pytest.mark.stress
def test_an_elastic_run_learns_what_it_learns_in_host_memory(zygote: Zygote) -> None:
    ((losses, weights, counted, _),) = zygote.run("torch.far_scenarios.elastic", 1, ["cpu"], **FAR)
    for mine, ended, seen, collisions in zygote.run("torch.far_scenarios.elastic", 2, ["far", "cpu"], **FAR):
        assert mine == pytest.approx(losses, rel=1e-5)
        assert ended == pytest.approx(weights, rel=1e-4)
        assert seen == counted
        assert collisions == []
