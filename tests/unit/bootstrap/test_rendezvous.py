"""How ranks that know one address become a group, whoever else connects to that address meanwhile."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest

from ringfort import DistributedConfig, TcpBackend
from ringfort.bootstrap.addresses import listening_host, reachable_from
from ringfort.bootstrap.connection import Connection, run
from ringfort.bootstrap.fixed_list import accept_higher, connect_lower
from ringfort.bootstrap.listener import Listener
from ringfort.bootstrap.terms import Terms
from ringfort.config import format_address, parse_address
from ringfort.errors import (
    ConfigError,
    DistributedError,
    HandshakeError,
    InvalidRankError,
    InvalidWorldSizeError,
    ProtocolError,
    RankTakenError,
    RefusedError,
    RendezvousTimeoutError,
    TransportError,
    WorldSizeMismatchError,
)
from ringfort.identity.credentials import Credentials
from ringfort.testing import run_ranks
from ringfort.testing.groups import reserved_addresses, tcp_group
from ringfort.testing.ranks import results
from ringfort.transport.handshake import Handshake
from ringfort.transport.hello import Hello, Join, Meet, Ready, Welcome
from ringfort.transport.machine import Machine
from ringfort.transport.tcp import listen
from tests.helpers.background import Background
from tests.helpers.handshakes import handshake_of, impostor, member

LONG = DistributedConfig(timeout=20)
"""For groups that come together: they need milliseconds, and a busy machine more."""
SHORT = DistributedConfig(timeout=0.5)
"""For groups that do not."""


class NewGroup:
    """A group that is being formed: rank 0 waits for the others in a thread."""

    def __init__(self, world_size: int, config: DistributedConfig = LONG, host: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        self.master = format_address(host, listener.getsockname()[1])
        self.world_size = world_size
        self._stack = ExitStack()
        self._ranks = [Background(TcpBackend, 0, world_size, config=config, listener=listener, group="job 1")]

    def join(self, rank: int, world_size: int | None = None, config: DistributedConfig = LONG) -> TcpBackend:
        return TcpBackend(rank, world_size or self.world_size, self.master, config=config)

    def start(self, *ranks: int, config: DistributedConfig = LONG) -> list[Background[TcpBackend]]:
        """Ranks that join, each in a thread."""
        started = [Background(self.join, rank, config=config) for rank in ranks]
        self._ranks += started
        return started

    def connect(self, words: bytes = b"") -> socket.socket:
        """A connection to rank 0 from a client that sends `words`."""
        sock = self._stack.enter_context(socket.create_connection(parse_address(self.master)))
        sock.sendall(words)
        return sock

    def hello(self, purpose: Hello) -> Connection:
        """A connection to rank 0 from a member, for `purpose`."""
        steps = Connection.initiate(self.connect(), Credentials.load(), purpose, "rank 0")
        return run(steps, time.monotonic() + 20)

    def send_bad(self, bad: bytes | Hello) -> None:
        """A client that sends these bytes, or a member that connects for this."""
        if isinstance(bad, bytes):
            self.connect(bad)
        else:
            self.hello(bad)

    def host(self) -> TcpBackend:
        """Rank 0, when it is ready; raises what it raised."""
        return self._ranks[0].result()

    def check(self) -> None:
        """The group is whole: every rank talks to every other, and knows that all are on this machine."""
        backends = sorted((rank.result() for rank in self._ranks), key=lambda backend: backend.rank)
        assert [backend.group.hosts for backend in backends] == [(0,) * self.world_size] * self.world_size
        assert run_ranks(backends, talk_to_all) == [None] * self.world_size

    def close(self) -> None:
        self._stack.close()
        made: list[TcpBackend] = []
        for rank in self._ranks:
            with suppress(DistributedError):
                made.append(rank.result())
        run_ranks(made, lambda backend: backend.close())


def talk_to_all(backend: TcpBackend) -> None:
    for other in range(backend.world_size):
        if other != backend.rank:
            came = bytearray(1)
            backend.exchange(bytes([backend.rank]), other, came, other)
            assert came == bytes([other])


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[NewGroup]:
    """A group of as many ranks as the test's parameter says, else three."""
    group = NewGroup(getattr(request, "param", 3))
    yield group
    group.close()


