"""Attention over the paged cache. Contract: Backend.paged_attention in service/tensor/backend.py."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.tensor.backend import StepArrays
from service.tensor.cpu.primitives import exp_shifted
from service.tensor.cpu.scratch import Scratch

Array = NDArray[Any]

_TILE = 64  # query rows of a prefill tile: its scores stay in the caches, and masked halves are few


@dataclass(frozen=True, slots=True)
class _Group:
    """Decode requests of similar context, padded to the longest. The same for every layer of a step."""

    rows: Array  # [group]: their rows in the step
    tables: Array  # [group, num_blocks]; 0 in the padding
    padding: Array  # bool [group, num_blocks]
    hidden: Array  # bool [group, 1, num_blocks * block_size]: behind the context
    tails: list[tuple[int, int, int]]  # (index in the group, last block, first offset behind the context)


def paged_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    batch: StepArrays,
    scale: float,
    out: Array,
    scratch: Scratch | None = None,
) -> None:
    scratch = scratch or Scratch()
    for group in _decode_groups(batch, k_cache.shape[2]):
        _decode(q, k_cache, v_cache, group, scale, out, scratch)
    for request in range(batch.num_decode, len(batch.context_lens)):
        _prefill(q, k_cache, v_cache, batch, request, scale, out, scratch)


@lru_cache(maxsize=1)
def _decode_groups(batch: StepArrays, block_size: int) -> list[_Group]:
    """Decode requests in groups whose longest context has at most twice the blocks of the shortest.

    A group is padded to its longest, so the padding never costs more than the work.
    """
    num_blocks = -(-batch.context_lens[: batch.num_decode] // block_size)
    order = np.argsort(num_blocks, kind="stable")
    groups = []
    start = 0
    while start < len(order):
        end = int(np.searchsorted(num_blocks[order], 2 * num_blocks[order[start]], side="right"))
        groups.append(_make_group(batch, order[start:end], block_size))
        start = end
    return groups


def _make_group(batch: StepArrays, members: Array, block_size: int) -> _Group:
    lens = batch.context_lens[members]
    num_blocks = -(-int(lens.max()) // block_size)
    hidden = np.arange(num_blocks * block_size) >= lens[:, None]
    padding = hidden[:, ::block_size]
    return _Group(
        rows=batch.row_starts[members],
        tables=np.where(padding, 0, batch.block_tables[members, :num_blocks]),
        padding=padding,
        hidden=hidden[:, None, :],
        tails=[(i, (n - 1) // block_size, (n - 1) % block_size + 1) for i, n in enumerate(lens.tolist())],
    )


def _decode(
    q: Array, k_cache: Array, v_cache: Array, group: _Group, scale: float, out: Array, scratch: Scratch
) -> None:
    kv_heads, block_size, head_dim = k_cache.shape[1:]
    heads, (count, num_blocks) = q.shape[1], group.tables.shape
    gathered = (count, num_blocks, kv_heads, block_size, head_dim)
    keys, values = scratch.empty("keys", gathered, q.dtype), scratch.empty("values", gathered, q.dtype)
    np.take(k_cache, group.tables, axis=0, out=keys, mode="clip")  # "clip" writes straight into out
    np.take(v_cache, group.tables, axis=0, out=values, mode="clip")
    values[group.padding] = 0  # what lies behind the context may be anything, and a weight of 0
    for request, block, offset in group.tails:  # does not stop a NaN
        values[request, block, :, offset:] = 0

    queries = q[group.rows].reshape(count, 1, kv_heads, heads // kv_heads, head_dim)
    by_block = np.matmul(queries * np.asarray(scale, q.dtype), keys.swapaxes(-1, -2))
    scores = by_block.transpose(0, 2, 3, 1, 4).reshape(count, heads, -1)  # [group, heads, context]
    np.copyto(scores, -np.inf, where=group.hidden)
    sums = exp_shifted(scores)
    weights = scores.reshape(count, kv_heads, heads // kv_heads, num_blocks, block_size)
    mixed = np.matmul(weights.transpose(0, 3, 1, 2, 4), values).sum(axis=1).reshape(count, heads, head_dim)
    out[group.rows] = mixed / sums[:, :, None]


def _prefill(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    batch: StepArrays,
    request: int,
    scale: float,
    out: Array,
    scratch: Scratch,
) -> None:
    kv_heads, block_size, head_dim = k_cache.shape[1:]
    start, end = int(batch.row_starts[request]), int(batch.row_starts[request + 1])
    context = int(batch.context_lens[request])
    table = batch.block_tables[request, : -(-context // block_size)]
    # [kv_heads, context, head_dim], in order of position
    keys, values = (
        cache[table].swapaxes(0, 1).reshape(kv_heads, -1, head_dim)[:, :context]
        for cache in (k_cache, v_cache)
    )
    for tile in range(start, end, _TILE):
        rows = min(_TILE, end - tile)
        seen = context - (end - tile) + rows  # keys that the last row of the tile may look at
        queries = (q[tile : tile + rows] * np.asarray(scale, q.dtype)).swapaxes(0, 1)
        queries = queries.reshape(kv_heads, -1, head_dim)  # [kv_heads, q_per_kv * rows, head_dim]
        scores = scratch.empty("scores", (*queries.shape[:2], seen), q.dtype)
        np.matmul(queries, keys[:, :seen].swapaxes(-1, -2), out=scores)
        recent = scores.reshape(-1, rows, seen)[:, :, seen - rows :]
        np.copyto(recent, -np.inf, where=np.triu(np.ones((rows, rows), bool), 1))
        sums = exp_shifted(scores)
        mixed = np.matmul(scores, values[:, :seen]) / sums[:, :, None]
        out[tile : tile + rows] = mixed.reshape(-1, rows, head_dim).swapaxes(0, 1)
