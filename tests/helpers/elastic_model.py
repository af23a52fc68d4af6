"""Random histories of an elastic run: real replicas and the real law of membership, with everything else a dice.

Any message may be late or lost, any peer may die, be cut off, restart or join between any two events: each instruction
of a replica, each vote and each commit is an event of its own. Gradients are whole numbers, so the state after any
number of samples is known; each reduction leaves a trace in its result, as rounding does, so that a step with two
results is found out. One host may damage its copies of results. `History(seed).run()` returns what went wrong, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from msgspec.structs import replace

from ringfort.cluster.core.membership import Voter, copied_by, heritage, largest_lawful
from ringfort.cluster.core.peer_messages import Epoch, Member, Propose, Report, RunState, Term, Votes
from ringfort.cluster.core.run_members import Evidence, run_members
from ringfort.training.elastic.protocol import (
    Apply,
    Compute,
    Differs,
    Fenced,
    Gather,
    Mark,
    Pause,
    Reduce,
    Replica,
    Result,
    Share,
    Standstill,
    StepError,
)
from tests.helpers.elastic_numbers import (
    DAMAGE,
    DATA,
    Saved,
    Total,
    Wrong,
    applied,
    damaged,
    digest,
    expected,
    part_sum,
    run_state,
    some_hosts,
    void_after,
    whole,
)

KINDS = ["kill", "kill", "start", "start", "start", "cut", "heal", "save", "power", "elders"]


@dataclass(eq=False)
class Peer:
    """One process with its memory."""

    id: str
    host: int
    replica: Replica = field(init=False)
    voter: Voter = field(init=False)
    alive: bool = True
    state: int = 0
    local: int = 0
    local_step: int = -2
    epoch: Epoch | None = None
    """The epoch whose group it takes part in."""
    script: Generator[Any, Any, None] | None = None
    doing: Any = None
    round: int = 0
    got: dict[int, Any] = field(default_factory=dict[int, Any])
    """What has arrived for the current exchange, by rank."""
    early: dict[tuple[int, int], Any] = field(default_factory=dict[tuple[int, int], Any])
    """What came for later exchanges of this epoch: (round, rank)."""
    told: Standstill = field(default_factory=Standstill)
    """What it last said of itself."""
    void: str = ""
    """The reduction that it knows to be void."""
    proposed: int = 0
    """The number of the last epoch that it proposed."""

    @property
    def settled_state(self) -> int:
        """The state at the mark: a result that was sealed may still have to be applied."""
        return applied(self.state, self.doing.result) if isinstance(self.doing, Apply) else self.state


class History:
    """One random history."""

    data = DATA

    def __init__(self, seed: int, *, events: int = 900, hosts: Callable[[Random], int] = some_hosts) -> None:
        self.random = Random(seed)
        self.seed = seed
        self.events = events
        self.trace: list[str] = []
        self.peers: dict[str, Peer] = {}
        self.hosts = hosts(self.random)
        self.disks: dict[int, Saved] = {}
        """The latest checkpoint of each host."""
        self.departed: dict[str, Votes] = {}
        self.votes_on_disk: dict[int, list[tuple[str, Votes]]] = {host: [] for host in range(self.hosts)}
        self.cuts: set[frozenset[int]] = set()
        self.messages: list[tuple[Any, ...]] = []
        self.broken: set[tuple[int, str]] = set()
        """The epochs in which a connection has broken: sooner or later each member that is still in it finds out."""
        self.proposals: dict[str, tuple[Propose, set[str]]] = {}
        self.results: dict[tuple[str, int], Total] = {}
        self.sealed: dict[tuple[str, int], Mark] = {}
        self.instances = 0
        self.newcomers: dict[tuple[int, str], set[str]] = {}
        """Those that each proposed epoch adds to its leader's last one."""
        # Each history has its own habits: what is rare in one is common in another.
        self.delivery = self.random.choice([0.15, 0.4, 0.65])
        """How often a message arrives, against other events."""
        self.patience = self.random.choice([0.03, 0.03, 0.3])
        """How likely a pause is to end without a new member, at each event."""
        self.mishaps = self.random.choice([0.004, 0.012, 0.03])
        """How likely an event is a fault."""
        self.kinds = self.random.choice([KINDS, ["elders", "start", "start", "start", "save"]])
        """What faults there are."""
        self.cruelty = self.random.choice([0.0, 0.5])
        """How likely the members from before a growing epoch are to hear and to be heard late, and to lose power as it
        is committed."""
        self.late = self.random.choice(["propose", "accept"])
        """What comes late then."""
        self.staleness = self.random.choice([0.0, 0.5, 1.0])
        """How likely a leader is to know only what others said when they last were in no epoch."""
        self.chance = Random(-1 - seed)
        self.bad_host = self.chance.randrange(self.hosts)
        self.damage = self.chance.choice([0.0, 0.02, 0.3])
        """How likely a result is damaged that a peer of the bad host receives."""
        self.haste = 1.0
        """How likely a peer is to propose while another proposal is under way, and to leave an epoch without a reason,
        against the most: in the end there is one leader."""

    # --- running --------------------------------------------------------------------------------------------------

    def run(self) -> str | None:
        """Live the history. Return what went wrong."""
        more = max(25, self.hosts**2) / 25  # each exchange of values is a message from everybody to everybody
        try:
            self.begin()
            for _ in range(int(more * self.events)):
                self.event()
            self.cuts.clear()
            self.delivery, self.patience, self.staleness, self.cruelty = 0.65, 0.03, 0.0, 0.0
            self.damage, self.haste = 0.0, 0.2
            for host in range(self.hosts):
                if not any(p.alive and p.host == host for p in self.peers.values()):
                    self.start(host)
            before = set(self.sealed)
            for _ in range(int(more * 6000)):
                self.event(faults=False)
                if self.is_healed(before) or not self.living():  # the last two differed, and both left
                    return None
            return f"seed {self.seed}: no progress after healing from step {self.best()}"
        except Wrong as exc:
            return f"seed {self.seed}: {exc}"

    def begin(self) -> None:
        """Start a process on each host."""
        for host in range(self.hosts):
            self.start(host)

    def best(self) -> int:
        """Return the highest step of a living peer."""
        return max((p.replica.mark.step for p in self.living()), default=-1)

    def is_healed(self, before: Container[tuple[str, int]]) -> bool:
        """Return whether all peers are in one epoch and have sealed two steps that nobody had sealed `before`. (Steps
        of a branch that has ended, of which somebody may have had more, do not count.)"""
        living = self.living()
        keys = {None if p.epoch is None else p.epoch.key for p in living}
        last = min((p.replica.mark for p in living), key=lambda mark: mark.step, default=Mark())
        is_new = all((last.branch, last.step - n) not in before for n in (0, 1))
        return len(keys) == 1 and None not in keys and is_new

    def living(self) -> list[Peer]:
        """Return the peers that run."""
        return [p for p in self.peers.values() if p.alive]

    def say(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(text)

    def event(self, *, faults: bool = True) -> None:
        """Let one thing happen."""
        roll = self.random.random()
        if faults and self.random.random() < self.mishaps:
            self.fault()
        elif roll < 0.05:
            self.propose()
        elif roll < 0.08:
            self.learn()
        elif roll < 0.10:
            self.notice()
        elif self.messages and roll < 0.10 + self.delivery:
            self.deliver(self.messages.pop(self.random.randrange(len(self.messages))))
        else:
            living = self.living()
            if living:
                self.advance(self.random.choice(living))

    # --- processes ------------------------------------------------------------------------------------------------

    def start(self, host: int) -> None:
        """Start a process; it vouches for those that ended here."""
        self.instances += 1
        peer = Peer(f"n{host}.{self.instances}", host)
        peer.replica = Replica(self.data, lambda branch: self.found(peer, branch), digest, whole)
        peer.replica.saved = self.disks.get(host, Saved()).step
        peer.voter = Voter(peer.id)
        for old, votes in self.votes_on_disk[host]:
            self.departed[old] = votes
        peer.voter.recall([votes for _, votes in self.votes_on_disk[host]])
        self.votes_on_disk[host].append((peer.id, peer.voter.votes))
        self.peers[peer.id] = peer
        self.say(f"{peer.id} starts")

    def found(self, peer: Peer, branch: str) -> Result:
        """The first state of a branch: from the disk, or none."""
        saved = self.disks.get(peer.host, Saved(step=0))
        return Result(branch, saved.step, saved.cursor, Total(saved.state, branch), is_state=True)

    def fault(self) -> None:
        """Do something bad."""
        kind = self.random.choice(self.kinds)
        living = self.living()
        if kind == "elders" and living:
            self.end_elders(self.random.choice(living))
        elif kind in ("kill", "power") and living:
            for peer in living if kind == "power" and self.random.random() < 0.1 else [self.random.choice(living)]:
                self.say(f"{peer.id} dies ({kind})")
                peer.alive = False
                peer.script = None
                if kind == "kill":
                    self.departed[peer.id] = peer.voter.votes
        elif kind == "start":
            empty = [h for h in range(self.hosts) if not any(p.host == h for p in living)]
            if empty:
                self.start(self.random.choice(empty))
        elif kind == "cut" and self.hosts > 1:
            self.cuts.add(frozenset(self.random.sample(range(self.hosts), 2)))
        elif kind == "heal":
            self.cuts.clear()
        elif kind == "save" and living:
            peer = self.random.choice(living)
            mark = peer.replica.mark
            if mark.branch:
                self.disks[peer.host] = Saved(mark.step, mark.cursor, peer.settled_state, mark.branch)

    def is_held_back(self, peer: Peer, key: tuple[int, str]) -> bool:
        """Return whether a message to or from a member about an epoch that seats others comes late."""
        newcomers = self.newcomers[key]
        return bool(newcomers) and peer.id not in newcomers and self.random.random() < 1.9 * self.cruelty

    def end_elders(self, peer: Peer) -> None:
        """Those who were members before the newest epoch that `peer` has accepted lose power; the others are left."""
        records = peer.voter.votes.records
        newest = max(records, key=lambda epoch: epoch.number, default=None)
        for member in () if newest is None else newest.peers:
            if self.peers[member].alive and member not in self.newcomers.get(newest.key, ()):
                self.say(f"{member} dies (elder)")
                self.peers[member].alive = False
                self.peers[member].script = None

    def reaches(self, one: Peer, other: Peer) -> bool:
        """Return whether two living peers are connected."""
        return one.alive and other.alive and frozenset({one.host, other.host}) not in self.cuts

    def notice(self) -> None:
        """A peer hears what another reports; and one finds that its epoch has ended, because a member is gone or for no
        reason at all."""
        living = self.living()
        if len(living) > 1:
            peer, other = self.random.sample(living, 2)
            self.hear(peer, other)
            for votes in self.departed.values():
                if votes.formed is not None and votes.formed in peer.voter.votes.doubts:
                    self.commit(peer, votes.formed)
        living = [p for p in living if p.epoch is not None]
        if living:
            peer = self.random.choice(living)
            assert peer.epoch is not None
            others = [self.peers[member] for member in peer.epoch.peers]
            is_well = peer.voter.current == peer.epoch and all(self.reaches(peer, other) for other in others)
            is_well = is_well and peer.epoch.key not in self.broken
            # One that has accepted something later, or copied a state, has closed its connections.
            is_well = is_well and not any(other.voter.votes.highest > peer.epoch.number for other in others)
            if not is_well or self.random.random() < 0.1 * self.haste:
                self.leave(peer)

    def hear(self, peer: Peer, other: Peer) -> None:
        """The votes of another peer show that an epoch was committed, or that it never will be."""
        if not self.reaches(peer, other):
            return
        formed, pending = other.voter.votes.formed, self.proposals.get(other.id)
        other.voter.abandon(() if pending is None else (pending[0].epoch,))
        peer.voter.hear(other.id, other.voter.votes)
        if formed is not None and formed in peer.voter.votes.doubts:
            self.commit(peer, formed)

    def leave(self, peer: Peer) -> None:
        """End the peer's part in its epoch."""
        self.stop(peer)
        peer.voter.leave()

    def stop(self, peer: Peer) -> None:
        """End the program's part in its epoch. A sealed result is applied all the same."""
        if isinstance(peer.doing, Apply):
            self.apply(peer, peer.doing.result)
        peer.epoch, peer.script, peer.doing = None, None, None
        peer.got, peer.early = {}, {}
        peer.told = peer.replica.fence(0)

    # --- membership -----------------------------------------------------------------------------------------------

    def propose(self) -> None:
        """A peer that believes that it leads proposes the next epoch."""
        living = self.living()
        if not living:
            return
        leader = self.random.choice(living)
        is_under_way = any(self.peers[peer].alive for peer in self.proposals)
        if is_under_way and self.random.random() < max(1.8 * self.cruelty, 1.0 - self.haste):
            return  # what was proposed takes long
        seen = [p for p in living if p is leader or self.reaches(leader, p)]
        group = [p for p in seen if all(p is q or self.reaches(p, q) for q in seen)]
        if leader not in group:
            return
        chosen, at = self.choose(leader, group)
        votes = {p.id: p.voter.votes for p in chosen}
        ids, basis = largest_lawful([p.id for p in chosen], votes, self.departed, (), "majority")
        if leader.id not in ids:
            self.proposals.pop(leader.id, None)  # it does not lead any more
            return
        formed = leader.voter.votes.formed
        grown = formed is None or not set(ids) <= set(formed.peers)
        current = leader.voter.current
        is_same = not grown and current is not None and set(ids) == set(current.peers)
        if is_same and all(self.peers[m].voter.current == current for m in ids) and self.random.random() < 0.95:
            return
        number = max([basis.highest, leader.voter.votes.highest, leader.proposed]) + 1
        leader.proposed = number
        copied_at = copied_by(votes, ids)
        lineages, ended = heritage(basis.formed, ids, self.departed, copied_at)
        if not lineages:
            lineages = (f"{leader.id}#{number}",)
        epoch = Epoch(number, leader.id, tuple(Member(m) for m in sorted(ids)), (), lineages, ended)
        proposal = Propose(
            Term(1, leader.id),
            epoch,
            basis.formed,
            basis.doubts,
            tuple(sorted(self.departed.keys())),
            (),
            at,
            tuple(sorted(copied_at.items())),
        )
        self.proposals[leader.id] = (proposal, set())
        self.newcomers[epoch.key] = set(ids) - set(() if formed is None else formed.peers)
        self.say(f"{leader.id} proposes {number} {ids} at {at}")
        for member in ids:
            self.messages.append(("propose", leader.id, member, proposal))

    def choose(self, leader: Peer, group: list[Peer]) -> tuple[list[Peer], RunState | None]:
        """Return who may be in the next epoch of `leader`, and where all of them must be if it grows."""
        is_stale = self.random.random() < self.staleness
        reports = {p.id: self.report(p, p.told if is_stale and p is not leader else p.replica.fence(0)) for p in group}
        chosen, at = run_members(leader.id, reports, (), Evidence(self.departed))
        return [self.peers[peer] for peer in chosen], at

    def report(self, peer: Peer, stands: Standstill) -> Report:
        """Return what others know of a peer. All are ready at any time: a leader may always try to seat others."""
        state = replace(run_state(stands, is_ready=True), is_learner=peer.voter.is_learner)
        return Report(peer.voter.votes, peer.voter.current.number if peer.voter.current else 0, state=state)

    def vote(self, peer: Peer, leader: Peer, proposal: Propose) -> None:
        """Accept a proposal, if the law and the state allow it. The program goes on until it runs into the fence, or
        hears that its epoch has ended."""
        if peer.voter.objection(proposal) is not None:
            self.abandon(leader, proposal)
            return
        stands = self.fence(peer, proposal.epoch)
        peer.voter.leave()
        if peer.voter.state_objection(proposal, run_state(stands)) is not None:
            peer.voter.pass_over(proposal.epoch.number)
            self.abandon(leader, proposal)
            return
        if leader.id != peer.id and peer.id in self.proposals:
            del self.proposals[peer.id]
        peer.voter.accept(proposal)
        self.write_votes(peer)
        self.messages.append(("accept", peer.id, leader.id, proposal.epoch.number))

    def abandon(self, leader: Peer, proposal: Propose) -> None:
        """A member does not accept."""
        if leader.id in self.proposals and self.proposals[leader.id][0] is proposal:
            del self.proposals[leader.id]

    def fence(self, peer: Peer, epoch: Epoch) -> Standstill:
        """Fence the program for a proposed epoch."""
        stands = peer.replica.fence(epoch.number)
        if stands.lineage and stands.lineage in epoch.ended:
            self.fork(peer)
            stands = peer.replica.fence(epoch.number)
        return stands

    def fork(self, peer: Peer) -> None:
        """The run of the peer has ended: its state is as good as a checkpoint now."""
        mark = peer.replica.mark
        if mark.step > self.disks.get(peer.host, Saved()).step:
            self.disks[peer.host] = Saved(mark.step, mark.cursor, peer.settled_state, mark.branch)
        peer.replica.learn(Mark(), ())
        peer.void = ""
        peer.replica.saved = self.disks.get(peer.host, Saved()).step

    def write_votes(self, peer: Peer) -> None:
        """Keep the votes on the disk."""
        self.votes_on_disk[peer.host] = [
            (name, peer.voter.votes if name == peer.id else votes) for name, votes in self.votes_on_disk[peer.host]
        ]

    def commit(self, peer: Peer, epoch: Epoch) -> None:
        """All members have accepted."""
        started = peer.voter.commit(epoch.key)
        self.write_votes(peer)
        if started is not None:
            self.say(f"{peer.id} is in {started.number} {started.peers}")
            self.stop(peer)
            peer.epoch = started
            peer.round, peer.got, peer.early = 0, {}, {}
            me = started.peers.index(peer.id)
            peer.script = peer.replica.epoch(started.number, me, len(started.peers), started.lineages[0])
            peer.doing = next(peer.script)

    # --- learning -------------------------------------------------------------------------------------------------

    def serves(self, donor: Peer, learner: Peer) -> bool:
        """Return whether a peer is in an epoch that goes on without the learner, or waits for the learner, which has
        given up the state of their epoch."""
        epoch = donor.voter.votes.formed
        if epoch is None or learner.id not in epoch.peers:
            return epoch is not None and donor.epoch == donor.voter.current == epoch
        return learner.voter.has_given_up(epoch) and not donor.voter.is_learner

    def learn(self) -> None:
        """A peer that is in no epoch copies the state of a member, unless the next epoch is for it to settle."""
        peer = self.random.choice(self.living() or [None])
        donors = [
            p
            for p in self.living()
            if peer is not None and self.reaches(p, peer) and p.replica.mark.branch and self.serves(p, peer)
        ]
        if peer is None or not donors:
            return
        donor = self.random.choice(donors)
        epoch = donor.voter.votes.formed
        assert epoch is not None
        mine, theirs = peer.replica.mark, donor.replica.mark
        if mine.branch not in ("", theirs.branch):
            # Two runs have met: the one with more steps stays, unless it is only a copy or has ended.
            has_ended = peer.voter.is_learner or mine.lineage in epoch.ended
            is_ahead = not has_ended and (mine.step, mine.branch) > (theirs.step, theirs.branch)
            if is_ahead or not all(self.reaches(p, q) for p in self.living() for q in self.living()):
                return
            self.leave(peer)
            self.fork(peer)
        elif peer.epoch is not None or mine.step > theirs.step:
            return
        formed = None if peer.voter.is_learner else peer.voter.votes.formed
        if formed is not None and mine.lineage in epoch.lineages and epoch.number < formed.number:
            return  # the donor is behind
        peer.voter.learn(epoch)
        self.write_votes(peer)
        peer.replica.learn(theirs, donor.replica.history)
        peer.void = ""
        peer.state = donor.settled_state
        peer.told = peer.replica.fence(0)

    # --- the program ----------------------------------------------------------------------------------------------

    def advance(self, peer: Peer) -> None:
        """Carry out the peer's next instruction, if it can be."""
        if peer.script is None or peer.epoch is None:
            return
        members = peer.epoch.peers
        me = members.index(peer.id)
        peer.replica.wants_pause = any(p.id not in members and self.reaches(p, peer) for p in self.living())
        match peer.doing:
            case Gather(value=value):
                self.exchange(peer, me, value)
            case Reduce():
                if peer.local_step != peer.replica.mark.step + 1 or not peer.replica.covered:
                    peer.local = 0
                self.exchange(peer, me, peer.local)
            case Share(root=root, result=result):
                self.exchange(peer, me, result, root)
            case Compute(step=step, part=part, span=span):
                if peer.local_step != step or not peer.replica.covered:
                    peer.local, peer.local_step = 0, step
                peer.local += part_sum(span, part)
                peer.replica.add(part)
                peer.replica.speed = self.random.choice([0, 1, 2, 5])
                self.resume(peer, None)
            case Apply(result=result):
                peer.doing = None
                self.apply(peer, result)
                peer.replica.speed = self.random.choice([0, 1, 2, 5])
                self.resume(peer, None)
            case Pause():
                peer.told = peer.replica.fence(0)
                if self.random.random() < self.patience:
                    self.resume(peer, None)
            case _:
                raise Wrong(f"unknown instruction {peer.doing}")

    def exchange(self, peer: Peer, me: int, value: Any, root: int | None = None) -> None:
        """Send this peer's contribution once, and take the result when all have come."""
        assert peer.epoch is not None
        if me not in peer.got:
            peer.got[me] = value
            for rank, other in enumerate(peer.epoch.peers):
                if rank != me and (root is None or root == me):
                    self.messages.append(("data", peer.id, other, peer.epoch.key, peer.round, me, value))
            for (turn, rank), early in list(peer.early.items()):
                if turn == peer.round:
                    peer.got[rank] = early
                    del peer.early[turn, rank]
        size = len(peer.epoch.peers)
        needed = range(size) if root is None else (root,)
        if all(rank in peer.got for rank in needed):
            values = [peer.got[rank] for rank in needed]
            peer.round, peer.got = peer.round + 1, {}
            if isinstance(peer.doing, Reduce):
                self.resume(peer, self.copied(peer, Total(sum(values), str(peer.epoch.key))))
            elif root is None:
                self.resume(peer, values)
            else:
                self.resume(peer, values[0] if root == me else self.copied(peer, values[0]))

    def copied(self, peer: Peer, copy: Any) -> Any:
        """Return a copy as the peer receives it. Damage at a peer alone is beyond anybody's notice."""
        assert peer.epoch is not None
        is_bad = peer.host == self.bad_host and len(peer.epoch.peers) > 1
        return damaged(copy) if is_bad and self.chance.random() < self.damage else copy

    def resume(self, peer: Peer, value: Any) -> None:
        """Go on with the script."""
        assert peer.script is not None
        before = peer.replica.mark
        try:
            peer.doing = peer.script.send(value)
        except Fenced:
            self.leave(peer)
        except Differs as exc:
            self.differ(peer, exc)
        except StepError as exc:
            raise Wrong(str(exc)) from exc
        mark = peer.replica.mark
        if mark != before:
            assert peer.epoch is not None
            known = {self.peers[member].void for member in peer.epoch.peers if self.peers[member].alive}
            result = peer.doing.result
            sizes = {self.data.span(before.cursor, members).samples for members in range(1, self.hosts + 1)}
            if not result.is_state and result.cursor - before.cursor not in sizes:
                raise Wrong(f"{peer.id} sealed a step from {before.cursor} to {result.cursor}, but sizes are {sizes}")
            if result.payload.made in known:
                raise Wrong(f"{peer.id} sealed what a member of its epoch knows to be void")
            key = (mark.branch, mark.step)
            if self.sealed.setdefault(key, mark) != mark:
                raise Wrong(f"{peer.id} sealed {mark}, and somebody {self.sealed[key]}")

    def differ(self, peer: Peer, differs: Differs) -> None:
        """The peer has found that members have different copies of a result."""
        assert peer.epoch is not None
        self.say(f"{peer.id} finds {differs}")
        peer.void = void_after(peer.replica, peer.epoch) or peer.void
        is_odd = peer.epoch.peers.index(peer.id) in differs.ranks
        self.leave(peer)
        if differs.times > 1 and is_odd:
            self.say(f"{peer.id} leaves the run")
            peer.alive = False
            self.departed[peer.id] = peer.voter.votes

    def apply(self, peer: Peer, result: Result) -> None:
        """Change the state."""
        peer.state = applied(peer.state, result)
        key = (result.branch, result.step)
        if self.results.setdefault(key, result.payload) != result.payload:
            raise Wrong(f"two results for step {key}")
        if peer.state % DAMAGE != expected(result.cursor):
            raise Wrong(f"{peer.id} has {peer.state} after step {key}, not {expected(result.cursor)}")
        self.say(f"{peer.id} applies {key}")

    # --- messages -------------------------------------------------------------------------------------------------

    def deliver(self, message: tuple[Any, ...]) -> None:
        """Bring one message to its peer, unless the way is cut or somebody is dead."""
        kind, source, target = message[0], self.peers[message[1]], self.peers[message[2]]
        if not target.alive or (source is not target and not self.reaches(source, target)):
            if source.alive and target.alive and self.random.random() < 0.7:
                self.messages.append(message)
            elif kind == "data":
                self.broken.add(message[3])  # a connection loses nothing and goes on
            return
        match kind:
            case "propose" if self.late == kind and self.is_held_back(target, message[3].epoch.key):
                self.messages.append(message)
            case "accept" if self.late == kind and self.is_held_back(source, (message[3], target.id)):
                self.messages.append(message)
            case "propose":
                self.vote(target, source, message[3])
            case "accept":
                pending = self.proposals.get(target.id)
                if pending is not None and pending[0].epoch.number == message[3]:
                    pending[1].add(source.id)
                    if pending[1] >= set(pending[0].epoch.peers):
                        del self.proposals[target.id]
                        self.commit(target, pending[0].epoch)
                        for member in pending[0].epoch.peers:
                            self.messages.append(("commit", target.id, member, pending[0].epoch))
                        if self.newcomers[pending[0].epoch.key] and self.random.random() < self.cruelty:
                            self.messages[-len(pending[0].epoch.peers) :] = []
                            for member in pending[0].epoch.peers:
                                self.commit(self.peers[member], pending[0].epoch)
                            self.end_elders(target)
            case "commit":
                self.commit(target, message[3])
            case _:
                _, _, _, key, turn, rank, value = message
                if target.epoch is not None and target.epoch.key == key:
                    if turn == target.round and target.doing is not None:
                        target.got[rank] = value
                    else:
                        target.early[turn, rank] = value
                elif target.voter.votes.highest <= key[0] and (target.epoch is None or target.epoch.number < key[0]):
                    # It has not heard of the commit yet; its program may still be in the epoch before.
                    self.messages.append(message)
