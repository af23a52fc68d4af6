"""The wall: what somebody between two ranks, or a crowd at the listener, can see and do. tests/stress has the long
form."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from ringfort import DistributedConfig, DistributedContext, RingBackend, TcpBackend
from ringfort.backends.base import Backend
from ringfort.bootstrap.admission import MAX_WAITING
from ringfort.bootstrap.connection import Connection, run
from ringfort.errors import (
    DistributedError,
    EncryptionMismatchError,
    NamespaceMismatchError,
    PeerLostError,
    RendezvousTimeoutError,
    TamperedError,
)
from ringfort.identity.credentials import Credentials
from ringfort.identity.namespace import NetworkNamespace
from ringfort.testing.groups import closing_all, reserved_addresses
from ringfort.testing.ranks import results, run_ranks
from tests.helpers.handshakes import PURPOSE, impostor, member
from tests.helpers.middle import ATTACKS, INWARD, OUTWARD, Edit, Middle, SlowMiddle
from tests.workers.strangers import ROOT, Count, crowd

CONFIG = DistributedConfig(timeout=20, shared_memory="off")
OPEN = DistributedConfig(timeout=20, encryption="off", shared_memory="off")
QUICK = 10.0
"""Seconds, for what takes milliseconds on a machine that is not busy, and half of what a hang would take."""

WINDOW = 16
"""Bytes: as many do not occur in a recording by chance."""


@contextmanager
def group_through(
    middle: Middle, master: str, credentials: Sequence[Credentials], config: DistributedConfig = CONFIG
) -> Generator[Sequence[TcpBackend], None, None]:
    """Two ranks with somebody between them."""

    def connect(rank: int) -> TcpBackend:
        where = (master, middle.address)[rank]
        return TcpBackend(rank, 2, where, config=config, credentials=credentials[rank])

    with closing_all(results(run_ranks(range(2), connect))) as backends:
        yield backends


@contextmanager
def watched_group(
    *credentials: Credentials, config: DistributedConfig = CONFIG
) -> Generator[tuple[Middle, Sequence[TcpBackend]], None, None]:
    with (
        reserved_addresses(1) as (master,),
        Middle(master) as middle,
        group_through(middle, master, credentials or (member(), member()), config) as backends,
    ):
        yield middle, backends


def windows(data: bytes | bytearray, step: int = 1) -> set[bytes]:
    return {bytes(data[place : place + WINDOW]) for place in range(0, len(data) - WINDOW + 1, step)}


# --- who listens ------------------------------------------------------------------------------------------------------


def train(backend: TcpBackend, weights: np.ndarray) -> None:
    """What training says: weights, gradients, sums and a few words."""
    context = DistributedContext(backend)
    mine = np.zeros_like(weights) if backend.rank else weights.copy()
    assert np.array_equal(context.broadcast(mine), weights)
    for _ in range(3):
        gradients = weights * (backend.rank + 1)
        assert np.allclose(context.all_reduce(gradients), 3 * weights)
    words = {"loss": "a-loss-of-some-size", "who": f"worker-{backend.rank}"}
    assert context.all_gather_object(words)[1]["who"] == "worker-1"
    backend.exchange(weights, 1 - backend.rank, mine, 1 - backend.rank, tag=9)
    context.barrier()


def test_a_recorder_between_two_ranks_sees_none_of_what_they_say() -> None:
    cluster = NetworkNamespace.generate("a-name-that-shows")
    ranks = [member(cluster), member(cluster)]
    weights = np.frombuffer(np.random.default_rng(5).bytes(80_000), np.uint32).astype(np.float32) + 1
    with watched_group(*ranks) as (middle, backends):
        results(run_ranks(backends, lambda backend: train(backend, weights)))
        heard = [bytes(middle.heard[direction]) for direction in (INWARD, OUTWARD)]
    assert min(map(len, heard)) > 3 * weights.nbytes // 2, "the recorder did not hear them"
    for recording in heard:
        seen = windows(recording)
        for factor in (1, 2, 3):
            said = (weights * np.float32(factor)).tobytes()
            # Any 16 bytes of a tensor lie across one of the windows of 4-byte steps.
            assert not seen & windows(said, 4)
        for words in (b"all_reduce", b"barrier", b"join", b"welcome", b"a-loss-of-some-size", b"worker-1", b"127.0.0"):
            assert words not in recording
        for credentials in ranks:
            for key in (credentials.identity.public_key, credentials.static_public, *secrets_of(credentials)):
                assert key not in recording
        assert cluster.name.encode() not in recording


def test_the_recorder_would_see_it_with_encryption_off() -> None:
    """Else the test above could not fail."""
    weights = np.arange(20_000, dtype=np.float32)
    with reserved_addresses(1) as (master,), PlainTap(master) as tap:
        where = (master, tap.address)
        backends = results(run_ranks(range(2), lambda rank: TcpBackend(rank, 2, where[rank], config=OPEN)))
        with closing_all(backends):
            results(run_ranks(backends, lambda backend: train(backend, weights)))
        heard = bytes(tap.heard[OUTWARD])
    assert windows(heard) & windows(weights.tobytes(), 4)
    assert b"a-loss-of-some-size" in heard


class PlainTap(Middle):
    """Records what has no records."""

    def _pump(self, direction: int, source: socket.socket, ends: dict[int, socket.socket]) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.heard[direction] += data
                self._send(ends, direction, data)
        with suppress(OSError):
            ends[direction].shutdown(socket.SHUT_WR)


def secrets_of(credentials: Credentials) -> tuple[bytes, ...]:
    namespace, identity = credentials.namespace, credentials.identity
    return (
        namespace._secret,
        namespace.handshake_key,
        identity._key.private_bytes_raw(),
        credentials.static.private_bytes_raw(),
    )


def test_the_same_data_sent_twice_looks_different() -> None:
    data = bytes(200_000)

    def talk(backend: TcpBackend) -> None:
        for _ in range(2):
            if backend.rank == 0:
                backend.send(data, 1)
            else:
                backend.recv(bytearray(len(data)), 0)

    with watched_group() as (middle, backends):
        results(run_ranks(backends, talk))
        heard = bytes(middle.heard[OUTWARD])
    assert len(heard) > 2 * len(data)
    blocks = [heard[place : place + WINDOW] for place in range(0, len(heard) - WINDOW, WINDOW)]
    assert len(set(blocks)) == len(blocks)


# --- who interferes ---------------------------------------------------------------------------------------------------


def reduce_until_it_ends(backend: TcpBackend) -> None:
    """All-reduces, each of which is right, until one raises."""
    context = DistributedContext(backend)
    for turn in range(10_000):
        x = np.full(300_000, backend.rank + turn, np.int64)
        context.all_reduce(x)
        assert (x == 2 * turn + 1).all(), "wrong numbers"


def errors_of(backends: Sequence[TcpBackend]) -> list[DistributedError]:
    """What each rank was told when its link was spoilt."""
    outcomes = run_ranks(backends, reduce_until_it_ends)
    errors = [outcome for outcome in outcomes if isinstance(outcome, DistributedError)]
    assert len(errors) == len(outcomes), outcomes
    return errors


@pytest.mark.parametrize("direction", [INWARD, OUTWARD], ids=["inward", "outward"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_record_that_was_tampered_with_ends_the_link_on_both_sides_and_nothing_wrong_is_used(
    attack: str, direction: int
) -> None:
    with watched_group() as (middle, backends):
        # After the first all-reduce has begun, whatever record is next: a header, a payload, a clear-to-send.
        middle.edits[direction] += [keep(direction)] * 6 + ATTACKS[attack](direction)
        start = time.monotonic()
        errors = errors_of(backends)
        assert time.monotonic() - start < QUICK
    assert all(isinstance(error, (TamperedError, PeerLostError)) for error in errors), errors
    assert any(isinstance(error, TamperedError) for error in errors), errors
    reader = 1 - direction if attack == "reflect" else direction
    victim = errors[0 if reader == INWARD else 1]
    assert isinstance(victim, TamperedError) or attack == "reflect", errors
    assert [error.peer for error in errors] == [1, 0]


def keep(direction: int) -> Edit:
    return lambda record: [(direction, record)]


def test_every_single_record_of_a_small_conversation_is_guarded() -> None:
    """A flip in the first, second, third... record after the handshake, in both directions."""
    for direction in (INWARD, OUTWARD):
        for place in range(5):
            with watched_group() as (middle, backends):
                middle.edits[direction] += [keep(direction)] * place + ATTACKS["flip"](direction)
                errors = errors_of(backends)
            assert isinstance(errors[direction], TamperedError), (direction, place, errors)


def test_a_connection_that_is_cut_is_a_lost_peer() -> None:
    """That is always possible, and no proof of tampering."""
    with watched_group() as (middle, backends):
        middle.edits[INWARD] += [keep(INWARD)] * 6 + [lambda record: middle.cut() or []]  # type: ignore[func-returns-value]
        errors = errors_of(backends)
    assert [type(error) for error in errors] == [PeerLostError, PeerLostError]


@pytest.mark.parametrize("place", [0, 1])
def test_a_flip_while_the_group_forms_lets_nobody_in(place: int) -> None:
    """In message 3, and in the worker's first record. The worker may try again; here every try is spoilt."""
    config = DistributedConfig(timeout=1)
    with reserved_addresses(1) as (master,), Middle(master) as middle:
        for _ in range(50):
            middle.edits[INWARD] += [keep(INWARD)] * place + ATTACKS["flip"](INWARD)
        credentials = (member(), member())
        outcomes = run_ranks(
            range(2),
            lambda rank: TcpBackend(
                rank, 2, (master, middle.address)[rank], config=config, credentials=credentials[rank]
            ),
        )
    assert all(isinstance(outcome, DistributedError) for outcome in outcomes), outcomes


