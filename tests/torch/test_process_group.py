"""The `torch.distributed` backend: real processes, over shared memory and over encrypted TCP."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.helpers.traces import by_rank
from tests.torch.zygote import Zygote


@pytest.mark.parametrize(("world_size", "shared"), [(2, "on"), (3, "off")])
def test_every_collective_gives_what_it_must_for_every_element_type(
    zygote: Zygote, world_size: int, shared: str
) -> None:
    zygote.run("collectives", world_size, RINGFORT_SHM=shared)


def test_the_names_before_torch_2_13_are_there_too(zygote: Zygote) -> None:
    zygote.run("old_names", 2)


def test_several_calls_can_be_made_as_one(zygote: Zygote) -> None:
    zygote.run("coalesced", 3)


def test_messages_keep_their_order_within_a_tag_and_large_ones_cross(zygote: Zygote) -> None:
    zygote.run("messages", 3)


def test_a_message_from_any_source_comes_although_a_peer_is_lost(zygote: Zygote) -> None:
    outcomes = zygote.outcomes("any_source_may_be_lost", 3)
    assert [outcome.code for outcome in outcomes] == [0, -signal.SIGKILL, 0], outcomes
    assert "rank 2" in outcomes[0].value  # the last peer that was lost


def test_groups_of_some_ranks_keep_their_order_and_use_the_links_there_are(zygote: Zygote) -> None:
    zygote.run("sub_groups", 3)


def test_a_group_of_ours_works_where_the_default_is_anothers(zygote: Zygote) -> None:
    zygote.run("beside_gloo", 3)


def test_torchs_flight_recorder_is_kept_away_from_our_groups(zygote: Zygote) -> None:
    zygote.run("not_recorded", 2)


def test_a_group_can_be_named_by_device(zygote: Zygote) -> None:
    zygote.run("by_device", 2)


def test_the_methods_are_those_of_an_engine_that_torchs_own_group_can_hold(zygote: Zygote) -> None:
    why = zygote.run("as_backend", 2)[0]
    if why is not None:
        pytest.skip(f"torch before 2.14 has no engines in Python ({why})")


def test_meshes_functional_collectives_and_distributed_tensors_work(zygote: Zygote) -> None:
    zygote.run("meshes", 4)


@pytest.mark.parametrize("scenario", ["keywords", "several", "sparse"])
def test_group_methods_take_what_those_of_gloo_take(zygote: Zygote, scenario: str) -> None:
    ours, theirs = (zygote.run(f"torch.legacy_scenarios.{scenario}", 2, name) for name in ("ringfort", "gloo"))
    assert ours == theirs


def test_sparse_tensors_that_cannot_be_added_are_refused_in_words(zygote: Zygote) -> None:
    shapes, op = zygote.run("torch.legacy_scenarios.sparse_refused", 2)[0]
    assert "sparse axes and shape differ: [1, 2] at this rank, [1, 3] at rank 1" in shapes
    assert "can only be added" in op


def test_a_work_has_what_torch_and_people_ask_of_it(zygote: Zygote) -> None:
    zygote.run("works", 2)


@pytest.mark.parametrize(("world_size", "shared"), [(2, "on"), (3, "off")])
def test_callbacks_of_futures_may_issue_collectives_and_wait_for_them(
    zygote: Zygote, world_size: int, shared: str
) -> None:
    zygote.run("torch.callback_scenarios.nested", world_size, RINGFORT_SHM=shared)


def test_a_collective_in_a_callback_that_a_rank_does_not_issue_ends_with_the_timeout(zygote: Zygote) -> None:
    missing, failed = zygote.run("torch.callback_scenarios.nested_fails", 2)[0]
    assert "OperationTimeoutError" in missing
    assert "ZeroDivisionError" in failed


def test_power_sgd_learns_in_several_buckets(zygote: Zygote) -> None:
    losses = zygote.run("torch.callback_scenarios.power_sgd", 2, "ringfort", "plain", 0.01)
    assert all(mine[-1] < mine[0] for mine in losses)


def test_a_sharded_tensor_is_gathered_where_torch_has_no_gpu(zygote: Zygote) -> None:
    assert zygote.run("torch.model_scenarios.sharded_tensor", 2) == [50.0, None]


def test_steps_of_optimizers_are_counted(zygote: Zygote) -> None:
    assert zygote.run("steps", 2) == [2, 2]


def test_a_default_group_can_follow_another(zygote: Zygote) -> None:
    zygote.run("again", 2)


def test_wrong_arguments_are_refused_at_the_call_and_the_group_goes_on(zygote: Zygote) -> None:
    errors = zygote.run("wrong_arguments", 2)
    assert errors[0] == errors[1]
    assert "output='list of 1'" in errors[0][1]


def test_ranks_that_call_different_things_are_told_what_each_called(zygote: Zygote) -> None:
    for words in zygote.run("mismatch", 2):
        assert "rank 0 called broadcast(float32[8], root=0)" in words
        assert "rank 1 called all_reduce(float32[8], SUM)" in words


def test_a_rank_that_does_not_come_is_named_when_the_time_of_the_group_is_over(zygote: Zygote) -> None:
    words = zygote.run("timeout", 2)[0]
    assert "Exceeded the timeout of 0.5 s: " in words
    assert "waiting for rank 1" in words


def test_a_monitored_barrier_names_who_did_not_come(zygote: Zygote) -> None:
    assert "rank 2 did not come" in zygote.run("missing", 3)[0]


def test_an_abort_wakes_the_others(zygote: Zygote) -> None:
    assert "Aborted by rank 0" in zygote.run("abort", 2)[1]


@pytest.mark.parametrize("finds", [False, True])
def test_a_group_whose_last_reference_goes_is_left_at_once(zygote: Zygote, finds: bool) -> None:
    found = zygote.run("dropped", 2, finds, RINGFORT_INTERFACES="127.0.0.1")
    assert [outcome for outcome in found if outcome] == [["PeerLostError", 0]]


@pytest.mark.parametrize("shared", ["on", "off"])
def test_a_rank_killed_in_the_backward_of_ddp_is_named_within_two_seconds(zygote: Zygote, shared: str) -> None:
    outcomes = zygote.outcomes("killed_in_backward", 3, RINGFORT_SHM=shared)
    assert outcomes[2].code == -signal.SIGKILL
    for outcome in outcomes[:2]:
        raised, destroyed, words = outcome.value
        assert "PeerLostError: Lost rank 2" in words
        assert raised < 2
        assert destroyed < 4


@pytest.mark.parametrize("curve", ["ddp_curve", "fsdp_curve"])
def test_a_model_learns_as_it_does_over_gloo(zygote: Zygote, curve: str) -> None:
    check_curves(zygote, curve, world_size=2, steps=15)


def check_curves(zygote: Zygote, curve: str, *, world_size: int, steps: int) -> float:
    """Returns the largest difference of a loss."""
    ours = zygote.run(curve, world_size, "ringfort", steps, patience=600)
    theirs = zygote.run(curve, world_size, "gloo", steps, patience=600)
    if world_size == 2:  # a sum of two is the same both ways round
        assert ours == theirs
    else:
        assert ours == [pytest.approx(losses, rel=1e-3) for losses in theirs]
    assert all(losses[-1] < losses[0] for losses in ours)
    return max(abs(a - b) for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=True))


GRADIENTS = 4 * 5 * 256
"""Bytes of those of the model in watched_scenarios.py."""


def test_ddp_shows_who_computes_who_loads_and_who_waits(zygote: Zygote, tmp_path: Path) -> None:
    zygote.run("torch.watched_scenarios.ddp", 2, RINGFORT_TELEMETRY=str(tmp_path), RINGFORT_SHM="off")
    slow, quick = by_rank(tmp_path)
    for rank, written in enumerate((slow, quick)):
        header = written.header
        assert (header.rank, header.world_size, header.role) == (rank, 2, "")
        assert header.gradient_bytes == GRADIENTS
        assert written.step == 8
        assert written.numbers == list(range(1, 9))  # the loader has said when the first one began
        assert written.samples == [8] * 8
        assert list(written.values["loss"]) == list(range(8))  # each was logged before the optimizer's step
        assert written.sent[-1].sent[1 - rank] > GRADIENTS
    assert min(step.compute for step in slow.steps) > 0.9 * 0.05
    assert min(step.data for step in quick.steps) > 0.9 * 0.01
    assert quick.usual("exchange") > max(0.01, slow.least("exchange"))  # it waits while the other computes
