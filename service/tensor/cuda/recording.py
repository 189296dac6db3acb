"""A CUDA backend that runs nothing and notes which kernels it would launch; works without a GPU.

What a step launches is decided in one place, by the ops themselves: to list the kernels of a model, a step
is run over arrays that have a shape and no memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from service.tensor.backend import Array, HostArray
from service.tensor.cuda.backend import CudaBackend
from service.tensor.cuda.kernels import KernelId
from service.tensor.cuda.linear import AnyLinear, CudaInt8Linear, CudaLinear
from service.tensor.cuda.pack_int8 import BFLOAT16, FLOAT32, INT8, pack_defines

_INT32 = np.dtype(np.int32)
# of the cards most used: T4, A100, RTX 40 and L4, H100 and H200
_MULTIPROCESSORS = {"sm_75": 40, "sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90a": 132, "sm_120": 170}


@dataclass(frozen=True, slots=True)
class _Flags:
    c_contiguous: bool = True


@dataclass(frozen=True, slots=True)
class _NoMemory:
    ptr: int = 0


@dataclass(frozen=True, slots=True)
class Phantom:
    """Looks like a contiguous device array."""

    shape: tuple[int, ...]
    dtype: Any = _INT32
    flags: _Flags = _Flags()
    data: _NoMemory = _NoMemory()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> "Phantom":
        return Phantom((len(range(*rows.indices(self.shape[0]))), *self.shape[1:]), self.dtype)

    def reshape(self, rows: int, _: int) -> "Phantom":
        """Of the one form that is used: [rows, all the rest]."""
        return Phantom((rows, prod(self.shape) // max(rows, 1)), self.dtype)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * int(self.dtype.itemsize)

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(prod(self.shape[i + 1 :]) * int(self.dtype.itemsize) for i in range(len(self.shape)))


class RecordingDevice:
    """Stands in for CudaDevice. `arch`: an NVRTC target such as "sm_90a"."""

    stream = 0
    name = "none"

    def __init__(self, arch: str, num_multiprocessors: int | None = None) -> None:
        self.arch = arch
        self.num_multiprocessors = num_multiprocessors or _MULTIPROCESSORS.get(arch, 108)
        self.has_warpgroups = arch == "sm_90a"
        self.kernels: dict[KernelId, None] = {}  # in order of first use

    def kernel(
        self,
        name: str,
        defines: Mapping[str, int],
        signature: str,
        *,
        entry: str | None = None,
        **options: Any,
    ) -> Any:
        self.kernels[KernelId(name, tuple(defines.items()))] = None
        return lambda *arguments: None

    def scratch(self, name: str, shape: tuple[int, ...], itemsize: int, *, zeroed: bool = False) -> int:
        return 0

    def tensor_map(self, *arguments: Any) -> bytes:
        return b""

    def multiply(self, *arguments: Any, **options: Any) -> None:
        """The library's product needs no kernel of ours."""


class RecordingBackend(CudaBackend):
    """Ops of CudaBackend over phantoms."""

    def __init__(self, device: RecordingDevice) -> None:
        super().__init__(device)

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        return Phantom(tuple(shape), np.dtype(dtype))

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        return self.empty(shape, dtype)

    def vector(self, host: HostArray) -> Array:
        return self.empty(host.shape, np.float32)

    def linear(
        self,
        parts: Sequence[Any],
        biases: Sequence[Any] | None = None,
        norm: Any = None,
        *,
        pairs: int = 8,
        group_size: int | None = None,
    ) -> AnyLinear:
        outputs, inputs = sum(len(part) for part in parts), parts[0].shape[1]
        bias = None if biases is None else self.empty((outputs,), np.float32)
        own_size = getattr(parts[0], "group_size", None)
        group_size = own_size or group_size
        if group_size is not None:
            for source in (INT8,) if own_size else (BFLOAT16, FLOAT32):
                self.device.kernel("pack_int8", pack_defines(inputs, group_size, source), "")
            packed, factors = self.empty((1,), np.uint8), None if norm is None else self.vector(norm)
            return CudaInt8Linear(packed, factors, bias, (outputs, inputs), group_size, pairs)
        return CudaLinear(self.empty((outputs, inputs), bfloat16), bias)
