"""Launches kernels/paged_attention.cu and prefill_attention.cu. Contract: Backend.paged_attention."""

from typing import Any

from service.tensor.backend import StepArrays
from service.tensor.cuda.device import CudaDevice, address, require_shape

SPLIT = 256  # tokens of context to a block; of kernels/paged_attention.cu
_TILE = 128  # (token, head) pairs to a block; of kernels/prefill_attention.cu
_ALL_FRESH = 1 << 30


def paged_attention(
    device: CudaDevice, q: Any, k_cache: Any, v_cache: Any, batch: StepArrays, scale: float, out: Any
) -> None:
    rows, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    require_shape("out", out, (rows, heads, head_dim))
    require_shape("v_cache", v_cache, tuple(k_cache.shape))
    shapes = {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size}
    if batch.num_decode:
        _decode(device, shapes, q, k_cache, v_cache, batch, scale, out)
    if rows > batch.num_decode:
        _prefill(device, shapes, q, k_cache, v_cache, batch, scale, out)


def _decode(
    device: CudaDevice,
    shapes: dict[str, int],
    q: Any,
    k_cache: Any,
    v_cache: Any,
    batch: StepArrays,
    scale: float,
    out: Any,
) -> None:
    rows, heads, head_dim = batch.num_decode, shapes["HEADS"], shapes["HEAD_DIM"]
    parts = shapes["KV_HEADS"] * -(-(heads // shapes["KV_HEADS"]) // 8)
    splits = max(1, -(-batch.block_tables.shape[1] * shapes["BLOCK_SIZE"] // SPLIT))
    # in a step with prefill rows, another kernel of the same layer may have written any shared block
    num_fresh = 2 if rows == len(batch.context_lens) else _ALL_FRESH
    partial = device.scratch("partial", (rows, heads, splits, head_dim + 2), 4) if splits > 1 else 0
    arrivals = device.scratch("arrivals", (rows, parts), 4, zeroed=True)
    kernel = device.kernel("paged_attention", shapes, "ppppipfppipi", block=256)
    kernel(
        device.stream,
        (splits, parts, rows),
        *map(address, (q, k_cache, v_cache)),
        int(batch.block_tables.data.ptr),
        batch.block_tables.strides[0] // 4,
        address(batch.context_lens),
        scale,
        address(out),
        partial,
        splits,
        arrivals,
        num_fresh,
    )


def _prefill(
    device: CudaDevice,
    shapes: dict[str, int],
    q: Any,
    k_cache: Any,
    v_cache: Any,
    batch: StepArrays,
    scale: float,
    out: Any,
) -> None:
    num_requests, kv_heads = len(batch.context_lens), shapes["KV_HEADS"]
    rows = q.shape[0] - batch.num_decode
    tile_tokens = _TILE // (shapes["HEADS"] // kv_heads)
    tiles = rows // tile_tokens + num_requests - batch.num_decode  # at least as many as there are
    row_bytes = -(-shapes["HEAD_DIM"] // 64) * 128
    kernel = device.kernel(
        "prefill_attention", shapes, "ppppppiiifp", block=256, shared_bytes=4 * 64 * row_bytes
    )
    kernel(
        device.stream,
        (tiles, kv_heads, 1),
        *map(address, (q, k_cache, v_cache, batch.row_starts, batch.context_lens)),
        int(batch.block_tables.data.ptr),
        batch.block_tables.strides[0] // 4,
        batch.num_decode,
        num_requests,
        scale,
        address(out),
    )
