"""Random histories of an elastic run on simulated hosts: the control plane and the replicas are those of production.

The network delays, cuts and resets; processes die with and without a word, freeze, lose power and start again; disks
are slow. The programs' own messages take the same network. Faults come at any time, and at each point of the protocol
(elastic_faults.py). `History(seed).run()` returns what went wrong, or None.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any, Final

from ringfort.cluster.core.events import EpochEnded, EpochStarted, Fence, Instruction, Notify, Send
from ringfort.cluster.core.peer_messages import Commit, Epoch
from ringfort.config import AutoDiscoveryConfig
from ringfort.testing.network import SimulatedNetwork, SimulatedPeer
from ringfort.training.elastic.protocol import Mark, Result
from tests.helpers.elastic_faults import Faults
from tests.helpers.elastic_numbers import DAMAGE, DATA, SCALED, Saved, Total, Wrong, expected, some_hosts
from tests.helpers.elastic_program import Program

HEALING: Final = 15.0
"""Virtual seconds after the last fault within which all peers train together again."""


class World:
    """A simulated network with a program on each peer, and the promises that are checked at every step."""

    data = DATA

    def __init__(self, seed: int, hosts: int, *, witnesses: int = 0, fewest: int = 1, traced: bool = False) -> None:
        """The last `witnesses` hosts have no program: they only vote. With fewer than `fewest` programs in an epoch no
        step begins."""
        self.random = Random(seed ^ 0x5EED)
        self.trainers = hosts - witnesses
        self.chance = Random(-1 - seed)
        self.bad_host = self.chance.randrange(hosts)
        self.damage = self.chance.choice([0.0, 0.02, 0.3])
        """How likely a result is damaged that a program of the bad host receives."""
        self.fewest = fewest
        self.disks: dict[int, Saved] = {}
        self.attempts: Counter[tuple[int, str]] = Counter()
        """How often the group of each epoch has failed."""
        self.programs: dict[str, Program] = {}
        self.results: dict[tuple[str, int], Total] = {}
        self.marks: dict[tuple[str, int], Mark] = {}
        config = AutoDiscoveryConfig(min_peers=0)
        self.network = SimulatedNetwork(seed, hosts, config, observer=self.observe, traced=traced)
        self.faults = Faults(self, Random(seed))

    def start(self, host: int) -> None:
        """Start a process and its program."""
        peer = self.network.start(host, witness=host >= self.trainers)
        if host >= self.trainers:
            return
        program = self.programs[peer.id] = Program(peer, self)
        self.call(peer, "set_run_state", program.run_state())
        self.later(program, 0.3, 0.5, program.copying.look)

    def living(self) -> list[Program]:
        """Return the programs that run."""
        return [p for p in self.programs.values() if p.peer.alive]

    def observe(self, peer: SimulatedPeer, instruction: Instruction) -> None:
        """Tell the program what its control process instructs."""
        if isinstance(instruction, Send) and isinstance(instruction.message, Commit):
            self.faults.reach(peer.host, "commit", at_once=True)
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
        """The group of an epoch is formed, unless the epoch has ended since or this is old news."""
        has_begun = program.epoch == epoch and program.attempt == self.attempts[epoch.key]
        if program.peer.core.epoch == epoch and not has_begun and not program.copying.gives_way(epoch):
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
        """Tell where a program is that is in no epoch. One that copies tells more by itself."""
        if program.epoch is None and not program.copying.is_under_way:
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
        """Return whether a learner could be seated at the end of the next step."""
        return any(other.copying.has_caught_up_with(program) for other in self.living())

    def form_again(self, epoch: Epoch) -> None:
        """The group of `epoch` has failed, and the epoch has not ended: its members form the group again."""
        self.attempts[epoch.key] += 1
        for program in self.living():
            self.later(program, 0.0, 0.02, self.begin, program, epoch)

    def reach(self, program: Program, point: str) -> None:
        """A program is at a point of the protocol."""
        self.faults.reach(program.peer.host, point)

    def check_mark(self, program: Program, before: Mark, mark: Mark) -> None:
        """One result per branch and step."""
        if mark != before and program.epoch is not None:
            members = [self.programs[peer] for peer in program.epoch.holders]
            if program.doing.result.payload.made in {one.void for one in members if one.peer.alive}:
                raise Wrong(f"{program.peer.id} sealed what a member of its epoch knows to be void")
        if mark != before and self.marks.setdefault((mark.branch, mark.step), mark) != mark:
            raise Wrong(f"{program.peer.id} sealed {mark}, another member {self.marks[mark.branch, mark.step]}")

    def check_result(self, program: Program, result: Result) -> None:
        """The state is that of one process without faults."""
        key = (result.branch, result.step)
        self.network.log(f"{program.peer.id} applies {key}")
        if self.results.setdefault(key, result.payload) != result.payload:
            raise Wrong(f"two results for {key}: {self.results[key]} and {result.payload}")
        if program.state % DAMAGE != expected(result.cursor):
            raise Wrong(f"{program.peer.id} has {program.state} after {key}, not {expected(result.cursor)}")


class History:
    """One random history."""

    def __init__(
        self, seed: int, *, witnesses: int = 0, duration: float = 8.0, traced: bool = False, scaled: bool = False
    ) -> None:
        """`scaled`: the samples of a step grow with the members."""
        self.seed = seed
        self.random = Random(seed)
        self.hosts = some_hosts(self.random) + witnesses
        self.duration = duration
        fewest = self.random.choice([1, 1, 1, 2])
        self.world = World(seed, self.hosts, witnesses=witnesses, fewest=fewest, traced=traced)
        if scaled:
            self.world.data = SCALED

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
                self.world.faults.strike()
                network.run_until(network.now + self.random.expovariate(3.0))
            return self.heal()
        except Wrong as exc:
            return f"seed {self.seed}: {exc}"

    def start_missing(self) -> None:
        """Start a process on each host that has none."""
        peers = self.world.network.peers
        for host in range(self.hosts):
            if host not in peers or not peers[host].alive:
                self.world.start(host)

    def heal(self) -> str | None:
        """End all faults, and wait until all train together."""
        network = self.world.network
        self.world.faults.stop()
        network.heal()
        self.world.damage = 0.0
        for host in range(self.hosts):
            network.hurt_disk(host)
        for peer in network.alive:
            if peer.frozen:
                network.thaw(peer.host)
        end = network.now + HEALING
        while network.now < end:
            self.start_missing()  # again and again: one that finds damage of earlier leaves as soon as it thaws
            network.run_until(network.now + 0.25)
            if network.agreed:
                steps = [p.replica.mark.step for p in self.world.living()]
                network.run_until(network.now + 0.5)
                later = [p.replica.mark.step for p in self.world.living()]
                if network.agreed and min(later) > max(steps):
                    return None
        return f"seed {self.seed}: no progress {HEALING:g} s after healing"
