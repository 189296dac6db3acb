"""Launches of compiled kernels, with what CuPy's launcher lacks: programmatic dependence and clusters.

Source: CUDA driver API, cuLaunchKernelEx; CUDA programming guide, "Programmatic dependent launch".
"""

import ctypes
import struct
from importlib import import_module
from typing import Any

from service.errors import EngineDeadError, KernelError

Grid = tuple[int, int, int]

# pointer, int, float, tensor map; multiples of 8 bytes, as they lie in the buffer
_SLOTS = {"p": "Q", "i": "i4x", "f": "f4x", "t": "128s"}
_MAX_CONFIGS = 512


def encode_tensor_map(
    base: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    """128 bytes that describe a bfloat16 array to the tensor memory accelerator.

    Raises: KernelError: the driver refuses the shape.
    """
    driver = import_module("cuda.bindings.driver")
    status, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        len(sizes),
        base,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise KernelError(f"no tensor map of sizes {sizes}, strides {strides}, box {box}: {status!r}")
    return ctypes.string_at(encoded.getPtr(), 128)


class CudaKernel:
    """One compiled kernel and how it is launched. Not for two threads at once."""

    def __init__(
        self,
        kernel: Any,
        signature: str,
        *,
        block: int,
        shared_bytes: int = 0,
        is_dependent: bool = True,
        cluster_depth: int = 1,
    ) -> None:
        """`signature`: a letter an argument: p, i, f, t, or a struct of so many pointers, such as `4p`.

        `is_dependent`: it may start before the kernel before has ended; it must then wait for that itself.
        """
        self._driver = import_module("cuda.bindings.driver")
        self._function = self._driver.CUfunction(kernel.kernel.ptr)
        self._keep_alive = kernel
        self._block = block
        self._shared_bytes = shared_bytes
        if shared_bytes > 48 * 1024:
            kernel.max_dynamic_shared_size_bytes = shared_bytes
        self._attributes = self._launch_attributes(is_dependent, cluster_depth)
        self._configs: dict[tuple[Grid, int], Any] = {}
        self._make_buffer(signature)

    def _make_buffer(self, signature: str) -> None:
        """Arguments lie in one buffer that is packed anew for each launch; the driver copies from it."""
        layout, offsets, count = "", [], ""
        for letter in signature:
            if letter.isdigit():
                count += letter
                continue
            offsets.append(struct.calcsize("<" + layout))
            layout += f"{count}Q" if count else _SLOTS[letter]
            count = ""
        self._layout = struct.Struct("<" + layout)
        self._buffer = ctypes.create_string_buffer(self._layout.size)
        base = ctypes.addressof(self._buffer)
        self._pointers = (ctypes.c_void_p * len(offsets))(*(base + offset for offset in offsets))
        self._parameters = ctypes.addressof(self._pointers)

    def _launch_attributes(self, is_dependent: bool, cluster_depth: int) -> list[Any]:
        driver, attributes = self._driver, []
        kinds = driver.CUlaunchAttributeID
        if is_dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if cluster_depth > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x = attribute.value.clusterDim.y = 1
            attribute.value.clusterDim.z = cluster_depth
            attributes.append(attribute)
        return attributes

    def __call__(self, stream: int, grid: Grid, *arguments: Any) -> None:
        """Queue a launch. `arguments`: numbers and addresses; structs as their members.

        Raises: EngineDeadError: a launch that the driver refuses means a device that has failed.
        """
        config = self._configs.get((grid, stream)) or self._new_config(grid, stream)
        self._layout.pack_into(self._buffer, 0, *arguments)
        (status,) = self._driver.cuLaunchKernelEx(config, self._function, self._parameters, 0)
        if status:
            name = self._keep_alive.name
            raise EngineDeadError(f"The GPU refused kernel {name} with grid {grid}: {status!r}")

    def _new_config(self, grid: Grid, stream: int) -> Any:
        if len(self._configs) >= _MAX_CONFIGS:
            self._configs.clear()
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self._block, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = self._driver.CUstream(stream)
        config.attrs = self._attributes
        config.numAttrs = len(self._attributes)
        self._configs[grid, stream] = config
        return config
