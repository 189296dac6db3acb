"""First stage of a layer. Contract: Backend.qkv_rope_cache in service/tensor/backend.py."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.tensor.backend import StepArrays
from service.tensor.cpu.linear import CpuLinear
from service.tensor.cpu.primitives import rms_norm, rotate

Array = NDArray[Any]


def qkv_rope_cache(
    x: Array,
    eps: float,
    qkv: CpuLinear,
    q_norm: Array | None,
    k_norm: Array | None,
    rope: Array,
    batch: StepArrays,
    k_cache: Array,
    v_cache: Array,
    q: Array,
) -> None:
    rows, heads, head_dim = q.shape
    kv_heads, block_size = k_cache.shape[1:3]
    projected = np.ascontiguousarray(qkv.project(rms_norm(x, qkv.norm, eps)))
    projected = projected.reshape(rows, heads + 2 * kv_heads, head_dim)
    qk, v = projected[:, : heads + kv_heads], projected[:, heads + kv_heads :]
    if q_norm is not None and k_norm is not None:
        qk[:, :heads] = rms_norm(qk[:, :heads], q_norm, eps)
        qk[:, heads:] = rms_norm(qk[:, heads:], k_norm, eps)
    rotate(qk, rope[batch.positions])
    q[...] = qk[:, :heads]
    block, offset = batch.slot_mapping // block_size, batch.slot_mapping % block_size
    k_cache[block, :, offset] = qk[:, heads:]
    v_cache[block, :, offset] = v
