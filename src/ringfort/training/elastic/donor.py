"""`Donor`: a member that sends the state of its run, and the results sealed since then, to learners.

Each learner has a thread, which answers its requests in order. Sending has the lowest priority: in small pieces, behind
everything else in the machine's queues, and between two blocks it waits for a moment while the training communicates.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.core.peer_messages import Epoch
from ringfort.errors import DistributedError, ProtocolError
from ringfort.training.elastic.local_sum import Layout
from ringfort.training.elastic.protocol import Mark, Result
from ringfort.training.elastic.sample_order import Array
from ringfort.training.elastic.state_tree import Image, hashed
from ringfort.training.elastic.transfer_link import (
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
_GIVE_WAY: Final = 0.05
"""Seconds that a block waits for the training at most: a learner must arrive even if the training never pauses."""
_LOOK_EVERY: Final = 0.001
"""Seconds between two looks at whether the training still communicates."""
_JOIN: Final = 5.0
"""Seconds that a thread may take to end once its connection has."""


@dataclass(eq=False)
class _Offer:
    """An image that learners may fetch."""

    mark: Mark
    epoch: Epoch
    image: Image
    is_hashed: bool = False
    """Until then learners wait: hashing takes a second or two per gigabyte."""


@dataclass(frozen=True)
class _Kept:
    """A sealed result in the history."""

    before: Mark
    result: Result
    digest: int
    sums: tuple[float, ...]
    is_finite: bool
    arrays: dict[str, Array]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def message(self, behind: int) -> Sealed:
        parts = tuple([Part(name, array.dtype.name, array.size) for name, array in self.arrays.items()])
        result = self.result
        return Sealed(
            self.before,
            result.branch,
            result.step,
            result.cursor,
            self.digest,
            self.sums,
            self.is_finite,
            behind,
            parts,
        )


class Donor:
    """Serves learners. All methods are thread-safe and return at once.

    The run calls `serve` with each stream of a learner, `offer` with an image while `wants_image`, and `sealed` after
    every step. Without a learner the last two do nothing, and nothing is kept.
    """

    def __init__(
        self,
        describe: Callable[[], Layout | None],
        *,
        history_bytes: int = HISTORY_BYTES,
        busy: Callable[[], bool] = lambda: False,
        timeout: float = 30.0,
    ) -> None:
        """`describe` returns the layout of the gradients, as far as it is known. The history of sealed results has at
        most `history_bytes`, or four results. `busy` returns whether the training communicates now. A learner to which
        nothing can be sent for `timeout` seconds is lost."""
        self._describe = describe
        self._history_bytes = history_bytes
        self._busy = busy
        self._timeout = timeout
        self._changed = Condition()
        self._learners: dict[TransferLink, Thread] = {}
        self._history: deque[_Kept] = deque()
        self._offer: _Offer | None = None
        self._mark: Mark | None = None
        """The last mark that the run has told."""
        self._waiting: set[TransferLink] = set()
        """Learners that have asked for an image and have none yet."""
        self._caught_up: set[TransferLink] = set()
        """Learners that have all results there are."""
        self._hashing: Thread | None = None
        self._is_closed = False

    # --- learners -----------------------------------------------------------------------------------------------------

    @property
    def learners(self) -> tuple[str, ...]:
        """The learners that are connected."""
        with self._changed:
            return tuple([link.peer for link in self._learners])

    @property
    def wants_image(self) -> bool:
        """Whether a learner waits for an image."""
        with self._changed:
            return bool(self._waiting) and self._usable_offer() is None

    @property
    def has_caught_up(self) -> bool:
        """Whether a learner has all results there are, and could be seated at the end of the next step."""
        with self._changed:
            return bool(self._caught_up)

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
                self._learners[link] = thread
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
            self._changed.notify_all()
        self.dismiss()
        for thread in (*learners.values(), self._hashing):
            if thread is not None:
                thread.join(_JOIN)

    # --- the run ------------------------------------------------------------------------------------------------------

    def offer(self, image: Image, mark: Mark, epoch: Epoch) -> None:
        """Offer an image of the state at `mark` to all learners that ask from now on. The image is kept, not copied."""
        with self._changed:
            if self._learners:
                self._offer, self._mark = _Offer(mark, epoch, image), mark
                self._hashing = Thread(self._hash, (self._offer,), name="ringfort-donor-hash")
                self._hashing.start()

    def sealed(
        self,
        before: Mark,
        result: Result,
        digest: int,
        *,
        sums: Sequence[float] = (),
        is_finite: bool = True,
    ) -> None:
        """Keep a result that was sealed at the mark `before`, with the sums of all tokens, while there are learners.
        The arrays are copied, because the run may reduce the next step into the same memory."""
        with self._changed:
            if not self._learners:
                return
            if result.is_state:  # it replaces the whole state, so nothing leads to it from before
                self._forget()
        payload: dict[str, Array] = {} if result.is_state else result.payload
        arrays = {name: np.array(array).reshape(-1) for name, array in payload.items()}
        with self._changed:
            if not self._learners:
                return
            self._mark = before.after(result, digest)
            if not result.is_state:
                self._history.append(_Kept(before, result, digest, tuple(sums), is_finite, arrays))
                total = sum(kept.nbytes for kept in self._history)
                while total > self._history_bytes and len(self._history) > HISTORY_RESULTS:
                    total -= self._history.popleft().nbytes
            self._changed.notify_all()

    def _hash(self, offer: _Offer) -> None:
        image = offer.image if offer.image.manifest.hashes else hashed(offer.image)
        with self._changed:
            offer.image, offer.is_hashed = image, True
            self._changed.notify_all()

    def _forget(self) -> None:
        self._history.clear()
        self._offer = self._mark = None

    def _usable_offer(self) -> _Offer | None:
        """Return the image, if all results since then are in the history."""
        offer = self._offer
        if offer is None or offer.mark == self._mark or self._following(offer.mark) is not None:
            return offer
        return None

    def _following(self, mark: Mark) -> int | None:
        """Return the place in the history of the result that follows `mark`."""
        return next((index for index, kept in enumerate(self._history) if kept.before == mark), None)

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
                del self._learners[link]
                self._waiting.discard(link)
                self._caught_up.discard(link)
                if not self._learners:
                    self._forget()

    def _answer(self, link: TransferLink, request: Request, image: Image | None) -> Image | None:
        """Answer one request. Return the image that the learner fetches."""
        match request:
            case AskImage(wait=wait):
                offer = self._wait_for_offer(link, wait)
                if offer is None:
                    link.answer(NotYet())
                else:
                    image = offer.image
                    link.describe(Description(offer.mark, offer.epoch, self._describe(), image.manifest))
            case AskBlock(index=index):
                if image is None or index >= len(image.manifest.hashes):
                    raise ProtocolError(f"{link.peer} asked for block {index}, which does not exist", peer=link.peer)
                self._give_way()
                block = image.block(index)
                link.answer(BlockFollows(index, len(block)), [block])
            case AskResult():
                self._send_result(link, request)
        return image

    def _wait_for_offer(self, link: TransferLink, wait: float) -> _Offer | None:
        deadline = time.monotonic() + wait
        with self._changed:
            self._waiting.add(link)
            while (offer := self._usable_offer()) is None or not offer.is_hashed:
                left = deadline - time.monotonic()
                if left <= 0 or self._is_closed:
                    return None  # it asks again
                self._changed.wait(left)
            self._waiting.discard(link)
            return offer

    def _send_result(self, link: TransferLink, request: AskResult) -> None:
        after, deadline = request.after, time.monotonic() + request.wait
        with self._changed:
            if not request.wants_seat:
                self._caught_up.discard(link)
            while True:
                found, mark = self._following(after), self._mark
                is_ahead = mark is None or (after.branch == mark.branch and after.step >= mark.step)
                if found is None and is_ahead and request.wants_seat:
                    self._caught_up.add(link)
                left = deadline - time.monotonic()
                if found is not None or not is_ahead or left <= 0 or self._is_closed:
                    break
                self._changed.wait(left)
            kept = None if found is None else self._history[found]
            behind = 0 if found is None else len(self._history) - found - 1
            if behind > 1:
                self._caught_up.discard(link)
        if kept is not None:
            self._give_way()
            link.answer(kept.message(behind), [memoryview(array.view(np.uint8)) for array in kept.arrays.values()])
        elif is_ahead:
            link.answer(NotYet())
        else:
            link.answer(Gone(f"the result after step {after.step} is not in its history"))

    def _give_way(self) -> None:
        """Wait for a moment while the training communicates."""
        deadline = time.monotonic() + _GIVE_WAY
        while self._busy() and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY)
