"""Random histories of an elastic run: real replicas and the real law of membership, with everything else a dice.

Any message may be late or lost, any peer may die, be cut off, restart or join between any two events: each instruction
of a replica, each vote and each commit is an event of its own. Gradients are whole numbers, so the state after any
number of samples is known. `History(seed).run()` returns what went wrong, or None.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from ringfort.cluster.core.membership import Voter, heritage, largest_lawful
from ringfort.cluster.core.peer_messages import Epoch, Member, Propose, Term, Votes
from ringfort.training.elastic.dealing import Data
from ringfort.training.elastic.protocol import (
    Apply,
    Compute,
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

DATA = Data(samples=50, batch=12, microbatch=3, seed=7)


class Wrong(AssertionError):  # noqa: N818  # a verdict
    """A history broke a promise."""


def gradient(sample: int) -> int:
    """Return the gradient of one sample."""
    return (sample * 2654435761) % 1000003


def expected(cursor: int, cache: dict[int, int] = {0: 0}) -> int:  # noqa: B006  # a cache
    """Return the state after `cursor` samples."""
    top = max(known for known in cache if known <= cursor)
    while top < cursor:
        span = DATA.span(top)
        total = sum(gradient(int(i)) for part in range(DATA.parts(span)) for i in DATA.part(span, part))
        cache[top + span.samples] = cache[top] + total
        top += span.samples
    return cache[cursor]


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
    accepted_at: Standstill | None = None


class History:
    """One random history."""

    def __init__(self, seed: int, *, events: int = 900) -> None:
        self.random = Random(seed)
        self.seed = seed
        self.events = events
        self.trace: list[str] = []
        self.peers: dict[str, Peer] = {}
        self.hosts = self.random.randint(2, 5)
        self.disks: dict[int, tuple[int, int, str]] = {}
        """The latest checkpoint of each host: step, cursor, branch."""
        self.departed: dict[str, Votes] = {}
        self.votes_on_disk: dict[int, list[tuple[str, Votes]]] = {host: [] for host in range(self.hosts)}
        self.cuts: set[frozenset[int]] = set()
        self.messages: list[tuple[Any, ...]] = []
        self.proposals: dict[str, tuple[Propose, Standstill | None, set[str]]] = {}
        self.results: dict[tuple[str, int], int] = {}
        self.sealed: dict[tuple[str, int], Mark] = {}
        self.instances = 0
        self.founded: set[str] = set()

    # --- running --------------------------------------------------------------------------------------------------

    def run(self) -> str | None:
        """Live the history. Return what went wrong."""
        try:
            for host in range(self.hosts):
                self.start(host)
            for _ in range(self.events):
                self.event()
            self.cuts.clear()
            for host in range(self.hosts):
                if not any(p.alive and p.host == host for p in self.peers.values()):
                    self.start(host)
            before = self.best()
            for _ in range(6000):
                self.event(faults=False)
                if self.is_healed(before):
                    return None
            return f"seed {self.seed}: no progress after healing from {before}"
        except Wrong as exc:
            return f"seed {self.seed}: {exc}"

    def best(self) -> int:
        """Return the highest step of a living peer."""
        return max((p.replica.mark.step for p in self.living()), default=-1)

    def is_healed(self, before: int) -> bool:
        """Return whether all peers are in one epoch and have gone on."""
        living = self.living()
        keys = {None if p.epoch is None else p.epoch.key for p in living}
        return len(keys) == 1 and None not in keys and min(p.replica.mark.step for p in living) > before + 1

    def living(self) -> list[Peer]:
        """Return the peers that run."""
        return [p for p in self.peers.values() if p.alive]

    def say(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(text)

    def event(self, *, faults: bool = True) -> None:
        """Let one thing happen."""
        roll = self.random.random()
        if faults and roll < 0.012:
            self.fault()
        elif roll < 0.05:
            self.propose()
        elif roll < 0.08:
            self.learn()
        elif roll < 0.10:
            self.notice()
        elif self.messages and roll < 0.75:
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
        peer.replica = Replica(
            DATA, lambda branch: self.found(peer, branch), lambda result, me, _: result.payload if me == 0 else 0
        )
        peer.replica.saved = self.disks.get(host, (-1, 0, ""))[0]
        peer.voter = Voter(peer.id)
        for old, votes in self.votes_on_disk[host]:
            self.departed[old] = votes
        peer.voter.recall([votes for _, votes in self.votes_on_disk[host]])
        self.votes_on_disk[host].append((peer.id, peer.voter.votes))
        self.peers[peer.id] = peer
        self.say(f"{peer.id} starts")

    def found(self, peer: Peer, branch: str) -> Result:
        """The first state of a branch: from the disk, or none."""
        step, cursor, _ = self.disks.get(peer.host, (0, 0, ""))
        return Result(branch, step, cursor, expected(cursor), is_state=True)

    def fault(self) -> None:
        """Do something bad."""
        kind = self.random.choice(["kill", "kill", "start", "start", "cut", "heal", "save", "power"])
        living = self.living()
        if kind in ("kill", "power") and living:
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
            if mark.branch and not isinstance(peer.doing, Apply):
                self.disks[peer.host] = (mark.step, mark.cursor, mark.branch)

    def reaches(self, one: Peer, other: Peer) -> bool:
        """Return whether two living peers are connected."""
        return one.alive and other.alive and frozenset({one.host, other.host}) not in self.cuts

    def notice(self) -> None:
        """A peer finds that its epoch has ended, because a member is gone or for no reason at all."""
        living = [p for p in self.living() if p.epoch is not None]
        if living:
            peer = self.random.choice(living)
            assert peer.epoch is not None
            if all(self.reaches(peer, self.peers[m]) for m in peer.epoch.peers) and self.random.random() < 0.9:
                return
            self.leave(peer)

    def leave(self, peer: Peer) -> None:
        """End the peer's part in its epoch. A sealed result is applied all the same."""
        if isinstance(peer.doing, Apply):
            self.apply(peer, peer.doing.result)
        peer.epoch, peer.script, peer.doing = None, None, None
        peer.got, peer.early = {}, {}
        peer.voter.leave()

    # --- membership -----------------------------------------------------------------------------------------------

    def propose(self) -> None:
        """A peer that believes that it leads proposes the next epoch."""
        living = self.living()
        if not living:
            return
        leader = self.random.choice(living)
        seen = [p for p in living if p is leader or self.reaches(leader, p)]
        group = [p for p in seen if all(p is q or self.reaches(p, q) for q in seen)]
        if leader not in group:
            return
        chosen, at = self.choose(leader, group)
        if not chosen:
            return
        votes = {p.id: p.voter.votes for p in chosen}
        ids, basis = largest_lawful([p.id for p in chosen], votes, self.departed, (), "majority")
        if leader.id not in ids:
            return
        formed = leader.voter.votes.formed
        grown = formed is None or not set(ids) <= set(formed.peers)
        is_same = not grown and leader.voter.current is not None and set(ids) == set(leader.voter.current.peers)
        if is_same and all(self.peers[m].epoch is not None for m in ids) and self.random.random() < 0.95:
            return
        number = max([basis.highest, leader.voter.votes.highest, *(v.highest for v in votes.values())]) + 1
        lineages, ended = heritage(basis.formed, ids, self.departed)
        if not lineages:
            lineages = (f"{leader.id}#{number}",)
        epoch = Epoch(number, leader.id, tuple(Member(m) for m in sorted(ids)), (), lineages, ended)
        proposal = Propose(
            Term(1, leader.id), epoch, basis.formed, basis.doubts, tuple(sorted(self.departed.keys())), ()
        )
        self.proposals[leader.id] = (proposal, at, set())
        self.say(f"{leader.id} proposes {number} {ids} at {at}")
        for member in ids:
            self.messages.append(("propose", leader.id, member, proposal, at))

    def choose(self, leader: Peer, group: list[Peer]) -> tuple[list[Peer], Standstill | None]:
        """Return who may be in the next epoch of `leader`, and where all of them must be if it grows."""
        mine = leader.replica
        votes = {p.id: p.voter.votes for p in group}
        _, basis = largest_lawful(list(votes), votes, self.departed, (), "majority")
        lineages, ended = heritage(basis.formed, list(votes), self.departed)
        if not lineages:
            return [p for p in group if p.replica.mark.lineage in ("", *ended)], Standstill()
        formed = leader.voter.votes.formed
        old = [p for p in group if formed is not None and p.id in formed.peers]
        same = [p for p in group if p.replica.mark == mine.mark and p.replica.held is None]
        if set(old) <= set(same):
            return same, Standstill(mine.mark)
        return old, None

    def vote(self, peer: Peer, leader: Peer, proposal: Propose, at: Standstill | None) -> None:
        """Accept a proposal, if the law and the state allow it."""
        if peer.voter.objection(proposal) is not None:
            return
        formed = peer.voter.votes.formed
        if at is None and (formed is None or not set(proposal.epoch.peers) <= set(formed.peers)):
            return  # it grows, and does not say from where
        epoch = proposal.epoch
        stands = peer.replica.fence(epoch.number)
        self.leave(peer)
        if stands.lineage not in ("", *epoch.lineages, *epoch.ended):
            return  # its run may be going on elsewhere
        if stands.lineage in epoch.ended:
            self.fork(peer)
            stands = Standstill()
        if peer.voter.is_learner if at is None else (stands.mark != at.mark or stands.is_pending):
            return
        if leader.id != peer.id and peer.id in self.proposals:
            del self.proposals[peer.id]
        peer.voter.accept(proposal)
        self.write_votes(peer)
        self.messages.append(("accept", peer.id, leader.id, proposal.epoch.number))

    def fork(self, peer: Peer) -> None:
        """The run of the peer has ended: its state is as good as a checkpoint now."""
        mark = peer.replica.mark
        if mark.step > self.disks.get(peer.host, (-1, 0, ""))[0]:
            self.disks[peer.host] = (mark.step, mark.cursor, mark.branch)
        peer.replica.learn(Mark(), ())
        peer.replica.saved = self.disks.get(peer.host, (-1, 0, ""))[0]

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
            peer.epoch = started
            peer.round, peer.got, peer.early = 0, {}, {}
            me = started.peers.index(peer.id)
            peer.script = peer.replica.epoch(started.number, me, len(started.peers), started.lineages[0])
            peer.doing = next(peer.script)

    # --- learning -------------------------------------------------------------------------------------------------

    def learn(self) -> None:
        """A peer that is in no epoch copies the state of a member, unless the next epoch is for it to settle."""
        peer = self.random.choice(self.living() or [None])
        donors = [
            p
            for p in self.living()
            if peer is not None
            and self.reaches(p, peer)
            and p.replica.mark.branch
            and p.epoch is not None
            and peer.id not in p.epoch.peers
            and not isinstance(p.doing, Apply)
        ]
        if peer is None or not donors:
            return
        donor = self.random.choice(donors)
        assert donor.epoch is not None
        mine, theirs = peer.replica.mark, donor.replica.mark
        if mine.branch not in ("", theirs.branch):
            # Two runs have met: the one with more steps stays.
            if (mine.step, mine.branch) > (theirs.step, theirs.branch) or not all(
                self.reaches(p, q) for p in self.living() for q in self.living()
            ):
                return
            self.leave(peer)
            self.fork(peer)
        elif peer.epoch is not None or mine.step > theirs.step:
            return
        peer.voter.learn(donor.epoch)
        self.write_votes(peer)
        peer.replica.learn(theirs, donor.replica.history)
        peer.state = donor.state

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
            case Compute(step=step, part=part):
                if peer.local_step != step or not peer.replica.covered:
                    peer.local, peer.local_step = 0, step
                span = DATA.span(peer.replica.mark.cursor)
                peer.local += sum(gradient(int(i)) for i in DATA.part(span, part))
                peer.replica.add(part)
                self.resume(peer, None)
            case Apply(result=result):
                self.apply(peer, result)
                self.resume(peer, None)
            case Pause():
                if self.random.random() < 0.03:
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
                self.resume(peer, sum(values))
            else:
                self.resume(peer, values if root is None else values[0])

    def resume(self, peer: Peer, value: Any) -> None:
        """Go on with the script."""
        assert peer.script is not None
        before = peer.replica.mark
        try:
            peer.doing = peer.script.send(value)
        except Fenced:
            self.leave(peer)
        except StepError as exc:
            raise Wrong(str(exc)) from exc
        mark = peer.replica.mark
        if mark != before:
            key = (mark.branch, mark.step)
            if self.sealed.setdefault(key, mark) != mark:
                raise Wrong(f"{peer.id} sealed {mark}, and somebody {self.sealed[key]}")

    def apply(self, peer: Peer, result: Result) -> None:
        """Change the state."""
        if result.is_state:
            peer.state = result.payload
        else:
            peer.state += result.payload
        key = (result.branch, result.step)
        if self.results.setdefault(key, result.payload) != result.payload:
            raise Wrong(f"two results for step {key}")
        if peer.state != expected(result.cursor):
            raise Wrong(f"{peer.id} has {peer.state} after step {key}, not {expected(result.cursor)}")
        self.say(f"{peer.id} applies {key}")

    # --- messages -------------------------------------------------------------------------------------------------

    def deliver(self, message: tuple[Any, ...]) -> None:
        """Bring one message to its peer, unless the way is cut or somebody is dead."""
        kind, source, target = message[0], self.peers[message[1]], self.peers[message[2]]
        if not target.alive or (source is not target and not self.reaches(source, target)):
            if source.alive and target.alive and self.random.random() < 0.7:
                self.messages.append(message)
            return
        match kind:
            case "propose":
                self.vote(target, source, message[3], message[4])
            case "accept":
                pending = self.proposals.get(target.id)
                if pending is not None and pending[0].epoch.number == message[3]:
                    pending[2].add(source.id)
                    if pending[2] >= set(pending[0].epoch.peers):
                        del self.proposals[target.id]
                        for member in pending[0].epoch.peers:
                            self.messages.append(("commit", target.id, member, pending[0].epoch))
            case "commit":
                self.commit(target, message[3])
            case _:
                _, _, _, key, turn, rank, value = message
                if target.epoch is not None and target.epoch.key == key:
                    if turn == target.round and target.doing is not None:
                        target.got[rank] = value
                    else:
                        target.early[turn, rank] = value
                elif target.voter.votes.highest <= key[0] and target.epoch is None:
                    self.messages.append(message)  # it has not heard of the commit yet
