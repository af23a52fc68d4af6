"""Random histories of an elastic run on simulated hosts: the control plane and the replicas are those of production.

The network delays, cuts and resets; processes die with and without a word, freeze, lose power and start again; disks
are slow. The programs' own messages take the same network. `History(seed).run()` returns what went wrong, or None.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from ringfort.cluster.core.events import EpochEnded, EpochStarted, Fence, Instruction, Notify
from ringfort.cluster.core.membership import Voter
from ringfort.cluster.core.peer_messages import Epoch, RunState
from ringfort.config import AutoDiscoveryConfig
from ringfort.testing.network import SimulatedNetwork, SimulatedPeer
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
    StepError,
)
from tests.helpers.elastic_model import DATA, Saved, Total, Wrong, applied, digest, expected, gradient, run_state

HEALING = 15.0
"""Virtual seconds after the last fault within which all peers train together again."""


@dataclass(eq=False)
class Program:
    """The training process of one peer."""

    peer: SimulatedPeer
    world: World
    state: int = 0
    local: int = 0
    local_step: int = -2
    epoch: Epoch | None = None
    script: Generator[Any, Any, None] | None = None
    doing: Any = None
    round: int = 0
    got: dict[tuple[int, int], Any] = field(default_factory=dict[tuple[int, int], Any])
    """What has arrived in this epoch, by exchange and rank."""
    has_sent: bool = False
    hears_at: float = 0.0

    def __post_init__(self) -> None:
        self.replica = Replica(DATA, self.found, digest)
        self.replica.saved = self.disk.step
        self.alone_since = self.world.network.now

    @property
    def disk(self) -> Saved:
        """The newest checkpoint on this host."""
        return self.world.disks.get(self.peer.host, Saved())

    @property
    def voter(self) -> Voter:
        """The votes of its control process."""
        return self.peer.core.voter

    def found(self, branch: str) -> Result:
        """Return the first state of a branch."""
        saved = max(self.disk, Saved(step=0))
        return Result(branch, saved.step, saved.cursor, Total(saved.state, branch), is_state=True)

    @property
    def settled_state(self) -> int:
        """The state at the mark: a result that was sealed may still have to be applied."""
        return applied(self.state, self.doing.result) if isinstance(self.doing, Apply) else self.state

    def run_state(self, *, is_ready: bool = False) -> RunState:
        """Return what the control plane is told."""
        return run_state(self.replica.fence(0), is_ready=is_ready)

    # --- epochs -----------------------------------------------------------------------------------------------------

    def fence(self, number: int, ended: tuple[str, ...]) -> None:
        """Stop what belongs to earlier epochs: the program runs into the fence, or hears that its epoch has ended."""
        stands = self.replica.fence(number)
        if stands.lineage and stands.lineage in ended:
            self.fork()
            stands = self.replica.fence(number)
        self.world.call(self.peer, "fenced", number, run_state(stands))

    def fork(self) -> None:
        """The run is over: its state is as good as a checkpoint now."""
        mark = self.replica.mark
        if mark.step > self.disk.step:
            self.world.disks[self.peer.host] = Saved(mark.step, mark.cursor, self.settled_state, mark.branch)
        self.replica.learn(Mark(), ())
        self.replica.saved = self.disk.step

    def begin(self, epoch: Epoch) -> None:
        """Take part in an epoch."""
        self.end()
        self.epoch, self.round, self.got, self.has_sent = epoch, 0, {}, False
        me = epoch.holders.index(self.peer.id)
        self.script = self.replica.epoch(epoch.number, me, len(epoch.holders), epoch.lineages[0])
        self.doing = next(self.script)
        self.advance()

    def end(self) -> None:
        """The epoch has ended. What was sealed is applied all the same."""
        if isinstance(self.doing, Apply):
            self.apply(self.doing.result)
        self.epoch, self.script, self.doing = None, None, None
        self.alone_since = self.world.network.now

    # --- steps ------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Carry out instructions until one has to wait."""
        while self.script is not None and self.epoch is not None:
            replica, me = self.replica, self.epoch.peers.index(self.peer.id)
            match self.doing:
                case Gather(value=value):
                    values = self.exchange(me, value)
                    if values is None:
                        return
                    self.resume(values)
                case Reduce():
                    if self.local_step != replica.mark.step + 1 or not replica.covered:
                        self.local = 0
                    values = self.exchange(me, self.local)
                    if values is None:
                        return
                    self.resume(Total(sum(values), str(self.epoch.key)))
                case Share(root=root, result=result):
                    values = self.exchange(me, result, root)
                    if values is None:
                        return
                    self.resume(values[0])
                case Compute() | Apply():
                    self.world.later(self, 0.001, 0.006, self.work, self.epoch, self.doing)
                    return
                case Pause():
                    self.world.call(self.peer, "set_run_state", self.run_state(is_ready=True))
                    self.world.later(self, 0.4, 0.41, self.go_on, self.epoch)
                    return
                case _:
                    raise Wrong(f"unknown instruction {self.doing}")

    def work(self, epoch: Epoch, doing: Any) -> None:
        """Computing or applying has ended."""
        if self.epoch is not epoch or self.doing is not doing:
            return
        if isinstance(doing, Compute):
            if self.local_step != doing.step or not self.replica.covered:
                self.local, self.local_step = 0, doing.step
            span = DATA.span(self.replica.mark.cursor)
            self.local += sum(gradient(int(i)) for i in DATA.part(span, doing.part))
            self.replica.add(doing.part)
        else:
            self.doing = None
            self.apply(doing.result)
        self.replica.speed = self.world.random.choice([0, 1, 2, 5])
        self.resume(None)
        self.advance()

    def go_on(self, epoch: Epoch) -> None:
        """The pause is over."""
        if self.epoch is epoch and isinstance(self.doing, Pause):
            self.world.call(self.peer, "set_run_state", self.run_state())
            if self.epoch is epoch and isinstance(self.doing, Pause):
                self.resume(None)
                self.advance()

    def exchange(self, me: int, value: Any, root: int | None = None) -> list[Any] | None:
        """Send this member's part once. Return all parts, when they are here."""
        assert self.epoch is not None
        if not self.has_sent:
            self.has_sent = True
            self.got[self.round, me] = value
            self.replica.wants_pause = self.world.has_learner_for(self)
            if root is None or root == me:
                for other in self.epoch.holders:
                    if other != self.peer.id:
                        self.world.send(self, other, self.epoch.key, self.round, me, value)
        needed = range(len(self.epoch.holders)) if root is None else (root,)
        if any((self.round, rank) not in self.got for rank in needed):
            return None
        values = [self.got[self.round, rank] for rank in needed]
        self.round, self.has_sent = self.round + 1, False
        return values

    def arrive(self, key: tuple[int, str], turn: int, rank: int, value: Any) -> None:
        """A part of another member has come."""
        if self.epoch is not None and self.epoch.key == key:
            self.got[turn, rank] = value
            if isinstance(self.doing, (Gather, Reduce, Share)):
                self.advance()
        elif self.peer.core.voter.votes.highest <= key[0]:
            self.world.later(self, 0.005, 0.01, self.arrive, key, turn, rank, value)  # the commit is on its way

    def resume(self, value: Any) -> None:
        """Go on with the script."""
        assert self.script is not None
        before = self.replica.mark
        try:
            self.doing = self.script.send(value)
        except Fenced:
            self.end()
        except StepError as exc:
            raise Wrong(f"{self.peer.id}: {exc}") from exc
        self.world.check_mark(self, before, self.replica.mark)

    def apply(self, result: Result) -> None:
        """Change the state."""
        self.state = applied(self.state, result)
        self.world.check_result(self, result)
        if self.world.random.random() < 0.1:
            self.world.disks[self.peer.host] = Saved(result.step, result.cursor, self.state, result.branch)

    # --- learning ---------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Now and then: copy the state of a run that goes on without this peer."""
        self.world.later(self, 0.03, 0.08, self.look)
        donors = [p for p in self.world.living() if p is not self and self.world.reaches(self, p)]
        donors = [p for p in donors if p.replica.mark.branch]
        donors = [p for p in donors if not p.voter.is_learner and p.voter.votes.formed is not None]
        is_copy = self.voter.is_learner
        donors = [p for p in donors if is_copy or self.peer.id not in p.voter.votes.formed.peers]
        if not donors:
            return
        donor = self.world.random.choice(donors)
        mine, theirs = self.replica.mark, donor.replica.mark
        if mine.branch not in ("", theirs.branch):
            if not is_copy and (mine.step, mine.branch) > (theirs.step, theirs.branch):
                return
            if self.world.random.random() < 0.8:
                return
            self.replica.fence(self.peer.core.voter.votes.highest + 1)
            self.end()
            self.fork()
        elif self.epoch is not None or self.world.network.now < self.alone_since + 0.3 or mine.step >= theirs.step:
            return
        epoch = donor.voter.votes.formed
        self.replica.learn(theirs, donor.replica.history)
        self.state = donor.settled_state
        self.world.call(self.peer, "learned", epoch, self.run_state(is_ready=True))


