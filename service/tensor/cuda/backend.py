"""The CUDA backend: bfloat16 on one NVIDIA GPU, through CuPy and the kernels in kernels/."""

from collections.abc import Sequence
from math import prod
from typing import Any

import cupy
import numpy as np
from ml_dtypes import bfloat16

from service.tensor.backend import Array, HostArray, SampleArrays, SamplingArrays, StepArrays
from service.tensor.cuda.device import CudaDevice
from service.tensor.cuda.embed import embed
from service.tensor.cuda.gate_up_silu import gate_up_silu
from service.tensor.cuda.head_logits import head_logits
from service.tensor.cuda.linear import ROW_TILE, AnyLinear, CudaLinear
from service.tensor.cuda.linear_add import linear_add
from service.tensor.cuda.pack_int8 import pack_int8
from service.tensor.cuda.paged_attention import paged_attention
from service.tensor.cuda.qkv_rope_cache import qkv_rope_cache
from service.tensor.cuda.sample import sample
from service.tensor.quantized import QuantizedWeight

_CHUNK = 1 << 24  # elements that are sent in float32 at a time, to be rounded on the device


class CudaBackend:
    """Implements Backend (service/tensor/backend.py, where the contracts are).

    Decode rows take kernels whose sums have one order for every batch; prefill rows go through cuBLAS.
    """

    activation_dtype = np.dtype(bfloat16)

    def __init__(self, device: Any = None) -> None:
        """`device`: a CudaDevice; None: the current GPU."""
        self.device = CudaDevice() if device is None else device
        self.device_name = self.device.name
        self._num_decode = 0  # of the step that runs; `embed` begins one

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        return cupy.ndarray(tuple(shape), np.dtype(dtype))

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        array = self.empty(shape, dtype)
        cupy.cuda.runtime.memset(array.data.ptr, 0, array.nbytes)
        return array

    def vector(self, host: HostArray) -> Array:
        return cupy.asarray(host.astype(np.float32))

    def linear(
        self,
        parts: Sequence[Any],
        biases: Sequence[HostArray] | None = None,
        norm: HostArray | None = None,
        *,
        pairs: int = 8,
        group_size: int | None = None,
    ) -> AnyLinear:
        if group_size is not None or isinstance(parts[0], QuantizedWeight):
            bias = None if biases is None else self.vector(np.concatenate(biases))
            return pack_int8(self.device, parts, bias, norm, pairs, group_size)
        outputs = sum(part.shape[0] for part in parts)
        # whole tiles, since kernels read them as such
        weight = self.zeros((-(-outputs // ROW_TILE) * ROW_TILE, parts[0].shape[1]), bfloat16)[:outputs]
        factors = None if norm is None else self.vector(norm)
        start = 0
        for part in parts:
            _send(part, weight[start : start + len(part)], factors)
            start += len(part)
        bias = None if biases is None else self.vector(np.concatenate(biases))
        return CudaLinear(weight, bias)

    def embed(self, batch: StepArrays, table: AnyLinear, last_ids: Array, out: Array) -> None:
        self._num_decode = batch.num_decode
        embed(self.device, batch, table, last_ids, out)

    def qkv_rope_cache(
        self,
        x: Array,
        eps: float,
        qkv: AnyLinear,
        q_norm: Array | None,
        k_norm: Array | None,
        rope: Array,
        batch: StepArrays,
        k_cache: Array,
        v_cache: Array,
        q: Array,
    ) -> None:
        qkv_rope_cache(self.device, x, eps, qkv, q_norm, k_norm, rope, batch, k_cache, v_cache, q)

    def paged_attention(
        self, q: Array, k_cache: Array, v_cache: Array, batch: StepArrays, scale: float, out: Array
    ) -> None:
        paged_attention(self.device, q, k_cache, v_cache, batch, scale, out)

    def linear_add(self, x: Array, weight: AnyLinear, residual: Array) -> None:
        linear_add(self.device, x, weight, residual, min(self._num_decode, len(x)))

    def gate_up_silu(self, x: Array, eps: float, gate_up: AnyLinear, out: Array) -> None:
        gate_up_silu(self.device, x, eps, gate_up, out, min(self._num_decode, len(x)))

    def head_logits(
        self, x: Array, norm: Array, eps: float, head: AnyLinear, batch: StepArrays, out: Array
    ) -> None:
        head_logits(self.device, x, norm, eps, head, batch, out)

    def sample(
        self,
        logits: Array,
        sampling: SamplingArrays,
        batch: StepArrays,
        last_ids: Array,
        out: SampleArrays,
    ) -> None:
        sample(self.device, logits, sampling, batch, last_ids, out)


def _send(host: HostArray, target: Array, factors: Array | None) -> None:
    """Copy a weight to the device, multiplied by `factors` [in] and rounded to bfloat16 there."""
    if host.dtype == bfloat16 and factors is None:
        target.set(np.ascontiguousarray(host))
        return
    step = max(1, _CHUNK // max(1, prod(host.shape[1:])))
    for start in range(0, len(host), step):
        chunk = cupy.asarray(np.ascontiguousarray(host[start : start + step])).astype(np.float32)
        target[start : start + step] = (chunk if factors is None else chunk * factors).astype(bfloat16)
