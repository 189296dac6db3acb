"""Brings INT8 weights into the layout of kernels/int8.cuh; quantises floats (kernels/pack_int8.cu)."""

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from service.errors import ModelError
from service.tensor.cuda.device import CudaDevice, address
from service.tensor.cuda.linear import CudaInt8Linear, packed_piece_bytes
from service.tensor.quantized import QuantizedWeight

INT8, BFLOAT16, FLOAT32 = 0, 1, 2  # SOURCE of the kernel


def pack_int8(
    device: CudaDevice,
    parts: Sequence[Any],
    bias: Any,
    norm: NDArray[Any] | None,
    pairs: int,
    group_size: int | None,
) -> CudaInt8Linear:
    """Arguments as those of Backend.linear; `bias` is on the device."""
    if isinstance(parts[0], QuantizedWeight):
        group_size = parts[0].group_size
        source, kind = _gather([part.values for part in parts], np.int8), INT8
        scales = _gather([part.scales for part in parts], np.float16)
    else:
        is_narrow = all(part.dtype == bfloat16 for part in parts)
        source = _gather(parts, bfloat16 if is_narrow else np.float32)
        kind, scales = (BFLOAT16 if is_narrow else FLOAT32), None
    assert group_size is not None
    outputs, inputs = source.shape
    pieces = -(-inputs // 128)
    tiles = -(-outputs // 128) * 2  # of 64 rows; kernels may read two at once
    packed = cupy.empty(tiles * pieces * packed_piece_bytes(group_size), np.uint8)
    kernel = device.kernel("pack_int8", pack_defines(inputs, group_size, kind), "ppiipp", block=256)
    arrays, is_bad = (address(source), address(scales)), cupy.zeros(1, np.int32)
    kernel(device.stream, (tiles, pieces, 1), *arrays, outputs, pairs, address(packed), address(is_bad))
    if int(is_bad[0]):
        raise ModelError(f"A weight of shape {[outputs, inputs]} holds NaN, infinity or values too large.")
    factors = None if norm is None else cupy.asarray(_in_order(norm, pieces))
    return CudaInt8Linear(packed, factors, bias, (outputs, inputs), group_size, pairs)


def pack_defines(inputs: int, group_size: int, source: int) -> dict[str, int]:
    """Of the kernel."""
    return {"K": inputs, "GROUP": group_size, "NORM": 0, "SOURCE": source}


def _gather(parts: Sequence[NDArray[Any]], dtype: Any) -> Any:
    """All rows on the device, in one array."""
    rows = sum(len(part) for part in parts)
    whole = cupy.empty((rows, parts[0].shape[1]), dtype)
    start = 0
    for part in parts:
        whole[start : start + len(part)].set(np.ascontiguousarray(part, dtype))
        start += len(part)
    return whole


def _in_order(norm: NDArray[Any], pieces: int) -> NDArray[Any]:
    """Shapes: norm [in]; result bfloat16 [pieces * 128]."""
    padded = np.zeros(pieces * 128, np.float32)
    padded[: len(norm)] = norm
    by_lane = padded.reshape(-1, 2, 2, 4, 2).transpose(
        0, 3, 1, 2, 4
    )  # 32 columns: product, half, lane, pair
    return np.ascontiguousarray(by_lane).astype(bfloat16)