# --- who differs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["tcp", "ring"])
def test_encryption_off_on_one_side_is_an_error_of_its_own_and_the_right_one_still_gets_in(backend: str) -> None:
    for host, wrong in ((CONFIG, OPEN), (OPEN, CONFIG)):
        with reserved_addresses(2) as addresses:
            _wrong_then_right(
                partial(_make, backend, addresses, 0, host),
                partial(_make, backend, addresses, 1, wrong),
                partial(_make, backend, addresses, 1, host),
                EncryptionMismatchError,
            )


@pytest.mark.parametrize("backend", ["tcp", "ring"])
def test_another_cluster_is_an_error_of_its_own_and_the_right_one_still_gets_in(backend: str) -> None:
    other = member(NetworkNamespace.generate("lab"))
    with reserved_addresses(2) as addresses:
        _wrong_then_right(
            partial(_make, backend, addresses, 0, CONFIG),
            partial(_make, backend, addresses, 1, CONFIG, other),
            partial(_make, backend, addresses, 1, CONFIG),
            NamespaceMismatchError,
        )


def _make(
    kind: str, addresses: Sequence[str], rank: int, config: DistributedConfig, credentials: Credentials | None = None
) -> TcpBackend | RingBackend:
    credentials = credentials or member()
    if kind == "tcp":
        return TcpBackend(rank, 2, addresses[0], config=config, credentials=credentials)
    ring = DistributedConfig(nodes=addresses, rank=rank, timeout=config.timeout, encryption=config.encryption)
    return RingBackend(ring, credentials=credentials)


