"""Temporary arrays that outlive a call: the system hands out megabytes one page fault at a time."""

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Scratch:
    """One buffer a name, grown to the largest size asked for. Not for two threads at once."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """An array of unknown content, valid until the same name is asked for again."""
        num_bytes = prod(shape) * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._buffers[name] = np.empty(num_bytes, np.uint8)
        view: NDArray[Any] = buffer[:num_bytes].view(dtype).reshape(shape)
        return view
