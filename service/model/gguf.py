"""Opens a GGUF file: llama.cpp's single-file format with metadata, tokenizer and quantised weights.

Source: the format's description in the ggml repository (docs/gguf.md); parsing and dequantisation are the
`gguf` package's.
"""

import hashlib
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from service.errors import ModelError, UnsupportedModelError
from service.model.checkpoint import Checkpoint
from service.model.config import Architecture, ModelConfig, SamplingDefaults
from service.model.gguf_tokenizer import tokenizer_spec
from service.model.rope import RopeConfig
from service.model.weights import EMBEDDING, FINAL_NORM, HEAD, NamedWeights, check_shapes, layer_name
from service.tensor.quantized import QuantizedWeight

Array = NDArray[Any]

_ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen3": "qwen3"}
_TYPES = {
    "F64",
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
}
_Q8_0_GROUP = 32
_TOP = {"token_embd": EMBEDDING, "output_norm": FINAL_NORM, "output": HEAD}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class _StrictReader(gguf.GGUFReader):
    """Does not read beyond the end of the file, where the package's reader finds empty values for ever."""

    def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        found = super()._get(int(offset), dtype, count, override_order)
        if len(found) < count:
            raise ValueError(f"{count} values of {np.dtype(dtype)} at byte {offset} are not there")
        return found


def open_gguf(path: Path) -> Checkpoint:
    """Raises: ModelError, naming file, tensor, found and wanted; UnsupportedModelError."""
    fields, tensors = _read(path)
    for tensor in tensors.values():
        if tensor.tensor_type.name not in _TYPES:
            raise UnsupportedModelError(
                f"{path}: the tensor {tensor.name} is {tensor.tensor_type.name}; supported are "
                f"{', '.join(sorted(_TYPES))}."
            )
    names = {_hugging_face_name(name): name for name in tensors}
    shapes = {ours: tuple(int(n) for n in reversed(tensors[name].shape)) for ours, name in names.items()}
    config = _config(fields, shapes, tensors, str(path))
    num_parameters = check_shapes(config, shapes, str(path))

    group_sizes = _kept_in_int8(tensors, names)

    def load(name: str) -> Any:
        tensor = tensors[names[name]]
        array = _as_int8(tensor) if name in group_sizes else _as_floats(tensor)
        if config.architecture == "llama" and ".self_attn.q_proj." in name:
            return _unpermuted(array, config.heads)
        if config.architecture == "llama" and ".self_attn.k_proj." in name:
            return _unpermuted(array, config.kv_heads)
        return array

    return Checkpoint(
        path=path,
        config=config,
        sampling_defaults=SamplingDefaults(),
        tokenizer=tokenizer_spec(fields, str(path)),
        weights=NamedWeights(config, load),
        num_parameters=num_parameters,
        fingerprint=file_fingerprint(path),
        group_sizes=group_sizes,
    )


