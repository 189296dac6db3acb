"""INT8 checkpoints: written by `photoninfer quantize`, and in the hub's conventions."""

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from service.errors import ModelError, UnsupportedModelError
from service.model.checkpoint import Checkpoint, open_checkpoint
from service.model.decoder import Decoder
from service.model.quantization import FloatWeights, Quantization
from service.model.quantize import quantize_checkpoint
from service.model.weight_cache import open_gguf_cached
from service.model.weights import wanted_shapes
from service.progress import NoProgress
from service.tensor.backend import StepArrays
from service.tensor.cpu.backend import CpuBackend
from service.tensor.quantized import QuantizedWeight, quantize
from tests.checkpoints import make_checkpoint
from tests.gguf_files import make_gguf, tensor_shapes

PROMPT = list(range(3, 60))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("m") / "model", "qwen3", dtype="bfloat16", head_dim=32)


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def logits(checkpoint: Checkpoint, quantization: Quantization | None = None, weights: Any = None) -> Any:
    """Of every position of the prompt."""
    config, count, backend = checkpoint.config, len(PROMPT), CpuBackend()
    source = weights or checkpoint.weights
    decoder = Decoder(config, source, backend, 64, NoProgress(), quantization or Quantization())
    positions = np.arange(count, dtype=np.int32)
    step = StepArrays(
        token_ids=np.array(PROMPT, np.int32),
        positions=positions,
        slot_mapping=positions,
        row_starts=np.array([0, count], np.int32),
        context_lens=np.array([count], np.int32),
        block_tables=np.arange(4, dtype=np.int32)[None],
        lanes=np.zeros(1, np.int32),
        sample_rows=positions,
        sample_lanes=np.zeros(count, np.int32),
        num_decode=0,
    )
    out = np.empty((count, config.vocab_size), np.float32)
    buffers = decoder.new_activations(count)
    decoder.forward(step, decoder.new_cache(4, 16), buffers, np.zeros(1, np.int32), out)
    return out


