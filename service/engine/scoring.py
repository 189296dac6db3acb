"""Logprobs of prompt ids, asked of the sampler: each is a greedy sample that can only be the given id.

A row's logits say how likely the id behind it was. So prompt position p is scored by the row at p - 1, in
the step that computes that row; the first id of a prompt has no score.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.engine.request import Request
from service.engine.scheduler import Work
from service.tensor.backend import SamplingArrays, StepArrays

_CERTAIN = 1e30  # added to a logit, so that no other is larger; finite, so that it is no error


@dataclass(slots=True, frozen=True)
class Scoring:
    """What a step scores: on the host, one entry an id. `owners`: whose they are, in order."""

    rows: NDArray[np.int32]
    ids: NDArray[np.int32]
    max_top_logprobs: int
    owners: list[tuple[Request, int]]

    def pieces(self, arrays: StepArrays, size: int, spare_lane: int) -> Iterator["ScoringPiece"]:
        """At most `size` at a time, as the sampler takes them. `spare_lane`: where samples harm nobody."""
        for start in range(0, len(self.ids), size):
            ids = self.ids[start : start + size]
            lanes = np.full(len(ids), spare_lane, np.int32)
            step = replace(arrays, sample_rows=self.rows[start : start + size], sample_lanes=lanes)
            yield ScoringPiece(slice(start, start + len(ids)), step, _forced(ids, self.max_top_logprobs))


@dataclass(slots=True, frozen=True)
class ScoringPiece:
    """Some of the ids of a Scoring."""

    place: slice
    arrays: StepArrays
    sampling: SamplingArrays


def scoring_of(work: Sequence[Work], row_starts: NDArray[np.int32]) -> Scoring | None:
    """What the planned work scores, in the order of its rows; None: nothing."""
    rows, ids, owners, most = list[int](), list[int](), list[tuple[Request, int]](), 0
    for item, first_row in zip(work, row_starts.tolist(), strict=False):
        count = item.scores_to - item.scores_from
        if count <= 0:
            continue
        first = first_row + item.scores_from - item.start
        rows += range(first, first + count)
        ids += item.request.prompt_ids[item.scores_from + 1 : item.scores_to + 1]
        owners.append((item.request, count))
        most = max(most, item.request.params.prompt_logprobs or 0)
    if not owners:
        return None
    return Scoring(np.array(rows, np.int32), np.array(ids, np.int32), most, owners)


def _forced(ids: NDArray[np.int32], max_top_logprobs: int) -> SamplingArrays:
    count = len(ids)
    plain: dict[str, Any] = {
        field.name: np.zeros(count, np.float32)
        for field in fields(SamplingArrays)
        if field.name not in ("bitmask", "max_top_logprobs")
    }
    integers = np.zeros(count, np.int32)
    starts = np.arange(count + 1, dtype=np.int32)
    return SamplingArrays(
        **plain
        | {
            "top_k": integers,
            "top_p": np.ones(count, np.float32),
            "seeds": np.zeros(count, np.uint64),
            "choices": integers,
            "positions": integers,
            "repetition_penalty": np.ones(count, np.float32),
            "seen_starts": np.zeros(count + 1, np.int32),
            "seen_ids": integers[:0],
            "seen_counts": integers[:0],
            "bias_starts": starts,
            "bias_ids": ids,
            "bias_values": np.full(count, _CERTAIN, np.float32),
        },
        bitmask=None,
        max_top_logprobs=max_top_logprobs,
    )
