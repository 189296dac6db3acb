"""GGUF files: values, order of rows and tokenizer come out right; whatever is damaged or odd is refused."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from service.errors import ModelError, UnsupportedModelError
from service.model.checkpoint import open_checkpoint
from service.model.rope import inverse_frequencies
from tests.checkpoints import CHATML, SPECIALS, make_checkpoint
from tests.gguf_files import DIM, HEAD_DIM, HEADS, K_QUANTS, KV_HEADS, VOCAB, make_gguf

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *K_QUANTS)
REQUIRED = (
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "block_count",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def refusal(file: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_checkpoint(file)
    assert str(file) in str(caught.value)
    return str(caught.value)


def half_rotated(stored: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Row 2 * i + j of a head in llama.cpp's order is row j * head_dim / 2 + i in Hugging Face's."""
    out = np.empty_like(stored)
    head_dim = len(stored) // heads
    for head in range(heads):
        for pair in range(head_dim // 2):
            for j in range(2):
                row = head * head_dim + j * head_dim // 2 + pair
                out[row] = stored[head * head_dim + 2 * pair + j]
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_that_the_type_stands_for(file: Path, kind: str) -> None:
    names = ("token_embd.weight", "blk.1.ffn_down.weight", "blk.1.attn_q.weight")
    values = make_gguf(file, kinds=dict.fromkeys(names, kind))

    weights = open_checkpoint(file).weights

    embedding, down, q = (values[name] for name in names)
    assert np.abs(down).max() > 0.01
    np.testing.assert_array_equal(np.asarray(weights.embedding(), np.float32), embedding)
    np.testing.assert_array_equal(np.asarray(weights.layer(1).down, np.float32), down)
    np.testing.assert_array_equal(np.asarray(weights.layer(1).qkv[0], np.float32), half_rotated(q, HEADS))


def test_only_queries_and_keys_of_llama_are_reordered(tmp_path: Path) -> None:
    llama, qwen = (make_gguf(tmp_path / f"{name}.gguf", name) for name in ("llama", "qwen3"))

    q, k, v = open_checkpoint(tmp_path / "llama.gguf").weights.layer(0).qkv
    qwen_layer = open_checkpoint(tmp_path / "qwen3.gguf").weights.layer(0)

    np.testing.assert_array_equal(q, half_rotated(llama["blk.0.attn_q.weight"], HEADS))
    np.testing.assert_array_equal(k, half_rotated(llama["blk.0.attn_k.weight"], KV_HEADS))
    np.testing.assert_array_equal(v, llama["blk.0.attn_v.weight"])
    for array, name in zip(qwen_layer.qkv, "qkv", strict=True):
        np.testing.assert_array_equal(array, qwen[f"blk.0.attn_{name}.weight"])
    np.testing.assert_array_equal(qwen_layer.q_norm, qwen["blk.0.attn_q_norm.weight"])


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_converted_checkpoint_is_the_same_model(architecture: str, file: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"hidden_size": DIM, "intermediate_size": DIM, "head_dim": HEAD_DIM}
    options["rms_norm_eps"] = 2**-17  # GGUF keeps it in float32, which has no 1e-5
    options["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    original = open_checkpoint(make_checkpoint(tmp_path / "hf", architecture, **options))
    metadata = {f"{architecture}.attention.layer_norm_rms_epsilon": 2**-17}
    make_gguf(file, architecture, metadata=metadata, tensors=converted(original, architecture))

    found = open_checkpoint(file)

    assert found.config == original.config
    assert found.num_parameters == original.num_parameters
    for index in range(2):
        ours, theirs = found.weights.layer(index), original.weights.layer(index)
        for name in ours.__slots__:
            for one, other in zip(arrays(getattr(ours, name)), arrays(getattr(theirs, name)), strict=True):
                np.testing.assert_array_equal(one, other)


def converted(original: Any, architecture: str) -> dict[str, NDArray[Any]]:
    """A checkpoint's tensors by GGUF's names and in its order of rows."""
    weights = original.weights
    found = {
        "token_embd.weight": weights.embedding(),
        "output.weight": weights.head(),
        "output_norm.weight": weights.final_norm(),
    }
    for index in range(original.config.num_layers):
        layer = weights.layer(index)
        q, k, v = layer.qkv
        if architecture == "llama":
            q, k = interleaved(q, HEADS), interleaved(k, KV_HEADS)
        parts = {"attn_q": q, "attn_k": k, "attn_v": v, "attn_output": layer.o, "ffn_down": layer.down}
        parts |= {"attn_norm": layer.input_norm, "ffn_norm": layer.post_norm}
        parts |= {"ffn_gate": layer.gate_up[0], "ffn_up": layer.gate_up[1]}
        if architecture == "qwen3":
            parts |= {"attn_q_norm": layer.q_norm, "attn_k_norm": layer.k_norm}
        found |= {f"blk.{index}.{part}.weight": array for part, array in parts.items()}
    return found


def interleaved(array: NDArray[Any], heads: int) -> NDArray[Any]:
    """What the converter of llama.cpp does; half_rotated undoes it."""
    rows = half_rotated(np.arange(len(array), dtype=np.float32), heads).astype(int)
    stored = np.empty_like(array)
    stored[rows] = array
    return stored


def arrays(value: Any) -> tuple[NDArray[Any], ...]:
    return () if value is None else value if isinstance(value, tuple) else (value,)


def test_without_an_output_tensor_the_head_is_tied(file: Path) -> None:
    make_gguf(file, tensors={"output.weight": None})

    checkpoint = open_checkpoint(file)

    assert checkpoint.config.tied_embeddings
    assert checkpoint.weights.head() is None


def test_stored_frequency_divisors_are_used(file: Path) -> None:
    divisors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    make_gguf(file, tensors={"rope_freqs.weight": divisors})

    rope = open_checkpoint(file).config.rope

    plain = 500.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    np.testing.assert_allclose(inverse_frequencies(rope, HEAD_DIM), plain / divisors, rtol=1e-12)


@pytest.mark.parametrize("divisors", [np.ones(HEAD_DIM), np.zeros(HEAD_DIM // 2)])
def test_frequency_divisors_that_make_no_sense_are_refused(file: Path, divisors: NDArray[Any]) -> None:
    make_gguf(file, tensors={"rope_freqs.weight": divisors})
    assert f"rope_freqs.weight has {len(divisors)} values; 16 positive ones" in refusal(file)


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", [None, 0, -3, "many", True, [4, 4]])
def test_metadata_that_is_missing_or_odd_is_named(file: Path, key: str, value: Any) -> None:
    make_gguf(file, metadata={f"llama.{key}": value})
    assert f"the metadata llama.{key} is {value!r}; a positive" in refusal(file)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.attention.head_count_kv": 3}, "4 heads over 3 key/value heads"),
        ({"llama.attention.key_length": 31}, "of 31 components"),
        ({"llama.embedding_length": 128}, r"model.embed_tokens.weight has shape \[300, 256\]"),
        ({"llama.block_count": 3}, "model.layers.2"),
        ({"tokenizer.ggml.eos_token_id": -1}, "eos_token_id is -1"),
        ({"tokenizer.ggml.bos_token_id": "one"}, "bos_token_id is 'one'"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens"),
        ({"tokenizer.chat_template": 7}, "tokenizer.chat_template"),
    ],
)
def test_metadata_that_does_not_fit_is_named(file: Path, metadata: dict[str, Any], message: str) -> None:
    make_gguf(file, metadata=metadata)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(file)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"general.architecture": "gemma2"}, "the architecture is gemma2; supported are llama, qwen3"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.scaling.type": "yarn"}, "RoPE scaling yarn"),
        ({"llama.rope.scaling.type": "linear"}, "RoPE scaling linear"),
        ({"tokenizer.ggml.model": "llama"}, "the tokenizer is llama"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "pre-tokenizer deepseek-llm"),
    ],
)
def test_what_is_not_run_is_refused_by_name(file: Path, metadata: dict[str, Any], named: str) -> None:
    make_gguf(file, metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=named):
        open_checkpoint(file)


def test_a_type_of_weights_that_is_not_run_is_named(file: Path) -> None:
    make_gguf(file, kinds={"blk.0.ffn_up.weight": "TQ2_0"})

    message = refusal(file)

    assert "the tensor blk.0.ffn_up.weight is TQ2_0; supported are BF16" in message


def test_a_missing_tensor_is_named(file: Path) -> None:
    make_gguf(file, tensors={"blk.1.attn_k.weight": None})
    message = "the tensor model.layers.1.self_attn.k_proj.weight of shape [64, 256] is missing."
    assert message in refusal(file)


def test_a_tensor_of_another_shape_is_named(file: Path) -> None:
    make_gguf(file, tensors={"blk.1.attn_k.weight": np.zeros((32, DIM))})
    message = "model.layers.1.self_attn.k_proj.weight has shape [32, 256]; the config wants [64, 256]"
    assert message in refusal(file)


def test_other_files_are_no_gguf(file: Path) -> None:
    file.write_bytes(b"PK\x03\x04 and so on")
    assert "it begins with b'PK\\x03\\x04', and GGUF with b'GGUF'" in refusal(file)

    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "Git LFS pointer" in refusal(file)

    file.write_bytes(b"")
    assert "it begins with b''" in refusal(file)


def test_a_file_cut_off_anywhere_is_refused(file: Path) -> None:
    make_gguf(file)
    whole = file.read_bytes()
    header = gguf.GGUFReader(file).data_offset

    for length in [*range(4, 200), *range(200, header, 101), header, (header + len(whole)) // 2]:
        file.write_bytes(whole[:length])
        assert f"damaged or was cut off at byte {length}" in refusal(file)


@pytest.mark.parametrize("kind", [gguf.GGUFValueType.UINT8, gguf.GGUFValueType.STRING])
def test_a_list_of_absurd_length_is_refused_at_once(file: Path, kind: gguf.GGUFValueType) -> None:
    key = b"tokenizer.ggml.tokens"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    file.write_bytes(header + struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, kind, 2**62) + bytes(64))

    assert "damaged or was cut off" in refusal(file)


def test_a_key_that_is_there_twice_is_refused(file: Path) -> None:
    field = struct.pack("<Q", 1) + b"k" + struct.pack("<II", gguf.GGUFValueType.UINT32, 7)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + field + field)

    assert "damaged" in refusal(file)


