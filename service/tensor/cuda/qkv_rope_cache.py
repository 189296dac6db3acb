"""Launches kernels/qkv_rope_cache.cu and rope_cache.cu. Contract: Backend.qkv_rope_cache."""

from dataclasses import dataclass
from typing import Any

from service.tensor.backend import StepArrays
from service.tensor.cuda.device import CudaDevice, address, require_shape, rows_from
from service.tensor.cuda.linear import AnyLinear, RowLayout, decode_product, multiply_rows, num_own
from service.tensor.cuda.rms_norm import rms_norm


@dataclass(frozen=True, slots=True)
class _Stage:
    """Arguments of the op that all its launches share."""

    device: CudaDevice
    eps: float
    qkv: AnyLinear
    q_norm: Any
    k_norm: Any
    rope: Any
    k_cache: Any
    v_cache: Any

    def shapes(self, q: Any) -> dict[str, int]:
        """Defines of the kernels."""
        _, kv_heads, block_size, head_dim = self.k_cache.shape
        return {"HEADS": q.shape[1], "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size}


def qkv_rope_cache(
    device: CudaDevice,
    x: Any,
    eps: float,
    qkv: AnyLinear,
    q_norm: Any,
    k_norm: Any,
    rope: Any,
    batch: StepArrays,
    k_cache: Any,
    v_cache: Any,
    q: Any,
) -> None:
    rows, dim = x.shape
    require_shape("v_cache", v_cache, tuple(k_cache.shape))
    heads = q.shape[1] + 2 * k_cache.shape[1]
    require_shape("qkv", qkv, (heads * q.shape[2], dim))
    require_shape("positions", batch.positions, (rows,))
    require_shape("slot_mapping", batch.slot_mapping, (rows,))
    stage = _Stage(device, eps, qkv, q_norm, k_norm, rope, k_cache, v_cache)
    split = num_own(qkv, batch.num_decode, rows)
    if split:
        _decode(stage, x, split, batch.positions, batch.slot_mapping, q)
    if rows > split:
        rest = (rows_from(array, split) for array in (x, batch.positions, batch.slot_mapping, q))
        _prefill(stage, *rest)


def _decode(stage: _Stage, x: Any, rows: int, positions: Any, slots: Any, q: Any) -> None:
    device, qkv = stage.device, stage.qkv
    has_raw = stage.q_norm is not None
    shapes = stage.shapes(q)
    head_dim = shapes["HEAD_DIM"]
    layout = RowLayout(head_dim // 2, 8, head_dim // 16, head_dim, qkv.out_features // head_dim)
    raw = device.scratch("projected_few", (rows, qkv.out_features), 2) if has_raw else 0
    arrays = (qkv.bias, stage.rope, positions, slots, q, stage.k_cache, stage.v_cache)
    tail = (*map(address, arrays), raw)
    defines = {**shapes, "RAW": int(has_raw)}
    decode_product(
        device, "qkv_rope_cache", qkv, layout, address(x), rows, stage.eps, defines, "pppppppp", tail
    )
    if has_raw:
        _rotate(stage, raw, None, rows, positions, slots, q)


def _prefill(stage: _Stage, x: Any, positions: Any, slots: Any, q: Any) -> None:
    device, rows = stage.device, x.shape[0]
    normed = rms_norm(device, x, None, rows, None, stage.eps)
    raw = device.scratch("projected", (rows, stage.qkv.out_features), 2)
    multiply_rows(device, normed, rows, stage.qkv, raw, adds=False)
    _rotate(stage, raw, stage.qkv.bias, rows, positions, slots, q)


def _rotate(stage: _Stage, raw: int, bias: Any, rows: int, positions: Any, slots: Any, q: Any) -> None:
    shapes = stage.shapes(q)
    kernel = stage.device.kernel("rope_cache", shapes, "ppppfpppppp", block=256)
    grid = (rows, -(-(shapes["HEADS"] + 2 * shapes["KV_HEADS"]) // 16), 1)
    norms = map(address, (bias, stage.q_norm, stage.k_norm))
    arrays = (stage.rope, positions, slots, q, stage.k_cache, stage.v_cache)
    kernel(stage.device.stream, grid, raw, *norms, stage.eps, *map(address, arrays))
