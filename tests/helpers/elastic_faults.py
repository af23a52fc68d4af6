"""`Faults`: what happens to simulated hosts, at any time or at a certain point of the protocol."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.helpers.elastic_network import World

POINTS: Final = (
    "compute",
    "bucket 0",
    "bucket 1",
    "bucket 2",
    "digest",
    "seal",
    "apply",
    "pause",
    "commit",
    "transfer",
    "replay",
    "checkpoint",
)
"""Points of the protocol. digest: after the reduction, before the token is sent; seal: the token is sent, and not all
have come; apply: sealed and not applied; commit: between the messages with which a leader commits an epoch; transfer
and replay: of a learner; checkpoint: while it is written."""
STRIKES: Final = ("kill", "silent", "power", "freeze", "cut", "reset")
"""What can happen at each of them."""
OTHERS: Final = ("start", "start", "thaw", "heal", "disk", "group")
"""What else happens."""


class Faults:
    """The faults of one history."""

    def __init__(self, world: World, random: Random) -> None:
        self._world = world
        self._network = world.network
        self._random = random
        self._ambush: tuple[str, str] | None = None
        self.hits: Counter[tuple[str, str]] = Counter()
        """What has happened at which point."""

    def strike(self) -> None:
        """Let something happen now, or as soon as a peer is at a certain point."""
        random, network = self._random, self._network
        kind = random.choice((*STRIKES, *OTHERS))
        alive = [p.host for p in network.alive]
        dead = [host for host in range(network.hosts) if host not in alive]
        if kind in STRIKES:
            if random.random() < 0.7:
                self._ambush = (random.choice(POINTS), kind)
            elif alive:
                self._hit(kind, random.choice(alive))
        elif kind == "start" and dead:
            self._world.start(random.choice(dead))
        elif kind == "thaw":
            for peer in network.alive:
                if peer.frozen:
                    network.thaw(peer.host)
        elif kind == "heal":
            network.heal()
        elif kind == "disk" and alive:
            network.hurt_disk(random.choice(alive), random.choice([0.0, 0.0, 0.5]))
        elif kind == "group":
            epochs = [p.epoch for p in self._world.living() if p.epoch is not None]
            if epochs:
                self._world.form_again(random.choice(epochs))

    def stop(self) -> None:
        """Let nothing more happen."""
        self._ambush = None

    def reach(self, host: int, point: str, *, at_once: bool = False) -> None:
        """A peer is at a point of the protocol. What waits for that happens before anything else does, or even before
        the peer has finished what it does now."""
        if self._ambush is None or self._ambush[0] != point:
            return
        (_, kind), self._ambush = self._ambush, None
        self.hits[point, kind] += 1
        if at_once:
            self._hit(kind, host)
        else:
            self._network._at(self._network.now, self._hit, kind, host)

    def _hit(self, kind: str, host: int) -> None:
        network, random = self._network, self._random
        alive = [p.host for p in network.alive]
        if host not in alive:
            return
        others = [other for other in alive if other != host]
        network.log(f"{kind} at host {host}")
        if kind == "power" and random.random() < 0.3:
            for one in alive:
                network.power_off(one)
        elif kind == "power":
            network.power_off(host)
        elif kind in ("kill", "silent"):
            network.kill(host, word=kind == "kill")
        elif kind == "freeze":
            network.freeze(host)
        elif kind == "cut":
            # With some of the others, or alone.
            network.partition({host, *random.sample(others, random.randint(0, max(0, len(others) - 1)))})
        elif others:
            network.reset(host, random.choice(others))
