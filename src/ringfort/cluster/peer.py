"""`PeerCore`: everything that a peer decides, as one state machine. Pure: events in, instructions out.

The node around it owns sockets, threads and the clock. It calls one method for each thing that happens, carries out the
instructions in the order given, and calls `tick` when `deadline` has come. Every method takes `now` first.

    what happens                        call
    a link is open, both sides proved   connected(now, link, node, initiated=...)
    a message came                      received(now, link, message)         decoded by messages.decode
    bytes came that are no message      garbled(now, link, why)
    a link ended                        closed(now, link, by_kernel=..., why)
    `deadline` has come                 tick(now)
    this process wants to go            leave(now)
    the program starts or ends what     hold(now, True), hold(now, False)
      newcomers must not interrupt
    a process of this node is dead      vouch(now, peer_id, standing)        from the file it left behind
    our addresses changed               set_addresses(now, addresses)

    instruction                         what the node does
    Send(link, message)                 queues messages.encode(message) on the link, in order
    Close(link, why)                    closes the link once what was queued has left or a second has passed; no
                                        closed() is expected for it
    Learn(peer, addresses)              may dial these: hints that prove nothing (for the address directory)
    Remember(standing)                  writes messages.encode_standing(standing) to this instance's file, before what
                                        follows is carried out
    Notify(event)                       gives the event to the program (events, ElectionEvent, HealthEvent)

`now` is seconds of a clock that never goes back and runs on while the machine sleeps (CLOCK_BOOTTIME on Linux): after a
sleep, what was heard before it is old. `link` is any number the node has not used before.

`closed(by_kernel=True)` means that the other kernel said so: end of file or a reset. Every other end (no route, time
out, a record that did not open) is not. Only the first can prove that a process died.

The node dials whatever peer it has addresses of and no link to. Two links between the same two peers are the rule when
both dial at once: the core closes one of them, the same on both sides.

A peer id is `node.instance`: the short id of the node's key, which the handshake proves, and a random name for the
process. So several processes of a node are peers of their own, a process that starts again is a new peer, and one key
on two machines (`host` differs) is a clone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from ringfort.cluster.contacts import BAN, Contact, Contacts, node_of
from ringfort.cluster.election import Claim, ElectionManager, ElectionState
from ringfort.cluster.events import (
    CloneFound,
    ClusterEvent,
    EpochEnded,
    EpochStarted,
    Misbehaved,
    PeerJoined,
    PeerLost,
    Waiting,
)
from ringfort.cluster.health import HealthMonitor, HealthStatus
from ringfort.cluster.instructions import Close, Instruction, Learn, Notify, Remember, Send
from ringfort.cluster.membership import FRESH, LEASE, Evidence, Ledger, is_lawful, records_of
from ringfort.cluster.messages import (
    MAX_NUMBER,
    Accept,
    AnyMessage,
    Beat,
    Campaign,
    Commit,
    Departed,
    Epoch,
    Hangup,
    Hello,
    Introduce,
    Lead,
    Member,
    Propose,
    Reject,
    Report,
    Retire,
    Standing,
    Vote,
    Witness,
)
from ringfort.cluster.proposing import Proposer, RingOrder, Situation
from ringfort.config import AutoDiscoveryConfig
from ringfort.errors import InvalidArgumentError

LEAP: Final = 0.4
"""Seconds that may pass between two calls; of a longer time only so much counts as having been awake. Below the margin
between LEASE and FRESH, so that a clock that leaps once breaks no lease."""
GRAIN: Final = 0.001
"""Seconds between two ticks at least: sums of times are rounded, and one must not wait for a rounding error."""
HELLO_WITHIN: Final = 2.0
"""Seconds within which the other side of a link must say who it is."""
MAX_DEPARTED: Final = 1024
"""Peers remembered as departed, with the last they promised."""


class PeerCore:
    """One peer's part in its cluster."""

    def __init__(
        self,
        me: Member,
        config: AutoDiscoveryConfig,
        now: float,
        *,
        name: str = "",
        version: str = "",
        ring_order: RingOrder | None = None,
    ) -> None:
        """`me.peer` is this peer's id; `name` and `version` are for people."""
        if not node_of(me.peer):
            raise InvalidArgumentError("me.peer", me.peer, "must be node.instance")
        self.me = me
        self.config = config
        self.health = HealthMonitor(config.health)
        self.election = ElectionManager(me.peer, config.election, 0.0)
        self.ledger = Ledger(me.peer, config.on_partition)
        self.contacts = Contacts(me)
        self.is_over = False
        self._hello = Hello(me, name, version)
        self._proposer = Proposer(me.peer, config, ring_order)
        self._out: list[Instruction] = []
        self._now = now
        self._time = 0.0
        self._beat_at = 0.0
        self._departed: dict[str, Standing] = {}
        self._vouched: dict[str, Departed] = {}
        self._witnessed: dict[str, Witness] = {}
        self._answered: dict[str, float] = {}
        self._deferred: tuple[Propose, float] | None = None
        self._muted: frozenset[str] = frozenset()
        self._work = 0
        self._holds = False
        self._is_stuck = False
        self._told_waiting = ""
        self._reported: Report | None = None
        self._reports: dict[str, Report] = {}
        self._claims: dict[str, Claim] = {}
        self._deadline = now

    # --- questions --------------------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """When `tick` is to be called next."""
        return self._deadline

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that this peer is in now."""
        return self.ledger.current

    @property
    def epoch_in_sight(self) -> Epoch | None:
        """The epoch that this peer is in; where it is in none, the latest that a peer in sight is in."""
        reports = [contact.report for contact in self.contacts if contact.report is not None]
        found = [report.standing.formed for report in reports if report.current and report.standing.formed is not None]
        return self.epoch or max(found, key=lambda epoch: epoch.key, default=None)

    @property
    def leader(self) -> str | None:
        """The leader that this peer follows, or itself."""
        return self.election.leader

    @property
    def sees(self) -> tuple[str, ...]:
        """The peers it has a sound link with."""
        return tuple(sorted(self._reports.keys() - {self.me.peer}))

    # --- what happens -----------------------------------------------------------------------------------------------

    def connected(self, now: float, link: int, node: str, *, initiated: bool) -> list[Instruction]:
        """`node` is what the handshake proved (`peer_id_of` its key), or "" where encryption is off. `initiated`:
        this side dialled."""
        if self._begin(now):
            self.contacts.opened(Contact(link, node, initiated, self._time))
            self._send(link, self._hello)
            self._send(link, self._make_report())
        return self._end()

    def received(self, now: float, link: int, message: AnyMessage) -> list[Instruction]:
        """`message` came on `link`."""
        contact = self.contacts.by_link(link)
        if not self._begin(now) or contact is None:
            return self._end()
        if contact.is_flooding(now):
            self._refuse(contact, "it floods: too many messages")
        elif contact.hello is None and not isinstance(message, Hangup):
            if isinstance(message, Hello):
                self._meet(contact, message)
            else:
                self._refuse(contact, "it did not say who it is")
        elif isinstance(message, Hangup):
            contact.hung_up = True
        elif isinstance(message, Beat):
            if self._beat(contact, message):
                return self._end()
        elif self.contacts.get(contact.peer) is contact:
            self._take(contact, message)
        self._refresh()
        return self._end()

    def garbled(self, now: float, link: int, why: str) -> list[Instruction]:
        """Something came on `link` that is no message."""
        contact = self.contacts.by_link(link)
        if self._begin(now) and contact is not None:
            self._refuse(contact, why)
            self._refresh()
        return self._end()

    def closed(self, now: float, link: int, *, by_kernel: bool, why: str = "") -> list[Instruction]:
        """`link` has ended."""
        if not self._begin(now):
            return self._end()
        contact, was_last = self.contacts.ended(link)
        if contact is not None and was_last:
            self._lose(contact, why or ("the link was closed" if by_kernel else "the link broke"), by_kernel)
        self._refresh()
        return self._end()

    def tick(self, now: float) -> list[Instruction]:
        """`deadline` has come; harmless at any other time."""
        if self._begin(now):
            self._refresh()
        return self._end()

    def leave(self, now: float, why: str = "") -> list[Instruction]:
        """Says goodbye to all. The core is finished: every later call returns nothing."""
        if self._begin(now):
            left = self.ledger.leave()
            if left is not None:
                self._notify(EpochEnded(left, why or "this peer leaves"))
            for contact in self.contacts:
                self._send(contact.link, Departed(self.me.peer, self.ledger.standing, why))
                self._out.append(Close(contact.link, why or "this peer leaves"))
            self.is_over = True
        out, self._out, self._deadline = self._out, [], inf
        return out

    def hold(self, now: float, holding: bool) -> list[Instruction]:
        """While any member of an epoch holds, newcomers wait; the epoch still shrinks when members are lost."""
        if self._begin(now):
            self._holds = holding
            self._refresh()
        return self._end()

    def vouch(self, now: float, peer: str, standing: Standing) -> list[Instruction]:
        """`peer`, an earlier process of this node, has ended, and `standing` is the last it wrote down."""
        if node_of(peer) != node_of(self.me.peer) or peer == self.me.peer:
            raise InvalidArgumentError("peer", peer, "one vouches for other processes of one's own node alone")
        if self._begin(now):
            self._departed[peer] = standing
            self._vouched[peer] = Departed(peer, standing, "its process has ended")
            self._tell_all(self._vouched[peer])
            self._refresh()
        return self._end()

    def set_addresses(self, now: float, addresses: Sequence[str]) -> list[Instruction]:
        """This peer's addresses are now these."""
        if self._begin(now):
            me = self.me
            self.me = Member(me.peer, me.host, me.slots, tuple(addresses))
            self._hello = Hello(self.me, self._hello.name, self._hello.version)
            self._tell_all(Introduce(me.peer, self.me.addresses))
        return self._end()

    def record_work(self, amount: int = 1) -> None:
        """Work done counts in elections between peers of the same seniority."""
        self._work += amount

    # --- time -------------------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> bool:
        """Keeps two readings of one clock. `_now` is the clock's. `_time` is the time that has surely passed while this
        peer was awake: a leap counts for little. What others must be given time for is measured by `_time`, so that
        a peer which slept does not find everyone else silent; how old something is, by `_now`."""
        if self.is_over:
            return False
        if now < self._now:
            raise InvalidArgumentError("now", now, f"the clock went back from {self._now}")
        self._time += min(now - self._now, LEAP)
        self._now = now
        return True

    def _end(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out

    # --- links ------------------------------------------------------------------------------------------------------

    def _meet(self, contact: Contact, hello: Hello) -> None:
        member = hello.member
        if contact.node and node_of(member.peer) != contact.node:
            self._refuse(contact, f"it claims to be {member.peer} and proved to be {contact.node}")
            return
        if member.peer == self.me.peer or self.contacts.is_banned(member.peer, self._time):
            self._close(contact, "this is me" if member.peer == self.me.peer else "it was refused")
            return
        other_host = self.contacts.clone_host(member)
        if other_host is not None:
            self._notify(CloneFound(member.peer, other_host, member.host))
            self.contacts.ban(member.peer, self._time + BAN)
            self._close(contact, "its key is in use on another machine")
            return
        surplus = self.contacts.introduce(contact, hello)
        if surplus is not None:
            self._close(surplus, "there are two links")
        if surplus is not contact:
            self._forget(member.peer)
            self.health.watch(member.peer, self._time)
            if surplus is not None:  # what changed since this link was opened was told on the other
                self._send(contact.link, self._make_report())
            self._beat_to(contact)

    def _introduce_all(self, contact: Contact) -> None:
        """Whoever knows two peers introduces them: a network that blocks multicast needs no more."""
        assert contact.hello is not None
        for other in self.contacts:
            if other is not contact and other.hello is not None:
                for one, about in ((contact, other.hello.member), (other, contact.hello.member)):
                    if about.addresses:
                        self._send(one.link, Introduce(about.peer, about.addresses))

    def _refuse(self, contact: Contact, why: str) -> None:
        who = contact.peer or contact.node or "a peer"
        self._notify(Misbehaved(who, why))
        if contact.peer:
            self.contacts.ban(contact.peer, self._time + BAN)
        self._close(contact, why)

    def _close(self, contact: Contact, why: str) -> None:
        _, was_last = self.contacts.ended(contact.link)
        self._send(contact.link, Hangup(why[:256]))
        self._out.append(Close(contact.link, why))
        if was_last:
            self._lose(contact, why, by_kernel=False)

    def _lose(self, contact: Contact, why: str, by_kernel: bool) -> None:
        peer, report = contact.peer, contact.report
        self.health.forget(peer)
        self._forget(peer)
        if report is None or not self._counts(contact):
            return
        # The law: a death counts only where the peer had just answered. See membership.py.
        is_fresh = by_kernel and self._now - contact.asked <= FRESH
        is_alive = contact.hung_up or self.contacts.may_have_another(contact)
        died = peer in self._departed or (is_fresh and not is_alive)
        if died and peer not in self._departed:
            self._witnessed[peer] = Witness(peer, report.standing)
        self._notify(PeerLost(peer, why, died))

    def _counts(self, contact: Contact) -> bool:
        """Whether this peer and the other may ever be in one epoch. Observers may not: they vote for nobody, nobody
        waits for them, and nobody misses them."""
        assert contact.hello is not None
        return self.me.slots > 0 and contact.hello.member.slots > 0

    def _forget(self, peer: str) -> None:
        self._reports.pop(peer, None)
        self._claims.pop(peer, None)

    # --- messages ---------------------------------------------------------------------------------------------------

    def _beat(self, contact: Contact, beat: Beat) -> bool:
        """True where nothing else can follow from it."""
        if beat.echo > self._now or 0 < beat.echo < contact.asked:
            self._refuse(contact, "it echoes a time that was never sent")
            return False
        if self.contacts.get(contact.peer) is not contact:
            return True
        if contact.peer not in self._muted:
            contact.their_time, contact.their_time_came = beat.sent, self._now
            self._answered[contact.peer] = self._time
        self.health.heard(contact.peer, self._time)
        if beat.echo > contact.asked:
            contact.asked = beat.echo
            self.health.answered(contact.peer, max(0.0, self._now - beat.echo - beat.held))
        return self.health.status(contact.peer) is HealthStatus.HEALTHY

    def _take(self, contact: Contact, message: AnyMessage) -> None:
        peer = contact.peer
        match message:
            case Report():
                self._note(contact, message)
            case Campaign() | Vote() | Lead() | Retire():
                if peer in self._reports:
                    self.election.received(self._time, peer, message)
                    self._flush_election()
            case Propose():
                self._consider(contact, message)
            case Accept(number=number):
                self._count(peer, number)
            case Reject(number=number):
                self._proposer.rejected(self._time, peer, number)
            case Commit(number=number):
                self._commit(contact, (number, peer))
            case Introduce(peer=about, addresses=addresses):
                if about != self.me.peer and self.contacts.get(about) is None:
                    self._out.append(Learn(about, addresses))
                elif about == peer and contact.hello is not None:
                    member = Member(peer, contact.hello.member.host, contact.hello.member.slots, addresses)
                    contact.hello = Hello(member, contact.hello.name, contact.hello.version)
            case Departed(peer=about, standing=standing, why=why):
                self._bury(contact, about, standing, why)
            case _:
                self._refuse(contact, f"it sent {type(message).__name__} a second time")

    def _note(self, contact: Contact, report: Report) -> None:
        lie = self._lie_in(contact.peer, report)
        if lie:
            self._refuse(contact, lie)
            return
        is_first = contact.report is None
        contact.report = report
        if not self._counts(contact):
            if is_first:
                self._introduce_all(contact)
            return
        self._reports[contact.peer] = report
        self._claims[contact.peer] = _claim(contact.peer, report)
        if is_first:
            assert contact.hello is not None
            self._witnessed.pop(contact.peer, None)  # it lives, whatever it looked like
            self._notify(PeerJoined(contact.peer, contact.hello.name))
            self.election.met(contact.peer)
            self._introduce_all(contact)
            for vouched in self._vouched.values():
                self._send(contact.link, vouched)
            self._flush_election()
        formed = report.standing.formed
        if formed is not None and formed in self.ledger.standing.doubts:
            self._start(self.ledger.commit(formed.key))  # the leader died before it could tell all

    def _lie_in(self, peer: str, report: Report) -> str:
        ours = {record.key: record for record in records_of(self.ledger.standing)}
        for record in records_of(report.standing):
            if peer not in record.peers or record.number > report.standing.highest:
                return f"it lies about epoch {record.number}"
            if record.key in ours and ours[record.key] != record:
                return f"it has another epoch {record.number} than we agreed on"
        formed = report.standing.formed
        if report.current and (formed is None or formed.number != report.current):
            return f"it lies about being in epoch {report.current}"
        return ""

    def _bury(self, contact: Contact, about: str, standing: Standing, why: str) -> None:
        if node_of(about) != node_of(contact.peer):
            self._refuse(contact, f"it speaks for {about}, a peer of another node")
            return
        if about == self.me.peer:
            self._refuse(contact, "it says that we have ended")
            return
        self._departed.pop(about, None)
        self._departed[about] = standing
        while len(self._departed) > MAX_DEPARTED:
            del self._departed[next(iter(self._departed))]
        gone = self.contacts.get(about)
        if gone is not None:
            self._close(gone, why or "it left")

    # --- the epoch --------------------------------------------------------------------------------------------------

    def _consider(self, contact: Contact | None, proposal: Propose) -> None:
        """A proposal of the leader, or our own."""
        leader = self.me.peer if contact is None else contact.peer
        epoch = proposal.epoch
        if epoch.leader != leader or proposal.term.candidate != leader:
            assert contact is not None
            self._refuse(contact, f"it proposes in the name of {epoch.leader}")
            return
        why = f"I follow {self.leader}" if self.leader != leader else self.ledger.objection(proposal)
        unseen = set(epoch.peers) - self._reports.keys() - {self.me.peer}
        if why is None and unseen:
            why = f"I do not see {min(unseen)}"
        if why is None and self._holds and self.epoch is not None and set(epoch.peers) > set(self.epoch.peers):
            why = "I hold: newcomers must wait"  # the leader may have proposed before it knew
        if why is not None:
            self._answer(leader, Reject(epoch.number, why[:256]))
            return
        # The law: those of our last epochs who are left out, and may be alive, are not answered until the lease is
        # over; only then do we go without them.
        left_out = self.ledger.companions() - set(epoch.peers) - self._departed.keys() - self._witnessed.keys()
        ready = max((self._answered.get(peer, -inf) for peer in left_out), default=-inf) + LEASE
        if self._time >= ready:
            self._accept(leader, proposal)
        else:
            self._muted = frozenset(left_out)
            self._deferred = (proposal, ready)

    def _accept(self, leader: str, proposal: Propose) -> None:
        self._deferred, self._muted = None, frozenset()
        if leader != self.me.peer:
            self._proposer.rest()  # the law: what we proposed ourselves, we never commit from now on
        left = self.ledger.accept(proposal)
        self._out.append(Remember(self.ledger.standing))
        if left is not None:
            self._notify(EpochEnded(left, f"{proposal.epoch} is to follow"))
        self._answer(leader, Accept(proposal.epoch.number))

    def _answer(self, leader: str, message: Accept | Reject) -> None:
        self._tell_report()
        contact = self.contacts.get(leader)
        if contact is not None:
            self._send(contact.link, message)
        elif leader == self.me.peer and isinstance(message, Accept):
            self._count(leader, message.number)
        elif leader == self.me.peer:
            self._proposer.rejected(self._time, leader, message.number)

    def _count(self, peer: str, number: int) -> None:
        epoch = self._proposer.accepted(self._time, peer, number)
        if epoch is None:
            return
        started = self.ledger.commit(epoch.key)
        self._out.append(Remember(self.ledger.standing))
        for other in epoch.peers:
            contact = self.contacts.get(other)
            if contact is not None:
                self._send(contact.link, Commit(number))
        self._start(started)

    def _commit(self, contact: Contact, key: tuple[int, str]) -> None:
        if key[0] > self.ledger.standing.highest:
            self._refuse(contact, f"it commits epoch {key[0]}, which we never accepted")
            return
        self._start(self.ledger.commit(key))

    def _start(self, epoch: Epoch | None) -> None:
        if epoch is None:
            return
        mates = self.ledger.companions()
        self._witnessed = {peer: seen for peer, seen in self._witnessed.items() if peer in mates}
        self._answered = {peer: at for peer, at in self._answered.items() if peer in mates or self.contacts.get(peer)}
        self._notify(EpochStarted(epoch))
        self._judge_epoch()  # somebody may have been lost since it was accepted

    # --- what follows from what happened ----------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Everything that may follow from a change or from time. Reports leave before heartbeats: leases need it."""
        self._drop_the_silent()
        if self.me.slots:
            self._judge_epoch()
            self._elect()
            self._lead()
            self._take_up_deferred()
        self._tell_report()
        if self._time >= self._beat_at:
            self._beat_at = self._time + self.config.health.interval
            for contact in self.contacts:
                self._beat_to(contact)
        waiting = (
            self._beat_at,
            self.election.deadline if self.me.slots else inf,
            self._proposer.deadline,
            inf if self._deferred is None else self._deferred[1],
            self._time + LEAP / 2,
        )
        self._deadline = self._now + max(GRAIN, min(waiting) - self._time)

    def _drop_the_silent(self) -> None:
        for event in self.health.check(self._time):
            self._notify(event)
            contact = self.contacts.get(event.peer)
            if event.status is HealthStatus.UNHEALTHY and contact is not None:
                self._close(contact, f"silent for {event.silence:.1f} s")
        for contact in self.contacts.without_hello(self._time - HELLO_WITHIN):
            self._close(contact, "it did not say who it is")

    def _judge_epoch(self) -> None:
        """An epoch is over for a member that has lost another, or that may not go on."""
        known = {self.me.peer, *self._reports}
        missing = set(self.ledger.current.peers) - known if self.ledger.current else set[str]()
        self._is_stuck = not self.ledger.companions() <= known and not self._may_go_on(known)
        if missing or self._is_stuck:
            left = self.ledger.leave()
            if left is not None:
                self._notify(EpochEnded(left, f"contact with {', '.join(sorted(missing))} is lost"))

    def _may_go_on(self, known: set[str]) -> bool:
        pairs = {(peer, seen.peer) for peer, report in self._reports.items() for seen in report.witnessed}
        pairs |= {(self.me.peer, dead) for dead in self._witnessed}
        evidence = Evidence(frozenset(self._departed), frozenset(pairs))
        return all(
            is_lawful(known, record, evidence, self.config.on_partition) for record in records_of(self.ledger.standing)
        )

    def _elect(self) -> None:
        mine = _claim(self.me.peer, self._make_report())
        self.election.observe(self._time, mine, self._claims)
        self._flush_election()

    def _flush_election(self) -> None:
        election = self.election
        for peer, message in election.outbox:
            for contact in self.contacts:
                if peer in (None, contact.peer):
                    self._send(contact.link, message)
        for event in election.events:
            self._notify(event)
        election.outbox.clear()
        election.events.clear()

    def _lead(self) -> None:
        why = "too few of the last epoch are in sight; they may be at work elsewhere" if self._is_stuck else ""
        if self.election.state is not ElectionState.MASTER:
            self._proposer.rest()
        else:
            why = self._propose() or why
        if why != self._told_waiting:
            self._told_waiting = why
            if why:
                self._notify(Waiting(why))

    def _propose(self) -> str:
        """The leader's turn. Returns what it waits for."""
        situation = Situation(
            self.election.term,
            self.ledger.current,
            self.ledger.standing,
            {**self._reports, self.me.peer: self._make_report()},
            {self.me.peer: self.me, **{c.peer: c.hello.member for c in self.contacts if c.hello is not None}},
            self._departed,
        )
        proposal = self._proposer.step(self._time, situation)
        if self._proposer.is_stuck and any(not report.stuck for report in self._reports.values()):
            self.election.step_down(self._time)
            self._flush_election()
        if proposal is not None:
            for peer in proposal.epoch.peers:
                contact = self.contacts.get(peer)
                if contact is not None:
                    self._send(contact.link, proposal)
            self._consider(None, proposal)
        return self._proposer.why

    def _take_up_deferred(self) -> None:
        if self._deferred is None:
            return
        proposal, ready = self._deferred
        leader = proposal.epoch.leader
        contact = self.contacts.get(leader)
        is_on = self._proposer.pending is proposal if leader == self.me.peer else contact is not None
        if self.leader == leader and is_on and self._time < ready:
            return
        self._deferred, self._muted = None, frozenset()
        if self.leader == leader and is_on:
            self._consider(contact, proposal)

    # --- what we say ------------------------------------------------------------------------------------------------

    def _make_report(self) -> Report:
        current = self.ledger.current
        return Report(
            self.ledger.standing,
            0 if current is None else current.number,
            self.sees,
            tuple(self._witnessed.values()),
            self._work,
            self._holds,
            self._is_stuck,
        )

    def _tell_report(self) -> None:
        report = self._make_report()
        if report != self._reported:
            self._reported = report
            self._tell_all(report)

    def _tell_all(self, message: AnyMessage) -> None:
        for contact in self.contacts:
            self._send(contact.link, message)

    def _beat_to(self, contact: Contact) -> None:
        held = self._now - contact.their_time_came if contact.their_time else 0.0
        self._send(contact.link, Beat(self._now, contact.their_time, held))

    def _send(self, link: int, message: AnyMessage) -> None:
        self._out.append(Send(link, message))

    def _notify(self, event: ClusterEvent) -> None:
        self._out.append(Notify(event))


def _claim(peer: str, report: Report) -> Claim:
    formed = report.standing.formed
    if formed is None:
        return Claim(report.stuck, 0, MAX_NUMBER, -report.work, peer)
    joined = next(member.joined for member in formed.members if member.peer == peer)
    return Claim(report.stuck, -formed.number, joined, -report.work, peer)
