"""Tensors of torch on GPUs, whose place torch tells without exporting them."""

from typing import Any

import pytest
import torch

from kvproto.transport.tensors import CUDA, view_of


class OnAnotherGpu:
    """What torch says of a tensor on a GPU that is not the current one: everything but its export."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 1

    def __dlpack__(self) -> Any:
        raise BufferError("Can't export tensors on a different CUDA device index")


@pytest.mark.parametrize(
    ("dtype", "element"), [(torch.float32, (2, 32)), (torch.bfloat16, (4, 16)), (torch.float16, (2, 16)), (torch.uint8, (1, 8)),
     (torch.float8_e8m0fnu, (14, 8)), (torch.float4_e2m1fn_x2, (17, 4))]
)  # fmt: skip
def test_element_type_place_and_strides(dtype: torch.dtype, element: tuple[int, int]) -> None:
    whole = torch.zeros(5, 4, 2, 8, dtype=dtype)
    tensor: Any = OnAnotherGpu(whole[:, :3].transpose(1, 2))
    found = view_of(tensor, "k")
    assert (found.element, found.device, found.itemsize) == (element, (CUDA, 1), dtype.itemsize)
    assert (found.address, found.shape) == (whole.data_ptr(), (5, 2, 3, 8))
    assert found.strides == tuple(n * dtype.itemsize for n in (64, 8, 16, 1))
    assert found.tensor is tensor
