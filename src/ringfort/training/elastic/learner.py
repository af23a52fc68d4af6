"""`Learner`: a joining process that gets the state of a run from its members, and then the results sealed since.

    learner = Learner({peer: node.open_stream(peer, PURPOSE, timeout) for peer in members}, limit=...)
    fetched = learner.fetch(check, timeout=300)
    state.load(fetched.image)
    for replayed in learner.results(fetched.mark, timeout=0):
        apply(replayed.result)

Each donor has a thread while an image is fetched. Any donor may be lost at any time, as long as one is left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.core.peer_messages import Epoch
from ringfort.collectives.reduction import element_type_named
from ringfort.errors import (
    DistributedError,
    OperationTimeoutError,
    ProtocolError,
    StateTransferError,
)
from ringfort.training.elastic.digests import digest_share
from ringfort.training.elastic.donor_links import DonorLinks, Source
from ringfort.training.elastic.local_sum import Layout
from ringfort.training.elastic.protocol import Digest, Mark, Result
from ringfort.training.elastic.sample_order import Array
from ringfort.training.elastic.spare_memory import SpareMemory
from ringfort.training.elastic.state_tree import BLOCK, Image, block_hash
from ringfort.training.elastic.timeline import note
from ringfort.training.elastic.transfer import Fetch, check_manifest
from ringfort.training.elastic.transfer_link import (
    MAX_WAIT,
    AskBlock,
    AskImage,
    AskResult,
    BlockFollows,
    Described,
    Description,
    Gone,
    NotYet,
    Sealed,
    TransferLink,
)
from ringfort.transport.locks import Thread

_log = logging.getLogger(__name__)

_GRACE: Final = 2.0
"""Seconds that the first donor has to describe its image, before others are asked to hash theirs too."""


@dataclass(frozen=True)
class Fetched:
    """The state of a run, and where in the run it is."""

    image: Image
    mark: Mark
    epoch: Epoch
    """The epoch in which the donor was then."""
    layout: Layout | None
    """The gradients of a step; None if no donor knew them yet."""


@dataclass(frozen=True)
class Replayed:
    """A sealed result, verified against the mark before it."""

    before: Mark
    after: Mark
    result: Result
    digest: int
    sums: tuple[float, ...]
    is_finite: bool
    behind: int
    """Results that the donor had beyond this one: how far this process is behind."""

    @property
    def nbytes(self) -> int:
        """The bytes of the result."""
        return sum(array.nbytes for array in self.result.payload.values())


@dataclass(eq=False)
class _Round:
    """One call of `fetch`. The learner's lock protects it."""

    offers: dict[str, Description] = field(default_factory=dict[str, Description])
    asked: str | None = None
    """The donor that was asked to hash its image."""
    target: Fetch | None = None
    is_over: bool = False


def _digest(result: Result, me: int, size: int) -> int:
    return digest_share(result.payload, me, size)


