"""What the ops of one GPU share: its kernels, scratch memory and stream."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from math import prod
from pathlib import Path
from typing import Any

import cupy

from service.errors import KernelError
from service.tensor.cuda.cublas import Cublas
from service.tensor.cuda.kernels import KernelId, device_arch, load_module
from service.tensor.cuda.launch import CudaKernel, encode_tensor_map

_MAX_MAPS = 1 << 14
_COMPILERS = 16  # threads; NVRTC runs without Python's lock


class CudaDevice:
    """The current GPU. Ops queue on CuPy's current stream of the calling thread, one thread at a time."""

    def __init__(self, cubin_dirs: tuple[Path, ...] = ()) -> None:
        """`cubin_dirs`: where to look for kernels that `photoninfer compile` has left."""
        self._cubin_dirs = cubin_dirs
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self.name: str = properties["name"].decode()
        self.num_multiprocessors: int = properties["multiProcessorCount"]
        self.arch = device_arch()
        self.has_warpgroups = self.arch == "sm_90a"
        self._kernels: dict[Any, CudaKernel] = {}
        self._scratch: dict[str, Any] = {}
        self._retired: list[Any] = []
        self._cublas: Cublas | None = None
        self._maps: dict[Any, bytes] = {}

    @property
    def stream(self) -> int:
        return int(cupy.cuda.get_current_stream().ptr)

    def kernel(
        self,
        name: str,
        defines: Mapping[str, int],
        signature: str,
        *,
        entry: str | None = None,
        **options: Any,
    ) -> CudaKernel:
        """A kernel of kernels/<name>.cu, compiled at first use. `options`: those of CudaKernel."""
        key = (name, entry, tuple(defines.items()))
        found = self._kernels.get(key)
        if found is None:
            module = load_module(KernelId(name, tuple(defines.items())), self._cubin_dirs)
            found = CudaKernel(module.get_function(entry or name), signature, **options)
            self._kernels[key] = found
        return found

    def prepare(self, kernels: Iterable[KernelId], progress: Callable[[int, int], None]) -> None:
        """Compile kernels side by side, or load them from CuPy's cache. `progress`: (done, all).

        Raises: KernelError with the compiler's log.
        """
        wanted = list(dict.fromkeys(kernels))
        number = cupy.cuda.Device().id

        def compile_one(kernel: KernelId) -> None:
            cupy.cuda.Device(number).use()
            load_module(kernel, self._cubin_dirs)

        with ThreadPoolExecutor(_COMPILERS, thread_name_prefix="compile") as pool:
            for done, future in enumerate(as_completed([pool.submit(compile_one, k) for k in wanted]), 1):
                future.result()
                progress(done, len(wanted))

    def tensor_map(
        self, base: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
    ) -> bytes:
        """A CUtensorMap of bfloat16 with 128-byte swizzle, for kernels/warpgroup_gemm.cuh.

        `sizes` and `box`: elements, from the innermost dimension; `strides`: bytes, of all but that one.
        """
        key = (base, sizes, strides, box)
        found = self._maps.get(key)
        if found is None:
            if len(self._maps) >= _MAX_MAPS:
                self._maps.clear()
            found = self._maps[key] = encode_tensor_map(*key)
        return found

    def multiply(
        self, weight: int, x: int, out: int, outputs: int, rows: int, inputs: int, *, adds: bool
    ) -> None:
        """out = x weight^T, or out += it, through cuBLAS. Addresses of row-major bfloat16 matrices."""
        if self._cublas is None:
            self._cublas = Cublas()
        self._cublas.multiply(self.stream, weight, x, out, outputs, rows, inputs, adds=adds)

    def scratch(self, name: str, shape: tuple[int, ...], itemsize: int, *, zeroed: bool = False) -> int:
        """The address of temporary memory, valid until the same name is asked for again.

        Memory that was outgrown is kept: a captured graph may still use it.
        """
        num_bytes = max(prod(shape) * itemsize, 16)
        buffer = self._scratch.get(name)
        if buffer is None or buffer.nbytes < num_bytes:
            if buffer is not None:
                self._retired.append(buffer)
            buffer = (cupy.zeros if zeroed else cupy.empty)(num_bytes, "uint8")
            self._scratch[name] = buffer
        return int(buffer.data.ptr)


def address(array: Any) -> int:
    """Where a contiguous array lies on the device; 0 for None."""
    if array is None:
        return 0
    if not array.flags.c_contiguous:
        raise KernelError(f"an array of shape {array.shape} is not contiguous (strides {array.strides})")
    return int(array.data.ptr)


def rows_from(array: Any, start: int) -> Any:
    """`array[start:]`, without the time that a slice takes where it is all of it."""
    return array[start:] if start else array


def require_shape(name: str, array: Any, shape: tuple[int, ...]) -> None:
    """Raise KernelError unless `array` has this shape."""
    if tuple(array.shape) != shape:
        raise KernelError(f"{name} has shape {tuple(array.shape)}, wanted {shape}")
