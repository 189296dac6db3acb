"""Which tensors a model has, by Hugging Face's names, and how the decoder is given them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, Protocol

from service.errors import ModelError
from service.model.config import ModelConfig
from service.tensor.quantized import QuantizedWeight

Array = Any  # of numpy; a projection, the embedding and the head may be QuantizedWeights

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(slots=True, frozen=True)
class LayerWeights:
    """One layer's tensors: projections [out, in], norms [dim] or [head_dim]. Fused ones come in parts."""

    input_norm: Array
    qkv: tuple[Array, ...]  # q, k, v
    qkv_bias: tuple[Array, ...] | None
    q_norm: Array | None
    k_norm: Array | None
    o: Array
    o_bias: Array | None
    post_norm: Array
    gate_up: tuple[Array, ...]  # gate, up
    gate_up_bias: tuple[Array, ...] | None
    down: Array
    down_bias: Array | None


class WeightSource(Protocol):
    """Gives a model's tensors one layer at a time, so that a loader never holds them twice."""

    def embedding(self) -> Array:
        """[vocab, dim]"""

    def head(self) -> Array | None:
        """[vocab, dim]; None: the embedding serves."""

    def final_norm(self) -> Array:
        """[dim]"""

    def layer(self, index: int) -> LayerWeights:
        """Memory maps, or arrays made for the caller."""


def layer_name(index: int, part: str) -> str:
    """Full name of a layer's tensor."""
    return f"model.layers.{index}.{part}"


def wanted_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this shape must have (the head only where it is not tied)."""
    dim, ffn, head_dim = config.dim, config.ffn, config.head_dim
    q_dim, kv_dim = config.heads * head_dim, config.kv_heads * head_dim
    linears = {
        "self_attn.q_proj": (q_dim, dim, config.qkv_bias),
        "self_attn.k_proj": (kv_dim, dim, config.qkv_bias),
        "self_attn.v_proj": (kv_dim, dim, config.qkv_bias),
        "self_attn.o_proj": (dim, q_dim, config.o_bias),
        "mlp.gate_proj": (ffn, dim, config.mlp_bias),
        "mlp.up_proj": (ffn, dim, config.mlp_bias),
        "mlp.down_proj": (dim, ffn, config.mlp_bias),
    }
    norms = {"input_layernorm": dim, "post_attention_layernorm": dim}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, dim), FINAL_NORM: (dim,)}
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, dim)
    for index in range(config.num_layers):
        for part, width in norms.items():
            shapes[layer_name(index, f"{part}.weight")] = (width,)
        for part, (rows, columns, has_bias) in linears.items():
            shapes[layer_name(index, f"{part}.weight")] = (rows, columns)
            if has_bias:
                shapes[layer_name(index, f"{part}.bias")] = (rows,)
    return shapes


def check_shapes(
    config: ModelConfig,
    found: Mapping[str, tuple[int, ...]],
    file: str,
    file_of: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Compare a checkpoint's tensors with what the config asks for; return the number of parameters.

    `file_of`: where a tensor lies, if not in `file`.
    Raises: ModelError naming file, tensor, found and wanted.
    """
    wanted = wanted_shapes(config)
    for name, shape in wanted.items():
        if name not in found:
            hint = " (the config says that embeddings are not tied)" if name == HEAD else ""
            raise ModelError(f"{file}: the tensor {name} of shape {list(shape)} is missing{hint}.")
        if tuple(found[name]) != shape:
            raise ModelError(
                f"{file_of.get(name, file)}: the tensor {name} has shape {list(found[name])}; the config "
                f"wants {list(shape)}."
            )
    return sum(map(prod, wanted.values()))


def as_floats(value: Any) -> Any:
    """An array or a tuple of them, INT8 ones as float32."""
    if isinstance(value, tuple):
        return tuple(map(as_floats, value))
    return value.dequantize() if isinstance(value, QuantizedWeight) else value


def uniform(parts: tuple[Array, ...]) -> tuple[Array, ...]:
    """Parts of a projection as they are, if all are floats or in INT8 with one group size; else floats."""
    sizes = {part.group_size if isinstance(part, QuantizedWeight) else None for part in parts}
    return parts if len(sizes) == 1 else tuple(map(as_floats, parts))


class NamedWeights:
    """A WeightSource over a function from names to arrays, `tensor`."""

    def __init__(self, config: ModelConfig, tensor: Callable[[str], Array]) -> None:
        self._config = config
        self.tensor = self._tensor = tensor

    def embedding(self) -> Array:
        return self._tensor(EMBEDDING)

    def head(self) -> Array | None:
        return None if self._config.tied_embeddings else self._tensor(HEAD)

    def final_norm(self) -> Array:
        return self._tensor(FINAL_NORM)

    def layer(self, index: int) -> LayerWeights:
        config = self._config

        def tensor(part: str, is_there: bool = True) -> Array | None:
            return self._tensor(layer_name(index, part)) if is_there else None

        def tensors(parts: tuple[str, ...], kind: str, are_there: bool = True) -> tuple[Array, ...] | None:
            names = [layer_name(index, f"{part}.{kind}") for part in parts]
            return uniform(tuple(map(self._tensor, names))) if are_there else None

        return LayerWeights(
            input_norm=self._tensor(layer_name(index, "input_layernorm.weight")),
            qkv=tensors(_QKV, "weight") or (),
            qkv_bias=tensors(_QKV, "bias", config.qkv_bias),
            q_norm=tensor("self_attn.q_norm.weight", config.qk_norm),
            k_norm=tensor("self_attn.k_norm.weight", config.qk_norm),
            o=self._tensor(layer_name(index, "self_attn.o_proj.weight")),
            o_bias=tensor("self_attn.o_proj.bias", config.o_bias),
            post_norm=self._tensor(layer_name(index, "post_attention_layernorm.weight")),
            gate_up=tensors(_GATE_UP, "weight") or (),
            gate_up_bias=tensors(_GATE_UP, "bias", config.mlp_bias),
            down=self._tensor(layer_name(index, "mlp.down_proj.weight")),
            down_bias=tensor("mlp.down_proj.bias", config.mlp_bias),
        )
