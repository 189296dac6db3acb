"""Weights of the CUDA backend, and how a product with few or many rows is launched."""

from dataclasses import dataclass
from typing import Any

from service.tensor.cuda.device import CudaDevice, address

_MAX_QUARTERED = 8192  # outputs; wider weights fill the GPU without cutting K
_SLICE = 128  # of kernels/slices.cuh
_WARPS, _STAGES = 16, 3  # of kernels/skinny_gemm.cuh
_MULTIPROCESSORS = 132  # of an H200
_WIDE = 1 << 16  # outputs: of a head, not of a layer
ROW_TILE = 16  # weight rows; allocations are whole tiles


@dataclass(frozen=True, slots=True, eq=False)
class CudaLinear:
    """A weight in bfloat16, row-major, so that library and own kernels read the same.

    The weight of the RMSNorm before a projection has been multiplied into it.
    """

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
        """Parts of K that are summed apart: by the weight's shape alone."""
        return 4 if self.out_features <= _MAX_QUARTERED else 1


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Which weight rows make a tile of 16: 8, and the 8 that lie `half_stride` rows further.

    Tile t starts at row t % inner * tile_stride + t // inner * outer_stride. Strides count rows.
    """

    half_stride: int
    tile_stride: int
    inner: int
    outer_stride: int
    outer: int

    @property
    def num_tiles(self) -> int:
        return self.inner * self.outer


def plain_rows(outputs: int) -> RowLayout:
    """Sixteen rows in order."""
    tiles = -(-outputs // ROW_TILE)
    return RowLayout(8, ROW_TILE, tiles, ROW_TILE * tiles, 1)


def decode_product(
    device: CudaDevice,
    name: str,
    linear: CudaLinear,
    layout: RowLayout,
    x: int,
    rows: int,
    eps: float | None,
    defines: dict[str, int],
    signature: str,
    tail: tuple[Any, ...],
) -> None:
    """Launch kernels/<name>.cu on `rows` rows at address x. `eps`: of the RMSNorm before, or None.

    `signature` and `tail`: the arguments behind those that all products share.
    """
    columns, quarters = linear.in_features, linear.quarters
    common = {"K": columns, "TILES": layout.num_tiles, "QUARTERS": quarters, "NORM": int(eps is not None)}
    common |= defines
    weight, factor = address(linear.weight), 0.0 if eps is None else eps
    if device.has_warpgroups:
        _warpgroup_product(device, name, linear, layout, x, rows, factor, common, signature, tail)
    else:
        groups = 1 if rows <= 8 else 2 if rows <= 16 else 4
        shared_bytes = _skinny_shared_bytes(columns, layout.num_tiles, groups, eps is not None)
        variant = {**common, "WGS": 0, "NT": groups}
        kernel = device.kernel(name, variant, "pipf" + signature, block=512, shared_bytes=shared_bytes)
        grid = (min(layout.num_tiles, device.num_multiprocessors), -(-rows // (8 * groups)), 1)
        kernel(device.stream, grid, x, rows, weight, factor, *tail)


def _warpgroup_product(
    device: CudaDevice,
    name: str,
    linear: CudaLinear,
    layout: RowLayout,
    x: int,
    rows: int,
    eps: float,
    defines: dict[str, int],
    signature: str,
    tail: tuple[Any, ...],
) -> None:
    """kernels/warpgroup_gemm.cuh."""
    columns, quarters = linear.in_features, linear.quarters
    groups, width, stages = warpgroup_variant(rows, linear.out_features, columns, quarters)
    stage_bytes = (64 * groups + width) * 128
    box = 4 if layout.outer == 1 or layout.inner % 4 == 0 else 1
    row_bytes = 2 * columns
    sizes = (columns, 8, 2, layout.inner, layout.outer)
    strides = (1, layout.half_stride, layout.tile_stride, layout.outer_stride)
    weight_map = device.tensor_map(
        address(linear.weight), sizes, tuple(row_bytes * stride for stride in strides), (64, 8, 2, box, 1)
    )
    x_map = device.tensor_map(x, (columns, rows), (row_bytes,), (64, width))
    kernel = device.kernel(
        name,
        {**defines, "WGS": groups, "NB": width, "STAGES": stages, "BOX": box},
        "ttif" + signature,
        block=128 * groups + 32,
        shared_bytes=1024 + stages * (stage_bytes + 16),
        cluster_depth=quarters,
    )
    grid = (-(-layout.num_tiles // (4 * groups)), -(-rows // width), quarters)
    kernel(device.stream, grid, weight_map, x_map, rows, eps, *tail)


def warpgroup_variant(rows: int, outputs: int, columns: int, quarters: int) -> tuple[int, int, int]:
    """Warpgroups, rows of x to a block, and pieces under way: what was fastest on an H200.

    Few rows: as many blocks as multiprocessors or a multiple, and room left in shared memory for the first
    pieces of the next kernel. Many rows: large tiles, since they read less from the L2 cache.
    """
    width = next((size for size in (8, 16, 32, 64) if rows <= size), 128)
    is_whole, fills_once = quarters == 1, outputs <= 64 * 2 * _MULTIPROCESSORS
    if rows <= 64:
        groups = 2 if is_whole and fills_once else 1
        return groups, width, (7 if groups == 2 else 8) if width <= 32 else (5 if groups == 2 else 6)
    if rows > 128 and (outputs > _WIDE if is_whole else columns > 4096):
        return 2, 256, 4
    return (2, 128, 6) if is_whole or columns > 4096 else (1, 128, 4)


def _skinny_shared_bytes(columns: int, tiles: int, groups: int, has_norm: bool) -> int:
    """sizeof(Shared) of kernels/skinny_gemm.cuh."""
    slices = -(-columns // _SLICE)
    ring = _WARPS * _STAGES * 16 * 64 * 2
    partial = 2 * _WARPS * groups * 4 * 32 * 4
    square = (slices if has_norm else 1) * 8 * groups * 4
    held = 16 if tiles > 15 * 128 else tiles // 128 + 1
    sums = held * 64 * groups * 16 if slices > _WARPS else 16
    total = ring + partial + square + sums + 8 * groups * 20 * 4
    return -(-total // 128) * 128


def multiply_rows(
    device: CudaDevice, x: int, rows: int, linear: CudaLinear, out: int, *, adds: bool
) -> None:
    """out = x weight^T, or out += it, for rows of a prefill. Shapes: x [rows, in]; out [rows, out]."""
    device.multiply(
        address(linear.weight), x, out, linear.out_features, rows, linear.in_features, adds=adds
    )
