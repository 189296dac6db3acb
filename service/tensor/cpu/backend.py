"""The NumPy backend: the numeric reference of every op, and what runs where there is no GPU."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.tensor.backend import StepArrays
from service.tensor.cpu.embed import embed
from service.tensor.cpu.gate_up_silu import gate_up_silu
from service.tensor.cpu.head_logits import head_logits
from service.tensor.cpu.linear import CpuLinear, storable
from service.tensor.cpu.linear_add import linear_add
from service.tensor.cpu.paged_attention import paged_attention
from service.tensor.cpu.qkv_rope_cache import qkv_rope_cache
from service.tensor.cpu.sample import sample
from service.tensor.cpu.scratch import Scratch
from service.tensor.quantized import QuantizedWeight, join, quantize

Array = NDArray[Any]


class CpuBackend:
    """Implements Backend (service/tensor/backend.py, where the contracts are).

    `dtype` is that of weights that are not in INT8, as they are kept: float32, bfloat16 (half the memory;
    each product widens the weight first, as with INT8) or float64 (to check others against). Arithmetic
    is in float32, or float64 with it.
    """

    device_name = "cpu"

    def __init__(self, dtype: Any = np.float32) -> None:
        self._storage_dtype = np.dtype(dtype)
        self.activation_dtype = np.dtype(np.float64 if self._storage_dtype == np.float64 else np.float32)
        self._scratch = Scratch()

    embed = staticmethod(embed)
    qkv_rope_cache = staticmethod(qkv_rope_cache)
    linear_add = staticmethod(linear_add)
    gate_up_silu = staticmethod(gate_up_silu)
    head_logits = staticmethod(head_logits)
    sample = staticmethod(sample)

    def paged_attention(
        self, q: Array, k_cache: Array, v_cache: Array, batch: StepArrays, scale: float, out: Array
    ) -> None:
        paged_attention(q, k_cache, v_cache, batch, scale, out, self._scratch)

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        return np.empty(shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        return np.zeros(shape, dtype)

    def vector(self, host: Array) -> Array:
        return host.astype(self.activation_dtype)

    def linear(
        self,
        parts: Sequence[Any],
        biases: Sequence[Array] | None = None,
        norm: Array | None = None,
        *,
        pairs: int = 8,
        group_size: int | None = None,
    ) -> CpuLinear:
        if group_size is not None and not isinstance(parts[0], QuantizedWeight):
            parts = [quantize(part, group_size) for part in parts]
        if isinstance(parts[0], QuantizedWeight):
            weight: Any = join(parts)
        else:
            kept = [storable(part, self._storage_dtype) for part in parts]
            weight = kept[0] if len(kept) == 1 else np.concatenate(kept)
        bias = None if biases is None else self.vector(np.concatenate(biases))
        return CpuLinear(weight, bias, self.activation_dtype, None if norm is None else self.vector(norm))
