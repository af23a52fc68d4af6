"""`SimulatedNetwork`: peers in virtual time. The `PeerCore` is that of production; only the network is simulated.

Links behave like TCP: they keep order, and are silent while the path is cut; data in flight arrives when the cut heals.
Anyone on the path can reset them. Each host has a disk, where processes leave their votes for the next one. Discovery
behaves like multicast: announcements are lost, late, duplicated and reordered. Everything is drawn from one seed, so a
run can be repeated exactly.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import count
from random import Random
from typing import Any

from ringfort.cluster.core.contacts import node_of
from ringfort.cluster.core.events import Close, Fence, Instruction, Learn, Notify, Persist, Send
from ringfort.cluster.core.membership import promised_by
from ringfort.cluster.core.peer import PeerCore
from ringfort.cluster.core.peer_messages import AnyMessage, Member, Votes
from ringfort.config import AutoDiscoveryConfig
from ringfort.errors import InvalidArgumentError

Observer = Callable[["SimulatedPeer", Instruction], None]
Action = Callable[[], None]


@dataclass
class Delays:
    """Delays in seconds, and probabilities."""

    least: float = 0.0005
    most: float = 0.005
    loss: float = 0.2
    """Probability that an announcement is lost."""
    double: float = 0.1
    """Probability that an announcement is duplicated."""


@dataclass(eq=False)
class SimulatedPeer:
    """One process. A host that starts again gets a new one."""

    host: int
    core: PeerCore
    offset: float
    """The offset of this peer's clock from the network's."""
    rate: float
    alive: bool = True
    frozen: bool = False
    links: dict[int, _Pipe] = field(default_factory=dict[int, "_Pipe"])
    known: set[str] = field(default_factory=set[str])
    backlog: deque[Action] = field(default_factory=deque[Action])
    tick_at: float = -1.0
    votes: Votes = field(default_factory=Votes)
    """The last that it wrote to the disk."""
    work: int = 0
    """The work that it has done."""
    recalls: list[Votes] = field(default_factory=list[Votes])
    """The votes of earlier processes that it took over."""

    @property
    def id(self) -> str:
        """The peer's id."""
        return self.core.me.peer


@dataclass(eq=False)
class _Pipe:
    """One direction of a link."""

    link: int
    source: SimulatedPeer
    target: SimulatedPeer
    free_at: float = 0.0
    stalled: deque[AnyMessage | None] = field(default_factory=deque["AnyMessage | None"])
    """Messages that wait for a cut to heal; None is the end of the stream."""


