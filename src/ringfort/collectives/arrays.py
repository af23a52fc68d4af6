"""One way in for arrays: NumPy, torch on the CPU, MLX, JAX, and anything with the buffer protocol or DLPack.

Nothing is imported that the caller has not imported: an array of a library can only be here if its library is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any, cast

import numpy as np

from ringfort.collectives.reduction import ElementType, element_type, element_type_named
from ringfort.errors import UnsupportedArrayError
from ringfort.transport.reducer import Array

Finish = Callable[[], Any]


class ArrayView:
    """An array as flat, contiguous NumPy storage. `flat` is the array's own memory where that is possible."""

    def __init__(
        self,
        flat: Array,
        kind: ElementType,
        shape: tuple[int, ...] | None = None,
        *,
        finish: Finish,
        wrap: Callable[[Array, ElementType], Any] | None = None,
    ) -> None:
        self.flat = flat
        self.kind = kind
        self.size = flat.size
        """Elements."""
        self.device: str | None = None
        """Where a tensor is that is not in the memory of the CPU."""
        self.shape = flat.shape if shape is None else shape
        self.finish = finish
        """Returns the caller's array with `flat` in it: the array itself, or a new one if it cannot be written."""
        self._wrap = wrap or _wrap_numpy

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.kind.itemsize

    def new(self, shape: tuple[int, ...]) -> ArrayView:
        """Return memory for a result of `shape` and the same kind; `finish` returns it as an array of the same
        library."""
        flat = np.empty(prod(shape), self.kind.storage)
        wrap, kind = self._wrap, self.kind
        return ArrayView(flat, kind, shape, finish=lambda: wrap(flat.reshape(shape), kind), wrap=wrap)

    def part(self, index: int) -> Array:
        """Return the storage of `x[index]`."""
        size = self.size // self.shape[0]
        return self.flat[index * size : (index + 1) * size]


def as_view(x: Any, name: str = "x", *, writable: bool = False) -> ArrayView:
    """Return `x` as an `ArrayView`. With `writable`, a read-only NumPy array or buffer is refused.

    Raises `UnsupportedArrayError` if `x` is not an array, is on another device, or has an unsupported element type.
    """
    if isinstance(x, ArrayView):
        return x
    if isinstance(x, np.ndarray):
        return _numpy_view(cast(Array, x), name, writable=writable)
    library = type(x).__module__.partition(".")[0]
    if library == "torch" and hasattr(x, "detach"):
        return _torch_view(x, name)
    if library in ("jax", "jaxlib", "mlx"):
        return _immutable_view(x, name, library)
    if _is_scalar(x):
        raise UnsupportedArrayError(name, type(x).__name__, "a NumPy scalar has no memory of its own; pass np.array(x)")
    if hasattr(x, "__dlpack__"):
        return _dlpack_view(x, name, writable=writable)
    try:
        memory = memoryview(x)
    except TypeError:
        raise UnsupportedArrayError(name, x, "not an array; pass a NumPy array, a tensor or a buffer") from None
    view = _numpy_view(np.asarray(memory), name, writable=writable)
    finish = view.finish
    return ArrayView(view.flat, view.kind, view.shape, finish=lambda: (finish(), x)[1])


def _is_scalar(x: object) -> bool:
    return isinstance(x, np.generic)


def plain_view(flat: Array, kind: ElementType, shape: tuple[int, ...]) -> ArrayView:
    """Return a view of memory that is a NumPy array in the end."""
    return ArrayView(flat, kind, shape, finish=lambda: _wrap_numpy(flat.reshape(shape), kind))


# --- NumPy and buffers ------------------------------------------------------------------------------------------------


def _numpy_view(x: Array, name: str, *, writable: bool) -> ArrayView:
    kind = element_type(x.dtype, name=f"{name}.dtype")
    if writable and not x.flags.writeable:
        raise UnsupportedArrayError(name, f"array of shape {x.shape}", f"read-only; pass a copy: {name}.copy()")
    bits = x if x.dtype == kind.storage else x.view(kind.storage)
    if x.flags.c_contiguous:
        return ArrayView(bits.reshape(-1), kind, x.shape, finish=lambda: x, wrap=_wrapper_like(x))
    copy = np.ascontiguousarray(bits)

    def finish() -> Array:
        if writable:
            bits[...] = copy
        return x

    return ArrayView(copy.reshape(-1), kind, x.shape, finish=finish, wrap=_wrapper_like(x))


def _wrapper_like(x: Array) -> Callable[[Array, ElementType], Any]:
    dtype = x.dtype
    return lambda array, kind: array if dtype == kind.storage else array.view(dtype)


