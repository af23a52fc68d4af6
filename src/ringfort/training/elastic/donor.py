"""`Donor`: a member that sends the state of its run, and the results sealed since then, to learners.

Each learner has a thread, which answers its requests in order. Sending has the lowest priority: in small pieces, behind
everything else in the machine's queues, and between two blocks it waits for a moment while the training communicates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.core.peer_messages import Epoch
from ringfort.errors import DistributedError, ProtocolError
from ringfort.training.elastic.keeping_up import MOST_REST, KeepingUp
from ringfort.training.elastic.local_sum import Layout
from ringfort.training.elastic.protocol import Mark, Result
from ringfort.training.elastic.result_history import Kept, ResultHistory
from ringfort.training.elastic.state_tree import BLOCK, Image, hashed
from ringfort.training.elastic.timeline import note
from ringfort.training.elastic.transfer_link import (
    Answer,
    AskBlock,
    AskImage,
    AskResult,
    BlockFollows,
    Description,
    Gone,
    NotYet,
    Part,
    Request,
    Sealed,
    TransferLink,
)
from ringfort.transport.locks import Condition, Thread

_log = logging.getLogger(__name__)

MAX_LEARNERS: Final = 16
"""Learners that are served at the same time, each by a thread."""
HISTORY_BYTES: Final = 1 << 30
"""Of the history of sealed results, if those of `HISTORY_RESULTS` are not more."""
HISTORY_RESULTS: Final = 4
"""Results that the history has in any case: of a large model a few are all that is sealed while its state is copied."""
_IDLE: Final = 600.0
"""Seconds for which a learner may ask nothing: it may be compiling its model, or apply a result slowly."""
KEPT: Final = 256 << 20
"""Bytes of recent results that a member keeps for those who were away for a moment; and no more than the state has,
because a process that missed more gets an image of the state sooner."""
_FEW, HISTORY_MOST = 64, 1 << 13
"""Results that are kept at most, without a learner and with one: small ones cost memory and time too. With
one, they last for 8 s of steps of 1 ms. Steps are that short only if the state is small: then a learner that has missed
more of them gets a new image sooner."""
_EXPECTED: Final = 5.0
"""Seconds for which an image is kept for a learner that has asked another member, and comes here next."""
_GIVE_WAY: Final = 0.05
"""Seconds that a block waits for the training at most, and no longer than the sending took so far: a learner must
arrive even if the training never pauses."""
_LOOK_EVERY: Final = 0.001
"""Seconds between two looks at whether the training still communicates."""
_LOOK: Final = 0.05
"""Seconds between two looks at whether members should go on although a learner is behind."""
_REMEMBERED: Final = 64
"""Learners for which it is known how long members have rested: for those that connect again."""
_JOIN: Final = 5.0
"""Seconds that a thread may take to end once its connection has."""


@dataclass(eq=False)
class _Offer:
    """An image that learners may fetch."""

    mark: Mark
    epoch: Epoch
    image: Image
    layout: Layout | None
    """That of the gradients at the mark, if it was known then: a program that trains other parameters from a later
    step on has another."""
    made: float
    hashing: Thread | None = None
    """Runs once a learner needs the hashes, which takes a second or two per gigabyte."""
    is_hashed: bool = False


@dataclass(eq=False)
class _Pace:
    """How long the sending to one learner took, and how long it has waited for the training."""

    sent: float = 0.0
    waited: float = 0.0


def _message(kept: Kept, behind: int) -> Sealed:
    parts = tuple([Part(name, array.dtype.name, array.size) for name, array in kept.arrays.items()])
    result = kept.result
    return Sealed(
        kept.before,
        result.branch,
        result.step,
        result.cursor,
        kept.digest,
        kept.sums,
        kept.is_finite,
        behind,
        parts,
    )


class Donor:
    """Serves learners. All methods are thread-safe and return at once.

    The run calls `serve` with each stream of a learner, `offer` with an image while `wants_image`, `sealed` after every
    step and `begin` with a state that came in another way. Its memory is used again when this has let
    go of it: see `SpareMemory`.
    """

    def __init__(
        self,
        describe: Callable[[], Layout | None],
        *,
        kept_bytes: int = KEPT,
        history_bytes: int = HISTORY_BYTES,
        busy: Callable[[], bool] = lambda: False,
        timeout: float = 30.0,
    ) -> None:
        """`describe` returns the layout of the gradients, as far as it is known. The history of sealed results has at
        most `kept_bytes`, and while there are learners `history_bytes` or four results. `busy` returns whether the
        training communicates now. A learner to which nothing can be sent for `timeout` seconds is lost."""
        self._describe = describe
        self._kept_bytes = kept_bytes
        self._history_bytes = history_bytes
        self._busy = busy
        self._timeout = timeout
        self._changed = Condition()
        self._learners: dict[TransferLink, Thread] = {}
        self._paces: dict[TransferLink, _Pace] = {}
        self._places: dict[TransferLink, float] = {}
        """The step whose results each learner needs next; infinite while it waits for an image. One that has asked for
        nothing yet may need any."""
        self._history = ResultHistory()
        self._offer: _Offer | None = None
        self._mark: Mark | None = None
        """The last mark that the run has told."""
        self._waiting: set[TransferLink] = set()
        """Learners that have asked for an image and have none yet."""
        self._keeping_up: dict[TransferLink, KeepingUp] = {}
        """How learners that have an image, or fetch it, follow the run."""
        self._rested: dict[str, float] = {}
        """The seconds for which members have rested for each learner, over all its connections."""
        self._fetching: set[TransferLink] = set()
        """Learners that fetch the image of the offer."""
        self._caught_up: set[TransferLink] = set()
        """Learners that have all results there are, or get the last one now."""
        self._is_closed = False

    # --- learners -----------------------------------------------------------------------------------------------------

    @property
    def learners(self) -> tuple[str, ...]:
        """The learners that are connected."""
        with self._changed:
            return tuple([link.peer for link in self._learners])

    @property
    def has_learners(self) -> bool:
        """Whether a learner is connected."""
        return bool(self._learners)

    @property
    def has_followers(self) -> bool:
        """Whether a learner is connected that has the state, and asks for results, here or elsewhere."""
        with self._changed:
            return any(link not in self._waiting and link not in self._fetching for link in self._learners)

    @property
    def wants_image(self) -> bool:
        """Whether a learner waits for an image."""
        with self._changed:
            return bool(self._waiting) and self._usable_offer() is None

    @property
    def has_caught_up(self) -> bool:
        """Whether a learner has all results there are, or gets the last one now, and could be seated at the end of the
        next step."""
        with self._changed:
            return bool(self._caught_up)

    def rest(self, most: float, is_over: Callable[[], bool] = lambda: False) -> float:
        """Wait for learners that cannot keep up with the run, for `most` seconds at most and until `is_over`. Return
        how many it took: 0 if there are none."""
        begin = time.monotonic()
        with self._changed:
            slow = self._slow()
            if not slow:
                return 0.0
            while not (self._caught_up or self._is_closed or is_over()) and any(map(self._is_behind, slow)):
                left = begin + most - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, _LOOK))
            seconds = time.monotonic() - begin
            for link in slow:
                self._rested[link.peer] = self._rested.pop(link.peer, 0.0) + seconds
            while len(self._rested) > _REMEMBERED:
                self._rested.pop(next(iter(self._rested)))
        return seconds

    def _is_behind(self, link: TransferLink) -> bool:
        """Return whether a learner is still there and lacks something. (One that practises asks for no seat.)"""
        has_all = self._mark is not None and self._places.get(link, -inf) >= self._mark.step
        return link in self._learners and (link in self._fetching or not has_all)

    def _slow(self) -> list[TransferLink]:
        """Return the learners that the run should wait for."""
        found = list[TransferLink]()
        for link, follows in self._keeping_up.items():
            image = 0 if self._offer is None or link not in self._fetching else self._offer.image.data.nbytes
            results = 0 if self._offer is None else self._history.nbytes_after(self._offer.mark)
            if self._rested.get(link.peer, 0.0) < MOST_REST and follows.needs_rest(results, image):
                found.append(link)
        return found

    def doubt(self) -> None:
        """Let no learner count as caught up before it has asked again: it may be frozen."""
        with self._changed:
            self._caught_up.clear()

    def serve(self, learner: str, connection: Connection) -> None:
        """Serve a learner until it closes the connection, in a thread. The connection is closed if there are too many
        learners already."""
        try:
            link = TransferLink(connection, learner, self._timeout)
        except DistributedError as exc:
            _log.info("A learner has gone: %s", exc)
            return
        thread = Thread(self._run, (link,), name="ringfort-donor")
        with self._changed:
            has_room = len(self._learners) < MAX_LEARNERS and not self._is_closed
            if has_room:
                self._learners[link], self._paces[link] = thread, _Pace()
        if has_room:
            thread.start()
        else:
            _log.warning("Refused the learner %s: %d are served already", learner, len(self._learners))
            link.close()

    def dismiss(self) -> None:
        """End the connections of all learners: this process leaves the run, so they ask the others."""
        with self._changed:
            learners = tuple(self._learners)
        for link in learners:
            link.end()

    def close(self) -> None:
        """End all connections. Idempotent."""
        with self._changed:
            self._is_closed = True
            learners = dict(self._learners)
            hashing = None if self._offer is None else self._offer.hashing
            self._changed.notify_all()
        self.dismiss()
        for thread in (*learners.values(), hashing):
            if thread is not None:
                thread.join(_JOIN)

    # --- the run ------------------------------------------------------------------------------------------------------

    def begin(self, mark: Mark) -> None:
        """The state is that of `mark`, to which nothing leads that was kept."""
        with self._changed:
            self._history.clear()
            self._offer, self._mark = None, mark
            self._changed.notify_all()

    def offer(self, image: Image, mark: Mark, epoch: Epoch) -> None:
        """Offer an image of the state at `mark` to all learners that ask from now on. The image is kept, not copied."""
        with self._changed:
            self._offer, self._mark = _Offer(mark, epoch, image, self._describe(), time.monotonic()), mark
            self._changed.notify_all()

    def sealed(
        self,
        before: Mark,
        result: Result,
        digest: int,
        *,
        after: Mark | None = None,
        sums: Sequence[float] = (),
        is_finite: bool = True,
    ) -> None:
        """Keep a result that was sealed at the mark `before`, with the sums of all tokens. The arrays are not
        copied. `after` is the mark of a member that has applied it, if that is known."""
        kept = Kept(before, result, digest, after or before.after(result, digest), tuple(sums), is_finite)
        if result.is_state:  # it replaces the whole state, so nothing leads to it from before
            self.begin(kept.after)
            return
        with self._changed:
            self._mark = kept.after
            self._history.add(kept)
            if self._offer is not None and not self._learners and time.monotonic() > self._offer.made + _EXPECTED:
                self._offer = None
            self._trim()
            self._changed.notify_all()

    def _trim(self) -> None:
        if self._learners or self._offer is not None:
            self._history.trim(self._history_bytes, HISTORY_MOST, least=HISTORY_RESULTS)
        # What no learner needs is not kept for longer than without one: steps reduce into that memory, and new memory
        # costs them more time than the reduction.
        self._history.trim(self._kept_bytes, _FEW, until=self._needed())

    def _needed(self) -> float:
        """Return the first step whose results a learner may ask for."""
        image = inf if self._offer is None else self._offer.mark.step
        return min([image, *(self._places.get(link, -inf) for link in self._learners)])

    def _hash(self, offer: _Offer) -> None:
        try:
            image = offer.image if offer.image.manifest.hashes else hashed(offer.image)
        except Exception as exc:
            _log.warning("The state cannot be hashed for a learner, which asks again: %s: %s", type(exc).__name__, exc)
            with self._changed:
                offer.hashing = None
            return
        with self._changed:
            offer.image, offer.is_hashed = image, True
            self._changed.notify_all()
        note("image of step %d hashed", offer.mark.step)

    def _usable_offer(self) -> _Offer | None:
        """Return the image, if all results since then are in the history."""
        offer = self._offer
        if offer is None or offer.mark == self._mark or self._history.following(offer.mark) is not None:
            return offer
        return None

    # --- one learner's thread -----------------------------------------------------------------------------------------

    def _run(self, link: TransferLink) -> None:
        image: Image | None = None
        try:
            while not self._is_closed:
                image = self._answer(link, link.next_request(_IDLE), image)
        except DistributedError as exc:
            _log.info("The learner %s has gone: %s", link.peer, exc)
        except Exception:
            _log.exception("Serving the learner %s failed", link.peer)
        finally:
            link.close()
            with self._changed:
                del self._learners[link], self._paces[link]
                self._places.pop(link, None)
                self._waiting.discard(link)
                self._fetching.discard(link)
                self._keeping_up.pop(link, None)
                self._caught_up.discard(link)
                if not self._learners:
                    self._offer = None
                    self._trim()
                self._changed.notify_all()

    def _answer(self, link: TransferLink, request: Request, image: Image | None) -> Image | None:
        """Answer one request. Return the image that the learner fetches."""
        match request:
            case AskImage(wait=wait, known=known):
                offer = self._wait_for_offer(link, wait, known)
                if offer is None:
                    link.answer(NotYet())
                else:
                    image = offer.image
                    layout = offer.layout or self._describe()
                    link.describe(Description(offer.mark, offer.epoch, layout, image.manifest))
            case AskBlock(index=index):
                if image is None or index * BLOCK >= image.data.nbytes:
                    raise ProtocolError(f"{link.peer} asked for block {index}, which does not exist", peer=link.peer)
                block = image.block(index)
                self._send(link, BlockFollows(index, len(block)), [block])
            case AskResult():
                self._send_result(link, request)
        return image

    def _wait_for_offer(self, link: TransferLink, wait: float, known: Mark | None) -> _Offer | None:
        deadline, has_tried = time.monotonic() + wait, False
        with self._changed:
            last = self._offer
            if (
                last is not None
                and not self._waiting
                and self._history.nbytes_after(last.mark) > last.image.data.nbytes
            ):
                self._offer = None  # a new one is there sooner than all results since the last
            self._waiting.add(link)
            self._places[link] = inf
            while (offer := self._usable_offer()) is None or not (offer.is_hashed or offer.mark == known):
                if offer is not None and offer.hashing is None and not has_tried:
                    has_tried = True
                    hashing = Thread(self._hash, (offer,), name="ringfort-donor-hash")
                    hashing.start()  # a system without room for threads may have some when the learner asks again
                    offer.hashing = hashing
                left = deadline - time.monotonic()
                if left <= 0 or self._is_closed:
                    return None  # it asks again
                self._changed.wait(left)
            self._waiting.discard(link)
            self._places[link] = offer.mark.step
            self._keeping_up.setdefault(link, KeepingUp())
            self._fetching.add(link)
            return offer

    def _send_result(self, link: TransferLink, request: AskResult) -> None:
        after, deadline = request.after, time.monotonic() + request.wait
        with self._changed:
            self._waiting.discard(link)
            self._fetching.discard(link)
            self._places[link] = after.step
            if not request.wants_seat:
                self._caught_up.discard(link)
            while True:
                found, mark = self._history.following(after), self._mark
                is_ahead = mark is None or (after.branch == mark.branch and after.step >= mark.step)
                if found is None and is_ahead and request.wants_seat:
                    self._caught_up.add(link)
                left = deadline - time.monotonic()
                if found is not None or not is_ahead or left <= 0 or self._is_closed:
                    break
                self._changed.wait(left)
            self._changed.notify_all()
            if found is not None:
                if link in self._keeping_up:
                    self._keeping_up[link].fetched(found[1])
                if found[1] > 1:
                    self._caught_up.discard(link)
                elif not found[1] and request.wants_seat:
                    # It has this one long before the members pause for it, which they do a whole step later.
                    self._caught_up.add(link)
        if found is not None:
            kept, behind = found
            arrays = [memoryview(array.view(np.uint8)) for array in kept.arrays.values()]
            self._send(link, _message(kept, behind), arrays)
        elif is_ahead:
            link.answer(NotYet())
        else:
            link.answer(Gone(f"the result after step {after.step} is not in its history"))

    def _send(self, link: TransferLink, message: Answer, bodies: Sequence[memoryview]) -> None:
        """Send something large, after waiting for a moment while the training communicates."""
        pace, begin = self._paces[link], time.monotonic()
        now, until = begin, begin + min(_GIVE_WAY, pace.sent - pace.waited)
        while self._busy() and now < until:
            time.sleep(_LOOK_EVERY)
            now = time.monotonic()
        pace.waited += now - begin
        link.answer(message, bodies)
        pace.sent += time.monotonic() - now