def error(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_a_quantised_model_answers_as_one_quantised_at_load(
    original: Path, tmp_path: Path, group_size: int
) -> None:
    quantization = Quantization(group_size=group_size)
    checkpoint = open_checkpoint(original)
    out = quantize_checkpoint(checkpoint, tmp_path / "out", quantization, NoProgress())
    written = open_checkpoint(out)

    assert set(written.group_sizes.values()) == {group_size}
    assert written.tokenizer == checkpoint.tokenizer
    assert np.array_equal(logits(written), logits(checkpoint, quantization))
    assert 0 < error(logits(written), logits(checkpoint)) < 0.1
    assert error(logits(written, weights=FloatWeights(written.weights)), logits(written)) < 1e-5
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert size < 0.6 * sum(path.stat().st_size for path in original.glob("*.safetensors"))
    assert not list(tmp_path.glob(".*"))


def test_embedding_and_head_can_be_left_out(original: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(original)
    quantization = Quantization(group_size=64, embedding=False, head=False)
    out = quantize_checkpoint(checkpoint, tmp_path / "out", quantization, NoProgress())
    written = open_checkpoint(out)

    assert "model.embed_tokens.weight" not in written.group_sizes
    assert "lm_head.weight" not in written.group_sizes
    assert json.loads((out / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]
    assert np.array_equal(logits(written), logits(checkpoint, quantization))


def test_a_gguf_file_is_quantised_with_its_tokenizer(tmp_path: Path) -> None:
    make_gguf(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    out = quantize_checkpoint(checkpoint, tmp_path / "out", Quantization(group_size=32), NoProgress())
    written = open_checkpoint(out)

    assert written.tokenizer.tokenizer_json == checkpoint.tokenizer.tokenizer_json
    assert written.tokenizer.chat_template == checkpoint.tokenizer.chat_template
    assert written.config.rope == checkpoint.config.rope
    assert written.config.eos_token_ids == checkpoint.config.eos_token_ids


def test_nothing_is_overwritten_and_nothing_quantised_twice(original: Path, tmp_path: Path) -> None:
    checkpoint, size = open_checkpoint(original), Quantization(group_size=32)
    out = quantize_checkpoint(checkpoint, tmp_path / "out", size, NoProgress())
    before = sorted((path.name, path.stat().st_mtime_ns) for path in out.iterdir())

    with pytest.raises(ModelError, match="exists already"):
        quantize_checkpoint(checkpoint, out, size, NoProgress())
    with pytest.raises(ModelError, match="INT8 weights already"):
        quantize_checkpoint(open_checkpoint(out), tmp_path / "again", size, NoProgress())
    assert sorted((path.name, path.stat().st_mtime_ns) for path in out.iterdir()) == before


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(copy: Path, tmp_path: Path, bad: float) -> None:
    file = copy / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = bad
    save_file(tensors, file)

    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN or infinity"):
        quantize_checkpoint(
            open_checkpoint(copy), tmp_path / "out", Quantization(group_size=32), NoProgress()
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


def run_quantize(model: Path, out: Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "service", "quantize", str(model), str(out), "--group-size", "32"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)


def test_a_full_disk_leaves_nothing_behind(original: Path, tmp_path: Path) -> None:
    def limit_files() -> None:  # a write beyond so many bytes fails as on a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    process = run_quantize(original, tmp_path / "out", preexec_fn=limit_files)
    _, told = process.communicate()

    assert process.returncode == 1
    assert "can't be written" in told
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_removed_by_the_next(original: Path, tmp_path: Path) -> None:
    dead, alive = tmp_path / ".out-dead.partial", tmp_path / ".out-alive.partial"
    dead.mkdir()
    (dead / "model-00001.safetensors").write_bytes(b"half")
    alive.mkdir()
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    process = run_quantize(original, tmp_path / "out")
    printed, _ = process.communicate()
    os.close(lock)

    assert process.returncode == 0
    assert printed.strip() == str(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out-alive.partial", "out"]


def packed(values: NDArray[np.int8]) -> NDArray[np.int32]:
    """Four neighbours of a row in an int32, the first lowest, 128 added."""
    unsigned = (values.astype(np.int16) + 128).astype(np.uint8)
    return np.ascontiguousarray(unsigned).view("<i4")


def convention(
    copy: Path, kind: str, group_size: int | None, changes: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """Rewrite a checkpoint as other tools do. `group_size` None: a scale for each row."""
    config = json.loads((copy / "config.json").read_text())
    tensors = load_file(copy / "model.safetensors")
    shapes = wanted_shapes(open_checkpoint(copy).config)
    for name in [name for name in shapes if name.endswith("_proj.weight")]:
        stem, weight = name.removesuffix("weight"), tensors.pop(name).astype(np.float32)
        quantized = quantize(weight, group_size or 128)
        scales, values = quantized.scales, quantized.values
        if group_size is None:
            scales = (np.abs(weight).max(axis=1, keepdims=True) / 127).astype(np.float16)
            values = np.clip(np.rint(weight / scales.astype(np.float32)), -127, 127).astype(np.int8)
        if kind == "gptq":
            zeros = np.full((scales.shape[1], len(weight)), -1, np.int8)  # 127: version 1 keeps one less
            tensors |= {
                f"{stem}qweight": np.ascontiguousarray(packed(values).T),
                f"{stem}qzeros": packed(zeros),
                f"{stem}scales": np.ascontiguousarray(scales.T),
                f"{stem}g_idx": (np.arange(weight.shape[1]) // (group_size or weight.shape[1])).astype(
                    np.int32
                ),
            }
        elif kind == "pack-quantized":
            shape = np.array(weight.shape, np.int64)
            tensors |= {f"{stem}weight_packed": packed(values), f"{stem}weight_shape": shape}
            tensors[f"{stem}weight_scale"] = scales
        else:
            tensors |= {f"{stem}weight": values, f"{stem}weight_scale": scales}
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": group_size}
    weights["strategy"] = "channel" if group_size is None else "group"
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**weights, **changes}}},
        "ignore": ["lm_head"],
    }
    if kind == "gptq":
        size = -1 if group_size is None else group_size
        gptq = {"quant_method": "gptq", "bits": 8, "group_size": size, "sym": True, "desc_act": False}
        config["quantization_config"] = {**gptq, **changes}
    (copy / "config.json").write_text(json.dumps(config))
    save_file(tensors, copy / "model.safetensors")
    return copy


@pytest.mark.parametrize(
    ("kind", "group_size"),
    [
        *((kind, size) for kind in ("int-quantized", "pack-quantized") for size in (32, 64, 128, None)),
        ("gptq", 32),  # whole groups only
        ("gptq", None),
    ],
)
def test_the_conventions_of_the_hub(original: Path, copy: Path, kind: str, group_size: int | None) -> None:
    wanted = open_checkpoint(original)
    found = open_checkpoint(convention(copy, kind, group_size))

    assert set(found.group_sizes.values()) == {group_size or 128}
    assert len(found.group_sizes) == 7 * found.config.num_layers
    layer, floats = found.weights.layer(1), wanted.weights.layer(1)
    for part, weight in zip(
        (*layer.qkv, *layer.gate_up, layer.o, layer.down),
        (*floats.qkv, *floats.gate_up, floats.o, floats.down),
        strict=True,
    ):
        assert isinstance(part, QuantizedWeight)
        assert error(part.dequantize(), weight.astype(np.float32)) < 0.02
    assert error(logits(found), logits(wanted)) < 0.1


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("int-quantized", {"num_bits": 4}, "num_bits 4"),
        ("int-quantized", {"type": "float"}, "type 'float'"),
        ("int-quantized", {"symmetric": False}, "symmetric False"),
        ("int-quantized", {"group_size": 256}, "group_size 256"),
        ("int-quantized", {"strategy": "tensor"}, "strategy 'tensor'"),
        ("pack-quantized", {"actorder": "group"}, "actorder 'group'"),
        ("gptq", {"bits": 4}, "bits 4"),
        ("gptq", {"sym": False}, "sym False"),
        ("gptq", {"group_size": 16}, "group_size 16"),
        ("gptq", {"quant_method": "awq"}, "quant_method 'awq'"),
        ("gptq", {"quant_method": "fp8"}, "quant_method 'fp8'"),
    ],
)
def test_what_does_not_map_exactly_is_refused_by_name(
    copy: Path, kind: str, changes: dict[str, Any], told: str
) -> None:
    convention(copy, kind, 32, changes)
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: .*{told}.*not supported; wanted"):
        open_checkpoint(copy)


def edited(copy: Path, **arrays: Any) -> Checkpoint:
    tensors = load_file(copy / "model.safetensors")
    tensors |= {f"model.layers.0.mlp.up_proj.{name}": array for name, array in arrays.items()}
    save_file(tensors, copy / "model.safetensors")
    return open_checkpoint(copy)


def test_gptq_with_another_order_of_columns_or_odd_zero_points_is_refused(copy: Path) -> None:
    convention(copy, "gptq", 32)
    order = np.array([1, 0] * 32, np.int32)
    with pytest.raises(UnsupportedModelError, match="order of columns"):
        edited(copy, g_idx=order).weights.layer(0)
    zeros = packed(np.array([[3, -1] * 48] * 2, np.int8))
    with pytest.raises(UnsupportedModelError, match="zero points"):
        edited(copy, qzeros=zeros).weights.layer(0)


def test_scales_beyond_float16_and_missing_ones_are_refused(copy: Path) -> None:
    convention(copy, "int-quantized", 32)
    with pytest.raises(UnsupportedModelError, match="kept in float16 exactly"):
        edited(copy, weight_scale=np.full((96, 2), 1e-9, np.float32)).weights.layer(0)
    with pytest.raises(ModelError, match="scales"):
        edited(copy, weight_scale=np.ones((96, 3), np.float16)).weights.layer(0)


def test_parts_of_one_projection_that_differ_are_dequantised(copy: Path, original: Path) -> None:
    convention(copy, "int-quantized", 32)
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    del tensors[f"{name}_scale"]
    tensors[name] = load_file(original / "model.safetensors")[name]
    save_file(tensors, copy / "model.safetensors")
    layer = open_checkpoint(copy).weights.layer(0)

    assert not any(isinstance(part, QuantizedWeight) for part in layer.qkv)
    assert all(isinstance(part, QuantizedWeight) for part in layer.gate_up)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_q8_0_is_used_as_it_lies_in_the_file(tmp_path: Path, architecture: str) -> None:
    everything = {name: "Q8_0" for name in tensor_shapes(architecture) if "norm" not in name}
    values = make_gguf(tmp_path / "all.gguf", architecture, kinds=everything)
    checkpoint = open_checkpoint(tmp_path / "all.gguf")

    assert set(checkpoint.group_sizes.values()) == {32}
    assert isinstance(checkpoint.weights.embedding(), QuantizedWeight)
    down = checkpoint.weights.layer(1).down
    assert isinstance(down, QuantizedWeight)
    np.testing.assert_allclose(down.dequantize(), values["blk.1.ffn_down.weight"], rtol=1e-6)
    floats = FloatWeights(checkpoint.weights)
    assert error(logits(checkpoint), logits(checkpoint, weights=floats)) < 1e-5
    assert open_gguf_cached(tmp_path / "all.gguf", tmp_path / "cache").group_sizes
    assert not list(tmp_path.glob("cache/weights/*"))


def test_a_gguf_file_with_other_kinds_too_is_dequantised(tmp_path: Path) -> None:
    kinds = {name: "Q8_0" for name in tensor_shapes("llama") if "norm" not in name}
    make_gguf(tmp_path / "m.gguf", kinds=kinds | {"blk.0.attn_v.weight": "F16"})

    assert open_checkpoint(tmp_path / "m.gguf").group_sizes == {}
