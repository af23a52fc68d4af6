"""The steps of an elastic run, and how members agree on them when machines come and go. Pure.

A `Replica` is one member's copy of the run. `Replica.epoch` is what it does in one epoch, as a generator: it yields an
instruction, and is resumed with the result. When an epoch ends, the generator is closed at whatever place it was, and
the next epoch begins a new one. What must survive that is in the replica: the mark, the held result, the local sum.

    yields                  is resumed with
    Gather(value)           the values of all members, in the order of their ranks
    Reduce()                the sum of all members' local sums
    Share(root, result)     the root's `Result`, at every member
    Compute(part, span)     nothing, after the micro-batch was added to the local sum (`Replica.add`)
    Apply(result, tokens)   nothing, after the program has applied the result to its state
    Pause()                 nothing, after a moment in which a new member may be seated: that ends the epoch

One step: each member adds the gradients of its micro-batches to its local sum; a reduction gives the result; the
members *seal* it by telling each other, in a token, that they hold it; a member that has everybody's token applies it.

The rules, and where each is kept:

 1. Nobody applies a result without a seal of the current epoch, in recovery too. (`_seal`)
 2. A result that was reduced is *held* until it is sealed. If a member of the next epoch holds one, that one is sealed
    and applied, and nothing is computed again. Of several, that of the highest epoch counts. (`settle`)
 3. Nobody new is seated while a step is pending: a growing epoch is accepted only by members with the same mark that
    hold nothing, and accepting freezes that. (`Replica.fence`, and cluster/core/membership.py)
 4. A member tells what it holds only when it can no longer hold or seal anything of an older epoch. (`Replica.fence`)
 5. Each micro-batch is in exactly one local sum. Sums cannot be taken apart: of two that overlap, one is dropped whole.
    Every seal checks the coverage. (`settle`, `_seal`)
 6. Nobody decides a deal by itself: deals follow from the reports and tokens that all members have.
    (`_first_deals`, `_deal_after`)
 7. A reduction is never repeated within an epoch: what fails ends the epoch.
 8. Copies of one result that differ are void: nobody applies one, and the next epoch reduces the step again. (`_step`,
    `settle`) All members have the same tokens, so nobody can have sealed one. A member that has not seen the tokens
    still holds its copy: those that have report the epoch as void, and the copy does not count. A result that is sent
    in recovery is never void, because a member that is away may have sealed it: copies of it are compared before they
    are held. (`_adopt`)
 9. The samples of a step that was opened stay the same until it is sealed, with however many members. Of several
    openings that of the highest epoch counts, and sums of another one are dropped. (`settle`)
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from threading import Lock
from typing import Any, Final, NamedTuple, TypeAlias

from msgspec import Struct

from ringfort.errors import DistributedError
from ringfort.training.elastic.dealing import Data, Span, deal

FOUNDING: Final = -1
"""The step of a member that is in no branch yet. Founding a branch seals the state itself."""
AHEAD: Final = 16
"""Micro-batches per member, about, that are dealt in advance: so workers can load data for steps to come. Deals follow
from speeds that are that much older: with 16 micro-batches per member and step one step, with one 16 steps."""
DIGESTS: Final = 2**64
"""Digests are added modulo this."""
COMPARE_EVERY: Final = 100
"""Steps after which members compare their states. The digests of weights and two moments take 0.7 ms of one core for 1
MiB of gradients, and 30 ms for 64 MiB: with steps of 50 ms and 100 ms, that is 0.01% and 0.3% of the run."""


class Fenced(DistributedError):  # noqa: N818  # it ends an epoch; nobody's fault
    """A later epoch was accepted, so nothing of this one may be held or sealed."""

    is_recoverable = True


class StepError(DistributedError):
    """Members that should agree do not: a fault of a machine or of this library."""


class Differs(DistributedError):  # noqa: N818  # it ends an epoch; what follows depends on how often
    """Members have different copies of one result, so nobody applies it: rule 8.

    `ranks` are those that differ from the majority; all, if no copy has one. `times` counts how often in a row this
    happened to the step.
    """

    is_recoverable = True

    def __init__(self, step: int, ranks: tuple[int, ...], times: int, *, has_majority: bool) -> None:
        super().__init__(f"The copies of the result of step {step} differ at ranks {ranks}")
        self.step = step
        self.ranks = ranks
        self.times = times
        self.has_majority = has_majority


class Mark(Struct, frozen=True):
    """Where a member is in the run: all that decides whether two members have the same state."""

    branch: str = ""
    """The unbroken run that it follows; empty before the first."""
    step: int = FOUNDING
    """The last step that was sealed; a founding is step 0, or the step of the checkpoint it starts from."""
    chain: bytes = b""
    """A digest of all sealed results of the branch."""
    cursor: int = 0
    """Samples that were consumed, over all passes."""

    @property
    def lineage(self) -> str:
        """The lineage of epochs in which the branch was founded; empty before that. Only an epoch of this lineage may
        continue the branch."""
        return lineage_of(self.branch)

    def after(self, result: Result, digest: int) -> Mark:
        """Return the mark of a member at this one that applies `result`, whose payload has this digest."""
        text = repr((self.chain, result.step, digest)).encode()
        return Mark(result.branch, result.step, blake2b(text, digest_size=16).digest(), result.cursor)


def branch_name(lineage: str, epoch: int) -> str:
    """Return the name of a branch that is founded in an epoch of `lineage`."""
    return f"{lineage}@{epoch}"


def lineage_of(branch: str) -> str:
    """Return the lineage in which `branch` was founded."""
    return branch.rpartition("@")[0]


class Result(Struct, frozen=True, eq=False):
    """What a step changes: the reduced gradients, or, for a founding, the whole state."""

    branch: str
    step: int
    cursor: int
    """The samples that are consumed once it is applied."""
    payload: Any = None
    """What is not compared: whether two are the same is what digests are for."""
    is_state: bool = False

    @property
    def _key(self) -> tuple[str, int, int, bool]:
        return self.branch, self.step, self.cursor, self.is_state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Result) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Result{self._key}"


class Held(Struct, frozen=True):
    """A result that was reduced or received in `epoch` and is not sealed here."""

    epoch: int
    result: Result


@dataclass(frozen=True)
class Report:
    """What a member tells when an epoch begins."""

    mark: Mark
    held: int = 0
    """The epoch in which it got the result that it holds; 0 for none."""
    held_step: int = FOUNDING
    covered: frozenset[int] = frozenset()
    """The micro-batches in its local sum for the step after `mark`."""
    speed: int = 0
    """Samples per second when it computes; 0 if unknown."""
    saved: int = FOUNDING
    """The step of the newest checkpoint on its disk that fits this run."""
    void: int = 0
    """The latest epoch whose results of the step after `mark` are void; 0 for none."""
    differed: int = 0
    """How often in a row copies of the result of that step differed."""
    opened: tuple[int, int] = (0, 0)
    """The latest epoch in which the step after `mark` was opened, 0 for none; and the samples of the step, to which
    `covered` belongs."""


class Token(Struct, frozen=True):
    """One member's word that it holds a result. All members' `about` must be equal."""

    about: tuple[Any, ...]
    """Branch, epoch, step, cursor and the chain before."""
    digest: int = 0
    """The sum of the digests of this member's blocks of the result."""
    covered: frozenset[int] = frozenset()
    speed: int = 0
    wants_pause: bool = False
    """A new member is ready to be seated."""
    wants_image: bool = False
    """A learner waits for an image of the state, which all members make at the same step."""
    is_finite: bool = True
    """Whether this member's share of the result has no infinity and no NaN."""
    sums: tuple[float, ...] = ()
    """Sums of the program, such as the loss."""
    overhead: int = 0
    """Microseconds of a step that this member's program takes outside micro-batches."""
    period: int = 0
    """Microseconds from step to step."""
    copy: int = 0
    """A digest of what all members compare of their copies."""
    is_preparing: bool = False
    """It has no memory ready for an image, for which all members wait with theirs."""


