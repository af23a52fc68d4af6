"""`ElectionManager`: decides who leads. Pure: connected peers and messages in, messages and events out.

The leader only proposes; the rules of membership keep groups from overlapping, whoever leads. So an election can be
quick: a candidate asks the peers it sees and needs no list of all peers.

The best candidate stands first, then the others in the order of their claims. Claims are compared by, in this order:
not stuck, not stepped down, in the latest epoch, seniority, work done, peer id. Those that have stepped down take
turns, so one that can form an epoch will lead, however many before it cannot. A leader stays while it is connected; if
two leaders meet, the one with the weaker claim retires. A term is a number and the candidate that opened it, and each
peer votes once per number, so a term has at most one leader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Final, NamedTuple

from ringfort.cluster.core.events import ClusterEvent
from ringfort.cluster.core.peer_messages import Campaign, ElectionMessage, ElectionVote, Lead, Retire, Term
from ringfort.config import ElectionConfig

LEADERLESS: Final = 0.05
"""Seconds in which all peers have heard that their leader is gone. No links have to come up then, so the best candidate
does not wait for `ElectionConfig.settle`."""


class ElectionState(Enum):
    """A peer's part in the election."""

    IDLE = "idle"
    """It knows no leader, and waits or has voted."""
    CAMPAIGNING = "campaigning"
    """It stands for election."""
    MASTER = "master"
    """It leads."""
    FOLLOWER = "follower"
    """It follows a leader."""


class ElectionEventKind(Enum):
    """The kind of an election event."""

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
    """A step in an election."""

    kind: ElectionEventKind
    """What has happened."""
    term: Term
    """The term of office that it is about."""
    peer: str
    """The candidate or leader concerned."""

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.peer} in term {self.term.number}"


class Claim(NamedTuple):
    """A peer's claim to lead; the lowest is the best."""

    stuck: bool
    """It may not continue."""
    yields: int
    """0 if it has not stepped down. Of peers that have, the one that did so first is the first to lead again."""
    behind: int
    """Minus the number of the last epoch it was in."""
    joined: int
    work: int
    """Minus the work done."""
    peer: str


class ElectionManager:
    """One peer's part in elections. After each call, take the contents of `outbox` and `events` and clear them."""

    def __init__(self, me: str, config: ElectionConfig | None = None, now: float = 0.0, *, stands: bool = True) -> None:
        """`stands`: whether this peer may lead; otherwise it only votes and follows."""
        self.me = me
        self.stands = stands
        self.config = ElectionConfig() if config is None else config
        self.state = ElectionState.IDLE
        self.term = Term()
        """The term that this peer leads or follows, or the last one."""
        self.leader: str | None = None
        self.outbox: list[tuple[str | None, ElectionMessage]] = []
        """Messages and their receivers; None for all connected peers."""
        self.events: list[ElectionEvent] = []
        self._claims: Mapping[str, Claim] = {}
        self._mine = Claim(False, 0, 0, 0, 0, me)
        self._highest = 0
        self._voted = 0  # the number of the last term it voted in: at most one vote per number
        self._leads: dict[str, Term] = {}  # connected peers that say they lead
        self._rival: tuple[str, Term] | None = None  # the last rival leader: one event for each is enough
        self._idle_since = now
        self._give_up = inf
        self._is_forced = False  # follows no leader before the votes are counted
        self._granted: set[str] = set()
        self._refused: set[str] = set()

    # --- what happens ---------------------------------------------------------------------------------------------

    def observe(self, now: float, mine: Claim, others: Mapping[str, Claim]) -> None:
        """Take the claims of this and all connected peers. Call this when they change and when `deadline` has come."""
        self._mine, self._claims = mine, others
        for peer in [peer for peer in self._leads if peer not in others]:
            del self._leads[peer]
        self._follow_the_best(now)
        if self.state is ElectionState.CAMPAIGNING:
            self._count(now)
        elif self.state is ElectionState.IDLE and now >= self._stand_at():
            self._stand(now)

    def received(self, now: float, peer: str, message: ElectionMessage) -> None:
        """Take a message of a connected peer."""
        self._highest = max(self._highest, message.term.number)
        match message:
            case Campaign(term=term):
                self._answer(now, peer, term)
            case ElectionVote(term=term, granted=granted):
                if self.state is ElectionState.CAMPAIGNING and term == self.term:
                    (self._granted if granted else self._refused).add(peer)
                    if not granted and not message.leader:
                        self._rest(now)  # the voter knows a better candidate, which stands now
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
        """Tell a peer that has connected that this peer leads, if so."""
        if self.state is ElectionState.MASTER:
            self.outbox.append((peer, Lead(self.term)))

    def unheard(self, peer: str) -> None:
        """Forget that `peer` leads: it may have retired on a link that was lost, and repeats it if it leads."""
        self._leads.pop(peer, None)

    def step_down(self, now: float) -> None:
        """Stop leading, if this peer leads. It stands again only after the others had their turn."""
        if self.state is ElectionState.MASTER:
            self.outbox.append((None, Retire(self.term)))
            self._rest(now + self.config.timeout)

    def force(self, now: float) -> None:
        """Stand for election now, whoever leads; if this peer leads, it retires first. Peers that have a leader refuse
        their votes, and then the better claim decides."""
        if self.state is ElectionState.MASTER:
            self.outbox.append((None, Retire(self.term)))  # else its followers would refuse their votes
        self._stand(now)
        self._is_forced = self.state is ElectionState.CAMPAIGNING

    @property
    def deadline(self) -> float:
        """When to call `observe` even if nothing changes."""
        if self.state is ElectionState.CAMPAIGNING:
            return self._give_up
        return self._stand_at() if self.state is ElectionState.IDLE else inf

    # --- steps ----------------------------------------------------------------------------------------------------

    def _stand_at(self) -> float:
        """Return when to stand: the best candidate once things have settled, each next one a timeout later, in case the
        better ones cannot."""
        if not self.stands:
            return inf
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
        elif self.stands and self._mine < claim:
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
        """Follow the leader with the best claim, including this peer if it leads."""
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
                self._rest(now - max(0.0, self.config.settle - LEADERLESS))
        elif self.leader != best or self.term != self._leads[best]:
            self.state, self.leader, self.term = ElectionState.FOLLOWER, best, self._leads[best]
            self._tell(ElectionEventKind.NEW_MASTER, best)

    def _tell(self, kind: ElectionEventKind, peer: str) -> None:
        self.events.append(ElectionEvent(kind, self.term, peer))
