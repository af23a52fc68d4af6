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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringfort.cluster.events import ClusterEvent
from ringfort.cluster.messages import AnyMessage, Epoch, Member, Standing
from ringfort.config import AutoDiscoveryConfig


@dataclass(frozen=True)
class Send:
    """Send `message` on `link`."""

    link: int
    message: AnyMessage


@dataclass(frozen=True)
class Close:
    """Close `link`."""

    link: int
    why: str


@dataclass(frozen=True)
class Learn:
    """`peer` may be found at `addresses`."""

    peer: str
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Remember:
    """Write `standing` down before going on."""

    standing: Standing


@dataclass(frozen=True)
class Notify:
    """Tell the program."""

    event: ClusterEvent


Instruction = Send | Close | Learn | Remember | Notify
RingOrder = Callable[[Sequence[Member]], Sequence[int]]
"""The leader's choice of ring order for an epoch's members: their indices."""


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
        raise NotImplementedError

    @property
    def deadline(self) -> float:
        """When `tick` is to be called next."""
        raise NotImplementedError

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that this peer is in now."""
        raise NotImplementedError

    @property
    def leader(self) -> str | None:
        """The leader that this peer follows, or itself."""
        raise NotImplementedError

    def connected(self, now: float, link: int, node: str, *, initiated: bool) -> list[Instruction]:
        """`node` is what the handshake proved (`peer_id_of` its key), or "" where encryption is off. `initiated`:
        this side dialled."""
        raise NotImplementedError

    def received(self, now: float, link: int, message: AnyMessage) -> list[Instruction]:
        """`message` came on `link`."""
        raise NotImplementedError

    def garbled(self, now: float, link: int, why: str) -> list[Instruction]:
        """Something came on `link` that is no message."""
        raise NotImplementedError

    def closed(self, now: float, link: int, *, by_kernel: bool, why: str = "") -> list[Instruction]:
        """`link` has ended."""
        raise NotImplementedError

    def tick(self, now: float) -> list[Instruction]:
        """`deadline` has come; harmless at any other time."""
        raise NotImplementedError

    def leave(self, now: float, why: str = "") -> list[Instruction]:
        """Says goodbye to all. The core is finished: every later call returns nothing."""
        raise NotImplementedError

    def hold(self, now: float, holding: bool) -> list[Instruction]:
        """While any member of an epoch holds, newcomers wait; the epoch still shrinks when members are lost."""
        raise NotImplementedError

    def vouch(self, now: float, peer: str, standing: Standing) -> list[Instruction]:
        """`peer`, an earlier process of this node, has ended, and `standing` is the last it wrote down."""
        raise NotImplementedError

    def set_addresses(self, now: float, addresses: Sequence[str]) -> list[Instruction]:
        """This peer's addresses are now these."""
        raise NotImplementedError

    def record_work(self, amount: int = 1) -> None:
        """Work done counts in elections between peers of the same seniority."""
        raise NotImplementedError
