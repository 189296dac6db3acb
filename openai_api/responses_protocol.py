"""Wire types of POST /v1/responses. In requests None means absent, so that null does too."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from openai_api.protocol import MAX_MESSAGES, MAX_TIMEOUT_SECONDS, MAX_TOOLS, Count, Effort, FunctionName

# Requests


class InputPart(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an item's text. Types besides text and refusal are refused."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    """A message, a call of a function, its output, or thinking; which fields count is up to `type`."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None  # "medium" only


class ReasoningConfig(msgspec.Struct, frozen=True, kw_only=True):
    effort: Effort | None = None
    summary: str | None = None  # thinking is sent whole, and no summary made


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """This function must be called."""

    name: str


class AllowedFunction(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["function"]
    name: str


class AllowedFunctions(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    """All tools are shown to the model, these may be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunction], Meta(min_length=1, max_length=MAX_TOOLS)]


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    stream: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None  # given back
    chat_template_kwargs: dict[str, Any] | None = None  # not in OpenAI's schema
    timeout: Annotated[float, Meta(gt=0.0, le=MAX_TIMEOUT_SECONDS)] | None = None  # ours: seconds


# Replies


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item of the output; fields of other types are absent."""

    id: str
    type: str  # "message", "reasoning" or "function_call"
    status: str  # "in_progress", "completed", or "incomplete": cut off
    role: str | UnsetType = UNSET
    content: list[OutputText | ReasoningText] | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A whole response, or how far it is."""

    id: str
    created_at: int
    model: str
    status: str  # "in_progress", "completed" or "incomplete"
    output: list[OutputItem]
    instructions: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    tools: list[FunctionTool]
    tool_choice: str | FunctionChoice | AllowedFunctions
    parallel_tool_calls: bool
    reasoning: ReasoningConfig
    text: TextConfig
    metadata: dict[str, str]
    incomplete_details: dict[str, str] | None = None
    usage: ResponseUsage | None = None
    object: str = "response"
    error: None = None
    previous_response_id: None = None
    background: bool = False
    store: bool = False
    truncation: str = "disabled"


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event of a stream; which fields it has is up to its type."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