class Learner(DonorLinks):
    """Asks donors for the state. `fetch` and `next_result` are for one thread; `add` and `close` for any."""

    def __init__(
        self, donors: Mapping[str, Connection], *, limit: int, timeout: float = 30.0, digest: Digest = _digest
    ) -> None:
        """Take over the connections, by the name of the donor. Images and results may have `limit` bytes each. A donor
        that has sent nothing for `timeout` seconds is lost. `digest` is that of the run's `Replica`."""
        super().__init__(timeout)
        self._limit = limit
        self._digest = digest
        self._round: _Round | None = None
        self._memory = SpareMemory()
        for peer, connection in donors.items():
            self.add(peer, connection)

    # --- the image ----------------------------------------------------------------------------------------------------

    def fetch(self, check: Callable[[Fetched], None], *, known: Iterable[Image] = (), timeout: float) -> Fetched:
        """Fetch the image that most donors offer, from all of them at once.

        `check` is called with the description, before memory is taken for the image (its data is empty then), and
        raises an error if this process cannot use it. Blocks of `known` images, which have hashes, are used again.

        Raises `StateTransferError` if no donor is left, `OperationTimeoutError` after `timeout` seconds.
        """
        fetching = self.fetching(check, known=known, timeout=timeout)
        while True:
            try:
                next(fetching)
            except StopIteration as done:
                return done.value

    def fetching(
        self, check: Callable[[Fetched], None], *, known: Iterable[Image] = (), timeout: float
    ) -> Generator[Fetched, None, Fetched]:
        """Do as `fetch` does, and yield the description each time that blocks are under way: the caller can do
        something else while they come."""
        deadline, images = time.monotonic() + timeout, list(known)
        current = _Round()
        with self._changed:
            self._round = current
            for source in self._sources.values():
                self._start(source, current)
        try:
            while True:
                chosen = self._choose(current, deadline, timeout)
                described = _fetched(chosen, Image(chosen.manifest, np.empty(0, np.uint8)))
                check(described)
                fetch = Fetch(chosen.manifest, images)
                note("image of step %d described; %d blocks to fetch", chosen.mark.step, fetch.missing)
                with self._changed:
                    current.target = fetch
                    for peer, offer in current.offers.items():
                        if peer in self._sources:
                            fetch.add(peer, offer.manifest.hashes)
                    self._changed.notify_all()
                yield described
                with self._changed:
                    while not fetch.is_complete and not fetch.is_stuck:
                        what = (
                            f"fetching the state; {fetch.missing} of {len(chosen.manifest.hashes)} blocks are missing"
                        )
                        self._wait(deadline, what, timeout)
                if fetch.is_complete:
                    return _fetched(chosen, fetch.image)
                images = [*images, fetch.partial]  # those who are left may offer another image with the same blocks
        finally:
            with self._changed:
                current.is_over = True
                self._round = None
                self._changed.notify_all()

    def _choose(self, current: _Round, deadline: float, timeout: float) -> Description:
        """Wait for a description; of those that are here, return the one of the mark that most donors have, or of the
        latest of these. Donors whose description comes later help all the same."""
        with self._changed:
            while True:
                offers = [offer for peer, offer in current.offers.items() if peer in self._sources]
                if not self._sources:
                    raise StateTransferError("no member is left that can send the state", self.lost)
                if offers:
                    marks = [offer.mark for offer in offers]
                    states = [offer.manifest for offer in offers]  # one may be damaged, or of another class
                    return max(
                        offers, key=lambda one: (marks.count(one.mark), one.mark.step, states.count(one.manifest))
                    )
                self._wait(deadline, "waiting for a member to offer the state", timeout)

    def _wait(self, deadline: float, what: str, timeout: float) -> None:
        """Wait for a change. Raise `OperationTimeoutError` if `deadline` has passed."""
        now = time.monotonic()
        if now >= deadline:
            state = "".join(f"\n{peer}: {why}" for peer, why in self.lost.items())
            raise OperationTimeoutError(what, timeout, state=state.strip())
        self._changed.wait(max(0.0, deadline - now))

    def close(self) -> None:
        """Close all connections; `fetch` in another thread fails. Idempotent."""
        with self._changed:
            if self._round is not None:
                self._round.is_over = True
            self._changed.notify_all()
        super().close()

    def _joined(self, source: Source) -> None:
        if self._round is not None:
            self._start(source, self._round)

    def _left(self, peer: str, why: str) -> None:
        if self._round is not None:
            self._round.asked = None if self._round.asked == peer else self._round.asked
            self._round.offers.pop(peer, None)
            if self._round.target is not None:
                self._round.target.lose(peer, why)

    # --- one donor's thread -------------------------------------------------------------------------------------------

    def _start(self, source: Source, current: _Round) -> None:
        if (
            source.thread is not None
        ):  # of an earlier round, still busy with what it was asked for; then it goes on here
            return
        source.thread = Thread(self._run, (source, current), name="ringfort-learner")
        source.thread.start()

    def _run(self, source: Source, current: _Round) -> None:
        try:
            while True:
                self._take_part(source, current)
                with self._changed:
                    if self._round is None or self._round is current:
                        source.thread = None
                        self._changed.notify_all()
                        return
                    current = self._round
        except DistributedError as exc:
            self._lose(source, str(exc))
        except Exception as exc:
            _log.exception("Fetching from %s failed", source.link.peer)
            self._lose(source, f"{type(exc).__name__}: {exc}")

    def _take_part(self, source: Source, current: _Round) -> None:
        """Do one donor's part of a round. On return, nothing that was asked for is under way."""
        link, done = source.link, None
        described = self._described(link, current)
        if described is None:
            return
        with self._changed:
            current.offers[link.peer] = described
            if current.target is not None:
                current.target.add(link.peer, described.manifest.hashes)
            self._changed.notify_all()
        while True:
            with self._changed:
                while (current.target is None or current.target is done) and not current.is_over:
                    self._changed.wait(MAX_WAIT)
                fetch = done = current.target
                if current.is_over or fetch is None:
                    return
            self._pull(link, fetch, current)

    def _described(self, link: TransferLink, current: _Round) -> Description | None:
        while not current.is_over:
            known = self._known(link.peer, current)
            link.request(AskImage(MAX_WAIT, None if known is None else known.mark))
            answer = link.next_answer()
            if isinstance(answer, Described):
                described = link.description(answer)
                if known is not None and described.mark == known.mark:  # the same state, so the same image
                    described = msgspec.structs.replace(described, manifest=known.manifest)
                check_manifest(described.manifest, self._limit)
                return described
            if not isinstance(answer, NotYet):
                raise _unexpected(link, answer)
        return None

    def _known(self, peer: str, current: _Round) -> Description | None:
        """Return what another donor has described, after waiting for that for a moment: one that hashes its image is
        enough. Return None if `peer` is to do it."""
        deadline = time.monotonic() + _GRACE
        with self._changed:
            while not current.offers and current.asked not in (None, peer) and not current.is_over:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            if current.offers:
                return next(iter(current.offers.values()))
            current.asked = peer
            return None

    def _pull(self, link: TransferLink, fetch: Fetch, current: _Round) -> None:
        """Get blocks from one donor until the image is complete, or cannot be completed."""
        room, under_way = memoryview(np.empty(BLOCK, np.uint8)), 0
        while True:
            with self._changed:
                wanted = list[int]() if current.is_over else fetch.ask(link.peer)
                if not wanted and not under_way:
                    if fetch.is_complete or fetch.is_stuck or current.is_over:
                        return
                    self._changed.wait(MAX_WAIT)  # the blocks of a donor that is lost may come here yet
                    continue
            for index in wanted:
                link.request(AskBlock(index))
            under_way += len(wanted)
            answer = link.next_answer()
            if not isinstance(answer, BlockFollows):
                raise _unexpected(link, answer)
            if answer.nbytes != fetch.block_bytes(answer.index):
                raise ProtocolError(f"{link.peer} sent a block of {answer.nbytes} bytes", peer=link.peer)
            block = room[: answer.nbytes]
            link.fill(block)
            under_way -= 1
            found = block_hash(block)  # here, so that the threads of all donors do it at the same time
            with self._changed:
                if not fetch.take(link.peer, answer.index, block, found):
                    raise ProtocolError(fetch.lost.get(link.peer, "it was lost"), peer=link.peer)
                if fetch.is_complete:
                    self._changed.notify_all()

    # --- results ------------------------------------------------------------------------------------------------------

    def results(self, after: Mark, *, timeout: float) -> Iterator[Replayed]:
        """Yield the sealed results that follow `after`, until none has come for `timeout` seconds. Raise as
        `next_result`."""
        while (replayed := self.next_result(after, timeout=timeout)) is not None:
            yield replayed
            after = replayed.after

    def next_result(self, after: Mark, *, timeout: float, wants_seat: bool = True) -> Replayed | None:
        """Return the sealed result that follows the mark `after`; None if there is none within `timeout` seconds. At
        least one donor is asked, whatever the timeout. With `wants_seat`, members wait for this process at the end of a
        step once it has all results. The memory of a result is used again when nobody has it.

        Raises `StateTransferError` if no donor is left that has it. Then fetch the state again.
        """
        deadline, gone, late = time.monotonic() + timeout, dict[str, str](), set[Source]()
        while True:
            source = self._idle_source(gone, late, after.step, deadline)
            if source is None:
                return None
            link = source.link
            try:
                link.request(AskResult(after, max(0.0, min(MAX_WAIT, deadline - time.monotonic())), wants_seat))
                answer = link.next_answer()
                if isinstance(answer, Sealed):
                    return self._replayed(link, answer, after)
                if isinstance(answer, Gone):
                    gone[link.peer] = answer.why
                elif isinstance(answer, NotYet):
                    late.add(source)
                else:
                    raise _unexpected(link, answer)
            except DistributedError as exc:
                self._lose(source, str(exc))

    def _replayed(self, link: TransferLink, sealed: Sealed, after: Mark) -> Replayed:
        if (sealed.before, sealed.branch, sealed.step) != (after, after.branch, after.step + 1):
            raise ProtocolError(f"{link.peer} sent the result of another step", peer=link.peer)
        kinds = [element_type_named(part.kind) for part in sealed.parts]
        nbytes = sum(kind.itemsize * part.size for kind, part in zip(kinds, sealed.parts, strict=True))
        if nbytes > self._limit:
            raise ProtocolError(f"{link.peer} sent a result of {nbytes} bytes; the limit is {self._limit}")
        payload = dict[str, Array]()
        for kind, part in zip(kinds, sealed.parts, strict=True):
            # New memory takes longer than a result does to arrive on a fast network.
            array = payload[part.name] = self._memory.take(kind.storage.str, part.size)
            link.fill(memoryview(array.view(np.uint8)))
        result = Result(sealed.branch, sealed.step, sealed.cursor, payload)
        if self._digest(result, 0, 1) != sealed.digest:
            raise ProtocolError(f"The result of step {sealed.step} from {link.peer} is damaged", peer=link.peer)
        mark = after.after(result, sealed.digest)
        return Replayed(after, mark, result, sealed.digest, sealed.sums, sealed.is_finite, sealed.behind)


def _fetched(chosen: Description, image: Image) -> Fetched:
    return Fetched(image, chosen.mark, chosen.epoch, chosen.layout)


def _unexpected(link: TransferLink, answer: object) -> ProtocolError:
    why = f": {answer.why}" if isinstance(answer, Gone) else ""
    return ProtocolError(f"{link.peer} answered with {type(answer).__name__}{why}", peer=link.peer)
