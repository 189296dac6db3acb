"""A chat request -> the ids of its prompt, and how a reply to it begins."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from openai_api.messages import template_messages
from openai_api.protocol import ChatRequest
from service.errors import RequestError, UnsupportedFieldError
from service.text.chat_format import ChatFormat, Thinking
from service.text.generation import TextGenerator


class ChatPrompt(msgspec.Struct, frozen=True):
    ids: list[int]
    text: str
    thinking: Thinking


async def make_prompt(
    generator: TextGenerator, body: ChatRequest, tools: Sequence[Mapping[str, Any]]
) -> ChatPrompt:
    """`tools`: as the template is to show them. Raises: RequestError naming message and field."""
    messages = template_messages(body)
    is_continued = bool(body.continue_final_message)
    if is_continued and body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other; send one of them."
        raise RequestError(message, field="continue_final_message")
    if is_continued and messages[-1]["role"] != "assistant":
        message = "continue_final_message needs a last message of role assistant."
        raise RequestError(message, field="continue_final_message")
    wants_prompt = body.add_generation_prompt
    text, ids = await generator.render_chat(
        messages,
        tools=tools,
        add_generation_prompt=not is_continued if wants_prompt is None else wants_prompt,
        continue_final_message=is_continued,
        template_kwargs=template_arguments(body, generator.chat_format),
    )
    thinking = generator.chat_format.thinking_after(text, is_continued=is_continued)
    return ChatPrompt(ids, text, thinking)


def template_arguments(body: ChatRequest, chat_format: ChatFormat) -> dict[str, Any]:
    """chat_template_kwargs, with what reasoning_effort says.

    Raises: RequestError (two fields disagree), UnsupportedFieldError (the model can't but think).
    """
    given = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    if effort is None:
        return given
    if chat_format.knows_effort:
        given.setdefault("reasoning_effort", effort)
    wants_thinking = effort != "none"
    tags = chat_format.thinking
    if tags is None:
        return given
    if not tags.has_switch:
        if wants_thinking or chat_format.knows_effort:
            return given
        message = 'reasoning_effort = "none" is not supported: this model can\'t turn its thinking off.'
        raise UnsupportedFieldError(message, field="reasoning_effort")
    if given.setdefault("enable_thinking", wants_thinking) is not wants_thinking:
        message = "reasoning_effort and chat_template_kwargs.enable_thinking disagree; send one of them."
        raise RequestError(message, field="reasoning_effort")
    return given


def ignored_effort(body: ChatRequest, chat_format: ChatFormat) -> list[str]:
    """reasoning_effort where it changes nothing: a model thinks or does not, and knows no degrees of it."""
    effort = body.reasoning_effort
    if effort is None or chat_format.knows_effort:
        return []
    return [] if effort == "none" and chat_format.thinking is not None else ["reasoning_effort"]
