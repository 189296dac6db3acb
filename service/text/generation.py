"""One request's ids -> `Delta`s of text with logprobs and a finish reason."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol, TypedDict, Unpack

import msgspec

from service.engine.constraint import Constraint
from service.engine.interface import EngineClient, OutputStream
from service.engine.request import FinishReason, Output, SamplingParams, TokenLogprobs
from service.errors import ContextLengthError, GenerationError, PhotonError, RequestError
from service.model.config import SamplingDefaults
from service.text.chat_template import ChatTemplate
from service.text.choice_text import ChoiceText
from service.text.grammar import GrammarSpec
from service.text.matcher import Grammars
from service.text.tokenizer import LONG_TEXT, Tokenizer

_StopReasons = dict[int, int | str]  # by stop token id: the id, or the stop string that it stands for


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
    grammar: GrammarSpec | None = None  # what the reply must match


class Generation(Protocol):
    """A started request of n choices."""

    num_prompt_tokens: int
    max_tokens: int  # after clamping to the context
    is_clamped: bool  # max_tokens was asked for and did not fit

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def aclose(self, cause: str = "client_gone") -> None: ...


class ChatOptions(TypedDict, total=False):
    """Options of encode_chat; see ChatTemplate.encode."""

    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: Mapping[str, Any] | None


class TextGenerator:
    """Text in, text out: everything between the API and the engine."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        defaults: SamplingDefaults,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """`eos_token_ids`: the engine's, with which a grammar ends."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._template = template
        self._defaults = defaults
        self._grammars = Grammars(tokenizer, engine.vocab_size, eos_token_ids)

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    async def encode(
        self, text: str, field: str = "prompt", *, add_special_tokens: bool = True
    ) -> list[int]:
        """Ids of a raw prompt, with BOS if the tokenizer adds it and it is wanted."""
        encode = self._tokenizer.encode_prompt if add_special_tokens else self._tokenizer.encode
        return encode(text) if len(text) < LONG_TEXT else await asyncio.to_thread(encode, text)

    async def decode(self, ids: list[int], field: str) -> str:
        """Text of ids, control tokens included. Raises: RequestError if an id is none of the model's."""
        self.check_ids(ids, field)
        decode = partial(self._tokenizer.decode, ids, skip_special_tokens=False)
        return decode() if len(ids) < LONG_TEXT else await asyncio.to_thread(decode)

    async def token_names(self, ids: list[int]) -> list[str]:
        """Tokens as the vocabulary spells them, such as `Ġthe`."""

        def names() -> list[str]:
            return [self._tokenizer.token_name(token_id) for token_id in ids]

        return names() if len(ids) < LONG_TEXT else await asyncio.to_thread(names)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> list[int]:
        """Ids of a chat. Raises: RequestError (no template, or it refuses the messages)."""
        _, ids = await self.render_chat(messages, **options)
        return ids

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> tuple[str, list[int]]:
        """The prompt of a chat as text and ids. Raises: as `encode_chat`."""
        if self._template is None:
            raise RequestError(
                "This model has no chat template. Send a prompt to /v1/completions instead, or put a "
                "chat_template.jinja into the model's directory.",
                field="messages",
            )
        num_chars = sum(100 + len(str(message.get("content") or "")) for message in messages)
        if num_chars < LONG_TEXT and not options.get("tools"):
            return self._template.encode(messages, **options)
        return await asyncio.to_thread(self._template.encode, messages, **options)

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raises: RequestError if an id is none of the model's."""
        limit = self._engine.vocab_size
        if not ids or (min(ids) >= 0 and max(ids) < limit):  # in C, unlike a loop
            return
        wrong = next(token_id for token_id in ids if not 0 <= token_id < limit)
        raise RequestError(
            f"{field}: the token id {wrong} does not exist; ids go from 0 to {limit - 1}.", field=field
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
        grammars = await self._started_grammars(params)
        stop_reasons = self._stop_reasons(params)
        room = self.max_model_len - len(prompt_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        streams: list[OutputStream] = []
        try:
            for choice in range(params.n):
                sampling = self._sampling(params, max_tokens, choice, tuple(stop_reasons), grammars[choice])
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
        choices = [
            _Choice(index, stream, self._text_of(params), stop_reasons, grammar)
            for index, (stream, grammar) in enumerate(zip(streams, grammars, strict=True))
        ]
        is_clamped = params.max_tokens is not None and params.max_tokens > room
        return TextGeneration(choices, len(prompt_ids), max_tokens, is_clamped)

    async def _started_grammars(self, params: GenerationParams) -> "list[_StartedGrammar | None]":
        """One of its own for each choice."""
        spec = params.grammar
        if spec is None:
            return [None] * params.n
        matcher = await self._grammars.compile(spec)
        return [_StartedGrammar(matcher.copy(), spec.field) for _ in range(params.n)]

    def _check(self, prompt_ids: list[int], params: GenerationParams) -> None:
        if not prompt_ids:
            raise RequestError("The prompt is empty; give at least one token.", field="prompt")
        if params.max_tokens is not None and params.max_tokens < 1:
            raise RequestError(
                f"max_tokens is {params.max_tokens}; ask for at least one.", field="max_tokens"
            )
        if len(prompt_ids) >= self.max_model_len:
            asked = "" if params.max_tokens is None else f", and {params.max_tokens} more were asked for"
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens, prompt and reply "
                f"together. However, the prompt has {len(prompt_ids)} tokens{asked}. Shorten the prompt.",
                field="prompt",
            )
        self.check_ids(prompt_ids, "prompt")
        self.check_ids(params.stop_token_ids, "stop_token_ids")
        self.check_ids([token_id for token_id, _ in params.logit_bias], "logit_bias")

    def _stop_reasons(self, params: GenerationParams) -> "_StopReasons":
        """What to report for each stop token id.

        A stop string that is the text of a control token, which no text shows, ends by the token's id.
        """
        reasons: _StopReasons = {token_id: token_id for token_id in params.stop_token_ids}
        if params.skip_special_tokens:
            for stop in params.stop:
                token_id = self._tokenizer.control_id(stop)
                if token_id is not None and token_id < self._engine.vocab_size:
                    reasons.setdefault(token_id, stop)
        return reasons

    def _text_of(self, params: GenerationParams) -> ChoiceText:
        return ChoiceText(
            self._tokenizer,
            stops=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def _sampling(
        self,
        params: GenerationParams,
        max_tokens: int,
        choice: int,
        stop_token_ids: tuple[int, ...],
        grammar: "_StartedGrammar | None",
    ) -> SamplingParams:
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
            stop_token_ids=stop_token_ids,
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
            constraint=None if grammar is None else grammar.constraint,
        )


class _StartedGrammar(msgspec.Struct, frozen=True):
    """Where a choice is in its grammar, and the field that asked for it."""

    constraint: Constraint
    field: str


class TextGeneration:
    """The running choices of one request. Implements Generation; iterate it once."""

    def __init__(
        self, choices: "list[_Choice]", num_prompt_tokens: int, max_tokens: int, is_clamped: bool
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
            async with aclosing(
                self._merged() if len(self._choices) > 1 else self._choices[0].deltas()
            ) as deltas:
                async for delta in deltas:
                    yield delta
        except PhotonError:
            await self.aclose("error")
            raise

    async def aclose(self, cause: str = "client_gone") -> None:
        """Cancel what is left; idempotent. Whoever still waits for deltas gets no more."""
        for choice in self._choices:
            await choice.stream.close(cause)

    async def _merged(self) -> AsyncGenerator[Delta, None]:
        queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()

        async def pump(choice: "_Choice") -> None:
            try:
                async for delta in choice.deltas():
                    queue.put_nowait(delta)
                queue.put_nowait(None)
            except Exception as error:  # raised again by whoever reads the queue
                queue.put_nowait(error)

        pumps = [asyncio.create_task(pump(choice)) for choice in self._choices]
        num_open = len(pumps)
        try:
            while num_open:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()


class _Choice:
    """One choice: its outputs on the way to deltas."""

    def __init__(
        self,
        index: int,
        stream: OutputStream,
        text: ChoiceText,
        stop_reasons: _StopReasons,
        grammar: _StartedGrammar | None,
    ) -> None:
        self.stream = stream
        self._grammar = grammar
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
        text = self._text
        delta = Delta(
            index=self._index, token_ids=output.token_ids, num_cached_tokens=output.num_cached_tokens
        )
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
        delta.logprobs = text.take_logprobs(is_last=delta.finish_reason is not None)
        return delta
