"""`Fetch`: gets the blocks of an image from several donors at once. Pure.

The caller asks `ask` which blocks to request from a donor, and tells what happens: `take` when a block has come, `lose`
when a donor has gone. Every block is compared with its hash before it counts, so a block may come from any donor, from
an image of an earlier attempt, or twice.

Each donor has a few requests under way and gets another when it has answered one, so faster donors send more. The
number under way follows from what has arrived: a donor that has sent most of the blocks has the most requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

import msgspec
import numpy as np

from ringfort.collectives.reduction import element_type_named
from ringfort.errors import ProtocolError, StateTransferError, UnsupportedArrayError
from ringfort.training.elastic.sample_order import Array
from ringfort.training.elastic.state_tree import BLOCK, HASH, Image, Manifest

FEWEST: Final = 2
"""Blocks that every donor has under way: one travels while the donor reads the request for the next."""
MOST: Final = 16
"""Blocks under way in all, about. 16 MiB fill a path of 1 Gbit/s and 130 ms."""
_SLACK: Final = 64 << 20
"""Bytes by which an image or a result may be larger than a multiple of the state: small states grow by more."""


def size_limit(state: int) -> int:
    """Return how many bytes an image or a result may have, for a program whose state has so many now. One that has just
    started may lack what an optimizer creates later: for weights of 16 bits a copy in 32 and two moments, six times as
    much."""
    return 8 * state + _SLACK


def check_manifest(manifest: Manifest, limit: int, *, needs_hashes: bool = True) -> None:
    """Raise `ProtocolError` if a manifest from the network contradicts itself, or if its image has more than `limit`
    bytes. Until then nothing may be allocated for it. An image that comes whole needs no hashes, or has other ones."""
    if not 0 <= manifest.nbytes <= limit:
        raise ProtocolError(f"Invalid manifest: an image of {manifest.nbytes} bytes; the limit is {limit}")
    has_hashes = len(manifest.hashes) == -(-manifest.nbytes // BLOCK) and all(
        len(one) == HASH for one in manifest.hashes
    )
    if needs_hashes and not has_hashes:
        raise ProtocolError(f"Invalid manifest: {len(manifest.hashes)} hashes for {manifest.nbytes} bytes")
    at = 0
    for entry in manifest.entries:
        if not entry.kind:
            continue
        try:
            itemsize = element_type_named(entry.kind).itemsize
        except UnsupportedArrayError as exc:
            raise ProtocolError(f"Invalid manifest: {entry.path} has an unknown element type") from exc
        is_sound = min(entry.shape, default=0) >= 0 and entry.nbytes == prod(entry.shape) * itemsize
        if not is_sound or not at <= entry.offset <= manifest.nbytes - entry.nbytes:
            raise ProtocolError(f"Invalid manifest: {entry.path} does not have the place and size that it claims")
        at = entry.offset + entry.nbytes


@dataclass
class _Source:
    """One donor."""

    has: Array
    """Whether it has each block."""
    todo: deque[int]
    """Blocks that it may be asked for. Some of them are not needed any more."""
    asked: set[int] = field(default_factory=set[int])
    arrived: int = 0


class Fetch:
    """The blocks of one image: those that have come, and which donor was asked for the others."""

    def __init__(self, manifest: Manifest, known: Iterable[Image] = ()) -> None:
        """Use the blocks of `known` images, whose manifests have hashes, as far as they are the same."""
        count = len(manifest.hashes)
        self.manifest = manifest
        self.missing = count
        """Blocks that have not come yet."""
        self.lost: dict[str, str] = {}
        """Donors that were lost, and why."""
        self._data = np.empty(manifest.nbytes, np.uint8)
        self._have = np.zeros(count, np.bool_)
        self._holders = np.zeros(count, np.int32)
        """How many donors have each block."""
        self._askers: dict[int, int] = {}
        """How many donors were asked for a block that has not come."""
        self._sources: dict[str, _Source] = {}
        self._is_stuck = True
        self._reuse(known)

    @property
    def is_complete(self) -> bool:
        """Whether all blocks are here."""
        return self.missing == 0

    @property
    def is_stuck(self) -> bool:
        """Whether no donor has some block that is missing."""
        return self._is_stuck and not self.is_complete

    @property
    def image(self) -> Image:
        """The image. Raise `StateTransferError` if it is not complete."""
        if not self.is_complete:
            what = f"no member is left that has the {self.missing} missing blocks of the state"
            raise StateTransferError(what, self.lost)
        return Image(self.manifest, self._data)

    @property
    def partial(self) -> Image:
        """The image so far, for another `Fetch`: blocks that have not come have an empty hash."""
        pairs = zip(self._have.tolist(), self.manifest.hashes, strict=True)
        hashes = tuple([found if have else b"" for have, found in pairs])
        return Image(msgspec.structs.replace(self.manifest, hashes=hashes), self._data)

    def block_bytes(self, index: int) -> int:
        """Return the size of a block; 0 if there is no such block."""
        return max(0, min(BLOCK, self.manifest.nbytes - index * BLOCK)) if index >= 0 else 0

    # --- donors -------------------------------------------------------------------------------------------------------

    def add(self, donor: str, hashes: Sequence[bytes]) -> None:
        """Add a donor whose image has these hashes. It is asked only for blocks that are the same in this image."""
        same = [mine == theirs for mine, theirs in zip(self.manifest.hashes, hashes, strict=False)]
        has = np.zeros(len(self._have), np.bool_)
        has[: len(same)] = same
        self._holders += has
        self._sources[donor] = _Source(has, deque(np.flatnonzero(has & ~self._have).tolist()))
        self._look()

    def lose(self, donor: str, why: str) -> None:
        """Forget a donor. The blocks that it was asked for are asked of others."""
        source = self._sources.pop(donor, None)
        if source is None:
            return
        self.lost[donor] = why
        self._holders -= source.has
        for index in source.asked:
            self._answered(index)
            if not self._have[index]:
                for other in self._sources.values():
                    if other.has[index]:
                        other.todo.appendleft(index)
        self._look()

    def _look(self) -> None:
        self._is_stuck = bool((~self._have & (self._holders == 0)).any())

    # --- blocks -------------------------------------------------------------------------------------------------------

    def ask(self, donor: str) -> list[int]:
        """Return the blocks to request from `donor` now, and count them as requested."""
        source = self._sources.get(donor)
        if source is None or self.is_complete or self.is_stuck:
            return []
        found, room = list[int](), self._window(source) - len(source.asked)
        while len(found) < room and source.todo:
            index = source.todo.popleft()
            if not self._have[index] and index not in self._askers:
                found.append(index)
                self._askers[index] = 1
        if not found and not source.asked:
            found = self._again(source)
        source.asked.update(found)
        return found

    def take(self, donor: str, index: int, block: memoryview | bytes, digest: bytes) -> bool:
        """Take a block that `donor` sent; `digest` is its hash, which the caller computes (`block_hash`). Return False
        if it is not what was asked for. The donor is lost then."""
        source = self._sources.get(donor)
        if source is None:
            return False
        if index not in source.asked:
            self.lose(donor, f"it sent block {index}, for which it was not asked")
            return False
        if len(block) != self.block_bytes(index) or digest != self.manifest.hashes[index]:
            self.lose(donor, f"block {index} of the state that it sent is damaged")
            return False
        source.asked.discard(index)
        source.arrived += 1
        self._answered(index)
        if not self._have[index]:
            self._put(index, block)
        return True

    def _window(self, source: _Source) -> int:
        total = sum(other.arrived for other in self._sources.values())
        return max(FEWEST, round(MOST * source.arrived / total)) if total else FEWEST

    def _again(self, source: _Source) -> list[int]:
        """Return a block that another donor was asked for and has not sent yet: near the end, nobody waits for the
        slowest. One at a time, and each block twice at most."""
        for index, count in self._askers.items():
            if count == 1 and source.has[index] and not self._have[index]:
                self._askers[index] = 2
                return [index]
        return []

    def _answered(self, index: int) -> None:
        left = self._askers.pop(index) - 1
        if left:
            self._askers[index] = left

    def _put(self, index: int, block: memoryview | bytes) -> None:
        begin = index * BLOCK
        # With NumPy, which lets other threads go on meanwhile: a block into new memory takes up to 2 ms.
        self._data[begin : begin + len(block)] = np.frombuffer(block, np.uint8)
        self._have[index] = True
        self.missing -= 1

    def _reuse(self, known: Iterable[Image]) -> None:
        wanted = dict[bytes, list[int]]()
        for index, found in enumerate(self.manifest.hashes):
            wanted.setdefault(found, []).append(index)
        for image in known:
            for index, found in enumerate(image.manifest.hashes):
                for place in wanted.pop(found, ()):
                    self._put(place, image.block(index))