class Gather(Struct, frozen=True):
    """Exchange values with all members."""

    value: Report | Token


class Reduce(Struct, frozen=True):
    """Add up the local sums of all members, out of place."""


class Share(Struct, frozen=True):
    """Send the result of `root` to all members."""

    root: int
    result: Result | None


class Compute(Struct, frozen=True):
    """Compute the gradients of one micro-batch."""

    step: int
    part: int
    span: Span
    """The samples of the step."""
    is_last: bool = False
    """Nothing comes between this micro-batch and the reduction, so that may begin with gradients that are complete."""


class Deal(NamedTuple):
    """The micro-batches of one step that this member computes."""

    mark: Mark
    """The mark before the step; of a later step without its chain, which nobody knows yet."""
    span: Span
    """The samples of the step."""
    parts: tuple[int, ...]


class Apply(Struct, frozen=True):
    """Apply a sealed result to the state."""

    result: Result
    tokens: tuple[Token, ...]
    before: Mark = Mark()
    """The mark that it was sealed at."""
    after: Mark = Mark()
    """The mark of a member that has applied it."""
    is_compared: bool = False
    """All members of the epoch apply it now, and compare their states after that."""
    place: int = 0
    """Which step of the epoch it is, from 1: the same at all members. 0 for a result that the epoch adopted, which some
    members have applied before and do not apply now. So whatever members do together counts places, never what this
    member has applied."""

    @property
    def digest(self) -> int:
        """The digest of the whole result."""
        return sum(token.digest for token in self.tokens) % DIGESTS

    @property
    def is_finite(self) -> bool:
        """Whether no member has found an infinity or a NaN in its share of the result."""
        return all(token.is_finite for token in self.tokens)


