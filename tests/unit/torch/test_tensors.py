"""Tensors as arrays, reductions and timeouts as Ringfort's."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from ringfort.collectives import arrays
from ringfort.collectives.arrays import as_view
from ringfort.collectives.ops import PremulSum, ReduceOp
from ringfort.errors import InvalidArgumentError, UnsupportedArrayError, UnsupportedOpError

torch: Any = pytest.importorskip("torch")

from ringfort.torch import tensors  # noqa: E402  # it needs torch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "bool", "complex64"])
def test_a_contiguous_tensor_is_not_copied(dtype: str) -> None:
    tensor = torch.zeros(4, 5, dtype=getattr(torch, dtype))
    flat = as_view(tensors.to_array(tensor)).flat
    assert flat.ctypes.data == tensor.data_ptr()
    assert flat.nbytes == tensor.nbytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_storage_of_a_tensor_can_still_be_resized(dtype: str) -> None:
    for tensor in (torch.ones(4, dtype=getattr(torch, dtype)), torch.nn.Parameter(torch.ones(4))):
        as_view(tensors.to_array(tensor))
        tensor.untyped_storage().resize_(0)  # as FSDP frees parameters


SHAPES = {
    "no elements": lambda: torch.ones(0, 3),
    "no axes": lambda: torch.tensor(2.0),
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "a part": lambda: torch.arange(12.0).view(3, 4)[:, 1:3],
    "bools": lambda: torch.tensor([True, False]),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("read", [arrays.reader_of_tensors(), lambda tensor: np.asarray(arrays._Described(tensor))])
def test_the_memory_of_a_tensor_is_that_of_its_numpy(shape: str, read: Any) -> None:
    tensor = SHAPES[shape]()
    memory = read(tensor)
    assert memory.flags.writeable
    assert memory.dtype == tensor.numpy().dtype
    assert memory.tolist() == tensor.tolist()
    if tensor.numel():
        assert memory.ctypes.data == tensor.data_ptr()
        memory.flat[0] = 0
        assert tensor.flatten()[0] == 0


def test_the_memory_of_a_tensor_outlives_it() -> None:
    array = tensors.to_array(torch.arange(1000.0))
    torch.zeros(1000)
    assert array.tolist() == list(range(1000))


def test_lazy_signs_and_conjugates_are_resolved() -> None:
    tensor = torch.full((2,), 1 + 2j, dtype=torch.complex64)
    assert as_view(tensors.to_array(tensor.conj())).flat.tolist() == [1 - 2j] * 2
    assert as_view(tensors.to_array(tensor.conj().imag)).flat.tolist() == [-2.0] * 2


def test_a_parameter_is_not_copied_either() -> None:
    tensor = torch.nn.Parameter(torch.zeros(3))
    assert as_view(tensors.to_array(tensor)).flat.ctypes.data == tensor.data_ptr()


def test_eight_bit_floats_are_moved_as_their_bytes_and_not_added() -> None:
    tensor = torch.ones(3, dtype=torch.float8_e4m3fn)
    moved = tensors.to_moved(tensor)
    assert moved.dtype == np.uint8
    assert moved.ctypes.data == tensor.data_ptr()
    with pytest.raises(UnsupportedArrayError):
        tensors.to_array(tensor)


def test_parts_share_the_memory_of_the_whole() -> None:
    tensor = torch.arange(6.0)
    parts = tensors.split(tensor, 3, "x")
    parts[2].fill_(7)
    assert tensor.tolist() == [0, 1, 2, 3, 7, 7]


def test_what_cannot_be_cut_evenly_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="output='tensor of shape \\(5,\\)'"):
        tensors.split(torch.zeros(5), 2, "output")
    with pytest.raises(InvalidArgumentError, match="must be contiguous"):
        tensors.split(torch.zeros(4, 4).t(), 2, "output")


def test_torchs_reductions_are_ours_and_a_factor_comes_with_its_own() -> None:
    kinds = torch.distributed.ReduceOp
    assert tensors.to_op(kinds.AVG) is ReduceOp.MEAN
    assert tensors.to_op(kinds(kinds.BXOR)) is ReduceOp.BXOR
    assert tensors.to_op(torch.distributed._make_nccl_premul_sum(0.25)) == PremulSum(0.25)
    assert tensors.to_op(torch.distributed._make_nccl_premul_sum(torch.tensor([3.0]))) == PremulSum(3.0)
    for other in ("sum", None, -1):
        with pytest.raises(UnsupportedOpError, match=str(other)):
            tensors.to_op(other)


def test_a_timeout_that_was_not_set_is_the_groups() -> None:
    assert tensors.to_seconds(timedelta(milliseconds=-1), 7.0) == 7.0
    assert tensors.to_seconds(None, 7.0) == 7.0
    assert tensors.to_seconds(timedelta(0), 7.0) == 7.0
    assert tensors.to_seconds(timedelta(milliseconds=250), 7.0) == 0.25