@pytest.fixture
def failing() -> Iterator[NewGroup]:
    """A group of three that does not wait long."""
    group = NewGroup(3, SHORT)
    yield group
    group.close()


# --- groups that come together ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [2, 3, 8], indirect=True)
def test_every_rank_is_linked_to_every_other(group: NewGroup) -> None:
    group.start(*range(group.world_size - 1, 0, -1))
    group.check()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_every_kind_of_address_will_do(host: str) -> None:
    with reserved_addresses(1, "127.0.0.1" if host == "localhost" else host) as (free,):
        master = format_address(host, parse_address(free)[1])
        backends = run_ranks(range(3), lambda rank: TcpBackend(rank, 3, master, config=LONG))
        assert [backend.rank for backend in backends if isinstance(backend, TcpBackend)] == [0, 1, 2]
        run_ranks(backends, talk_to_all)  # type: ignore[arg-type]
        run_ranks(backends, lambda backend: backend.close())  # type: ignore[union-attr]


def test_ranks_may_start_before_rank_0() -> None:
    with reserved_addresses(1) as (master,):
        early = [Background(TcpBackend, rank, 3, master, config=LONG) for rank in (1, 2)]
        backends = [TcpBackend(0, 3, master, config=LONG), *(rank.result() for rank in early)]
        assert run_ranks(backends, talk_to_all) == [None] * 3
        run_ranks(backends, lambda backend: backend.close())


def test_two_groups_may_use_one_address_one_after_the_other() -> None:
    with reserved_addresses(1) as (master,):
        for _ in range(3):
            backends = run_ranks(range(2), lambda rank: TcpBackend(rank, 2, master, config=LONG))
            run_ranks(backends, talk_to_all)  # type: ignore[arg-type]
            run_ranks(backends, lambda backend: backend.close())  # type: ignore[union-attr]


# --- others at the listener -------------------------------------------------------------------------------------------


BAD_CLIENTS: dict[str, bytes | Hello] = {
    "http": b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "silent": b"",
    "half a handshake": bytes(Handshake(member(), Ready()).outgoing[:40]),
    "half a magic": b"RG",
    "another cluster": bytes(Handshake(member(), Ready()).outgoing),
    "a forged cluster": bytes(Handshake(impostor(Credentials.load().namespace), Ready()).outgoing) + bytes(500),
    "encryption off": bytes(Handshake(None, Ready()).outgoing),
    "another version": bytes(handshake_of(9, member(), Ready()).outgoing),
    "meets instead of joining": Meet(1, 3, b"token"),
    "already ready": Ready(),
    "welcomes": Welcome(b"token", [("127.0.0.1", 1)] * 3),
    "rank out of range": Join(3, 3, "127.0.0.1", 1),
    "negative rank": Join(-1, 3, "127.0.0.1", 1),
    "another world size": Join(1, 4, "127.0.0.1", 1),
    "rank 0 once more": Join(0, 3, "127.0.0.1", 1),
}


@pytest.mark.parametrize("bad", BAD_CLIENTS.values(), ids=BAD_CLIENTS)
def test_a_bad_client_neither_breaks_nor_stalls_the_others(group: NewGroup, bad: bytes | Hello) -> None:
    group.send_bad(bad)
    group.start(1)
    group.send_bad(bad)
    group.start(2)
    group.check()


def test_a_port_scanner_neither_breaks_nor_stalls_the_others(group: NewGroup) -> None:
    for _ in range(5):
        group.connect().close()
    group.start(1, 2)
    group.check()


def test_a_hundred_bad_clients_neither_break_nor_stall_the_others(group: NewGroup) -> None:
    bad_clients = list(BAD_CLIENTS.values())
    for number in range(100):
        group.send_bad(bad_clients[number % len(bad_clients)])
        if number == 50:
            group.start(1)
    group.start(2)
    group.check()