@dataclass(eq=False)
class SimulatedNetwork:
    """Hosts 0, 1, ... with a peer each. Start them, inject faults, `run_until`, inspect them.

    network = SimulatedNetwork(seed=7, hosts=4)
    for host in range(4):
        network.start(host)
    network.run_until(3.0)
    assert network.agreed
    """

    seed: int
    hosts: int
    config: AutoDiscoveryConfig | None = None
    _: KW_ONLY
    delays: Delays = field(default_factory=Delays)
    observer: Observer | None = None
    """Called with every instruction of every peer."""
    traced: bool = False

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.now = 0.0
        self.trace: list[str] = []
        """The trace, if `traced`."""
        self.peers: dict[int, SimulatedPeer] = {}
        """The latest peer of each host."""
        self.ended: list[SimulatedPeer] = []
        """Peers that have ended."""
        self._heap: list[tuple[float, int, Action]] = []
        self._serial = count()
        self._links = count(1)
        self._instances = count(1)
        self._cuts: set[tuple[int, int]] = set()
        self._slow: dict[int, float] = {}
        self._disk_faults: dict[int, tuple[float, str]] = {}
        self._disks: dict[int, list[SimulatedPeer]] = {host: [] for host in range(self.hosts)}
        """The processes that have a file on the disk of each host."""

    # --- faults -----------------------------------------------------------------------------------------------------

    def start(
        self,
        host: int,
        *,
        slots: int = 1,
        copy_of: int | None = None,
        without: Sequence[str] = (),
        run: str = "",
        witness: bool = False,
    ) -> SimulatedPeer:
        """Start a new process on `host`. It vouches for those that ended there and takes over their votes. With 0
        `slots` it is an observer; a `witness` votes and has none either. `copy_of`: it runs with a copy of that host's
        disk, including the key; such files bind it, but it cannot vouch for them. `without` sets `restart_without`.
        `run` is the run it belongs to."""
        if host in self.peers and self.peers[host].alive:
            raise InvalidArgumentError("host", host, "has a peer already")
        offset, rate = self.random.uniform(10.0, 1000.0), 1 + self.random.uniform(-1e-4, 1e-4)
        key = host if copy_of is None else copy_of
        name, slots = f"host{host}", 0 if witness else slots
        me = Member(f"n{key}.{next(self._instances)}", name, slots, (f"{name}:1",), name=name, witness=witness)
        config = replace(self.config or AutoDiscoveryConfig(), restart_without=without, run=run)
        core = PeerCore(me, config, offset + self.now * rate, work_done=lambda: peer.work)
        peer = SimulatedPeer(host, core, offset, rate)
        self.peers[host] = peer
        self.log(f"{peer.id} starts")
        for before in self._disks[key] if copy_of is None else ():
            self._do(peer, core.vouch(self._clock(peer), before.id, before.votes))
        peer.recalls = [promised_by(before.id, before.votes) for before in self.remembers(key)]
        self._do(peer, core.recall(self._clock(peer), peer.recalls))
        if copy_of is None:
            self._disks[key].append(peer)
        self._tick(peer, -1.0)
        self._at(self.now, self._repeat, peer, self._announce, 0.5, 1.5)
        self._at(self.now, self._repeat, peer, self._dial, 0.175, 0.325)
        return peer

    def wipe(self, host: int) -> None:
        """Erase the disk of `host`, with the votes of its processes."""
        self.log(f"the disk of host {host} is wiped")
        self._disks[host] = []

    def remembers(self, key: int) -> list[SimulatedPeer]:
        """Return the processes whose votes bind the next one that starts with the disk of host `key`."""
        return [peer for peer in self._disks[key] if not peer.core.is_released]

    def kill(self, host: int, *, loses: bool | None = None, word: bool = True) -> None:
        """Kill the program. With `word`, its control process reports that before it ends; without, all processes of the
        peer die at once, and its kernel closes its links. `loses`: messages that a cut held back are lost, as with a
        reset; drawn for each link by default."""
        peer = self.peers[host]
        links = list(peer.links.values())
        if word and not peer.frozen:
            self._do(peer, peer.core.leave(self._clock(peer), "its program was killed", died=True))
        self._end(host, "is killed")
        for pipe in links:
            if (self.random.random() < 0.5) if loses is None else loses:
                pipe.stalled.clear()
            self._put(pipe, None)

    def power_off(self, host: int) -> None:
        """Switch the machine off. No peer is told."""
        self._end(host, "loses power")

    def leave(self, host: int) -> None:
        """Have the peer leave."""
        peer = self.peers[host]
        self._do(peer, peer.core.leave(self._clock(peer)))
        self._end(host, "leaves")

    def do(self, host: int, call: Callable[[PeerCore, float], list[Instruction]]) -> None:
        """Call the core of the peer on `host`, for example `PeerCore.step_down`."""
        peer = self.peers[host]
        self._do(peer, call(peer.core, self._clock(peer)))

    def freeze(self, host: int) -> None:
        """Stop the process. Its links stay open."""
        self.log(f"{self.peers[host].id} freezes")
        self.peers[host].frozen = True

    def thaw(self, host: int) -> None:
        """Resume the process, which then handles everything that arrived meanwhile."""
        peer = self.peers[host]
        self.log(f"{peer.id} thaws")
        peer.frozen = False
        while peer.backlog and peer.alive:
            peer.backlog.popleft()()
        if peer.alive:
            self._do(peer, peer.core.tick(self._clock(peer)))

    def cut(self, source: int, target: int) -> None:
        """Block all traffic from host `source` to host `target`."""
        self.log(f"cut from host {source} to {target}")
        self._cuts.add((source, target))

    def reset(self, one: int, other: int) -> None:
        """Reset the connections between two hosts: both sides see them end, and data in flight is lost. New connections
        may be made at once."""
        self.log(f"reset between hosts {one} and {other}")
        for peer in self.alive:
            for pipe in [p for p in peer.links.values() if {p.source.host, p.target.host} == {one, other}]:
                pipe.stalled.clear()
                peer.links.pop(pipe.link)
                self._at(self.now + self._delay(pipe.target.host), self._deliver, peer, self._close, peer, pipe.link)

    def partition(self, side: Iterable[int]) -> None:
        """Block all traffic between the hosts in `side` and the others."""
        inside = set(side)
        for one in inside:
            for other in set(range(self.hosts)) - inside:
                self.cut(one, other)
                self.cut(other, one)

    def heal(self) -> None:
        """End all cuts and slowness. Stalled messages arrive."""
        self.log("all is healed")
        self._cuts.clear()
        self._slow.clear()
        for peer in [*self.ended, *self.peers.values()]:
            for pipe in peer.links.values():
                waiting, pipe.stalled = pipe.stalled, deque()
                for message in waiting:
                    self._put(pipe, message)

    def slow(self, host: int, seconds: float) -> None:
        """Delay every message from `host` by up to `seconds`."""
        self.log(f"host {host} is slow: {seconds:.2f} s")
        self._slow[host] = seconds

    def hurt_disk(self, host: int, seconds: float = 0.0, why: str = "") -> None:
        """Make every write to the disk of `host` take `seconds` and then fail with `why`, if given. With neither, the
        disk works again."""
        self.log(f"the disk of host {host} takes {seconds:.1f} s {why}")
        self._disk_faults[host] = (seconds, why)

    def leap(self, host: int, seconds: float) -> None:
        """Set the clock of the peer on `host` ahead."""
        self.log(f"the clock of host {host} leaps {seconds:.1f} s")
        self.peers[host].offset += seconds
        self._tick(self.peers[host], self.now)

    def run_until(self, time: float) -> None:
        """Run until the given time."""
        heap = self._heap
        while heap and heap[0][0] <= time:
            self.now, _, do = heapq.heappop(heap)
            do()
        self.now = time

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> list[SimulatedPeer]:
        """The peers whose process exists, frozen or not."""
        return [peer for peer in self.peers.values() if peer.alive]

    @property
    def agreed(self) -> bool:
        """Whether one epoch contains exactly the living peers, and all of them are in it."""
        epochs = [peer.core.epoch for peer in self.alive]
        first = epochs[0]
        return first is not None and all(e == first for e in epochs) and len(first.members) == len(epochs)

    @property
    def forgotten(self) -> list[str]:
        """Ended peers that nobody can vouch for: their disk was wiped, or was a copy of another."""
        kept = {peer.id for disk in self._disks.values() for peer in disk}
        return [peer.id for peer in self.ended if peer.id not in kept]

    def log(self, text: str) -> None:
        """Add a line to the trace."""
        if self.traced:
            self.trace.append(f"{self.now:8.3f}  {text}")

    # --- wires ------------------------------------------------------------------------------------------------------

    def _at(self, time: float, do: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (time, next(self._serial), partial(do, *arguments)))

    def _delay(self, source: int) -> float:
        delays = self.delays
        slow = self._slow.get(source)
        extra = 0.0 if slow is None else self.random.random() * slow
        return delays.least + self.random.random() * (delays.most - delays.least) + extra

    def _put(self, pipe: _Pipe, message: AnyMessage | None) -> None:
        """Send a message, which never overtakes an earlier one."""
        if (pipe.source.host, pipe.target.host) in self._cuts or pipe.stalled:
            pipe.stalled.append(message)
            return
        pipe.free_at = max(pipe.free_at, self.now + self._delay(pipe.source.host))
        self._at(pipe.free_at, self._deliver, pipe.target, self._arrive, pipe, message)

    def _deliver(self, peer: SimulatedPeer, do: Callable[..., None], *arguments: Any) -> None:
        """Have a living peer handle an event; a frozen one handles it after it thaws."""
        if peer.frozen:
            peer.backlog.append(partial(do, *arguments))
        elif peer.alive:
            do(*arguments)

    def _arrive(self, pipe: _Pipe, message: AnyMessage | None) -> None:
        peer = pipe.target
        if pipe.link not in peer.links:
            return  # it has closed the link
        if message is None:
            del peer.links[pipe.link]
            self._close(peer, pipe.link)
        else:
            self._do(peer, peer.core.received(self._clock(peer), pipe.link, message))

    def _close(self, peer: SimulatedPeer, link: int) -> None:
        self._do(peer, peer.core.closed(self._clock(peer), link))

    def _end(self, host: int, how: str) -> None:
        peer = self.peers[host]
        self.log(f"{peer.id} {how}")
        peer.alive = False
        peer.backlog.clear()
        self.ended.append(peer)

    # --- a peer's node ----------------------------------------------------------------------------------------------

    def _clock(self, peer: SimulatedPeer) -> float:
        return peer.offset + self.now * peer.rate

    def _written(self, peer: SimulatedPeer, votes: Votes) -> None:
        """A write to the disk has ended, successfully or not."""
        _, why = self._disk_faults.get(peer.host, (0.0, ""))
        if not why:
            peer.votes = votes
        self._do(peer, peer.core.persisted(self._clock(peer), votes, why))

    def _do(self, peer: SimulatedPeer, instructions: list[Instruction]) -> None:
        written: list[Votes] = []
        for instruction in instructions:
            if not peer.alive:  # the observer has ended it
                return
            match instruction:
                case Send(link=link, message=message):
                    if link in peer.links:
                        self._put(peer.links[link], message)
                case Close(link=link, why=why):
                    self.log(f"{peer.id} closes a link: {why}")
                    pipe = peer.links.pop(link, None)
                    if pipe is not None:
                        self._put(pipe, None)
                case Persist(votes=votes):
                    delay, _ = self._disk_faults.get(peer.host, (0.0, ""))
                    if delay:
                        self._at(self.now + delay, self._deliver, peer, self._written, peer, votes)
                    else:
                        written.append(votes)
                case Learn(peer=about):
                    peer.known.add(about)
                case Fence():
                    pass  # for the observer, which has the programs
                case Notify(event=event):
                    if self.traced:
                        self.log(f"{peer.id}: {event}")
                case _:  # Fence: the observer stands for the program
                    pass
            if self.observer is not None:
                self.observer(peer, instruction)
        for votes in written:
            self._deliver(peer, self._written, peer, votes)
        if instructions or peer.tick_at <= self.now:
            self._tick(peer, peer.tick_at)

    def _tick(self, peer: SimulatedPeer, scheduled: float) -> None:
        """Schedule the next tick if it is sooner than the scheduled one."""
        due = self.now + max(0.0, peer.core.deadline - self._clock(peer)) / peer.rate
        if scheduled <= self.now or due < scheduled:
            peer.tick_at = due
            self._at(due, self._on_tick, peer, due)

    def _on_tick(self, peer: SimulatedPeer, due: float) -> None:
        if not peer.alive or due != peer.tick_at:
            return
        if peer.frozen:
            peer.tick_at = -1.0
            return
        self._do(peer, peer.core.tick(self._clock(peer)))

    def _repeat(self, peer: SimulatedPeer, do: Callable[[SimulatedPeer], None], least: float, most: float) -> None:
        """Have a peer do something every `least` to `most` seconds, unless it is frozen, until it ends."""
        if peer.alive:
            if not peer.frozen:
                do(peer)
            self._at(self.now + self.random.uniform(least, most), self._repeat, peer, do, least, most)

    def _announce(self, peer: SimulatedPeer) -> None:
        for other in self.alive:
            for _ in range(1 + (self.random.random() < self.delays.double)):
                if other is not peer and self.random.random() >= self.delays.loss:
                    self._at(self.now + self._delay(peer.host) * 10, self._hear, peer, other)

    def _hear(self, source: SimulatedPeer, target: SimulatedPeer) -> None:
        if target.alive and (source.host, target.host) not in self._cuts:
            target.known.add(source.id)

    def _dial(self, peer: SimulatedPeer) -> None:
        """Dial all known peers without a link, and forget those that have ended."""
        linked = {pipe.target.id for pipe in peer.links.values()}
        for about in sorted(peer.known - linked):
            other = next((p for p in self.peers.values() if p.id == about and p.alive), None)
            if other is None:
                peer.known.discard(about)
            elif not other.frozen and not {(peer.host, other.host), (other.host, peer.host)} & self._cuts:
                self._at(self.now + 2 * self._delay(peer.host), self._open, peer, other)

    def _open(self, caller: SimulatedPeer, callee: SimulatedPeer) -> None:
        if not caller.alive or not callee.alive or caller.frozen or callee.frozen:
            return
        link = next(self._links)
        callee.known.add(caller.id)
        for peer, other in ((callee, caller), (caller, callee)):
            peer.links[link] = _Pipe(link, peer, other)
            proved = node_of(other.id)
            self._do(peer, peer.core.connected(self._clock(peer), link, proved, initiated=peer is caller))
