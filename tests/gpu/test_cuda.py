"""CUDA tensors through the process group: two ranks on the one GPU, results against the CPU's, streams by races."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.torch.zygote import Zygote

PATIENCE = 40.0
"""Seconds of a scenario: CUDA itself takes some to begin."""
CUDA = {"DEVICE": "cuda"}
shares = pytest.mark.parametrize("shared", ["on", "off"])
waits = pytest.mark.parametrize("wait", ["host", "stream"])
STREAM = {"RINGFORT_CUDA_WAIT": "stream"}


@shares
@waits
def test_every_collective_gives_what_it_must_for_every_element_type(zygote: Zygote, shared: str, wait: str) -> None:
    zygote.run("collectives", 2, patience=PATIENCE, RINGFORT_SHM=shared, RINGFORT_CUDA_WAIT=wait, **CUDA)


@waits
@pytest.mark.parametrize(
    ("scenario", "ranks"), [("old_names", 2), ("coalesced", 3), ("messages", 3), ("sub_groups", 3)]
)
def test_what_works_on_the_cpu_works_here(zygote: Zygote, scenario: str, ranks: int, wait: str) -> None:
    zygote.run(scenario, ranks, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait, **CUDA)


@shares
@waits
@pytest.mark.parametrize(("count", "turns"), [(1000, 60), (6_000_000, 30)])
def test_streams_wait_for_each_other(zygote: Zygote, shared: str, wait: str, count: int, turns: int) -> None:
    settings = {"RINGFORT_SHM": shared, "RINGFORT_CUDA_WAIT": wait}
    zygote.run("gpu.scenarios.racing", 2, count, turns, patience=PATIENCE, **settings)


@waits
def test_memory_that_nobody_holds_is_not_given_to_others_too_early(zygote: Zygote, wait: str) -> None:
    zygote.run("gpu.scenarios.forgotten", 2, 20, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait)


def test_a_call_returns_at_once_and_its_wait_when_the_others_have_come(zygote: Zygote) -> None:
    called, waited = zygote.run("gpu.scenarios.late_peer", 2, patience=PATIENCE)[0]
    assert called < 0.5
    assert waited > 0.7


def test_where_the_stream_waits_the_host_goes_on_before_the_others_have_come(zygote: Zygote) -> None:
    called, waited = zygote.run("gpu.scenarios.late_peer", 2, patience=PATIENCE, **STREAM)[0]
    assert called < 0.3
    assert waited < 0.3


def test_a_driver_that_waits_for_the_device_does_not_keep_a_gate_shut(zygote: Zygote) -> None:
    zygote.run("gpu.scenarios.patient_driver", 2, patience=PATIENCE, **STREAM)


@waits
def test_groups_take_turns_with_the_results_of_each_other(zygote: Zygote, wait: str) -> None:
    zygote.run("gpu.scenarios.two_groups", 2, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait)


@waits
def test_what_hangs_on_a_future_sees_the_result(zygote: Zygote, wait: str) -> None:
    zygote.run("gpu.scenarios.by_futures", 2, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait)


@shares
def test_who_leaves_a_group_takes_nothing_along_that_waits(zygote: Zygote, shared: str) -> None:
    outcomes = zygote.run("gpu.scenarios.gated_at_the_end", 2, patience=PATIENCE, RINGFORT_SHM=shared, **STREAM)
    assert outcomes[0] < 3


def test_a_process_that_ends_opens_its_gates() -> None:
    program = """
import torch
from ringfort.torch.stream_wait import Gate
x = torch.ones(5, device="cuda").add_(1)  # to load a kernel the driver waits for the device
Gate(x.device).hold(torch.cuda.current_stream())
x.add_(1)
assert not torch.cuda.current_stream().query()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE)


def test_a_driver_that_waits_for_the_device_waits_for_no_network(zygote: Zygote) -> None:
    zygote.run("gpu.scenarios.driver_is_busy", 2, patience=PATIENCE)


def test_kernels_before_a_later_call_do_not_hold_up_an_earlier_one(zygote: Zygote) -> None:
    first, second = zygote.run("gpu.scenarios.held_up", 2, patience=PATIENCE)[0]
    assert first < 0.5 * second


def test_messages_do_not_wait_behind_collectives(zygote: Zygote) -> None:
    zygote.run("gpu.scenarios.crossing", 2, patience=PATIENCE)


@waits
def test_many_calls_of_several_groups_are_under_way_at_once(zygote: Zygote, wait: str) -> None:
    zygote.run("gpu.scenarios.many_at_once", 2, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait)


@waits
def test_tensors_of_any_size_go_through_a_few_buffers(zygote: Zygote, wait: str) -> None:
    zygote.run("gpu.scenarios.large", 2, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait)


@shares
@waits
def test_a_killed_rank_is_named_within_two_seconds(zygote: Zygote, shared: str, wait: str) -> None:
    settings = {"RINGFORT_SHM": shared, "RINGFORT_CUDA_WAIT": wait}
    outcomes = zygote.outcomes("gpu.scenarios.killed", 2, patience=PATIENCE, **settings)
    assert outcomes[1].code == -signal.SIGKILL
    assert outcomes[0].code == 0, outcomes[0].words
    seconds, words = outcomes[0].value
    assert seconds < 2
    assert "lost rank 1" in words


@waits
def test_a_rank_that_does_not_come_is_named_when_the_time_is_over(zygote: Zygote, wait: str) -> None:
    assert "rank 1" in zygote.run("gpu.scenarios.late", 2, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait)[0]


@shares
@waits
def test_ranks_with_other_sizes_are_told(zygote: Zygote, shared: str, wait: str) -> None:
    settings = {"RINGFORT_SHM": shared, "RINGFORT_CUDA_WAIT": wait}
    for words in zygote.run("gpu.scenarios.mismatch", 2, patience=PATIENCE, **settings):
        assert "float32[5000000]" in words
        assert "float32[6000000]" in words


def test_a_graph_refuses_the_network(zygote: Zygote) -> None:
    for words in zygote.run("gpu.scenarios.captured", 2, patience=PATIENCE):
        assert "a CUDA graph cannot hold what goes over the network" in words


@waits
def test_ranks_with_and_without_a_gpu_work_together(zygote: Zygote, wait: str) -> None:
    zygote.run("gpu.scenarios.mixed", 2, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait)


@waits
def test_a_context_takes_cuda_tensors_by_name(zygote: Zygote, wait: str) -> None:
    zygote.run("gpu.scenarios.plain", 2, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait)


@waits
@pytest.mark.parametrize("how", ["ddp", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD(1)"])
def test_a_model_learns_as_one_process_with_all_data_does(zygote: Zygote, how: str, wait: str) -> None:
    for worst in zygote.run("gpu.scenarios.trained", 2, how, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait):
        assert worst < 1e-4
