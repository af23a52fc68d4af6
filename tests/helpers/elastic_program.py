"""`Program`: the training process of a simulated peer. The replica is that of production; computing, reducing, copying
the state and writing checkpoints take virtual time, so that a fault can come at any point of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final

from ringfort.cluster.core.membership import Voter
from ringfort.cluster.core.peer_messages import Epoch, RunState
from ringfort.testing.network import SimulatedPeer
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
    StepError,
    Token,
)
from tests.helpers.elastic_copying import Copying
from tests.helpers.elastic_numbers import (
    Saved,
    Total,
    Wrong,
    applied,
    damaged,
    digest,
    part_sum,
    run_state,
    void_after,
    whole,
)

if TYPE_CHECKING:
    from tests.helpers.elastic_network import World

BUCKETS: Final = 3
"""A sum of gradients is reduced in so many pieces, one after the other."""
BITS: Final = 8
"""Bits of the sum that each bucket but the last has."""
PAUSE: Final = 0.4
"""Seconds that members wait at the end of a step for a learner that has caught up."""
NO_PAUSE: Final = 2.0
"""Seconds until the next pause, if the learner was not seated."""
KEPT: Final = 40
"""Sealed results that a member keeps for learners."""


class Program:
    """The training process of one peer."""

    def __init__(self, peer: SimulatedPeer, world: World) -> None:
        self.peer = peer
        self.world = world
        self.state = 0
        self.local = 0
        self.local_step = -2
        self.epoch: Epoch | None = None
        self.last_epoch: Epoch | None = None
        self.script: Generator[Any, Any, None] | None = None
        self.doing: Any = None
        self.attempt = 0
        """How often the group of this epoch has failed."""
        self.round = 0
        self.got: dict[tuple[int, int], Any] = {}
        """What has arrived in this epoch, by exchange and rank."""
        self.has_sent = False
        self.is_digested = False
        self.buckets: list[int] = []
        """What was reduced so far."""
        self.recent: deque[tuple[Mark, Mark, Result]] = deque(maxlen=KEPT)
        """The latest sealed results, with the marks before and after each."""
        self.forked = Saved()
        """A state in memory whose run has ended."""
        self.void = ""
        """The reduction that it knows to be void."""
        self.is_saving = False
        self.no_pause_before = 0.0
        self.hears_at = 0.0
        self.alone_since = world.network.now
        self.replica = Replica(world.data, self.found, digest, whole)
        self.replica.saved = self.disk.step
        self.copying = Copying(self)

    @property
    def id(self) -> str:
        """The peer's id."""
        return self.peer.id

    @property
    def disk(self) -> Saved:
        """The newest checkpoint on this host."""
        return self.world.disks.get(self.peer.host, Saved())

    @property
    def newest(self) -> Saved:
        """What a branch would be founded with here."""
        return max(self.forked, self.disk, Saved(step=0), key=lambda saved: saved.step)

    @property
    def voter(self) -> Voter:
        """The votes of its control process."""
        return self.peer.core.voter

    def found(self, branch: str) -> Result:
        """Return the first state of a branch."""
        saved = self.newest
        return Result(branch, saved.step, saved.cursor, Total(saved.state, branch), is_state=True)

    @property
    def offers(self) -> Epoch | None:
        """The epoch whose state it offers to learners: its own, or the last one that it has the state of."""
        has_ended = self.peer.core.epoch is None and not self.voter.is_learner
        return self.last_epoch if self.epoch is None and has_ended else self.epoch

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
            mark = stands.mark
            if mark.branch:
                self.forked = Saved(mark.step, mark.cursor, self.settled_state, mark.branch)
                self.replica.saved = max(self.replica.saved, mark.step)
            self.replica.learn(Mark(), ())
            self.void = ""
            stands = self.replica.fence(number)
        self.world.call(self.peer, "fenced", number, run_state(stands))

    def begin(self, epoch: Epoch) -> None:
        """Take part in an epoch."""
        self.end()
        self.copying.interrupt()
        self.epoch = self.last_epoch = epoch
        self.round, self.got, self.has_sent = 0, {}, False
        self.is_digested, self.buckets = False, []
        me = epoch.holders.index(self.id)
        self.attempt = self.world.attempts[epoch.key]
        self.script = self.replica.epoch(epoch.number, me, len(epoch.holders), epoch.lineages[0], self.world.fewest)
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
            me = self.epoch.holders.index(self.id)
            match self.doing:
                case Gather(value=Token()) if not self.is_digested:
                    self.is_digested = True
                    self.world.later(self, 0.0002, 0.002, self.go_on, self.epoch, self.doing)
                    self.world.reach(self, "digest")
                    return
                case Gather(value=value):
                    is_sent = self.has_sent
                    values = self.exchange(me, value)
                    if isinstance(value, Token) and not is_sent:
                        self.world.reach(self, "seal")
                    if values is None:
                        return
                    self.is_digested = False
                    self.resume(values)
                case Reduce():
                    if not self.reduce(me):
                        return
                case Share(root=root, result=result):
                    values = self.exchange(me, result, root)
                    if values is None:
                        return
                    self.resume(values[0] if root == me else self.copied(values[0]))
                case Compute() | Apply():
                    self.world.later(self, 0.002, 0.02, self.work, self.epoch, self.doing)
                    self.world.reach(self, "compute" if isinstance(self.doing, Compute) else "apply")
                    return
                case Pause():
                    self.world.call(self.peer, "set_run_state", self.run_state(is_ready=True))
                    self.world.later(self, PAUSE, PAUSE + 0.01, self.end_pause, self.epoch, self.doing)
                    self.world.reach(self, "pause")
                    return
                case _:
                    raise Wrong(f"unknown instruction {self.doing}")

    def reduce(self, me: int) -> bool:
        """Reduce the local sum, bucket by bucket. Return whether that has ended."""
        assert self.epoch is not None
        if self.local_step != self.replica.mark.step + 1 or not self.replica.covered:
            self.local = 0
        while len(self.buckets) < BUCKETS:
            bucket, is_sent = len(self.buckets), self.has_sent
            piece = self.local >> BITS * bucket
            values = self.exchange(me, piece if bucket == BUCKETS - 1 else piece % 2**BITS)
            if not is_sent:
                self.world.reach(self, f"bucket {bucket}")
            if values is None:
                return False
            self.buckets.append(sum(values))
        total = sum(piece << BITS * bucket for bucket, piece in enumerate(self.buckets))
        self.buckets = []
        self.resume(self.copied(Total(total, str(self.epoch.key))))
        return True

    def go_on(self, epoch: Epoch, doing: Any) -> None:
        """What had to be done first has ended."""
        if self.epoch is epoch and self.doing is doing:
            self.advance()

    def work(self, epoch: Epoch, doing: Any) -> None:
        """Computing or applying has ended."""
        if self.epoch is not epoch or self.doing is not doing:
            return
        if isinstance(doing, Compute):
            if self.local_step != doing.step or not self.replica.covered:
                self.local, self.local_step = 0, doing.step
            self.local += part_sum(doing.span, doing.part)
            self.replica.add(doing.part)
        else:
            self.doing = None
            self.apply(doing.result)
            is_due = self.world.network.now >= self.no_pause_before
            self.replica.wants_pause = is_due and self.world.has_learner_for(self)
        self.replica.speed = self.world.random.choice([0, 1, 2, 5])
        self.resume(None)
        self.advance()

    def end_pause(self, epoch: Epoch, doing: Any) -> None:
        """The pause is over."""
        if self.epoch is epoch and self.doing is doing:
            self.world.call(self.peer, "set_run_state", self.run_state())
            if self.epoch is epoch and self.doing is doing:
                self.no_pause_before = self.world.network.now + NO_PAUSE
                self.replica.wants_pause = False
                self.resume(None)
                self.advance()

    def exchange(self, me: int, value: Any, root: int | None = None) -> list[Any] | None:
        """Send this member's part once. Return all parts, when they are here."""
        assert self.epoch is not None
        if not self.has_sent:
            self.has_sent = True
            self.got[self.round, me] = value
            if root is None or root == me:
                for other in self.epoch.holders:
                    if other != self.id:
                        self.world.send(self, other, self.epoch.key, self.attempt, self.round, me, value)
        needed = range(len(self.epoch.holders)) if root is None else (root,)
        if any((self.round, rank) not in self.got for rank in needed):
            return None
        values = [self.got[self.round, rank] for rank in needed]
        self.round, self.has_sent = self.round + 1, False
        return values

    def arrive(self, key: tuple[int, str], attempt: int, turn: int, rank: int, value: Any) -> None:
        """A part of another member has come."""
        if self.epoch is not None and self.epoch.key == key and attempt <= self.attempt:
            if attempt < self.attempt:
                return
            self.got[turn, rank] = value
            is_digesting = isinstance(self.doing, Gather) and isinstance(self.doing.value, Token) and not self.has_sent
            if isinstance(self.doing, (Gather, Reduce, Share)) and not is_digesting:
                self.advance()
        elif self.voter.votes.highest <= key[0]:
            self.world.later(
                self, 0.005, 0.01, self.arrive, key, attempt, turn, rank, value
            )  # the commit is on its way

    def resume(self, value: Any) -> None:
        """Go on with the script."""
        assert self.script is not None
        before = self.replica.mark
        try:
            self.doing = self.script.send(value)
        except Fenced:
            self.end()
        except Differs as exc:
            self.differ(exc)
        except StepError as exc:
            raise Wrong(f"{self.id}: {exc}") from exc
        mark = self.replica.mark
        if mark != before and isinstance(self.doing, Apply):
            if self.doing.result.is_state:  # it replaces the whole state, so nothing leads to it from before
                self.recent.clear()
            else:
                self.recent.append((before, mark, self.doing.result))
        self.world.check_mark(self, before, mark)

    def copied(self, copy: Any) -> Any:
        """Return a copy as this process receives it. Damage at a member alone is beyond anybody's notice."""
        assert self.epoch is not None
        is_bad = self.peer.host == self.world.bad_host and len(self.epoch.holders) > 1
        return damaged(copy) if is_bad and self.world.chance.random() < self.world.damage else copy

    def differ(self, differs: Differs) -> None:
        """Members have different copies of a result: the epoch ends, or this process leaves."""
        epoch = self.epoch
        assert epoch is not None
        self.world.network.log(f"{self.id} finds {differs}")
        self.void = void_after(self.replica, epoch) or self.void
        is_odd = epoch.holders.index(self.id) in differs.ranks
        self.end()
        if differs.times > 1 and is_odd:
            self.world.network.leave(self.peer.host)
        else:
            self.world.call(self.peer, "give_up", epoch.number, self.run_state(), "copies differ")

    def apply(self, result: Result) -> None:
        """Change the state."""
        self.state = applied(self.state, result)
        self.world.check_result(self, result)
        if result.is_state:
            self.forked = Saved()
        if not self.is_saving and self.world.random.random() < 0.1:
            self.is_saving = True
            saved = Saved(result.step, result.cursor, self.state, result.branch)
            self.world.later(self, 0.01, 0.1, self.save, saved)
            self.world.reach(self, "checkpoint")

    def save(self, saved: Saved) -> None:
        """A checkpoint is complete, and takes its name."""
        self.is_saving = False
        self.world.disks[self.peer.host] = saved
