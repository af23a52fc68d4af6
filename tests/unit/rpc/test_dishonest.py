"""A rank that keeps to no rule: the bounds of the others hold all the same. Over real connections."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import wait

import pytest

from ringfort.config import RpcConfig
from ringfort.errors import InvalidMessageError, RpcOverloadedError, RpcPeerLostError
from ringfort.rpc import values
from ringfort.rpc.agent import RpcAgent, RpcFuture
from ringfort.rpc.outbound import Outgoing
from ringfort.rpc.protocol import (
    FIRST,
    HEADER,
    REFERENCE,
    SIZE,
    Count,
    Head,
    Kind,
    Message,
    Reference,
    pack_cancel,
    pack_count,
)
from ringfort.rpc.references import RRef
from ringfort.rpc.requests import Request, overloaded
from tests.helpers.agents import PATIENCE, agents, until

Buffers = Sequence[bytes | memoryview]


def send(agent: RpcAgent, peer: int, kind: Kind, number: int, buffers: Buffers) -> None:
    """A message, whatever its number and size."""
    agent._network.post(peer, Outgoing(Message(kind, number, buffers)))


def request(agent: RpcAgent, peer: int, buffers: Buffers, *references: Reference) -> RpcFuture:
    """A request that no limit of the sender has been asked about; ends as the receiver answers it."""
    calls = agent._client.calls
    calls._max_in_flight = 1 << 30
    call = calls.open(peer, "a request", PATIENCE)
    call.outgoing = Outgoing(Message(Kind.REQUEST, call.number, buffers, references))
    agent._network.post(peer, call.outgoing)
    return call


def call_of(name: str, *args: object) -> list[bytes | memoryview]:
    """The buffers of an ordinary request."""
    return list(values.Encoded(Request(name, PATIENCE, 0, list(args), {})).buffers)


def test_a_request_above_the_receivers_limit_is_refused_there_and_takes_no_memory() -> None:
    with agents(2, config=RpcConfig(max_message_bytes=100_000, max_held_bytes=1 << 30)) as (caller, server):
        server.register("size", len)
        most = 0
        large = request(caller, 1, call_of("size", bytes(50 << 20)))
        while not large.done():
            most = max(most, server.stats().held_bytes)
        with pytest.raises(InvalidMessageError, match=r"by rank 1: a request of 524\d+ bytes, where .* is 100000"):
            large.result()
        assert most == 0
        assert caller.rpc_sync(1, "size", bytes(90_000)) == 90_000


def test_more_requests_than_twice_what_may_be_in_flight_are_refused_there() -> None:
    with agents(2, config=RpcConfig(workers=1, max_in_flight=4)) as (caller, server):
        gate = threading.Event()
        server.register("work", lambda: gate.wait(PATIENCE))
        futures = [request(caller, 1, call_of("work")) for _ in range(20)]
        until(lambda: sum(future.done() for future in futures) == 12, "those above the bound were not refused")
        assert server.stats().serving == 8
        for future in futures:
            if future.done():
                with pytest.raises(RpcOverloadedError, match="8 calls from this rank, and max_in_flight is 4"):
                    future.result()
        gate.set()
        wait(futures, PATIENCE)
        assert [future.exception() for future in futures[:8]] == [None] * 8
        caller._client.calls._max_in_flight = 4


def test_a_response_of_a_rank_that_was_not_called_is_nobodys() -> None:
    with agents(3) as (caller, server, stranger):
        begun, gate = threading.Event(), threading.Event()
        server.register("work", lambda: (begun.set(), gate.wait(PATIENCE), "right")[2])
        stranger.register("one", lambda: 1)
        future = caller.rpc_async(1, "work")
        assert begun.wait(PATIENCE)
        (number,) = caller._client.calls._calls
        wrong = list(values.Encoded("wrong").buffers)
        assert not caller._client.admit(2, Head(Kind.RESPONSE, number, 10, ()), [])  # it takes no memory
        send(stranger, 0, Kind.RESPONSE, number, wrong)
        assert caller.rpc_sync(2, "one") == 1  # its answer came behind the other
        assert not future.done()
        gate.set()
        assert future.result(PATIENCE) == "right"


def test_a_response_above_the_callers_limit_ends_the_call_and_takes_no_memory() -> None:
    with agents(2, config=RpcConfig(max_message_bytes=100_000)) as (caller, server):
        begun, gate = threading.Event(), threading.Event()
        server.register("work", lambda: (begun.set(), gate.wait(PATIENCE), "late")[2])
        server.register("one", lambda: 1)
        future = caller.rpc_async(1, "work")
        assert begun.wait(PATIENCE)
        (number,) = caller._client.calls._calls
        send(server, 0, Kind.RESPONSE, number, [bytes(100_001)])
        with pytest.raises(InvalidMessageError, match=r"The result of work on rank 1 has 100001 bytes; .* is 100000"):
            future.result(PATIENCE)
        gate.set()
        assert caller.rpc_sync(1, "one") == 1


def part(number: int, *references: Reference) -> bytes:
    """The first frame of a request of 1000 bytes, with five of them."""
    table = SIZE.pack(1000) + b"".join(REFERENCE.pack(*name) for name in references)
    return HEADER.pack(Kind.REQUEST, FIRST, 1, len(references), 0, len(table) + 5, number) + table + b"12345"


@pytest.mark.parametrize("end", ["given up", "lost"])
def test_of_a_request_whose_rest_never_comes_nothing_is_held(end: str) -> None:
    with agents(3) as (caller, server, owner):
        owner.register("one", lambda: 1)
        rref = caller.remote(2, "one")
        assert rref.to_here() == 1
        name = caller._references.name_of(rref)
        assert name is not None
        caller._references.give([name], 1)
        caller._network.post(1, part(99, name))
        until(lambda: server.stats().arriving == 1, "it has not come")
        assert server.stats().held_bytes == 1000
        del rref
        if end == "lost":
            caller.drop()
        else:
            caller._network.post(1, pack_cancel(99))
        until(lambda: not any(server.stats()), f"something is left: {server.stats()}")
        until(lambda: owner.stats().references == 0, "a reference in it was not let go")


def test_references_in_a_request_that_is_refused_are_let_go() -> None:
    with agents(3, config=RpcConfig(max_message_bytes=100_000)) as (caller, _, owner):
        owner.register("one", lambda: 1)
        rref = caller.remote(2, "one")
        assert rref.to_here() == 1
        name = caller._references.name_of(rref)
        assert name is not None
        caller._references.give([name], 1)
        with pytest.raises(InvalidMessageError, match="max_message_bytes"):
            request(caller, 1, [bytes(200_000)], name).result(PATIENCE)
        del rref
        until(lambda: owner.stats().references == 0, "it was not let go")


def test_of_a_request_that_is_refused_at_its_first_frame_the_rest_is_not_sent() -> None:
    with agents(2) as (caller, server):
        server.register("one", lambda: 1)
        link = server._network.links[0]
        with link.reading:  # it reads nothing, so most of the request cannot have left
            future = request(caller, 1, [bytes(100 << 20)])
            outgoing = future.outgoing
            assert outgoing is not None
            (number,) = caller._client.calls._calls
            failure = values.Encoded(overloaded("no"))
            send(server, 0, Kind.ERROR, number, list(failure.buffers))
            with pytest.raises(RpcOverloadedError):
                future.result(PATIENCE)
            assert outgoing.withdrawn
            assert not outgoing.is_over
        assert caller.rpc_sync(1, "one") == 1


# --- an agent that closes ---------------------------------------------------------------------------------------------


def test_a_request_that_comes_while_an_agent_closes_is_not_answered_but_ends() -> None:
    with agents(2) as (caller, server):
        server.register("one", lambda: 1)
        server._serving.close()  # what closing does first
        future = caller.rpc_async(1, "one")
        rref = caller._references.new(1)
        until(lambda: server.stats().references == 1, "what was said after the request has not come")
        assert server.stats().serving == 0
        assert not future.done()
        server.close()
        with pytest.raises(RpcPeerLostError):
            future.result(PATIENCE)
        del rref


# --- references -------------------------------------------------------------------------------------------------------


def test_more_references_than_a_rank_keeps_are_refused_there_and_others_work_when_one_is_dropped() -> None:
    with agents(2, config=RpcConfig(max_references=3)) as (caller, server):
        server.register("value", lambda number: number)
        held = [caller.remote(1, "value", number) for number in range(3)]
        assert [rref.to_here() for rref in held] == [0, 1, 2]
        refused = [caller.remote(1, "value", number) for number in range(5)]
        for rref in refused:
            with pytest.raises(RpcOverloadedError, match="Rank 1 is overloaded: it keeps max_references=3 values"):
                rref.to_here()
            with pytest.raises(InvalidMessageError, match="was refused by its owner, so it cannot be passed on"):
                caller.rpc_sync(1, "value", rref)
        until(lambda: server.stats().references == 3, "what was refused is kept all the same")
        del held[0]
        until(lambda: server.stats().references == 2, "what was let go of is kept all the same")
        assert caller.remote(1, "value", 7).to_here() == 7
        del held, refused, rref
        until(lambda: server.stats().references == 0, "something is kept that nobody holds")


def test_a_rank_that_counts_references_without_end_is_lost_and_nothing_of_it_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ringfort.rpc.owned.SLACK", 10)
    with agents(3, config=RpcConfig(max_references=5)) as (flooder, server, other):
        server.register("one", lambda: 1)
        for number in range(100):
            flooder._network.post(1, pack_count(Count(Reference(1, 0, number), 0, 0, 1)))
        until(lambda: not server.is_alive(0), "it goes on to be heard")
        until(lambda: server.stats().references == 0, "what it asked for is kept")
        assert other.rpc_sync(1, "one") == 1


# --- a rank that dies while it passes a reference on ------------------------------------------------------------------


@pytest.mark.parametrize("owner", [1, 2])
@pytest.mark.parametrize("sent", ["count", "message"])
def test_of_a_reference_that_was_half_passed_on_nothing_is_left(sent: str, owner: int) -> None:
    with agents(4) as all_agents:
        giver = all_agents[0]
        all_agents[owner].register("one", lambda: 1)
        rref = giver.remote(owner, "one")
        assert rref.to_here() == 1
        name = giver._references.name_of(rref)
        assert name is not None
        if sent == "count":
            giver._references.give([name], 1)
        else:
            giver._network.post(1, part(99, name))
            until(lambda: all_agents[1].stats().arriving == 1, "it has not come")
        assert giver.rpc_sync(owner, "one") == 1  # what was sent before has come
        giver.drop()
        del rref
        until(lambda: all_agents[owner].stats().references == 0, "it is kept for nobody")


def test_who_was_given_a_reference_by_a_rank_that_dies_has_it_even_if_the_owner_was_not_told() -> None:
    with agents(4) as (giver, taker, owner, _):
        kept: list[RRef] = []
        taker.register("keep", kept.append)
        owner.register("one", lambda: 1)
        rref = giver.remote(2, "one")
        assert rref.to_here() == 1
        name = giver._references.name_of(rref)
        assert name is not None
        encoded = values.Encoded(Request("keep", PATIENCE, 0, [rref], {}), giver._references.name_of)
        request(giver, 1, encoded.buffers, name).result(PATIENCE)
        giver.drop()
        del rref
        until(lambda: not owner.is_alive(0) and (3, 0) in owner._references.owned.parted, "the loss is not heard of")
        until(lambda: (1, 0) in owner._references.owned.parted, "the loss is not heard of")
        assert kept[0].to_here() == 1
        kept.clear()


@pytest.mark.parametrize("is_asked", [True, False])
def test_what_a_rank_asked_for_that_died_is_made_if_the_owner_has_its_request(is_asked: bool) -> None:
    with agents(3) as (giver, taker, owner):
        kept: list[RRef] = []
        begun, gate = threading.Event(), threading.Event()
        taker.register("keep", kept.append)
        owner.register("work", lambda: (begun.set(), gate.wait(PATIENCE), 1)[2])
        rref = giver.remote(2, "work") if is_asked else giver._references.new(2)
        assert not is_asked or begun.wait(PATIENCE)
        giver.rpc_sync(1, "keep", rref)
        giver.drop()
        del rref
        gate.set()
        if is_asked:
            assert kept[0].to_here() == 1
        else:
            with pytest.raises(InvalidMessageError, match="rank 0, which asked for this value, is lost"):
                kept[0].to_here()
        kept.clear()
