"""The arithmetic of a decoder, as small pure functions: where a reader learns it.

They keep the floating dtype of their input: float32 in service, float64 when a kernel is checked.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """Divide every vector by its root mean square, then scale its components.

    Shapes: x [..., dim]; weight [dim], or None for ones.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4.
    """
    mean_square = np.einsum("...i,...i->...", x, x) / x.shape[-1]
    out: Array = x * (1.0 / np.sqrt(mean_square + eps))[..., None].astype(x.dtype)
    if weight is not None:
        out *= weight
    return out


def rotate(x: Array, table: Array) -> None:
    """Turn component pairs (i, i + head_dim / 2) of every head by their row's angles, in place.

    Shapes: x [rows, heads, head_dim]; table [rows, head_dim]: cosines, then sines.
    Source: Su et al. 2021, arXiv:2104.09864, eq. 34, in the half-rotated layout.
    """
    half = x.shape[-1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    first, second = x[..., :half], x[..., half:]
    turned = first * cos - second * sin
    second *= cos
    second += first * sin
    first[...] = turned


def silu(x: Array) -> None:
    """x / (1 + exp(-x)), in place. Source: Elfwing et al. 2017, arXiv:1702.03118."""
    denominator = np.negative(x)
    np.minimum(
        denominator, 80.0, out=denominator
    )  # exp(80) is finite in float32, and x / exp(80) is as good as 0
    np.exp(denominator, out=denominator)
    denominator += 1.0
    x /= denominator


def exp_shifted(scores: Array) -> Array:
    """exp(scores - max over the last axis), in place; returns the sums over the last axis.

    A softmax without its division, which is cheaper after the product with the values.
    """
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    sums: Array = scores.sum(axis=-1)
    return sums
