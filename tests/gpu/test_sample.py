"""kernels/sample.cu against the NumPy twin."""

from typing import Any

import numpy as np
import pytest

from service.tensor.cpu.sample import sample as reference
from tests.gpu import cases

pytestmark = pytest.mark.gpu

VOCABS = [33, 1000, 49152, 128256]


def run(backend: Any, logits: Any, sampling: Any) -> tuple[Any, Any]:
    """What the device and the twin leave, on the host."""
    samples = len(logits)
    rng = np.random.default_rng(0)
    batch = cases.make_step(rng, cases.LLAMA, [1] * samples)
    results = []
    for is_device in (True, False):
        out, last_ids = cases.make_samples(samples), np.full(samples, -7, np.int32)
        if is_device:
            moved, last = cases.on_device(out), cases.device(last_ids)
            backend.sample(
                cases.device(logits), cases.on_device(sampling), cases.on_device(batch), last, moved
            )
            fields = ("ids", "logprobs", "ranks", "top_ids", "top_logprobs")
            out = type(out)(*(getattr(moved, name).get() for name in fields))
            last_ids = last.get()
        else:
            reference(logits.copy(), sampling, batch, last_ids, out)
        assert (last_ids[batch.sample_lanes] == out.ids).all()
        results.append(out)
    return results[0], results[1]


def gaussian(rng: np.random.Generator, samples: int, vocab: int, spread: float = 3.0) -> Any:
    return rng.standard_normal((samples, vocab), np.float32) * np.float32(spread)


@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy_takes_the_first_of_the_largest(backend: Any, rng: np.random.Generator, vocab: int) -> None:
    logits = gaussian(rng, 9, vocab)
    logits[0, [5, vocab - 1, 20]] = 99.0
    logits[1] = 0.0
    logits[2] = -np.inf
    logits[2, 7] = -1e30
    logits[3, vocab // 2] = np.nan
    logits[4] = -np.inf
    found, wanted = run(backend, logits, cases.make_sampling(9))
    assert found.ids.tolist() == wanted.ids.tolist()
    assert found.ids[:5].tolist() == [5, 0, 7, -1, -1]


PARAMETERS = [
    {},
    {"top_k": 1},
    {"top_k": 17},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"top_k": 10**6, "top_p": 0.999},
]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_draws_are_those_of_the_twin(
    backend: Any, rng: np.random.Generator, vocab: int, parameters: dict[str, float], temperature: float
) -> None:
    """But for draws that fall on a boundary, where masses are rounded differently."""
    samples = 64
    changes: dict[str, Any] = {
        name: np.full(samples, value, np.int32 if name == "top_k" else np.float32)
        for name, value in parameters.items()
    }
    sampling = cases.make_sampling(
        samples,
        temperature=np.full(samples, temperature, np.float32),
        seeds=rng.integers(0, 2**64, samples, np.uint64),
        choices=rng.integers(0, 4, samples).astype(np.int32),
        **changes,
    )
    found, wanted = run(backend, gaussian(rng, samples, vocab), sampling)
    assert np.count_nonzero(found.ids != wanted.ids) <= 1


def test_ties_at_the_kth_are_all_kept(backend: Any) -> None:
    logits = np.zeros((512, 1000), np.float32)
    logits[:, :10] = 5.0
    sampling = cases.make_sampling(
        512,
        temperature=np.ones(512, np.float32),
        top_k=np.full(512, 3, np.int32),
        seeds=np.arange(512, dtype=np.uint64),
    )
    found, wanted = run(backend, logits, sampling)
    assert found.ids.tolist() == wanted.ids.tolist()
    assert set(found.ids.tolist()) == set(range(10))


def test_penalties_bias_and_bitmask(backend: Any, rng: np.random.Generator) -> None:
    samples, vocab = 40, 3000
    counts = rng.integers(0, 50, samples)
    seen = [rng.permutation(vocab)[:count] for count in counts]
    bias = [rng.permutation(vocab)[: count // 2] for count in counts]
    values = [np.where(rng.random(len(ids)) < 0.2, -np.inf, rng.normal(size=len(ids)) * 4) for ids in bias]
    sampling = cases.make_sampling(
        samples,
        temperature=np.where(np.arange(samples) % 2, 1.0, 0.0).astype(np.float32),
        seeds=rng.integers(0, 2**64, samples, np.uint64),
        repetition_penalty=rng.uniform(0.8, 1.5, samples).astype(np.float32),
        presence_penalty=rng.uniform(-2, 2, samples).astype(np.float32),
        frequency_penalty=rng.uniform(-2, 2, samples).astype(np.float32),
        seen_starts=np.concatenate([[0], np.cumsum([len(ids) for ids in seen])]).astype(np.int32),
        seen_ids=np.concatenate(seen).astype(np.int32),
        seen_counts=rng.integers(0, 4, sum(map(len, seen))).astype(np.int32),
        bias_starts=np.concatenate([[0], np.cumsum([len(ids) for ids in bias])]).astype(np.int32),
        bias_ids=np.concatenate(bias).astype(np.int32),
        bias_values=np.concatenate(values).astype(np.float32),
        bitmask=rng.integers(0, 2**32, (samples, -(-vocab // 32)), np.uint32),
        max_top_logprobs=7,
    )
    found, wanted = run(backend, gaussian(rng, samples, vocab), sampling)
    same = found.ids == wanted.ids
    assert np.count_nonzero(~same) <= 1
    np.testing.assert_allclose(found.logprobs[same], wanted.logprobs[same], atol=2e-5)
    assert (found.ranks[same] == wanted.ranks[same]).all()
    assert (found.top_ids[:, :7] == wanted.top_ids[:, :7]).all()
    np.testing.assert_allclose(found.top_logprobs[:, :7], wanted.top_logprobs[:, :7], atol=2e-5)
    assert (found.top_ids[:, 7:] == -7).all()


@pytest.mark.parametrize("vocab", VOCABS)
def test_logprobs_ranks_and_ties(backend: Any, rng: np.random.Generator, vocab: int) -> None:
    logits = gaussian(rng, 5, vocab)
    logits[0] = np.round(logits[0])
    logits[1] = 1.0
    sampling = cases.make_sampling(5, temperature=np.ones(5, np.float32), max_top_logprobs=20)
    found, wanted = run(backend, logits, sampling)
    assert (found.top_ids == wanted.top_ids).all()
    same = found.ids == wanted.ids
    assert np.count_nonzero(~same) <= 1
    np.testing.assert_allclose(found.top_logprobs, wanted.top_logprobs, atol=3e-5)
    np.testing.assert_allclose(found.logprobs[same], wanted.logprobs[same], atol=3e-5)
    assert (found.ranks[same] == wanted.ranks[same]).all()


def test_a_draw_does_not_depend_on_the_batch(backend: Any, rng: np.random.Generator) -> None:
    logits = gaussian(rng, 64, 128256)
    ones = np.ones(64, np.float32)
    seeds = rng.integers(0, 2**64, 64, np.uint64)
    all_rows = cases.make_sampling(64, temperature=ones, top_p=ones * 0.95, seeds=seeds)
    found, _ = run(backend, logits, all_rows)
    for row in (0, 17, 63):
        one = cases.make_sampling(
            1,
            temperature=ones[:1],
            top_p=ones[:1] * np.float32(0.95),
            seeds=seeds[row : row + 1],
            positions=np.array([row], np.int32),
        )
        alone, _ = run(backend, logits[row : row + 1], one)
        assert alone.ids[0] == found.ids[row]
