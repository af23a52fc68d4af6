"""`Exchange`: what the members of an epoch send each other for a step, over the group of the epoch."""

from __future__ import annotations

from time import perf_counter
from typing import Annotated, Any, cast

import msgspec
import numpy as np

from ringfort.context import DistributedContext
from ringfort.errors import ProtocolError
from ringfort.training.elastic.digests import Inspection, Known, digest_sample, digest_share, inspect_share
from ringfort.training.elastic.local_sum import SUMS, GradientSum, Layout, is_finite
from ringfort.training.elastic.protocol import Report, Result, Token
from ringfort.training.elastic.sample_order import Array
from ringfort.training.elastic.state_check import Leaves, Word
from ringfort.training.elastic.state_tree import Image, Manifest, StateTree
from ringfort.training.elastic.token_codec import TokenCodec
from ringfort.training.elastic.transfer import check_manifest, size_limit

_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A result on its way to members that lack it; its arrays follow."""

    branch: str
    step: int
    cursor: int
    arrays: tuple[tuple[str, _Size], ...]
    manifest: Manifest | None = None
    """What the array of a state contains; None for gradients."""


_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
_leaves: msgspec.msgpack.Decoder[Leaves] = msgspec.msgpack.Decoder(Leaves)
_layouts: msgspec.msgpack.Decoder[Layout | None] = msgspec.msgpack.Decoder(Layout | None)
_wires: msgspec.msgpack.Decoder[_Wire] = msgspec.msgpack.Decoder(_Wire)


def inspect(
    result: Result, me: int, size: int, begun: Inspection | None = None, known: Known | None = None
) -> tuple[int, bool]:
    """Return the digest of one member's share of a result, and whether that has no infinity and no NaN. A state may
    have some. `begun` has looked at parts of it already. What is found of each block is added to `known`."""
    if begun is not None:
        found = begun.finish(result.payload)
        if known is not None:
            known |= begun.known
        return found
    if result.is_state:
        return digest_share({"state": cast("Image", result.payload).data}, me, size), True
    return inspect_share(result.payload, me, size, known)


def nonfinite_of(sums: dict[str, Array]) -> str:
    """Return in words what of a result, or of a member's own sums, is infinite or NaN; empty if nothing is."""
    found = [] if is_finite({kind: array for kind, array in sums.items() if kind != SUMS}) else ["gradients"]
    return " and ".join([*found, *([] if is_finite({SUMS: sums[SUMS]}) else ["loss"])])


def sample_of(result: Result, known: Known | None = None) -> int:
    """Return the digest of the blocks of a result that all members compare in its step. Those that are `known` are not
    read again."""
    return digest_sample(result.payload, result.step, known)