@pytest.fixture(scope="session")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once: its header has some thousand bytes."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    make_gguf(path)
    return path


# Bytes are changed where metadata and the list of tensors lie.
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(4, 12_000), st.integers(0, 255)), min_size=1, max_size=4))
@example(changes=[(15, 255)])  # number of tensors
@example(changes=[(23, 255)])  # number of fields
@example(changes=[(31, 127)])  # length of the first key
def test_flipped_bytes_are_refused_or_harmless(
    file: Path, small_file: Path, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(small_file.read_bytes())
    for where, what in changes:
        content[where] = what
    file.write_bytes(content)

    try:
        checkpoint = open_checkpoint(file)
    except ModelError:
        pass  # any other exception fails the test
    else:
        assert checkpoint.weights.embedding().shape == (VOCAB, DIM)
        checkpoint.weights.layer(1)


def test_the_tokenizer_makes_the_ids_of_the_original(file: Path) -> None:
    make_gguf(file, metadata={"tokenizer.ggml.add_bos_token": False})
    original = tokenizers.Tokenizer.from_file(f"{file}-tokenizer/tokenizer.json")

    spec = open_checkpoint(file).tokenizer

    tokenizer = tokenizers.Tokenizer.from_str(spec.tokenizer_json)
    for text in (
        "the cat sat",
        "  hello\n\nworld's 1234",
        "naïve ☃ 日本",
        "<|im_start|>user\nthe<|im_end|>",
    ):
        ids = tokenizer.encode(text).ids
        assert ids == original.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert (spec.bos_token, spec.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert spec.chat_template == CHATML
    assert spec.add_bos_token is False
    assert set(spec.special_tokens) == set(SPECIALS)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", "Ġ12345", "'s", "Ġ", "Ġb"]),
        ("smollm", ["a", "Ġ", "1", "2", "3", "4", "5", "'s", "Ġ", "Ġb"]),
        ("llama-bpe", ["a", "Ġ", "123", "45", "'s", "Ġ", "Ġb"]),
        ("llama3", ["a", "Ġ", "123", "45", "'s", "Ġ", "Ġb"]),
        ("qwen2", ["a", "Ġ", "1", "2", "3", "4", "5", "'s", "Ġ", "Ġb"]),
    ],
)
def test_text_is_cut_as_the_pre_tokenizer_says(file: Path, pre: str, pieces: list[str]) -> None:
    make_gguf(file, metadata={"tokenizer.ggml.pre": pre})

    spec = open_checkpoint(file).tokenizer

    cutter: Any = tokenizers.Tokenizer.from_str(spec.tokenizer_json).pre_tokenizer
    assert [piece for piece, _ in cutter.pre_tokenize_str("a 12345's  b")] == pieces
    assert spec.add_bos_token is pre.startswith("llama")


def test_special_ids_beyond_the_vocabulary_name_no_token(file: Path) -> None:
    make_gguf(file, metadata={"tokenizer.ggml.bos_token_id": 9999})

    spec = open_checkpoint(file).tokenizer

    assert spec.bos_token is None
    assert json.loads(spec.tokenizer_json)["added_tokens"][0]["content"] == SPECIALS[0]
