"""Pieces of text join to what decoding all ids at once gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.text.detokenizer import Detokenizer
from service.text.tokenizer import Tokenizer
from tests.text.samples import make_tokenizer

EMOJI = "\U0001fae0"  # no token of any vocabulary here holds it whole


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("family", ["chatml", "llama3", "smollm2"])
@given(st.data())
@settings(deadline=None)  # the first example loads the tokenizer
def test_pieces_of_any_ids_join_to_the_whole(
    family: str, skip_special_tokens: bool, data: st.DataObject
) -> None:
    tokenizer = make_tokenizer(family)
    any_id = st.integers(0, tokenizer.vocab_size - 1)
    bytes_only = st.sampled_from([i for i in range(300) if len(tokenizer.token_bytes(i)) == 1])
    special = st.sampled_from(sorted(tokenizer.special_ids))
    ids = data.draw(st.lists(st.one_of(any_id, bytes_only, special), max_size=40))

    pieces = pieces_of(tokenizer, ids, skip_special_tokens=skip_special_tokens)

    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("family", ["chatml", "smollm2", "pieces"])
@given(text=st.text(st.sampled_from(f"helo worad.é日{EMOJI}\U0001f355  \n")))
@settings(deadline=None)
def test_no_piece_of_a_text_ends_within_a_character(family: str, text: str) -> None:
    tokenizer = make_tokenizer(family)
    ids = tokenizer.encode(text)

    pieces = pieces_of(tokenizer, ids)

    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_eight_replies_with_split_characters_do_not_disturb_each_other() -> None:
    tokenizer = make_tokenizer("smollm2")
    texts = [f"{EMOJI} number {i} 日本{EMOJI * i}" for i in range(8)]
    streams = [tokenizer.encode(text) for text in texts]
    detokenizers = [Detokenizer(tokenizer) for _ in texts]
    shown = [""] * len(texts)

    for position in range(max(map(len, streams))):
        for i, ids in enumerate(streams):
            if position < len(ids):
                piece = detokenizers[i].push(ids[position])
                assert "\ufffd" not in piece
                shown[i] += piece

    assert shown == texts


def test_an_incomplete_character_comes_out_as_a_replacement_at_the_end_only() -> None:
    tokenizer = make_tokenizer("chatml")
    ids = tokenizer.encode(EMOJI)[:-1]

    assert pieces_of(tokenizer, ids) == [""] * len(ids) + ["\ufffd"]


def test_bytes_that_can_begin_no_character_are_not_held_back() -> None:
    tokenizer = make_tokenizer("chatml")
    lead, *_ = tokenizer.encode(EMOJI)
    (letter,) = tokenizer.encode("z")

    assert pieces_of(tokenizer, [lead, letter, lead, letter]) == ["", "\ufffdz", "", "\ufffdz", ""]


@given(st.lists(st.integers(0, 30), max_size=30))
def test_the_first_space_of_a_sentencepiece_text_is_dropped_and_no_other(words: list[int]) -> None:
    tokenizer = make_tokenizer("pieces")
    ids = [3 + 256 + word % (tokenizer.vocab_size - 3 - 256) for word in words]

    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_an_id_without_text_costs_the_next_word_no_space() -> None:
    tokenizer = make_tokenizer("pieces")
    hello, world = tokenizer.vocab_size - 3, tokenizer.vocab_size - 2

    assert pieces_of(tokenizer, [hello, 10**6, world]) == ["hello", "", " world", ""]


def test_endless_replacement_characters_of_a_sentencepiece_model_are_shown_and_cost_no_memory() -> None:
    tokenizer = make_tokenizer("pieces")
    detokenizer = Detokenizer(tokenizer)
    replacement = tokenizer.vocab_size - 1
    assert tokenizer.token_bytes(replacement).decode() == "\ufffd"

    pieces = [detokenizer.push(replacement) for _ in range(100)]

    assert len("".join(pieces)) >= 80
    assert "".join(pieces) + detokenizer.flush() == "\ufffd" * 100
