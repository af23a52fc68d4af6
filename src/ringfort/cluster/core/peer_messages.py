"""What the cores of peers say to each other on a control link. Pure. What else is said there, and the bytes: talk.py.

Every text and list has a limit that the decoder checks, so that no message can make a peer hold more than it should.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Final

import msgspec

MAX_MESSAGE_BYTES: Final = 256 * 1024
"""The largest message: an epoch of 256 members with four addresses each, and the records it rests on, fit twice."""
MAX_MEMBERS: Final = 256
"""Members of an epoch. The control links are a full mesh: beyond this, heartbeats alone would cost too much."""
MAX_DOUBTS: Final = 16
"""Epochs that a peer has accepted and does not know the end of. Few happen; a peer with more accepts nothing new."""
MAX_LINES: Final = 16
"""Independent beginnings that grew together into one epoch."""
MAX_NUMBER: Final = 2**48
"""Of an epoch or term. At a thousand a second it would take nine thousand years to get there without lying."""

PeerId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
"""`node.instance`: the short id of the node's key, and a random name of the process (see `PeerCore`)."""
Line = Annotated[str, msgspec.Meta(min_length=1, max_length=96)]
"""Names a beginning: the leader and number of its first epoch."""
Text = Annotated[str, msgspec.Meta(max_length=256)]
Address = Annotated[str, msgspec.Meta(max_length=128)]
Addresses = Annotated[tuple[Address, ...], msgspec.Meta(max_length=16)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=MAX_NUMBER)]
Peers = Annotated[tuple[PeerId, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The parent of all."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parent of what messages are made of."""


class Member(Part, frozen=True, forbid_unknown_fields=True):
    """One peer of an epoch."""

    peer: PeerId
    host: Text = ""
    """Names the machine, so that peers of one host can be put together and clones told from processes."""
    slots: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 1
    """Ranks that this peer brings: 1 for a script that joined, the local world size for a launcher, 0 for an observer,
    who sees all and is in no epoch."""
    addresses: Addresses = ()
    """Where its data links are accepted, best first, as `host:port`."""
    joined: Number = 0
    """The number of the epoch that it has been a member since: its seniority."""
    name: Text = ""
    """The machine's name, for people: who waits for a member can say for whom."""


class Epoch(Part, frozen=True, forbid_unknown_fields=True, dict=True):
    """One agreed, ordered list of peers. The ranks are the members' slots in order."""

    number: Number
    leader: PeerId
    members: Annotated[tuple[Member, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]
    ring: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    """The order in which the ring visits the members, as indices; empty for the order they are listed in."""
    lines: Annotated[tuple[Line, ...], msgspec.Meta(max_length=MAX_LINES)] = ()
    """The beginnings it descends from. Empty only for a peer alone: nobody can be split from it."""
    ended: Annotated[tuple[Line, ...], msgspec.Meta(max_length=MAX_LINES)] = ()
    """Lines that nobody is left of, the last ones: it follows them without carrying them on."""

    @property
    def key(self) -> tuple[int, str]:
        """What names it: two groups that never met may have used one number."""
        return self.number, self.leader

    @cached_property
    def peers(self) -> tuple[str, ...]:
        """The members' ids, in order."""
        return tuple([member.peer for member in self.members])

    @property
    def world_size(self) -> int:
        """The ranks of all members together."""
        return sum(member.slots for member in self.members)

    def first_rank(self, peer: str) -> int:
        """The lowest rank of `peer`. Raises `ValueError` where it is no member."""
        return sum(member.slots for member in self.members[: self.peers.index(peer)])

    def __str__(self) -> str:
        return f"epoch {self.number} of {len(self.members)}"


class Standing(Part, frozen=True, forbid_unknown_fields=True):
    """What a peer has promised. It outlives the peer: whoever vouches for its death gives its last one."""

    highest: Number = 0
    """The highest number accepted."""
    formed: Epoch | None = None
    """The last epoch that this peer was in."""
    doubts: Annotated[tuple[Epoch, ...], msgspec.Meta(max_length=MAX_DOUBTS)] = ()
    """Others that may have been committed: later ones that it accepted and does not know the end of, and those of
    earlier processes of its machine, which it respects as if they were its own."""


class Hello(Message, frozen=True, forbid_unknown_fields=True, tag="hello"):
    """The first message each way: who I am."""

    member: Member
    name: Text = ""
    """For people: the host's name."""
    version: Text = ""
    run: Text = ""
    """Only peers of the same run may be in one epoch."""


class Beat(Message, frozen=True, forbid_unknown_fields=True, tag="beat"):
    """A heartbeat. `echo` is the other side's latest `sent`, so each learns when it was last surely heard."""

    sent: Seconds
    echo: Seconds = 0.0
    held: Seconds = 0.0
    """Seconds between hearing what is echoed and this message: the round trip is without them."""
    busy: bool = False
    """The sender's program runs but does not respond: it holds its interpreter lock, swaps or computes."""
    step: Number = 0
    """How many steps of training the sender's program has done; 0 where it is not known."""


class Report(Message, frozen=True, forbid_unknown_fields=True, tag="report"):
    """Where I stand; sent when it changes. What the leader proposes from."""

    standing: Standing
    current: Number = 0
    """The number of the epoch that this peer is in now; 0 if it is in none."""
    sees: Peers = ()
    """The peers it has a sound link with."""
    without: Peers = ()
    """Peers that do not count because a person at this machine said so (`restart_without`)."""
    work: Number = 0
    holds: bool = False
    """Asks that newcomers wait."""
    stuck: bool = False
    """Cannot go on: it has lost contact with too many of its last epoch."""
    yields: bool = False
    """Has stepped down: the others are to lead before it."""


class Term(Part, frozen=True, forbid_unknown_fields=True, order=True):
    """A number and the candidate who opened it: so no two candidates ever share a term."""

    number: Number = 0
    candidate: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Campaign(Message, frozen=True, forbid_unknown_fields=True, tag="campaign"):
    """Vote for me in this term."""

    term: Term


class Vote(Message, frozen=True, forbid_unknown_fields=True, tag="vote"):
    """Yes; or no, with the leader I have (or nobody: I know a better candidate)."""

    term: Term
    granted: bool
    leader: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Lead(Message, frozen=True, forbid_unknown_fields=True, tag="lead"):
    """I lead this term; sent to all when elected, and to whoever is met later."""

    term: Term


class Retire(Message, frozen=True, forbid_unknown_fields=True, tag="retire"):
    """I no longer lead this term."""

    term: Term


class Propose(Message, frozen=True, forbid_unknown_fields=True, tag="propose"):
    """From the leader: the next epoch, and what makes it lawful."""

    term: Term
    epoch: Epoch
    formed: Annotated[tuple[Epoch, ...], msgspec.Meta(max_length=MAX_LINES)] = ()
    """The last committed epoch of each line that the members come from."""
    doubts: Annotated[tuple[Epoch, ...], msgspec.Meta(max_length=MAX_DOUBTS)] = ()
    """Later ones that may have been committed."""
    departed: Peers = ()
    """Who has left or died, by its own machine's word."""
    without: Peers = ()
    """Who does not count because a person said so. What these promised is not known."""


class Accept(Message, frozen=True, forbid_unknown_fields=True, tag="accept"):
    """To the leader: I have left every earlier epoch for this one."""

    number: Number


class Reject(Message, frozen=True, forbid_unknown_fields=True, tag="reject"):
    """To the leader: not this one. A new `Report` came before it, so that the next proposal can be better."""

    number: Number
    why: Text


class Commit(Message, frozen=True, forbid_unknown_fields=True, tag="commit"):
    """From the leader: all have accepted."""

    number: Number


class Introduce(Message, frozen=True, forbid_unknown_fields=True, tag="introduce"):
    """Where another peer can be found. An address is a hint and proves nothing."""

    peer: PeerId
    addresses: Addresses


class Hangup(Message, frozen=True, forbid_unknown_fields=True, tag="hangup"):
    """I close this link and live on: the last word on a link, which says why."""

    why: Text = ""


class Departed(Message, frozen=True, forbid_unknown_fields=True, tag="departed"):
    """A peer has ended, and this is the last it promised. Only its own machine says so: the peer as its last word, its
    control process when the program died, or another process of the machine, which got the lock of the dead one."""

    peer: PeerId
    standing: Standing
    why: Text = ""
    died: bool = False
    """It did not want to go: its program was killed or crashed. False where it closed its node."""


AnyMessage = (
    Hello
    | Beat
    | Report
    | Campaign
    | Vote
    | Lead
    | Retire
    | Propose
    | Accept
    | Reject
    | Commit
    | Introduce
    | Hangup
    | Departed
)
