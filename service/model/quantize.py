"""`photoninfer quantize`: rewrites a checkpoint with INT8 weights, a tensor at a time."""

import json
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from service.errors import ModelError, PhotonError
from service.model.checkpoint import Checkpoint, open_checkpoint
from service.model.config import ModelConfig
from service.model.quantization import Quantization
from service.model.weights import NamedWeights, wanted_shapes
from service.progress import Progress
from service.scratch import scratch_folder
from service.tensor.quantized import QuantizedWeight, quantize

_SHARD_BYTES = 4 << 30
_COPIED = (  # beside the weights of a Hugging Face directory
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "LICENSE",
)


def quantize_checkpoint(
    checkpoint: Checkpoint, out: Path, quantization: Quantization, progress: Progress
) -> Path:
    """Write `out`, a directory that can be served: it appears whole or not at all.

    Raises: ModelError (out exists, the model is quantised already, weights that are not finite, no space).
    """
    if out.exists():
        raise ModelError(f"{out} exists already; nothing is overwritten.")
    if checkpoint.group_sizes:
        raise ModelError(f"{checkpoint.path} has INT8 weights already; serve it as it is.")
    if not out.parent.is_dir():
        raise ModelError(f"{out.parent} is no directory.")
    _check_space(checkpoint, out.parent, quantization)
    try:
        with scratch_folder(out.parent, prefix=f".{out.name}-", suffix=".partial") as scratch:
            _write(checkpoint, scratch, quantization, progress)
            _verify(checkpoint, scratch, quantization, progress)
            for path in (scratch, *scratch.iterdir()):  # as others of a user: temporary ones are private
                path.chmod(0o755 if path.is_dir() else 0o644)
            scratch.rename(out)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{out} can't be written: {reason}.") from None
    return out


def _check_space(checkpoint: Checkpoint, folder: Path, quantization: Quantization) -> None:
    needed = sum(
        prod(shape) * (2 if (size := quantization.of(name, shape)) is None else 1 + 2 / size)
        for name, shape in wanted_shapes(checkpoint.config).items()
    )
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"{folder} has {free / 2**30:.2f} GiB free; the quantised model takes {needed / 2**30:.2f} GiB."
        )


