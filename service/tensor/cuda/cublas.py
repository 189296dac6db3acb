"""The one product of cuBLAS that prefill needs, called directly: CuPy refuses it while a graph is captured.

Source: cuBLAS documentation, cublasGemmEx and cublasSetWorkspace.
"""

import ctypes
from importlib import import_module
from typing import Any

import cupy
import numpy as np

from service.errors import EngineDeadError

_BFLOAT16, _COMPUTE_FLOAT32, _DEFAULT_ALGORITHM = 14, 68, -1  # cudaDataType, cublasComputeType_t, gemm algo
_PLAIN, _TRANSPOSED = 0, 1
_SUM_IN_FLOAT32 = 16  # cublasMath_t: parts of a split sum are not added in bfloat16
_WORKSPACE_BYTES = 32 << 20  # what cuBLAS advises for sm_90; its own may not be used in a captured graph
_FACTORS = np.array([1, 0], np.float32)  # alpha and beta, read on the host


class Cublas:
    """A handle of its own, made at first use. Not for two threads at once."""

    def __init__(self) -> None:
        library = import_module("cuda.pathfinder").load_nvidia_dynamic_lib("cublas")
        self._library = ctypes.CDLL(library.abs_path)
        self._gemm = self._library.cublasGemmEx
        pointer: Any = ctypes.c_void_p
        integer: Any = ctypes.c_int
        matrix = [pointer, integer, integer]
        self._gemm.argtypes = [pointer, *[integer] * 5, pointer, *matrix, *matrix, pointer, *matrix]
        self._gemm.argtypes += [integer, integer]
        self._handle = pointer()
        _check(self._library.cublasCreate_v2(ctypes.byref(self._handle)))
        _check(self._library.cublasSetMathMode(self._handle, _SUM_IN_FLOAT32))
        self._workspace = cupy.empty(_WORKSPACE_BYTES, np.uint8)
        self._stream: int | None = None

    def multiply(
        self,
        stream: int,
        weight: int,
        x: int,
        out: int,
        outputs: int,
        rows: int,
        inputs: int,
        *,
        adds: bool,
    ) -> None:
        """out = x weight^T, or out += it. Addresses of row-major bfloat16 matrices.

        Shapes: weight [outputs, inputs]; x [rows, inputs]; out [rows, outputs].
        """
        if stream != self._stream:
            self._use(stream)
        one = _FACTORS.ctypes.data
        product: tuple[Any, ...] = (self._handle, _TRANSPOSED, _PLAIN, outputs, rows, inputs, one)
        product += (weight, _BFLOAT16, inputs, x, _BFLOAT16, inputs, one if adds else one + 4)
        _check(self._gemm(*product, out, _BFLOAT16, outputs, _COMPUTE_FLOAT32, _DEFAULT_ALGORITHM))

    def _use(self, stream: int) -> None:
        library, memory = self._library, ctypes.c_void_p(self._workspace.data.ptr)
        _check(library.cublasSetStream_v2(self._handle, ctypes.c_void_p(stream)))
        _check(library.cublasSetWorkspace_v2(self._handle, memory, ctypes.c_size_t(_WORKSPACE_BYTES)))
        self._stream = stream


def _check(status: int) -> None:
    if status:
        raise EngineDeadError(f"cuBLAS failed with status {status}")
