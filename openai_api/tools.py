"""Fields of tools -> which tools a reply may call, how they are shown, and the grammar that binds it."""

from typing import Any

import msgspec

from openai_api.grammar import check_ends, grammar_of
from openai_api.protocol import AllowedToolsChoice, AnyToolChoice, ChatRequest, Tool, ToolChoice
from service.errors import RequestError, UnsupportedFieldError
from service.text.chat_format import ChatFormat, ToolFormat
from service.text.grammar import GrammarSpec
from service.text.tool_grammar import ToolSpec, tools_grammar

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolUse(msgspec.Struct, frozen=True):
    """What a request says about tools, checked."""

    shown: list[dict[str, Any]] = []  # for the chat template
    names: frozenset[str] = frozenset()  # of those that may be called
    form: ToolFormat | None = None  # how a call is written; None: none may come
    grammar: GrammarSpec | None = None  # what the reply must match


def tool_use(body: ChatRequest, chat_format: ChatFormat) -> ToolUse:
    """Raises: RequestError naming the field, UnsupportedFieldError where this model has no tools."""
    tools, choice = body.tools or [], body.tool_choice
    _check_names(tools)
    callable_tools = _callable(tools, choice)
    if choice == "none" or not tools:
        return ToolUse(grammar=grammar_of(body))
    form = chat_format.tools
    if form is None:
        raise UnsupportedFieldError(
            "tools are not supported by this model: its chat template does not show them, or not in a form "
            'whose calls are understood here. Leave them out, or send tool_choice = "none".',
            field="tools",
        )
    return ToolUse(
        shown=[_shown(tool) for tool in tools],
        names=frozenset(tool.function.name for _, tool in callable_tools),
        form=form,
        grammar=_grammar(body, callable_tools, form),
    )


def _check_names(tools: list[Tool]) -> None:
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.function.name in seen:
            field = f"tools[{i}].function.name"
            raise RequestError(f"{field}: {tool.function.name!r} is there twice.", field=field)
        seen.add(tool.function.name)


def _callable(tools: list[Tool], choice: AnyToolChoice | None) -> list[tuple[int, Tool]]:
    """The tools that may be called, with their places in the request."""
    if not tools and choice not in (None, "none", "auto"):
        raise RequestError("tool_choice asks for a call, but there are no tools.", field="tool_choice")
    placed = list(enumerate(tools))
    if isinstance(choice, ToolChoice):
        wanted = {choice.function.name: "tool_choice.function.name"}
    elif isinstance(choice, AllowedToolsChoice):
        field = "tool_choice.allowed_tools.tools[{}].function.name"
        listed = choice.allowed_tools.tools
        wanted = {each.function.name: field.format(i) for i, each in enumerate(listed)}
    else:
        return placed
    known = {tool.function.name for tool in tools}
    for name, field in wanted.items():
        if name not in known:
            raise RequestError(f"{field}: {name!r} is none of the tools.", field=field)
    return [(i, tool) for i, tool in placed if tool.function.name in wanted]


def _shown(tool: Tool) -> dict[str, Any]:
    function = tool.function
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    shown["parameters"] = _NO_ARGUMENTS if function.parameters is None else function.parameters
    return {"type": "function", "function": shown}


def _grammar(body: ChatRequest, tools: list[tuple[int, Tool]], form: ToolFormat) -> GrammarSpec | None:
    """None where nothing binds the reply: calls that are free, and free text."""
    choice = body.tool_choice
    must_call = _must_call(choice)
    is_parallel = body.parallel_tool_calls is not False and not isinstance(choice, ToolChoice)
    answer = None if must_call else grammar_of(body)
    if answer is not None and (answer.kind != "json" or not form.opening):
        raise UnsupportedFieldError(
            f"{answer.field} does not go with tools of this model: which of both a reply is could not be "
            'told. Send one of them, or tool_choice "none" or "required".',
            field=answer.field,
        )
    is_bound = len(tools) < len(body.tools or ()) or any(tool.function.strict for _, tool in tools)
    if not (must_call or is_bound or answer is not None or not is_parallel):
        return None
    field = "tool_choice" if must_call else "tools"
    check_ends(body, field)
    specs = [_spec(i, tool, is_bound=must_call or bool(tool.function.strict)) for i, tool in tools]
    return tools_grammar(
        specs, form, must_call=must_call, is_parallel=is_parallel, answer=answer, field=field
    )


def _must_call(choice: AnyToolChoice | None) -> bool:
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, ToolChoice)


def _spec(index: int, tool: Tool, *, is_bound: bool) -> ToolSpec:
    """`is_bound`: to its schema; otherwise its arguments are any object."""
    function, field = tool.function, f"tools[{index}].function.parameters"
    if not is_bound:
        return ToolSpec(function.name, {"type": "object"}, field)
    parameters = _NO_ARGUMENTS if function.parameters is None else function.parameters
    if parameters.get("type", "object") != "object":
        raise RequestError(f'{field}.type: arguments are an object; send "object".', field=f"{field}.type")
    return ToolSpec(function.name, {"type": "object", **parameters}, field)
