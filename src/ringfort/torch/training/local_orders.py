"""What local rank 0, which is in the run for its machine, tells the other local ranks to do."""

from __future__ import annotations

import msgspec

from ringfort.training.elastic.dealing import Span
from ringfort.training.elastic.protocol import Deal, Mark
from ringfort.training.elastic.state_tree import Manifest
from ringfort.transport.segment import Offer


class _Order(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class Memory(_Order, frozen=True):
    """Open this shared memory for the sums of gradients. Part of what a rank does anyway: it is not answered."""

    offer: Offer
    size: int


class ComputePart(_Order, frozen=True):
    """Compute your share of a micro-batch."""

    step: int
    part: int
    span: Span
    mark: Mark
    deals: list[Deal]
    """What the machine computes next, for workers that load ahead."""
    covered: frozenset[int]
    """The micro-batches of the step that the machine has in its sums. If there are none, the sums begin anew."""
    members: tuple[str, ...]
    is_first: bool


class ApplyStep(_Order, frozen=True):
    """Apply a sealed step, whose result is in the memory of the sums."""

    step: int
    cursor: int
    weight: float
    loss: float
    is_finite: bool
    is_overtaken: bool
    members: tuple[str, ...]
    is_first: bool


class Clear(_Order, frozen=True):
    """Your sums are zero."""


class Collect(_Order, frozen=True):
    """Write your sums into the shared memory."""


class GatherState(_Order, frozen=True):
    """Write your shards into an image of the state."""

    offer: Offer
    size: int
    digest: bytes
    """Of the image's manifest: all local ranks must have the same leaves."""


class LoadState(_Order, frozen=True):
    """Take your shards from an image."""

    manifest: Manifest
    offer: Offer
    size: int


class End(_Order, frozen=True):
    """The loop is over: the run has finished, or the machine leaves it."""

    signal: int = 0
    """The signal by which a local rank was asked to end: all do, because none of them can go on alone."""


class Failed(_Order, frozen=True):
    """Local rank 0 has left the loop."""

    why: str


Order = Memory | ComputePart | ApplyStep | Clear | Collect | GatherState | LoadState | End | Failed
