"""Logprobs of a delta in the two layouts of the API. All numbers are finite: JSON has no infinity."""

import codecs
from collections.abc import Sequence

from openai_api.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from service.engine.request import TokenLogprobs
from service.text.choice import Delta
from service.text.generation import TextGenerator

FLOOR = -9999.0  # stands for minus infinity and NaN


def finite(logprob: float) -> float:
    """Between FLOOR and 0, whatever the device computed."""
    return min(logprob, 0.0) if logprob > FLOOR else FLOOR


def chat_logprobs(generator: TextGenerator, delta: Delta) -> ChatLogprobs | None:
    """Layout of /v1/chat/completions: content[] with token, logprob, bytes and top_logprobs."""
    if not delta.logprobs:
        return None

    def entry(one: TokenLogprobs) -> TokenLogprob:
        text, raw = generator.token_text(one.token_id)
        top = []
        for token_id, logprob in zip(one.top_ids, one.top_logprobs, strict=True):
            top_text, top_raw = generator.token_text(token_id)
            top.append(TopLogprob(top_text, finite(logprob), list(top_raw)))
        return TokenLogprob(text, finite(one.logprob), list(raw), top)

    return ChatLogprobs([entry(one) for one in delta.logprobs])


def prompt_logprobs(
    generator: TextGenerator, num_tokens: int, scores: Sequence[TokenLogprobs]
) -> PromptLogprobs:
    """vLLM's layout of `prompt_logprobs`. `num_tokens`: of the prompt."""

    def entry(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(finite(logprob), rank, generator.token_text(token_id)[0])

    found: PromptLogprobs = [None] * min(1, num_tokens)
    for one in scores:
        entries = {str(one.token_id): entry(one.token_id, one.logprob, one.rank)}
        for rank, (token_id, logprob) in enumerate(zip(one.top_ids, one.top_logprobs, strict=True), 1):
            entries.setdefault(str(token_id), entry(token_id, logprob, rank))
        found.append(entries)
    return found


class LegacyLogprobs:
    """Layout of /v1/completions: parallel lists. Knows how much text each choice already has."""

    def __init__(self, generator: TextGenerator) -> None:
        self._generator = generator
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}  # by choice
        self._offsets: dict[int, int] = {}

    def of(self, delta: Delta) -> CompletionLogprobs | None:
        if not delta.logprobs:
            return None
        lists = CompletionLogprobs([], [], [], [])
        self._add(lists, delta.index, delta.logprobs)
        return lists

    def of_prompt(
        self, choice: int, ids: Sequence[int], num_hidden: int, scores: Sequence[TokenLogprobs]
    ) -> CompletionLogprobs:
        """Of an echoed prompt. `num_hidden`: leading ids that are no part of its text."""
        _, raw = self._generator.token_text(ids[0])
        offset = 0 if num_hidden else self._advance(choice, raw)
        lists = CompletionLogprobs([_legacy_name(raw)], [None], [None], [offset])
        self._add(lists, choice, scores)
        return lists

    def _add(self, lists: CompletionLogprobs, choice: int, logprobs: Sequence[TokenLogprobs]) -> None:
        for one in logprobs:
            _, raw = self._generator.token_text(one.token_id)
            name, logprob = _legacy_name(raw), finite(one.logprob)
            top: dict[str, float] = {}
            for token_id, top_logprob in zip(one.top_ids, one.top_logprobs, strict=True):
                top.setdefault(_legacy_name(self._generator.token_text(token_id)[1]), finite(top_logprob))
            top[name] = logprob  # always there, though it may not be among the top ones
            lists.tokens.append(name)
            lists.token_logprobs.append(logprob)
            lists.top_logprobs.append(top)
            lists.text_offset.append(self._advance(choice, raw))

    def _advance(self, choice: int, raw: bytes) -> int:
        """Characters before this token; a character spread over tokens counts when it is whole."""
        decoder = self._decoders.get(choice)
        if decoder is None:
            decoder = self._decoders[choice] = codecs.getincrementaldecoder("utf-8")("replace")
        offset = self._offsets.get(choice, 0)
        self._offsets[choice] = offset + len(decoder.decode(raw))
        return offset


def _legacy_name(raw: bytes) -> str:
    """A token as a key: its text, or `bytes:\\xe2\\x80` for a part of a character, as OpenAI writes it."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
