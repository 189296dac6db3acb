"""Wire types of replies and of the events of streams; requests: protocol.py."""

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = str


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of a reply; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry a token. The first token of a prompt that is echoed has no logprobs."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # characters of the choice's text before the token


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int  # 1: the most likely token
    decoded_token: str


# an entry a prompt token, null for the first: by id, of that token and the top ones
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET  # a piece of the JSON


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """The first of a call has id, type and name; those that follow have arguments only."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # the older name of reasoning; both are sent
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """An event of a chat stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first chunk


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str  # JSON, as the model wrote it


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: str = "function"


class ChatMessage(msgspec.Struct):
    content: str | None  # null: there are only calls
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET  # the older name of reasoning; both are sent
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """The plain reply of a chat."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # in a choice's first chunk
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """The plain reply of a completion, and an event of its stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


class RenderReply(msgspec.Struct):
    """What a chat makes of its messages."""

    prompt: str
    prompt_token_ids: list[int]
    count: int
    max_model_len: int


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None  # as the vocabulary spells them


class DetokenizeReply(msgspec.Struct):
    prompt: str


class VersionReply(msgspec.Struct):
    version: str


class Model(msgspec.Struct):
    id: str
    created: int
    max_model_len: int | None = None
    owned_by: str = "photoninfer"
    object: str = "model"


class ModelList(msgspec.Struct):
    data: list[Model]
    object: str = "list"
