"""The choices of a request: their ids -> `Delta`s of text with logprobs and a finish reason."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import msgspec

from service.engine.constraint import Constraint
from service.engine.interface import OutputStream
from service.engine.observer import RequestRecord
from service.engine.request import FinishReason, Output, TokenLogprobs
from service.errors import GenerationError, PhotonError, RequestError
from service.text.choice_text import ChoiceText
from service.text.merge import merged
from service.text.reasoning import ReasoningCounter

StopReasons = dict[int, int | str]  # by stop token id: the id, or the stop string that it stands for


class Delta(msgspec.Struct, kw_only=True):
    """A piece of one choice's reply. The fold of a choice's deltas is its plain reply."""

    index: int = 0  # which of the n choices
    text: str = ""
    token_ids: list[int] = []  # all that were generated, those that leave no text included
    logprobs: list[TokenLogprobs] = []  # of the ids that are part of the text so far
    finish_reason: str | None = None  # "stop" or "length" on the last delta of a choice
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0  # of token_ids, those of the thinking
    stop_reason: str | int | None = None  # the stop string or stop token id that ended the choice
    prompt_logprobs: list[TokenLogprobs] = []  # of prompt ids from the second on: in the first delta


class StartedGrammar(msgspec.Struct, frozen=True):
    """Where a choice is in its grammar, and the field that asked for it."""

    constraint: Constraint
    field: str


class Choice:
    """One choice: its outputs on the way to deltas."""

    def __init__(
        self,
        index: int,
        stream: OutputStream,
        text: ChoiceText,
        stop_reasons: StopReasons,
        grammar: StartedGrammar | None,
        reasoning: ReasoningCounter | None,
        *,
        has_reply: bool = True,
    ) -> None:
        """`has_reply`: false: only the prompt is of interest, and the id that the engine gives is not."""
        self._has_reply = has_reply
        self.stream = stream
        self._grammar = grammar
        self._reasoning = reasoning
        self._index = index
        self._text = text
        self._stop_reasons = stop_reasons

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        async for output in self.stream:
            if output.finish_reason is FinishReason.ERROR:
                raise self._failure(output.error or "The request failed.")
            if output.finish_reason is FinishReason.CANCELLED:
                return
            delta = self._read(output)
            if self._text.matched is not None:
                await self.stream.close("stop_string")
                yield delta
                return
            yield delta

    def _failure(self, message: str) -> PhotonError:
        """The client's own if its grammar is to blame."""
        grammar = self._grammar
        if grammar is None or grammar.constraint.failure is None:
            return GenerationError(message)
        return RequestError(f"{grammar.field}: {message}", field=grammar.field)

    def _read(self, output: Output) -> Delta:
        delta = Delta(
            index=self._index,
            num_cached_tokens=output.num_cached_tokens,
            prompt_logprobs=output.prompt_logprobs,
        )
        if self._has_reply:
            self._read_ids(output, delta)
        elif output.finish_reason is not None:
            delta.finish_reason = FinishReason.LENGTH.value
        return delta

    def _read_ids(self, output: Output, delta: Delta) -> None:
        text = self._text
        delta.token_ids = output.token_ids
        # the EOS or stop token that ends a choice is no part of the text, nor of the logprobs
        num_shown = len(output.token_ids) - (output.stop_token_id is not None)
        pieces = []
        for i in range(num_shown):
            pieces.append(text.push(output.token_ids[i], output.logprobs[i] if output.logprobs else None))
            if text.matched is not None:
                delta.token_ids = output.token_ids[: i + 1]
                break
        if output.finish_reason is not None and text.matched is None:
            pieces.append(text.flush())
            delta.finish_reason = output.finish_reason.value
            if output.stop_token_id is not None:
                delta.stop_reason = self._stop_reasons.get(output.stop_token_id)
        if text.matched is not None:
            delta.finish_reason, delta.stop_reason = "stop", text.matched
        delta.text = "".join(pieces)
        if self._reasoning is not None:
            delta.num_reasoning_tokens = self._reasoning.count(delta.token_ids)
        delta.logprobs = text.take_logprobs(is_last=delta.finish_reason is not None)


class TextGeneration:
    """The running choices of one request. Implements generation.Generation; iterate it once."""

    def __init__(
        self, choices: list[Choice], num_prompt_tokens: int, max_tokens: int, is_clamped: bool
    ) -> None:
        self._choices = choices
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.is_clamped = is_clamped

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Deltas of all choices as they come.

        Raises: GenerationError, EngineDeadError, RequestError (of a grammar that can't be followed); the
            other choices are ended then.
        """
        try:
            async with aclosing(merged([choice.deltas() for choice in self._choices])) as deltas:
                async for delta in deltas:
                    yield delta
        except PhotonError:
            await self.aclose("error")
            raise

    @property
    def records(self) -> list[RequestRecord]:
        """Of the choices that are over."""
        return [record for each in self._choices if (record := each.stream.record) is not None]

    async def aclose(self, cause: str = "client_gone") -> None:
        """Cancel what is left; idempotent. Whoever still waits for deltas gets no more."""
        for choice in self._choices:
            await choice.stream.close(cause)
