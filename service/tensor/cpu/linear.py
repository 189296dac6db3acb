"""Weights of the CPU backend and the product with them."""

from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from service.tensor.quantized import QuantizedWeight

Array = NDArray[Any]

_CHUNK = (
    1 << 20
)  # elements that are widened at a time from narrower types: 4 MiB of float32, inside the caches
_FEW_ROWS = 64


class CpuLinear:
    """A weight [out_features, in_features] as it lies in a checkpoint, maybe a memory map; or in INT8.

    For 4 to 64 rows BLAS multiplies faster from this side: weight @ x.T took 0.7 to 0.9 of the time of
    x @ weight.T (OpenBLAS 0.3.31, 2 cores, shapes of SmolLM2-135M). With more rows both are alike.
    """

    def __init__(
        self,
        weight: Array | QuantizedWeight,
        bias: Array | None,
        compute_dtype: Any,
        norm: Array | None = None,
    ) -> None:
        """`norm`: weight of the RMSNorm that an op applies before the product."""
        self.weight = weight
        self.bias = bias
        self.norm = norm
        self._compute_dtype = compute_dtype

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])

    @property
    def in_features(self) -> int:
        return int(self.weight.shape[1])

    @property
    def num_bytes(self) -> int:
        return int(self.weight.nbytes) + (0 if self.bias is None else int(self.bias.nbytes))

    def rows(self, ids: Array) -> Array:
        """Chosen rows of the weight, in the compute dtype: an embedding lookup."""
        return self._widened(self.weight[ids])

    def project(self, x: Array) -> Array:
        """x @ weight.T (+ bias). Shapes: x [rows, in]; result [rows, out], of any strides."""
        weight = self.weight
        if len(x) < _FEW_ROWS or isinstance(weight, QuantizedWeight) or weight.dtype != self._compute_dtype:
            return self.project_transposed(x).T
        out: Array = np.dot(x, weight.T)
        if self.bias is not None:
            out += self.bias
        return out

    def project_transposed(self, x: Array, num_outputs: int | None = None) -> Array:
        """weight @ x.T (+ bias). Shapes: x [rows, in]; result [out, rows], only the first `num_outputs`."""
        weight = self.weight[:num_outputs]
        if isinstance(weight, QuantizedWeight) or weight.dtype != self._compute_dtype:
            out = self._project_widened(weight, x)
        else:
            out = np.dot(weight, x.T)
        if self.bias is not None:
            out += self.bias[:num_outputs, None]
        return out

    def _widened(self, rows: Array | QuantizedWeight) -> Array:
        if isinstance(rows, QuantizedWeight):
            return rows.dequantize(self._compute_dtype)
        return rows.astype(self._compute_dtype, copy=False)

    def _project_widened(self, weight: Array | QuantizedWeight, x: Array) -> Array:
        out: Array = np.empty((len(weight), len(x)), self._compute_dtype)
        step = max(1, _CHUNK // weight.shape[1])
        for start in range(0, len(weight), step):
            np.dot(self._widened(weight[start : start + step]), x.T, out=out[start : start + step])
        return out


def storable(part: Array, storage_dtype: Any) -> Array:
    """`part` in the dtype it is kept in; itself where that is its own, so that a memory map stays one."""
    if storage_dtype == bfloat16 and part.dtype != bfloat16:
        return part.astype(np.float32, copy=False).astype(bfloat16)
    return part.astype(storage_dtype, copy=False)
