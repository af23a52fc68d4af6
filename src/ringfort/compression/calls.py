"""What a rank called, in the 16 bytes that travel with every message, for collectives that compress: so that ranks with
different strategies find out at the first message and can say which. Pure; see `collectives/signature.py`."""

from __future__ import annotations

from enum import Enum
from math import log2
from struct import Struct

from ringfort.collectives import signature
from ringfort.collectives.ops import ReduceOp
from ringfort.collectives.reduction import by_code
from ringfort.compression.strategy import CompressionStrategy, Method, QuantizationType
from ringfort.errors import InvalidArgumentError

_CALL = Struct("<BBBBHBBQ")
_OCTAVE = 2047
"""Steps of a share's code for each halving: shares from 1 down to 2**-32, each within a thousandth."""


class Compressed(Enum):
    """Beside `signature.Collective`'s. The values are the wire's codes and never change."""

    ALL_REDUCE = 32
    REDUCE_SCATTER = 33


def encode(
    what: Compressed, strategy: CompressionStrategy, *, kind: int = 0, count: int = 0, op: int = 0, keeps: bool = False
) -> bytes:
    """The 16 bytes. `keeps`: whether what is not sent is kept, on which the meaning of what is sent may depend."""
    share = strategy.max_error if strategy.method is Method.AUTO else strategy.ratio
    number = strategy.rank or min(65535, round(-log2(share) * _OCTAVE))
    return _CALL.pack(what.value, op, kind, strategy.method.value, number, strategy.values.value, keeps, count)


def describe(call: bytes) -> str:
    """The call as a person would write it, such as `all_reduce(float32[9], SUM, compression=int8)`. Never raises."""
    call, is_measuring = signature.split_measuring(call)
    if is_measuring:
        return f"{describe(call)}, measuring the links first"
    what, op, kind, method, number, values, keeps, count = _CALL.unpack(call)
    try:
        name = Compressed(what).name.lower()
        share = float(f"{2.0 ** (-number / _OCTAVE):.3g}")  # as the person may have written it
        strategy = CompressionStrategy(
            Method(method),
            QuantizationType(values),
            share if method in (Method.TOP_K.value, Method.RANDOM_K.value) else 1.0,
            number if method == Method.POWER_SGD.value else 0,
            share if method == Method.AUTO.value else CompressionStrategy.AUTO.max_error,
        )
        words = [f"{by_code(kind).name}[{count}]", ReduceOp(op).name] if kind else []
        words.append(f"compression={strategy}{'' if keeps else ' without error feedback'}")
    except (ValueError, InvalidArgumentError):
        return signature.describe(call)
    return f"{name}({', '.join(words)})"
