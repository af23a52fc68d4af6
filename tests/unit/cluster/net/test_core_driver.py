"""The driver carries out what the core instructs, in order, and keeps its timer going."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from ringfort.cluster.core.events import Close, ClusterEvent, Instruction, Learn, Notify, Persist, Send, Waiting
from ringfort.cluster.core.peer import PeerCore
from ringfort.cluster.core.peer_messages import Commit, Member, Votes
from ringfort.cluster.net.core_driver import CoreDriver
from ringfort.cluster.net.host import clock
from ringfort.config import AutoDiscoveryConfig


class Parts:
    """A driver and what it did."""

    def __init__(self, on_event: Callable[[ClusterEvent], None] = lambda _: None) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.core = PeerCore(Member("n.a"), AutoDiscoveryConfig(), clock())
        self.driver = CoreDriver(
            self.core,
            send=lambda link, message: self.done.append(("send", link, message)),
            close=lambda link: self.done.append(("close", link)),
            learn=lambda peer, addresses, introducer: self.done.append(("learn", peer, introducer)),
            persist=lambda votes: self.done.append(("persist", votes)),
            fence=lambda fence: self.done.append(("fence", fence.epoch)),
            publish=lambda event: (self.done.append(("event", str(event))), on_event(event))[1],
            changed=lambda: self.done.append(("changed",)),
            before_tick=lambda: self.done.append(("before tick",)),
        )


def run(work: Callable[[], None], seconds: float = 0.0) -> None:
    async def in_loop() -> None:
        work()
        if seconds:
            await asyncio.sleep(seconds)

    asyncio.run(in_loop())


def test_instructions_are_carried_out_in_order_and_events_come_last() -> None:
    parts = Parts()
    instructions: list[Instruction] = [
        Notify(Waiting("two more")),
        Persist(Votes(3)),
        Send(1, Commit(3)),
        Close(1, "done"),
        Learn("n.b", ("10.0.0.2:1",), "n.c"),
    ]
    run(lambda: parts.driver.carry_out(instructions))
    parts.done = [one for one in parts.done if one != ("before tick",)][:6]
    assert parts.done == [
        ("persist", Votes(3)),
        ("send", 1, Commit(3)),
        ("close", 1),
        ("learn", "n.b", "n.c"),
        ("changed",),
        ("event", "waiting: two more"),
    ]


def test_a_subscriber_may_call_the_core_again() -> None:
    parts = Parts(lambda event: parts.driver.call(parts.core.hold, True))
    run(lambda: parts.driver.carry_out([Notify(Waiting("two more"))]))
    assert parts.done.count(("changed",)) == 2


def test_the_timer_ticks_until_the_core_is_over() -> None:
    parts = Parts()
    run(lambda: parts.driver.call(parts.core.tick), 0.5)
    assert parts.done.count(("before tick",)) >= 2
    parts.done.clear()
    run(lambda: parts.driver.call(parts.core.leave), 0.5)
    assert ("before tick",) not in parts.done


def test_a_tick_that_fails_is_logged_and_repeated(caplog: pytest.LogCaptureFixture) -> None:
    parts, tick, ticks = Parts(), Parts().core.tick, list[float]()

    def faulty(now: float) -> list[Instruction]:
        ticks.append(now)
        if len(ticks) == 2:
            raise RuntimeError("a fault")
        return tick(now)

    parts.core.tick = faulty  # type: ignore[method-assign]
    run(lambda: parts.driver.call(faulty), 1.0)
    assert len(ticks) > 2
    assert "A tick of the control service failed" in caplog.text
