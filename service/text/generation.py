"""One request's ids -> `Delta`s of text with logprobs and a finish reason."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from service.engine.interface import EngineClient, OutputStream
from service.engine.request import FinishReason, Output, SamplingParams, TokenLogprobs
from service.errors import ContextLengthError, GenerationError, RequestError
from service.model.config import SamplingDefaults
from service.text.chat_template import ChatTemplate
from service.text.detokenizer import Detokenizer
from service.text.stop_strings import StopStrings
from service.text.tokenizer import Tokenizer

_LONG_TEXT = 4_000  # characters; encoding more is done off the event loop


class Delta(msgspec.Struct, kw_only=True):
    """A piece of one choice's reply. The fold of a choice's deltas is its plain reply."""

    index: int = 0  # which of the n choices
    text: str = ""
    token_ids: list[int] = []  # all that were generated, those that leave no text included
    logprobs: list[TokenLogprobs] = []  # of the ids that are part of the text so far
    finish_reason: str | None = None  # "stop" or "length" on the last delta of a choice
    num_cached_tokens: int = 0
    stop_reason: str | int | None = None  # the stop string or stop token id that ended the choice


class GenerationParams(msgspec.Struct, frozen=True, kw_only=True):
    """What the API asks for; None means: the model's generation_config, then OpenAI's default."""

    max_tokens: int | None = None  # None: up to the context
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: chosen and k top ones
    n: int = 1
    priority: int = 0


class Generation(Protocol):
    """A started request of n choices."""

    num_prompt_tokens: int
    max_tokens: int  # after clamping to the context
    is_clamped: bool  # max_tokens was asked for and did not fit

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def aclose(self, cause: str = "client_gone") -> None: ...


class TextGenerator:
    """Text in, text out: everything between the API and the engine."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        defaults: SamplingDefaults,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._template = template
        self._defaults = defaults

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    async def encode(self, text: str, field: str = "prompt") -> list[int]:
        """Ids of a raw prompt, with BOS if the tokenizer adds it. Raises: RequestError naming `field`."""
        _check_text(text, field)
        if len(text) < _LONG_TEXT:
            return self._tokenizer.encode_prompt(text)
        return await asyncio.to_thread(self._tokenizer.encode_prompt, text)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a chat. Raises: RequestError (no template, or it refuses the messages)."""
        template = self._template
        if template is None:
            raise RequestError(
                "This model has no chat template; send a prompt to /v1/completions instead.",
                field="messages",
            )

        def encode() -> list[int]:
            _, ids = template.encode(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=template_kwargs,
            )
            return ids

        length = sum(len(str(message.get("content") or "")) for message in messages)
        if length < _LONG_TEXT and not tools:
            return encode()
        return await asyncio.to_thread(encode)

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raises: RequestError if an id is none of the tokenizer's."""
        limit = self._engine.vocab_size
        for token_id in ids:
            if not 0 <= token_id < limit:
                raise RequestError(
                    f"The token id {token_id} does not exist: ids go from 0 to {limit - 1}.", field=field
                )

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """A token as text (U+FFFD for parts of characters) and as its exact bytes."""
        raw = self._tokenizer.token_bytes(token_id)
        return raw.decode(errors="replace"), raw

    async def start(
        self, prompt_ids: list[int], params: GenerationParams, *, request_id: str
    ) -> "TextGeneration":
        """Submit the n choices of a request. Every refusal happens here.

        Raises: ContextLengthError, RequestError, OverloadedError, EngineDeadError.
        """
        self._check(prompt_ids, params)
        room = self.max_model_len - len(prompt_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        streams: list[OutputStream] = []
        try:
            for choice in range(params.n):
                sampling = self._sampling(params, max_tokens, choice)
                name = request_id if params.n == 1 else f"{request_id}-{choice}"
                streams.append(
                    await self._engine.submit(
                        prompt_ids, sampling, request_id=name, priority=params.priority
                    )
                )
        except BaseException:
            for stream in streams:
                await stream.close("error")
            raise
        choices = [_Choice(index, stream, self._tokenizer, params) for index, stream in enumerate(streams)]
        is_clamped = params.max_tokens is not None and params.max_tokens > room
        return TextGeneration(choices, len(prompt_ids), max_tokens, is_clamped)

    def _check(self, prompt_ids: list[int], params: GenerationParams) -> None:
        if len(prompt_ids) >= self.max_model_len:
            asked = "" if params.max_tokens is None else f" and asked for {params.max_tokens} more"
            raise ContextLengthError(
                f"This model's context is {self.max_model_len} tokens, prompt and reply together, but your "
                f"prompt has {len(prompt_ids)} tokens{asked}. Shorten it.",
                field="prompt",
            )
        self.check_ids(params.stop_token_ids, "stop_token_ids")
        self.check_ids([token_id for token_id, _ in params.logit_bias], "logit_bias")

    def _sampling(self, params: GenerationParams, max_tokens: int, choice: int) -> SamplingParams:
        def chosen(name: str, fallback: float) -> Any:
            asked, recommended = getattr(params, name), getattr(self._defaults, name)
            return asked if asked is not None else recommended if recommended is not None else fallback

        return SamplingParams(
            max_tokens=max_tokens,
            temperature=chosen("temperature", 1.0),
            top_p=chosen("top_p", 1.0),
            top_k=chosen("top_k", 0),
            min_p=chosen("min_p", 0.0),
            repetition_penalty=chosen("repetition_penalty", 1.0),
            seed=params.seed,
            choice=choice,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.logit_bias,
            min_tokens=min(params.min_tokens, max_tokens),
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
        )


class TextGeneration:
    """The running choices of one request. Implements Generation."""

    def __init__(
        self, choices: "list[_Choice]", num_prompt_tokens: int, max_tokens: int, is_clamped: bool
    ) -> None:
        self._choices = choices
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.is_clamped = is_clamped

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Deltas of all choices as they come. Raises: GenerationError; the other choices are ended then."""
        try:
            if len(self._choices) == 1:
                async for delta in self._choices[0].deltas():
                    yield delta
            else:
                async for delta in self._merged():
                    yield delta
        except GenerationError:
            await self.aclose("error")
            raise

    async def aclose(self, cause: str = "client_gone") -> None:
        """Cancel what is left; idempotent."""
        for choice in self._choices:
            await choice.stream.close(cause)

    async def _merged(self) -> AsyncIterator[Delta]:
        queue: asyncio.Queue[Delta | GenerationError | None] = asyncio.Queue()

        async def pump(choice: "_Choice") -> None:
            try:
                async for delta in choice.deltas():
                    queue.put_nowait(delta)
                queue.put_nowait(None)
            except GenerationError as error:
                queue.put_nowait(error)

        pumps = [asyncio.create_task(pump(choice)) for choice in self._choices]
        num_open = len(pumps)
        try:
            while num_open:
                item = await queue.get()
                if isinstance(item, GenerationError):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.wait(pumps)


class _Choice:
    """One choice: its ids on the way to text."""

    def __init__(
        self, index: int, stream: OutputStream, tokenizer: Tokenizer, params: GenerationParams
    ) -> None:
        self.stream = stream
        self._index = index
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(params.stop, include_stop=params.include_stop_str_in_output)
        self._num_decoded = 0  # characters out of the detokenizer
        self._num_emitted = 0  # characters let through
        self._held_logprobs: list[tuple[int, TokenLogprobs]] = []  # (where the token's text begins, ...)

    async def deltas(self) -> AsyncIterator[Delta]:
        async for output in self.stream:
            if output.finish_reason is FinishReason.ERROR:
                raise GenerationError(output.error or "The request failed.")
            delta = self._read(output)
            if self._stops.matched is not None:
                await self.stream.close("stop_string")
                yield delta
                return
            if output.finish_reason is FinishReason.CANCELLED:
                return
            if delta.text or delta.token_ids or delta.finish_reason:
                yield delta

    def _read(self, output: Output) -> Delta:
        delta = Delta(
            index=self._index, token_ids=output.token_ids, num_cached_tokens=output.num_cached_tokens
        )
        for position, token_id in enumerate(output.token_ids):
            is_ending = output.stop_token_id is not None and position == len(output.token_ids) - 1
            if is_ending:
                break  # the EOS or stop token is no part of the text, nor of the logprobs
            if output.logprobs:
                self._held_logprobs.append((self._num_decoded, output.logprobs[position]))
            delta.text += self._let_through(self._detokenizer.push(token_id))
            if self._stops.matched is not None:
                delta.token_ids = output.token_ids[: position + 1]
                break
        if output.finish_reason is not None and self._stops.matched is None:
            delta.text += self._let_through(self._detokenizer.flush())
            if self._stops.matched is None:
                delta.text += self._count(self._stops.flush())
            delta.finish_reason = output.finish_reason.value
            delta.stop_reason = output.stop_token_id
        if self._stops.matched is not None:
            delta.finish_reason, delta.stop_reason = "stop", self._stops.matched
        delta.logprobs = self._logprobs_of_emitted_text(is_last=delta.finish_reason is not None)
        return delta

    def _let_through(self, text: str) -> str:
        self._num_decoded += len(text)
        return self._count(self._stops.feed(text))

    def _count(self, text: str) -> str:
        self._num_emitted += len(text)
        return text

    def _logprobs_of_emitted_text(self, is_last: bool) -> list[TokenLogprobs]:
        """Of tokens whose text begins in what is let through; at the end also of those without text."""
        edge = self._num_emitted
        if is_last and self._stops.matched is None:
            edge += 1  # nothing is held back any more
        ready = [entry for begin, entry in self._held_logprobs if begin < edge]
        self._held_logprobs = [held for held in self._held_logprobs if held[0] >= edge]
        return ready


def _check_text(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(
            "The text holds half of a surrogate pair, which is no character.", field=field
        ) from None
