"""Weights of the CUDA backend, and how a product with few or many rows is launched."""

from dataclasses import dataclass
from typing import Any

from service.tensor.cuda.device import CudaDevice, address

_MAX_QUARTERED = 8192  # outputs; wider weights fill the GPU without cutting K
_SLICE = 128  # of kernels/slices.cuh
_WARPS, _STAGES = 16, 3  # of kernels/skinny_gemm.cuh
_TILE_STAGES = 4  # of kernels/tile_gemm.cuh


@dataclass(frozen=True, slots=True, eq=False)
class CudaLinear:
    """A weight as it lies in a checkpoint, in bfloat16, so that library and own kernels read the same."""

    weight: Any  # bfloat16 [out, in]
    bias: Any  # float32 [out] or None

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])

    @property
    def in_features(self) -> int:
        return int(self.weight.shape[1])

    @property
    def num_bytes(self) -> int:
        return int(self.weight.nbytes) + (0 if self.bias is None else int(self.bias.nbytes))

    @property
    def quarters(self) -> int:
        """Parts of K that are summed apart: by the weight's shape alone (kernels/slices.cuh)."""
        return 4 if self.out_features <= _MAX_QUARTERED else 1


@dataclass(frozen=True, slots=True)
class Product:
    """A launch of one of the decode products: kernels/skinny_gemm.cuh, or tile_gemm.cuh for many rows."""

    kernel: Any
    grid: tuple[int, int, int]
    is_skinny: bool


def decode_product(
    device: CudaDevice,
    name: str,
    linear: CudaLinear,
    rows: int,
    tiles: int,
    has_norm: bool,
    defines: dict[str, int],
    signatures: tuple[str, str],
) -> Product:
    """The kernel of `name` for this many rows. `signatures`: of its skinny and of its tile variant."""
    columns, quarters = linear.in_features, linear.quarters
    common = {"K": columns, "TILES": tiles, "QUARTERS": quarters, "NORM": int(has_norm), **defines}
    if rows <= 32:
        groups = 1 if rows <= 8 else 2 if rows <= 16 else 4
        shared_bytes = _skinny_shared_bytes(columns, tiles, groups, has_norm)
        kernel = device.kernel(
            name, {**common, "NT": groups}, signatures[0], block=512, shared_bytes=shared_bytes
        )
        return Product(kernel, (min(tiles, device.num_multiprocessors), 1, 1), True)
    depth = quarters if device.has_clusters else 1
    height, width = _tile_shape(device, rows, tiles, depth)
    kernel = device.kernel(
        name,
        {**common, "NT": 0, "MB": height, "NB": width},
        signatures[1],
        block=256,
        shared_bytes=_TILE_STAGES * (height + width) * 128,
        cluster_depth=depth,
    )
    return Product(kernel, (-(-tiles * 16 // height), -(-rows // width), depth), False)


def _tile_shape(device: CudaDevice, rows: int, tiles: int, depth: int) -> tuple[int, int]:
    """Large tiles read less; small ones keep all multiprocessors at work."""
    if rows <= 64:
        return 64, 64
    num_blocks = -(-tiles // 8) * -(-rows // 128) * depth
    return (128 if num_blocks >= 0.9 * device.num_multiprocessors else 64), 128


def _skinny_shared_bytes(columns: int, tiles: int, groups: int, has_norm: bool) -> int:
    """sizeof(Shared) of kernels/skinny_gemm.cuh."""
    slices = -(-columns // _SLICE)
    ring = _WARPS * _STAGES * 16 * 64 * 2
    partial = 2 * _WARPS * groups * 4 * 32 * 4
    square = (slices if has_norm else 1) * 8 * groups * 4
    held = 16 if tiles > 15 * 128 else tiles // 128 + 1
    sums = held * 64 * groups * 16 if slices > _WARPS else 16
    total = ring + partial + square + sums
    return -(-total // 128) * 128


def multiply_rows(
    device: CudaDevice, x: int, rows: int, linear: CudaLinear, out: int, *, adds: bool
) -> None:
    """out = x weight^T, or out += it, for rows of a prefill. Shapes: x [rows, in]; out [rows, out]."""
    device.multiply(
        address(linear.weight), x, out, linear.out_features, rows, linear.in_features, adds=adds
    )
