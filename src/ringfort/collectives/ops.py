"""What a reduction does to two elements: `ReduceOp`, and `PremulSum`, which carries its factor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ReduceOp(Enum):
    """How the ranks' elements become one. The values are the wire's codes and never change."""

    SUM = 1
    MEAN = 2
    """The sum divided by the world size; for integers rounded towards zero."""
    PRODUCT = 3
    MIN = 4
    MAX = 5
    BAND = 6
    BOR = 7
    BXOR = 8
    PREMUL_SUM = 9
    """Each rank's elements times that rank's factor, then the sum. Pass `ReduceOp.premul_sum(factor)`."""

    @staticmethod
    def premul_sum(factor: float) -> PremulSum:
        """PREMUL_SUM with this rank's factor; the ranks may differ in it."""
        return PremulSum(factor)


@dataclass(frozen=True)
class PremulSum:
    """`ReduceOp.PREMUL_SUM` with its factor."""

    factor: float


Op = ReduceOp | PremulSum
