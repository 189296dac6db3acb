"""What replies of a model look like, thinking and calls of tools, as its template and vocabulary show."""

import enum

import msgspec

from service.text.tokenizer import Tokenizer

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"  # Llama 3 may put it before calls; mostly no text shows it


class Thinking(enum.Enum):
    """Whether a reply begins with thinking; what the prompt ends with decides it."""

    OFF = "off"
    MAYBE = "maybe"  # if it begins with the opening tag
    OPEN = "open"  # the prompt has the opening tag: the reply begins within


class ThinkingTags(msgspec.Struct, frozen=True):
    """Ids of the tags, each a token of its own."""

    open_id: int
    close_id: int
    has_switch: bool  # the template knows enable_thinking


class ToolFormat(msgspec.Struct, frozen=True):
    """How a call is written: `opening` JSON `closing`, in JSON the name first, then the arguments."""

    opening: str  # empty: a reply that begins with `{` is a call
    closing: str
    arguments_key: str
    separator: str  # between two calls


HERMES = ToolFormat("<tool_call>\n", "\n</tool_call>", "arguments", "\n")  # Hermes 2, Qwen 2.5, Qwen3
LLAMA3 = ToolFormat("", "", "parameters", "; ")  # Llama 3.1 to 3.3


class ChatFormat(msgspec.Struct, frozen=True):
    thinking: ThinkingTags | None = None  # None: this model does not think
    tools: ToolFormat | None = (
        None  # None: the template does not know tools, or their format is unknown here
    )
    knows_effort: bool = False  # the template reads reasoning_effort

    def thinking_after(self, prompt: str, *, is_continued: bool = False) -> Thinking:
        """How a reply to this prompt begins. `is_continued`: it goes on within the last message."""
        end = prompt.rstrip()
        if self.thinking is None or end.endswith(THINK_CLOSE):
            return Thinking.OFF
        if end.endswith(THINK_OPEN):
            return Thinking.OPEN
        return Thinking.OFF if is_continued else Thinking.MAYBE


def chat_format(template: str, tokenizer: Tokenizer) -> ChatFormat:
    """What a template's source says."""
    return ChatFormat(_thinking(template, tokenizer), _tools(template), "reasoning_effort" in template)


def _thinking(template: str, tokenizer: Tokenizer) -> ThinkingTags | None:
    if THINK_CLOSE not in template:
        return None
    ids = [tokenizer.encode(tag) for tag in (THINK_OPEN, THINK_CLOSE)]
    if any(len(each) != 1 for each in ids):
        return None  # words, not tokens: where thinking ends could not be told while it is sampled
    return ThinkingTags(ids[0][0], ids[1][0], "enable_thinking" in template)


def _tools(template: str) -> ToolFormat | None:
    if "tools" not in template or "<function=" in template:  # the latter: calls in XML, as of Qwen3-Coder
        return None
    if HERMES.opening.strip() in template and "arguments" in template:
        return HERMES
    if '"parameters"' in template.replace("\\", "") and '"name"' in template.replace("\\", ""):
        return LLAMA3
    return None
