"""Wire types of requests. What a field may hold is written here and nowhere else; replies: replies.py.

In requests None means absent, so that null does too.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from openai_api.json_body import shown
from service.errors import RequestError

MAX_N = 128
MAX_STOP_STRINGS = 16  # OpenAI takes 4
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 10_000
MAX_TOOLS = 128  # as OpenAI's
MAX_DETOKENIZE = 2**20  # ids; a quarter of a second's work
MAX_TIMEOUT_SECONDS = 7 * 24 * 3600
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions only

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
GrammarText = Annotated[str, Meta(min_length=1)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]
# OpenAI's letters, and the signs that names of MCP servers have; none of them needs an escape in JSON
FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


# Requests


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream holds besides the text."""

    include_usage: bool | None = None  # a last chunk with usage and no choices
    continuous_usage_stats: bool | None = None  # usage so far in every chunk
    include_obfuscation: bool | None = None  # padding against traffic analysis: accepted, none is added


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A schema with its name. Strict or not, a reply keeps to all of it."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a reply must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None  # of a json_object; not in OpenAI's schema


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's newer form of guided_*: one of these."""

    json: dict[str, Any] | str | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that chat and completions share."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Int64 | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=MAX_LOGIT_BIAS)]
        | None
    ) = None
    # not in OpenAI's schema; named as in vLLM
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1, 0: off
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Int32 | None = None  # lower goes first
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None  # a schema, or its text
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None  # Lark or GBNF
    prompt_logprobs: TopLogprobs | None = None  # k: of every prompt token but the first, with k top ones
    return_token_ids: bool | None = None
    # of the prefix cache: only requests with the same one share blocks
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    # ours: seconds in queue and generation
    timeout: Annotated[float, Meta(gt=0.0, le=MAX_TIMEOUT_SECONDS)] | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a message's content. Types besides "text" and "refusal" are refused."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; absent: no arguments
    strict: bool | None = None  # true: arguments keep to the schema, even where calls are left to the model


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """This tool must be called."""

    function: NamedFunction


class AllowedTool(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    """All tools are shown to the model, these may be called."""

    allowed_tools: AllowedTools


AnyToolChoice = Literal["none", "auto", "required"] | ToolChoice | AllowedToolsChoice


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str = ""  # JSON


class PastCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call in the history."""

    id: Annotated[str, Meta(min_length=1)]
    function: CalledFunction
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: str | None = None  # the assistant's, instead of content
    reasoning_content: str | None = None  # the assistant's, for templates that know it
    reasoning: str | None = None  # the same under its newer name
    tool_call_id: str | None = None
    tool_calls: list[PastCall] | None = None  # the assistant's
    function_call: Any = None  # refused
    audio: Any = None  # refused


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    max_completion_tokens: Count | None = None  # the newer name of max_tokens
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None  # "none" turns thinking off, all others turn it on
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnyToolChoice | None = None
    parallel_tool_calls: bool | None = None  # false: one call at most
    include_reasoning: bool | None = None  # false: thinking is counted, but not sent
    add_generation_prompt: bool | None = None  # default: true, unless continue_final_message
    continue_final_message: bool | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[Any] | None = None  # string, strings, ids, or lists of ids
    # 0: the prompt alone, with echo or prompt_logprobs
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None  # the prompt stands before the reply, its logprobs before the reply's
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None  # choices to take the n likeliest from


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None  # of a prompt: BOS if the model has it; default: true
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnyToolChoice | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_DETOKENIZE)] | None = None


# Decoding

T = TypeVar("T", bound=msgspec.Struct)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")


def to_struct(body: Mapping[str, Any], kind: type[T]) -> T:
    """Raises: RequestError, whose field is the JSON path of the first value that does not fit."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`")
        field = path.removeprefix(".") or None
        reason = reason.replace(" | null", "")
        if reason.startswith(("Expected", "Invalid")):
            reason += _found(body, path)
        raise RequestError(f"{field}: {reason}" if field else reason, field=field) from None
    except RecursionError:
        raise RequestError("The body is nested too deeply.") from None


def _found(body: Any, path: str) -> str:
    """The value at msgspec's path, for the message; nothing where the path has a hole (a key of a dict)."""
    if "[...]" in path:
        return ""
    for name, index in _STEP.findall(path):
        body = body[name] if name else body[int(index)]
    return f"; got {shown(body)}"
