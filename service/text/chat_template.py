"""Messages -> prompt, through the model's own Jinja template in a sandbox.

Text from messages must never turn into control tokens, though template and messages end up in one string.
So where a message holds the text of a control token (rare), a private character is put inside it before
rendering; Tokenizer.encode_marked tells from it which control tokens the template wrote. Everything else is
rendered and encoded as it is, so ordinary chats give exactly the ids of the plain rendering.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from service.errors import ModelError, RequestError
from service.text.tokenizer import Tokenizer

_PRIVATE_USE = range(0xF0000, 0xFFFFE)  # Unicode's plane 15, private use: no tokenizer gives it a meaning

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled template. Raises: ModelError (on construction) when it is not valid Jinja."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._knows_developer = "developer" in source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template is not valid: {error}") from None

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """The prompt as text and ids; with `continue_final_message` it ends with the last message's text.

        Raises: RequestError with the template's own message, when it refuses the messages.
        """
        given = {"messages": self._with_known_roles(messages), "tools": list(tools) if tools else None}
        mark, end = _unused_characters(given)
        text_of_message = self._marking(mark)
        variables = {key: _map_strings(value, text_of_message) for key, value in given.items()}
        if continue_final_message:
            _append_end(variables["messages"], end)
        rendered = self._render(
            {
                **(template_kwargs or {}),
                **variables,
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
                "bos_token": self._tokenizer.bos_token or "",
                "eos_token": self._tokenizer.eos_token or "",
            }
        )
        if continue_final_message:
            if end not in rendered:
                raise RequestError(
                    "The chat template leaves the last message out, so it can't be continued.",
                    field="continue_final_message",
                )
            rendered = rendered[: rendered.index(end)]
        if mark in rendered:
            return rendered.replace(mark, ""), self._tokenizer.encode_marked(rendered, mark)
        return rendered, self._tokenizer.encode(rendered)

    def _render(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(**variables)
        except RequestError:
            raise
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            ArithmeticError,
        ) as error:
            raise RequestError(
                f"The chat template can't render these messages: {error}", field="messages"
            ) from None

    def _with_known_roles(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """developer becomes system where the template does not know it.

        Several such messages at the beginning become one, joined by an empty line, since templates expect
        one system message there.
        """
        if self._knows_developer or all(message.get("role") != "developer" for message in messages):
            return [dict(message) for message in messages]
        renamed: list[dict[str, Any]] = []
        for message in messages:
            role = "system" if message.get("role") == "developer" else message.get("role")
            if role == "system" and len(renamed) == 1 and renamed[0]["role"] == "system":
                parts = [part for part in (renamed[0].get("content"), message.get("content")) if part]
                renamed[0]["content"] = "\n\n".join(parts)
            else:
                renamed.append({**message, "role": role})
        return renamed

    def _marking(self, mark: str) -> Callable[[str], str]:
        pattern = self._tokenizer.special_pattern

        def marked(text: str) -> str:
            return pattern.sub(lambda found: found[0][0] + mark + found[0][1:], text)

        return marked


def _unused_characters(value: Any) -> tuple[str, str]:
    """Two characters that occur nowhere in the value."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    unused = (chr(code) for code in _PRIVATE_USE if chr(code) not in text)
    return next(unused), next(unused)


def _map_strings(value: Any, call: Callable[[str], str]) -> Any:
    """`value` with every string in it replaced, keys excepted."""
    if isinstance(value, str):
        return call(value)
    if isinstance(value, Mapping):
        return {key: _map_strings(item, call) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, call) for item in value]
    return value


def _append_end(messages: list[dict[str, Any]], end: str) -> None:
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise RequestError(
            "continue_final_message needs a last message of the assistant with text in it.",
            field="continue_final_message",
        )
    last["content"] += end


def _to_json(value: Any, indent: int | None = None, **_options: Any) -> str:
    """Unlike Jinja's own filter: no HTML escapes, text as it is."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise RequestError(f"The chat template refuses these messages: {message}", field="messages")


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
