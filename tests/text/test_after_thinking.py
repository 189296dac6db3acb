"""A constraint that waits for the end of the thinking."""

import pytest

from service.text.after_thinking import AfterThinking
from service.text.chat_format import Thinking, ThinkingTags
from service.text.matcher import Grammars
from tests.text.grammars import allowed_ids, compiled
from tests.text.samples import make_tokenizer

TOKENIZER = make_tokenizer("chatml")
(EOS,) = TOKENIZER.encode("<|im_end|>")
(OPEN,), (CLOSE,) = TOKENIZER.encode("<think>"), TOKENIZER.encode("</think>")
(BREAK,), (WORD,) = TOKENIZER.encode("\n"), TOKENIZER.encode("d")
MATCHER = compiled(Grammars(TOKENIZER, TOKENIZER.vocab_size, [EOS]), "choice", ["ab", "abba"])


def make(thinking: Thinking) -> AfterThinking:
    return AfterThinking(
        MATCHER.copy(),
        thinking,
        ThinkingTags(OPEN, CLOSE, True),
        break_ids=frozenset([BREAK]),
        eos_ids=frozenset([EOS]),
    )


def allowed(constraint: AfterThinking) -> set[int]:
    return set(allowed_ids(constraint, TOKENIZER.vocab_size)) & set(range(TOKENIZER.vocab_size))


def follow(constraint: AfterThinking, ids: list[int]) -> None:
    for token_id in ids:
        assert token_id in allowed(constraint)
        assert not constraint.is_over
        constraint.advance(token_id)


AB = TOKENIZER.encode("ab")


@pytest.mark.parametrize(
    ("thinking", "ids"),
    [
        (Thinking.MAYBE, AB),
        (Thinking.MAYBE, [OPEN, WORD, OPEN, CLOSE, *AB]),
        (Thinking.MAYBE, [OPEN, CLOSE, BREAK, *AB]),
        (Thinking.OPEN, [WORD, BREAK, CLOSE, *AB]),
        (Thinking.OPEN, [CLOSE, BREAK, *AB]),
    ],
    ids=["at-once", "thought", "thought-of-nothing", "open", "open-of-nothing"],
)
def test_the_answer_keeps_to_the_grammar_whatever_was_thought(thinking: Thinking, ids: list[int]) -> None:
    constraint = make(thinking)

    follow(constraint, ids)

    assert EOS in allowed(constraint)
    assert WORD not in allowed(constraint)
    assert constraint.failure is None
    follow(constraint, TOKENIZER.encode("ba"))
    assert constraint.is_over


def test_thinking_is_free_but_may_not_end_the_reply() -> None:
    constraint = make(Thinking.OPEN)

    assert set(range(TOKENIZER.vocab_size)) - allowed(constraint) == {EOS}


def test_behind_the_thinking_one_break_may_come_and_no_tag() -> None:
    constraint = make(Thinking.OPEN)
    follow(constraint, [CLOSE])

    at_once = allowed(constraint)
    follow(constraint, [BREAK])

    assert BREAK in at_once
    assert not {OPEN, CLOSE, EOS, WORD} & at_once
    assert BREAK not in allowed(constraint)
