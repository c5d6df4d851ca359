"""The place of a framework's tensor: address, shape, strides and device, read through DLPack without a copy.

The capsule's struct is that of DLPack 0.8 and of unversioned exports since
(https://dmlc.github.io/dlpack/latest/c_api.html).
"""

import ctypes
from typing import Any

import attrs

from kvproto.errors import LocalError
from kvproto.wire.enums import DType, ErrorCode

CPU, CUDA = 1, 2
"""DLPack device types."""


ELEMENTS: dict[int, set[tuple[int, int]]] = {
    DType.F32: {(2, 32)},
    DType.F16: {(2, 16)},
    DType.BF16: {(4, 16)},
    DType.F8E4M3: {(8, 8), (10, 8)},
    DType.F8E5M2: {(12, 8)},
    DType.F8E8M0: {(14, 8)},
    DType.F4E2M1: {(17, 4)},
    DType.U8: set(),
    DType.I8: set(),
}
"""DLPack type codes and bits of each element type; integers may hold the bits of any type."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("vector", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


@attrs.frozen
class TensorView:
    """A tensor's place in memory; it keeps the tensor alive."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes from one element of each axis to the next."""
    itemsize: int
    """Bytes of an element."""
    element: tuple[int, int]
    """DLPack type code and bits."""
    device: tuple[int, int]
    """DLPack device type and number."""
    tensor: Any = attrs.field(repr=False, eq=False)
    path: str = "tensor"
    """The tensor's name in error messages."""

    @property
    def length(self) -> int:
        """Bytes from the first element to the end of the last."""
        return sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + self.itemsize


def view_of(tensor: Any, path: str) -> TensorView:
    """The place of a tensor of any framework; raises LocalError(BAD_COLUMNS), which names `path`."""
    if not hasattr(tensor, "__dlpack__"):
        raise _bad(path, "a tensor with __dlpack__", f"{type(tensor).__module__}.{type(tensor).__name__}")
    if _elsewhere(tensor, path):
        size, device = tensor.element_size(), tensor.__dlpack_device__()
        strides = tuple(n * size for n in tensor.stride())
        _capsule, empty = _exported(tensor.new_empty(0, device="cpu"), path)
        element = empty.code, empty.bits
        return TensorView(tensor.data_ptr(), tuple(tensor.shape), strides, size, element, device, tensor, path)
    _capsule, exported = _exported(tensor, path)
    shape = tuple(exported.shape[: exported.ndim])
    if exported.bits * exported.vector % 8 or not exported.bits or not all(shape):
        raise _bad(path, "at least one element, of whole bytes", f"{exported.bits} bits, shape {shape}")
    size = exported.bits * exported.vector // 8
    if exported.strides:
        strides = tuple(n * size for n in exported.strides[: exported.ndim])
    else:  # dense
        steps = [size]
        for extent in shape[:0:-1]:
            steps.append(steps[-1] * extent)
        strides = tuple(reversed(steps))[: exported.ndim] if shape else ()
    if min(strides, default=0) < 0:
        raise _bad(path, "strides of 0 or more", str(strides))
    if any(n > 1 and not s for n, s in zip(shape, strides, strict=True)):
        raise _bad(path, "separate memory for each element", f"strides {strides}, of an expanded tensor")
    address = (exported.data or 0) + exported.byte_offset
    element, device = (exported.code, exported.bits), (exported.device_type, exported.device_id)
    return TensorView(address, shape, strides, size, element, device, tensor, path)


def _exported(tensor: Any, path: str) -> tuple[Any, _Tensor]:
    """A tensor's DLPack capsule, which keeps its struct alive, and the struct."""
    try:
        capsule = tensor.__dlpack__()
        return capsule, _Tensor.from_address(_pointer(capsule, b"dltensor"))
    except Exception as error:
        raise _bad(path, "a tensor that DLPack exports", f"{type(error).__name__}: {error}") from error


def _elsewhere(tensor: Any, path: str) -> bool:
    """Whether it is a torch tensor on a GPU: torch exports only tensors of the current device."""
    if not all(hasattr(tensor, name) for name in ("data_ptr", "stride", "element_size")):
        return False
    try:
        return int(tensor.__dlpack_device__()[0]) == CUDA
    except Exception as error:  # torch raises ValueError for the devices meta, xla and others
        raise _bad(path, "a tensor in memory that DLPack knows", f"one on {tensor.device}: {error}") from error


def _bad(path: str, mine: str, yours: str) -> LocalError:
    advice = "pass torch, JAX, CuPy or numpy arrays; view types that DLPack does not know as uint8"
    return LocalError(ErrorCode.BAD_COLUMNS, path, mine, yours, advice)
