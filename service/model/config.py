"""A model's shape: from a Hugging Face config.json to the fields that the decoder needs.

Whatever this project does not run is refused here, by name.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

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

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any], file: str) -> ModelConfig:
    """`raw`: config.json; `generation`: generation_config.json, or empty; `file` names it in messages.

    Raises: UnsupportedModelError, naming what is not run; ModelError, naming the field.
    """
    architecture = _architecture(raw, file)
    _refuse_unsupported(raw, file)
    heads, dim = _integer(raw, "num_attention_heads", file), _integer(raw, "hidden_size", file)
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ModelError(
            f"{file}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}."
        )
    head_dim = raw.get("head_dim") or dim // heads
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
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw, max_positions, file),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "qwen3",
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=_ids(generation.get("eos_token_id"), raw.get("eos_token_id")),
        bos_token_id=next(iter(_ids(generation.get("bos_token_id"), raw.get("bos_token_id"))), None),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )


def parse_sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    """Sampling fields of generation_config.json; do_sample false means greedy."""
    if generation.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0)
    return SamplingDefaults(
        **{
            name: generation[name]
            for name in SamplingDefaults.__struct_fields__
            if generation.get(name) is not None
        }
    )


def _architecture(raw: Mapping[str, Any], file: str) -> Architecture:
    names = raw.get("architectures") or []
    for name in names:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    by_type = {"llama": "llama", "qwen3": "qwen3"}
    if not names and raw.get("model_type") in by_type:
        return _ARCHITECTURES[{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[raw["model_type"]]]
    found = ", ".join(map(str, names)) or raw.get("model_type") or "nothing"
    raise UnsupportedModelError(
        f"{file}: the architecture is {found}; supported are {', '.join(_ARCHITECTURES)}."
    )


def _refuse_unsupported(raw: Mapping[str, Any], file: str) -> None:
    quantization = raw.get("quantization_config")
    if quantization:
        method = (
            quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else "unknown"
        )
        raise UnsupportedModelError(f"{file}: weights quantised by {method} are not supported.")
    if raw.get("num_experts") or raw.get("num_local_experts"):
        raise UnsupportedModelError(f"{file}: mixture-of-experts models are not supported.")
    if raw.get("use_sliding_window") and raw.get("sliding_window"):
        raise UnsupportedModelError(f"{file}: sliding window attention is not supported.")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"{file}: hidden_act is {raw['hidden_act']}; only silu is supported.")


def _rope(raw: Mapping[str, Any], max_positions: int, file: str) -> RopeConfig:
    """Both spellings: `rope_parameters` (theta inside) and the older `rope_theta` with `rope_scaling`."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or _DEFAULT_THETA)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind != "llama3":
        raise UnsupportedModelError(
            f"{file}: RoPE scaling {kind} is not supported; default and llama3 are."
        )
    missing = [name for name in ("factor", "low_freq_factor", "high_freq_factor") if name not in scaling]
    if missing:
        raise ModelError(f"{file}: RoPE scaling llama3 lacks {', '.join(missing)}.")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_max_positions=int(scaling.get("original_max_position_embeddings") or max_positions),
    )


def _integer(raw: Mapping[str, Any], name: str, file: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{file}: {name} is {value!r}; a positive integer is wanted.")
    return value


def _ids(*sources: Any) -> tuple[int, ...]:
    """The first source that is given, as a tuple: files hold one id, a list, or null."""
    for source in sources:
        if source is not None:
            return tuple(source) if isinstance(source, list) else (int(source),)
    return ()
