"""The tokenizer in a GGUF file's metadata, as a `tokenizers` JSON."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

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


class _Metadata(msgspec.Struct, rename=lambda name: f"tokenizer.{name.replace('__', '.')}"):
    """What a file says of its tokenizer."""

    ggml__tokens: list[str]
    ggml__merges: list[str]
    ggml__token_type: list[int] | None = None
    ggml__add_bos_token: bool | None = None
    ggml__bos_token_id: int | None = None
    ggml__eos_token_id: int | None = None
    chat_template: str | None = None


def tokenizer_spec(fields: Mapping[str, Any], file: str) -> TokenizerSpec:
    """Raises: UnsupportedModelError (kind of tokenizer, by name), ModelError (parts are missing)."""
    kind = fields.get("tokenizer.ggml.model")
    pre = str(fields.get("tokenizer.ggml.pre", "gpt-2"))
    pre = _SAME_AS.get(pre, pre)
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{file}: the tokenizer is {kind} with pre-tokenizer {pre}; supported is gpt2 (byte-level BPE) "
            f"with {', '.join(_PRE_TOKENIZERS)}."
        )
    try:
        metadata = msgspec.convert(fields, _Metadata)
    except msgspec.ValidationError as error:
        raise ModelError(f"{file}: the tokenizer's metadata can't be used: {error}.") from None
    tokens, add_bos_token = metadata.ggml__tokens, metadata.ggml__add_bos_token
    by_id: dict[int | None, str] = dict(enumerate(tokens))
    added = [
        _added(token_id, token, is_special=kind == _CONTROL)
        for token_id, (token, kind) in enumerate(zip(tokens, metadata.ggml__token_type or (), strict=False))
        if kind in (_CONTROL, _USER_DEFINED)
    ]

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
            "merges": [merge.split(" ", 1) for merge in metadata.ggml__merges],
        },
    }
    return TokenizerSpec(
        tokenizer_json=json.dumps(document, ensure_ascii=False),
        chat_template=metadata.chat_template,
        bos_token=by_id.get(metadata.ggml__bos_token_id),
        eos_token=by_id.get(metadata.ggml__eos_token_id),
        add_bos_token=pre == "llama-bpe" if add_bos_token is None else add_bos_token,
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
