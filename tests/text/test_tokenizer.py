"""Text to ids: exact bytes, BOS, and text that only looks like control tokens."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import ModelError
from service.model.checkpoint import TokenizerSpec
from service.text.tokenizer import Tokenizer, well_formed
from tests.text.samples import (
    CHATML_TOKENS,
    LLAMA3_TOKENS,
    byte_level_json,
    make_tokenizer,
    spec_of,
)

FAMILIES = [
    "chatml",
    "llama3",
    "smollm2",
]  # SmolLM2 lacks some bytes: control characters, U+40000 and above
WORDS = st.lists(
    st.sampled_from(
        [*CHATML_TOKENS, *LLAMA3_TOKENS, "<|", "|>", "im_end", " user\n", "\U0001f355", "\0", "a"]
    )
).map("".join)


@pytest.mark.parametrize("family", FAMILIES)
@given(text=st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"])))
@settings(deadline=None)  # the first example loads the tokenizer
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(family: str, text: str) -> None:
    tokenizer = make_tokenizer(family)

    ids = tokenizer.encode(text)

    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()


@pytest.mark.parametrize("family", FAMILIES)
@given(text=WORDS)
@settings(deadline=None)
def test_guarded_text_is_whole_and_holds_no_control_token(family: str, text: str) -> None:
    tokenizer = make_tokenizer(family)

    ids = tokenizer.encode(text, allow_special=False)

    assert tokenizer.special_ids.isdisjoint(ids)
    assert max(ids, default=0) < tokenizer.vocab_size
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.unguard(tokenizer.guard(text)) == text


@pytest.mark.parametrize("adds_bos", [False, True])
@given(text=st.one_of(WORDS, st.text()))
@settings(deadline=None)
def test_text_is_encoded_as_the_tokenizers_package_does(adds_bos: bool, text: str) -> None:
    document = byte_level_json(CHATML_TOKENS, adds_bos)
    raw = tokenizers.Tokenizer.from_str(document)

    ids = Tokenizer(TokenizerSpec(tokenizer_json=document)).encode(text)

    assert ids == raw.encode(text, add_special_tokens=False).ids


def test_only_tokens_marked_as_special_are_control_tokens() -> None:
    tokenizer = make_tokenizer("chatml")
    think = tokenizer.encode("<think>")

    assert tokenizer.encode("<think>", allow_special=False) == think
    assert len(think) == 1
    assert len(tokenizer.encode("<|im_end|>")) == 1
    assert tokenizer.control_id("<|im_end|>") == tokenizer.encode("<|im_end|>")[0]
    assert tokenizer.control_id("<think>") is None


def test_tokens_that_only_the_checkpoint_calls_special_are_control_tokens() -> None:
    spec = TokenizerSpec(tokenizer_json=byte_level_json(), special_tokens=("<think>", "<unknown>"))

    tokenizer = Tokenizer(spec)

    (think,) = tokenizer.encode("<think>")
    assert tokenizer.special_ids.issuperset([think])
    assert think not in tokenizer.encode("<think>", allow_special=False)
    assert tokenizer.decode([think]) == ""
    assert tokenizer.vocab_size == make_tokenizer("chatml").vocab_size


def test_each_byte_has_a_token_of_exactly_that_byte() -> None:
    bytelike, pieces = make_tokenizer("chatml"), make_tokenizer("pieces")

    of_letters = {bytelike.token_bytes(token_id) for token_id in range(bytelike.vocab_size)}
    of_pieces = [pieces.token_bytes(3 + byte) for byte in range(256)]

    assert of_letters.issuperset(bytes([byte]) for byte in range(256))
    assert of_pieces == [bytes([byte]) for byte in range(256)]


def test_token_bytes_of_words_added_tokens_and_ids_that_do_not_exist() -> None:
    bytelike, pieces = make_tokenizer("chatml"), make_tokenizer("pieces")
    (end,) = bytelike.encode("<|im_end|>")

    assert bytelike.token_bytes(end) == b"<|im_end|>"
    assert pieces.token_bytes(pieces.vocab_size - 2) == b" world"
    for wrong in (-1, bytelike.vocab_size, bytelike.vocab_size + 1, 2**31):
        assert bytelike.token_bytes(wrong) == b""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_of_tokens_are_those_of_the_vocabulary(family: str) -> None:
    tokenizer = make_tokenizer(family)
    ids = tokenizer.encode("Hello world")

    assert all(tokenizer.token_name(each) for each in ids)
    assert tokenizer.token_name(next(iter(tokenizer.special_ids))).startswith("<")
    assert tokenizer.token_name(tokenizer.vocab_size) == ""


@pytest.mark.parametrize(
    ("adds_bos", "flag", "has_bos"),
    [
        (True, None, True),
        (True, True, True),
        (True, False, False),
        (False, None, False),
        (False, True, True),
        (False, False, False),
    ],
)
@pytest.mark.parametrize("typed", ["", "<|begin_of_text|>"])
def test_a_raw_prompt_gets_bos_once_if_the_tokenizer_says_so(
    adds_bos: bool, flag: bool | None, has_bos: bool, typed: str
) -> None:
    tokenizer = Tokenizer(spec_of(byte_level_json(LLAMA3_TOKENS, adds_bos), LLAMA3_TOKENS[0], add_bos=flag))
    (bos,) = tokenizer.encode("<|begin_of_text|>")

    ids = tokenizer.encode_prompt(typed + "Hello")

    assert ids == ([bos] if has_bos or typed else []) + tokenizer.encode("Hello")


def test_a_tokenizer_without_bos_adds_none() -> None:
    for flag in (None, True, False):
        tokenizer = Tokenizer(TokenizerSpec(tokenizer_json=byte_level_json(), add_bos_token=flag))

        assert tokenizer.encode_prompt("Hi") == tokenizer.encode("Hi")
        assert tokenizer.encode_prompt("") == []


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a\ud83cb", "a\ufffdb"),
        ("\udc00x", "\ufffdx"),
        ("\ud83c", "\ufffd"),
        ("\ud83c\ud83c", "\ufffd\ufffd"),
        ("\ud83c\udf55", "\U0001f355"),
        ("\ufeffa", "\ufeffa"),
        ("e" + "\u0301" * 1000, "e" + "\u0301" * 1000),
        ("a\0b", "a\0b"),
    ],
)
def test_half_surrogate_pairs_become_replacement_characters_and_nothing_else_is_lost(
    text: str, seen: str
) -> None:
    tokenizer = make_tokenizer("chatml")

    assert well_formed(text) == seen
    assert tokenizer.decode(tokenizer.encode(text)) == seen
    assert tokenizer.decode(tokenizer.encode(text, allow_special=False)) == seen


def test_no_alias_takes_the_place_of_an_id_beyond_a_gap() -> None:
    document = json.loads(byte_level_json())
    document["model"]["vocab"] |= {"beyond": 460, "the gap": 470}

    tokenizer = Tokenizer(TokenizerSpec(tokenizer_json=json.dumps(document)))

    assert tokenizer.vocab_size == 471
    ids = tokenizer.encode("<|im_end|><|im_start|>", allow_special=False)
    assert tokenizer.decode(ids) == "<|im_end|><|im_start|>"
    assert [tokenizer.token_bytes(token_id) for token_id in (460, 461)] == [b"beyond", b""]
    assert tokenizer.decode([460]) == "beyond"


def test_a_control_token_that_is_also_a_word_is_spelt_where_a_client_writes_it() -> None:
    document = json.loads(byte_level_json(("halt",)))
    document["model"]["vocab"]["halt"] = document["added_tokens"][0]["id"]
    document["model"]["ignore_merges"] = True
    raw = tokenizers.Tokenizer.from_str(json.dumps(document))
    raw.encode_special_tokens = True
    tokenizer = Tokenizer(spec_of(json.dumps(document)))

    ids = tokenizer.encode("halt", allow_special=False)

    assert tokenizer.special_ids.issuperset(raw.encode("halt").ids)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == "halt"


def test_a_broken_document_is_a_fault_of_the_model() -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(TokenizerSpec(tokenizer_json="{}"))
