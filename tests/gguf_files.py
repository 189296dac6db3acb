"""Tiny random GGUF files, written by the `gguf` package as llama.cpp's converter would write them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.checkpoints import CHATML, SPECIALS, write_tokenizer

DIM, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 256, 256, 4, 2, 32, 2, 300
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def tensor_shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    """By GGUF's names; with an untied head."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, DIM),
        "output_norm.weight": (DIM,),
        "output.weight": (VOCAB, DIM),
    }
    for index in range(LAYERS):
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm": (DIM,),
            "attn_q": (HEADS * HEAD_DIM, DIM),
            "attn_k": (KV_HEADS * HEAD_DIM, DIM),
            "attn_v": (KV_HEADS * HEAD_DIM, DIM),
            "attn_output": (DIM, HEADS * HEAD_DIM),
            "ffn_norm": (DIM,),
            "ffn_gate": (FFN, DIM),
            "ffn_up": (FFN, DIM),
            "ffn_down": (DIM, FFN),
        }
        if architecture == "qwen3":
            parts |= {"attn_q_norm": (HEAD_DIM,), "attn_k_norm": (HEAD_DIM,)}
        shapes |= {f"blk.{index}.{part}.weight": shape for part, shape in parts.items()}
    return shapes


def make_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    kinds: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[Any] | None] | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Write a file; return the values that its tensors stand for.

    `kinds`: tensors that are not F32. `metadata`: None leaves a key out. `tensors`: instead of random ones;
    None leaves one out.
    """
    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_shape_metadata(architecture), **_tokenizer(path), **(metadata or {})}.items():
        _add(writer, key, value)
    values = {}
    shapes = {**dict.fromkeys(tensors or {}, ()), **tensor_shapes(architecture)}
    for name, shape in shapes.items():
        given = (tensors or {}).get(name, rng.normal(0, 0.2, shape).astype(np.float32))
        if given is not None:
            kind = (kinds or {}).get(name, "F32")
            values[name] = _add_tensor(writer, name, np.asarray(given, np.float32), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _shape_metadata(architecture: str) -> dict[str, Any]:
    fields = {
        "context_length": 512,
        "embedding_length": DIM,
        "feed_forward_length": FFN,
        "block_count": LAYERS,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500.0,
    }
    return {f"{architecture}.{key}": value for key, value in fields.items()}


def _tokenizer(path: Path) -> dict[str, Any]:
    folder = path.parent / f"{path.name}-tokenizer"
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if key == "general.architecture":
        writer.kv_data[0][key].value = value
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        writer.add_int32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, array: NDArray[np.float32], kind: str
) -> NDArray[np.float32]:
    number = gguf.GGMLQuantizationType[kind]
    if kind in K_QUANTS:  # the package can't make these: any bytes are some values
        block, size = gguf.GGML_QUANT_SIZES[number]
        rows, columns = array.shape
        stored = np.random.default_rng(6).integers(0, 60, (rows, columns // block * size), np.uint8)
    else:
        stored = gguf.quants.quantize(array, number)
    writer.add_tensor(name, stored, raw_dtype=number)
    return np.asarray(gguf.quants.dequantize(stored, number), np.float32).reshape(array.shape)