@pytest.mark.parametrize(
    ("purpose", "kind", "saying"),
    [
        (BAD_CLIENTS["another world size"], WorldSizeMismatchError, "world size 4, rank 0 with 3"),
        (BAD_CLIENTS["rank out of range"], RefusedError, "ranks are 0 to 2"),
        (BAD_CLIENTS["rank 0 once more"], RankTakenError, "rank 0 has joined already"),
        (BAD_CLIENTS["meets instead of joining"], RefusedError, "rank 0 of a group that forms"),
        (
            Join(1, 3, "127.0.0.1", 1, group="job 2"),
            RefusedError,
            "rank 1 belongs to job 2, and this is rank 0 of job 1",
        ),
    ],
)
def test_who_is_refused_is_told_why(group: NewGroup, purpose: Hello, kind: type[RefusedError], saying: str) -> None:
    with pytest.raises(kind, match=saying):
        group.hello(purpose).hear(0, Hello, time.monotonic() + 20)
    group.start(1, 2)
    group.check()


def test_a_wrong_world_size_is_an_error_of_its_own_and_the_others_go_on(group: NewGroup) -> None:
    with pytest.raises(WorldSizeMismatchError, match="world size 5, rank 0 with 3"):
        group.join(1, world_size=5)
    group.start(1, 2)
    group.check()


def test_a_rank_that_is_taken_is_an_error_of_its_own_and_the_others_go_on(group: NewGroup) -> None:
    first = group.hello(Join(1, 3, "127.0.0.1", 1))
    second = group.hello(Join(1, 3, "127.0.0.1", 1))
    with pytest.raises(RankTakenError, match="rank 1 is taken by 127"):
        second.hear(0, Hello, time.monotonic() + 20)
    first.close()  # it dies before the welcome, and the seat is free again
    group.start(1, 2)
    group.check()


def test_a_rank_that_dies_before_the_welcome_may_come_again(group: NewGroup) -> None:
    for _ in range(3):
        group.hello(Join(1, 3, "127.0.0.1", 1)).close()
    group.start(1, 2)
    group.check()


# --- groups that do not come together ---------------------------------------------------------------------------------


def test_a_missing_rank_is_named_at_every_rank_with_who_was_refused(failing: NewGroup) -> None:
    failing.connect(b"GET / HTTP/1.1\r\n\r\n")
    [waiting] = failing.start(1)
    with pytest.raises(RendezvousTimeoutError, match=r"missing: rank 2\b") as caught:
        failing.host()
    assert caught.value.missing == (2,)
    assert isinstance(caught.value, TimeoutError)
    assert "refused: 127.0.0.1:" in str(caught.value)
    assert "not Ringfort: it began with b'GET / HT" in str(caught.value)
    with pytest.raises(RefusedError, match="missing: rank 2"):
        waiting.result()


def test_a_missing_rank_0_is_named() -> None:
    with (
        reserved_addresses(1) as (master,),
        pytest.raises(RendezvousTimeoutError, match="looking for rank 0") as caught,
    ):
        TcpBackend(1, 2, master, config=DistributedConfig(timeout=0.2))
    assert f"{master}: Connection refused" in str(caught.value)
    assert caught.value.missing == (0,)


def test_an_unknown_host_is_said_in_words() -> None:
    with pytest.raises(RendezvousTimeoutError, match=r"Unknown host 'no-such-host\.invalid'"):
        TcpBackend(1, 2, "no-such-host.invalid:29500", config=DistributedConfig(timeout=0.2))
    with pytest.raises(TransportError, match=r"Unknown host 'no-such-host\.invalid'"):
        TcpBackend(0, 2, "no-such-host.invalid:29500", config=DistributedConfig(timeout=0.2))


def test_a_port_in_use_is_said_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(TransportError, match="the port is in use"):
        TcpBackend(0, 2, format_address(*other.getsockname()), config=SHORT)


def test_something_else_at_rank_0s_address_is_said_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        joining = Background(TcpBackend, 1, 2, format_address(*other.getsockname()), config=LONG)
        with other.accept()[0] as sock:
            sock.sendall(b"220 mail.example.org ESMTP\r\n")
            with pytest.raises(DistributedError, match="not Ringfort: it began with b'220 mail"):
                joining.result()


