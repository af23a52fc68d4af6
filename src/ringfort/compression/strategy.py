"""`CompressionStrategy`: which codec to use, with which parameter. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from math import ceil
from numbers import Integral, Real
from typing import Any, ClassVar

from ringfort.errors import InvalidArgumentError

MAX_RANK = 1024
"""The largest rank of PowerSGD. From a few dozen on, an all-reduce without compression is faster."""


DECAY = 0.95
"""SparseLoCo's: what was not sent for 20 steps has come down to a third, because the model has moved on."""


class QuantizationType(Enum):
    """How each value is encoded. The enum's values are the codes on the wire and never change."""

    FP32 = 0
    """32-bit float: unchanged."""
    FP16 = 1
    """16-bit float, rounded to nearest; magnitudes above 65504 become 65504."""
    BF16 = 2
    """bfloat16, rounded to nearest: the range of float32 with three digits."""
    INT8 = 3
    """Multiples of 1/127 of the largest magnitude in a block of 512. Stochastic rounding: correct on average."""
    INT4 = 4
    """Multiples of 1/7 of the largest magnitude in a block of 128. Stochastic rounding: correct on average."""
    ONE_BIT = 5
    """The sign, times the mean magnitude of a block of 512."""

    @property
    def is_unbiased(self) -> bool:
        """Whether decoded values are correct on average."""
        return self in (QuantizationType.FP32, QuantizationType.INT8, QuantizationType.INT4)


class Method(Enum):
    """Which part of an array is sent. The values are the codes on the wire and never change."""

    NONE = 0
    QUANTIZE = 1
    TOP_K = 2
    RANDOM_K = 3
    POWER_SGD = 4
    AUTO = 5
    SPARSE = 6


