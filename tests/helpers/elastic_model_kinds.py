"""Random histories of elastic_model.py about one danger each, which comes rarely in all the others."""

from __future__ import annotations

from typing import Any

from ringfort.training.elastic.protocol import Result
from tests.helpers.elastic_model import History, Peer
from tests.helpers.elastic_numbers import SCALED


class Seating(History):
    """A member alone seats two learners, who are the majority then, and loses power: where it matters most that nobody
    is seated while a step is pending."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, events=400)
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
        super().__init__(seed)
        self.mishaps, self.damage = 0.06, 0.9
        self.kinds = ["cut", "cut", "heal", "heal", "start"]

    def copied(self, peer: Peer, copy: Any) -> Any:
        """Reductions arrive as they are, and so do the states that found a branch."""
        return super().copied(peer, copy) if isinstance(copy, Result) and not copy.is_state else copy


class Scaled(History):
    """The samples of a step grow with the members. Members come and go all the time, mostly in the middle of a step."""

    data = SCALED

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.mishaps = self.random.choice([0.012, 0.03])
        self.kinds = ["kill", "start", "start", "cut", "heal", "save"]
