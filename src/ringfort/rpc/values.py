"""Values as bytes: msgpack, with each large array as a buffer of its own. Pure; nothing is ever unpickled.

A large array is sent from its own memory and received into what becomes its memory: it is never copied. Small arrays
are copied into the msgpack, which is cheaper than a frame of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import prod
from struct import Struct
from typing import Any, cast

import msgspec
import numpy as np

from ringfort.collectives.arrays import as_view, plain_view, wrap_torch
from ringfort.collectives.reduction import by_code
from ringfort.errors import DistributedError, InvalidMessageError
from ringfort.rpc.protocol import MAX_BUFFERS, MAX_REFERENCES, Reference

SMALL, LARGE, REFERENCE = 1, 2, 3
"""Extension codes of msgpack: an array with its elements, an array whose elements are a buffer, a reference."""
_INLINE = 4096
"""Bytes up to which an array is copied into the msgpack."""
_ARRAY = Struct("<BBB")  # element type, whether it was a tensor, number of axes
_INDEX = Struct("<I")

Buffers = Sequence[memoryview | bytes]
NameOf = Callable[[object], Reference | None]
"""Returns the name of a reference, and None for any other object."""


class Encoded:
    """A value as bytes, and the references in it, in order."""

    def __init__(self, value: Any, name_of: NameOf = lambda value: None) -> None:
        """Raises `InvalidMessageError` for a value that cannot be sent."""
        self.buffers: list[memoryview | bytes] = [b""]
        self.references: list[Reference] = []
        self._name_of = name_of
        try:
            self.buffers[0] = msgspec.msgpack.encode(value, enc_hook=self._extend)
        except InvalidMessageError:
            raise
        except (TypeError, ValueError, OverflowError, RecursionError) as exc:
            raise InvalidMessageError(
                f"A value cannot be sent: {exc}. Send None, bools, numbers, strings, bytes, lists, dicts, dataclasses, "
                "msgspec structs, arrays, tensors on the CPU and references."
            ) from exc

    @property
    def size(self) -> int:
        """Bytes in all buffers."""
        return sum(map(len, self.buffers))

    def _extend(self, value: Any) -> Any:
        reference = self._name_of(value)
        if reference is not None:
            self.references.append(reference)
            if len(self.references) > MAX_REFERENCES:
                raise InvalidMessageError(f"A message has at most {MAX_REFERENCES} references")
            return msgspec.msgpack.Ext(REFERENCE, _INDEX.pack(len(self.references) - 1))
        if isinstance(value, np.generic):
            return cast("Any", value).item()
        view = as_view(value, "argument")
        is_torch = type(value).__module__.partition(".")[0] == "torch"
        head = _ARRAY.pack(view.kind.code, is_torch, len(view.shape)) + np.array(view.shape, "<u8").tobytes()
        if view.flat.nbytes <= _INLINE:
            return msgspec.msgpack.Ext(SMALL, head + view.flat.tobytes())
        self.buffers.append(memoryview(view.flat).cast("B"))
        if len(self.buffers) > MAX_BUFFERS:
            raise InvalidMessageError(f"A message has at most {MAX_BUFFERS - 1} arrays of more than {_INLINE} bytes")
        return msgspec.msgpack.Ext(LARGE, head + _INDEX.pack(len(self.buffers) - 1))


def decode(
    buffers: Buffers, references: Sequence[object], data: memoryview | bytes | None = None, kind: Any = Any
) -> Any:
    """Decode the first buffer, or `data`, which is a part of it, as a value of type `kind`. Arrays use the memory of
    their buffers. Raises `InvalidMessageError`."""

    def extended(code: int, data: memoryview) -> Any:
        if code == REFERENCE:
            (index,) = _INDEX.unpack(data)
            return references[index]
        return _array(code, data, buffers)

    try:
        return msgspec.msgpack.decode(buffers[0] if data is None else data, type=kind, ext_hook=extended)
    except DistributedError as exc:
        raise InvalidMessageError(str(exc)) from exc
    except Exception as exc:  # whatever strange bytes can cause, in msgspec, struct, NumPy or torch
        raise InvalidMessageError(f"Malformed message: {exc}") from exc


def _array(code: int, data: memoryview, buffers: Buffers) -> Any:
    kind, is_torch, axes = _ARRAY.unpack_from(data)
    start = _ARRAY.size + 8 * axes
    shape = tuple(int(length) for length in np.frombuffer(data[_ARRAY.size : start], "<u8", axes))
    element = by_code(kind)
    memory = _memory(code, data[start:], buffers)
    if prod(shape) * element.storage.itemsize != len(memory):
        raise InvalidMessageError(f"Malformed message: {len(memory)} bytes for shape {shape} of {element.name}")
    flat = np.frombuffer(memory, element.storage)
    if is_torch and "torch" in sys.modules:
        return wrap_torch(flat.reshape(shape), element)
    return plain_view(flat, element, shape).finish()


def _memory(code: int, rest: memoryview, buffers: Buffers) -> memoryview | bytes | bytearray:
    """Return the elements of an array; `rest` is what follows its shape."""
    if code == SMALL:
        return bytearray(rest)
    if code != LARGE:
        raise InvalidMessageError(f"Malformed message: unknown extension code {code}")
    index: int = _INDEX.unpack(rest)[0]
    if not index:
        raise InvalidMessageError("Malformed message: an array refers to the buffer of the values")
    return buffers[index]
