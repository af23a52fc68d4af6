"""`Story`: what happened in a run of the demo, from what its processes report. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A peer that was killed. What has not happened is None."""

    peer: int
    step: int
    """The last step that the peer has reported."""
    resumed_after: float | None = None
    """Seconds until the others have made the next step."""
    back_at: int | None = None
    """The first step that the peer has reported as a member again."""
    back_after: float | None = None
    """Seconds until then."""


@dataclass(frozen=True)
class Peer:
    """One process, as a person sees it."""

    pid: int = 0
    step: int = 0
    loss: float = 0.0
    samples_per_second: float = 0.0
    state: str = "starting"


class Story:
    """Takes the messages in order; `add` returns what is worth a line."""

    def __init__(self, peers: int) -> None:
        self.peers = {number: Peer() for number in range(peers)}
        self.points: list[tuple[int, float]] = []
        """The loss, at some steps."""
        self.faults: list[Fault] = []
        self.results: dict[int, dict[str, Any]] = {}
        self._size = peers
        self._members = 0
        self._killed_at: dict[int, float] = {}
        self._began: float | None = None
        self._ended = 0.0

    @property
    def seconds(self) -> float:
        """From the first report of a step to the last."""
        return self._ended - (self._began or 0.0)

    @property
    def is_training(self) -> bool:
        """Whether steps are being made."""
        return any(peer.state == "training" for peer in self.peers.values())

    def add(self, number: int, message: dict[str, Any]) -> list[str]:
        """Take a message of a peer. Return what happened, in lines for people."""
        match message["kind"]:
            case "started":
                return list(self._started(number, message))
            case "progress":
                return list(self._progress(number, message))
            case "killed":
                return list(self._killed(number, message["at"]))
            case _:
                self.results[number] = message
                self._change(number, state="done", samples_per_second=0.0)
                return []

    def _change(self, number: int, **changes: Any) -> None:
        self.peers[number] = replace(self.peers[number], **changes)

    def _started(self, number: int, message: dict[str, Any]) -> Iterator[str]:
        self._change(number, pid=message["pid"], state="joining")
        if number in self._killed_at:
            yield f"peer {number} has started again and looks for the others"

    def _killed(self, number: int, at: float) -> Iterator[str]:
        step = self.peers[number].step
        self.faults.append(Fault(number, step))
        self._killed_at[number] = at
        self._change(number, state="killed", samples_per_second=0.0)
        yield f"peer {number} was killed (SIGKILL) after step {step}"

    def _progress(self, number: int, message: dict[str, Any]) -> Iterator[str]:
        step, at, members = message["step"], message["at"], message["members"]
        self._began, self._ended = self._began or at, at
        shown = {name: message[name] for name in ("pid", "step", "loss", "samples_per_second")}
        self._change(number, **shown, state="training" if members else "copying")
        if not self.points or step > self.points[-1][0]:
            self.points.append((step, message["loss"]))
        if not members:
            return
        for index, fault in enumerate(self.faults):
            since = at - self._killed_at[fault.peer]
            if number == fault.peer and fault.back_at is None:
                self.faults[index] = replace(fault, back_at=step, back_after=since)
                yield f"step {step}: peer {number} is back with a copy of the state, after {since:.1f} s"
            elif number != fault.peer and fault.resumed_after is None and members < self._size and since > 0:
                self.faults[index] = replace(fault, resumed_after=since)
                yield f"step {step}: the others continue, {since:.1f} s after the kill (slowed down)"
        if members != self._members and not self.faults and self._size > 1:
            yield f"step {step}: {members} of {self._size} peers train"
        self._members = members
