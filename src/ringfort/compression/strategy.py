"""`CompressionStrategy`: which of the codecs to use, and how hard. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from math import ceil
from numbers import Integral, Real
from typing import ClassVar

from ringfort.errors import InvalidArgumentError

MAX_RANK = 1024
"""Of PowerSGD. From a few dozen on, an all-reduce without compression is quicker."""


class QuantizationType(Enum):
    """How one value is written. The enum's values are the wire's codes and never change."""

    FP32 = 0
    """As it is."""
    FP16 = 1
    """Rounded to nearest; what is beyond 65504 becomes that."""
    BF16 = 2
    """Rounded to nearest: the range of float32, three digits."""
    INT8 = 3
    """Whole multiples of a 127th of the largest of 512 neighbours, rounded up or down at random: right on average."""
    INT4 = 4
    """Whole multiples of a 7th of the largest of 128 neighbours, likewise."""
    ONE_BIT = 5
    """The sign, times the mean magnitude of 512 neighbours."""

    @property
    def is_unbiased(self) -> bool:
        """Whether what arrives is right on average."""
        return self in (QuantizationType.FP32, QuantizationType.INT8, QuantizationType.INT4)


class Method(Enum):
    """What is sent of an array. The values are the wire's codes and never change."""

    NONE = 0
    QUANTIZE = 1
    TOP_K = 2
    RANDOM_K = 3
    POWER_SGD = 4
    AUTO = 5


@dataclass(frozen=True)
class CompressionStrategy:
    """What is sent of an array (`method`), and how each of its values is written (`values`).

    Made by name, `CompressionStrategy.parse("topk(0.01)+int4")`, or by `top_k`, `random_k`, `quantize`, `power_sgd` and
    `auto`. Everywhere a strategy is asked for, its name does too.
    """

    method: Method
    values: QuantizationType = QuantizationType.FP32
    ratio: float = 1.0
    """TOP_K and RANDOM_K: the share of the elements that is sent, at least one."""
    rank: int = 0
    """POWER_SGD: columns of the two factors."""
    max_error: float = 0.25
    """AUTO: how far, as a share of its length, an array may be moved by one step. The default admits INT4 and what is
    finer; 1 admits everything."""

    NONE: ClassVar[CompressionStrategy]
    FP16: ClassVar[CompressionStrategy]
    BF16: ClassVar[CompressionStrategy]
    INT8: ClassVar[CompressionStrategy]
    INT4: ClassVar[CompressionStrategy]
    ONE_BIT: ClassVar[CompressionStrategy]
    AUTO: ClassVar[CompressionStrategy]

    def __post_init__(self) -> None:
        _check_share("ratio", self.ratio)
        _check_share("max_error", self.max_error)
        rank: object = self.rank
        low = 1 if self.method is Method.POWER_SGD else 0
        if isinstance(rank, bool) or not isinstance(rank, Integral) or not low <= rank <= MAX_RANK:
            raise InvalidArgumentError("rank", rank, f"must be a whole number from {low} to {MAX_RANK}")
        if self.method is Method.POWER_SGD and self.values is not QuantizationType.FP32:
            raise InvalidArgumentError("values", self.values.name, "PowerSGD's factors are sent as float32")

    @classmethod
    def quantize(cls, values: QuantizationType) -> CompressionStrategy:
        """Every element, in fewer bits."""
        return cls.NONE if values is QuantizationType.FP32 else cls(Method.QUANTIZE, values)

    @classmethod
    def top_k(cls, ratio: float = 0.01, values: QuantizationType = QuantizationType.FP32) -> CompressionStrategy:
        """The share `ratio` of the elements that is largest."""
        return cls(Method.TOP_K, values, ratio)

    @classmethod
    def random_k(cls, p: float = 0.1, values: QuantizationType = QuantizationType.FP32) -> CompressionStrategy:
        """A share `p` of the elements, drawn anew each step, the same at every rank."""
        return cls(Method.RANDOM_K, values, p)

    @classmethod
    def power_sgd(cls, rank: int = 4) -> CompressionStrategy:
        """Each matrix as a product of two of `rank` columns (Vogels et al. 2019); vectors as they are."""
        return cls(Method.POWER_SGD, rank=rank)

    @classmethod
    def auto(cls, max_error: float = 0.25) -> CompressionStrategy:
        """The quickest on these links that moves no array by more than `max_error` of its length, or none.

        With 0.25 it chooses among none, fp16, bf16, int8 and int4; with 0.05 not int4, which is better with Adam; with
        1 also onebit, topk(0.01)+int4 and powersgd(4).
        """
        return cls(Method.AUTO, max_error=max_error)

    @classmethod
    def parse(cls, text: object) -> CompressionStrategy:
        """From its name: `none`, `fp16`, `bf16`, `int8`, `int4`, `onebit`, `topk(0.01)`, `topk(0.01)+int4`,
        `randomk(0.1)`, `powersgd(4)`, `auto`, `auto(0.05)`. A strategy is returned as it is.

        Raises `InvalidArgumentError` for anything else.
        """
        if isinstance(text, CompressionStrategy):
            return text
        found = _NAME.fullmatch(_HYPHEN.sub("", text.strip().lower())) if isinstance(text, str) else None
        if found is None or found["method"] not in _METHODS or (found["values"] or "fp32") not in _VALUES:
            raise InvalidArgumentError("compression", text, f"choose one of: {_KNOWN}")
        method, values = _METHODS[found["method"]], _VALUES[found["values"] or "fp32"]
        try:
            number = None if found["number"] is None else float(found["number"])
        except ValueError as exc:
            raise InvalidArgumentError("compression", text, f"choose one of: {_KNOWN}") from exc
        if method in (Method.TOP_K, Method.RANDOM_K):
            return cls(method, values, number if number is not None else 0.01 if method is Method.TOP_K else 0.1)
        if found["values"] is not None or (number is not None and method in (Method.NONE, Method.QUANTIZE)):
            raise InvalidArgumentError("compression", text, f"choose one of: {_KNOWN}")
        if method is Method.POWER_SGD:
            number = 4.0 if number is None else number
            return cls.power_sgd(int(number) if number == int(number) else number)  # pyright: ignore[reportArgumentType]
        if method is Method.AUTO:
            return cls.AUTO if number is None else cls.auto(number)
        return cls.quantize(_VALUES[found["method"]] if method is Method.QUANTIZE else QuantizationType.FP32)

    @property
    def is_unbiased(self) -> bool:
        """Whether what arrives is right on average, with nothing kept for later."""
        return self.method in (Method.NONE, Method.QUANTIZE, Method.RANDOM_K) and self.values.is_unbiased

    def kept(self, count: int) -> int:
        """How many of `count` elements are sent."""
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
        if self.method is Method.NONE:
            return "none"
        name = "topk" if self.method is Method.TOP_K else "randomk"
        return f"{name}({self.ratio:g})" + ("" if self.values is QuantizationType.FP32 else f"+{_NAMES[self.values]}")


