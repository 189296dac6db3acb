"""The tensor layer's one interface: the contract of every op, written here and nowhere else.

The ops are the stages of a step as a device wants them, five to a decoder layer; textbook primitives
(RMSNorm, rotation, softmax) are small functions inside the NumPy backend, where a reader learns them.

Every op writes into arrays given by the caller and allocates nothing that outlives the call, so that a
GPU backend can capture a step as a CUDA graph. Array sizes are fixed at start (`StepArrays` holds the
largest batch); an op works on the leading rows that the arrays it is given have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from service.tensor.quantized import QuantizedWeight

Array = Any  # numpy.ndarray or cupy.ndarray
Linear = Any  # a weight [out_features, in_features] as Backend.linear made it, in a layout of its own
HostArray = NDArray[Any]


@dataclass(slots=True, frozen=True, eq=False)
class StepArrays:
    """Where the rows of a step belong. Requests with one row that need a sample (decode) come first.

    Row r of request i is a token; rows of a request are adjacent, in order of position.
    """

    token_ids: Array  # int32 [rows]; -1: take `last_ids[lanes[request]]`, sampled by the step before
    positions: Array  # int32 [rows]; from 0
    slot_mapping: Array  # int32 [rows]; block id * block_size + offset, where this row's K and V go
    row_starts: Array  # int32 [num_requests + 1]; rows of request i: row_starts[i] to row_starts[i + 1]
    context_lens: Array  # int32 [num_requests]; tokens in the cache after this step
    block_tables: Array  # int32 [num_requests, max_blocks]; ids beyond the context are not read
    lanes: Array  # int32 [num_requests]; the request's place in `last_ids`, its own while it runs
    sample_rows: Array  # int32 [num_samples]; rows whose logits are wanted
    sample_lanes: Array  # int32 [num_samples]; where the sampled id is left for the next step
    num_decode: int  # leading requests with exactly one row


@dataclass(slots=True, frozen=True)
class SamplingArrays:
    """How each of num_samples rows is sampled. Sparse parts are lists of (sample, id, value)."""

    temperature: Array  # float32 [num_samples]; 0: greedy
    top_k: Array  # int32 [num_samples]; 0: off
    top_p: Array  # float32 [num_samples]; 1: off
    min_p: Array  # float32 [num_samples]; 0: off
    seeds: Array  # uint64 [num_samples]
    choices: Array  # int32 [num_samples]; index among the n choices of one API request
    positions: Array  # int32 [num_samples]; position that the sampled id will take
    repetition_penalty: Array  # float32 [num_samples]; 1: off
    presence_penalty: Array  # float32 [num_samples]
    frequency_penalty: Array  # float32 [num_samples]
    seen_starts: Array  # int32 [num_samples + 1]; seen ids of sample i: seen_starts[i] to seen_starts[i+1]
    seen_ids: Array  # int32; ids in prompt or output, each once a sample
    seen_counts: Array  # int32; times among generated ids; 0: in the prompt only
    bias_starts: Array  # int32 [num_samples + 1]
    bias_ids: Array  # int32; each once a sample
    bias_values: Array  # float32; -inf forbids an id (min_tokens)
    bitmask: Array | None  # uint32 [num_samples, ceil(vocab / 32)]; bit 1: allowed; None: no grammar
    max_top_logprobs: int  # most top logprobs wanted by any row; -1: nobody wants logprobs


@dataclass(slots=True, frozen=True)
class SampleArrays:
    """What sampling leaves. `top_*` columns beyond SamplingArrays.max_top_logprobs are not written."""

    ids: Array  # int32 [num_samples]; -1: the row's logits hold a NaN or forbid every id
    logprobs: Array  # float32 [num_samples]; of the sampled id, under the model's own distribution
    ranks: Array  # int32 [num_samples]; 1: most likely; ties share the best rank
    top_ids: Array  # int32 [num_samples, max_top]; most likely first, ties to the lowest id
    top_logprobs: Array  # float32 [num_samples, max_top]


class Backend(Protocol):
    """What a device must be able to do. Implementations: tensor/cpu (NumPy), tensor/cuda (CuPy).

    Names of shapes: rows (tokens of the step), dim (hidden size), heads, kv_heads, head_dim, ffn
    (intermediate size), vocab, num_blocks, block_size.
    """

    device_name: str
    activation_dtype: Any  # of x, q, out; float32 on the CPU, bfloat16 on a GPU

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """An uninitialised array on the device."""

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        """A zeroed array on the device."""

    def vector(self, host: HostArray) -> Array:
        """A norm weight, bias or table on the device, in float32 whatever the activations are."""

    def linear(
        self,
        parts: Sequence[HostArray | QuantizedWeight],
        biases: Sequence[HostArray] | None = None,
        norm: HostArray | None = None,
        *,
        pairs: int = 8,
        group_size: int | None = None,
    ) -> Linear:
        """A projection whose output is the outputs of `parts` one after the other.

        Shapes: each part [out_i, in]; each bias [out_i]; norm [in]: the weight of the RMSNorm that an op
            applies to this projection's input. A backend may multiply it into the parts.
        `pairs`: an op computes with outputs i and i + pairs together, in every 2 * pairs outputs; 8
            where it does not matter. A backend may lay out the weight for it.
        `group_size`: quantise the parts (service/tensor/quantized.py); None: keep them in the backend's
            dtype, or in INT8 where they are QuantizedWeights, all of one group size.
        """

    def embed(self, batch: StepArrays, table: Linear, last_ids: Array, out: Array) -> None:
        """Write the embedding of every row's token.

        Shapes: table [vocab, dim]; last_ids int32 [max_running]; out [rows, dim].
        """

    def qkv_rope_cache(
        self,
        x: Array,
        eps: float,
        qkv: Linear,
        q_norm: Array | None,
        k_norm: Array | None,
        rope: Array,
        batch: StepArrays,
        k_cache: Array,
        v_cache: Array,
        q: Array,
    ) -> None:
        """RMSNorm, the QKV projection, per-head q/k norm, RoPE, and the write of K and V to the cache.

        Shapes: x [rows, dim]; qkv [(heads + 2 kv_heads) * head_dim, dim], bias added where it
            has one; q_norm, k_norm [head_dim] or None; rope float32 [max_positions, head_dim]: cos of
            head_dim / 2 frequencies, then sin; caches [num_blocks, kv_heads, block_size, head_dim];
            q [rows, heads, head_dim].
        Writes: q; of the caches, the slots in batch.slot_mapping.
        Source: RMSNorm: Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4. RoPE: Su et al. 2021,
            arXiv:2104.09864, in the half-rotated layout of Hugging Face checkpoints: component i pairs
            with i + head_dim / 2.
        """

    def paged_attention(
        self, q: Array, k_cache: Array, v_cache: Array, batch: StepArrays, scale: float, out: Array
    ) -> None:
        """Causal attention of every row over its request's cached keys, its own included.

        Shapes: q, out [rows, heads, head_dim]; caches [num_blocks, kv_heads, block_size, head_dim];
            query head h reads KV head h // (heads / kv_heads).
        Units: scale multiplies q.k before the softmax.
        """

    def linear_add(self, x: Array, weight: Linear, residual: Array) -> None:
        """residual += weight x (+ bias). Shapes: x [rows, in]; residual [rows, out], updated."""

    def gate_up_silu(self, x: Array, eps: float, gate_up: Linear, out: Array) -> None:
        """RMSNorm, then silu(gate x) * (up x). Shapes: x [rows, dim]; gate_up [2 ffn, dim], gate first;
        out [rows, ffn]."""

    def head_logits(
        self, x: Array, norm: Array, eps: float, head: Linear, batch: StepArrays, out: Array
    ) -> None:
        """Final RMSNorm and LM head of batch.sample_rows.

        Shapes: x [rows, dim]; head [at least vocab, dim]; out float32 [num_samples, vocab]. Rows of the
            head beyond vocab (padding above the tokenizer's ids) are left out.
        """

    def sample(
        self,
        logits: Array,
        sampling: SamplingArrays,
        batch: StepArrays,
        last_ids: Array,
        out: SampleArrays,
    ) -> None:
        """Choose one id a row and leave it in `out.ids` and in `last_ids[batch.sample_lanes]`.

        Order: logprobs, ranks and top logprobs are taken from the given logits. Then repetition penalty
            (positive logits divided, negative ones multiplied, for every seen id), frequency penalty times
            count and presence penalty for ids with a count, bias, bitmask; greedy takes the maximum
            (ties to the lowest id). Else logits are divided by temperature; top_k keeps the k largest and
            all that equal the k-th; top_p, over what top_k left, the most likely ids up to and including
            the one with which their mass reaches p, and all that equal that one; min_p, ids at
            least min_p times as likely as the most likely. The draw is the first id, by increasing id,
            whose cumulated mass exceeds u times the mass kept.
        u: 24 bits of the first word of Philox4x32-10 with key (seed low, seed high) and counter
            (position, choice, 0, 0); u = (word >> 8) / 2^24.
        Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox).
        Writes: out, last_ids, logits (may be overwritten).
        """
