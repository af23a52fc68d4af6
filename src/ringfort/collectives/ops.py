"""What a reduction does to two elements: `ReduceOp`, and `PremulSum`, which carries its factor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ReduceOp(Enum):
    """How the ranks' elements become one. The values are the wire's codes and never change."""

    SUM = 1
    """Added up."""
    MEAN = 2
    """The sum divided by the world size; for integers rounded towards zero."""
    PRODUCT = 3
    """Multiplied."""
    MIN = 4
    """The smallest."""
    MAX = 5
    """The largest."""
    BAND = 6
    """Bitwise and, of integers and bools."""
    BOR = 7
    """Bitwise or."""
    BXOR = 8
    """Bitwise exclusive or."""
    PREMUL_SUM = 9
    """Each rank's elements times that rank's factor, then the sum. Pass `ReduceOp.premul_sum(factor)`."""

    @staticmethod
    def premul_sum(factor: float) -> PremulSum:
        """Return PREMUL_SUM with this rank's factor; the ranks may differ in it."""
        return PremulSum(factor)


@dataclass(frozen=True)
class PremulSum:
    """`ReduceOp.PREMUL_SUM` with its factor."""

    factor: float


Op = ReduceOp | PremulSum