def test_a_rank_that_cannot_be_reached_fails_the_group_for_all(failing: NewGroup) -> None:
    """Rank 1 says that it listens where nobody does."""
    with reserved_addresses(1) as (nowhere,):
        connection = failing.hello(Join(1, 3, *parse_address(nowhere)))
        [waiting] = failing.start(2, config=SHORT)
        assert connection.hear(0, Welcome, time.monotonic() + 20)
        for rank in (waiting.result, failing.host):
            with pytest.raises(DistributedError, match=r"rank 1\b"):
                rank()


@pytest.mark.parametrize("gone", ["silent", "closed"])
def test_a_rank_that_stops_after_the_welcome_fails_the_group_for_all(failing: NewGroup, gone: str) -> None:
    connection = failing.hello(Join(2, 3, "127.0.0.1", 1))
    [waiting] = failing.start(1, config=SHORT)
    assert connection.hear(0, Welcome, time.monotonic() + 20)
    if gone == "closed":
        connection.close()
    for rank in (waiting.result, failing.host):
        with pytest.raises(DistributedError, match=r"rank 2\b"):
            rank()


@pytest.mark.parametrize(
    ("kind", "arguments", "saying"),
    [
        (InvalidWorldSizeError, (0, 0, "a:1"), "world_size=0"),
        (InvalidWorldSizeError, (0, -1, "a:1"), "world_size=-1"),
        (InvalidWorldSizeError, (0, 2.0, "a:1"), "world_size=2.0"),
        (InvalidWorldSizeError, (0, True, "a:1"), "world_size=True"),
        (InvalidRankError, (2, 2, "a:1"), "rank=2"),
        (InvalidRankError, (-1, 2, "a:1"), "rank=-1"),
        (InvalidRankError, ("0", 2, "a:1"), "rank='0'"),
        (ConfigError, (0, 2), "master=None"),
        (ConfigError, (0, 2, "host"), "master='host'"),
        (ConfigError, (0, 2, "host:0"), "master='host:0'"),
        (ConfigError, (0, 2, "host:65536"), "master='host:65536'"),
        (ConfigError, (0, 2, "::1:29500"), "master='::1:29500'"),
    ],
)
def test_wrong_arguments_raise_at_once(
    kind: type[DistributedError], arguments: tuple[object, ...], saying: str
) -> None:
    with pytest.raises(kind) as caught:
        TcpBackend(*arguments)  # type: ignore[arg-type]
    assert saying in str(caught.value)


def test_a_world_of_one_needs_no_address_and_opens_nothing() -> None:
    with TcpBackend(0, 1) as backend:
        backend.barrier()


def test_a_timeout_may_be_longer_than_any_clock_counts() -> None:
    with tcp_group(2, DistributedConfig(timeout=1e300)) as backends:
        assert run_ranks(backends, talk_to_all) == [None, None]


# --- what members say out of turn -------------------------------------------------------------------------------------


def test_a_welcome_to_another_number_of_ranks_is_none() -> None:
    listener = Listener(Credentials.load(), listen("127.0.0.1", 0))
    deadline = time.monotonic() + 20
    joining = Background(TcpBackend, 1, 3, format_address(*listener.address), config=LONG)
    while not (accepted := listener.wait(deadline)):
        assert time.monotonic() < deadline
    accepted[0].say(Welcome(b"token", [("", 0), ("127.0.0.1", 1)]), deadline)
    with pytest.raises(ProtocolError, match="Invalid welcome from rank 0: it is for another number of ranks"):
        joining.result()
    with pytest.raises(
        RefusedError, match="Invalid welcome from rank 0: it is for another number of ranks"
    ):  # it has said so
        accepted[0].hear(1, Hello, deadline)
    accepted[0].close()
    listener.close()


@pytest.mark.parametrize("group", [2], indirect=True)
def test_a_rank_that_is_not_ready_fails_the_group(group: NewGroup) -> None:
    connection = group.hello(Join(1, 2, "127.0.0.1", 1))
    assert connection.hear(0, Welcome, time.monotonic() + 20)
    connection.say(Join(1, 2, "127.0.0.1", 1), time.monotonic() + 20)
    with pytest.raises(ProtocolError, match="Unexpected message from rank 1: Join, not Ready"):
        group.host()
    with pytest.raises(RefusedError, match="Unexpected message from rank 1: Join, not Ready"):
        connection.hear(0, Hello, time.monotonic() + 20)
    connection.close()


