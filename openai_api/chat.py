"""POST /v1/chat/completions."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from openai_api.answer import Stamp, UsageWishes, answer
from openai_api.api import Api
from openai_api.chat_prompt import ChatPrompt, ignored_effort, make_prompt
from openai_api.fields import HEADER, REFUSED_BY_CHAT, header_value, ignored_fields
from openai_api.json_body import read_object
from openai_api.logprobs import chat_logprobs, prompt_logprobs
from openai_api.messages import ignored_in_messages
from openai_api.params import chat_max_tokens, generation_params, num_chat_logprobs
from openai_api.protocol import ChatRequest, to_struct
from openai_api.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    PromptLogprobs,
    RenderReply,
)
from openai_api.reply_parts import MessageFold, ReplyParts
from openai_api.run import Run
from openai_api.sse import EventStream
from openai_api.tools import ToolUse, tool_use
from service.text.choice import Delta
from service.text.generation import GenerationParams, TextGenerator
from service.text.reply import ReplyParser

_DONE_FIELDS = frozenset(field.name for field in msgspec.structs.fields(ChatRequest))


class Chat:
    """Parse, refuse, encode, start; then chunks."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def create(self, http: Request) -> Response | EventStream:
        """Raises: whatever is refused, before the first byte of an answer."""
        generator = self._api.ready_generator()
        body, ignored = _decode(await read_object(http))
        stamp = Stamp.new("chatcmpl-", self._api.served_name(body.model), self._api.system_fingerprint)
        asked_by, _ = chat_max_tokens(body)
        params, prompt, tools = await self._prepare(generator, body)

        run = await Run.start(generator, [prompt.ids], params, stamp.id, self._api.timeout_of(body.timeout))

        if run.clamped_max_tokens is not None:
            ignored.append(f"{asked_by};clamped={run.clamped_max_tokens}")
        ignored += ignored_effort(body, generator.chat_format)
        parts = ReplyParts(
            lambda: ReplyParser(prompt.thinking, tools.form, tools.names),
            has_reasoning=body.include_reasoning is not False,
        )
        extras = ChatExtras(
            prompt.ids,
            has_prompt_logprobs=body.prompt_logprobs is not None,
            has_token_ids=bool(body.return_token_ids),
        )
        reply = ChatReply(generator, run, stamp, UsageWishes.of(body), parts, extras)
        limits = self._api.limits
        return await answer(
            http, reply, run, is_stream=bool(body.stream), ignored=ignored, ping_seconds=limits.ping_seconds
        )

    async def render(self, http: Request) -> Response:
        """The prompt that a chat would make, as text and ids; nothing is generated. Raises: as `create`."""
        generator = self._api.ready_generator()
        body, ignored = _decode(await read_object(http))
        self._api.served_name(body.model)
        _, prompt, _ = await self._prepare(generator, body)
        reply = RenderReply(prompt.text, prompt.ids, len(prompt.ids), generator.max_model_len)
        headers = {HEADER: header_value(ignored)} if ignored else {}
        return Response(msgspec.json.encode(reply), headers=headers, media_type="application/json")

    async def _prepare(
        self, generator: TextGenerator, body: ChatRequest
    ) -> tuple[GenerationParams, ChatPrompt, ToolUse]:
        """All that can be refused before anything is generated, but for the prompt's length."""
        _, max_tokens = chat_max_tokens(body)
        tools = tool_use(body, generator.chat_format)
        params = generation_params(
            body, max_tokens=max_tokens, logprobs=num_chat_logprobs(body), grammar=tools.grammar
        )
        self._api.check_choices(generator, params.n, "n")
        prompt = await make_prompt(generator, body, tools.shown)
        return msgspec.structs.replace(params, thinking=prompt.thinking), prompt, tools


def _decode(raw: Mapping[str, Any]) -> tuple[ChatRequest, list[str]]:
    """The request, and the names of what it holds that has no effect."""
    ignored = ignored_fields(raw, _DONE_FIELDS, REFUSED_BY_CHAT)
    body = to_struct(raw, ChatRequest)
    return body, ignored + ignored_in_messages(raw.get("messages") or ())