class Exchange:
    """The exchanges of this member. Every call is a collective: all members of the epoch make the same ones."""

    def __init__(self, local: GradientSum, codec: TokenCodec) -> None:
        self._local = local
        self._codec = codec
        self._agreed: Layout | None = None
        """The layout that all members of the epoch have."""
        self._reduced: tuple[Any, Inspection | None] = (None, None)
        self.last: tuple[float, int] = (0.0, 0)
        """The seconds and bytes of the collective of the last tokens."""

    def begin(self) -> None:
        """The group of an epoch was formed."""
        self._agreed = None

    def expect(self, context: DistributedContext) -> None:
        """The next micro-batch is the last before `reduce`. All members agree on the layout first."""
        if self._agreed is not None and self._agreed is self._local.layout:
            self._local.expect(context)

    def reports(self, context: DistributedContext, mine: Report) -> list[Report]:
        """Exchange what members tell when an epoch begins."""
        found = context.all_gather_object(msgspec.msgpack.encode(mine))
        return [_decoded(_reports, data, rank) for rank, data in enumerate(found)]

    def tokens(self, context: DistributedContext, mine: Token) -> list[Token]:
        """Exchange tokens: as the sum of tables in which each member fills its own row. A small all-reduce is the
        quickest collective that there is, and takes fewer hops than a gather."""
        packed, me = self._codec.pack(mine), context.rank
        table = np.zeros((context.world_size, packed.size // 8), np.uint64)
        table[me] = packed.view(np.uint64)
        start = perf_counter()
        context.all_reduce(table)
        self.last = perf_counter() - start, table.nbytes
        return [self._codec.unpack(row) for row in table]

    def flags(self, context: DistributedContext, mine: bool) -> list[bool]:
        """Exchange one bit."""
        return [bool(row[0]) for row in context.all_gather(np.array([mine], np.uint8))]

    def words(self, context: DistributedContext, mine: Word) -> list[Word]:
        """Exchange what members say of their states."""
        return [Word.unpacked(row) for row in context.all_gather(mine.packed())]

    def leaves(self, context: DistributedContext, mine: Leaves) -> list[Leaves]:
        """Exchange the digests of all leaves of the members' states."""
        found = context.all_gather_object(msgspec.msgpack.encode(mine))
        return [_decoded(_leaves, data, rank) for rank, data in enumerate(found)]

    def agree(self, context: DistributedContext) -> None:
        """Exchange the layout of the gradients, once per epoch and again when it has changed, which happens at all
        members in the same step: a member that was dealt nothing takes part too. Raise `GradientLayoutError` if that of
        another member differs."""
        if self._agreed is None or self._agreed is not self._local.layout:
            found = context.all_gather_object(msgspec.msgpack.encode(self._local.layout))
            for rank, data in enumerate(found):
                layout = _decoded(_layouts, data, rank)
                if layout is not None:
                    self._local.prepare(layout)
            self._agreed = self._local.layout

    def reduce(self, context: DistributedContext) -> dict[str, Array]:
        """Add up the local sums of all members, out of place: if that fails, another epoch reduces them again."""
        total = self._local.reduce(context)
        if SUMS not in total:
            total[SUMS] = context.all_reduce(self._sums())
        self._reduced = total, self._local.inspection()
        return total

    def inspection_of(self, result: Result) -> Inspection | None:
        """Return what was looked at of a result while it was reduced; None for nothing."""
        payload, inspection = self._reduced
        self._reduced = None, None
        return inspection if payload is result.payload else None

    def _sums(self) -> Array:
        return np.array([self._local.count, self._local.loss])

    @property
    def own_sums(self) -> dict[str, Array]:
        """What this member adds to the result of the step."""
        return {**self._local.own(), SUMS: self._sums()}

    def share(self, context: DistributedContext, root: int, mine: Result | None, state: StateTree) -> Result:
        """Send the result of the member of rank `root`, which passes it as `mine`, to all. `state` is this program's: a
        state that does not fit, and gradients that do not, are refused before memory is taken."""
        wire, arrays = b"", dict[str, Array]()
        if mine is not None:
            wire, arrays = _packed(mine)
        head = _decoded(_wires, context.broadcast_object(wire, root), root)
        if mine is None:
            self._check(head, state, root)
            kinds = {name: "uint8" if head.manifest is not None else name for name, _ in head.arrays}
            kinds[SUMS] = "float64"
            arrays = {name: np.empty(size, kinds[name]) for name, size in head.arrays}
        for name, _ in head.arrays:
            if arrays[name].size:
                context.broadcast(arrays[name], root)
        if mine is not None:
            return mine
        if head.manifest is not None:
            image = Image(head.manifest, arrays["state"])
            return Result(head.branch, head.step, head.cursor, image, is_state=True)
        return Result(head.branch, head.step, head.cursor, arrays)

    def _check(self, head: _Wire, state: StateTree, root: int) -> None:
        if head.manifest is not None:
            why = state.misfit(head.manifest)
            if why:
                raise ProtocolError(f"Rank {root} sent another state: {why}", peer=root)
            check_manifest(head.manifest, size_limit(state.manifest().nbytes), needs_hashes=False)
            expected = {"state": head.manifest.nbytes}
        else:
            expected = {SUMS: 2} if self._local.layout is None else {**self._local.layout.sizes, SUMS: 2}
        if dict(head.arrays) != expected:
            raise ProtocolError(f"Rank {root} sent {dict(head.arrays)} elements instead of {expected}", peer=root)


def _decoded(decoder: msgspec.msgpack.Decoder[Any], data: Any, rank: int) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, TypeError) as exc:
        raise ProtocolError(f"Rank {rank} sent a malformed message: {exc}", peer=rank) from exc


def _packed(result: Result) -> tuple[bytes, dict[str, Array]]:
    image = cast("Image", result.payload) if result.is_state else None
    arrays = cast("dict[str, Array]", result.payload) if image is None else {"state": image.data}
    sizes = tuple((name, array.size) for name, array in arrays.items())
    manifest = None if image is None else image.manifest
    return msgspec.msgpack.encode(_Wire(result.branch, result.step, result.cursor, sizes, manifest)), arrays