def _wrap_numpy(array: Array, kind: ElementType) -> Array:
    if kind.name != "bfloat16":
        return array
    try:
        return array.view(np.dtype("bfloat16"))  # known to NumPy once ml_dtypes is imported
    except TypeError:
        return array


def _dlpack_view(x: Any, name: str, *, writable: bool) -> ArrayView:
    try:
        array = np.from_dlpack(x)
    except (TypeError, BufferError, RuntimeError, ValueError) as exc:
        why = f"not accessible to the CPU through DLPack ({exc})"
        raise UnsupportedArrayError(name, type(x).__name__, why) from exc
    return _numpy_view(array, name, writable=writable)


# --- torch ------------------------------------------------------------------------------------------------------------


@cache
def reader_of_tensors() -> Callable[[Any], Array]:
    """Return a function that returns the memory of a dense tensor on the CPU without gradient or lazy conjugation, of
    a type that NumPy knows.

    `tensor.numpy()` would do, but it makes the storage one that cannot be resized, for good: FSDP frees parameters by
    resizing their storage.
    """
    torch = sys.modules["torch"]
    export, view = getattr(torch._C, "_to_dlpack_versioned", None), np.from_dlpack
    if export is not None:

        def read(tensor: Any) -> Array:  # np.from_dlpack(tensor) takes three times as long, for torch's checks
            return view(_Exported((export(tensor),)))

        try:
            if read(torch.zeros(1)).flags.writeable:
                return read
        except (TypeError, BufferError, RuntimeError, ValueError):  # NumPy before 2.1
            pass
    return lambda tensor: np.asarray(_Described(tensor))


class _Exported(tuple[Any]):
    """A capsule of DLPack's on the CPU."""

    __slots__ = ()

    def __dlpack__(self, **_: Any) -> Any:
        return self[0]

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class _Described:
    """A tensor in the words of NumPy's own protocol."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Any) -> None:
        dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
        self._tensor = tensor  # the array keeps this object, and so the memory
        self.__array_interface__ = {
            "version": 3,
            "typestr": dtype.str,
            "shape": tuple(tensor.shape),
            "strides": tuple(dtype.itemsize * stride for stride in tensor.stride()),
            "data": (tensor.data_ptr(), False),
        }


def _torch_view(x: Any, name: str) -> ArrayView:
    torch = sys.modules["torch"]
    if x.device.type != "cpu" or x.layout is not torch.strided:
        where = x.device if x.device.type != "cpu" else x.layout
        raise UnsupportedArrayError(name, f"tensor on {where}", "must be a dense tensor on the CPU; pass x.cpu()")
    plain = x.detach()
    own = plain if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg() else None
    dense = plain.resolve_conj().resolve_neg().contiguous() if own is None else plain
    kind_name = str(x.dtype).removeprefix("torch.")
    kind = element_type_named(kind_name)
    bits = dense.view(torch.int16) if kind_name == "bfloat16" else dense
    flat = reader_of_tensors()(bits).reshape(-1).view(kind.storage)

    def finish() -> Any:
        if own is None:
            plain.copy_(dense)
        return x

    return ArrayView(flat, kind, tuple(x.shape), finish=finish, wrap=wrap_torch)


def wrap_torch(array: Array, kind: ElementType) -> Any:
    """Return a tensor of the same memory. torch does not know NumPy's bfloat16, but reads the same bits."""
    torch = sys.modules["torch"]
    if kind.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


# --- arrays that cannot be written ------------------------------------------------------------------------------------


def _immutable_view(x: Any, name: str, library: str) -> ArrayView:
    """JAX and MLX: work on a copy, and give back a new array of the same kind."""
    kind = element_type_named(str(x.dtype).rpartition(".")[2])
    wrap = _wrap_mlx if library == "mlx" else _wrap_jax
    try:
        if library == "mlx" and kind.name == "bfloat16":
            x = x.view(sys.modules["mlx.core"].uint16)
        copy = np.array(x, order="C").view(kind.storage)
    except (TypeError, BufferError, RuntimeError, ValueError) as exc:
        raise UnsupportedArrayError(name, type(x).__name__, f"cannot be copied to the CPU ({exc})") from exc
    shape = tuple(x.shape)
    return ArrayView(copy.reshape(-1), kind, shape, finish=lambda: wrap(copy.reshape(shape), kind), wrap=wrap)


def _wrap_jax(array: Array, kind: ElementType) -> Any:
    return sys.modules["jax"].numpy.asarray(_wrap_numpy(array, kind))


def _wrap_mlx(array: Array, kind: ElementType) -> Any:
    mx = sys.modules["mlx.core"]
    made = mx.array(array)
    return made.view(mx.bfloat16) if kind.name == "bfloat16" else made
