"""Launches kernels/paged_attention.cu and prefill_attention.cu. Contract: Backend.paged_attention."""

from typing import Any

from service.tensor.backend import StepArrays
from service.tensor.cuda.device import CudaDevice, address, require_shape

_SHARED_KIB = {
    "sm_75": 64,
    "sm_80": 163,
    "sm_87": 163,
    "sm_90a": 227,
}  # to a block; CUDA C++ guide, table 30
_LEAST_SHARED_KIB = 99  # of architectures since sm_80 that are not named
_DECODE_SHAPES = ((8, 32, 3), (8, 32, 2), (4, 32, 2), (4, 16, 2), (2, 16, 2))  # the first that fits
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
    decode, shared_bytes = _decode_shape(device.arch, heads // shapes["KV_HEADS"], head_dim)
    split = decode["WARPS"] * decode["TOKENS"]
    splits = max(1, -(-batch.block_tables.shape[1] * shapes["BLOCK_SIZE"] // split))
    # in a step with prefill rows, another kernel of the same layer may have written any shared block
    num_fresh = 2 if rows == len(batch.context_lens) else _ALL_FRESH
    partial = device.scratch("partial", (rows, heads, splits, head_dim + 2), 4) if splits > 1 else 0
    arrivals = device.scratch("arrivals", (rows, parts), 4, zeroed=True)
    kernel = device.kernel(
        "paged_attention",
        {**shapes, **decode},
        "ppppipfppipii",
        block=32 * decode["WARPS"],
        shared_bytes=shared_bytes,
    )
    blocks = device.num_multiprocessors * max(1, _shared_bytes_of(device.arch) // (shared_bytes + 1024))
    kernel(
        device.stream,
        (min(splits * parts * rows, blocks), 1, 1),
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
        rows,
    )


def _shared_bytes_of(arch: str) -> int:
    """What a block can have, nearly all that a multiprocessor has."""
    return 1024 * _SHARED_KIB.get(arch, _LEAST_SHARED_KIB)


def _decode_shape(arch: str, group: int, head_dim: int) -> tuple[dict[str, int], int]:
    """WARPS, TOKENS and UNITS of kernels/paged_attention.cu, and its shared memory in bytes."""
    row_bytes, heads = -(-head_dim // 64) * 128, min(group, 8)
    for warps, tokens, units in _DECODE_SHAPES:
        merge_bytes = warps * 4 * (16 + heads * (head_dim + 8))
        num_bytes = warps * units * tokens * row_bytes + merge_bytes
        if num_bytes + 1024 <= _shared_bytes_of(arch):
            break
    return {"WARPS": warps, "TOKENS": tokens, "UNITS": units}, num_bytes


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
