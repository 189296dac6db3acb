"""The tokenizer in a GGUF file's metadata, as a `tokenizers` JSON."""

import json
from collections.abc import Mapping
from typing import Any

from service.errors import ModelError, UnsupportedModelError
from service.model.checkpoint import TokenizerSpec

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2 = {**_BYTE_LEVEL, "use_regex": True}


def _split(pattern: str) -> dict[str, Any]:
    """Cut by a regular expression, then map bytes to the letters of the vocabulary."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _BYTE_LEVEL]}


# How text is cut before merging, by tokenizer.ggml.pre: the published tokenizers' own expressions.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": _GPT2,
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _GPT2]},
    "llama-bpe": _split(_WORDS + r"\p{N}{1,3}" + _REST),
    "qwen2": _split(_WORDS + r"\p{N}" + _REST),
}
_SAME_AS = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}


def tokenizer_spec(fields: Mapping[str, Any], file: str) -> TokenizerSpec:
    """Raises: UnsupportedModelError (kind of tokenizer, by name), ModelError (parts are missing)."""
    kind = fields.get("tokenizer.ggml.model")
    pre = fields.get("tokenizer.ggml.pre", "gpt-2")
    pre = _SAME_AS.get(pre, pre)
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{file}: the tokenizer is {kind} with pre-tokenizer {pre}; supported is gpt2 (byte-level BPE) "
            f"with {', '.join(_PRE_TOKENIZERS)}."
        )
    tokens, merges = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise ModelError(f"{file}: tokenizer.ggml.tokens or tokenizer.ggml.merges is missing.")
    types = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    added = [
        _added(token_id, tokens[token_id], is_special=kind == _CONTROL)
        for token_id, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]

    def named(name: str) -> str | None:
        token_id = fields.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[token_id] if isinstance(token_id, int) and token_id < len(tokens) else None

    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": {**_BYTE_LEVEL, "trim_offsets": False},
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }
    return TokenizerSpec(
        tokenizer_json=json.dumps(document, ensure_ascii=False),
        chat_template=fields.get("tokenizer.chat_template"),
        bos_token=named("bos"),
        eos_token=named("eos"),
        add_bos_token=bool(fields.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")),
        special_tokens=tuple(token["content"] for token in added if token["special"]),
    )


def _added(token_id: int, content: str, is_special: bool) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": is_special,
    }
