"""CUDA tensors through the process group: two ranks on one GPU; results against the CPU's, streams by races."""

from __future__ import annotations

import signal

import pytest

from tests.torch.zygote import Zygote

PATIENCE = 40.0
"""Seconds for a scenario: CUDA alone takes a few to start."""
CUDA = {"DEVICE": "cuda"}
shares = pytest.mark.parametrize("shared", ["on", "off"])


@shares
def test_every_collective_gives_what_it_must_for_every_element_type(zygote: Zygote, shared: str) -> None:
    zygote.run("collectives", 2, patience=PATIENCE, RINGFORT_SHM=shared, **CUDA)


@pytest.mark.parametrize(
    ("scenario", "ranks"), [("old_names", 2), ("coalesced", 3), ("messages", 3), ("sub_groups", 3)]
)
def test_what_works_on_the_cpu_works_here(zygote: Zygote, scenario: str, ranks: int) -> None:
    zygote.run(scenario, ranks, patience=PATIENCE, **CUDA)


@shares
@pytest.mark.parametrize(("count", "turns"), [(1000, 60), (6_000_000, 30)])
def test_streams_wait_for_each_other(zygote: Zygote, shared: str, count: int, turns: int) -> None:
    zygote.run("gpu.scenarios.racing", 2, count, turns, patience=PATIENCE, RINGFORT_SHM=shared)


def test_memory_that_nobody_holds_is_not_given_to_others_too_early(zygote: Zygote) -> None:
    zygote.run("gpu.scenarios.forgotten", 2, 20, patience=PATIENCE)


def test_a_call_returns_at_once_and_its_wait_when_the_others_have_come(zygote: Zygote) -> None:
    called, waited = zygote.run("gpu.scenarios.late_peer", 2, patience=PATIENCE)[0]
    assert called < 0.5
    assert waited > 0.7


def test_compressed_gradients_and_local_steps_are_what_they_are_on_the_cpu(zygote: Zygote) -> None:
    here = zygote.run("gpu.scenarios.compressed", 2, "cuda", patience=PATIENCE)
    assert here[0][1][9:] == here[1][1][9:], "the ranks' weights differ"
    for found, expected in zip(here, zygote.run("gpu.scenarios.compressed", 2, "cpu", patience=PATIENCE), strict=True):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=0.03, abs=0.02)  # stochastic rounding may fall the other way


def test_groups_take_turns_with_the_results_of_each_other(zygote: Zygote) -> None:
    zygote.run("gpu.scenarios.two_groups", 2, patience=PATIENCE)


def test_what_hangs_on_a_future_sees_the_result(zygote: Zygote) -> None:
    zygote.run("gpu.scenarios.by_futures", 2, patience=PATIENCE)


def test_a_driver_that_waits_for_the_device_waits_for_no_network(zygote: Zygote) -> None:
    zygote.run("gpu.scenarios.driver_is_busy", 2, patience=PATIENCE)


def test_kernels_before_a_later_call_do_not_hold_up_an_earlier_one(zygote: Zygote) -> None:
    first, second = zygote.run("gpu.scenarios.held_up", 2, patience=PATIENCE)[0]
    assert first < 0.5 * second


def test_messages_do_not_wait_behind_collectives(zygote: Zygote) -> None:
    zygote.run("gpu.scenarios.crossing", 2, patience=PATIENCE)


def test_many_calls_of_several_groups_are_under_way_at_once(zygote: Zygote) -> None:
    zygote.run("gpu.scenarios.many_at_once", 2, patience=PATIENCE)


def test_tensors_of_any_size_go_through_a_few_buffers(zygote: Zygote) -> None:
    zygote.run("gpu.scenarios.large", 2, patience=PATIENCE)


@shares
def test_a_killed_rank_is_named_within_two_seconds(zygote: Zygote, shared: str) -> None:
    outcomes = zygote.outcomes("gpu.scenarios.killed", 2, patience=PATIENCE, RINGFORT_SHM=shared)
    assert outcomes[1].code == -signal.SIGKILL
    assert outcomes[0].code == 0, outcomes[0].words
    seconds, words = outcomes[0].value
    assert seconds < 2
    assert "Lost rank 1" in words


def test_a_rank_that_does_not_come_is_named_when_the_time_is_over(zygote: Zygote) -> None:
    assert "rank 1" in zygote.run("gpu.scenarios.late", 2, patience=PATIENCE)[0]


@shares
def test_ranks_with_other_sizes_are_told(zygote: Zygote, shared: str) -> None:
    for words in zygote.run("gpu.scenarios.mismatch", 2, patience=PATIENCE, RINGFORT_SHM=shared):
        assert "float32[5000000]" in words
        assert "float32[6000000]" in words


def test_a_graph_refuses_the_network(zygote: Zygote) -> None:
    for words in zygote.run("gpu.scenarios.captured", 2, patience=PATIENCE):
        assert "a CUDA graph cannot contain a collective over the network" in words


def test_ranks_with_and_without_a_gpu_work_together(zygote: Zygote) -> None:
    zygote.run("gpu.scenarios.mixed", 2, patience=PATIENCE)


def test_a_context_takes_cuda_tensors_by_name(zygote: Zygote) -> None:
    zygote.run("gpu.scenarios.plain", 2, patience=PATIENCE)


@pytest.mark.parametrize("how", ["ddp", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD(1)"])
def test_a_model_learns_as_one_process_with_all_data_does(zygote: Zygote, how: str) -> None:
    for worst in zygote.run("gpu.scenarios.trained", 2, how, patience=PATIENCE):
        assert worst < 1e-4