class World:
    """A simulated network with a program on each peer, and the promises that are checked at every step."""

    def __init__(self, seed: int, hosts: int, *, witnesses: int = 0, traced: bool = False) -> None:
        """The last `witnesses` hosts have no program: they only vote."""
        self.random = Random(seed ^ 0x5EED)
        self.trainers = hosts - witnesses
        self.disks: dict[int, Saved] = {}
        self.programs: dict[str, Program] = {}
        self.results: dict[tuple[str, int], Total] = {}
        self.marks: dict[tuple[str, int], Mark] = {}
        config = AutoDiscoveryConfig(min_peers=0)
        self.network = SimulatedNetwork(seed, hosts, config, observer=self.observe, traced=traced)

    def start(self, host: int) -> None:
        """Start a process and its program."""
        peer = self.network.start(host, witness=host >= self.trainers)
        if host >= self.trainers:
            return
        program = self.programs[peer.id] = Program(peer, self)
        self.call(peer, "set_run_state", program.run_state())
        self.later(program, 0.3, 0.5, program.look)

    def living(self) -> list[Program]:
        """Return the programs that run."""
        return [p for p in self.programs.values() if p.peer.alive]

    def observe(self, peer: SimulatedPeer, instruction: Instruction) -> None:
        """Tell the program what its control process instructs."""
        program = self.programs.get(peer.id)
        if program is None:
            return
        match instruction:
            case Fence(epoch=number, ended=ended):
                self.in_order(program, program.fence, number, ended)
            case Notify(event=EpochStarted(epoch=epoch)):
                self.in_order(program, self.begin, program, epoch)
            case Notify(event=EpochEnded(epoch=epoch)):
                self.in_order(program, self.end, program, epoch)
            case _:
                pass

    def in_order(self, program: Program, do: Any, *arguments: Any) -> None:
        """Pass on what the control process says, which keeps its order."""
        program.hears_at = max(program.hears_at, self.network.now + self.random.uniform(0.0, 0.002))
        self.network._at(program.hears_at, self.network._deliver, program.peer, do, *arguments)

    def begin(self, program: Program, epoch: Epoch) -> None:
        """An epoch has begun, unless it has ended since."""
        if program.peer.core.epoch == epoch:
            program.begin(epoch)

    def end(self, program: Program, epoch: Epoch) -> None:
        """An epoch has ended."""
        if program.epoch is not None and program.epoch.key == epoch.key:
            program.end()
            if self.random.random() < 0.3:  # its thread is in a call that has to fail first
                self.later(program, 0.0, 0.5, self.tell, program)
            else:
                self.tell(program)

    def tell(self, program: Program) -> None:
        """Tell where a program is that is in no epoch."""
        if program.epoch is None:
            self.call(program.peer, "set_run_state", program.run_state())

    def call(self, peer: SimulatedPeer, method: str, *arguments: Any) -> None:
        """Call the core of a peer."""
        if peer.alive:
            self.network.do(peer.host, lambda core, now: getattr(core, method)(now, *arguments))

    def later(self, program: Program, least: float, most: float, do: Any, *arguments: Any) -> None:
        """Have a program do something after a while, unless it is dead; a frozen one does it after it thaws."""
        when = self.network.now + self.random.uniform(least, most)
        self.network._at(when, self.network._deliver, program.peer, do, *arguments)

    def send(self, program: Program, target: str, *content: Any) -> None:
        """Send something to another program, over the network."""
        other = self.programs[target]
        if not program.peer.alive or not other.peer.alive:
            return
        if self.reaches(program, other):
            self.later(other, 0.0005, 0.004, other.arrive, *content)
        else:
            self.later(program, 0.02, 0.05, self.send, program, target, *content)

    def reaches(self, one: Program, other: Program) -> bool:
        """Return whether nothing is cut between two hosts."""
        a, b = one.peer.host, other.peer.host
        return not {(a, b), (b, a)} & self.network._cuts and not other.peer.frozen

    def has_learner_for(self, program: Program) -> bool:
        """Return whether a peer waits that could be seated soon."""
        epoch = program.epoch
        return epoch is not None and any(
            p.peer.id not in epoch.peers
            and self.reaches(program, p)
            and p.replica.mark.branch == program.replica.mark.branch
            for p in self.living()
        )

    def check_mark(self, program: Program, before: Mark, mark: Mark) -> None:
        """One result per branch and step."""
        if mark != before and self.marks.setdefault((mark.branch, mark.step), mark) != mark:
            raise Wrong(f"{program.peer.id} sealed {mark}, another member {self.marks[mark.branch, mark.step]}")

    def check_result(self, program: Program, result: Result) -> None:
        """The state is that of one process without faults."""
        key = (result.branch, result.step)
        self.network.log(f"{program.peer.id} applies {key}")
        if self.results.setdefault(key, result.payload) != result.payload:
            raise Wrong(f"two results for {key}: {self.results[key]} and {result.payload}")
        if program.state != expected(result.cursor):
            raise Wrong(f"{program.peer.id} has {program.state} after {key}, not {expected(result.cursor)}")


