"""Waits that end: by their time, by what they wait for, and always when they are cancelled."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Awaitable, Callable

import pytest

from ringfort.bootstrap.connection import SocketSteps
from ringfort.cluster.net.waiting import run, within


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("between", range(6))
def test_a_cancel_is_not_forgotten_when_the_work_ends_at_the_same_time(between: int, fails: bool) -> None:
    """Whatever number of turns of the loop lies between the two."""

    async def main() -> bool:
        work: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def wait() -> None:
            await work

        waiting = asyncio.ensure_future(within(60, wait()))
        await turns(3)
        work.set_exception(ConnectionRefusedError()) if fails else work.set_result(None)
        await turns(between)
        was_done = waiting.done()
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled() or was_done
        return was_done

    assert asyncio.run(main()) == (between >= 3)


def test_work_has_ended_when_its_time_is_over() -> None:
    ended = False

    async def work() -> None:
        nonlocal ended
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await turns(2)
            ended = True

    with pytest.raises(TimeoutError):
        asyncio.run(within(0.001, work()))
    assert ended


def test_what_the_work_gives_or_raises_comes_out() -> None:
    async def work(number: int) -> int:
        return 6 // number

    assert asyncio.run(within(60, work(2))) == 3
    with pytest.raises(ZeroDivisionError):
        asyncio.run(within(60, work(0)))


# --- sockets ----------------------------------------------------------------------------------------------------------


class Steps:
    """Waits for a byte on a socket, and remembers how that ended."""

    def __init__(self) -> None:
        self.ended = ""

    def __call__(self, sock: socket.socket) -> SocketSteps[bytes]:
        try:
            yield sock, select.POLLIN
            self.ended = "ready"
            return sock.recv(1)
        except TimeoutError:
            self.ended = "timeout"
            raise
        except GeneratorExit:
            self.ended = "closed"
            raise


def with_pair(scene: Callable[[Steps, socket.socket, socket.socket], Awaitable[None]]) -> None:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        asyncio.run(scene(Steps(), near, far))


def test_steps_continue_when_their_socket_is_ready() -> None:
    async def scene(steps: Steps, near: socket.socket, far: socket.socket) -> None:
        work = asyncio.ensure_future(run(steps(near), 20))
        await asyncio.sleep(0)
        far.send(b"x")
        assert await work == b"x"

    with_pair(scene)


def test_steps_learn_that_their_time_is_over() -> None:
    async def scene(steps: Steps, near: socket.socket, far: socket.socket) -> None:
        with pytest.raises(TimeoutError):
            await run(steps(near), 0.01)
        assert steps.ended == "timeout"

    with_pair(scene)


def test_steps_that_are_cancelled_are_closed() -> None:
    async def scene(steps: Steps, near: socket.socket, far: socket.socket) -> None:
        work = asyncio.ensure_future(run(steps(near)))
        await asyncio.sleep(0)
        work.cancel()
        await asyncio.wait({work})
        assert work.cancelled()
        assert steps.ended == "closed"
        assert not asyncio.get_running_loop().remove_reader(near)

    with_pair(scene)