class ChatExtras(msgspec.Struct, frozen=True):
    """What a reply holds besides messages."""

    prompt_ids: list[int]
    has_prompt_logprobs: bool
    has_token_ids: bool


class ChatReply:
    """Chunks of a chat reply: of each choice first the role, then its parts, then the finish reason."""

    def __init__(
        self,
        generator: TextGenerator,
        run: Run,
        stamp: Stamp,
        usage: UsageWishes,
        parts: ReplyParts,
        extras: ChatExtras,
    ) -> None:
        self._extras = extras
        self._prompt_logprobs: PromptLogprobs | UnsetType = UNSET
        self._generator = generator
        self._run = run
        self._stamp = stamp
        self._usage = usage
        self._parts = parts

    async def chunks(self) -> AsyncGenerator[list[ChatChunk], None]:
        has_role: set[int] = set()
        async with aclosing(self._run.deltas()) as deltas:
            async for delta in deltas:
                choices = []
                is_first = not has_role
                if delta.index not in has_role:
                    has_role.add(delta.index)
                    choices.append(ChatChunkChoice(delta.index, ChatDelta("assistant", "")))
                    self._note_prompt(delta)
                choices += self._choices(delta)
                if choices:
                    chunks = [self._chunk([choice]) for choice in choices]
                    if is_first and self._extras.has_token_ids:
                        chunks[0].prompt_token_ids = self._extras.prompt_ids
                    yield chunks
        if self._usage.at_end:
            last = self._chunk([])
            last.usage = self._run.usage()
            yield [last]

    def _note_prompt(self, delta: Delta) -> None:
        """Logprobs of the prompt came with the first delta of each choice, and are alike."""
        if self._extras.has_prompt_logprobs and self._prompt_logprobs is UNSET:
            self._prompt_logprobs = prompt_logprobs(
                self._generator, len(self._extras.prompt_ids), delta.prompt_logprobs
            )

    def _choices(self, delta: Delta) -> list[ChatChunkChoice]:
        """What a delta adds to its choice."""
        logprobs = chat_logprobs(self._generator, delta)
        parts = self._parts.of(delta)
        token_ids = delta.token_ids if self._extras.has_token_ids and delta.token_ids else UNSET
        if not parts and (logprobs is not None or token_ids is not UNSET):
            parts = [ChatDelta(content="")]
        choices = [ChatChunkChoice(delta.index, part) for part in parts]
        if choices:
            choices[0].logprobs, choices[0].token_ids = logprobs, token_ids
        if (reason := self._parts.finish_reason(delta)) is not None:
            choices.append(ChatChunkChoice(delta.index, ChatDelta(), None, reason))
        return choices

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        stamp, usage = self._stamp, self._usage
        sent = self._run.usage() if usage.always else None if usage.at_end else UNSET
        return ChatChunk(stamp.id, stamp.created, stamp.model, stamp.system_fingerprint, choices, sent)

    async def joined(self) -> ChatCompletion:
        folds = [MessageFold() for _ in range(self._run.num_choices)]
        choices = [ChatChoice(index, ChatMessage(""), None, None) for index in range(self._run.num_choices)]
        async with aclosing(self.chunks()) as batches:
            async for batch in batches:
                for chunk in batch:
                    for piece in chunk.choices:
                        folds[piece.index].add(piece.delta)
                        _extend(choices[piece.index], piece)
        for choice, fold in zip(choices, folds, strict=True):
            choice.message = fold.message()
        stamp, extras = self._stamp, self._extras
        return ChatCompletion(
            stamp.id,
            stamp.created,
            stamp.model,
            stamp.system_fingerprint,
            choices,
            self._run.usage(),
            prompt_logprobs=self._prompt_logprobs,
            prompt_token_ids=extras.prompt_ids if extras.has_token_ids else UNSET,
        )


def _extend(choice: ChatChoice, piece: ChatChunkChoice) -> None:
    if piece.finish_reason is not None:
        choice.finish_reason = piece.finish_reason
    if piece.token_ids is not UNSET:
        choice.token_ids = ([] if choice.token_ids is UNSET else choice.token_ids) + piece.token_ids
    if piece.logprobs is not None:
        if choice.logprobs is None:
            choice.logprobs = ChatLogprobs([])
        choice.logprobs.content += piece.logprobs.content
