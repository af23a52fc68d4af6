"""The codec beside the wire: the same bits as in turn, and nothing that runs on after an error."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from ringfort import (
    DistributedContext,
    DistributedError,
    GradientCompressor,
    NonFiniteError,
    PeerLostError,
    ProtocolError,
    ReduceOp,
    SimulatedBackend,
)
from ringfort.compression import exchange, quantize
from ringfort.compression.aside import Aside
from ringfort.compression.collective import reduce_scatter
from ringfort.testing.groups import closing_all
from ringfort.testing.ranks import results, run_ranks

SIZE = 2_100_000
"""Elements: for two ranks and int8 three turns; for three ranks and int4 one, with two messages."""
NEVER = 1 << 62


def noise(*seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def codec_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "ringfort-codec"]


@pytest.mark.parametrize(("name", "keeps", "n"), [("int8", True, 2), ("int4", False, 3)])
def test_the_bits_are_those_of_a_codec_in_turn(monkeypatch: pytest.MonkeyPatch, name: str, keeps: bool, n: int) -> None:
    """Sums and what is kept, of all-reduces and of reduce-scatters."""
    threads = set[str]()
    encode = quantize.Integers.encode_chunk

    def watched(*arguments: Any) -> None:
        threads.add(threading.current_thread().name)
        encode(*arguments)

    monkeypatch.setattr(quantize.Integers, "encode_chunk", watched)

    def program(ctx: DistributedContext) -> list[bytes]:
        compressor = GradientCompressor(name, error_feedback=keeps)
        x = ctx.all_reduce(noise(ctx.rank), ReduceOp.MEAN, compression=compressor, name="w")
        part = np.empty(SIZE // n, np.float32)
        operation = reduce_scatter(ctx.group, noise(ctx.rank, 1), part, compression=compressor, name="p")
        ctx.issue(operation, async_op=False)
        residuals = [compressor.residual(one) for one in ("w", "p")]
        return [array.tobytes() for array in (x, part, *residuals) if array is not None]

    def run() -> list[list[bytes]]:
        contexts = [DistributedContext(backend) for backend in SimulatedBackend.create_group(n)]
        with closing_all(contexts):
            return results(run_ranks(contexts, program))

    beside = run()
    assert threads == {"ringfort-codec", *(f"rank-{rank}" for rank in range(n) if n == 2)}
    threads.clear()
    monkeypatch.setattr(exchange, "WORTH_A_THREAD", NEVER)
    assert run() == beside
    assert "ringfort-codec" not in threads
    assert beside[0][0] == beside[1][0]


@pytest.mark.parametrize("fault", ["nan", "lost", "bytes"])
def test_nothing_runs_on_after_an_error(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    backends = SimulatedBackend.create_group(2)
    contexts = [DistributedContext(backend) for backend in backends]
    compressors = [GradientCompressor("int8") for _ in contexts]
    decode, calls = exchange.Exchange._decode, list[int]()

    def spoilt(self: exchange.Exchange, message: Any, *arguments: Any, **more: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            if fault == "lost":
                backends[1].kill()
            elif fault == "bytes":
                message = message[:-1]
        decode(self, message, *arguments, **more)

    monkeypatch.setattr(exchange.Exchange, "_decode", spoilt)

    def program(ctx: DistributedContext) -> None:
        x = noise(ctx.rank)
        if fault == "nan" and ctx.rank:
            x[-1] = np.nan
        try:
            ctx.all_reduce(x, compression=compressors[ctx.rank], name="w", timeout=10)
        except ProtocolError:
            ctx.close()  # as a program does that has failed
            raise

    with closing_all(contexts):
        outcomes = run_ranks(contexts, program)
    if fault == "nan":
        assert [type(one) for one in outcomes] == [NonFiniteError] * 2
    elif fault == "bytes":
        assert [type(one) for one in outcomes].count(ProtocolError) == 1
        assert all(isinstance(one, DistributedError) for one in outcomes)
    else:
        assert isinstance(outcomes[0], PeerLostError)
    assert not codec_threads()
    assert not any(compressor.names for compressor in compressors)


def test_tasks_run_in_their_order() -> None:
    ran = list[int]()
    with Aside(is_threaded=True) as aside:
        number = [aside.add(lambda number=number: ran.append(number)) for number in range(100)][50]
        aside.wait(number)
        assert ran[:50] == list(range(50))
    assert ran == list(range(100))


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_an_error_ends_the_tasks_and_is_raised(is_waited_for: bool) -> None:
    ran = list[int]()

    def fail() -> None:
        with Aside(is_threaded=True) as aside:
            aside.add(lambda: 1 // 0)
            number = aside.add(lambda: ran.append(1))
            if is_waited_for:
                aside.wait(number)

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not ran
    assert not codec_threads()


def test_without_a_thread_to_be_had_the_tasks_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    done = list[int]()
    with Aside(is_threaded=True) as aside:
        aside.wait(aside.add(lambda: done.append(1)))
        assert done == [1]


def test_an_interrupt_of_the_last_wait_drops_the_tasks_that_have_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, done = threading.Event(), threading.Event(), list[int]()

    def first() -> None:
        begun.set()
        go_on.wait(20)

    def interrupted(aside: Aside, number: int) -> None:
        begun.wait(20)
        threading.Timer(0.05, go_on.set).start()
        raise KeyboardInterrupt

    def all_of_them() -> None:
        with Aside(is_threaded=True) as aside:
            aside.add(first)
            for number in range(4):
                aside.add(lambda number=number: done.append(number))

    monkeypatch.setattr(Aside, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        all_of_them()
    assert done == []
    assert codec_threads() == []


def test_an_interrupt_while_one_rank_waits_for_its_codec_ends_the_call_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Aside.wait

    def interrupted(aside: Aside, number: int) -> None:
        if threading.current_thread().name == "rank 1":
            raise KeyboardInterrupt
        wait(aside, number)

    monkeypatch.setattr(Aside, "wait", interrupted)

    def program(ctx: DistributedContext) -> None:
        threading.current_thread().name = f"rank {ctx.rank}"
        x = np.ones(100, np.float32)
        if ctx.rank == 0:
            ctx.all_reduce(x, compression=GradientCompressor("int8", error_feedback=False), timeout=60)
        else:
            with pytest.raises(KeyboardInterrupt):
                ctx.all_reduce(x, compression=GradientCompressor("int8", error_feedback=False), timeout=60)

    with closing_all([DistributedContext(one) for one in SimulatedBackend.create_group(2)]) as contexts:
        lost, interrupted_rank = run_ranks(contexts, program, timeout=20)
    assert isinstance(lost, DistributedError)
    assert interrupted_rank is None


@pytest.mark.parametrize("hosts", [(0,), (0, 1, 1, 0), (0, 1, 0, 1, 1, 0)])
def test_each_rank_gets_its_own_part_however_ranks_are_spread_over_hosts(hosts: tuple[int, ...]) -> None:
    n = len(hosts)

    def program(ctx: DistributedContext) -> float:
        part = np.empty(3, np.float32)
        x = np.repeat(np.arange(n, dtype=np.float32) * 10, 3) + ctx.rank
        operation = reduce_scatter(ctx.group, x, part, compression=GradientCompressor("fp16"), name="p")
        ctx.issue(operation, async_op=False)
        return float(part[0])

    with closing_all([DistributedContext(one) for one in SimulatedBackend.create_group(n, hosts=hosts)]) as contexts:
        found = results(run_ranks(contexts, program))
    assert found == [10 * rank * n + sum(range(n)) for rank in range(n)]