class History:
    """One random history."""

    def __init__(self, seed: int, *, witnesses: int = 0, duration: float = 8.0, traced: bool = False) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.hosts = self.random.randint(2, 6) + witnesses
        self.duration = duration
        self.world = World(seed, self.hosts, witnesses=witnesses, traced=traced)

    def run(self) -> str | None:
        """Live the history. Return what went wrong."""
        network = self.world.network
        try:
            for host in range(self.hosts):
                if self.random.random() < 0.8:
                    self.world.start(host)
            until = network.now + self.random.uniform(0.5, 3.0)
            network.run_until(until)
            while network.now < self.duration:
                self.fault()
                network.run_until(network.now + self.random.expovariate(3.0))
            return self.heal()
        except Wrong as exc:
            return f"seed {self.seed}: {exc}"

    def heal(self) -> str | None:
        """End all faults, and wait until all train together."""
        network = self.world.network
        network.heal()
        for host in range(self.hosts):
            network.hurt_disk(host)
            if host not in network.peers or not network.peers[host].alive:
                self.world.start(host)
            elif network.peers[host].frozen:
                network.thaw(host)
        end = network.now + HEALING
        while network.now < end:
            network.run_until(network.now + 0.25)
            if network.agreed:
                steps = [p.replica.mark.step for p in self.world.living()]
                network.run_until(network.now + 0.5)
                later = [p.replica.mark.step for p in self.world.living()]
                if network.agreed and min(later) > max(steps):
                    return None
        return f"seed {self.seed}: no progress {HEALING:g} s after healing"

    def fault(self) -> None:
        """Let something bad happen, at any point of the protocol."""
        network, random = self.world.network, self.random
        alive = [p.host for p in network.alive]
        dead = [h for h in range(self.hosts) if h not in alive]
        kind = random.choice(
            ["kill", "silent", "power", "start", "start", "freeze", "thaw", "cut", "heal", "reset", "disk"]
        )
        if kind in ("kill", "silent", "power") and alive:
            if kind == "power" and random.random() < 0.3:
                for host in alive:
                    network.power_off(host)
            elif kind == "power":
                network.power_off(random.choice(alive))
            else:
                network.kill(random.choice(alive), word=kind == "kill")
        elif kind == "start" and dead:
            self.world.start(random.choice(dead))
        elif kind == "freeze" and alive:
            network.freeze(random.choice(alive))
        elif kind == "thaw":
            for peer in network.alive:
                if peer.frozen:
                    network.thaw(peer.host)
        elif kind == "cut" and self.hosts > 1:
            network.partition(random.sample(range(self.hosts), random.randint(1, self.hosts - 1)))
        elif kind == "heal":
            network.heal()
        elif kind == "reset" and len(alive) > 1:
            network.reset(*random.sample(alive, 2))
        elif kind == "disk" and alive:
            network.hurt_disk(random.choice(alive), random.choice([0.0, 0.0, 0.5]))
