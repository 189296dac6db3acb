"""Dequantised weights of a GGUF file, kept in the user's cache in the form that they are used in.

Parsing a GGUF file and dequantising it takes seconds; reading the result back takes tenths of one. An entry
is a folder named after the GGUF file's fingerprint and this format's version: `checkpoint.json` (config,
tokenizer) and `weights.safetensors` (float32, q/k/v and gate/up fused). It appears whole or not at all.
"""

import contextlib
import logging
import os
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from service.errors import ModelError
from service.model.checkpoint import Checkpoint, TokenizerSpec
from service.model.config import ModelConfig, SamplingDefaults
from service.model.gguf import file_fingerprint, open_gguf
from service.model.safetensors_file import SafetensorsFile
from service.model.weights import LayerWeights, WeightSource
from service.scratch import PREFIX, scratch_folder

log = logging.getLogger(__name__)

Array = NDArray[Any]

FORMAT = 2  # raise it whenever what is stored changes its meaning
MAX_ENTRIES = 4  # of the least recently used ones, those beyond are deleted

_READERS = 2


class _Description(msgspec.Struct, frozen=True):
    """checkpoint.json"""

    config: ModelConfig
    sampling_defaults: SamplingDefaults
    tokenizer: TokenizerSpec
    num_parameters: int
    fingerprint: str
    shapes: dict[str, tuple[int, ...]]  # of the tensors in weights.safetensors


def open_gguf_cached(path: Path, cache_dir: Path, shared_dir: Path | None = None) -> Checkpoint:
    """Open a GGUF file through the cache, filling it if need be; `shared_dir` is only read.

    A cache that can't be written (full, read-only) costs the speed-up, not the start.
    Raises: ModelError, as open_gguf does.
    """
    name = f"{file_fingerprint(path)}-{FORMAT}"
    for folder in (shared_dir, cache_dir):
        cached = None if folder is None else _open_entry(folder / "weights" / name, path)
        if cached is not None:
            return cached
    entry = cache_dir / "weights" / name
    checkpoint = open_gguf(path)
    if checkpoint.group_sizes:
        return checkpoint  # INT8 weights are used as they lie in the file
    try:
        _write_entry(entry, checkpoint)
    except (OSError, SafetensorError) as error:  # the latter where the disk is full
        log.warning("weights are not cached, so the next start is as slow as this one: %s", error)
        return checkpoint
    return _open_entry(entry, path) or checkpoint


def _open_entry(entry: Path, path: Path) -> Checkpoint | None:
    try:
        description = msgspec.json.decode((entry / "checkpoint.json").read_bytes(), type=_Description)
        file = SafetensorsFile(entry / "weights.safetensors")
        file.check_dtypes(set(file.shapes))
        if file.shapes != description.shapes:
            return None
        weights = _CachedWeights(description.config, file)
    except (OSError, msgspec.DecodeError, ModelError):
        return None  # not there, damaged, or of another version: it is written anew
    with contextlib.suppress(OSError):  # in a folder of others nothing is deleted either
        os.utime(entry)  # for the order in which entries are deleted
    return Checkpoint(
        path=path,
        config=description.config,
        sampling_defaults=description.sampling_defaults,
        tokenizer=description.tokenizer,
        weights=weights,
        num_parameters=description.num_parameters,
        fingerprint=description.fingerprint,
    )


def _write_entry(entry: Path, checkpoint: Checkpoint) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # another process deletes too
        _delete_oldest(entry.parent, keep=MAX_ENTRIES - 1)
    with scratch_folder(entry.parent) as scratch:
        tensors = _tensors(checkpoint)
        save_file(tensors, scratch / "weights.safetensors")
        description = _Description(
            config=checkpoint.config,
            sampling_defaults=checkpoint.sampling_defaults,
            tokenizer=checkpoint.tokenizer,
            num_parameters=checkpoint.num_parameters,
            fingerprint=checkpoint.fingerprint,
            shapes={name: array.shape for name, array in tensors.items()},
        )
        (scratch / "checkpoint.json").write_bytes(msgspec.json.encode(description))
        if _open_entry(entry, checkpoint.path) is None:  # else another process was quicker
            shutil.rmtree(entry, ignore_errors=True)  # a damaged one
            scratch.rename(entry)


def _delete_oldest(folder: Path, keep: int) -> None:
    entries = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    whole = [entry for entry in entries if not entry.name.startswith(PREFIX)]
    for entry in whole[keep:]:
        shutil.rmtree(entry, ignore_errors=True)


def _tensors(checkpoint: Checkpoint) -> dict[str, Array]:
    """All tensors, fused and in float32. A tied head is left out."""
    source: WeightSource = checkpoint.weights
    tensors = {"embedding": source.embedding(), "final_norm": source.final_norm()}
    head = source.head()
    if head is not None:
        tensors["head"] = head
    for index in range(checkpoint.config.num_layers):
        layer = source.layer(index)
        for name in LayerWeights.__slots__:
            value = getattr(layer, name)
            if value is not None:
                tensors[f"{index}.{name}"] = np.concatenate(value) if isinstance(value, tuple) else value
    return {name: np.ascontiguousarray(array, np.float32) for name, array in tensors.items()}


class _CachedWeights:
    """A WeightSource over a cache entry, read whole at first use, even if it has been deleted by then."""

    def __init__(self, config: ModelConfig, file: SafetensorsFile) -> None:
        self._config = config
        self._file = file
        self._descriptor = os.open(file.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._bytes: NDArray[np.uint8] | None = None

    def embedding(self) -> Array:
        return self._tensor("embedding")

    def head(self) -> Array | None:
        return None if self._config.tied_embeddings else self._tensor("head")

    def final_norm(self) -> Array:
        return self._tensor("final_norm")

    def layer(self, index: int) -> LayerWeights:
        found: dict[str, Any] = {}
        for name in LayerWeights.__slots__:
            key = f"{index}.{name}"
            value = self._tensor(key) if key in self._file.shapes else None
            is_fused = name.startswith(("qkv", "gate_up"))
            found[name] = (value,) if is_fused and value is not None else value
        return LayerWeights(**found)

    def _tensor(self, name: str) -> Array:
        if self._bytes is None:
            self._bytes = _read_whole(self._descriptor, self._file)
        return self._file.tensor(name, self._bytes)


def _read_whole(descriptor: int, source: SafetensorsFile) -> NDArray[np.uint8]:
    """An open file's bytes in one array.

    NumPy asks for huge pages for large arrays, which a map of the file can't have: decoding ran 1.1 times
    as fast (SmolLM2-135M, 2 cores), for 0.4 s of reading.
    """
    data = np.empty(source.num_bytes, np.uint8)
    edges = np.linspace(0, len(data), _READERS + 1, dtype=np.int64).tolist()

    def read(part: int) -> None:
        start, end = edges[part : part + 2]
        while start < end:
            count = os.preadv(descriptor, [memoryview(data.data)[start:end]], start)
            if not count:
                raise ModelError(f"{source.path} was cut off while it was read.")
            start += count

    with ThreadPoolExecutor(_READERS) as threads:
        list(threads.map(read, range(_READERS)))
    return data
