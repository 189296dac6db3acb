"""config.json and generation_config.json: spellings that are read, and models that are refused by name."""

from typing import Any

import numpy as np
import pytest

from service.errors import ModelError, UnsupportedModelError
from service.model.config import ModelConfig, SamplingDefaults, parse_config, parse_sampling_defaults
from service.model.rope import RopeConfig, inverse_frequencies

FILE = "somewhere/config.json"
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALED = RopeConfig(
    theta=500_000.0,
    kind="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_positions=8192,
)


def parse(generation: dict[str, Any] | None = None, **fields: Any) -> ModelConfig:
    return parse_config({**LLAMA, **fields}, generation or {}, FILE)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **SCALING}},
        {"rope_theta": 500000, "rope_scaling": {"type": "llama3", **SCALING}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **SCALING}},
        {"rope_theta": 500000.0, "rope_parameters": {"rope_type": "llama3", **SCALING}},
    ],
    ids=["rope_scaling", "the key type", "rope_parameters", "theta beside rope_parameters"],
)
def test_every_spelling_of_scaled_rope_is_read(fields: dict[str, Any]) -> None:
    assert parse(**fields).rope == SCALED


@pytest.mark.parametrize(
    ("fields", "theta"),
    [
        ({}, 10_000.0),
        ({"rope_theta": 1_000_000, "rope_scaling": None}, 1_000_000.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, 500.0),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "default"}}, 1e6),
    ],
)
def test_plain_rope_takes_its_theta_from_the_file(fields: dict[str, Any], theta: float) -> None:
    assert parse(**fields).rope == RopeConfig(theta=theta)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequencies_are_stretched_by_wavelength(factor: float) -> None:
    rope = parse(
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **SCALING, "factor": factor}
    ).rope

    found = inverse_frequencies(rope, 128)

    for found_one, plain in zip(found, 5e5 ** (-np.arange(0, 128, 2) / 128), strict=True):
        wavelength = 2 * np.pi / plain
        if wavelength < 8192 / 4:
            want = plain
        elif wavelength > 8192 / 1:
            want = plain / factor
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            want = (1 - smooth) * plain / factor + smooth * plain
        assert found_one == pytest.approx(want, rel=1e-12)
    assert found[0] == 1.0
    assert found[-1] == pytest.approx(5e5 ** (-126 / 128) / factor, rel=1e-12)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128}, "Qwen3MoeForCausalLM"),
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"architectures": []}, "nothing"),
        ({"architectures": 7}, "nothing"),
        ({"num_local_experts": 8}, "mixture-of-experts"),
        ({"num_experts": 8}, "mixture-of-experts"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"factor": 2.0}}, "of no type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ({"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_what_is_not_run_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        parse(**fields)

    assert FILE in str(caught.value)


def test_a_sliding_window_that_is_switched_off_is_fine() -> None:
    config = parse(
        architectures=["Qwen3ForCausalLM"],
        use_sliding_window=False,
        sliding_window=4096,
        layer_types=["full_attention", "full_attention"],
    )

    assert config.qk_norm


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "hidden_size is None"),
        ({"hidden_size": "64"}, "hidden_size is '64'; a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_key_value_heads": 3}, "4 is no multiple of num_key_value_heads 3"),
        ({"num_key_value_heads": "two"}, "num_key_value_heads is 'two'"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"head_dim": 16.5}, "head_dim is 16.5"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; a positive number"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": [1]}, r"rope_theta is \[1\]"),
        ({"rope_scaling": "llama3"}, "an object is wanted"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "low_freq_factor is None"),
        ({"rope_scaling": {"rope_type": "llama3", **SCALING, "factor": None}}, "factor is None"),
        ({"rope_scaling": {"rope_type": "llama3", **SCALING, "low_freq_factor": 4.0}}, "not below"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [2, None]}, r"eos_token_id is \[2, None\]"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        parse(**fields)

    assert FILE in str(caught.value)


def test_head_dim_may_differ_from_dim_over_heads() -> None:
    assert parse().head_dim == 16
    assert parse(head_dim=None).head_dim == 16
    assert parse(head_dim=32).head_dim == 32


def test_without_num_key_value_heads_every_head_has_its_own() -> None:
    assert parse(num_key_value_heads=None).kv_heads == 4


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({}, None, ()),
        ({}, 2, (2,)),
        ({}, [2, 7], (2, 7)),
        ({"eos_token_id": [5, 6]}, 2, (5, 6)),
        ({"eos_token_id": 0}, 2, (0,)),
        ({"eos_token_id": None}, [2], (2,)),
    ],
)
def test_generation_config_says_first_which_tokens_end(
    generation: dict[str, Any], config: Any, ids: tuple[int, ...]
) -> None:
    assert parse(generation, eos_token_id=config).eos_token_ids == ids


def test_biases_and_norms_are_those_of_the_architecture_and_the_file() -> None:
    plain, biased = parse(), parse(attention_bias=True, mlp_bias=True)
    qwen = parse(architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True)

    assert (plain.qkv_bias, plain.o_bias, plain.mlp_bias, plain.qk_norm) == (False,) * 4
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True,) * 3
    assert qwen.qk_norm
    assert (plain.tied_embeddings, qwen.tied_embeddings) == (False, True)


def test_the_model_type_serves_where_no_architecture_is_given() -> None:
    assert parse(architectures=None, model_type="qwen3").architecture == "qwen3"


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        ({}, SamplingDefaults()),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "transformers_version": "4"},
            SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20),
        ),
        ({"temperature": 1, "top_k": None}, SamplingDefaults(temperature=1.0)),
        ({"top_k": -1}, SamplingDefaults(top_k=0)),
        ({"do_sample": False, "temperature": 0.6}, SamplingDefaults(temperature=0.0)),
    ],
)
def test_generation_config_recommends_sampling(
    generation: dict[str, Any], defaults: SamplingDefaults
) -> None:
    assert parse_sampling_defaults(generation, "generation_config.json") == defaults


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "hot"), ("temperature", -1), ("top_p", 0), ("top_p", 1.5), ("top_k", 2.5)],
)
def test_a_recommendation_that_makes_no_sense_is_named(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json.*{name}"):
        parse_sampling_defaults({name: value}, "generation_config.json")
