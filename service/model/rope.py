"""Rotary position embedding: frequencies, and the table of cosines and sines that backends read."""

import math
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Frequencies of a model. The factors are those of kind "llama3"."""

    theta: float
    kind: Literal["default", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    divisors: tuple[float, ...] = ()  # of each frequency, where a checkpoint stores them (GGUF)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> NDArray[np.float64]:
    """Radians a position, for each of head_dim / 2 component pairs.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2; for "llama3" the scaling of Llama 3.1: long
        wavelengths are stretched by `factor`, short ones kept, those between blended linearly in the number
        of turns that the original context holds.
    """
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.divisors:
        return frequencies / np.array(rope.divisors, np.float64)
    if rope.kind == "default":
        return frequencies
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    scaled: NDArray[np.float64] = frequencies * (kept + (1.0 - kept) / rope.factor)
    return scaled


def rope_table(rope: RopeConfig, head_dim: int, max_positions: int) -> NDArray[np.float32]:
    """Cosines of all pairs, then sines. Shapes: float32 [max_positions, head_dim]; computed in float64."""
    angles = np.outer(np.arange(max_positions, dtype=np.float64), inverse_frequencies(rope, head_dim))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1, dtype=np.float32, casting="same_kind")
