"""The object forms: JSON-like values and arrays, in msgpack. Nothing is ever unpickled."""

from __future__ import annotations

from struct import Struct
from typing import Any, cast

import msgspec
import numpy as np

from ringfort.backends.group import Group
from ringfort.collectives import algorithms, signature
from ringfort.collectives.arrays import as_view, plain_view
from ringfort.collectives.broadcast import spread
from ringfort.collectives.plan import Operation, unplanned
from ringfort.collectives.reduction import by_code
from ringfort.collectives.signature import Collective
from ringfort.errors import (
    DistributedError,
    InvalidArgumentError,
    ObjectTooLargeError,
    ProtocolError,
    UnsupportedArrayError,
)
from ringfort.transport.messages import Envelope

_ARRAY = 1
"""The msgpack extension code of an array: element type, number of axes, their lengths, then the elements."""
_HEAD = Struct("<BB")


def encode(value: Any, limit: int) -> bytes:
    """Return `value` as bytes. Raises `InvalidArgumentError` if msgpack cannot encode it, and `ObjectTooLargeError`."""
    try:
        data = msgspec.msgpack.encode(value, enc_hook=_encode_array)
    except UnsupportedArrayError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        why = "must consist of None, bools, numbers, strings, bytes, lists, dicts and arrays"
        raise InvalidArgumentError("obj", type(value).__name__, f"{why} ({exc})") from exc
    if len(data) > limit:
        raise ObjectTooLargeError(len(data), limit)
    return data


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Return the value. Raises `ProtocolError` for malformed bytes."""
    try:
        return msgspec.msgpack.decode(data, ext_hook=_decode_array)
    except DistributedError:
        raise
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as exc:
        raise ProtocolError(f"Malformed object: {exc}") from exc


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.generic):
        return cast("Any", value).item()
    view = as_view(value, "obj")
    lengths = np.array(view.shape, "<u8").tobytes()
    return msgspec.msgpack.Ext(_ARRAY, _HEAD.pack(view.kind.code, len(view.shape)) + lengths + view.flat.tobytes())


def _decode_array(code: int, data: memoryview) -> Any:
    if code != _ARRAY or len(data) < _HEAD.size:
        raise ProtocolError(f"Malformed object: unknown extension code {code}")
    kind, axes = _HEAD.unpack_from(data)
    start = _HEAD.size + 8 * axes
    try:
        element = by_code(kind)
        shape = tuple(int(length) for length in np.frombuffer(data[_HEAD.size : start], "<u8"))
        flat = np.frombuffer(bytearray(data[start:]), element.storage)
        flat = flat.reshape(shape).reshape(-1)
    except (ValueError, OverflowError) as exc:
        raise ProtocolError(f"Malformed object: invalid array ({exc})") from exc
    return plain_view(flat, element, shape).finish()


def broadcast_object(group: Group, obj: Any = None, root: int = 0, *, timeout: float | None = None) -> Operation:
    """Return the root's object at every rank; the objects of the others are ignored."""
    group.check_rank(root, "root")
    limit = group.config.max_object_bytes
    data = encode(obj, limit) if group.rank == root else b""
    call = signature.encode(Collective.BROADCAST_OBJECT, root=root)

    def run(envelope: Envelope) -> Any:
        length = np.array([len(data)], np.uint64)
        links = algorithms.tree_links(group.rank, group.world_size, root, 2)
        spread(group, length, links, envelope)
        size = int(length[0])
        _check_size(size, limit, root)
        buffer = np.frombuffer(data, np.uint8) if group.rank == root else np.empty(size, np.uint8)
        spread(group, buffer, links, envelope)
        return obj if group.rank == root else decode(buffer.data)

    return unplanned(group, "broadcast_object", len(data), call, timeout, run)


def all_gather_object(group: Group, obj: Any, *, timeout: float | None = None) -> Operation:
    """Return a list with every rank's object."""
    rank, n = group.rank, group.world_size
    limit = group.config.max_object_bytes
    data = encode(obj, limit)
    call = signature.encode(Collective.ALL_GATHER_OBJECT)

    def run(envelope: Envelope) -> list[Any]:
        result: list[Any] = [None] * n
        result[rank] = obj
        for dst, src in algorithms.exchange_order(rank, n):
            length = bytearray(8)
            group.exchange(len(data).to_bytes(8, "little"), dst, length, src, envelope)
            size = int.from_bytes(length, "little")
            _check_size(size, limit, src)
            arriving = bytearray(size)
            group.exchange(data, dst, arriving, src, envelope)
            result[src] = decode(arriving)
        return result

    return unplanned(group, "all_gather_object", len(data), call, timeout, run)


def _check_size(size: int, limit: int, peer: int) -> None:
    if size > limit:
        raise ProtocolError(f"Rank {peer} announced an object of {size} bytes; max_object_bytes is {limit}", peer=peer)