# --- at the listeners of the other ranks ------------------------------------------------------------------------------

TOKEN = bytes(16)


class Meeting:
    """Rank 1 of four, which lets in those above."""

    def __init__(self) -> None:
        self.listener = Listener(member(), listen("127.0.0.1", 0))
        self.connections: dict[int, Connection] = {}
        self.terms = Terms.begin(20, member(), Machine())
        self._stack = ExitStack()
        self.accepting = Background(accept_higher, self.listener, Meet(1, 4, TOKEN), self.connections, self.terms)

    def connect(self, rank: int) -> Connection:
        """A rank that is let in."""
        return self._keep(connect_lower(1, [self.listener.address], Meet(rank, 4, TOKEN), self.terms))

    def hello(self, purpose: Hello) -> Connection:
        """A member that connects for `purpose`."""
        sock = self._stack.enter_context(socket.create_connection(self.listener.address))
        return self._keep(run(Connection.initiate(sock, member(), purpose, "rank 1"), self.terms.deadline))

    def _keep(self, connection: Connection) -> Connection:
        self._stack.callback(connection.close)
        return connection

    def close(self) -> None:
        self._stack.close()
        for connection in self.connections.values():
            connection.close()
        self.listener.close()


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    meeting = Meeting()
    yield meeting
    meeting.close()


@pytest.mark.parametrize(
    ("purpose", "kind", "saying"),
    [
        (Join(3, 4, "", 1), RefusedError, "join a new group at rank 0"),
        (Meet(3, 5, TOKEN), WorldSizeMismatchError, "rank 3 was started with 5 ranks, rank 1 with 4"),
        (Meet(3, 4, bytes(15) + b"x"), RefusedError, "belongs to another group"),
        (Meet(0, 4, TOKEN), RefusedError, "rank 0 does not connect to rank 1"),
        (Meet(1, 4, TOKEN), RefusedError, "rank 1 does not connect to rank 1"),
        (Meet(4, 4, TOKEN), RefusedError, "rank 4 does not connect to rank 1"),
        (Meet(2, 4, TOKEN), RankTakenError, "rank 2 is taken"),
    ],
    ids=["joins", "world size", "token", "lower", "itself", "out of range", "taken"],
)
def test_who_does_not_belong_is_told_why_by_every_rank(
    meeting: Meeting, purpose: Hello, kind: type[RefusedError], saying: str
) -> None:
    meeting.connect(2)
    with pytest.raises(kind, match=saying):
        meeting.hello(purpose).hear(1, Hello, meeting.terms.deadline)
    meeting.connect(3)
    meeting.accepting.result()
    assert sorted(meeting.connections) == [2, 3]


def test_a_rank_that_dies_before_all_are_there_may_come_again(meeting: Meeting) -> None:
    for _ in range(3):
        meeting.connect(2).close()
    meeting.connect(2)
    meeting.connect(3)
    meeting.accepting.result()
    assert sorted(meeting.connections) == [2, 3]


def test_a_ranks_place_is_for_the_machine_that_came_to_rank_0_as_that_rank() -> None:
    """Whoever else has the secret and even the token is refused, and the rank still gets in."""
    listener = Listener(member(), listen("127.0.0.1", 0))
    terms = Terms.begin(20, member(), Machine())
    rank = Terms.begin(20, member(), Machine())
    keys = [b"", b"", rank.credentials.identity.public_key]
    connections: dict[int, Connection] = {}
    accepting = Background(accept_higher, listener, Meet(1, 3, TOKEN), connections, terms, keys)
    with pytest.raises(RefusedError, match="rank 2 has joined at rank 0 from another machine"):
        connect_lower(1, [listener.address], Meet(2, 3, TOKEN), Terms.begin(20, member(), Machine()))
    connection = connect_lower(1, [listener.address], Meet(2, 3, TOKEN), rank)
    accepting.result()
    assert connections[2].identity == keys[2]
    for each in (connection, *connections.values()):
        each.close()
    listener.close()


