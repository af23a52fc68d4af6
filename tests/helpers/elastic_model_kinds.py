"""Random histories of elastic_model.py about one danger each, which comes rarely in all the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringfort.training.elastic.protocol import Result
from tests.helpers.elastic_model import History, Peer
from tests.helpers.elastic_numbers import SCALED, few_hosts


class Seating(History):
    """A member alone seats two learners, who are the majority then, and loses power: where it matters most that nobody
    is seated while a step is pending."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, events=400, hosts=few_hosts)
        self.hosts = 3
        self.votes_on_disk = {host: [] for host in range(self.hosts)}
        self.mishaps, self.staleness, self.cruelty = 0.02, 1.0, 0.5
        self.kinds = ["start"]

    def begin(self) -> None:
        """Only one is there."""
        self.start(0)


class Sending(History):
    """The network is cut all the time, and the bad host damages what it is sent in recovery: where it matters most that
    such a result is never void."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, hosts=few_hosts)
        self.mishaps, self.damage = 0.06, 0.9
        self.kinds = ["cut", "cut", "heal", "heal", "start"]

    def copied(self, peer: Peer, copy: Any) -> Any:
        """Reductions arrive as they are, and so do the states that found a branch."""
        return super().copied(peer, copy) if isinstance(copy, Result) and not copy.is_state else copy


class Scaled(History):
    """The samples of a step grow with the members. Members come and go all the time, mostly in the middle of a step."""

    data = SCALED

    def __init__(self, seed: int) -> None:
        super().__init__(seed, hosts=few_hosts)
        self.mishaps = self.random.choice([0.012, 0.03])
        self.kinds = ["kill", "start", "start", "cut", "heal", "save"]


class Meeting(History):
    """Two runs of one name meet. A member of one has sealed a step alone, gives way to the other run, and loses that:
    where it matters most that nobody repeats the steps of a state that was given up.

    These histories promise no progress. If the member that is behind holds a result, that step comes first. It is half
    of its last epoch, without the lowest id, and the other half is a learner now, which is seated only when nothing is
    held. They wait until one of the two processes is started again: that one is known to have ended then.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, events=300)
        self.hosts = 3
        self.votes_on_disk = {host: [] for host in range(self.hosts)}
        self.damage = 0.0

    def begin(self) -> None:
        """Hosts 0 and 1 begin a run, and host 2 another. Host 1 is cut off, and host 0 goes on."""
        super().begin()
        alone, behind, other = self.living()
        self.cuts = {frozenset({0, 2}), frozenset({1, 2})}
        self.live(lambda: alone.epoch is not None and alone.epoch == behind.epoch and alone.replica.mark.step > 0)
        self.cuts.add(frozenset({0, 1}))
        self.live(lambda: behind.replica.mark.step < alone.replica.mark.step < other.replica.mark.step)
        self.cuts.clear()
        self.live(lambda: alone.replica.mark.branch == other.replica.mark.branch)
        other.alive, other.script = False, None
        self.departed[other.id] = other.voter.votes

    def live(self, is_reached: Callable[[], bool]) -> None:
        """Let things happen, but no faults, until something is reached or becomes unlikely."""
        for _ in range(600):
            if is_reached():
                return
            self.event(faults=False)
