"""The messages that peers exchange to agree on leaders and epochs. Pure. gossip.py has the others and the codec.

The decoder checks a limit for every text and list, so no message can make a peer hold more than that.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Final

import msgspec

MAX_MESSAGE_BYTES: Final = 256 * 1024
"""The largest message. A proposal for 256 members with four addresses each takes less than half of it."""
MAX_MEMBERS: Final = 256
"""Members of an epoch. Control links form a full mesh; with more members, heartbeats would cost too much."""
MAX_DOUBTS: Final = 16
"""Epochs in doubt: accepted, with an unknown outcome. A peer that has this many rejects every proposal."""
MAX_LINEAGES: Final = 16
"""Independent clusters that merged into one epoch."""
MAX_NUMBER: Final = 2**48
"""Limit of epoch and term numbers. Counting to it honestly, a thousand a second, would take nine thousand years."""

PeerId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
"""`node.instance`: the short id of the node's key, and a random name for the process (see `PeerCore`)."""
Lineage = Annotated[str, msgspec.Meta(min_length=1, max_length=96)]
"""Names an independent beginning of a cluster by the leader and number of its first epoch."""
Text = Annotated[str, msgspec.Meta(max_length=256)]
Address = Annotated[str, msgspec.Meta(max_length=128)]
Addresses = Annotated[tuple[Address, ...], msgspec.Meta(max_length=16)]
Lineages = Annotated[tuple[Lineage, ...], msgspec.Meta(max_length=MAX_LINEAGES)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=MAX_NUMBER)]
Peers = Annotated[tuple[PeerId, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base class of all messages."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of the structures inside messages."""


class Member(Part, frozen=True):
    """One peer of an epoch."""

    peer: PeerId
    host: Text = ""
    """Identifies the machine. Peers with the same host are neighbours in the ring; a key on two hosts is a clone."""
    slots: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 1
    """Ranks of this peer: 1 for a script that joined, the local world size for a launcher, 0 for an observer, which
    sees every peer and is in no epoch, and for a witness."""
    addresses: Addresses = ()
    """Where it accepts data connections, as `host:port`, best first."""
    joined: Number = 0
    """The number of the first epoch in its unbroken membership: its seniority."""
    name: Text = ""
    """The machine's name, for messages to people."""
    witness: bool = False
    """It votes on the epochs of an elastic run and has no rank and no state (`slots` is 0)."""


class Epoch(Part, frozen=True, dict=True):
    """One agreed, ordered list of peers, witnesses last. The ranks are the members' slots in order."""

    number: Number
    """Higher than that of every epoch before."""
    leader: PeerId
    """The peer that proposed it."""
    members: Annotated[tuple[Member, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]
    """Each with its id and its number of ranks."""
    ring: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    """The order in which the ring visits the holders, as indices; empty for the order of `members`."""
    lineages: Lineages = ()
    """The lineages it continues. Empty only for a peer that was always alone."""
    ended: Lineages = ()
    """The latest lineages that have no living member. This epoch follows them without continuing them."""

    @property
    def key(self) -> tuple[int, str]:
        """Identifies the epoch. The number alone does not: two groups that never met may have used the same one."""
        return self.number, self.leader

    @cached_property
    def peers(self) -> tuple[str, ...]:
        """The members' ids, in order."""
        return tuple([member.peer for member in self.members])

    @cached_property
    def holders(self) -> tuple[str, ...]:
        """The ids of the members that hold a state and have ranks: all but witnesses. They come first in `peers`."""
        return tuple([member.peer for member in self.members if member.slots])

    @property
    def world_size(self) -> int:
        """The total number of ranks."""
        return sum(member.slots for member in self.members)

    def first_rank(self, peer: str) -> int:
        """Return the lowest rank of `peer`. Raise `ValueError` if it is not a member."""
        return sum(member.slots for member in self.members[: self.peers.index(peer)])

    def __str__(self) -> str:
        return f"epoch {self.number} of {len(self.members)}"


class Votes(Part, frozen=True, dict=True):
    """The epochs that a peer has voted for and that later proposals must respect.

    They outlive the process: whoever reports that it has ended passes on its last votes.
    """

    highest: Number = 0
    """The highest epoch number that it accepted."""
    formed: Epoch | None = None
    """The last committed epoch that it was a member of."""
    doubts: Annotated[tuple[Epoch, ...], msgspec.Meta(max_length=MAX_DOUBTS)] = ()
    """Epochs that may have been committed: those it accepted later and whose outcome it does not know, and those of
    earlier processes on its machine, which bind it as well."""
    copied_at: Number = 0
    """In an elastic run: it has given up the states of all epochs below this number, because it copied another one."""

    @cached_property
    def records(self) -> tuple[Epoch, ...]:
        """The epochs that a new epoch must respect."""
        return self.doubts if self.formed is None else (self.formed, *self.doubts)

    @cached_property
    def companions(self) -> frozenset[str]:
        """All members of the epochs that this peer, or an earlier process of its machine, is or may be in."""
        return frozenset(peer for record in self.records if record.lineages for peer in record.peers)


class RunState(Part, frozen=True):
    """Where the program of a peer is in an elastic run (training/elastic/protocol.py)."""

    mark: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    """Equal marks mean equal states. Empty for a peer without a state."""
    lineage: Annotated[str, msgspec.Meta(max_length=96)] = ""
    """Only an epoch of this lineage may continue with the state."""
    step: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_NUMBER)] = -1
    is_pending: bool = False
    """It holds the result of a step that others may have applied: nobody new is seated before that is settled."""
    is_ready: bool = False
    """It waits at the end of a step for new members, or is one that has the state."""
    is_learner: bool = False
    """Its state is a copy with which no epoch has seated it yet, whatever epoch it was in before."""


class Hello(Message, frozen=True, tag="hello"):
    """The first message in each direction: identifies the sender."""

    member: Member
    name: Text = ""
    """The host's name, for messages to people."""
    version: Text = ""
    run: Text = ""
    """Only peers of the same run may be in one epoch."""


class Beat(Message, frozen=True, tag="beat"):
    """A heartbeat. `echo` repeats the receiver's latest `sent`, which proves when the sender last heard it."""

    sent: Seconds
    echo: Seconds = 0.0
    held: Seconds = 0.0
    """Seconds between receiving the echoed heartbeat and sending this one; not part of the round trip."""
    busy: bool = False
    """The sender's program runs but does not respond: it holds the interpreter lock, swaps or computes."""
    step: Number = 0
    """Training steps done by the sender's program; 0 if unknown."""


class Report(Message, frozen=True, tag="report"):
    """The sender's state, sent when it changes. The leader bases its proposals on these reports."""

    votes: Votes
    current: Number = 0
    """The number of the epoch that the sender is in now; 0 for none."""
    sees: Peers = ()
    """The peers it has a working link with."""
    without: Peers = ()
    """Peers that a person at this machine has excluded (`restart_without`)."""
    work: Number = 0
    holds: bool = False
    """Asks the leader to keep new peers waiting."""
    stuck: bool = False
    """Cannot continue: it has lost contact with too many members of its last epoch."""
    yields: Number = 0
    """Above 0 if it has stepped down since its last epoch began, and higher than that of all that did so before it.
    Whoever has a lower number is to lead first."""
    state: RunState | None = None
    """Where its program is in an elastic run; None if it is in none. While it trains, that is old news."""


class Term(Part, frozen=True, order=True):
    """An election term. The candidate is part of it, so two candidates never share a term."""

    number: Number = 0
    candidate: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Campaign(Message, frozen=True, tag="campaign"):
    """Asks for votes in this term."""

    term: Term


class ElectionVote(Message, frozen=True, tag="vote"):
    """The answer to a campaign. A refusal names the leader that the voter follows; empty if it knows a better
    candidate."""

    term: Term
    granted: bool
    leader: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Lead(Message, frozen=True, tag="lead"):
    """The sender leads this term. Sent to all peers on election, and to each peer that connects later."""

    term: Term


class Retire(Message, frozen=True, tag="retire"):
    """The sender no longer leads this term."""

    term: Term


class Propose(Message, frozen=True, tag="propose"):
    """From the leader: the next epoch, and the evidence that it is lawful."""

    term: Term
    epoch: Epoch
    formed: Annotated[tuple[Epoch, ...], msgspec.Meta(max_length=MAX_LINEAGES)] = ()
    """The last committed epoch of each lineage of the members."""
    doubts: Annotated[tuple[Epoch, ...], msgspec.Meta(max_length=MAX_DOUBTS)] = ()
    """Later epochs that may have been committed."""
    departed: Peers = ()
    """Peers that have ended, as reported by their own machine."""
    without: Peers = ()
    """Peers that a person has excluded. Their votes are unknown."""
    at: RunState | None = None
    """In an elastic run: where every member must be. None for an epoch that only shrinks."""
    copied_at: Annotated[tuple[tuple[PeerId, Number], ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    """`Votes.copied_at` of the members, where it is not 0."""


class Accept(Message, frozen=True, tag="accept"):
    """To the leader: the sender accepts this epoch and has left every earlier one."""

    number: Number


class Reject(Message, frozen=True, tag="reject"):
    """To the leader: the sender does not accept this epoch. Its latest `Report` precedes this message."""

    number: Number
    why: Text


class Commit(Message, frozen=True, tag="commit"):
    """From the leader: all members have accepted."""

    number: Number


class Introduce(Message, frozen=True, tag="introduce"):
    """Addresses of another peer. They are hints and prove nothing."""

    peer: PeerId
    addresses: Addresses


class Hangup(Message, frozen=True, tag="hangup"):
    """The last message on a link whose sender closes it and lives on."""

    why: Text = ""


class Departed(Message, frozen=True, tag="departed"):
    """A peer has ended; `votes` are its last. Only its own machine sends this: the peer itself when it leaves, its
    control process after the program died, or a later process of the machine that acquired the dead one's lock."""

    peer: PeerId
    votes: Votes
    why: Text = ""
    died: bool = False
    """Its program was killed or crashed. False if it closed its node."""


ElectionMessage = Campaign | ElectionVote | Lead | Retire
EpochMessage = Propose | Accept | Reject | Commit
AnyMessage = Hello | Beat | Report | ElectionMessage | EpochMessage | Introduce | Hangup | Departed