def file_fingerprint(path: Path) -> str:
    """Of a file's length, time of change and first mebibyte, where a GGUF keeps what describes it."""
    stat = path.stat()
    digest = hashlib.blake2b(f"{stat.st_size}:{stat.st_mtime_ns}:".encode(), digest_size=16)
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
    return digest.hexdigest()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors by name."""
    try:
        with path.open("rb") as file:
            magic = file.read(24)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}.") from None
    if magic.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` there.")
    if magic[:4] != b"GGUF":
        raise ModelError(f"{path} is no GGUF file: it begins with {magic[:4]!r}, and GGUF with b'GGUF'.")
    try:
        reader = _StrictReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        return fields, {tensor.name: tensor for tensor in reader.tensors}
    except (ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path} is damaged or was cut off at byte {path.stat().st_size} ({error}). Download it again."
        ) from None


def _hugging_face_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names as they are."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return _TOP[stem]
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _LAYER:
        return layer_name(int(parts[1]), f"{_LAYER[parts[2]]}.{kind}")
    return name


def _config(
    fields: dict[str, Any], shapes: dict[str, tuple[int, ...]], tensors: dict[str, Any], file: str
) -> ModelConfig:
    architecture = fields.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file}: the architecture is {architecture}; supported are {', '.join(_ARCHITECTURES)}."
        )

    def number(key: str, kind: Any, default: float | None = None) -> Any:
        name = f"{architecture}.{key}"
        return _number(fields, name, file, kind, default)

    _refuse_unsupported(fields, architecture, file)
    heads, dim = number("attention.head_count", int), number("embedding_length", int)
    kv_heads = number("attention.head_count_kv", int, heads)
    head_dim = number("attention.key_length", int, max(1, dim // heads))
    if heads % kv_heads or head_dim % 2:
        raise ModelError(
            f"{file}: {heads} heads over {kv_heads} key/value heads of {head_dim} components; a "
            "multiple and an even number are wanted."
        )
    rope = RopeConfig(
        theta=float(number("rope.freq_base", float, 10_000.0)), divisors=_divisors(tensors, head_dim, file)
    )
    eos = [_id(fields, name, file) for name in ("eos", "eot")]
    return ModelConfig(
        architecture=_ARCHITECTURES[architecture],
        dim=dim,
        ffn=number("feed_forward_length", int),
        num_layers=number("block_count", int),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=shapes.get(EMBEDDING, (1,))[0],
        max_positions=number("context_length", int),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon", float),
        rope=rope,
        qkv_bias=layer_name(0, "self_attn.q_proj.bias") in shapes,
        o_bias=layer_name(0, "self_attn.o_proj.bias") in shapes,
        mlp_bias=layer_name(0, "mlp.gate_proj.bias") in shapes,
        qk_norm=architecture == "qwen3",
        tied_embeddings=HEAD not in shapes,
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in eos if token_id is not None)),
        bos_token_id=_id(fields, "bos", file),
        dtype="float32",
    )


def _refuse_unsupported(fields: dict[str, Any], architecture: str, file: str) -> None:
    if fields.get(f"{architecture}.expert_count"):
        raise UnsupportedModelError(f"{file}: mixture-of-experts models are not supported.")
    scaling = fields.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise UnsupportedModelError(f"{file}: RoPE scaling {scaling} is not supported.")


def _number(fields: dict[str, Any], name: str, file: str, kind: Any, default: float | None) -> Any:
    """A positive number of a kind: int, or float, which an int may stand for."""
    value = fields.get(name, default)
    if not isinstance(value, kind | int) or isinstance(value, bool) or not 0 < value < math.inf:
        wanted = "integer" if kind is int else "number"
        raise ModelError(f"{file}: the metadata {name} is {value!r}; a positive {wanted} is wanted.")
    return value


def _id(fields: dict[str, Any], name: str, file: str) -> int | None:
    """A special token's."""
    name = f"tokenizer.ggml.{name}_token_id"
    value = fields.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise ModelError(f"{file}: the metadata {name} is {value!r}; a token id is wanted.")
    return value


def _divisors(tensors: dict[str, Any], head_dim: int, file: str) -> tuple[float, ...]:
    """Of RoPE's frequencies; scaling of kind llama3 is stored so."""
    tensor = tensors.get("rope_freqs.weight")
    if tensor is None:
        return ()
    divisors = tuple(_as_floats(tensor).ravel().tolist())
    if len(divisors) != head_dim // 2 or not all(0 < divisor < math.inf for divisor in divisors):
        raise ModelError(
            f"{file}: the tensor rope_freqs.weight has {len(divisors)} values; {head_dim // 2} positive "
            "ones are wanted."
        )
    return divisors


def _as_floats(tensor: Any) -> Array:
    """The tensor in float32, or bfloat16 or float16 where it is stored so."""
    kind, data = tensor.tensor_type.name, tensor.data
    if kind in ("F32", "F16"):
        return np.asarray(data)
    shape = tuple(int(n) for n in reversed(tensor.shape))
    if kind == "BF16":
        narrow: Array = np.ascontiguousarray(data).view(np.uint8).view(bfloat16).reshape(shape)
        return narrow
    if kind == "F64":
        return np.asarray(data).astype(np.float32)
    return np.asarray(dequantize(data, tensor.tensor_type)).reshape(shape)


def _kept_in_int8(tensors: dict[str, Any], names: dict[str, str]) -> dict[str, int]:
    """Group sizes of Q8_0 matrices, if all projections of layers are such; else all are dequantised."""
    kinds = {name: tensors[theirs].tensor_type.name for name, theirs in names.items()}
    projections = [kind for name, kind in kinds.items() if name.endswith("_proj.weight")]
    if not projections or any(kind != "Q8_0" for kind in projections):
        return {}
    return {name: _Q8_0_GROUP for name, kind in kinds.items() if kind == "Q8_0"}


def _as_int8(tensor: Any) -> QuantizedWeight:
    """Q8_0: blocks of a float16 scale and 32 values."""
    outputs, inputs = (int(n) for n in reversed(tensor.shape))
    blocks = np.asarray(tensor.data).reshape(outputs, inputs // _Q8_0_GROUP, 2 + _Q8_0_GROUP)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0]
    values = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(outputs, inputs)
    return QuantizedWeight(values, scales, _Q8_0_GROUP)


def _unpermuted(array: Any, heads: int) -> Any:
    """Rows back in the half-rotated order: llama.cpp stores the pairs that RoPE turns side by side."""
    order = np.arange(len(array)).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
    return array[order]
