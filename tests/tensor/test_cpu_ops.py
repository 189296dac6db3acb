"""NumPy backend: each op against its formula, written out plainly in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from service.tensor.backend import SampleArrays, SamplingArrays, StepArrays
from service.tensor.cpu.backend import CpuBackend
from service.tensor.cpu.paged_attention import paged_attention
from service.tensor.cpu.philox import philox, uniform
from service.tensor.cpu.primitives import rms_norm, rotate, silu
from service.tensor.cpu.sample import sample

BLOCK = 4


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def make_batch(
    contexts: list[int], counts: list[int], rng: np.random.Generator, num_blocks: int = 64
) -> StepArrays:
    """Requests whose last `counts[i]` of `contexts[i]` tokens are this step's; blocks in random order."""
    free = rng.permutation(num_blocks).astype(np.int32)
    widest = max(-(-context // BLOCK) for context in contexts)
    tables = np.full((len(contexts), widest), num_blocks - 1, np.int32)
    used = 0
    positions = []
    for i, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        blocks = -(-context // BLOCK)
        tables[i, :blocks] = free[used : used + blocks]
        used += blocks
        positions.append(np.arange(context - count, context, dtype=np.int32))
    row_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    where = np.concatenate(positions)
    owner = np.repeat(np.arange(len(contexts)), counts)
    return StepArrays(
        token_ids=np.zeros(len(where), np.int32),
        positions=where,
        slot_mapping=tables[owner, where // BLOCK] * BLOCK + where % BLOCK,
        row_starts=row_starts,
        context_lens=np.array(contexts, np.int32),
        block_tables=tables,
        lanes=np.arange(len(contexts), dtype=np.int32),
        sample_rows=row_starts[1:] - 1,
        sample_lanes=np.arange(len(contexts), dtype=np.int32),
        num_decode=sum(1 for _ in (count for count in counts if count == 1)),
    )


@given(
    decode=st.lists(st.integers(1, 40), max_size=6),
    prefill=st.lists(st.tuples(st.integers(0, 20), st.integers(2, 30)), max_size=3),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_attention_over_scattered_blocks_equals_dense_attention(
    decode: list[int], prefill: list[tuple[int, int]], seed: int
) -> None:
    contexts = decode + [cached + new for cached, new in prefill]
    if not contexts:
        return
    rng = np.random.default_rng(seed)
    batch = make_batch(contexts, [1] * len(decode) + [new for _, new in prefill], rng, num_blocks=200)
    rows, heads, kv_heads, head_dim = len(batch.positions), 6, 2, 8
    q = rng.standard_normal((rows, heads, head_dim))
    k_cache, v_cache = (rng.standard_normal((200, kv_heads, BLOCK, head_dim)) for _ in range(2))
    out = np.full_like(q, np.nan)

    for i, context in enumerate(contexts):  # nothing behind the context may leak in
        flat = batch.block_tables[i, -(-context // BLOCK) - 1]
        k_cache[flat, :, (context - 1) % BLOCK + 1 :] = np.nan
        v_cache[flat, :, (context - 1) % BLOCK + 1 :] = np.nan
    paged_attention(q, k_cache, v_cache, batch, 0.3, out)

    for i, context in enumerate(contexts):
        slots = [(batch.block_tables[i, p // BLOCK], p % BLOCK) for p in range(context)]
        keys = np.array([k_cache[block, :, offset] for block, offset in slots])
        values = np.array([v_cache[block, :, offset] for block, offset in slots])
        for row in range(batch.row_starts[i], batch.row_starts[i + 1]):
            seen = batch.positions[row] + 1
            for head in range(heads):
                scores = 0.3 * keys[:seen, head // 3] @ q[row, head]
                weights = np.exp(scores - scores.max())
                want = weights @ values[:seen, head // 3] / weights.sum()
                np.testing.assert_allclose(out[row, head], want, rtol=1e-9, atol=1e-12)


def test_rms_norm_is_scale_free_and_weighted(rng: np.random.Generator) -> None:
    x, weight = rng.standard_normal((3, 16)), rng.uniform(0.5, 2, 16)

    out = rms_norm(x, weight, 0.0)

    np.testing.assert_allclose(out, x / np.sqrt((x**2).mean(-1, keepdims=True)) * weight)
    np.testing.assert_allclose(rms_norm(100 * x, weight, 0.0), out)


def test_rotation_turns_pairs_as_complex_numbers(rng: np.random.Generator) -> None:
    x, angles = rng.standard_normal((5, 2, 8)), rng.uniform(-3, 3, (5, 4))
    want = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)[:, None]

    rotate(x, np.concatenate([np.cos(angles), np.sin(angles)], axis=-1))

    np.testing.assert_allclose(x, np.concatenate([want.real, want.imag], axis=-1))


def test_silu_neither_overflows_nor_warns() -> None:
    x = np.array([-1e4, -100, -1, 0, 1, 100, 1e4], np.float32)
    silu(x)
    np.testing.assert_allclose(x, [0, 0, -0.26894143, 0, 0.7310586, 100, 1e4], rtol=1e-6, atol=1e-30)


def test_bfloat16_storage_gives_the_same_product_as_widened_weights(rng: np.random.Generator) -> None:
    weight = rng.standard_normal((70, 33)).astype(np.float32)
    x = rng.standard_normal((3, 33)).astype(np.float32)
    narrow = CpuBackend(bfloat16).linear([weight])
    wide = CpuBackend(np.float32).linear([weight.astype(bfloat16)])

    np.testing.assert_array_equal(narrow.project(x), wide.project(x))
    assert narrow.num_bytes * 2 == wide.num_bytes


def test_embedding_takes_ids_of_the_step_before_where_asked(rng: np.random.Generator) -> None:
    backend = CpuBackend()
    table = backend.linear([rng.standard_normal((10, 4)).astype(np.float32)])
    batch = make_batch([5, 8, 6], [1, 1, 3], rng)
    ids = np.array([3, -1, 0, 1, 2], np.int32)
    batch = StepArrays(**{name: getattr(batch, name) for name in StepArrays.__slots__} | {"token_ids": ids})
    out = np.full((5, 4), np.nan, np.float32)

    backend.embed(batch, table, np.array([9, 8, 7, 6]), out)

    np.testing.assert_array_equal(out, table.weight[[3, 8, 0, 1, 2]])


# Known answers from the reference implementation's test vectors (Random123, kat_vectors).
@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], want: tuple[int, ...]
) -> None:
    assert philox(counter, key) == want


def make_sampling(num_samples: int, **given: object) -> SamplingArrays:
    """Plain sampling at temperature 1; scalars are repeated for every sample."""
    scalars = {
        "temperature": (1.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "choices": (0, np.int32),
        "repetition_penalty": (1.0, np.float32),
        "presence_penalty": (0.0, np.float32),
        "frequency_penalty": (0.0, np.float32),
    }
    arrays: dict[str, object] = {
        name: np.full(num_samples, given.pop(name, value), dtype)
        for name, (value, dtype) in scalars.items()
    }
    empty = np.zeros(0, np.int32)
    arrays |= {
        "seeds": np.arange(num_samples, dtype=np.uint64),
        "positions": np.arange(num_samples, dtype=np.int32),
        "seen_starts": np.zeros(num_samples + 1, np.int32),
        "seen_ids": empty,
        "seen_counts": empty,
        "bias_starts": np.zeros(num_samples + 1, np.int32),
        "bias_ids": empty,
        "bias_values": np.zeros(0, np.float32),
        "bitmask": None,
        "max_top_logprobs": -1,
    }
    return SamplingArrays(**(arrays | given))  # type: ignore[arg-type]


def run_sample(logits: np.ndarray, sampling: SamplingArrays) -> SampleArrays:
    count = len(logits)
    out = SampleArrays(
        ids=np.full(count, -7, np.int32),
        logprobs=np.full(count, np.nan, np.float32),
        ranks=np.zeros(count, np.int32),
        top_ids=np.full((count, 20), -7, np.int32),
        top_logprobs=np.full((count, 20), np.nan, np.float32),
    )
    batch = make_batch([1] * count, [1] * count, np.random.default_rng(0), num_blocks=max(64, count))
    last_ids = np.full(count, -9, np.int32)
    sample(logits.astype(np.float32), sampling, batch, last_ids, out)
    np.testing.assert_array_equal(last_ids, out.ids)
    return out


def test_draws_follow_the_softmax(rng: np.random.Generator) -> None:
    row = rng.standard_normal(8)
    ids = run_sample(np.tile(row, (4000, 1)), make_sampling(4000, temperature=0.7)).ids

    share = np.bincount(ids, minlength=8) / 4000
    want = np.exp(row / 0.7) / np.exp(row / 0.7).sum()
    assert np.abs(share - want).max() < 5 * np.sqrt(0.25 / 4000)


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.49}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.76}, {0, 1, 2, 3}),  # 2 and 3 are equally likely: neither may be left out alone
        ({"min_p": 0.4}, {0, 1}),
        ({"top_k": 2, "top_p": 0.66}, {0}),  # top-p is taken over what top-k left: 2/3 and 1/3
        ({"top_k": 1}, {0}),
        ({"temperature": 0.0}, {0}),
    ],
)
def test_truncation_keeps_exactly(rule: dict[str, float], kept: set[int]) -> None:
    row = np.log([0.5, 0.25, 0.125, 0.125])
    ids = run_sample(np.tile(row, (600, 1)), make_sampling(600, **rule)).ids
    assert set(ids.tolist()) == kept


def test_same_seed_position_and_choice_repeat_and_any_other_differs() -> None:
    draws = {
        uniform(seed, position, choice) for seed in range(5) for position in range(5) for choice in range(5)
    }
    assert len(draws) == 125
    assert uniform(2**63 + 5, 3, 1) != uniform(5, 3, 1)
    assert uniform(1, 2, 3) == uniform(1, 2, 3)


def test_penalties_and_bias_by_the_formula() -> None:
    logits = np.array([[2.0, -2.0, 3.0, 1.0, 0.5]])
    sampling = make_sampling(
        1,
        temperature=0.0,
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        seen_starts=np.array([0, 3], np.int32),
        seen_ids=np.array([0, 1, 2], np.int32),
        seen_counts=np.array([0, 1, 3], np.int32),
        bias_starts=np.array([0, 1], np.int32),
        bias_ids=np.array([4], np.int32),
        bias_values=np.array([0.4], np.float32),
        max_top_logprobs=1,
    )
    # 2 / 2 = 1; -2 * 2 - .5 - .25; 3 / 2 - 1.5 - .25; 1 (ties with 0, which is lower); .9
    out = run_sample(logits, sampling)
    assert out.ids[0] == 0
    assert out.ranks[0] == 2  # logprobs are of the model's own distribution, where id 2 leads
    assert out.top_ids[0, 0] == 2


def test_a_bitmask_forbids_ids() -> None:
    mask = np.array([[0b10100]], np.uint32)
    assert (
        run_sample(np.array([[9.0, 8, 1, 7, 2]]), make_sampling(1, temperature=0.0, bitmask=mask)).ids[0]
        == 4
    )


@pytest.mark.parametrize("row", [[np.nan, 1.0], [-np.inf, -np.inf], [1.0, np.inf]])
def test_a_row_that_is_no_distribution_is_marked(row: list[float]) -> None:
    for temperature in (0.0, 1.0):
        assert run_sample(np.array([row]), make_sampling(1, temperature=temperature)).ids[0] == -1


def test_logprobs_ranks_and_ties() -> None:
    out = run_sample(
        np.array([[1.0, 3.0, 3.0, 0.0]]), make_sampling(1, temperature=0.0, max_top_logprobs=3)
    )
    want = np.log(np.exp([1.0, 3.0, 3.0, 0.0]) / np.exp([1.0, 3.0, 3.0, 0.0]).sum())
    assert out.top_ids[0, :3].tolist() == [1, 2, 0]
    np.testing.assert_allclose(out.top_logprobs[0, :3], want[[1, 2, 0]], rtol=1e-6)
    assert (out.ids[0], out.ranks[0]) == (1, 1)
