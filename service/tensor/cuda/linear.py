"""Weights of the CUDA backend, and how a product with few or many rows is launched."""

from dataclasses import dataclass
from typing import Any

from service.tensor.cuda.device import CudaDevice, address

_MAX_PARTED = 8192  # outputs; wider weights fill the GPU without cutting K
_SLICE = 128  # of kernels/slices.cuh
_WARPS, _STAGES = 16, 3  # of kernels/skinny_gemm.cuh
_MULTIPROCESSORS = 132  # of an H200
_WIDE = 1 << 16  # outputs: of a head, not of a layer
ROW_TILE = 16  # weight rows; allocations are whole tiles
MAX_OWN_PREFILL = 256  # rows of an INT8 product that are not worth a weight in bfloat16


@dataclass(frozen=True, slots=True, eq=False)
class CudaLinear:
    """A weight in bfloat16, row-major, so that library and own kernels read the same.

    The weight of the RMSNorm before a projection has been multiplied into it.
    """

    weight: Any  # bfloat16 [out, in]
    bias: Any  # float32 [out] or None

    group_size = 0  # of kernels: no scales

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.weight.shape[0]), int(self.weight.shape[1])

    @property
    def out_features(self) -> int:
        return self.shape[0]

    @property
    def in_features(self) -> int:
        return self.shape[1]

    @property
    def num_bytes(self) -> int:
        return int(self.weight.nbytes) + (0 if self.bias is None else int(self.bias.nbytes))


@dataclass(frozen=True, slots=True, eq=False)
class CudaInt8Linear:
    """A weight in INT8, in the layout of kernels/int8.cuh."""

    packed: Any  # uint8
    norm: Any  # bfloat16, in the order of kernels/int8.cuh: of the RMSNorm before the projection; or None
    bias: Any  # float32 [out] or None
    shape: tuple[int, int]  # out, in
    group_size: int
    pairs: int  # as Backend.linear

    @property
    def out_features(self) -> int:
        return self.shape[0]

    @property
    def in_features(self) -> int:
        return self.shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(int(array.nbytes) for array in (self.packed, self.norm, self.bias) if array is not None)


AnyLinear = CudaLinear | CudaInt8Linear


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


def num_own(linear: AnyLinear, num_decode: int, rows: int) -> int:
    """How many leading rows of a step take our own product; cuBLAS takes the others.

    Decode rows, and a short prefill where cuBLAS would need the weight in bfloat16 first. Whether a prefill
    is short does not depend on the decode rows beside it.
    """
    is_short = linear.group_size > 0 and rows - num_decode <= MAX_OWN_PREFILL
    return rows if is_short else min(num_decode, rows)