def _write(checkpoint: Checkpoint, folder: Path, quantization: Quantization, progress: Progress) -> None:
    progress.phase(f"quantising {checkpoint.path.name}")
    config = checkpoint.config
    for name, text in _texts(checkpoint, quantization).items():
        (folder / name).write_text(text, encoding="utf-8")
    names = list(wanted_shapes(config))
    shards: list[dict[str, NDArray[Any]]] = [{}]
    where: dict[str, int] = {}
    size = total = 0
    for done, name in enumerate(names, 1):
        for part, array in _tensors(checkpoint, name, quantization):
            if size and size + array.nbytes > _SHARD_BYTES:
                _save(folder, len(shards), shards[-1])
                shards[-1] = {}
                shards.append({})
                size = 0
            shards[-1][part], where[part] = array, len(shards)
            size, total = size + array.nbytes, total + array.nbytes
        progress.update(done, len(names), "tensors")
    _save(folder, len(shards), shards[-1])
    if len(shards) == 1:
        (folder / _shard(1)).rename(folder / "model.safetensors")
        return
    index = {"metadata": {"total_size": total}, "weight_map": {p: _shard(n) for p, n in where.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _shard(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def _save(folder: Path, number: int, tensors: dict[str, NDArray[Any]]) -> None:
    save_file(tensors, folder / _shard(number), metadata={"format": "pt"})


def _tensors(
    checkpoint: Checkpoint, name: str, quantization: Quantization
) -> Iterator[tuple[str, NDArray[Any]]]:
    tensor = _source(checkpoint).tensor(name)
    group_size = quantization.of(name, tensor.shape)
    if not np.isfinite(tensor).all():
        raise ModelError(f"{checkpoint.path}: the tensor {name} holds NaN or infinity.")
    if group_size is None:
        yield name, np.ascontiguousarray(tensor)
        return
    quantized = quantize(tensor, group_size)
    yield name, quantized.values
    yield f"{name}_scale", quantized.scales


def _source(checkpoint: Checkpoint) -> NamedWeights:
    assert isinstance(checkpoint.weights, NamedWeights)  # opened without the weight cache
    return checkpoint.weights


def _verify(checkpoint: Checkpoint, folder: Path, quantization: Quantization, progress: Progress) -> None:
    """Read back what was written and hold it against the bound of service/tensor/quantized.py."""
    progress.phase("verifying")
    written = open_checkpoint(folder)
    names = list(wanted_shapes(checkpoint.config))
    for done, name in enumerate(names, 1):
        before, after = _source(checkpoint).tensor(name), _source(written).tensor(name)
        if isinstance(after, QuantizedWeight):
            _check_bound(name, before, after)
        elif not np.array_equal(before, after):
            raise PhotonError(f"{name} was not written as it was read: the disk or the memory is faulty.")
        progress.update(done, len(names), "tensors")


def _check_bound(name: str, before: NDArray[Any], after: QuantizedWeight) -> None:
    step = max(1, (1 << 22) // before.shape[1])
    for start in range(0, len(before), step):
        rows = slice(start, start + step)
        error = np.abs(before[rows].astype(np.float32) - after[rows].dequantize())
        scales = np.repeat(after.scales[rows].astype(np.float32), after.group_size, axis=1)
        bound = scales[:, : error.shape[1]] * np.float32(0.5001) + np.float32(127 * 2.0**-25)
        if not (error <= bound).all():
            raise PhotonError(f"{name} was not written as it was read: the disk or the memory is faulty.")


def _texts(checkpoint: Checkpoint, quantization: Quantization) -> dict[str, str]:
    """config.json, and what lies beside it."""
    path = checkpoint.path
    if path.is_dir():
        texts = {
            name: (path / name).read_text(encoding="utf-8") for name in _COPIED if (path / name).is_file()
        }
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    else:
        texts, config = _tokenizer_texts(checkpoint), config_json(checkpoint.config, path)
    config["quantization_config"] = _quantization_config(quantization, checkpoint.config)
    return {**texts, "config.json": json.dumps(config, indent=2) + "\n"}


def _quantization_config(quantization: Quantization, config: ModelConfig) -> dict[str, Any]:
    """In the terms of compressed-tensors."""
    weights = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": quantization.group_size,
        "dynamic": False,
    }
    has_head = quantization.embedding if config.tied_embeddings else quantization.head
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear", "Embedding"] if quantization.embedding else ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": [] if has_head else ["lm_head"],
    }


def _tokenizer_texts(checkpoint: Checkpoint) -> dict[str, str]:
    spec = checkpoint.tokenizer
    config = {
        "bos_token": spec.bos_token,
        "eos_token": spec.eos_token,
        "add_bos_token": spec.add_bos_token,
        "additional_special_tokens": list(spec.special_tokens),
        "chat_template": spec.chat_template,
    }
    known = {key: value for key, value in config.items() if value is not None}
    return {"tokenizer.json": spec.tokenizer_json, "tokenizer_config.json": json.dumps(known, indent=2)}


def config_json(config: ModelConfig, path: Path) -> dict[str, Any]:
    """A config.json for a model that came without, from `path`. Raises: ModelError: it can't be said so."""
    if config.rope.divisors:
        raise ModelError(
            f"{path}: its RoPE frequencies are a table, which config.json can't say; quantise the model "
            "from its Hugging Face directory."
        )
    return {
        "architectures": ["Qwen3ForCausalLM" if config.architecture == "qwen3" else "LlamaForCausalLM"],
        "model_type": config.architecture,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tied_embeddings,
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": config.bos_token_id,
        "torch_dtype": config.dtype,
    }
