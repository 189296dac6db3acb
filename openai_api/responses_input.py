"""A request of /v1/responses -> the chat request that it comes to, and errors back to its own fields."""

import re
from collections.abc import Sequence

import msgspec

from openai_api.protocol import (
    AllowedTool,
    AllowedTools,
    AllowedToolsChoice,
    AnyToolChoice,
    CalledFunction,
    ChatRequest,
    Function,
    JsonSchema,
    Message,
    NamedFunction,
    PastCall,
    ResponseFormat,
    Tool,
    ToolChoice,
)
from openai_api.responses_protocol import (
    AllowedFunctions,
    FunctionChoice,
    InputItem,
    InputPart,
    ResponsesRequest,
    TextFormat,
)
from service.errors import RequestError, UnsupportedFieldError

_ROLES = ("user", "system", "developer", "assistant")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text")
_FIELDS = (
    (r"\btool_choice\.allowed_tools\.", "tool_choice."),
    (r"\btools\[(\d+)\]\.function\.", r"tools[\1]."),
    (r"\btool_choice\.function\.name\b", "tool_choice.name"),
    (r"\bresponse_format\.json_schema\.schema\b", "text.format.schema"),
    (r"\bresponse_format\b", "text.format"),
    (r"\breasoning_effort\b", "reasoning.effort"),
    (r"\bmax(?:_completion)?_tokens\b", "max_output_tokens"),
    (r"\bmessages\b", "input"),
)


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """Raises: RequestError naming the field."""
    text = body.text
    if text is not None and text.verbosity not in (None, "medium"):
        message = "text.verbosity is not supported; say in the input how long the answer should be."
        raise UnsupportedFieldError(message, field="text.verbosity")
    return ChatRequest(
        model=body.model,
        messages=_messages(body),
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        response_format=None if text is None or text.format is None else _response_format(text.format),
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
        timeout=body.timeout,
    )


def in_own_words(error: RequestError) -> RequestError:
    """The error of a chat request, with fields called as in this one."""

    def renamed(text: str) -> str:
        for pattern, name in _FIELDS:
            text = re.sub(pattern, name, text)
        return text

    error.args = (renamed(str(error)),)
    error.field = None if error.field is None else renamed(error.field)
    return error


def _response_format(given: TextFormat) -> ResponseFormat:
    if given.type != "json_schema":
        return ResponseFormat(type=given.type, schema=given.schema)
    schema = JsonSchema(
        name=given.name, description=given.description, schema=given.schema, strict=given.strict
    )
    return ResponseFormat(type=given.type, json_schema=schema)


def _tool(tool: msgspec.Struct) -> Tool:
    given = {name: value for name, value in msgspec.structs.asdict(tool).items() if name != "type"}
    return Tool(type="function", function=Function(**given))


def _tool_choice(body: ResponsesRequest) -> AnyToolChoice | None:
    choice = body.tool_choice
    match choice:
        case FunctionChoice():
            return ToolChoice(function=NamedFunction(name=choice.name))
        case AllowedFunctions():
            tools = [
                AllowedTool(type="function", function=NamedFunction(name=each.name))
                for each in choice.tools
            ]
            return AllowedToolsChoice(allowed_tools=AllowedTools(mode=choice.mode, tools=tools))
    return choice


def _messages(body: ResponsesRequest) -> list[Message]:
    if body.input is None:
        raise RequestError("input is missing; send a text or a list of items.", field="input")
    messages = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        return [*messages, Message(role="user", content=body.input)]
    return messages + _History().read(body.input)


class _History:
    """Items in order -> messages: thinking, text and calls of one turn become one message."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._thought: str | None = None  # to go with the next message of the assistant
        self._call_ids: set[str] = set()

    def read(self, items: Sequence[InputItem]) -> list[Message]:
        for i, item in enumerate(items):
            self._add(item, f"input[{i}]")
        return self._messages

    def _add(self, item: InputItem, at: str) -> None:
        match item.type:
            case "message":
                self._add_message(item, at)
            case "function_call":
                self._add_call(item, at)
            case "function_call_output":
                self._add_output(item, at)
            case "reasoning":
                self._thought = _text(item.content or "", f"{at}.content") or None
            case _:
                message = f"{at}.type = {item.type[:40]!r} is not supported."
                raise UnsupportedFieldError(message, field=f"{at}.type")

    def _add_message(self, item: InputItem, at: str) -> None:
        if item.role not in _ROLES:
            field = f"{at}.role"
            raise RequestError(f"{field} is one of {', '.join(_ROLES)}.", field=field)
        if item.content is None:
            raise RequestError(f"{at}.content is missing.", field=f"{at}.content")
        text = _text(item.content, f"{at}.content")
        if item.role == "assistant":
            self._messages.append(Message(role="assistant", content=text, reasoning=self._take_thought()))
        else:
            self._messages.append(Message(role=item.role, content=text))  # type: ignore[arg-type]  # checked

    def _add_call(self, item: InputItem, at: str) -> None:
        for name in ("call_id", "name"):
            if not getattr(item, name):
                raise RequestError(f"{at}.{name} is missing.", field=f"{at}.{name}")
        call_id, name = str(item.call_id), str(item.name)
        if call_id in self._call_ids:
            raise RequestError(f"{at}.call_id: another call has this id.", field=f"{at}.call_id")
        self._call_ids.add(call_id)
        call = PastCall(id=call_id, function=CalledFunction(name=name, arguments=item.arguments or ""))
        last = self._messages[-1] if self._messages else None
        if last is not None and last.role == "assistant" and self._thought is None:
            calls = [*(last.tool_calls or ()), call]
            self._messages[-1] = msgspec.structs.replace(last, tool_calls=calls)
        else:
            self._messages.append(
                Message(role="assistant", tool_calls=[call], reasoning=self._take_thought())
            )

    def _add_output(self, item: InputItem, at: str) -> None:
        if item.call_id not in self._call_ids:
            field = f"{at}.call_id"
            raise RequestError(f"{field}: no function_call before has this id.", field=field)
        if item.output is None:
            raise RequestError(f"{at}.output is missing.", field=f"{at}.output")
        text = _text(item.output, f"{at}.output")
        self._messages.append(Message(role="tool", tool_call_id=item.call_id, content=text))

    def _take_thought(self) -> str | None:
        thought, self._thought = self._thought, None
        return thought


def _text(content: str | list[InputPart], at: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*_TEXTS, "refusal"):
            field = f"{at}[{i}].type"
            raise UnsupportedFieldError(f"{field} = {part.type[:40]!r}: only text is taken.", field=field)
        if text is None:
            field = f"{at}[{i}].{'refusal' if part.type == 'refusal' else 'text'}"
            raise RequestError(f"{field} is missing.", field=field)
        texts.append(text)
    return "\n".join(texts)