def _wrong_then_right(
    host: Callable[[], Backend],
    wrong: Callable[[], Backend],
    right: Callable[[], Backend],
    kind: type[DistributedError],
) -> None:
    def second() -> Backend:
        start = time.monotonic()
        with pytest.raises(kind, match="rank 0"):
            wrong()
        assert time.monotonic() - start < QUICK
        return right()

    with closing_all(results(run_ranks([host, second], lambda make: make()))) as backends:
        results(run_ranks(backends, lambda backend: backend.barrier()))


def test_rank_0_that_waits_in_vain_says_who_was_refused_and_why() -> None:
    config = DistributedConfig(timeout=1)
    with reserved_addresses(1) as (master,):

        def other() -> None:
            with pytest.raises(NamespaceMismatchError):
                TcpBackend(1, 2, master, config=CONFIG, credentials=member(NetworkNamespace.generate()))

        outcomes = run_ranks(
            [lambda: TcpBackend(0, 2, master, config=config, credentials=member()), other], lambda part: part()
        )
    assert isinstance(outcomes[0], RendezvousTimeoutError)
    assert "belongs to another cluster, this side to 'lab'" in str(outcomes[0])
    assert outcomes[1] is None


# --- who floods -------------------------------------------------------------------------------------------------------


def test_members_get_through_and_reduce_while_a_crowd_is_at_the_listener(caplog: pytest.LogCaptureFixture) -> None:
    cluster = NetworkNamespace.generate()
    groups = 0
    with (
        caplog.at_level(logging.DEBUG, "ringfort"),
        reserved_addresses(1) as (master,),
        crowd(master, cluster) as count,
    ):
        start = time.monotonic()
        while time.monotonic() - start < 3:
            join_through(master, cluster, count)
            groups += 1
        seconds = time.monotonic() - start
        attempts = count().attempts
    assert attempts > 200 * (seconds - 1), "the crowd was too small to tell"
    lines = [record for record in caplog.records if record.name == "ringfort.bootstrap.listener"]
    # At most one line a second and one for the rest, at each of the four listeners of a group.
    assert 0 < len(lines) <= seconds + 2 * groups * 4


def join_through(master: str, cluster: NetworkNamespace, count: Callable[[], Count]) -> None:
    """Four ranks meet and reduce; the others come when more unauthenticated clients than may wait are before them."""
    before = count().connected

    def connect(rank: int) -> TcpBackend:
        if rank:
            deadline = time.monotonic() + QUICK
            while count().connected < before + MAX_WAITING:
                assert time.monotonic() < deadline, "the crowd does not come"
                time.sleep(0.01)  # a look at another process
        return TcpBackend(rank, 4, master, config=CONFIG, credentials=member(cluster))

    with closing_all(results(run_ranks(range(4), connect))) as backends:
        results(run_ranks(backends, _reduce_a_little))


