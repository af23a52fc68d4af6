"""Calls between agents, over every kind of group."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ringfort import Backend, GlooBackend
from ringfort.config import DistributedConfig, RpcConfig
from ringfort.errors import (
    FunctionNotFoundError,
    InvalidArgumentError,
    InvalidMessageError,
    InvalidRankError,
    NoConnectionError,
    PeerLostError,
    RemoteError,
    RpcError,
    RpcNoConnectionError,
    RpcOverloadedError,
    RpcPeerLostError,
    RpcTimeoutError,
)
from ringfort.rpc.agent import RpcAgent, RpcFuture
from ringfort.rpc.outbound import Outbound
from ringfort.testing.groups import (
    GroupFactory,
    closing_all,
    simulated_group,
    sub_group_of,
    tcp_group,
    with_settings,
)
from ringfort.testing.ranks import results, run_ranks
from tests.helpers.agents import agents, until

GROUPS: dict[str, GroupFactory] = {
    "simulated": simulated_group,
    "tcp": tcp_group,
    "not encrypted": with_settings(simulated_group, encryption="off"),
    "sub-group": sub_group_of(tcp_group),
}


@pytest.fixture(params=list(GROUPS), ids=list(GROUPS))
def group(request: pytest.FixtureRequest) -> GroupFactory:
    return GROUPS[request.param]


def serve(agent: RpcAgent) -> None:
    """The functions that most tests call."""

    @agent.rpc
    def add(a: float, b: float = 1.0) -> float:
        return a + b

    @agent.rpc
    def double(x: Any) -> Any:
        return x * 2

    @agent.rpc
    async def later(value: Any) -> Any:
        await asyncio.sleep(0)
        return value

    @agent.rpc
    def fail(text: str) -> None:
        raise KeyError(text)

    @agent.rpc
    def ask_back(name: str, value: float) -> Any:
        call = agent.current_call()
        assert call is not None
        return agent.rpc_sync(call.peer, name, value)

    agent.register("reverse", lambda data: data[::-1], raw=True)


@pytest.fixture
def three(group: GroupFactory) -> Iterator[list[RpcAgent]]:
    with agents(3, group) as made:
        for agent in made:
            serve(agent)
        yield made


def test_every_rank_calls_every_rank(three: list[RpcAgent]) -> None:
    for caller in three:
        for rank in range(3):
            assert caller.rpc_sync(rank, "add", 1, b=rank) == 1 + rank
            assert caller.rpc_sync(f"rank{rank}", "later", {"a": [1, None]}) == {"a": [1, None]}
            assert caller.rpc_sync(rank, "reverse", b"abc") == b"cba"
            np.testing.assert_array_equal(caller.rpc_sync(rank, "double", np.arange(100_000)), np.arange(0, 200_000, 2))
    assert three[0].rpc_sync(1, "ask_back", "add", 5) == 6


def test_many_calls_at_once_come_back_to_who_made_them(three: list[RpcAgent]) -> None:
    futures = {
        (caller.rank, rank, n): caller.rpc_async(rank, "later" if n % 2 else "double", n)
        for n in range(60)
        for caller in three
        for rank in range(3)
    }
    for (_, _, n), future in futures.items():
        assert future.result(20) == (n if n % 2 else 2 * n)


def test_what_a_function_raises_is_told_with_its_traceback(three: list[RpcAgent]) -> None:
    with pytest.raises(RemoteError, match="Rank 1 raised KeyError: 'why'") as caught:
        three[0].rpc_sync(1, "fail", "why")
    assert (caught.value.type_name, caught.value.peer) == ("KeyError", 1)
    assert "raise KeyError(text)" in caught.value.traceback
    assert "raise KeyError(text)" in str(caught.value.__cause__)


def test_requests_that_cannot_be_run_are_refused_in_words(three: list[RpcAgent]) -> None:
    agent = three[0]
    with pytest.raises(FunctionNotFoundError, match="has no function 'nothing'; it has add, ask_back") as caught:
        agent.rpc_sync(1, "nothing")
    assert "add" in caught.value.known
    with pytest.raises(InvalidMessageError, match="add: a: Expected `float`, got `str`"):
        agent.rpc_sync(1, "add", "one")
    with pytest.raises(InvalidMessageError, match="missing a required argument"):
        agent.rpc_sync(1, "add")
    with pytest.raises(InvalidMessageError, match="bytes"):
        agent.rpc_sync(1, "reverse", "text")
    with pytest.raises(InvalidMessageError, match="cannot be sent"):
        agent.rpc_sync(1, "later", object())
    with pytest.raises(InvalidRankError):
        agent.rpc_sync(3, "add", 1)
    with pytest.raises(InvalidArgumentError, match="rank0, rank1, rank2"):
        agent.rpc_sync("nobody", "add", 1)
    with pytest.raises(InvalidArgumentError):
        agent.rpc_sync(1, "add", 1, timeout=-1)
    assert agent.rpc_sync(1, "add", 1) == 2


def test_a_result_that_cannot_be_sent_is_an_error_of_the_call(three: list[RpcAgent]) -> None:
    three[1].register("odd", object)
    with pytest.raises(InvalidMessageError, match="cannot be sent"):
        three[0].rpc_sync(1, "odd")


def test_a_timeout_ends_the_call_and_the_work_on_it(three: list[RpcAgent]) -> None:
    begun, ended = threading.Event(), threading.Event()

    @three[1].rpc
    async def hang() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    @three[1].rpc
    def loop() -> None:
        call = three[1].current_call()
        assert call is not None
        while not call.is_cancelled:
            pass
        ended.set()
        call.check()

    for name in ("hang", "loop"):
        with pytest.raises(RpcTimeoutError, match=f"{name} on rank 1") as caught:
            three[0].rpc_sync(1, name, timeout=0.2)
        assert caught.value.peer == 1
        assert ended.wait(20)
        ended.clear()
    assert begun.is_set()
    assert three[0].rpc_sync(1, "add", 1) == 2


def test_a_call_that_is_given_up_stops_there_and_in_what_it_called(three: list[RpcAgent]) -> None:
    begun, ended = threading.Event(), threading.Event()

    @three[2].rpc
    async def hang() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    three[1].register("through", lambda: three[1].rpc_sync(2, "hang"))
    future = three[0].rpc_async(1, "through")
    assert begun.wait(20)
    assert future.cancel()
    assert future.cancelled()
    assert ended.wait(20)
    with pytest.raises(CancelledError):
        future.result()
    done = three[0].rpc_async(1, "add", 1)
    assert done.result(20) == 2
    assert not done.cancel()


def test_a_call_that_is_given_up_while_it_waits_for_a_worker_is_forgotten_at_once() -> None:
    with agents(2, config=RpcConfig(workers=1)) as (caller, server):
        begun, gate = threading.Event(), threading.Event()
        server.register("work", lambda _: (begun.set(), gate.wait(20))[1])
        first = caller.rpc_async(1, "work", b"")
        assert begun.wait(20)
        waiting = caller.rpc_async(1, "work", bytes(100_000))
        until(lambda: server.stats().queued == 1, "it has not come")
        assert waiting.cancel()
        until(lambda: server.stats().serving == 1, "it is still served")
        assert server.stats().held_bytes < 1000
        gate.set()
        assert first.result(20)


def test_an_async_function_that_is_given_up_before_it_begins_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with agents(2) as (caller, server):
        serving = server._serving
        begun, gate, ran, spawned = threading.Event(), threading.Event(), threading.Event(), threading.Semaphore(0)
        spawn = serving._spawn

        def told(*arguments: Any) -> None:
            spawn(*arguments)
            spawned.release()

        monkeypatch.setattr(serving, "_spawn", told)

        @server.rpc
        async def block() -> None:
            begun.set()
            gate.wait(20)  # nothing else in that loop goes on

        @server.rpc
        async def never() -> None:
            ran.set()

        server.register("one", lambda: 1)
        first = caller.rpc_async(1, "block")
        assert begun.wait(20)
        second = caller.rpc_async(1, "never")
        for _ in range(2):
            assert spawned.acquire(timeout=20)
        assert second.cancel()
        assert caller.rpc_sync(1, "one") == 1  # the other side has heard of it by now
        gate.set()
        first.result(20)
        until(lambda: not server.stats().serving, "it has not ended")
        assert not ran.is_set()


def test_what_runs_for_a_rank_that_is_lost_is_told_so(three: list[RpcAgent]) -> None:
    caller, server, _ = three
    begun, hangs, ended = threading.Event(), threading.Event(), threading.Semaphore(0)

    @server.rpc
    def loop() -> None:
        call = server.current_call()
        assert call is not None
        begun.set()
        while not call.is_cancelled:
            time.sleep(0.001)
        ended.release()

    @server.rpc
    async def hang() -> None:
        hangs.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.release()

    for name, is_there in (("loop", begun), ("hang", hangs)):
        caller.rpc_async(1, name, timeout=600)
        assert is_there.wait(20)
    caller.drop()
    for _ in range(2):
        assert ended.acquire(timeout=20)


def test_a_call_that_is_made_for_another_has_no_more_time_than_that(three: list[RpcAgent]) -> None:
    @three[2].rpc
    def left() -> float:
        call = three[2].current_call()
        assert call is not None
        return call.time_left

    three[1].register("through", lambda: three[1].rpc_sync(2, "left", timeout=600))
    assert 0 < three[0].rpc_sync(1, "through", timeout=15) <= 15


def test_nothing_more_is_called_for_a_call_that_was_given_up(three: list[RpcAgent]) -> None:
    begun, ended = threading.Event(), Future[Any]()
    three[2].register("hit", lambda: "hit")

    @three[1].rpc
    def late() -> None:
        call = three[1].current_call()
        assert call is not None
        begun.set()
        while not call.is_cancelled:
            time.sleep(0.001)
        try:
            ended.set_result(three[1].rpc_sync(2, "hit"))
        except CancelledError as exc:
            ended.set_result(exc)

    future = three[0].rpc_async(1, "late")
    assert begun.wait(20)
    future.cancel()
    assert isinstance(ended.result(20), CancelledError)


def test_futures_can_be_awaited(three: list[RpcAgent]) -> None:
    async def main() -> Any:
        results = await asyncio.gather(*(three[0].rpc_async(1, "add", n) for n in range(5)))
        with pytest.raises(RemoteError):
            await three[0].rpc_async(2, "fail", "x")
        return results

    assert asyncio.run(main()) == [1, 2, 3, 4, 5]


def test_a_dead_rank_ends_the_calls_to_it_and_no_others(three: list[RpcAgent]) -> None:
    begun, hold = threading.Event(), threading.Event()

    @three[2].rpc
    def hang() -> None:
        begun.set()
        hold.wait(20)

    calls = [three[0].rpc_async(2, "hang") for _ in range(3)]
    assert begun.wait(20)
    hold_open = three[0].rpc_async(1, "later", 3)
    ending = threading.Thread(target=three[2].drop)  # it waits for what it serves
    ending.start()
    until(lambda: not three[0].is_alive(2), "rank 0 has not noticed")
    hold.set()
    ending.join(20)
    for call in calls:
        with pytest.raises(RpcPeerLostError, match="rank 2") as caught:
            call.result(20)
        assert isinstance(caught.value, PeerLostError)
        assert isinstance(caught.value, RpcError)
        assert not caught.value.is_fatal
    assert hold_open.result(20) == 3
    with pytest.raises(RpcNoConnectionError) as gone:
        three[0].rpc_sync(2, "add", 1)
    assert isinstance(gone.value, NoConnectionError)
    until(lambda: not three[1].is_alive(2), "rank 1 has not noticed")
    assert three[0].is_alive(1)
    assert three[0].rpc_sync(1, "add", 1) == 2


def test_an_agent_that_closes_says_so(three: list[RpcAgent]) -> None:
    three[2].close()
    until(lambda: not three[0].is_alive(2), "rank 0 was not told")
    with pytest.raises(RpcNoConnectionError, match="closed its agent"):
        three[0].rpc_sync(2, "add", 1)
    with pytest.raises(RpcNoConnectionError, match="This agent is closed"):
        three[2].rpc_sync(0, "add", 1)
    assert not three[0].join(0.01)
    three[1].close()
    assert three[0].join(20)


# --- references -------------------------------------------------------------------------------------------------------


def test_a_value_stays_until_nobody_holds_it(three: list[RpcAgent]) -> None:
    agent, owner, friend = three
    rref = agent.remote(1, "double", np.arange(5.0))
    assert (rref.owner, rref.is_owner) == (1, False)
    np.testing.assert_array_equal(rref.to_here(), [0, 2, 4, 6, 8])
    assert owner.stats().references == 1
    held: list[Any] = []

    @friend.rpc
    def keep(one: Any) -> None:
        held.append(one)

    @friend.rpc
    def read() -> Any:
        return held[0].to_here()

    agent.rpc_sync(2, "keep", rref)
    del rref
    np.testing.assert_array_equal(agent.rpc_sync(2, "read"), [0, 2, 4, 6, 8])
    assert owner.stats().references == 1
    held.clear()
    until(lambda: owner.stats().references == 0, "the value was not freed")


def test_the_owner_gets_its_own_value_back(three: list[RpcAgent]) -> None:
    agent, owner, _ = three

    @owner.rpc
    def change(rref: Any) -> Any:
        assert rref.is_owner
        rref.local_value()["n"] += 1
        return rref

    rref = agent.remote(1, "later", {"n": 1})
    again = agent.rpc_sync(1, "change", agent.rpc_sync(1, "change", rref))
    assert again.to_here() == rref.to_here() == {"n": 3}
    with pytest.raises(InvalidArgumentError, match="to_here"):
        rref.local_value()
    own = agent.remote(0, "later", [7])
    assert own.to_here() == [7]
    assert own.local_value() == [7]


def test_a_value_that_could_not_be_made_is_an_error_to_all_who_ask(three: list[RpcAgent]) -> None:
    rref = three[0].remote(1, "fail", "why")
    three[2].register("read", lambda one: one.to_here())
    with pytest.raises(RemoteError, match="why"):
        three[0].rpc_sync(2, "read", rref)
    with pytest.raises(RemoteError, match="why"):
        rref.to_here()
    missing = three[0].remote(1, "nothing")
    with pytest.raises(FunctionNotFoundError):
        missing.to_here()


def test_the_dead_hold_nothing(three: list[RpcAgent]) -> None:
    agent, owner, friend = three
    kept: list[Any] = []
    friend.register("keep", kept.append)
    rref = agent.remote(1, "later", 1)
    agent.rpc_sync(2, "keep", rref)
    assert rref.to_here() == 1
    del rref
    friend.drop()
    until(lambda: owner.stats().references == 0, "the value of a dead user was not freed")
    kept.clear()


def test_references_in_messages_that_come_to_nothing_are_let_go(three: list[RpcAgent]) -> None:
    agent, owner, _ = three
    rref = agent.remote(1, "later", 1)
    assert rref.to_here() == 1
    for name, more in (("nothing", []), ("add", []), ("later", [object()])):
        with pytest.raises(RpcError):
            agent.rpc_sync(2, name, rref, *more)
    assert [one.to_here() for one in agent.rpc_sync(2, "later", [rref, rref])] == [1, 1]
    del rref
    until(lambda: owner.stats().references == 0, "a reference was not let go")


# --- map --------------------------------------------------------------------------------------------------------------


def test_map_returns_results_in_order_and_tells_how_far_it_is(three: list[RpcAgent]) -> None:
    seen: list[int] = []
    assert three[0].map("double", range(30), progress=lambda so_far: seen.append(so_far.done)) == list(range(0, 60, 2))
    assert seen == list(range(1, 31))
    assert three[0].map("double", [], workers=[1]) == []
    assert three[0].map("double", [4], workers=["rank0"]) == [8]
    with pytest.raises(RemoteError):
        three[0].map("fail", ["a", "b"])
    with pytest.raises(InvalidArgumentError):
        three[0].map("double", [1], workers=[])


def test_map_gives_the_faster_worker_more(three: list[RpcAgent]) -> None:
    first, release = threading.Event(), threading.Event()

    @three[1].rpc(name="work")
    def slow(n: int) -> int:
        first.set()
        release.wait(20)
        return 1

    three[2].register("work", lambda n: 2)

    def watch(progress: Any) -> None:
        if progress.done == 28:  # all but the two that the slow one has
            release.set()

    done = three[0].map("work", range(30), progress=watch)
    assert done.count(1) == 2
    assert done.count(2) == 28


def test_map_goes_on_without_a_worker_that_is_lost(three: list[RpcAgent]) -> None:
    begun, hold = threading.Event(), threading.Event()

    @three[1].rpc(name="work")
    def hang(n: int) -> int:
        begun.set()
        hold.wait(20)
        return n

    three[2].register("work", lambda n: n)

    def kill() -> None:
        begun.wait(20)
        threading.Timer(0.05, hold.set).start()
        three[1].drop()

    killer = threading.Thread(target=kill)
    killer.start()
    assert three[0].map("work", range(20)) == list(range(20))
    killer.join()
    three[2].drop()
    until(lambda: not three[0].is_alive(2), "rank 0 has not noticed")
    with pytest.raises(RpcPeerLostError):
        three[0].map("work", [1])


# --- bounds: the same over every group, so once -----------------------------------------------------------------------


def test_a_thousand_calls_wait_for_eight_workers_and_all_end() -> None:
    with agents(2) as (caller, server):
        gate, running, most = threading.Event(), [0], [0]
        lock = threading.Lock()

        @server.rpc
        def work(n: int) -> int:
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            gate.wait(20)
            with lock:
                running[0] -= 1
            return n

        futures = [caller.rpc_async(1, "work", n) for n in range(1000)]
        until(lambda: server.stats().queued == 992, "not all have come")
        gate.set()
        assert [future.result(20) for future in futures] == list(range(1000))
        assert most[0] == 8


def test_overload_is_refused_in_words_here_and_there() -> None:
    with agents(2, config=RpcConfig(workers=1, max_queued=4, max_in_flight=16)) as (caller, server):
        gate = threading.Event()
        server.register("work", lambda: gate.wait(20))
        futures: list[RpcFuture] = []

        def call_on() -> None:
            while True:  # those that are refused there make room here
                futures.append(caller.rpc_async(1, "work"))

        with pytest.raises(RpcOverloadedError, match="max_in_flight"):
            call_on()
        until(lambda: sum(future.done() for future in futures) >= len(futures) - 5, "refusals have not come")
        gate.set()
        wait(futures, 20)
        refused = [future for future in futures if future.exception() is not None]
        assert len(futures) - len(refused) >= 5
        assert refused
        for future in refused:
            with pytest.raises(
                RpcOverloadedError, match=r"Rank 1 is overloaded: max_queued=4 requests wait for 1 workers.*call again"
            ):
                future.result()


def test_sizes_are_bounded_on_both_sides_and_for_all_together() -> None:
    config = RpcConfig(max_message_bytes=100_000, max_held_bytes=150_000, workers=1)
    with agents(2, config=config) as (caller, server):
        gate = threading.Event()
        server.register("size", lambda x: (gate.wait(20), len(x))[1])
        server.register("make", lambda n: np.zeros(n, np.uint8))
        with pytest.raises(InvalidMessageError, match="max_message_bytes"):
            caller.rpc_sync(1, "size", bytes(100_100))
        with pytest.raises(InvalidMessageError, match=r"Refused by rank 1: The result has .* max_message_bytes"):
            caller.rpc_sync(1, "make", 100_100)
        first = caller.rpc_async(1, "size", np.zeros(90_000, np.uint8))
        until(lambda: server.stats().held_bytes > 90_000, "it has not come")
        with pytest.raises(RpcOverloadedError, match="max_held_bytes"):
            caller.rpc_sync(1, "size", np.zeros(90_000, np.uint8))
        gate.set()
        assert first.result(20) == 90_000
        assert caller.rpc_sync(1, "size", np.zeros(90_000, np.uint8)) == 90_000


def test_a_flood_of_large_requests_is_refused_and_holds_no_more_memory_than_allowed() -> None:
    limit = 8 << 20
    with agents(2, config=RpcConfig(workers=1, max_message_bytes=4 << 20, max_held_bytes=limit)) as (caller, server):
        gate, most = threading.Event(), 0
        server.register("size", lambda x: (gate.wait(20), len(x))[1])
        x = np.zeros(3 << 20, np.uint8)
        futures = [caller.rpc_async(1, "size", x) for _ in range(100)]
        while sum(future.done() for future in futures) < 98:
            most = max(most, server.stats().held_bytes)
            time.sleep(0.001)
        gate.set()
        wait(futures, 20)
        ends = Counter(type(future.exception()).__name__ for future in futures)
        assert ends == {"NoneType": 2, "RpcOverloadedError": 98}
        assert 0 < most <= limit


def test_an_interrupted_caller_breaks_one_link_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with agents(3) as made:
        for agent in made:
            serve(agent)

        real = Outbound.wrote

        def interrupted(self: Outbound, count: int) -> None:
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            real(self, count)

        monkeypatch.setattr(Outbound, "wrote", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made[0].rpc_async(1, "add", 1)
        monkeypatch.undo()
        until(lambda: not made[0].is_alive(1), "the link that may be out of step is still used")
        until(lambda: not made[1].is_alive(0), "the other side was not told")
        assert made[0].rpc_sync(2, "add", 1) == made[1].rpc_sync(2, "add", 1) == 2


def test_ranks_that_call_each_other_back_do_not_run_out_of_workers() -> None:
    with agents(3, config=RpcConfig(workers=2)) as made:
        for agent in made:

            @agent.rpc
            def bounce(depth: int, agent: Any = None, me: int = agent.rank) -> int:
                if depth == 0:
                    return 1
                return sum(made[me].rpc_sync((me + hop) % 3, "bounce", depth - 1) for hop in (1, 2))

        futures = [agent.rpc_async(rank, "bounce", 4) for agent in made for rank in range(3) for _ in range(4)]
        assert [future.result(60) for future in futures] == [16] * len(futures)


def test_without_workers_the_program_runs_requests_itself() -> None:
    with agents(2, config=RpcConfig(workers=0)) as (caller, server):
        server.register("where", lambda: threading.current_thread().name)
        assert not server.handle_request(0.01)
        future = caller.rpc_async(1, "where")
        assert server.handle_request(20)
        assert future.result(20) == threading.current_thread().name


def test_a_callback_cannot_wait_and_is_told_so() -> None:
    with agents(2) as (caller, server):
        server.register("one", lambda: 1)
        told: Future[Exception | None] = Future()

        def wait_in_it(_: Any) -> None:
            try:
                caller.rpc_sync(1, "one")
            except RpcError as exc:
                told.set_result(exc)
            else:
                told.set_result(None)

        gate = threading.Event()
        server.register("two", lambda: gate.wait(20))
        future = caller.rpc_async(1, "two")
        future.add_done_callback(wait_in_it)
        gate.set()
        assert "use rpc_async" in str(told.result(20))


def test_agents_of_a_group_over_gloo_have_encrypted_connections_of_their_own() -> None:
    torch = pytest.importorskip("torch")
    store = torch.distributed.HashStore()

    @contextmanager
    def gloo_group(world_size: int, config: DistributedConfig) -> Iterator[Sequence[Backend]]:
        ranks = run_ranks(range(world_size), lambda rank: GlooBackend(rank, world_size, store=store, config=config))
        with closing_all(results(ranks)) as backends:
            yield backends

    with agents(3, gloo_group) as made:
        for agent in made:
            serve(agent)
        assert [made[0].rpc_sync(rank, "add", rank) for rank in range(3)] == [1, 2, 3]


def test_names_address_ranks_and_must_differ() -> None:
    with agents(2, names=lambda rank: ("server", "actor")[rank]) as (server, actor):
        server.register("hello", lambda: server.name)
        assert actor.names == ("server", "actor")
        assert actor.rpc_sync("server", "hello") == "server"
    with (
        pytest.raises(InvalidArgumentError, match="rank 1 has this name, and rank 0 has the same name"),
        agents(2, names=lambda rank: "same"),
    ):
        pass


def test_a_world_of_one_calls_itself() -> None:
    with agents(1) as (agent,):
        agent.register("copy", lambda x: x)
        x = np.ones(5000)
        back = agent.rpc_sync(0, "copy", x)
        assert not np.shares_memory(back, x)
        assert agent.map("copy", [1, 2]) == [1, 2]
        assert agent.join(1)


def test_ranks_that_know_nothing_of_each_other_connect_on_the_interfaces_they_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def bare_group(world_size: int, config: DistributedConfig) -> Iterator[Sequence[Backend]]:
        with simulated_group(world_size, config) as backends:
            for backend in backends:
                backend.group.routes = None
            yield backends

    monkeypatch.setenv("RINGFORT_INTERFACES", "127.0.0.1")
    with agents(3, bare_group) as made:
        for agent in made:
            serve(agent)
        assert [made[2].rpc_sync(rank, "add", rank) for rank in range(3)] == [1, 2, 3]
