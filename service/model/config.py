"""A model's shape: from a Hugging Face config.json to the fields that the decoder needs.

Whatever this project does not run is refused here, by name.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from service.errors import ModelError, UnsupportedModelError
from service.model.rope import RopeConfig

Architecture = Literal["llama", "qwen3"]

_ARCHITECTURES: dict[str, Architecture] = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
_DEFAULT_THETA = 10_000.0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and kind of a decoder."""

    architecture: Architecture
    dim: int
    ffn: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int  # rows of the embedding, maybe padded above the tokenizer's ids
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What generation_config.json recommends; None: it says nothing."""

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any], file: str) -> ModelConfig:
    """`raw`: config.json; `generation`: generation_config.json, or empty; `file` names it in messages.

    Raises: UnsupportedModelError, naming what is not run; ModelError, naming the field.
    """
    architecture = _architecture(raw, file)
    _refuse_unsupported(raw, file)
    heads, dim = _integer(raw, "num_attention_heads", file), _integer(raw, "hidden_size", file)
    kv_heads = _integer(raw, "num_key_value_heads", file, heads)
    if heads % kv_heads:
        raise ModelError(
            f"{file}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}."
        )
    head_dim = _integer(raw, "head_dim", file, dim // heads)
    if head_dim % 2:
        raise ModelError(f"{file}: head_dim {head_dim} is odd; RoPE turns pairs.")
    attention_bias = bool(raw.get("attention_bias", False))
    max_positions = _integer(raw, "max_position_embeddings", file)
    return ModelConfig(
        architecture=architecture,
        dim=dim,
        ffn=_integer(raw, "intermediate_size", file),
        num_layers=_integer(raw, "num_hidden_layers", file),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_integer(raw, "vocab_size", file),
        max_positions=max_positions,
        rms_norm_eps=_number(raw, "rms_norm_eps", file, 1e-6),
        rope=_rope(raw, max_positions, file),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "qwen3",
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=_ids("eos_token_id", file, generation, raw),
        bos_token_id=next(iter(_ids("bos_token_id", file, generation, raw)), None),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )


def parse_sampling_defaults(generation: Mapping[str, Any], file: str) -> SamplingDefaults:
    """Sampling fields of generation_config.json, which `file` names; do_sample false means greedy.

    Raises: ModelError, naming the field.
    """
    if generation.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0)
    top_k = 0 if generation.get("top_k") == -1 else generation.get("top_k")  # both mean: off
    try:
        return msgspec.convert({**generation, "top_k": top_k}, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ModelError(f"{file}: {error}.") from None


def _architecture(raw: Mapping[str, Any], file: str) -> Architecture:
    names = raw.get("architectures")
    names = names if isinstance(names, list) else []
    for name in names:
        if isinstance(name, str) and name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    kind = raw.get("model_type")
    for architecture in _ARCHITECTURES.values():
        if not names and kind == architecture:
            return architecture
    found = ", ".join(map(str, names)) or kind or "nothing"
    raise UnsupportedModelError(
        f"{file}: the architecture is {found}; supported are {', '.join(_ARCHITECTURES)}."
    )


def _refuse_unsupported(raw: Mapping[str, Any], file: str) -> None:
    if raw.get("num_experts") or raw.get("num_local_experts"):
        raise UnsupportedModelError(f"{file}: mixture-of-experts models are not supported.")
    layer_types = raw.get("layer_types")
    is_sliding = isinstance(layer_types, list) and "sliding_attention" in layer_types
    if is_sliding or (raw.get("use_sliding_window") and raw.get("sliding_window")):
        raise UnsupportedModelError(f"{file}: sliding window attention is not supported.")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"{file}: hidden_act is {raw['hidden_act']}; only silu is supported.")


def _rope(raw: Mapping[str, Any], max_positions: int, file: str) -> RopeConfig:
    """Both spellings: `rope_parameters` (theta inside) and the older `rope_theta` with `rope_scaling`."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelError(f"{file}: the RoPE scaling is {scaling!r}; an object is wanted.")
    theta = _number(scaling, "rope_theta", file, _number(raw, "rope_theta", file, _DEFAULT_THETA))
    unnamed = "of no type" if "factor" in scaling else "default"
    kind = scaling.get("rope_type") or scaling.get("type") or unnamed
    rotary = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1
    if rotary != 1:
        raise UnsupportedModelError(f"{file}: partial_rotary_factor is {rotary}; only 1 is supported.")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind != "llama3":
        raise UnsupportedModelError(
            f"{file}: RoPE scaling {kind} is not supported; default and llama3 are."
        )
    low, high = (_number(scaling, f"{name}_freq_factor", file) for name in ("low", "high"))
    if low >= high:
        raise ModelError(f"{file}: low_freq_factor {low} is not below high_freq_factor {high}.")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=_number(scaling, "factor", file),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=_integer(scaling, "original_max_position_embeddings", file, max_positions),
    )


def _number(raw: Mapping[str, Any], name: str, file: str, default: float | None = None) -> float:
    """A positive number; `default` where the file has none or null."""
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(f"{file}: {name} is {value!r}; a positive number is wanted.")
    return float(value)


def _integer(raw: Mapping[str, Any], name: str, file: str, default: int | None = None) -> int:
    """A positive integer; `default` where the file has none or null."""
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{file}: {name} is {value!r}; a positive integer is wanted.")
    return value


def _ids(name: str, file: str, *sources: Mapping[str, Any]) -> tuple[int, ...]:
    """From the first source that has some: files hold one id, a list, or null."""
    for source in sources:
        value = source.get(name)
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(token_id) is int for token_id in ids):
                raise ModelError(f"{file}: {name} is {value!r}; a token id or a list of them is wanted.")
            return tuple(ids)
    return ()
