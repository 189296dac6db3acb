"""Reads a safetensors file through a memory map, after checking every byte of its header.

Source: the format's description in the safetensors repository: 8 bytes of header length, little-endian; a
JSON object from names to dtype, shape and data_offsets; the data.
"""

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from service.errors import ModelError

_FLOATS: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": bfloat16}
_DTYPES: dict[str, Any] = {**_FLOATS, "I8": np.int8, "I32": np.int32, "I64": np.int64}
_MAX_HEADER = 100_000_000
_LFS_POINTER = b"version https://git-lfs"


class SafetensorsFile:
    """Tensors of one file. The file is mapped, not read: pages come in when they are used.

    Raises: ModelError (on construction) naming file, tensor, found and wanted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.num_bytes = path.stat().st_size
            header, self._data_start = self._read_header()
        except OSError as error:
            raise ModelError(f"{path} can't be read: {error.strerror}.") from None
        self._entries = {
            name: self._check(name, entry) for name, entry in header.items() if name != "__metadata__"
        }
        self._check_layout()
        self._map: NDArray[np.uint8] | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, (_, shape, _, _) in self._entries.items()}

    def check_dtypes(self, names: set[str], quantized: set[str] | None = None) -> None:
        """Refuse dtypes that the model can't be loaded from, for those tensors that it needs.

        `quantized`: the names of those that make up INT8 weights.
        """
        for name in names & self._entries.keys():
            dtype = self._entries[name][0]
            allowed = _DTYPES if quantized and name in quantized else _FLOATS
            if dtype not in allowed:
                raise ModelError(
                    f"{self.path}: the tensor {name} is {dtype}; {', '.join(allowed)} are supported."
                )

    def tensor(self, name: str, content: NDArray[np.uint8] | None = None) -> NDArray[Any]:
        """A view of the map, or of the whole file's `content` if given; a copy where the file stores the
        tensor unaligned."""
        dtype, shape, start, end = self._entries[name]
        if content is None:
            if self._map is None:
                self._map = np.memmap(self.path, np.uint8, mode="r")
            content = self._map
        numpy_dtype = np.dtype(_DTYPES[dtype])
        raw = content[start:end]
        if start % numpy_dtype.itemsize:
            raw = raw.copy()
        tensor: NDArray[Any] = np.asarray(raw).view(numpy_dtype).reshape(shape)
        return tensor

    def _read_header(self) -> tuple[dict[str, Any], int]:
        with self.path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
            if start == _LFS_POINTER:
                raise ModelError(
                    f"{self.path} is a Git LFS pointer, not the weights: run `git lfs pull` there."
                )
            if len(start) < 8:
                raise ModelError(
                    f"{self.path}: {self.num_bytes} bytes are no safetensors file; it was cut off."
                )
            (length,) = struct.unpack("<Q", start[:8])
            if length > min(_MAX_HEADER, self.num_bytes - 8):
                raise ModelError(
                    f"{self.path} is no whole safetensors file: its header should have {length} bytes, and "
                    f"the file has {self.num_bytes}. Download it again."
                )
            file.seek(8)
            text = file.read(length)
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{self.path}: the header is not JSON ({error}).") from None
        if not isinstance(header, dict):
            raise ModelError(f"{self.path}: the header is a {type(header).__name__}; an object is wanted.")
        return header, 8 + length

    def _check(self, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
        """(dtype, shape, first byte in the file, byte after the last) of one tensor."""
        try:
            dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            is_sound = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and begin <= end
        except (TypeError, KeyError, ValueError):
            is_sound = False
        if not is_sound:
            raise ModelError(f"{self.path}: the header's entry for {name} is not a tensor's.")
        if dtype in _DTYPES and end - begin != prod(shape) * np.dtype(_DTYPES[dtype]).itemsize:
            raise ModelError(
                f"{self.path}: the tensor {name} ({dtype} {list(shape)}) has {end - begin} bytes; "
                f"{prod(shape) * np.dtype(_DTYPES[dtype]).itemsize} are wanted."
            )
        if self._data_start + end > self.num_bytes:
            raise ModelError(
                f"{self.path} was cut off: the tensor {name} ends at byte {self._data_start + end}, the "
                f"file at {self.num_bytes}. Download it again."
            )
        return dtype, shape, self._data_start + begin, self._data_start + end

    def _check_layout(self) -> None:
        """Tensors follow each other without gap or overlap up to the file's end, as the format says."""
        wanted = self._data_start
        for name, (_, _, start, end) in sorted(self._entries.items(), key=lambda item: item[1][2:]):
            if start != wanted:
                raise ModelError(
                    f"{self.path} is damaged: the tensor {name} begins at byte {start}, the one before "
                    f"it ends at {wanted}. Download it again."
                )
            wanted = end
        if wanted != self.num_bytes:
            raise ModelError(
                f"{self.path} is damaged: the last tensor ends at byte {wanted}, the file at "
                f"{self.num_bytes}. Download it again."
            )
