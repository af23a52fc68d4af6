"""Random histories of a cluster, and the rules of membership that no history may break.

    violation = History(seed=4711).run()
    print(violation)         # None, or what went wrong, with the whole trace

A seed determines the number of hosts, every fault and every delay: the same seed gives the same history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from random import Random
from typing import Final

from ringfort.cluster.core.election import ElectionState
from ringfort.cluster.core.events import EpochStarted, Instruction, Notify, Send
from ringfort.cluster.core.peer_messages import ElectionVote, Epoch, Term
from ringfort.testing.network import Delays, SimulatedNetwork, SimulatedPeer

HEALING: Final = 15.0
"""Virtual seconds after the last fault within which all peers must be in one epoch."""


class RuleBroken(AssertionError):  # noqa: N818  # it is a verdict on a history, not an error of the program
    """A rule of membership was broken."""


@dataclass
class Rules:
    """Watches every peer of a network and raises `RuleBroken` at the first step that breaks a rule."""

    network: SimulatedNetwork
    epochs: dict[tuple[int, str], Epoch] = field(default_factory=dict[tuple[int, str], Epoch])
    """All committed epochs."""
    _dead: dict[tuple[int, str], frozenset[str]] = field(default_factory=dict[tuple[int, str], frozenset[str]])
    _last: dict[str, Epoch] = field(default_factory=dict[str, Epoch])
    """The last epoch that each peer was in."""
    _votes: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])
    _leaders: dict[Term, str] = field(default_factory=dict[Term, str])

    def __call__(self, peer: SimulatedPeer, instruction: Instruction) -> None:
        """Check the rules after each instruction of each peer."""
        match instruction:
            case Notify(event=EpochStarted(epoch=epoch)):
                self._on_start(peer, epoch)
            case Send(message=ElectionVote(term=term, granted=True)):
                first = self._votes.setdefault((peer.id, term.number), term.candidate)
                if first != term.candidate:
                    raise RuleBroken(f"{peer.id} voted twice in term {term.number}")
            case _:
                pass
        election = peer.core.election
        if election.state is ElectionState.MASTER and self._leaders.setdefault(election.term, peer.id) != peer.id:
            raise RuleBroken(f"two leaders in term {election.term}")

    def _on_start(self, peer: SimulatedPeer, epoch: Epoch) -> None:
        known = self.epochs.setdefault(epoch.key, epoch)
        if known != epoch:
            raise RuleBroken(f"two lists for {epoch}")
        if peer.id not in epoch.peers:
            raise RuleBroken(f"{peer.id} is in {epoch}, which does not name it")
        for other in self.network.alive:
            theirs = other.core.epoch
            if other.id in epoch.peers and theirs is not None and theirs.number < epoch.number:
                raise RuleBroken(f"{other.id} is still in epoch {theirs.number} when {epoch} starts at {peer.id}")
        if epoch.key not in self._dead:
            self._dead[epoch.key] = frozenset(dead.id for dead in self.network.ended)
            for lineage in epoch.lineages:
                self._check_lineage(lineage)
            if any(lineage == f"{epoch.leader}#{epoch.number}" for lineage in epoch.lineages):
                self._check_founding(epoch)
        self._last[peer.id] = epoch

    def _check_lineage(self, lineage: str) -> None:
        """Check that the epochs of a lineage are a chain: each contains a majority of the living members of the one
        before it. So two groups can never continue at once."""
        chain = sorted((e for e in self.epochs.values() if lineage in e.lineages), key=lambda e: e.number)
        for before, after in pairwise(chain):
            if before.number == after.number:
                raise RuleBroken(f"two epochs of one lineage have number {before.number}")
            # A peer that died after it had accepted counts: it was asked.
            living = sorted(set(before.peers) - (self._dead[after.key] - set(after.peers)))
            kept = [peer for peer in living if peer in after.peers]
            if living and not (2 * len(kept) > len(living) or (2 * len(kept) == len(living) and living[0] in kept)):
                raise RuleBroken(
                    f"epoch {after.number} {after.peers} follows epoch {before.number} {before.peers} with only "
                    f"{kept} of {living}: the run has split in two"
                )

    def _check_founding(self, new: Epoch) -> None:
        """Check that a machine that was a member begins a new lineage only if every member of the last epoch of the old
        one is with it or dead. So a restart never makes two groups work at once."""
        peers = {peer.id: peer for peer in self.network.alive}
        members = [peers[peer] for peer in new.peers if peer in peers]
        remembered: set[str] = set()
        for peer in members:
            last = self._last.get(peer.id)
            # A member may have gone on before the leader heard that all had accepted.
            known = [last] if last is not None and last.number < new.number else []
            known += [record for votes in peer.recalls for record in votes.records]
            remembered |= {lineage for epoch in known if epoch.key in self.epochs for lineage in epoch.lineages}
        for lineage in remembered - set(new.lineages):
            last = max((e for e in self.epochs.values() if lineage in e.lineages), key=lambda e: e.number)
            working = set(last.peers) - self._dead[new.key] - set(new.peers)
            if working:
                beside = f"{sorted(working)} of epoch {last.number}"
                raise RuleBroken(f"epoch {new.number} {new.peers} begins a new lineage beside {beside}")


@dataclass(frozen=True)
class Violation:
    """What went wrong, and the trace that led to it."""

    seed: int
    why: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join((f"seed {self.seed}: {self.why}", *self.trace))


@dataclass
class History:
    """A random history of a cluster of 3 to 9 hosts."""

    seed: int
    duration: float = 20.0
    """Virtual seconds with faults."""
    epochs: int = 0
    """The number of committed epochs."""
    faults: int = 0

    def run(self) -> Violation | None:
        """Run the history. After a violation, run it again with a trace."""
        why = self._run(traced=False)[0]
        if why is None:
            return None
        again, network = self._run(traced=True)
        return Violation(
            self.seed, why if again == why else f"{why}; and the second time: {again}", tuple(network.trace)
        )

    def _run(self, *, traced: bool) -> tuple[str | None, SimulatedNetwork]:
        random = Random(f"faults of {self.seed}")
        delays = Delays(most=0.15 if random.random() < 0.2 else 0.01)
        network = SimulatedNetwork(self.seed, random.randint(3, 9), delays=delays, traced=traced)
        network.observer = rules = Rules(network)
        try:
            self._inject_faults(network, random)
            self._heal(network)
        except RuleBroken as exc:
            network.log(f"BROKEN: {exc}")
            return str(exc), network
        self.epochs = len(rules.epochs)
        if not network.agreed:
            seen = {peer.id: str(peer.core.epoch and peer.core.epoch.number) for peer in network.alive}
            return f"no agreement {HEALING:g} s after all faults healed: {seen}", network
        return None, network

    def _inject_faults(self, network: SimulatedNetwork, random: Random) -> None:
        for host in range(network.hosts):
            network.run_until(network.now + random.choice((0.0, random.uniform(0.0, 1.5))))
            network.start(host)
        network.run_until(network.now + random.uniform(0.0, 4.0))
        end = network.now + self.duration
        self.faults = 0
        pause = random.choice((0.2, 1.0, 3.0))
        while network.now < end:
            random.choice(FAULTS)(network, random)
            self.faults += 1
            network.run_until(network.now + random.expovariate(1 / pause))

    def _heal(self, network: SimulatedNetwork) -> None:
        network.heal()
        for host, peer in network.peers.items():
            if peer.alive and not peer.id.startswith(f"n{host}."):  # a copy of another host
                network.kill(host)
        for host, peer in network.peers.items():
            if not peer.alive:
                network.start(host)
            elif peer.frozen:
                network.thaw(host)
        self._settle(network)
        if network.forgotten and not network.agreed:
            # Nobody can report that these have ended, so a person must exclude them.
            for host in network.peers:
                network.kill(host, word=False)
            for host in network.peers:
                network.start(host, without=network.forgotten)
            self._settle(network)

    def _settle(self, network: SimulatedNetwork) -> None:
        settled = network.now + HEALING
        while network.now < settled and not network.agreed:
            network.run_until(network.now + 0.25)


Fault = Callable[[SimulatedNetwork, Random], None]


def _on_some(do: Callable[..., object], *, alive: bool = True, frozen: bool = False, **draws: Sequence[float]) -> Fault:
    """Do something to a host that is alive or frozen or neither, with arguments drawn from `draws`."""

    def fault(network: SimulatedNetwork, random: Random) -> None:
        peers = network.peers.items()
        hosts = [host for host, peer in peers if peer.alive == alive and (not alive or peer.frozen == frozen)]
        if hosts:
            host = random.choice(hosts)
            do(network, host, **{name: random.choice(values) for name, values in draws.items()})

    return fault


def _on_leader(do: Callable[..., object]) -> Fault:
    def fault(network: SimulatedNetwork, random: Random) -> None:
        leaders = [p.host for p in network.alive if p.core.leader == p.id and not p.frozen]
        if leaders:
            do(network, random.choice(leaders))

    return fault


def _on_two(do: Callable[[SimulatedNetwork, int, int], None]) -> Fault:
    return lambda network, random: do(network, *random.sample(range(network.hosts), 2))


def _some_hosts(network: SimulatedNetwork, random: Random) -> list[int]:
    return random.sample(range(network.hosts), random.randint(1, network.hosts - 1))


def _partition(network: SimulatedNetwork, random: Random) -> None:
    network.partition(_some_hosts(network, random))


def _heal(network: SimulatedNetwork, _: Random) -> None:
    network.heal()


def _cut_both_ways(network: SimulatedNetwork, one: int, other: int) -> None:
    network.cut(one, other)
    network.cut(other, one)


def _reject(network: SimulatedNetwork, random: Random) -> None:
    """Add a firewall that resets and blocks connections between one host and some others."""
    one = random.randrange(network.hosts)
    for other in random.sample(sorted(set(range(network.hosts)) - {one}), random.randint(1, network.hosts - 1)):
        network.reset(one, other)
        _cut_both_ways(network, one, other)


def _restart_side(network: SimulatedNetwork, random: Random) -> None:
    """Cut some hosts off from the others, and restart their programs."""
    side = _some_hosts(network, random)
    network.partition(side)
    network.run_until(network.now + random.choice((0.0, 3.0)))
    word = random.random() < 0.5
    for host in side:
        if network.peers[host].alive:
            network.kill(host, word=word)
    network.run_until(network.now + random.choice((0.0, 0.5)))
    for host in side:
        network.start(host)


def _wipe(network: SimulatedNetwork, host: int) -> None:
    network.wipe(host)
    network.start(host)


def _clone(network: SimulatedNetwork, random: Random) -> None:
    """Start a host with a copy of another host's disk."""
    ended = [host for host, peer in network.peers.items() if not peer.alive]
    if ended:
        host = random.choice(ended)
        network.start(host, copy_of=random.choice(sorted(set(range(network.hosts)) - {host})))


FAULTS: Final[tuple[Fault, ...]] = (
    _on_some(SimulatedNetwork.kill),
    _on_some(SimulatedNetwork.kill, frozen=True),
    _on_leader(SimulatedNetwork.kill),
    _on_some(partial(SimulatedNetwork.kill, word=False)),
    _on_leader(partial(SimulatedNetwork.kill, word=False)),
    _on_some(SimulatedNetwork.power_off),
    _on_some(SimulatedNetwork.leave),
    *3 * (_on_some(SimulatedNetwork.start, alive=False),),
    _on_some(SimulatedNetwork.freeze),
    _on_leader(SimulatedNetwork.freeze),
    *2 * (_on_some(SimulatedNetwork.thaw, frozen=True),),
    *2 * (_on_two(SimulatedNetwork.reset),),
    _reject,
    _restart_side,
    _on_some(_wipe, alive=False),
    _clone,
    _on_two(SimulatedNetwork.cut),
    _on_two(_cut_both_ways),
    *2 * (_partition,),
    *3 * (_heal,),
    lambda network, random: network.slow(random.randrange(network.hosts), random.choice((0.05, 0.5, 2.0))),
    _on_some(SimulatedNetwork.leap, seconds=(0.5, 3.0, 60.0)),
)
