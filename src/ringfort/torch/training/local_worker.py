"""`LocalWorker`: what a local rank that is not in the run itself knows of it, from the orders of local rank 0."""

from __future__ import annotations

from dataclasses import dataclass

from ringfort.torch.training.local_orders import ComputePart
from ringfort.training.elastic.dealing import Data
from ringfort.training.elastic.local_sum import GradientSum
from ringfort.training.elastic.protocol import Compute, Deal, Mark, Result
from ringfort.training.elastic.step import Turn


@dataclass
class _Meter:
    samples: int = 0
    """The samples of the current micro-batch."""


@dataclass
class _Replica:
    mark: Mark
    deals: tuple[Deal, ...] = ()
    covered: frozenset[int] = frozenset()


class LocalWorker:
    """Stands where a `Participant` stands at local rank 0, for the loop and the loaders."""

    def __init__(self, data: Data, local: GradientSum) -> None:
        self.data = data
        self.meter = _Meter()
        self.replica = _Replica(Mark())
        self._local = local

    def take(self, order: ComputePart) -> Turn:
        """Return what this rank has to compute its share of."""
        self.replica = _Replica(order.mark, tuple(order.deals), order.covered)
        return Turn(Compute(order.step, order.part, order.span), order.mark)

    def samples_of(self, turn: Turn) -> None:
        """Begin a micro-batch."""
        self.meter.samples = self.data.size(turn.compute.span, turn.compute.part)

    def unit_of(self, turn: Turn) -> int:
        """Return the number of samples whose weight is 1."""
        return turn.compute.span.unit

    def begin(self) -> None:
        """The program adds to the local sum next."""
        if not self.replica.covered:
            self._local.begin()

    def added(self, turn: Turn) -> None:
        """Local rank 0 keeps the books."""

    def lend(self, result: Result, what: str) -> None:
        """Local rank 0 checks that nobody changes a result."""
