"""Thinking and answer: the same however the text is cut, tags in neither."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.text.chat_format import Thinking, ThinkingTags
from service.text.reasoning import ReasoningCounter, ReasoningParser

TAGS = ThinkingTags(open_id=7, close_id=8, has_switch=True)


def split(thinking: Thinking, *pieces: str) -> tuple[str, str]:
    parser = ReasoningParser(thinking)
    parts = [*map(parser.feed, pieces), parser.flush()]
    return "".join(thought for thought, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize(
    ("thinking", "text", "wanted"),
    [
        (Thinking.MAYBE, "x", ("", "x")),
        (Thinking.MAYBE, "<think>\nr\n</think>\n\na", ("r", "a")),
        (Thinking.MAYBE, "<think>r</think>a", ("r", "a")),
        (Thinking.MAYBE, "\n<think>r\n\ns</think>a\n\nb\n", ("r\n\ns", "a\n\nb\n")),
        (Thinking.MAYBE, "<think>\n\n</think>\n\na", ("", "a")),
        (Thinking.MAYBE, "<think>cut o", ("cut o", "")),
        (Thinking.MAYBE, "<think>cut</thi", ("cut</thi", "")),
        (Thinking.MAYBE, "<think>a</think>b<think>c</think>", ("a", "b<think>c</think>")),
        (Thinking.MAYBE, "say <think> aloud", ("", "say <think> aloud")),
        (Thinking.MAYBE, "<thin", ("", "<thin")),
        (Thinking.MAYBE, " \n", ("", " \n")),
        (Thinking.OPEN, "r</think>a", ("r", "a")),
        (Thinking.OPEN, "\nr\n</think>\n\na", ("r", "a")),
        (Thinking.OPEN, "<think>r</think>a", ("r", "a")),
        (Thinking.OPEN, "x", ("x", "")),
        (Thinking.OPEN, "</think>a", ("", "a")),
        (Thinking.OFF, "x", ("", "x")),
        (Thinking.OFF, "<think>r</think>a", ("", "<think>r</think>a")),
        (Thinking.OFF, "r</think>a", ("", "r</think>a")),
    ],
)
def test_text_before_the_closing_tag_is_thinking(
    thinking: Thinking, text: str, wanted: tuple[str, str]
) -> None:
    assert split(thinking, text) == wanted
    assert split(thinking, *text) == wanted


WORDS = ["<think>", "</think>", "<", "</", "think", ">", "\n", " ", "a", "\u00e9"]


@given(st.sampled_from(Thinking), st.lists(st.sampled_from(WORDS), max_size=12), st.data())
@example(Thinking.MAYBE, ["<think>", "\n", "a", "\n", "</think>", "\n", "a"], None)
def test_every_way_to_cut_a_text_gives_the_same(
    thinking: Thinking, words: list[str], data: st.DataObject | None
) -> None:
    text = "".join(words)
    cuts = [] if data is None else data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    assert split(thinking, *pieces) == split(thinking, text) == split(thinking, *text)


@pytest.mark.parametrize(
    ("thinking", "ids", "wanted"),
    [
        (Thinking.MAYBE, [7, 1, 2, 8, 3], 4),
        (Thinking.MAYBE, [1, 7, 8], 0),
        (Thinking.MAYBE, [7, 1], 2),
        (Thinking.OPEN, [1, 8, 2, 8], 2),
        (Thinking.OPEN, [1, 2], 2),
        (Thinking.OFF, [7, 1, 8], 0),
    ],
)
def test_tokens_of_thinking_are_counted_tags_included(
    thinking: Thinking, ids: list[int], wanted: int
) -> None:
    at_once, one_by_one = ReasoningCounter(thinking, TAGS), ReasoningCounter(thinking, TAGS)

    assert at_once.count(ids) == wanted
    assert sum(one_by_one.count([each]) for each in ids) == wanted
