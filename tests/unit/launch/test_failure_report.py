"""Which failure is reported: not that of a rank whose last lines say that it lost a peer."""

from __future__ import annotations

import msgspec
import pytest

from ringfort.cluster.core.gossip import MAX_NOTE_BYTES
from ringfort.launch.agreement_messages import Failed, decode, encode
from ringfort.launch.failure_report import TAIL_LINES, Failure, first

VICTIMS = [
    "ringfort.errors.PeerLostError: Lost rank 1: its process died",
    "ringfort.errors.ChannelClosedError: The backend of rank 1 was closed",
    "AbortedError: Aborted by rank 0",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:43210",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
]


@pytest.mark.parametrize("words", VICTIMS)
def test_a_rank_that_says_it_lost_another_is_a_victim(words: str) -> None:
    assert Failure.of_rank(0, "a", 1, ["Traceback", words]).is_victim


@pytest.mark.parametrize("words", ["ValueError: PeerLostError: is what I throw", "InvalidRankError: rank=9", ""])
def test_a_rank_that_says_something_else_is_not(words: str) -> None:
    assert not Failure.of_rank(0, "a", 1, ["Traceback", words]).is_victim


def test_a_rank_that_was_killed_is_no_victim_whatever_it_said() -> None:
    assert not Failure.of_rank(0, "a", -9, [VICTIMS[0]]).is_victim


@pytest.mark.parametrize(
    ("exit_code", "tail", "is_final"),
    [
        (2, ["usage: train.py [-h]", "train.py: error: unrecognized arguments: --lrr"], True),
        (1, ["usage: train.py [-h]"], False),
        (1, ["Traceback", "ringfort.errors.ConfigError: nodes='2': contradicts RINGFORT_ELASTIC_NODES=3"], True),
        (1, ["ringfort.errors.ConfigError: nodes='2': invalid", "During handling", "ValueError: other"], False),
        (1, ["ringfort.errors.PeerLostError: Lost rank 1: its process died"], False),
        (1, [], False),
        (-9, ["ringfort.errors.ConfigError: nodes='2': invalid"], False),
    ],
)
def test_a_restart_would_not_help_after_a_wrong_command_or_argument(
    exit_code: int, tail: list[str], is_final: bool
) -> None:
    assert Failure.of_rank(0, "a", exit_code, tail).is_final is is_final


def test_the_first_is_no_victim_and_of_the_lowest_rank() -> None:
    victim = Failure("a", 1, rank=0, is_victim=True)
    late, early = Failure("b", 3, rank=5), Failure("c", 4, rank=2)
    machine = Failure("d", 1, why="d is gone")
    assert first([victim, late, early, machine]) is early
    assert first([victim, machine]) is machine
    assert first([victim]) is victim


def test_the_exit_code_is_the_ranks_or_128_and_its_signal() -> None:
    assert Failure("a", 3, rank=0).status == 3
    assert Failure("a", -15, rank=0).status == 143


def test_the_longest_failure_fits_a_note_and_arrives_as_it_was() -> None:
    failure = Failure.of_rank(1, "h" * 64, 1, ["\N{GRINNING FACE}" * 100_000] * 100)
    assert len(failure.tail) == TAIL_LINES
    data = encode(Failed(failure))
    assert len(data) <= MAX_NOTE_BYTES
    assert decode(data) == Failed(failure)


def test_a_failure_that_breaks_a_limit_is_not_read() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(Failure("a", 999)), type=Failure)