def decode_product(
    device: CudaDevice,
    name: str,
    linear: AnyLinear,
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
    common = {"K": linear.in_features, "TILES": layout.num_tiles, "PARTS": _parts(linear)}
    common |= {"NORM": int(eps is not None), "GROUP": linear.group_size, **defines}
    product = _Product(device, name, linear, layout, x, rows, eps or 0.0, common, signature, tail)
    if device.has_warpgroups:
        _warpgroup_product(product)
    else:
        _skinny_product(product)


@dataclass(frozen=True, slots=True)
class _Product:
    """What both families of kernels need."""

    device: CudaDevice
    name: str
    linear: AnyLinear
    layout: RowLayout
    x: int
    rows: int
    eps: float
    defines: dict[str, int]
    signature: str
    tail: tuple[Any, ...]


def _parts(linear: AnyLinear) -> int:
    """Parts of K that are summed apart: by the weight's shape alone."""
    return 4 if linear.out_features <= _MAX_PARTED else 1


def _skinny_product(product: _Product) -> None:
    """kernels/skinny_gemm.cuh."""
    device, linear, tiles = product.device, product.linear, product.layout.num_tiles
    groups = 1 if product.rows <= 8 else 2 if product.rows <= 16 or linear.group_size else 4
    if isinstance(linear, CudaInt8Linear):
        weight: tuple[int, ...] = (address(linear.packed), address(linear.norm))
        kinds = "pp"
    else:
        weight, kinds = (address(linear.weight),), "p"
    kernel = device.kernel(
        product.name,
        {**product.defines, "WGS": 0, "NT": groups},
        kinds + "pif" + product.signature,
        block=512,
        shared_bytes=_skinny_shared_bytes(linear, tiles, groups, bool(product.defines["NORM"])),
    )
    grid = (min(tiles, device.num_multiprocessors), -(-product.rows // (8 * groups)), 1)
    kernel(device.stream, grid, *weight, product.x, product.rows, product.eps, *product.tail)


def _warpgroup_product(product: _Product) -> None:
    """kernels/warpgroup_gemm.cuh."""
    device, linear, rows = product.device, product.linear, product.rows
    columns, parts, tiles = linear.in_features, _parts(linear), product.layout.num_tiles
    variant = warpgroup_variant(rows, linear.out_features, columns, parts, linear.group_size)
    groups, width, stages = variant
    defines = {**product.defines, "WGS": groups, "NB": width, "STAGES": stages}
    if isinstance(linear, CudaInt8Linear):
        weight: tuple[Any, ...] = (address(linear.packed), address(linear.norm))
        kinds = "pp"
        stage_bytes = -(-(width * 256 + packed_piece_bytes(linear.group_size)) // 1024) * 1024
        pieces = -(-columns // _SLICE)  # of a block: of its part of the norm's weight
        more_bytes = 256 * -(-pieces // parts) if defines["NORM"] else 0
    else:
        box = 4 if product.layout.outer == 1 or product.layout.inner % 4 == 0 else 1
        weight, kinds = (_weight_map(device, linear, product.layout, box),), "t"
        defines["BOX"] = box
        stage_bytes, more_bytes = (64 * groups + width) * 128, 0
    x_map = device.tensor_map(product.x, (columns, rows), (2 * columns,), (64, width))
    kernel = device.kernel(
        product.name,
        defines,
        kinds + "tif" + product.signature,
        block=128 * groups + 32,
        shared_bytes=1024 + stages * (stage_bytes + 32) + more_bytes,
        cluster_depth=parts,
    )
    tiles_of_block = 4 if linear.group_size else 4 * groups
    grid = (-(-tiles // tiles_of_block), -(-rows // width), parts)
    kernel(device.stream, grid, *weight, x_map, rows, product.eps, *product.tail)


def _weight_map(device: CudaDevice, linear: CudaLinear, layout: RowLayout, box: int) -> bytes:
    row_bytes = 2 * linear.in_features
    sizes = (linear.in_features, 8, 2, layout.inner, layout.outer)
    strides = (1, layout.half_stride, layout.tile_stride, layout.outer_stride)
    byte_strides = tuple(row_bytes * stride for stride in strides)
    return device.tensor_map(address(linear.weight), sizes, byte_strides, (64, 8, 2, box, 1))


def packed_piece_bytes(group_size: int) -> int:
    """Of 64 rows and 128 columns in the layout of kernels/int8.cuh."""
    return 64 * 128 + 128 * (128 // group_size)


def warpgroup_variant(
    rows: int, outputs: int, columns: int, parts: int, group_size: int
) -> tuple[int, int, int]:
    """Warpgroups, rows of x to a block, and pieces under way: what was fastest on an H200.

    Few rows: as many blocks as multiprocessors or a multiple, and room left in shared memory for the first
    pieces of the next kernel. Many rows: large tiles, since they read less from the L2 cache.
    """
    is_whole, fills_once = parts == 1, outputs <= 64 * 2 * _MULTIPROCESSORS
    if group_size:
        width = next((size for size in (8, 16, 32) if rows <= size), 64)
        pieces = -(-columns // _SLICE)
        return 2, width, min(6 if width <= 16 else 4, -(-pieces // parts // 2) * 2)
    width = next((size for size in (8, 16, 32, 64) if rows <= size), 128)
    if rows <= 64:
        groups = 2 if is_whole and fills_once else 1
        return groups, width, (7 if groups == 2 else 8) if width <= 32 else (5 if groups == 2 else 6)
    if rows > 128 and (outputs > _WIDE if is_whole else columns > 4096):
        return 2, 256, 4
    return (2, 128, 6) if is_whole or columns > 4096 else (1, 128, 4)


def _skinny_shared_bytes(linear: AnyLinear, tiles: int, groups: int, has_norm: bool) -> int:
    """sizeof(Shared) of kernels/skinny_gemm.cuh."""
    slices = -(-linear.in_features // _SLICE)
    scales = 32 * (128 // linear.group_size) if linear.group_size else 0
    ring = _WARPS * _STAGES * (16 * 64 * 2 + scales)
    partial = 2 * _WARPS * groups * 4 * 32 * 4
    square = (slices if has_norm else 1) * 8 * groups * 4
    held = 16 if tiles > 15 * 128 else tiles // 128 + 1
    sums = held * 64 * groups * 16 if slices > _WARPS else 16
    total = ring + partial + square + sums + 8 * groups * 20 * 4
    return -(-total // 128) * 128


def multiply_rows(
    device: CudaDevice, x: int, rows: int, linear: AnyLinear, out: int, *, adds: bool
) -> None:
    """out = x weight^T, or out += it, for rows of a prefill. Shapes: x [rows, in]; out [rows, out]."""
    if isinstance(linear, CudaInt8Linear):
        weight = device.scratch("unpacked", linear.shape, 2)
        unpack(device, linear, weight)
    else:
        weight = address(linear.weight)
    device.multiply(weight, x, out, linear.out_features, rows, linear.in_features, adds=adds)


def unpack(device: CudaDevice, linear: CudaInt8Linear, out: int) -> None:
    """kernels/unpack_int8.cu. Shapes: out bfloat16 [out, in]."""
    outputs, inputs = linear.shape
    defines = {"K": inputs, "GROUP": linear.group_size, "NORM": int(linear.norm is not None)}
    kernel = device.kernel("unpack_int8", defines, "ppiip", block=256)
    grid = (-(-outputs // 64), -(-inputs // _SLICE), 1)
    arrays = (address(linear.packed), address(linear.norm))
    kernel(device.stream, grid, *arrays, outputs, linear.pairs, out)
