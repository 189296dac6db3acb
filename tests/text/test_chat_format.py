"""What a template and a vocabulary say about replies."""

import pytest

from service.text.chat_format import HERMES, LLAMA3, ChatFormat, Thinking, chat_format
from tests.qwen3 import qwen3_template, qwen3_tokenizer
from tests.text.samples import CHATML, LLAMA3_WITH_TOOLS, QWEN3, make_tokenizer
from tests.text.samples import LLAMA3 as PLAIN_LLAMA3

USER = [{"role": "user", "content": "Hi"}]


def test_the_real_qwen3_thinks_with_a_switch_and_calls_in_tags() -> None:
    found = qwen3_template().format

    assert found.thinking is not None
    assert qwen3_tokenizer().token_bytes(found.thinking.open_id) == b"<think>"
    assert qwen3_tokenizer().token_bytes(found.thinking.close_id) == b"</think>"
    assert found.thinking.has_switch
    assert found.tools == HERMES
    assert not found.knows_effort


def test_of_the_real_qwen3_the_prompt_says_whether_a_reply_may_think() -> None:
    template = qwen3_template()

    def after(messages: list[dict[str, str]], *, is_continued: bool = False, **arguments: bool) -> Thinking:
        text, _ = template.encode(messages, continue_final_message=is_continued, template_kwargs=arguments)
        return template.format.thinking_after(text, is_continued=is_continued)

    assert after(USER) is Thinking.MAYBE
    assert after(USER, enable_thinking=True) is Thinking.MAYBE
    assert after(USER, enable_thinking=False) is Thinking.OFF
    begun = [*USER, {"role": "assistant", "content": "He"}]
    assert after(begun, is_continued=True) is Thinking.OFF


@pytest.mark.parametrize(
    ("template", "family", "wanted"),
    [
        (CHATML, "chatml", ChatFormat()),
        (PLAIN_LLAMA3, "llama3", ChatFormat()),
        (LLAMA3_WITH_TOOLS, "llama3", ChatFormat(tools=LLAMA3)),
        ("{{ tools }}<tool_call><function=f>", "chatml", ChatFormat()),
        ("{{ tools }}", "chatml", ChatFormat()),
        ("{{ reasoning_effort }}", "chatml", ChatFormat(knows_effort=True)),
        ("<think></think>", "letters", ChatFormat()),  # no tokens of this vocabulary
    ],
)
def test_what_other_templates_say(template: str, family: str, wanted: ChatFormat) -> None:
    assert chat_format(template, make_tokenizer(family)) == wanted


def test_a_prompt_that_ends_in_the_opening_tag_begins_the_thinking() -> None:
    found = chat_format(QWEN3, make_tokenizer("qwen3"))

    assert found.thinking is not None
    assert not found.thinking.has_switch
    assert found.thinking_after("...<think>\n") is Thinking.OPEN
    assert found.thinking_after("...<think>\n\n</think>\n\n") is Thinking.OFF
    assert found.thinking_after("...assistant\n") is Thinking.MAYBE
