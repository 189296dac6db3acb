"""Sampling, row by row. Contract: Backend.sample in service/tensor/backend.py."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.tensor.backend import SampleArrays, SamplingArrays, StepArrays
from service.tensor.cpu.philox import uniform

Array = NDArray[Any]


def sample(
    logits: Array, sampling: SamplingArrays, batch: StepArrays, last_ids: Array, out: SampleArrays
) -> None:
    for i, row in enumerate(logits):
        adjusted = _adjusted(row, sampling, i)
        chosen = _choose(adjusted, sampling, i)
        out.ids[i] = chosen
        if sampling.max_top_logprobs >= 0:
            _write_logprobs(row, chosen, sampling.max_top_logprobs, out, i)
    last_ids[batch.sample_lanes] = out.ids[: len(logits)]


def _adjusted(row: Array, sampling: SamplingArrays, i: int) -> Array:
    """The row after penalties, bias and bitmask; the row itself where there are none."""
    seen = slice(sampling.seen_starts[i], sampling.seen_starts[i + 1])
    bias = slice(sampling.bias_starts[i], sampling.bias_starts[i + 1])
    if seen.start == seen.stop and bias.start == bias.stop and sampling.bitmask is None:
        return row
    row = row.copy()
    ids, counts = sampling.seen_ids[seen], sampling.seen_counts[seen]
    values, penalty = row[ids], sampling.repetition_penalty[i]
    values = np.where(values > 0, values / penalty, values * penalty)
    values -= sampling.frequency_penalty[i] * counts
    values -= sampling.presence_penalty[i] * (counts > 0)
    row[ids] = values
    row[sampling.bias_ids[bias]] += sampling.bias_values[bias]
    if sampling.bitmask is not None:
        allowed = np.unpackbits(sampling.bitmask[i].view(np.uint8), bitorder="little")[: len(row)]
        np.copyto(row, -np.inf, where=allowed == 0)
    return row


def _choose(row: Array, sampling: SamplingArrays, i: int) -> int:
    best = int(row.argmax())  # of equal ones the first; a NaN, if there is one
    if not np.isfinite(row[best]):
        return -1
    if sampling.temperature[i] == 0:
        return best
    mass = row - row[best]
    mass /= sampling.temperature[i]
    np.exp(mass, out=mass)  # relative to the most likely id
    _truncate(mass, int(sampling.top_k[i]), float(sampling.top_p[i]), float(sampling.min_p[i]))
    cumulated = np.cumsum(mass, dtype=np.float64)
    u = uniform(int(sampling.seeds[i]), int(sampling.positions[i]), int(sampling.choices[i]))
    return int(np.searchsorted(cumulated, u * cumulated[-1], side="right"))


def _truncate(mass: Array, top_k: int, top_p: float, min_p: float) -> None:
    """Zero what top-k, then top-p, then min-p leave out. `mass` is 1 for the most likely id."""
    if 0 < top_k < len(mass):
        mass[mass < np.partition(mass, -top_k)[-top_k]] = 0
    if top_p < 1:
        mass[mass < _nucleus_edge(mass, top_p)] = 0
    if min_p > 0:
        mass[mass < min_p] = 0


def _nucleus_edge(mass: Array, top_p: float) -> float:
    """The mass of the last id that top-p keeps."""
    total = float(mass.sum(dtype=np.float64))
    # ids below an even share of what may be left out are never needed, and rarely worth sorting
    kept = mass[mass >= (1 - top_p) * total / len(mass)]
    kept[::-1].sort()
    last = int(np.searchsorted(np.cumsum(kept, dtype=np.float64), top_p * total))
    return float(kept[min(last, len(kept) - 1)])


def _write_logprobs(row: Array, chosen: int, num_top: int, out: SampleArrays, i: int) -> None:
    largest = row.max()
    log_sum = float(largest) + np.log(np.exp(row - largest).sum(dtype=np.float64))
    out.logprobs[i] = row[chosen] - log_sum
    out.ranks[i] = 1 + np.count_nonzero(row > row[chosen])
    if num_top:
        candidates = np.flatnonzero(row >= np.partition(row, -num_top)[-num_top])
        top = candidates[np.argsort(-row[candidates], kind="stable")][:num_top]
        out.top_ids[i, :num_top] = top
        out.top_logprobs[i, :num_top] = row[top] - log_sum