def _check_share(name: str, share: object) -> None:
    if isinstance(share, bool) or not isinstance(share, Real) or not 0 < float(share) <= 1:
        raise InvalidArgumentError(name, share, "must be above 0 and at most 1")


_NAMES = {kind: kind.name.lower().replace("_", "") for kind in QuantizationType}
_VALUES = {name: kind for kind, name in _NAMES.items()}
_METHODS = {
    "none": Method.NONE,
    **{name: Method.QUANTIZE for kind, name in _NAMES.items() if kind is not QuantizationType.FP32},
    "topk": Method.TOP_K,
    "randomk": Method.RANDOM_K,
    "random": Method.RANDOM_K,
    "powersgd": Method.POWER_SGD,
    "auto": Method.AUTO,
}
_HYPHEN = re.compile(r"[-_](?=[a-z])")
_NAME = re.compile(r"(?P<method>[a-z]+\d*)(?:\((?P<number>[^)]*)\))?(?:\+(?P<values>[a-z]+\d*))?")
_KNOWN = (
    "none, fp16, bf16, int8, int4, onebit, topk(0.01), topk(0.01)+int4, randomk(0.1), powersgd(4), auto, auto(0.05)"
)

CompressionStrategy.NONE = CompressionStrategy(Method.NONE)
CompressionStrategy.AUTO = CompressionStrategy(Method.AUTO)
for _kind in (kind for kind in QuantizationType if kind is not QuantizationType.FP32):
    setattr(CompressionStrategy, _kind.name, CompressionStrategy(Method.QUANTIZE, _kind))
