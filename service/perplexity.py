"""`photoninfer perplexity`: how well a model foretells a text, by sliding windows, as JSON."""

import json
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.engine.build import load_decoder
from service.errors import SettingsError
from service.model.decoder import Decoder, KVCache
from service.model.locate import find_model
from service.progress import TerminalProgress
from service.settings import Settings
from service.tensor.backend import Backend, StepArrays
from service.text.tokenizer import Tokenizer

_ROWS = 128  # positions whose logits are computed at a time
_BLOCK_SIZE = 16
_WINDOW = 1024


def run_perplexity(settings: Settings, text_file: Path, window: int | None, stride: int | None) -> int:
    """Print one JSON object. `window`: None: 1,024, or the model's context; `stride`: None: half of it.

    Raises: PhotonError.
    """
    try:
        text = text_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"text: {text_file} can't be read as text: {error}.") from None
    progress = TerminalProgress()
    try:
        checkpoint = find_model(settings, progress)
        window, stride = _windows(window, stride, checkpoint.config.max_positions)
        ids = np.array(Tokenizer(checkpoint.tokenizer).encode(text, allow_special=False), np.int32)
        if len(ids) < 2:
            raise SettingsError(f"text: {text_file} has {len(ids)} tokens; at least 2 are needed.")
        decoder, backend, numerics = load_decoder(checkpoint, settings, window, progress)
        losses = _all_losses(_Scorer(decoder, backend, window), ids, window, stride, progress)
    finally:
        progress.close()
    result = {
        "perplexity": exp(float(losses.mean())),
        "tokens": len(losses),
        "window": window,
        "stride": stride,
        "model": str(checkpoint.path),
        "numerics": numerics,
    }
    print(json.dumps(result, indent=2))
    return 0


def _windows(window: int | None, stride: int | None, context: int) -> tuple[int, int]:
    chosen = min(_WINDOW, context) if window is None else window
    step = max(1, chosen // 2) if stride is None else stride
    if not 1 < chosen <= context:
        raise SettingsError(f"window={chosen}: it takes a number from 2 to the model's context, {context}.")
    if not 0 < step <= chosen:
        raise SettingsError(f"stride={step}: it takes a number from 1 to the window, {chosen}.")
    return chosen, step


def _all_losses(
    scorer: "_Scorer", ids: NDArray[np.int32], window: int, stride: int, progress: TerminalProgress
) -> NDArray[np.float64]:
    """Of every token once, in the first window that shows it, but for those without any before them."""
    progress.phase("scoring")
    losses = []
    starts = range(0, max(1, len(ids) - window + stride), stride)
    for done, start in enumerate(starts, 1):
        part = ids[start : start + window]
        first = 1 if start == 0 else max(1, window - stride)
        if len(part) > first:
            losses.append(scorer.losses(part, first))
        progress.update(done, len(starts), "windows")
    found: NDArray[np.float64] = np.concatenate(losses)
    return found


class _Scorer:
    """Runs whole windows through a decoder, without an engine."""

    def __init__(self, decoder: Decoder, backend: Backend, window: int) -> None:
        self._decoder = decoder
        self._backend = backend
        num_blocks = -(-window // _BLOCK_SIZE)
        self._cache: KVCache = decoder.new_cache(num_blocks, _BLOCK_SIZE)
        self._buffers = decoder.new_activations(_ROWS)
        self._last_ids = backend.zeros((1,), np.int32)
        self._logits = backend.empty((_ROWS, decoder.config.vocab_size), np.float32)
        self._tables = np.arange(num_blocks, dtype=np.int32)[None]

    def losses(self, ids: NDArray[np.int32], first: int) -> NDArray[np.float64]:
        """Minus log of the probability of ids[first:], each behind those before it."""
        found = []
        for start in range(0, len(ids) - 1, _ROWS):
            end = min(start + _ROWS, len(ids) - 1)
            step = self._step(ids, start, end)
            logits = self._logits[: end - start]
            self._decoder.forward(step, self._cache, self._buffers, self._last_ids, logits)
            found.append(_losses(_on_host(logits), ids[start + 1 : end + 1]))
        losses: NDArray[np.float64] = np.concatenate(found)[first - 1 :]
        return losses

    def _step(self, ids: NDArray[np.int32], start: int, end: int) -> StepArrays:
        rows = end - start
        positions = np.arange(start, end, dtype=np.int32)
        host = {
            "token_ids": ids[start:end],
            "positions": positions,
            "slot_mapping": positions,
            "row_starts": np.array([0, rows], np.int32),
            "context_lens": np.array([end], np.int32),
            "block_tables": self._tables,
            "lanes": np.zeros(1, np.int32),
            "sample_rows": np.arange(rows, dtype=np.int32),
            "sample_lanes": np.zeros(rows, np.int32),
        }
        arrays = {name: self._on_device(array) for name, array in host.items()}
        return StepArrays(**arrays, num_decode=0)

    def _on_device(self, host: NDArray[Any]) -> Any:
        target = self._backend.empty(host.shape, host.dtype)
        if isinstance(target, np.ndarray):
            target[...] = host
        else:
            target.set(np.ascontiguousarray(host))
        return target


def _on_host(array: Any) -> NDArray[np.float32]:
    host: NDArray[np.float32] = array if isinstance(array, np.ndarray) else array.get()
    return host


def _losses(logits: NDArray[np.float32], ids: NDArray[np.int32]) -> NDArray[np.float64]:
    exact = logits.astype(np.float64)
    largest = exact.max(axis=1, keepdims=True)
    sums: NDArray[np.float64] = np.log(np.exp(exact - largest).sum(axis=1)) + largest[:, 0]
    return sums - exact[np.arange(len(ids)), ids]