class Pause(Struct, frozen=True):
    """Wait until a new member is seated, for a moment at most. Local sums stay valid in the epoch with that member."""


Instruction: TypeAlias = Gather | Reduce | Share | Compute | Apply | Pause


Founder: TypeAlias = Callable[[str], Result]
"""Makes the first state of a branch, whose name it is given."""
Digest: TypeAlias = Callable[[Result, int, int], int]
"""Digests the blocks of a result that are the share of rank `me` of `size`. The digests of all shares add up to that of
the result, however many there are: so a member of a smaller group finds the same one."""
Sample: TypeAlias = Callable[[Result], int]
"""Digests some blocks of a result, the same at every member and others at each step."""


# --- what the reports of an epoch's members mean ----------------------------------------------------------------------


@dataclass(frozen=True)
class Adopt:
    """Seal a result that the member of rank `root` has, before anything else."""

    root: int
    is_sealed: bool
    """The root has sealed it; otherwise it holds it."""


@dataclass(frozen=True)
class Found:
    """Begin a branch with the state of the member of rank `root`."""

    root: int


@dataclass(frozen=True)
class Continue:
    """Compute the next step. `kept` are the micro-batches that each member's local sum already covers."""

    kept: tuple[frozenset[int], ...]
    samples: int
    """Those of the step."""


Opening: TypeAlias = Adopt | Found | Continue


def settle(reports: Sequence[Report], usual: int) -> Opening:
    """Return how the members that sent `reports` go on. All of them get the same answer. A step that they open now has
    the `usual` number of samples.

    Members of one epoch are in one branch and at most one step apart: the membership law sees to that.
    """
    branches = {report.mark.branch for report in reports} - {""}
    if len(branches) > 1:
        raise StepError(f"Members of two branches are in one epoch: {', '.join(sorted(branches))}")
    ranks = range(len(reports))
    void = max(report.void for report in reports)  # rule 8
    top = max((report.mark for report in reports), key=lambda mark: mark.step)
    if any(report.mark != top for report in reports):
        # Somebody has sealed what the others hold.
        return Adopt(next(rank for rank in ranks if reports[rank].mark == top), is_sealed=True)
    holders = [
        rank for rank in ranks if reports[rank].held > void and (top.branch == "" or reports[rank].held_step > top.step)
    ]
    if holders:  # rule 2
        return Adopt(max(holders, key=lambda rank: (reports[rank].held, -rank)), is_sealed=False)
    if top.branch == "":
        return Found(max(ranks, key=lambda rank: (reports[rank].saved, -rank)))
    epoch, samples = max(report.opened for report in reports)  # rule 9
    if not epoch:
        samples = usual
    kept, seen = list[frozenset[int]](), set[int]()
    for report in reports:
        is_kept = report.opened[1] == samples and seen.isdisjoint(report.covered)  # rule 5
        kept.append(report.covered if is_kept else frozenset())
        seen |= kept[-1]
    return Continue(tuple(kept), samples)