def test_a_rank_far_away_gets_in_while_a_crowd_comes_faster_than_its_answers() -> None:
    """Between two messages of its handshake twice as many other clients come as there are places."""
    cluster = NetworkNamespace.generate()
    ranks = [member(cluster), member(cluster)]
    with reserved_addresses(1) as (master,), crowd(master, cluster, 1500, is_silent=True) as count:

        def hold() -> None:
            enough = count().connected + 2 * MAX_WAITING
            deadline = time.monotonic() + QUICK
            while count().connected < enough and time.monotonic() < deadline:
                time.sleep(0.01)  # a look at another process

        with SlowMiddle(master, hold) as middle, group_through(middle, master, ranks) as backends:
            results(run_ranks(backends, lambda backend: backend.barrier()))


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_listener_without_descriptors_does_not_spin_and_lets_members_in_when_it_has_some(kind: str) -> None:
    cluster = NetworkNamespace.generate()
    command = [sys.executable, "-m", "tests.workers.full", kind]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            child.stdin.write(cluster.join_code() + "\n")
            child.stdin.flush()
            address = ("127.0.0.1", int(child.stdout.readline()))
            with socket.create_connection(address, timeout=QUICK):
                tries = int(child.stdout.readline())
                assert 1 <= tries <= 12  # one try each tenth of half a second, and the turn before it
                sock = socket.create_connection(address, timeout=QUICK)
                connection = run(Connection.initiate(sock, member(cluster), PURPOSE), time.monotonic() + QUICK)
                assert child.stdout.readline().strip() == "Join"
                connection.close()
            assert child.wait(QUICK) == 0
        finally:
            child.kill()


def _reduce_a_little(backend: TcpBackend) -> None:
    context = DistributedContext(backend)
    for size in (1, 1000, 200_000):
        x = np.full(size, backend.rank + 1, np.int64)
        assert (context.all_reduce(x) == 10).all()


# --- what is written down ---------------------------------------------------------------------------------------------


def test_no_secret_is_in_a_log_an_error_or_a_repr(caplog: pytest.LogCaptureFixture) -> None:
    cluster = NetworkNamespace.generate()
    ranks = [member(cluster), member(cluster)]
    said: list[str] = []
    config = DistributedConfig(timeout=2)
    with ExitStack() as stack:
        stack.enter_context(caplog.at_level(logging.DEBUG))
        [master] = stack.enter_context(reserved_addresses(1))
        middle = stack.enter_context(Middle(master))
        wait_in_vain = partial(TcpBackend, 0, 3, master, config=config, credentials=ranks[0])
        host = threading.Thread(target=_keep, args=(said, wait_in_vain))
        host.start()
        for other in (impostor(cluster), member(NetworkNamespace.generate())):
            short = DistributedConfig(timeout=0.3)
            _keep(said, partial(TcpBackend, 1, 3, master, config=short, credentials=other))
        _keep(said, partial(TcpBackend, 1, 3, master, config=OPEN))
        host.join(20)
        backends = stack.enter_context(group_through(middle, master, ranks))
        said += [repr(backend) for backend in backends] + [repr(vars(backend)) for backend in backends]
        middle.edits[INWARD] += ATTACKS["flip"](INWARD)
        for error in errors_of(backends):
            said += _all_of(error)
        said += [repr(credentials) for credentials in ranks]
    assert len(said) > 10
    text = "\n".join([*said, caplog.text, *(repr(record.__dict__) for record in caplog.records)])
    assert "another cluster" in text  # it did listen
    assert "tampered" in text
    for credentials in ranks:
        for secret in secrets_of(credentials):
            for form in (secret.hex(), repr(secret)[2:-1], str(list(secret))[1:-1]):
                assert form not in text
    code = cluster.join_code()
    assert code not in text
    assert not any(group in text for group in _groups_of(code))


def _groups_of(code: str) -> list[str]:
    """Any two neighbouring groups of four of a join code's secret part."""
    groups = code.split("-")[2:]
    return ["-".join(pair) for pair in pairwise(groups)]


def _keep(said: list[str], call: Callable[[], object]) -> None:
    try:
        call()
    except DistributedError as exc:
        said += _all_of(exc)
    else:
        raise AssertionError("it should have failed")


def _all_of(error: BaseException) -> list[str]:
    found = [str(error), repr(error), repr(vars(error))]
    for other in (error.__cause__, error.__context__):
        if other is not None:
            found += _all_of(other)
    return found
