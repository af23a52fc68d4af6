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
waits = pytest.mark.parametrize("wait", ["stream", "host"])
shares = pytest.mark.parametrize("shared", ["on", "off"])


@waits
@shares
def test_every_collective_gives_what_it_must_for_every_element_type(zygote: Zygote, wait: str, shared: str) -> None:
    zygote.run("collectives", 2, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait, RINGFORT_SHM=shared, **CUDA)


@waits
@pytest.mark.parametrize(
    ("scenario", "ranks"), [("old_names", 2), ("coalesced", 3), ("messages", 3), ("sub_groups", 3)]
)
def test_what_works_on_the_cpu_works_here(zygote: Zygote, wait: str, scenario: str, ranks: int) -> None:
    zygote.run(scenario, ranks, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait, **CUDA)


@waits
@shares
@pytest.mark.parametrize(("count", "turns"), [(1000, 60), (6_000_000, 30)])
def test_streams_wait_for_each_other(zygote: Zygote, wait: str, shared: str, count: int, turns: int) -> None:
    zygote.run("gpu.scenarios.racing", 2, count, turns, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait, RINGFORT_SHM=shared)


@waits
def test_memory_that_nobody_holds_is_not_given_to_others_too_early(zygote: Zygote, wait: str) -> None:
    zygote.run("gpu.scenarios.forgotten", 2, 20, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait)


def test_the_stream_waits_and_the_host_does_not(zygote: Zygote) -> None:
    busy, waited = zygote.run("gpu.scenarios.nobody_waits", 2, patience=PATIENCE)[0]
    assert busy < 0.5
    assert waited > 0.7


def test_the_host_waits_if_it_is_told_to(zygote: Zygote) -> None:
    busy, _ = zygote.run("gpu.scenarios.nobody_waits", 2, patience=PATIENCE, RINGFORT_CUDA_WAIT="host")[0]
    assert busy > 0.7


def test_a_driver_that_waits_for_the_device_does_not_wait_for_ever(zygote: Zygote) -> None:
    zygote.run("gpu.scenarios.driver_is_busy", 2, patience=PATIENCE)


@waits
def test_messages_do_not_wait_behind_collectives(zygote: Zygote, wait: str) -> None:
    zygote.run("gpu.scenarios.crossing", 2, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait)


@waits
def test_many_calls_of_several_groups_are_under_way_at_once(zygote: Zygote, wait: str) -> None:
    zygote.run("gpu.scenarios.many_at_once", 2, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait)


@waits
def test_tensors_of_any_size_go_through_a_few_buffers(zygote: Zygote, wait: str) -> None:
    zygote.run("gpu.scenarios.large", 2, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait)


@waits
@shares
def test_a_killed_rank_is_named_within_two_seconds(zygote: Zygote, wait: str, shared: str) -> None:
    outcomes = zygote.outcomes(
        "gpu.scenarios.killed", 2, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait, RINGFORT_SHM=shared
    )
    assert outcomes[1].code == -signal.SIGKILL
    assert outcomes[0].code == 0, outcomes[0].words
    seconds, words = outcomes[0].value
    assert seconds < 2
    assert "lost rank 1" in words


@waits
def test_a_rank_that_does_not_come_is_named_when_the_time_is_over(zygote: Zygote, wait: str) -> None:
    assert "rank 1" in zygote.run("gpu.scenarios.late", 2, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait)[0]


@waits
@shares
def test_ranks_with_other_sizes_are_told(zygote: Zygote, wait: str, shared: str) -> None:
    for words in zygote.run(
        "gpu.scenarios.mismatch", 2, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait, RINGFORT_SHM=shared
    ):
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
def test_a_model_learns_as_one_process_with_all_data_does(zygote: Zygote, wait: str, how: str) -> None:
    for worst in zygote.run("gpu.scenarios.trained", 2, how, patience=PATIENCE, RINGFORT_CUDA_WAIT=wait):
        assert worst < 1e-4


def test_a_process_ends_although_a_stream_waits() -> None:
    program = (
        "from ringfort.torch.streams import CudaDevice; d = CudaDevice('cuda'); assert d.can_hold; "
        "s = d.stream(); d.hold(s, d.gate()); print('ends', flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr
