"""Checks: they fail where a rule does not hold, and say at which ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from ringfort import Backend, DistributedConfig, SimulatedBackend
from ringfort.errors import AbortedError, PeerLostError
from ringfort.testing import (
    ALL_CHECKS,
    BACKEND_CHECKS,
    COLLECTIVE_CHECKS,
    CheckFailedError,
    FaultTimetable,
    ProcessRanks,
    check,
    simulated_group,
)
from ringfort.testing.check import raises

if TYPE_CHECKING:
    from typing_extensions import Buffer


def test_a_check_that_holds_says_nothing() -> None:
    @check(ranks=2)
    def they_meet(backend: Backend) -> None:
        backend.barrier()

    they_meet.run(simulated_group)
    assert repr(they_meet) == "<Check they_meet, 2 ranks>"


def test_a_check_that_fails_says_where_and_the_others_do_not_wait_for_their_timeout() -> None:
    @check(ranks=3)
    def rank_1_is_even(backend: Backend) -> None:
        assert backend.rank != 1, "rank 1 is odd"
        backend.recv(bytearray(1), 1)

    start = time.monotonic()
    with pytest.raises(CheckFailedError, match="rank_1_is_even does not hold") as caught:
        rank_1_is_even.run(simulated_group)
    assert time.monotonic() - start < 10
    assert "rank 1 is odd" in caught.value.failures[1]
    assert "rank_1_is_even failed at rank 1: AssertionError" in caught.value.failures[0]


def test_a_rank_that_was_to_be_killed_must_have_been() -> None:
    @check(ranks=2, faults=FaultTimetable().kill(rank=0, at=2))
    def rank_0_dies(backend: Backend) -> None:
        if backend.rank == 0:
            backend.send(b"x", 1)
            backend.send(b"x", 1)
            pytest.fail("survived")
        with raises(PeerLostError, naming=0):
            for _ in range(2):
                backend.recv(bytearray(1), 0)

    rank_0_dies.run(simulated_group)

    @check(ranks=2, faults=FaultTimetable().kill(rank=0, at=100))
    def rank_0_lives(backend: Backend) -> None:
        backend.barrier()

    with pytest.raises(CheckFailedError, match="should have been killed, but was not"):
        rank_0_lives.run(simulated_group)


def test_raises_fails_unless_the_error_is_the_one() -> None:
    with raises(AbortedError, saying="enough", naming=3) as caught:
        raise AbortedError("enough", peer=3)
    assert caught.error.reason == "enough"
    with pytest.raises(AssertionError, match="AbortedError was not raised"), raises(AbortedError):
        pass
    with pytest.raises(AssertionError, match="'more' is not in"), raises(AbortedError, saying="more"):
        raise AbortedError("enough")
    with pytest.raises(AssertionError, match="rank 3 is named, not 4"), raises(AbortedError, naming=4):
        raise AbortedError("enough", peer=3)
    with pytest.raises(KeyError), raises(AbortedError):
        raise KeyError


def test_every_check_has_a_name_of_its_own() -> None:
    assert len(ALL_CHECKS) == len(BACKEND_CHECKS) + len(COLLECTIVE_CHECKS)
    assert len(ALL_CHECKS) > 40


# --- the checks find what is wrong ------------------------------------------------------------------------------------


class Broken(SimulatedBackend):
    """A backend with one fault, which the subclass says."""


class Forgetful(Broken):
    """Loses every tenth message."""

    count = 0

    def send(self, data: Buffer, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        self.count += 1
        if self.count % 10:
            super().send(data, dst, tag=tag, timeout=timeout)


class Tagless(Broken):
    """Takes all tags for one."""

    def send(self, data: Buffer, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        super().send(data, dst, tag=0, timeout=timeout)

    def recv(self, into: Buffer, src: int, *, tag: int = 0, **how: Any) -> None:
        super().recv(into, src, tag=0, **how)


class Hasty(Broken):
    """Does not wait in a barrier."""

    def barrier(self, *, timeout: float | None = None) -> None:
        pass


class Silent(Broken):
    """Aborts without telling anybody."""

    def abort(self, reason: str) -> None:
        pass


class Lenient(Broken):
    """Takes any rank for the other one."""

    def send(self, data: Buffer, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        super().send(data, 1 - self.rank, tag=tag, timeout=timeout)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Forgetful, "messages_keep_their_order_within_a_tag"),
        (Tagless, "messages_of_other_tags_wait_for_their_receive"),
        (Hasty, "nobody_leaves_a_barrier_before_all_have_come"),
        (Silent, "an_abort_wakes_every_waiter_here_and_at_the_peers"),
        (Lenient, "wrong_arguments_raise_before_a_byte_moves"),
    ],
)
def test_a_broken_backend_is_found_out(kind: type[Broken], name: str) -> None:
    @contextmanager
    def group(world_size: int, config: DistributedConfig) -> Iterator[Sequence[Backend]]:
        backends = kind.create_group(world_size, config=config)
        yield backends
        for backend in backends:
            backend.kill()

    with pytest.raises(CheckFailedError, match=name):
        ALL_CHECKS[name].run(group, config=DistributedConfig(timeout=0.5))


# --- in processes -----------------------------------------------------------------------------------------------------


def make_nothing(rank: int, addresses: Sequence[str]) -> Backend:
    raise ConnectionError(f"rank {rank} of {len(addresses)} was never made")


def test_processes_say_what_went_wrong_and_take_the_next_check() -> None:
    with ProcessRanks(2, "tests.unit.testing.test_check:make_nothing") as ranks:
        for _ in range(2):
            with pytest.raises(CheckFailedError, match="rank 1 of 2 was never made"):
                ranks.run(ALL_CHECKS["empty_messages_are_messages"])


def test_a_process_that_ends_by_itself_is_reported_with_its_last_words() -> None:
    with ProcessRanks(1, "no.such.module:make") as ranks, pytest.raises(CheckFailedError, match="No module named 'no'"):
        ranks.run(ALL_CHECKS["a_world_of_one_works_and_moves_no_bytes"])


def test_a_process_that_was_killed_is_replaced() -> None:
    with ProcessRanks(3) as ranks:
        for _ in range(2):
            ranks.run(ALL_CHECKS["a_killed_peer_is_named_by_every_survivor"])
