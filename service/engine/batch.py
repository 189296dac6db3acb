"""A planned step -> the arrays that the tensor layer reads."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.engine.request import Request
from service.engine.scheduler import Step, Work
from service.engine.scoring import Scoring, scoring_of
from service.tensor.backend import SamplingArrays, StepArrays


@dataclass(slots=True, frozen=True)
class Batch:
    """A step in arrays, on the host. `sampled[i]` is the request of sample i."""

    arrays: StepArrays
    sampling: SamplingArrays
    sampled: list[Request]
    scoring: Scoring | None = None


class BatchBuilder:
    """Keeps what changes rarely (block tables, sampling parameters) by lane, and gathers it every step."""

    def __init__(
        self,
        max_running: int,
        max_blocks: int,
        block_size: int,
        stop_ids: tuple[int, ...],
        vocab_size: int = 0,
    ) -> None:
        """`max_blocks`: of one request. `stop_ids`: the model's EOS ids, held off by min_tokens.

        `vocab_size`: of logits; needed for constraints only.
        """
        self._mask_words = -(-vocab_size // 32)
        self._block_size = block_size
        self._eos_ids = stop_ids
        self._tables = np.zeros((max_running, max_blocks), np.int32)
        self._num_written = [0] * max_running
        self._floats = np.zeros((6, max_running), np.float32)
        self._ints = np.zeros((2, max_running), np.int32)
        self._seeds = np.zeros(max_running, np.uint64)
        self._is_plain = np.zeros(max_running, bool)  # no penalties, no bias, no logprobs, no constraint

    def build(self, step: Step) -> Batch:
        """Arrays of one step; the order of its rows is the one that StepArrays asks for."""
        for request in step.admitted:
            self._take_lane(request)
        decode = [work for work in step.work if work.num_tokens == 1 and work.samples]
        work = decode + [work for work in step.work if work.num_tokens > 1 or not work.samples]
        arrays = self._step_arrays(work, len(decode))
        sampled = [item for item in work if item.samples]
        requests = [item.request for item in sampled]
        return Batch(arrays, self._sampling_arrays(sampled), requests, scoring_of(work, arrays.row_starts))

    def _take_lane(self, request: Request) -> None:
        params, lane = request.params, request.lane
        self._num_written[lane] = 0
        self._floats[:, lane] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self._ints[:, lane] = params.top_k, params.choice
        self._seeds[lane] = request.seed
        has_bias = bool(params.logit_bias or params.min_tokens)
        self._is_plain[lane] = not (request.needs_known_ids or has_bias or params.logprobs is not None)

    def _step_arrays(self, work: list[Work], num_decode: int) -> StepArrays:
        lanes = np.array([item.request.lane for item in work], np.int32)
        starts = np.array([item.start for item in work], np.int32)
        counts = np.array([item.num_tokens for item in work], np.int32)
        row_starts = np.zeros(len(work) + 1, np.int32)
        np.cumsum(counts, out=row_starts[1:])
        written = self._num_written
        for item in work:
            if written[item.request.lane] < len(item.request.block_table):
                self._write_table(item.request)
        context_lens = starts + counts
        num_blocks = int(-(-context_lens.max(initial=0) // self._block_size))
        positions = np.arange(row_starts[-1], dtype=np.int32) + np.repeat(starts - row_starts[:-1], counts)
        blocks = self._tables[np.repeat(lanes, counts), positions // self._block_size]
        samples = np.array([item.samples for item in work], bool)
        return StepArrays(
            token_ids=_token_ids(work, int(row_starts[-1])),
            positions=positions,
            slot_mapping=blocks * np.int32(self._block_size) + positions % self._block_size,
            row_starts=row_starts,
            context_lens=context_lens,
            block_tables=self._tables[lanes, :num_blocks],
            lanes=lanes,
            sample_rows=row_starts[1:][samples] - 1,
            sample_lanes=lanes[samples],
            num_decode=num_decode,
        )

    def _write_table(self, request: Request) -> None:
        lane, table = request.lane, request.block_table
        written = self._num_written[lane]
        self._tables[lane, written : len(table)] = table[written:]
        self._num_written[lane] = len(table)

    def _sampling_arrays(self, sampled: list[Work]) -> SamplingArrays:
        lanes = np.array([item.request.lane for item in sampled], np.int32)
        temperature, top_p, min_p, repetition, presence, frequency = self._floats[:, lanes]
        top_k, choices = self._ints[:, lanes]
        special = [] if self._is_plain[lanes].all() else [item.request for item in sampled]
        seen = [_seen(request) for request in special]
        bias = [self._bias(request) for request in special]
        wanted = [request.params.logprobs for request in special]
        none = np.zeros(len(sampled) + 1, np.int32)
        return SamplingArrays(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seeds=self._seeds[lanes],
            choices=choices,
            positions=np.array([item.start + item.num_tokens for item in sampled], np.int32),
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
            seen_starts=_starts(seen) if special else none,
            seen_ids=_flat([ids for ids, _ in seen], np.int32),
            seen_counts=_flat([counts for _, counts in seen], np.int32),
            bias_starts=_starts(bias) if special else none,
            bias_ids=_flat([ids for ids, _ in bias], np.int32),
            bias_values=_flat([values for _, values in bias], np.float32),
            bitmask=self._bitmask(special),
            max_top_logprobs=max((count for count in wanted if count is not None), default=-1),
        )

    def _bitmask(self, sampled: list[Request]) -> NDArray[np.uint32] | None:
        """A row for each request, all ones where it has no constraint; None where none has."""
        if not any(request.params.constraint is not None for request in sampled):
            return None
        mask = np.full((len(sampled), self._mask_words), 0xFFFFFFFF, np.uint32)
        for row, request in zip(mask, sampled, strict=True):
            if request.params.constraint is not None:
                request.params.constraint.fill_mask(row)
        return mask

    def _bias(self, request: Request) -> tuple[list[int], list[float]]:
        """logit_bias, and minus infinity for whatever would end the request before min_tokens."""
        params = request.params
        bias = dict(params.logit_bias)
        # the id sampled now is number num_output_tokens, itself counted as pending
        if request.num_output_tokens <= params.min_tokens and params.min_tokens:
            ending = params.stop_token_ids if params.ignore_eos else self._eos_ids + params.stop_token_ids
            bias.update(dict.fromkeys(ending, -np.inf))
        return list(bias), list(bias.values())


def _token_ids(work: list[Work], num_rows: int) -> NDArray[np.int32]:
    ids = np.empty(num_rows, np.int32)
    row = 0
    for item in work:
        known = item.request.token_ids
        if item.num_tokens == 1:
            ids[row] = known[item.start] if item.start < len(known) else -1
        else:
            ids[row : row + item.num_tokens] = known[item.start : item.start + item.num_tokens]
        row += item.num_tokens
    return ids


def _seen(request: Request) -> tuple[list[int], list[int]]:
    """Ids in prompt or output with their number among generated ones, where a penalty looks at them."""
    if not request.params.has_penalties:
        return [], []
    counts = dict.fromkeys(request.prompt_ids, 0)
    for token_id in request.token_ids[request.num_prompt_tokens :]:
        counts[token_id] = counts.get(token_id, 0) + 1
    return list(counts), list(counts.values())


def _starts(lists: list[tuple[list[int], list[Any]]]) -> NDArray[np.int32]:
    starts = np.zeros(len(lists) + 1, np.int32)
    np.cumsum([len(ids) for ids, _ in lists], out=starts[1:])
    return starts


def _flat(lists: list[list[Any]], dtype: Any) -> NDArray[Any]:
    return np.array([value for values in lists for value in values], dtype)
