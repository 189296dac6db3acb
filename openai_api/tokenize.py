"""POST /tokenize and /detokenize: text or messages to ids and back, in vLLM's shapes."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from openai_api.api import Api
from openai_api.chat_prompt import make_prompt
from openai_api.fields import HEADER, REFUSED_BY_CHAT, header_value, ignored_fields
from openai_api.json_body import read_object
from openai_api.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest, to_struct
from openai_api.replies import DetokenizeReply, TokenizeReply
from openai_api.tools import tool_use
from service.errors import RequestError
from service.text.generation import TextGenerator

_FIELDS = frozenset(field.name for field in msgspec.structs.fields(TokenizeRequest))
_CHAT_FIELDS = _FIELDS - {"add_special_tokens"}  # for chats in the table of what is refused
_DETOKENIZE_FIELDS = frozenset(field.name for field in msgspec.structs.fields(DetokenizeRequest))
# what changes the prompt of a chat; the other fields of a chat may be sent along
REFUSED_BY_TOKENIZE = {
    name: rule
    for name, rule in REFUSED_BY_CHAT.items()
    if name
    in {
        "functions",
        "documents",
        "chat_template",
        "add_special_tokens",
        "truncate_prompt_tokens",
    }
}


class Tokens:
    def __init__(self, api: Api) -> None:
        self._api = api

    async def tokenize(self, http: Request) -> Response:
        """POST /tokenize. Raises: RequestError, ModelNotFoundError, OverloadedError while loading."""
        generator = self._api.ready_generator()
        raw = await read_object(http)
        is_chat = raw.get("messages") is not None
        done, refused = (_CHAT_FIELDS, REFUSED_BY_TOKENIZE) if is_chat else (_FIELDS, {})
        ignored = ignored_fields(raw, done, refused)
        body = to_struct(raw, TokenizeRequest)
        self._api.served_name(body.model)
        ids = await _encode(generator, body)
        reply = TokenizeReply(len(ids), generator.max_model_len, ids)
        if body.return_token_strs:
            reply.token_strs = await generator.token_names(ids)
        return _json(reply, ignored)

    async def detokenize(self, http: Request) -> Response:
        """POST /detokenize; control tokens are part of the text. Raises: as `tokenize`."""
        generator = self._api.ready_generator()
        raw = await read_object(http)
        ignored = ignored_fields(raw, _DETOKENIZE_FIELDS, {})
        body = to_struct(raw, DetokenizeRequest)
        self._api.served_name(body.model)
        if body.tokens is None:
            raise RequestError("tokens is missing; send a list of token ids.", field="tokens")
        return _json(DetokenizeReply(await generator.decode(body.tokens, "tokens")), ignored)


async def _encode(generator: TextGenerator, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Send either prompt, a text, or messages, those of a chat.", field="prompt")
    if body.prompt is not None:
        with_bos = body.add_special_tokens is not False
        return await generator.encode(body.prompt, "prompt", add_special_tokens=with_bos)
    chat = ChatRequest(
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort,
        tools=body.tools,
        tool_choice=body.tool_choice,
    )
    tools = tool_use(chat, generator.chat_format)
    return (await make_prompt(generator, chat, tools.shown)).ids


def _json(body: msgspec.Struct, ignored: list[str]) -> Response:
    headers: Mapping[str, Any] = {HEADER: header_value(ignored)} if ignored else {}
    return Response(msgspec.json.encode(body), headers=headers, media_type="application/json")
