"""INT8 weights: symmetric, with one scale for each group of a row. The formulas that every backend follows.

    scale = float16(max |w| of the group / 127)
    value = round half to even(w / scale), within -127 to 127
    w'    = value * scale

All of it in float32 but for the rounding of the scale. A weight is off by at most half a scale:
|w - w'| <= scale / 2 + 127 * 2^-25, where the second part is the rounding of scales below 2^-14, which
float16 holds with a fixed step. Source: Jacob et al. 2018, arXiv:1712.05877, section 2.1 (zero point 0).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import ModelError

Array = NDArray[Any]

GROUP_SIZES = (32, 64, 128)
_CHUNK = 1 << 22  # elements that are widened at a time


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight in INT8, on the host. Goes wherever Backend.linear takes a float array."""

    values: Array  # int8 [out, in]
    scales: Array  # float16 [out, ceil(in / group_size)]; a row's last group may be shorter
    group_size: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + self.scales.nbytes)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: Any) -> "QuantizedWeight":
        """Rows by a slice or by an array of ids."""
        return QuantizedWeight(self.values[rows], self.scales[rows], self.group_size)

    def dequantize(self, dtype: Any = np.float32) -> Array:
        """Shapes: [out, in] of `dtype`."""
        outputs, inputs = self.shape
        weight = np.empty((outputs, inputs), dtype)
        step = max(1, _CHUNK // max(inputs, 1))
        for start in range(0, outputs, step):
            rows = slice(start, start + step)
            factors = np.repeat(self.scales[rows].astype(dtype), self.group_size, axis=1)[:, :inputs]
            np.multiply(self.values[rows], factors, out=weight[rows])
        return weight


def quantize(weight: Array, group_size: int) -> QuantizedWeight:
    """Shapes: weight [out, in] of any float dtype.

    Raises: ModelError: a weight is not finite, or so large that its scale would be.
    """
    outputs, inputs = weight.shape
    groups = -(-inputs // group_size)
    values, scales = np.empty((outputs, inputs), np.int8), np.empty((outputs, groups), np.float16)
    step = max(1, _CHUNK // max(inputs, 1))
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        padded = np.zeros((len(weight[rows]), groups * group_size), np.float32)
        padded[:, :inputs] = weight[rows]
        grouped = padded.reshape(len(padded), groups, group_size)
        with np.errstate(over="ignore"):  # told below
            scales[rows] = np.abs(grouped).max(axis=2, initial=0) / np.float32(127)
        if not np.isfinite(scales[rows]).all():
            raise ModelError(
                f"A weight of shape {[outputs, inputs]} holds NaN, infinity or values too large."
            )
        divisors = scales[rows].astype(np.float32)[:, :, None]
        divisors = np.where(divisors == 0, np.float32(1), divisors)  # a group of zeros, or next to it
        rounded = np.clip(np.rint(grouped / divisors), -127, 127)
        rounded = np.where(scales[rows][:, :, None] == 0, 0, rounded)
        values[rows] = rounded.reshape(len(padded), -1)[:, :inputs]
    return QuantizedWeight(values, scales, group_size)


def join(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """The rows of all of them. They share a group size."""
    if len(parts) == 1:
        return parts[0]
    return QuantizedWeight(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.scales for part in parts]),
        parts[0].group_size,
    )
