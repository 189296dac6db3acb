"""Messages -> prompt, through the model's own Jinja template in a sandbox.

Text from messages must never turn into control tokens, though template and messages end up in one string.
So every string that a client gives (contents, names, tools, template arguments) is guarded before it is
rendered: texts of control tokens are replaced by aliases (see tokenizer.py), which are single words to any
template and single tokens to the tokenizer. What is left of control tokens in the result is the template's
own. Strings without such text, nearly all, are rendered as they are, so ordinary chats give exactly the ids
of the plain rendering.

Control tokens are those marked as special. Others, as Qwen3's <think> and <tool_call>, are words of the
vocabulary that histories and system prompts hold for good reasons. Not guarded against: a template that
itself puts parts of a control token next to a client's text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from service.errors import ModelError, RequestError
from service.text.chat_format import chat_format
from service.text.tokenizer import Tokenizer, well_formed

MAX_PROMPT_CHARS = 1 << 24
_OURS = frozenset(("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"))
_FAILURES = (
    jinja2.TemplateError,  # SecurityError and UndefinedError are among them
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled template; threads may share it.

    A developer message becomes a system message where the template does not know the word. Several system
    messages stay where they are, if the template shows them there; otherwise all are joined, in order and
    by an empty line, into one at the beginning. So none is dropped or refused.

    Raises: ModelError (on construction) when it is not valid Jinja.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._knows_developer = "developer" in source
        self.format = chat_format(source, tokenizer)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
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
        arguments = template_kwargs or {}
        for name in arguments:
            if name in _OURS:
                raise RequestError(
                    f"chat_template_kwargs can't set {name}: the request has its own field for it, or the "
                    "model decides it.",
                    field="chat_template_kwargs",
                )
        given = {
            **arguments,
            "messages": self._with_known_roles(messages),
            "tools": list(tools) if tools else None,
        }
        variables = _map_strings(given, lambda text: self._tokenizer.guard(well_formed(text)))
        variables["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        rendered = self._render_open(variables) if continue_final_message else self._render(variables)
        return self._tokenizer.unguard(rendered), self._tokenizer.encode(rendered)

    def _render(self, variables: Mapping[str, Any]) -> str:
        tokens = {"bos_token": self._tokenizer.bos_token, "eos_token": self._tokenizer.eos_token}
        pieces: list[str] = []
        num_chars = 0
        try:
            given = {**{name: text for name, text in tokens.items() if text is not None}, **variables}
            for piece in self._template.generate(documents=None, **given):
                num_chars += len(piece)
                if num_chars > MAX_PROMPT_CHARS:
                    raise RequestError(
                        f"The prompt has more than {MAX_PROMPT_CHARS} characters; shorten the messages.",
                        field="messages",
                    )
                pieces.append(piece)
        except _FAILURES as error:
            raise RequestError(
                f"The chat template can't render these messages: {error}", field="messages"
            ) from None
        return "".join(pieces)

    def _render_open(self, variables: dict[str, Any]) -> str:
        """Render up to the last message's text. Raises: RequestError if it has none, or none is shown.

        A template that trims texts trims this one too, as transformers has it.
        """
        last = variables["messages"][-1] if variables["messages"] else {}
        if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
            raise RequestError(
                "continue_final_message needs a last message of role assistant with text in it.",
                field="continue_final_message",
            )
        text = last["content"].strip()
        mark = _unused_character(json.dumps(variables, ensure_ascii=False, default=str))
        last["content"] += f"{mark} "
        rendered = self._render(variables)
        before, found, after = rendered.rpartition(mark)
        if not after.startswith(" "):
            before = before.rstrip()
        if not found or not before.rstrip().endswith(text):
            raise RequestError(
                "The chat template leaves out or changes the last message's text: it can't be continued.",
                field="continue_final_message",
            )
        return before

    def _with_known_roles(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        known = [dict(message) for message in messages]
        if not self._knows_developer:
            for message in known:
                if message.get("role") == "developer":
                    message["role"] = "system"
        instructions = [message for message in known if message.get("role") == "system"]
        if len(instructions) < 2 or self._shows_every_system_message:
            return known
        texts = [message["content"] for message in instructions if message.get("content")]
        merged = {**instructions[0], "content": "\n\n".join(texts)}
        return [merged, *(message for message in known if message.get("role") != "system")]

    @cached_property
    def _shows_every_system_message(self) -> bool:
        """Whether a second system message, at the beginning or later, appears in the prompt."""
        probes = ["photon probe one", "photon probe two", "photon probe three"]
        systems = [{"role": "system", "content": probe} for probe in probes]
        user, assistant = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}
        chat = [systems[0], systems[1], user, assistant, systems[2], user]
        try:
            rendered = self._render({"messages": chat, "tools": None, "add_generation_prompt": True})
        except RequestError:
            return False
        return all(probe in rendered for probe in probes)


class _Generation(Extension):
    """{% generation %}: marks the assistant's text for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _unused_character(text: str) -> str:
    """A character of Unicode's plane 15, which is private use, that does not occur in `text`."""
    return next(chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in text)


def _map_strings(value: Any, call: Callable[[str], str]) -> Any:
    """`value` with every string in it replaced, keys included."""
    if isinstance(value, str):
        return call(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, call): _map_strings(item, call) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, call) for item in value]
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter: no HTML escapes, text as it is; options as transformers takes them."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise RequestError(f"The chat template refuses these messages: {message}", field="messages")


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
