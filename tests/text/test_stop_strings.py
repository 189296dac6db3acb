"""Stop strings against the naive search in the whole text, for every way of cutting it into pieces."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.text.stop_strings import StopStrings

LETTERS = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=5)
CUTS = st.lists(st.integers(0, 30), max_size=12)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cuts), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Text before the first stop string that is complete, and that stop string: the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(text=LETTERS, stop=st.text("ab\n", min_size=1, max_size=6), cuts=CUTS)
@example(text="aaab", stop="aab", cuts=[1, 2])  # the end of one attempt begins the next
@example(text="aabaaabaab", stop="aabaab", cuts=[5])
@example(text="aabaaabaaac", stop="aabaaac", cuts=[])
def test_the_text_ends_where_the_stop_string_begins(text: str, stop: str, cuts: list[int]) -> None:
    stops = StopStrings([stop])

    shown = "".join(stops.feed(piece) for piece in pieces_of(text, cuts)) + stops.flush()

    assert shown == (text[: text.find(stop)] if stop in text else text)
    assert stops.matched == (stop if stop in text else None)


@given(text=LETTERS, stops=STOPS, cuts=CUTS, include=st.booleans())
@example(text="abcd", stops=["abcd", "bc"], cuts=[], include=False)
@example(text="xab", stops=["ab", "b"], cuts=[1, 2], include=False)
def test_of_several_the_one_complete_first_wins_whatever_the_pieces(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    finder = StopStrings(stops, include_stop=include)

    shown = "".join(finder.feed(piece) for piece in pieces_of(text, cuts)) + finder.flush()

    expected, stop = naive(text, stops)
    assert shown == expected + (stop or "" if include else "")
    assert finder.matched == stop


@given(text=LETTERS, stops=STOPS, cuts=CUTS)
def test_only_what_may_begin_a_stop_string_is_held_back(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    finder = StopStrings(stops)
    given, shown = "", ""
    for piece in pieces_of(text, cuts):
        given += piece
        shown += finder.feed(piece)
        if finder.matched is not None:
            return

        begins = (n for n in range(len(given), 0, -1) if any(s.startswith(given[-n:]) for s in stops))
        held = next(begins, 0)
        assert shown == given[: len(given) - held]


def test_after_a_match_nothing_more_comes() -> None:
    stops = StopStrings(["\n\n"])

    shown = [stops.feed("one\n"), stops.feed("\ntwo"), stops.feed("three"), stops.flush()]

    assert shown == ["one", "", "", ""]


@pytest.mark.parametrize("include", [False, True])
def test_without_stop_strings_all_text_passes_at_once(include: bool) -> None:
    stops = StopStrings([], include_stop=include)

    assert stops.feed("anything") == "anything"
    assert stops.flush() == ""
