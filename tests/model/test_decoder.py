"""Logits of whole models against transformers in float32: prefill, chunked prefill and decode."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from service.engine.batch import BatchBuilder
from service.engine.block_pool import BlockPool
from service.engine.request import Request, SamplingParams
from service.engine.scheduler import Scheduler
from service.model.checkpoint import Checkpoint, open_checkpoint
from service.model.decoder import Decoder
from service.progress import NoProgress
from service.tensor.cpu.backend import CpuBackend
from tests.checkpoints import make_checkpoint, oracle_logits

BLOCK = 4
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama head_dim apart": ("llama", {"head_dim": 24}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama scaled rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama sharded": ("llama", {"shard": "60KB"}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
}


def logits_in_steps(checkpoint: Checkpoint, ids: list[int], chunks: list[int]) -> NDArray[np.float32]:
    """Logits after steps that compute the next `chunks[i]` ids each. Shapes: [len(chunks), vocab]."""
    backend = CpuBackend()
    config = checkpoint.config
    decoder = Decoder(config, checkpoint.weights, backend, config.max_positions, NoProgress())
    num_blocks = -(-len(ids) // BLOCK) + 3
    cache, buffers = decoder.new_cache(num_blocks, BLOCK), decoder.new_activations(len(ids))
    pool = BlockPool(num_blocks, BLOCK)
    pool.extend([], 2 * BLOCK)  # so that the blocks do not begin at 0
    builder = BatchBuilder(1, num_blocks, BLOCK, ())
    scheduler = Scheduler(pool, len(ids), 1)
    request = Request(id="r", prompt_ids=ids[: chunks[0]], params=SamplingParams(max_tokens=10**6))
    scheduler.add(request)
    found = []
    for count, following in zip(chunks, [*chunks[1:], 0], strict=True):
        step = scheduler.schedule()
        assert [work.num_tokens for work in step.work] == [count]
        logits = np.full((1, config.vocab_size), np.nan, np.float32)
        decoder.forward(builder.build(step).arrays, cache, buffers, np.zeros(1, np.int32), logits)
        scheduler.step_done(step)
        known = len(request.token_ids)
        request.token_ids += ids[known : known + following]
        found.append(logits[0])
    return np.array(found)


def relative_error(found: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(found - want) / np.linalg.norm(want))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    kind, options = MODELS[name]
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, kind, **options))
    ids = np.random.default_rng(3).integers(0, 300, 90).tolist()
    want = oracle_logits(tmp_path, ids)

    for chunks in ([90], [1] * 90, [37, 1, 1, 30, 21]):
        found = logits_in_steps(checkpoint, ids, chunks)
        assert relative_error(found, want[np.cumsum(chunks) - 1]) < 1e-4


def test_scaled_rope_holds_far_beyond_the_original_context(tmp_path: Path) -> None:
    make_checkpoint(
        tmp_path, rope_parameters=LLAMA3_ROPE, max_position_embeddings=2048, num_hidden_layers=1
    )
    ids = np.random.default_rng(3).integers(0, 300, 1500).tolist()

    found = logits_in_steps(open_checkpoint(tmp_path), ids, [1500])

    assert relative_error(found[0], oracle_logits(tmp_path, ids)[-1]) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_checkpoints_are_widened_exactly(dtype: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, "qwen3", head_dim=16, dtype=dtype))
    ids = list(range(40))

    found = logits_in_steps(checkpoint, ids, [40])

    assert relative_error(found[0], oracle_logits(tmp_path, ids)[-1]) < 1e-4


def test_bfloat16_weights_take_half_the_memory_and_give_the_same_logits(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, dtype="bfloat16"))
    wide, narrow = (
        CpuBackend(dtype).linear([checkpoint.weights.embedding()]) for dtype in (np.float32, bfloat16)
    )
    assert wide.num_bytes == 2 * narrow.num_bytes
    np.testing.assert_array_equal(wide.rows(np.arange(300)), narrow.rows(np.arange(300)))


@pytest.mark.parametrize("kept_as", [np.float32, bfloat16])
def test_loading_takes_little_more_memory_than_what_it_leaves(kept_as: Any, tmp_path: Path) -> None:
    make_checkpoint(
        tmp_path, dtype="bfloat16", hidden_size=128, intermediate_size=512, num_hidden_layers=12
    )
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(tmp_path)
        decoder = Decoder(checkpoint.config, checkpoint.weights, CpuBackend(kept_as), 64, NoProgress())
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(decoder.linears) == 12 * 4 + 1
    assert peak < 1.5 * kept


def test_a_tied_head_is_held_once(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, tie_word_embeddings=True))
    decoder = Decoder(checkpoint.config, checkpoint.weights, CpuBackend(), 64, NoProgress())
    assert decoder._head is decoder._embedding


def test_qk_norm_weights_matter(tmp_path: Path) -> None:
    """Were the norm skipped, zeroing its weights would change nothing."""
    from safetensors.numpy import load_file, save_file

    checkpoint = open_checkpoint(make_checkpoint(tmp_path, "qwen3", head_dim=16))
    before = logits_in_steps(checkpoint, list(range(20)), [20])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_norm.weight"] *= 0
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    after = logits_in_steps(open_checkpoint(tmp_path), list(range(20)), [20])

    assert relative_error(after, before) > 1e-3
