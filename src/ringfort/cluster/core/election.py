"""`ElectionManager`: who leads. Pure: peers in sight and messages in, messages and events out.

The leader only proposes; that no two groups ever overlap is the law of membership, whoever leads. So an election may
be quick: a candidate asks those it sees and needs no list of all who exist.

The best candidate stands first, the others after it, in the order of their claims. A claim compares, in this order: not
stuck, in the latest epoch, seniority, work done, peer id. A leader stays while it is in sight; where two meet, the one
with the lesser claim retires. A term is a number and the candidate who opened it, and each peer votes once a number: so
two leaders of one term cannot be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import NamedTuple

from ringfort.cluster.core.events import ClusterEvent
from ringfort.cluster.core.peer_messages import AnyMessage, Campaign, ElectionVote, Lead, Retire, Term
from ringfort.config import ElectionConfig


class ElectionState(Enum):
    """Where a peer stands."""

    IDLE = "idle"
    """Knows no leader, and waits or has voted."""
    CAMPAIGNING = "campaigning"
    MASTER = "master"
    FOLLOWER = "follower"


class ElectionEventKind(Enum):
    """What happened."""

    STARTED = "Started"
    """This peer stands for election."""
    ELECTED_MASTER = "ElectedMaster"
    """This peer leads."""
    NEW_MASTER = "NewMaster"
    """This peer follows another."""
    TIMEOUT = "Timeout"
    """Too few votes came in time."""
    SPLIT_BRAIN = "SplitBrain"
    """Two leaders have met; one of them retires."""


@dataclass(frozen=True)
class ElectionEvent(ClusterEvent):
    """A step of an election."""

    kind: ElectionEventKind
    term: Term
    peer: str
    """The candidate or leader that it is about."""

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.peer} in term {self.term.number}"


class Claim(NamedTuple):
    """What a peer brings to an election; the lowest is the best."""

    stuck: bool
    """Or has stepped down."""
    behind: int
    """Minus the number of the last epoch it was in: who was in the latest is least behind."""
    joined: int
    work: int
    """Minus the work done."""
    peer: str


class ElectionManager:
    """One peer's part in elections. After each call, take what is in `outbox` and `events` and empty them."""

    def __init__(self, me: str, config: ElectionConfig | None = None, now: float = 0.0) -> None:
        self.me = me
        self.config = ElectionConfig() if config is None else config
        self.state = ElectionState.IDLE
        self.term = Term()
        """The term this peer leads or follows, or the last one."""
        self.leader: str | None = None
        self.outbox: list[tuple[str | None, AnyMessage]] = []
        """Messages and whom they are for; None for all in sight."""
        self.events: list[ElectionEvent] = []
        self._claims: Mapping[str, Claim] = {}
        self._mine = Claim(False, 0, 0, 0, me)
        self._highest = 0
        self._voted = 0  # the number of the last term voted in: never two votes in one number
        self._leads: dict[str, Term] = {}  # who in sight says that it leads
        self._rival: tuple[str, Term] | None = None  # the last leader met while leading: an event for each is enough
        self._idle_since = now
        self._give_up = inf
        self._is_forced = False  # does not follow who leads before the votes are counted
        self._granted: set[str] = set()
        self._refused: set[str] = set()

    # --- what happens ---------------------------------------------------------------------------------------------

    def observe(self, now: float, mine: Claim, others: Mapping[str, Claim]) -> None:
        """Who is in sight now, and what they claim. Called when that changes and when `deadline` has come."""
        self._mine, self._claims = mine, others
        for peer in [peer for peer in self._leads if peer not in others]:
            del self._leads[peer]
        self._follow_the_best(now)
        if self.state is ElectionState.CAMPAIGNING:
            self._count(now)
        elif self.state is ElectionState.IDLE and now >= self._stand_at():
            self._stand(now)

    def received(self, now: float, peer: str, message: Campaign | ElectionVote | Lead | Retire) -> None:
        """`peer`, who is in sight, sent `message`."""
        self._highest = max(self._highest, message.term.number)
        match message:
            case Campaign(term=term):
                self._answer(now, peer, term)
            case ElectionVote(term=term, granted=granted):
                if self.state is ElectionState.CAMPAIGNING and term == self.term:
                    (self._granted if granted else self._refused).add(peer)
                    if not granted and not message.leader:
                        self._rest(now)  # it knows a better candidate, which stands now
                    else:
                        self._count(now)
            case Lead(term=term):
                if term.candidate == peer and peer in self._claims:
                    self._leads[peer] = term
                    self._follow_the_best(now)
            case Retire(term=term):
                if self._leads.get(peer) == term:
                    del self._leads[peer]
                    self._follow_the_best(now)

    def met(self, peer: str) -> None:
        """`peer` has come in sight: it is told who leads, if that is this peer."""
        if self.state is ElectionState.MASTER:
            self.outbox.append((peer, Lead(self.term)))

    def unheard(self, peer: str) -> None:
        """What `peer` said may not have been heard: if it leads, it says so again."""
        self._leads.pop(peer, None)

    def step_down(self, now: float) -> None:
        """Stops leading, if this peer does; it stands again only after the others could."""
        if self.state is ElectionState.MASTER:
            self.outbox.append((None, Retire(self.term)))
            self._rest(now + self.config.timeout)

    def force(self, now: float) -> None:
        """Stands now, whoever leads; if that is this peer, it retires first. Who has a leader refuses its vote, and
        then the better claim decides."""
        if self.state is ElectionState.MASTER:
            self.outbox.append((None, Retire(self.term)))  # else they would go on following, and refuse their vote
        self._stand(now)
        self._is_forced = self.state is ElectionState.CAMPAIGNING

    @property
    def deadline(self) -> float:
        """When `observe` is to be called even if nothing changes."""
        if self.state is ElectionState.CAMPAIGNING:
            return self._give_up
        return self._stand_at() if self.state is ElectionState.IDLE else inf

    # --- steps ----------------------------------------------------------------------------------------------------

    def _stand_at(self) -> float:
        """The best candidate stands once things have settled, each next one a timeout later: should the better ones
        not be able to."""
        better = sum(claim < self._mine for claim in self._claims.values())
        return self._idle_since + self.config.settle + better * self.config.timeout

    def _stand(self, now: float) -> None:
        self._highest = max(self._highest, self._voted) + 1
        self.term = Term(self._highest, self.me)
        self._voted = self._highest
        self.state, self.leader = ElectionState.CAMPAIGNING, None
        self._granted, self._refused = set(), set()
        self._give_up = now + self.config.timeout
        self._tell(ElectionEventKind.STARTED, self.me)
        self.outbox.append((None, Campaign(self.term)))
        self._count(now)

    def _answer(self, now: float, peer: str, term: Term) -> None:
        if self.leader is not None:
            self.outbox.append((peer, ElectionVote(term, False, self.leader)))
            self.met(peer)
            return
        claim = self._claims.get(peer)
        if claim is None or term.number <= self._voted or term.candidate != peer:
            self.outbox.append((peer, ElectionVote(term, False)))
        elif self._mine < claim:
            self.outbox.append((peer, ElectionVote(term, False)))
            if self.state is ElectionState.IDLE:
                self._stand(now)
        else:
            self._voted = term.number
            self._rest(now)
            self.outbox.append((peer, ElectionVote(term, True)))

    def _count(self, now: float) -> None:
        waiting = self._claims.keys() - self._granted - self._refused
        if waiting and now < self._give_up:
            return
        if waiting:
            self._tell(ElectionEventKind.TIMEOUT, self.me)
        if len(self._granted) + 1 > (len(self._claims) + 1) / 2 or not (waiting or self._granted):
            self._lead()
        else:
            self._rest(now)

    def _lead(self) -> None:
        self._is_forced = False
        self.state, self.leader = ElectionState.MASTER, self.me
        self._tell(ElectionEventKind.ELECTED_MASTER, self.me)
        self.outbox.append((None, Lead(self.term)))

    def _rest(self, now: float) -> None:
        self._is_forced = False
        self.state, self.leader, self._idle_since = ElectionState.IDLE, None, now

    def _follow_the_best(self, now: float) -> None:
        """Of all in sight who say that they lead, this peer too, the one with the best claim is followed."""
        if self._is_forced:
            return
        best = min(self._leads, key=lambda peer: self._claims[peer], default=None)
        if self.state is ElectionState.MASTER:
            if best is None:
                return
            if self._rival != (best, self._leads[best]):
                self._rival = (best, self._leads[best])
                self._tell(ElectionEventKind.SPLIT_BRAIN, best)
                self.met(best)
            if self._mine < self._claims[best]:
                return
            self.outbox.append((None, Retire(self.term)))
        if best is None:
            if self.state is ElectionState.FOLLOWER:
                self._rest(now)
        elif self.leader != best or self.term != self._leads[best]:
            self.state, self.leader, self.term = ElectionState.FOLLOWER, best, self._leads[best]
            self._tell(ElectionEventKind.NEW_MASTER, best)

    def _tell(self, kind: ElectionEventKind, peer: str) -> None:
        self.events.append(ElectionEvent(kind, self.term, peer))