@dataclass(frozen=True)
class CompressionStrategy:
    """Which part of an array is sent (`method`), and how each value is encoded (`values`).

    Create one by name, or with `quantize`, `top_k`, `random_k`, `power_sgd` or `auto`. The name alone is accepted
    wherever a strategy is.

    Raises `InvalidArgumentError` for an invalid parameter.

    Examples:
        >>> CompressionStrategy.parse("topk(0.01)+int4") == CompressionStrategy.top_k(0.01, QuantizationType.INT4)
        True
    """

    method: Method
    """Which part of an array is sent."""
    values: QuantizationType = QuantizationType.FP32
    """How each value of it is encoded."""
    ratio: float = 1.0
    """TOP_K and RANDOM_K: the fraction of the elements that is sent. At least one element is."""
    rank: int = 0
    """POWER_SGD: the rank of the approximation."""
    max_error: float = 0.25
    """AUTO: the largest error per step, relative to the norm of the array. The default admits INT4 and what is more
    precise; 1 admits everything."""

    NONE: ClassVar[CompressionStrategy]
    """Everything, unchanged."""
    FP16: ClassVar[CompressionStrategy]
    """Every element, in 16 bits (float16)."""
    BF16: ClassVar[CompressionStrategy]
    """Every element, in 16 bits (bfloat16)."""
    INT8: ClassVar[CompressionStrategy]
    """Every element, in 8 bits."""
    INT4: ClassVar[CompressionStrategy]
    """Every element, in 4 bits."""
    ONE_BIT: ClassVar[CompressionStrategy]
    """Every element, as its sign."""
    AUTO: ClassVar[CompressionStrategy]
    """The fastest for the measured links; the same as `auto()`."""
    SPARSE: ClassVar[CompressionStrategy]
    """Of each chunk of 4096 elements the 64 largest, in 2 bits each (SparseLoCo, arXiv:2508.15706): 141 times fewer
    bytes. What is not sent decays. For the differences of `LocalSteps`."""

    def __post_init__(self) -> None:
        for name, share in (("ratio", self.ratio), ("max_error", self.max_error)):
            if isinstance(share, bool) or not isinstance(share, Real) or not 0 < float(share) <= 1:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidArgumentError(name, share, "must be above 0 and at most 1")
        rank: object = self.rank
        least = 1 if self.method is Method.POWER_SGD else 0
        if isinstance(rank, bool) or not isinstance(rank, Integral) or not least <= rank <= MAX_RANK:
            raise InvalidArgumentError("rank", rank, f"must be a whole number from {least} to {MAX_RANK}")
        if self.method is Method.POWER_SGD and self.values is not QuantizationType.FP32:
            raise InvalidArgumentError("values", self.values.name, "PowerSGD sends its factors as float32")
        if self.method is Method.SPARSE and self.values is not QuantizationType.FP32:
            raise InvalidArgumentError("values", self.values.name, "SPARSE has values of its own")

    @classmethod
    def quantize(cls, values: QuantizationType) -> CompressionStrategy:
        """Send every element, in fewer bits."""
        return cls.NONE if values is QuantizationType.FP32 else cls(Method.QUANTIZE, values)

    @classmethod
    def top_k(cls, ratio: float = 0.01, values: QuantizationType = QuantizationType.FP32) -> CompressionStrategy:
        """Send the fraction `ratio` of the elements that has the largest magnitudes."""
        return cls(Method.TOP_K, values, ratio)

    @classmethod
    def random_k(cls, p: float = 0.1, values: QuantizationType = QuantizationType.FP32) -> CompressionStrategy:
        """Send a random fraction `p` of the elements: the same on every rank, new in each step."""
        return cls(Method.RANDOM_K, values, p)

    @classmethod
    def power_sgd(cls, rank: int = 4) -> CompressionStrategy:
        """Send each matrix as the product of two thin ones (Vogels et al. 2019), and vectors unchanged."""
        return cls(Method.POWER_SGD, rank=rank)

    @classmethod
    def auto(cls, max_error: float = 0.25) -> CompressionStrategy:
        """Measure the links and choose the fastest strategy whose relative error is at most `max_error`, or none.

        With 0.25 it chooses among none, fp16, bf16, int8 and int4; with 0.05 not int4, which is better with Adam; with
        1 also onebit, topk(0.01)+int4 and powersgd(4).
        """
        return cls(Method.AUTO, max_error=max_error)

    @classmethod
    def parse(cls, text: object) -> CompressionStrategy:
        """Parse a name: `none`, `fp16`, `bf16`, `int8`, `int4`, `onebit`, `topk(0.01)`, `topk(0.01)+int4`,
        `randomk(0.1)`, `powersgd(4)`, `sparse`, `auto`, `auto(0.05)`. A strategy is returned unchanged.

        Raises `InvalidArgumentError` for any other text.
        """
        if isinstance(text, CompressionStrategy):
            return text
        found = _NAME.fullmatch(_HYPHEN.sub("", text.strip().lower())) if isinstance(text, str) else None
        try:
            if found is None:
                raise ValueError("Not a name")
            name, number, values = found.groups()
            if name in _QUANTIZED and number is None and values is None:
                return cls.quantize(_QUANTIZED[name])
            arguments: dict[str, Any] = {} if values is None else {"values": _VALUES[values]}
            if (name, number, values) == ("sparse", None, None):
                return cls.SPARSE
            parameters: list[Any] = [] if number is None else [_number(number)]
            make: dict[str, Any] = {
                "topk": cls.top_k,
                "randomk": cls.random_k,
                "random": cls.random_k,
                "powersgd": cls.power_sgd,
                "auto": cls.auto,
            }
            return make[name](*parameters, **arguments)
        except InvalidArgumentError:
            raise
        except (KeyError, ValueError, TypeError) as exc:
            raise InvalidArgumentError("compression", text, f"unknown strategy; use one of: {_KNOWN}") from exc

    @property
    def is_unbiased(self) -> bool:
        """Whether decoded arrays are correct on average without error feedback."""
        return self.method in (Method.NONE, Method.QUANTIZE, Method.RANDOM_K) and self.values.is_unbiased

    @property
    def decay(self) -> float:
        """What is left of the error feedback when the next step adds it: 1, but for SPARSE 0.95."""
        return DECAY if self.method is Method.SPARSE else 1.0

    def kept(self, count: int) -> int:
        """Return how many of `count` elements are sent."""
        if self.method not in (Method.TOP_K, Method.RANDOM_K):
            return count
        return min(count, max(1, ceil(self.ratio * count - 1e-9 * count)))

    def __str__(self) -> str:
        if self.method is Method.QUANTIZE:
            return _NAMES[self.values]
        if self.method is Method.AUTO:
            return "auto" if self == CompressionStrategy.AUTO else f"auto({self.max_error:g})"
        if self.method is Method.POWER_SGD:
            return f"powersgd({self.rank})"
        if self.method in (Method.NONE, Method.SPARSE):
            return self.method.name.lower()
        name = "topk" if self.method is Method.TOP_K else "randomk"
        return f"{name}({self.ratio:g})" + ("" if self.values is QuantizationType.FP32 else f"+{_NAMES[self.values]}")


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number  # the rank of PowerSGD must be whole


_NAMES = {kind: kind.name.lower().replace("_", "") for kind in QuantizationType}
_VALUES = {name: kind for kind, name in _NAMES.items()}
_QUANTIZED = {name if name != "fp32" else "none": kind for name, kind in _VALUES.items()}
_HYPHEN = re.compile(r"[-_](?=[a-z])")
_NAME = re.compile(r"([a-z]+\d*)(?:\(([^)]*)\))?(?:\+([a-z]+\d*))?")
_KNOWN = (
    "none, fp16, bf16, int8, int4, onebit, topk(0.01), topk(0.01)+int4, randomk(0.1), powersgd(4), sparse, auto, "
    "auto(0.05)"
)

CompressionStrategy.NONE = CompressionStrategy(Method.NONE)
CompressionStrategy.AUTO = CompressionStrategy(Method.AUTO)
CompressionStrategy.SPARSE = CompressionStrategy(Method.SPARSE)
for _kind in (kind for kind in QuantizationType if kind is not QuantizationType.FP32):
    setattr(CompressionStrategy, _kind.name, CompressionStrategy(Method.QUANTIZE, _kind))
