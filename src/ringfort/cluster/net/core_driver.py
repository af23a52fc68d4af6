"""`CoreDriver`: tells a `PeerCore` what happens, carries out its instructions and keeps its timer. It decides
nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Concatenate, Final, ParamSpec

from ringfort.cluster.core.events import Close, ClusterEvent, Fence, Instruction, Learn, Notify, Persist, Send
from ringfort.cluster.core.peer import PeerCore
from ringfort.cluster.core.peer_messages import AnyMessage, Votes
from ringfort.cluster.net.host import clock

_log = logging.getLogger(__name__)

P = ParamSpec("P")

_AFTER_FAILURE: Final = 0.2
"""Seconds between a tick that failed and the next one."""


@dataclass(eq=False)
class CoreDriver:
    """Lives in the control loop. The callbacks carry out the instructions."""

    core: PeerCore
    send: Callable[[int, AnyMessage], None]
    close: Callable[[int], None]
    learn: Callable[[str, Sequence[str], str], None]
    persist: Callable[[Votes], None]
    fence: Callable[[Fence], None]
    publish: Callable[[ClusterEvent], None]
    changed: Callable[[], object] = lambda: None
    """Called after the instructions and before their events, because the core's state may have changed."""
    before_tick: Callable[[], None] = lambda: None
    """Called before every heartbeat."""
    _timer: asyncio.TimerHandle | None = None

    def call(
        self, method: Callable[Concatenate[float, P], list[Instruction]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call a method of the core with the current time and carry out what it returns."""
        self.carry_out(method(clock(), *args, **kwargs))

    def carry_out(self, instructions: Sequence[Instruction]) -> None:
        """Carry out the instructions in order, then publish their events: a subscriber may call the core again."""
        events: list[ClusterEvent] = []
        for instruction in instructions:
            match instruction:
                case Send(link=link, message=message):
                    self.send(link, message)
                case Close(link=link):
                    self.close(link)
                case Learn(peer=peer, addresses=addresses, introducer=introducer):
                    self.learn(peer, addresses, introducer)
                case Persist(votes=votes):
                    self.persist(votes)
                case Fence():
                    self.fence(instruction)
                case Notify(event=event):
                    events.append(event)
        self._set_timer()
        self.changed()
        for event in events:
            self.publish(event)

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        self.stop()
        if not self.core.is_over:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, self.core.deadline - clock()), self._tick)

    def _tick(self) -> None:
        try:
            self.before_tick()
            self.call(self.core.tick)
        except Exception:
            # Logged, and tried again: without its timer a node would send no heartbeats and notice no losses.
            _log.exception("A tick of the control service failed; it will be repeated")
            self._timer = asyncio.get_running_loop().call_later(_AFTER_FAILURE, self._tick)