def test_whoever_answers_in_a_ranks_place_from_another_machine_is_not_taken_for_it() -> None:
    listener = Listener(member(), listen("127.0.0.1", 0))
    terms = Terms.begin(20, member(), Machine())
    connections: dict[int, Connection] = {}
    accepting = Background(accept_higher, listener, Meet(1, 3, TOKEN), connections, terms)
    keys = [b"", member().identity.public_key, b""]
    with pytest.raises(HandshakeError, match="Another machine answers at the address of rank 1"):
        connect_lower(1, [listener.address], Meet(2, 3, TOKEN), terms, keys)
    accepting.result()
    connections[2].close()
    listener.close()


def test_rank_0_tells_every_rank_who_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[bytes]] = []
    say = Connection.say

    def listen_in(connection: Connection, said: Hello, deadline: float) -> None:
        told.extend([said.identities] if isinstance(said, Welcome) else [])
        say(connection, said, deadline)

    monkeypatch.setattr(Connection, "say", listen_in)
    nodes = [member() for _ in range(3)]
    with reserved_addresses(1) as (master,):
        made = run_ranks(range(3), lambda rank: TcpBackend(rank, 3, master, config=LONG, credentials=nodes[rank]))
    for backend in results(made):
        backend.close()
    assert told == [[b"", *(node.identity.public_key for node in nodes[1:])]] * 2


class Behind:
    """A listener whose first client is returned only after it has gone."""

    def __init__(self, listener: Listener, gone: Connection) -> None:
        self._listener = listener
        self._gone = [gone]

    def wait(self, deadline: float) -> list[Connection]:
        return [self._gone.pop()] if self._gone else self._listener.wait(deadline)

    def __getattr__(self, name: str) -> object:
        return getattr(self._listener, name)


def test_a_rank_that_is_gone_before_it_is_answered_may_come_again() -> None:
    listener = Listener(member(), listen("127.0.0.1", 0))
    terms = Terms.begin(20, member(), Machine())
    sock = socket.create_connection(listener.address)
    handshake = Background(run, Connection.initiate(sock, member(), Meet(2, 4, TOKEN), "rank 1"), terms.deadline)
    while not (accepted := listener.wait(terms.deadline)):
        assert not terms.is_over
    handshake.result()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()  # with a reset: what is written now fails
    connections: dict[int, Connection] = {}
    behind = Behind(listener, accepted[0])
    accepting = Background(accept_higher, behind, Meet(1, 4, TOKEN), connections, terms)
    ranks = [connect_lower(1, [listener.address], Meet(rank, 4, TOKEN), terms) for rank in (3, 2)]
    accepting.result()
    assert sorted(connections) == [2, 3]
    for connection in (*ranks, *connections.values()):
        connection.close()
    listener.close()


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("master", "local", "listens"),
    [
        ("server", "10.0.0.2", "10.0.0.2"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("::1", "::1", "::1"),
        ("server", "127.0.1.1", ""),  # as Debian resolves a machine's own name
    ],
)
def test_a_rank_listens_on_the_interface_that_leads_to_rank_0(master: str, local: str, listens: str) -> None:
    assert listening_host(master, local) == listens


@pytest.mark.parametrize(
    ("told", "mine", "found"),
    [
        ("10.0.0.3", ("10.0.0.2", 1), "10.0.0.3"),
        ("127.0.0.1", ("10.0.0.2", 1), "rank-0"),  # of rank 0's machine
        ("127.0.0.1", ("127.0.0.1", 1), "127.0.0.1"),
        ("fe80::9", ("fe80::2", 1, 0, 3), "fe80::9%3"),
        ("FE80::9", ("fe80::2", 1, 0, 3), "FE80::9%3"),
        ("fe80::9%eth7", ("fe80::2", 1, 0, 3), "fe80::9%3"),  # eth7 is the name of it over there
        ("fe80::9", ("10.0.0.2", 1), "fe80::9"),
        ("::1", ("fe80::2", 1, 0, 3), "rank-0"),
    ],
)
def test_an_address_is_used_as_it_is_seen_from_here(told: str, mine: tuple[object, ...], found: str) -> None:
    master = SimpleNamespace(getsockname=lambda: mine, getpeername=lambda: ("rank-0", 1))
    assert reachable_from(master, (told, 5)) == (found, 5)  # type: ignore[arg-type]
