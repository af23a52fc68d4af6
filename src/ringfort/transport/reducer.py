"""`Reducer`: how what arrives is combined with what is there, span by span, while it arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Reducer(NamedTuple):
    """A reduction the transport can apply without knowing what it means."""

    dtype: np.dtype[Any]
    apply: Callable[[Array, Array], object]
    """`apply(into, span)` does `into = into <op> span` on one-dimensional arrays of `dtype` and equal length."""
    ufunc: np.ufunc | None = None
    """Does the same as `apply` if floating point errors are ignored; None where it takes more than one call."""
