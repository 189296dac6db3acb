"""What the ops of one GPU share: its kernels, scratch memory and stream."""

from collections.abc import Mapping
from math import prod
from typing import Any

import cupy

from service.errors import KernelError
from service.tensor.cuda.kernels import device_arch, load_kernel
from service.tensor.cuda.launch import CudaKernel


class CudaDevice:
    """The current GPU. Ops queue on CuPy's current stream of the calling thread, one thread at a time."""

    def __init__(self) -> None:
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self.name: str = properties["name"].decode()
        self.num_multiprocessors: int = properties["multiProcessorCount"]
        self.arch = device_arch()
        self.has_clusters = int(cupy.cuda.Device().compute_capability) >= 90
        self._kernels: dict[Any, CudaKernel] = {}
        self._scratch: dict[str, Any] = {}
        self._retired: list[Any] = []

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
            found = CudaKernel(load_kernel(name, defines, entry), signature, **options)
            self._kernels[key] = found
        return found

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


def require_shape(name: str, array: Any, shape: tuple[int, ...]) -> None:
    """Raise KernelError unless `array` has this shape."""
    if tuple(array.shape) != shape:
        raise KernelError(f"{name} has shape {tuple(array.shape)}, wanted {shape}")