def minority(copies: Sequence[int]) -> tuple[int, ...] | None:
    """Return the ranks whose copy, given by its digest, is not that of more than half of the members; None if no copy
    is."""
    if copies.count(copies[0]) == len(copies):
        return ()
    digest, most = Counter(copies).most_common(1)[0]
    return tuple(rank for rank, copy in enumerate(copies) if copy != digest) if 2 * most > len(copies) else None


# --- one member -------------------------------------------------------------------------------------------------------


class Standstill(Struct, frozen=True):
    """What a fenced member says of itself to the membership law: it stays true until it is in another epoch."""

    mark: Mark = Mark()
    is_pending: bool = False
    """It holds a result that others may have applied already, or not yet."""
    lineage: str = ""
    """The lineage of what it has or holds."""


class Replica:
    """One member's copy of a run: its mark, what it holds, and its local sum. The state itself is the program's."""

    def __init__(
        self,
        data: Data,
        found: Founder,
        digest: Digest,
        sample: Sample,
        *,
        mark: Mark | None = None,
        planned: Callable[[], int] = lambda: 1,
    ) -> None:
        """`planned` returns how many optimizer steps a round has that is opened now, where the state of the run says
        that: so all members with the same mark find the same."""
        self.data = data
        self.mark = mark or Mark()
        self.held: Held | None = None
        self.covered: frozenset[int] = frozenset()
        self.speed = 0
        self.overhead = 0
        self.period = 0
        self.saved = FOUNDING
        self.wants_pause = False
        self.wants_image = False
        self.is_preparing = False
        self.sums: tuple[float, ...] = ()
        self.is_finite = True
        self.deals: tuple[Deal, ...] = ()
        """What this member computes in this step and in those to come, as far as that is known. A new epoch deals
        anew."""
        self.history: deque[tuple[Mark, Result]] = deque(maxlen=1)
        """The latest sealed results, each with the mark before it: for members that are one step behind."""
        self._found = found
        self._digest = digest
        self._sample = sample
        self._planned = planned
        self._void = 0
        self._differed = 0
        self._opened = (0, 0)
        """The latest epoch in which the step after the mark was opened, and its samples."""
        self._fence = 0
        self._lock = Lock()

    @property
    def span(self) -> Span:
        """The samples of the step after the mark: as it was opened, or else as one member alone would open it."""
        return self.data.span(self.mark.cursor, opened=self._opened[1])

    # --- called from other threads ------------------------------------------------------------------------------------

    def fence(self, epoch: int) -> Standstill:
        """Let nothing of an epoch below `epoch` be held or sealed any more, and return what this member has. Rules 3
        and 4: whoever tells without the fence may hold a result, or apply one, right after it said that it has none."""
        with self._lock:
            self._fence = max(self._fence, epoch)
            lineage = self.mark.lineage or ("" if self.held is None else lineage_of(self.held.result.branch))
            return Standstill(self.mark, self.held is not None, lineage)

    def learn(self, mark: Mark, history: Iterable[tuple[Mark, Result]]) -> None:
        """Take over another member's mark, with its state. What this one held and summed belongs to nothing now."""
        with self._lock:
            self.mark, self.held, self.covered = mark, None, frozenset()
            self._void = self._differed = 0
            self._opened = (0, 0)
            self.history.clear()
            self.history.extend(history)

    def leave(self) -> None:
        """This member has said goodbye, and is in no epoch. What it promised ends with that, and what it held and
        summed is no member's. It comes back as another peer, with its state."""
        with self._lock:
            self.held, self.covered, self._fence = None, frozenset(), 0
            self._opened = (0, 0)

    # --- one epoch ----------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Return what this member tells when an epoch begins."""
        epoch, step = (0, FOUNDING) if self.held is None else (self.held.epoch, self.held.result.step)
        opened = (self._opened[0], self.span.samples)
        return Report(self.mark, epoch, step, self.covered, self.speed, self.saved, self._void, self._differed, opened)

    def add(self, part: int, mark: Mark | None = None) -> bool:
        """Note that the local sum now includes micro-batch `part` of the step after `mark`. Return False if this member
        is elsewhere by now: `fence` may end a run while the program computes."""
        with self._lock:
            if mark is not None and mark != self.mark:
                return False
            self.covered |= {part}
            return True

    def epoch(
        self, number: int, me: int, size: int, lineage: str, fewest: int = 1
    ) -> Generator[Instruction, Any, None]:
        """Take part in epoch `number` of `lineage` as rank `me` of `size`. With fewer members than `fewest`, settle
        what is pending and begin no step. Ends only by being closed, or by an error."""
        while True:
            reports: Sequence[Report] = yield Gather(self.report())
            opening = settle(reports, self.data.span(self.mark.cursor, self._times(size)).samples)
            self._differed = max((report.differed for report in reports if report.mark == self.mark), default=0)
            if isinstance(opening, Continue):
                break
            yield from self._adopt(number, me, size, lineage, opening)
        self._drop_void(max(report.void for report in reports))
        while size < fewest:
            yield Pause()
        if opening.kept[me] != self.covered:
            self.covered = frozenset()  # somebody else's sum has some of these micro-batches
        pauses, deals = False, self._first_deals(me, opening, [report.speed for report in reports])
        for place in count(1):
            self._opened = (number, deals[0].span.samples)
            self.deals = (deals[0]._replace(mark=self.mark), *deals[1:])
            tokens = yield from self._step(number, me, size, place, pauses=pauses)
            deals = [*deals[1:], self._deal_after(deals[-1], me, [token.speed for token in tokens])]
            pauses = any(token.wants_pause for token in tokens)

    def _first_deals(self, me: int, opening: Continue, speeds: Sequence[int]) -> list[Deal]:
        """Return what this member computes in the first step of an epoch and in the next ones, as far as they are dealt
        in advance. `speeds` are those of all members: rule 6."""
        span = self.data.span(self.mark.cursor, opened=opening.samples)
        missing = sorted(set(range(self.data.parts(span))).difference(*opening.kept))
        deals = [Deal(self.mark, span, deal(missing, speeds)[me])]
        size = len(speeds)
        for _ in range(max(1, AHEAD * size // self.data.parts(self.data.span(0, self._times(size))))):
            deals.append(self._deal_after(deals[-1], me, speeds))
        return deals

    def _deal_after(self, last: Deal, me: int, speeds: Sequence[int]) -> Deal:
        """Return what this member computes in the step after another that is dealt already."""
        mark = Mark(last.mark.branch, last.mark.step + 1, b"", last.mark.cursor + last.span.samples)
        span = self.data.span(mark.cursor, self._times(len(speeds)))
        return Deal(mark, span, deal(range(self.data.parts(span)), speeds)[me])

    def _times(self, size: int) -> int:
        """Return how many times the batch a step has that `size` members open now."""
        return self._planned() if self.data.is_planned else size

    def _adopt(
        self, number: int, me: int, size: int, lineage: str, opening: Adopt | Found
    ) -> Generator[Instruction, Any, None]:
        """Seal what a member already has: a result that it holds or has sealed, or the state that founds a branch."""
        mine: Result | None = None
        if opening.root == me:
            if isinstance(opening, Found):
                mine = self._found(branch_name(lineage, number))
            elif opening.is_sealed:
                _, mine = self.history[-1]
            else:
                assert self.held is not None
                mine = self.held.result
        result: Result = yield Share(opening.root, mine)
        about = (result.branch, number, result.step, result.cursor)
        copies: Sequence[Token] = yield Gather(Token(about, copy=self._digest(result, 0, 1)))
        self._compare(copies, result)  # before it is held: rule 8
        is_sealed_here = (result.branch, result.step) == (self.mark.branch, self.mark.step)
        if not is_sealed_here:
            self._hold(number, result)
        digest = self._digest(result, me, size)  # which also finds whether it is finite
        tokens: Sequence[Token] = yield Gather(Token(about, digest, is_finite=self.is_finite))
        digest = _agreed(tokens)
        if is_sealed_here:
            before, _ = self.history[-1]
            if before.after(result, digest) != self.mark:
                raise StepError(f"Step {result.step} has two results")
            self._differed = 0  # that was about this step, not about the next one
        else:
            before = self.mark
            self._seal(number, result, digest)
            yield Apply(result, tuple(tokens), before, self.mark)

    def _step(
        self, number: int, me: int, size: int, place: int, *, pauses: bool
    ) -> Generator[Instruction, Any, Sequence[Token]]:
        mark, span, mine = self.deals[0]
        for turn, part in enumerate(mine, 1):
            yield Compute(mark.step + 1, part, span, is_last=turn == len(mine) and not pauses)
        if pauses:  # here, so that a new member catches up while the others compute
            yield Pause()
        payload: Any = yield Reduce()
        result = Result(mark.branch, mark.step + 1, mark.cursor + span.samples, payload)
        self._hold(number, result)
        about = (result.branch, number, result.step, result.cursor, mark.chain)
        digest = self._digest(result, me, size)
        token = Token(
            about,
            digest,
            self.covered,
            self.speed,
            self.wants_pause,
            self.wants_image,
            self.is_finite,
            self.sums,
            self.overhead,
            self.period,
            self._sample(result),
            self.is_preparing,
        )
        tokens: Sequence[Token] = yield Gather(token)
        digest = _agreed(tokens)
        try:
            self._compare(tokens, result)
        except Differs:
            self._drop_void(number)  # rule 8
            raise
        covered = [part for token in tokens for part in token.covered]
        if sorted(covered) != list(range(self.data.parts(span))):  # rule 5
            raise StepError(f"Step {result.step} does not cover each micro-batch exactly once")
        self._seal(number, result, digest)
        yield Apply(result, tuple(tokens), mark, self.mark, result.step % COMPARE_EVERY == 0, place)
        return tokens

    def _hold(self, epoch: int, result: Result) -> None:
        with self._lock:
            self._check_fence(epoch)
            self.held = Held(epoch, result)

    def _seal(self, epoch: int, result: Result, digest: int) -> None:
        """Everybody's token is here: the result counts. Rule 1."""
        with self._lock:
            self._check_fence(epoch)
            self.history.append((self.mark, result))
            self.mark = self.mark.after(result, digest)
            self.held = None
            self.covered = frozenset()
            self._void = self._differed = 0
            self._opened = (0, 0)

    def _compare(self, tokens: Sequence[Token], result: Result) -> None:
        """Raise `Differs` if members have different copies of `result`."""
        copies = [token.copy for token in tokens]
        odd = minority(copies)
        if odd != ():
            self._differed += 1
            ranks = tuple(range(len(copies))) if odd is None else odd
            raise Differs(result.step, ranks, self._differed, has_majority=odd is not None)

    def _drop_void(self, epoch: int) -> None:
        """Drop what is held: it is of an epoch up to `epoch`, whose results of this step are void. (With 0, nothing is
        held.) That needs no fence: a member that has told that it holds something may hold less."""
        with self._lock:
            self.held, self._void = None, epoch

    def _check_fence(self, epoch: int) -> None:
        if epoch < self._fence:
            raise Fenced(f"Epoch {epoch} has ended")


def _agreed(tokens: Sequence[Token]) -> int:
    """Return the digest of the result that all `tokens` are about."""
    if len({token.about for token in tokens}) != 1:
        raise StepError(f"Members hold different results: {[token.about for token in tokens]}")
    return sum(token.digest for token in tokens) % DIGESTS
