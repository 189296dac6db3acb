"""Messages of a chat request -> what the chat template is given."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from openai_api.protocol import ChatRequest, Message, Part, PastCall
from service.errors import RequestError, UnsupportedFieldError

SEPARATOR = "\n"  # between text parts of one message; a single part equals the plain string


def template_messages(body: ChatRequest) -> list[dict[str, Any]]:
    """Raises: RequestError naming message and part."""
    if body.messages is None:
        raise RequestError("messages is missing.", field="messages")
    call_ids: set[str] = set()
    for i, message in enumerate(body.messages):
        _check_calls(message, f"messages[{i}]", call_ids)
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)]


def _check_calls(message: Message, at: str, call_ids: set[str]) -> None:
    """`call_ids`: of all calls so far."""
    if message.role == "tool":
        field = f"{at}.tool_call_id"
        if message.tool_call_id is None:
            raise RequestError(f"{field} is missing; say which call this answers.", field=field)
        if message.tool_call_id not in call_ids:
            raise RequestError(f"{field}: no message before has a call of this id.", field=field)
    if message.tool_calls and message.role != "assistant":
        field = f"{at}.tool_calls"
        raise RequestError(f"{field}: only the assistant calls tools.", field=field)
    for j, call in enumerate(message.tool_calls or ()):
        if call.id in call_ids:
            field = f"{at}.tool_calls[{j}].id"
            raise RequestError(f"{field}: another call has this id.", field=field)
        call_ids.add(call.id)


def _template_message(message: Message, at: str) -> dict[str, Any]:
    for name, remedy in (("function_call", "Send tool_calls."), ("audio", "Send its text.")):
        if getattr(message, name):
            raise UnsupportedFieldError(f"{at}.{name} is not supported. {remedy}", field=f"{at}.{name}")
    given: dict[str, Any] = {"role": message.role, "content": _content(message, f"{at}.content")}
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if message.tool_calls:
        given["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    more = {"name": message.name, "reasoning_content": reasoning, "tool_call_id": message.tool_call_id}
    return given | {name: value for name, value in more.items() if value is not None}


def _template_call(call: PastCall) -> dict[str, Any]:
    """With arguments as an object, since templates write JSON themselves; what is no JSON stays a text."""
    try:
        arguments: Any = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = call.function.arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _content(message: Message, at: str) -> str:
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise RequestError(f"{at} is missing; send a string, or a list of text parts.", field=at)
        return message.refusal or ""
    if isinstance(content, str):
        return content
    if not content:
        raise RequestError(f"{at} is an empty list; send a string, or at least one text part.", field=at)
    return SEPARATOR.join(_part_text(part, message.role, f"{at}[{i}]") for i, part in enumerate(content))


def _part_text(part: Part, role: str, at: str) -> str:
    if part.type == "text":
        text, field = part.text, f"{at}.text"
    elif part.type == "refusal" and role == "assistant":
        text, field = part.refusal, f"{at}.refusal"
    else:
        message = f"{at}.type = {part.type!r} is not supported for role {role!r}; send type 'text'."
        raise UnsupportedFieldError(message[:300], field=f"{at}.type")
    if text is None:
        raise RequestError(f"{field} is missing.", field=field)
    return text


_MESSAGE_FIELDS = frozenset(field.name for field in msgspec.structs.fields(Message))
_PART_FIELDS = frozenset(field.name for field in msgspec.structs.fields(Part))


def ignored_in_messages(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Unknown keys of messages and parts, as paths without indices."""
    names: dict[str, None] = {}
    for message in messages:
        for key in message.keys() - _MESSAGE_FIELDS:
            if message[key] is not None:
                names[f"messages[].{key}"] = None
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            for key in part.keys() - _PART_FIELDS:
                names[f"messages[].content[].{key}"] = None
    return sorted(names)
