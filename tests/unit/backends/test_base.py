"""What every backend inherits: memory as bytes, and an exchange made of send and recv."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from ringfort.backends.group import as_bytes
from ringfort.errors import UnsupportedArrayError


@pytest.mark.parametrize(
    "data",
    [
        b"12345678",
        bytearray(8),
        memoryview(bytearray(16))[4:12],
        array("d", [1.5]),
        np.arange(4, dtype=np.int16).reshape(2, 2),
        np.array(1.5),
        np.zeros(1, np.complex64),
        np.zeros(8, np.bool_),
        np.zeros(2, ">f4"),
    ],
)
def test_contiguous_memory_is_seen_as_its_bytes_and_not_copied(data: Any) -> None:
    view = as_bytes(data, "data", writable=False)
    assert (view.format, view.ndim, len(view)) == ("B", 1, 8)
    assert view == memoryview(data).tobytes()
    if not view.readonly:
        view[0] = 77
        assert memoryview(data).tobytes()[0] == 77


@pytest.mark.parametrize(
    "data", [b"", bytearray(), array("d"), np.empty(0), np.empty((3, 0)), np.empty((0, 3)), memoryview(np.empty(0))]
)
def test_what_has_no_elements_has_no_bytes(data: Any) -> None:
    assert len(as_bytes(data, "data", writable=False)) == 0


@pytest.mark.parametrize(
    "data", [np.zeros((4, 4))[:, 1], np.zeros((4, 4), order="F"), np.zeros(8)[::-1], None, 5, "text", [1], object()]
)
def test_other_memory_is_refused_by_the_arguments_name(data: Any) -> None:
    with pytest.raises(UnsupportedArrayError, match=f"data='{type(data).__name__}'.*contiguous"):
        as_bytes(data, "data", writable=False)


@pytest.mark.parametrize("data", [b"1234", memoryview(b"1234"), np.frombuffer(b"1234", np.uint8)])
def test_read_only_memory_cannot_be_received_into(data: Any) -> None:
    with pytest.raises(UnsupportedArrayError, match=r"into=.*read-only"):
        as_bytes(data, "into", writable=True)
    assert as_bytes(data, "data", writable=False) == b"1234"
