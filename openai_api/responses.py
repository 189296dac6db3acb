"""POST /v1/responses, stateless: nothing is stored, so each request brings its whole history."""

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openai_api.answer import Stamp, answer
from openai_api.api import Api
from openai_api.chat_prompt import ignored_effort, make_prompt
from openai_api.fields import REFUSED_BY_RESPONSES, ignored_fields
from openai_api.json_body import read_object
from openai_api.params import generation_params
from openai_api.protocol import ChatRequest, to_struct
from openai_api.responses_input import chat_request, in_own_words
from openai_api.responses_protocol import (
    ReasoningConfig,
    ResponseObject,
    ResponsesRequest,
    TextConfig,
    TextFormat,
)
from openai_api.responses_reply import ResponseReply
from openai_api.run import Run
from openai_api.sse import EventStream
from openai_api.tools import tool_use
from service.errors import RequestError
from service.text.generation import TextGenerator
from service.text.reply import ReplyParser

_DONE_FIELDS = frozenset(field.name for field in msgspec.structs.fields(ResponsesRequest))


class Responses:
    """The same generation as a chat's, in other clothes."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def create(self, http: Request) -> Response | EventStream:
        """Raises: whatever is refused, before the first byte of an answer."""
        generator = self._api.ready_generator()
        raw = await read_object(http)
        ignored = ignored_fields(raw, _DONE_FIELDS, REFUSED_BY_RESPONSES)
        body = to_struct(raw, ResponsesRequest)
        stamp = Stamp.new("resp_", self._api.served_name(body.model), None)
        chat = chat_request(body)
        try:
            run, parser = await self._start(generator, chat, stamp)
        except RequestError as error:
            raise in_own_words(error) from None

        if run.clamped_max_tokens is not None:
            ignored.append(f"max_output_tokens;clamped={run.clamped_max_tokens}")
        if ignored_effort(chat, generator.chat_format):
            ignored.append("reasoning.effort")
        if body.reasoning is not None and body.reasoning.summary is not None:
            ignored.append("reasoning.summary")
        reply = ResponseReply(run, parser, _empty(body, stamp))
        return await answer(
            http,
            reply,
            run,
            is_stream=bool(body.stream),
            ignored=sorted(ignored),
            ping_seconds=self._api.limits.ping_seconds,
            end=b"",  # the last event says that it is the last
        )

    async def _start(
        self, generator: TextGenerator, chat: ChatRequest, stamp: Stamp
    ) -> tuple[Run, ReplyParser]:
        tools = tool_use(chat, generator.chat_format)
        params = generation_params(chat, max_tokens=chat.max_tokens, logprobs=None, grammar=tools.grammar)
        prompt = await make_prompt(generator, chat, tools.shown)
        params = msgspec.structs.replace(params, thinking=prompt.thinking)
        timeout = self._api.timeout_of(chat.timeout)
        run = await Run.start(generator, [prompt.ids], params, stamp.id, timeout)
        return run, ReplyParser(prompt.thinking, tools.form, tools.names)

    async def stored(self, _http: Request) -> Response:
        """Raises: HTTPException 404, always."""
        raise HTTPException(404, "Responses are not stored here; send the whole history as input.")


def _empty(body: ResponsesRequest, stamp: Stamp) -> ResponseObject:
    return ResponseObject(
        id=stamp.id,
        created_at=stamp.created,
        model=stamp.model,
        status="in_progress",
        output=[],
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        tools=body.tools or [],
        tool_choice=body.tool_choice or "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=body.reasoning or ReasoningConfig(),
        text=body.text or TextConfig(format=TextFormat(type="text")),
        metadata=body.metadata or {},
    )
