"""Text in, text out: a request -> its choices, started in the engine, and their deltas."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol, TypedDict, Unpack

import msgspec

from service.engine.constraint import Constraint
from service.engine.interface import EngineClient, OutputStream
from service.engine.observer import RequestRecord
from service.engine.request import SamplingParams
from service.errors import ContextLengthError, RequestError
from service.model.config import SamplingDefaults
from service.text.after_thinking import AfterThinking
from service.text.chat_format import ChatFormat, Thinking
from service.text.chat_template import ChatTemplate
from service.text.choice import Choice, Delta, StartedGrammar, StopReasons, TextGeneration
from service.text.choice_text import ChoiceText
from service.text.grammar import GrammarSpec
from service.text.matcher import Grammars
from service.text.reasoning import ReasoningCounter
from service.text.tokenizer import LONG_TEXT, Tokenizer


class GenerationParams(msgspec.Struct, frozen=True, kw_only=True):
    """What the API asks for; None means: the model's generation_config, then OpenAI's default."""

    max_tokens: int | None = None  # None: up to the context; 0: the prompt's logprobs alone
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
    prompt_logprobs: int | None = None  # the same of the prompt
    n: int = 1
    priority: int = 0
    cache_salt: str = ""  # prefixes are shared among requests with the same one alone
    grammar: GrammarSpec | None = None  # what the reply must match, behind its thinking
    thinking: Thinking = Thinking.OFF  # how the reply begins


class Generation(Protocol):
    """A started request of n choices."""

    num_prompt_tokens: int
    max_tokens: int  # after clamping to the context
    is_clamped: bool  # max_tokens was asked for and did not fit

    @property
    def records(self) -> list[RequestRecord]: ...  # of the choices that are over

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def aclose(self, cause: str = "client_gone") -> None: ...


class ChatOptions(TypedDict, total=False):
    """Options of render_chat; see ChatTemplate.encode."""

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
        grammars: Grammars | None = None,
    ) -> None:
        """`grammars`: of this tokenizer and the engine's ids; None: of a model without EOS."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._template = template
        self._defaults = defaults
        self._grammars = Grammars(tokenizer, engine.vocab_size, ()) if grammars is None else grammars

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def max_choices(self) -> int:
        """Choices that can be started at once, where nothing else waits."""
        return self._engine.max_waiting

    @property
    def chat_format(self) -> ChatFormat:
        """What this model's replies in a chat look like."""
        return ChatFormat() if self._template is None else self._template.format

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

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> tuple[str, list[int]]:
        """The prompt of a chat as text and ids. Raises: RequestError (no template, or it refuses)."""
        if self._template is None:
            raise RequestError(
                "This model has no chat template. Send a prompt to /v1/completions instead, or put a "
                "chat_template.jinja into the model's directory.",
                field="messages",
            )
        num_chars = sum(100 + len(str(message.get("content") or "")) for message in messages)
        num_chars += sum(len(str(message.get("tool_calls") or "")) for message in messages)
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
    ) -> TextGeneration:
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
                        prompt_ids,
                        sampling,
                        request_id=name,
                        priority=params.priority,
                        salt=params.cache_salt.encode(),
                    )
                )
        except BaseException:
            for stream in streams:
                await stream.close("error")
            raise
        choices = [
            Choice(
                index,
                stream,
                self._text_of(params),
                stop_reasons,
                grammar,
                self._reasoning_counter(params),
                has_reply=max_tokens > 0,
            )
            for index, (stream, grammar) in enumerate(zip(streams, grammars, strict=True))
        ]
        is_clamped = params.max_tokens is not None and params.max_tokens > room
        return TextGeneration(choices, len(prompt_ids), max_tokens, is_clamped)

    async def _started_grammars(self, params: GenerationParams) -> list[StartedGrammar | None]:
        """One of its own for each choice."""
        spec = params.grammar
        if spec is None:
            return [None] * params.n
        matcher = await self._grammars.compile(spec)
        return [
            StartedGrammar(self._after_thinking(matcher.copy(), params.thinking), spec.field)
            for _ in range(params.n)
        ]

    def _after_thinking(self, answer: Constraint, thinking: Thinking) -> Constraint:
        tags = self.chat_format.thinking
        if tags is None or thinking is Thinking.OFF:
            return answer
        return AfterThinking(
            answer,
            thinking,
            tags,
            break_ids=self._break_ids,
            eos_ids=frozenset(self._grammars.eos_token_ids),
        )

    @cached_property
    def _break_ids(self) -> frozenset[int]:
        """Tokens of one or two line breaks and nothing else."""
        ids = [self._tokenizer.encode(text) for text in ("\n", "\n\n")]
        return frozenset(each[0] for each in ids if len(each) == 1)

    def _reasoning_counter(self, params: GenerationParams) -> ReasoningCounter | None:
        tags = self.chat_format.thinking
        return None if tags is None else ReasoningCounter(params.thinking, tags)

    def _check(self, prompt_ids: list[int], params: GenerationParams) -> None:
        if params.max_tokens is not None and params.max_tokens < 0:
            raise RequestError(f"max_tokens is {params.max_tokens}; give 0 or more.", field="max_tokens")
        if not prompt_ids:
            raise RequestError("The prompt is empty; give at least one token.", field="prompt")
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

    def _stop_reasons(self, params: GenerationParams) -> StopReasons:
        """What to report for each stop token id.

        A stop string that is the text of a control token, which no text shows, ends by the token's id.
        """
        reasons: StopReasons = {token_id: token_id for token_id in params.stop_token_ids}
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
        grammar: StartedGrammar | None,
    ) -> SamplingParams:
        def chosen(name: str, fallback: float) -> Any:
            asked, recommended = getattr(params, name), getattr(self._defaults, name)
            return asked if asked is not None else recommended if recommended is not None else fallback

        return SamplingParams(
            max_tokens=max(1, max_tokens),  # a step ends with an id; where none is wanted nobody reads it
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
            prompt_logprobs=params.prompt_logprobs,
            constraint=None if grammar is None else grammar.constraint,
        )
