"""A constraint that begins when the thinking has ended. Implements service.engine.constraint.Constraint."""

import numpy as np
from numpy.typing import NDArray

from service.engine.constraint import Constraint
from service.text.chat_format import Thinking, ThinkingTags


class AfterThinking:
    """Thinking is free, but for EOS: an answer has to follow. One token of line breaks may precede it."""

    def __init__(
        self,
        answer: Constraint,
        thinking: Thinking,
        tags: ThinkingTags,
        *,
        break_ids: frozenset[int],
        eos_ids: frozenset[int],
    ) -> None:
        """`break_ids`: tokens of line breaks only."""
        self._answer = answer
        self._tags = tags
        self._break_ids, self._eos_ids = break_ids, eos_ids
        self._may_open = thinking is Thinking.MAYBE
        self._is_thinking = thinking is Thinking.OPEN
        self._may_break = False

    @property
    def is_over(self) -> bool:
        return not self._is_thinking and self._answer.is_over

    @property
    def failure(self) -> str | None:
        return None if self._is_thinking else self._answer.failure

    def fill_mask(self, row: NDArray[np.uint32]) -> None:
        if self._is_thinking:
            row[:] = 0xFFFFFFFF
            for token_id in self._eos_ids:
                row[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
            return
        self._answer.fill_mask(row)
        more = self._break_ids if self._may_break else {self._tags.open_id} if self._may_open else ()
        for token_id in more:
            row[token_id // 32] |= np.uint32(1 << token_id % 32)

    def advance(self, token_id: int) -> None:
        may_open, self._may_open = self._may_open, False
        may_break, self._may_break = self._may_break, False
        if self._is_thinking:
            self._is_thinking = token_id != self._tags.close_id
            self._may_break = not self._is_thinking
        elif may_open and token_id == self._tags.open_id:
            self._is_thinking = True
        elif not (may_break and token_id in self._break_ids):
            self._answer.advance(token_id)
