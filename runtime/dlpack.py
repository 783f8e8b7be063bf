"""DLPack capsules, made and read without a framework: sharing memory with torch tensors.

The layouts below are DLPack's C structs; a capsule is a Python object around a pointer to one.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.spec import TensorSpec

# our name -> DLPack's (type code, bits): 0 int, 2 float, 4 bfloat
_CODES = {"fp32": (2, 32), "fp16": (2, 16), "bf16": (4, 16), "int32": (0, 32), "int8": (0, 8)}
_NAMES = {code: name for name, code in _CODES.items()}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

_NAME, _USED = b"dltensor", b"used_dltensor"  # a consumer renames what it has taken over
_alive: dict[int, tuple[Any, ...]] = {}  # managed tensor's address -> what must outlive it


class Imported:
    """Memory that belongs to another library's tensor; given back when this is collected."""

    def __init__(self, spec: TensorSpec, address: int, managed: Any) -> None:
        self.spec = spec
        self.address = address
        weakref.finalize(self, _give_back, managed)


def capsule(spec: TensorSpec, address: int, device: tuple[int, int], owner: object) -> Any:
    """A capsule over dense memory; `owner` lives as long as a consumer holds on to it."""
    code, bits = _CODES[spec.dtype]
    shape = (ctypes.c_int64 * len(spec.shape))(*spec.shape)
    tensor = _Tensor(address, *device, len(spec.shape), code, bits, 1, shape, None, 0)
    managed = _Managed(tensor, None, _forget_callback)
    key = ctypes.addressof(managed)
    _alive[key] = (managed, shape, owner)
    return _new(key, _NAME, ctypes.cast(_drop_callback, ctypes.c_void_p))


def imported(tensor: Any, name: str, device: tuple[int, int], stream: int | None) -> Imported:
    """Take over the memory of any object with `__dlpack__`, which must be dense and on `device`.

    Raises:
        InputError: It is not; the message says what it is.
    """
    found = tuple(int(part) for part in tensor.__dlpack_device__())
    if found != device:
        raise InputError(f"{name}: the tensor is on DLPack device {found}, expected {device}")
    box = tensor.__dlpack__() if stream is None else tensor.__dlpack__(stream=stream)
    managed = ctypes.cast(_pointer(box, _NAME), ctypes.POINTER(_Managed))
    inner = managed.contents.tensor
    shape = tuple(inner.shape[i] for i in range(inner.ndim))
    dtype = _NAMES.get((inner.code, inner.bits)) if inner.lanes == 1 else None
    if dtype is None:
        kind = f"code {inner.code}, {inner.bits} bits"
        raise InputError(f"{name}: DLPack dtype {kind}, expected {', '.join(_CODES)}")
    if inner.strides and not _dense(shape, [inner.strides[i] for i in range(inner.ndim)]):
        raise InputError(f"{name}: the tensor is not contiguous; pass tensor.contiguous()")
    _rename(box, _USED)
    return Imported(TensorSpec(name, dtype, shape), inner.data + inner.byte_offset, managed)


def _dense(shape: tuple[int, ...], strides: list[int]) -> bool:
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def _give_back(managed: Any) -> None:
    if managed.contents.deleter:
        managed.contents.deleter(managed)


def _forget(managed: Any) -> None:
    _alive.pop(ctypes.addressof(managed.contents), None)


_forget_callback = _Deleter(_forget)  # must outlive every capsule


_python = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _python)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _python)
)
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", _python)
)
# In a destructor the capsule has no references left: it must stay a bare pointer.
_is_named = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _python)
)
_bare_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _python)
)


def _drop_unused(box: int) -> None:
    """A capsule that nobody consumed is collected: forget its tensor."""
    if _is_named(box, _NAME):
        _alive.pop(_bare_pointer(box, _NAME), None)


_drop_callback = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_drop_unused)
