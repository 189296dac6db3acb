"""/tokenize, /detokenize and /version."""

from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openai_api.api import Limits
from openai_api.health import Health
from openai_api.protocol import MAX_DETOKENIZE
from service import __version__
from tests.engine.fake_runner import VOCAB
from tests.openai_api.scripted import MODEL, ScriptedGenerator, client_of, make_api, post
from tests.openai_api.whole_server import LETTERS, SPECIAL, TOOLS_TEMPLATE, whole_server

USER = {"role": "user", "content": "hi."}


async def asked(path: str, **body: Any) -> httpx.Response:
    async with whole_server() as server:
        return await post(server.api, path, body)


async def test_a_prompt_becomes_ids_in_the_shape_of_vllm() -> None:
    reply = (await asked("/tokenize", model=MODEL, prompt="hi.")).json()

    assert list(reply) == ["count", "max_model_len", "tokens", "token_strs"]
    assert reply["count"] == len(reply["tokens"]) > 0
    assert reply["max_model_len"] == 200
    assert reply["token_strs"] is None


async def test_tokens_are_spelt_as_in_the_vocabulary() -> None:
    text = f"a \n{SPECIAL[0]}\U0001fae0"
    reply = (await asked("/tokenize", prompt=text, return_token_strs=True)).json()

    assert len(reply["token_strs"]) == reply["count"]
    assert reply["token_strs"][:1] == ["a"]
    assert "\u0120" in "".join(reply["token_strs"])  # a space, as byte-level vocabularies write it
    assert SPECIAL[0] in reply["token_strs"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([*LETTERS, *SPECIAL, "\U0001fae0"]), max_size=30).map("".join))
async def test_a_text_comes_back_whole_with_its_control_tokens(text: str) -> None:
    async with whole_server() as server:
        tokens = (await post(server.api, "/tokenize", {"prompt": text})).json()["tokens"]
        reply = await post(server.api, "/detokenize", {"tokens": tokens, "model": MODEL})

    assert reply.json() == {"prompt": text}


@pytest.mark.parametrize("text", ["a b." * 5000, "\U0001fae0" * 3000])
async def test_a_long_text_comes_back_whole(text: str) -> None:
    async with whole_server() as server:
        body = {"prompt": text, "return_token_strs": True}
        reply = (await post(server.api, "/tokenize", body)).json()
        back = await post(server.api, "/detokenize", {"tokens": reply["tokens"]})

    assert len(reply["token_strs"]) == reply["count"] > 200  # beyond the context: counting is no request
    assert back.json()["prompt"] == text


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"x": 1}},
        {"add_special_tokens": False, "temperature": 2},
    ],
)
async def test_a_chat_has_the_ids_that_a_chat_completion_counts(fields: dict[str, Any]) -> None:
    messages = [USER, {"role": "assistant", "content": f"a{SPECIAL[0]}"}, USER]
    async with whole_server() as server:
        tokenized = (await post(server.api, "/tokenize", {"messages": messages, **fields})).json()
        counted = {name: value for name, value in fields.items() if name != "temperature"}
        body = {"messages": messages, "max_tokens": 1, **counted}
        chat = (await post(server.api, "/v1/chat/completions", body)).json()

    assert tokenized["count"] == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_tools_are_part_of_the_prompt_unless_none_may_be_called(choice: str) -> None:
    tools = [{"type": "function", "function": {"name": "abc"}}]
    body = {"messages": [USER], "tools": tools, "tool_choice": choice}
    async with whole_server(template=TOOLS_TEMPLATE, max_model_len=2000) as server:
        tokens = (await post(server.api, "/tokenize", body)).json()["tokens"]
        text = (await post(server.api, "/detokenize", {"tokens": tokens})).json()["prompt"]
        chat = await post(server.api, "/v1/chat/completions", {**body, "max_tokens": 1})

    assert ("abc" in text) == (choice == "auto")
    assert len(tokens) == chat.json()["usage"]["prompt_tokens"]


async def test_an_unfinished_answer_can_be_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "so"}]
    async with whole_server() as server:
        body = {"messages": messages, "continue_final_message": True}
        tokens = (await post(server.api, "/tokenize", body)).json()["tokens"]
        text = (await post(server.api, "/detokenize", {"tokens": tokens})).json()["prompt"]

    assert text.endswith("assistant\nso")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": [USER], "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [1] * (MAX_DETOKENIZE + 1)}, "tokens"),
    ],
)
async def test_what_can_not_be_done_is_refused_by_field(
    path: str, body: dict[str, Any], param: str
) -> None:
    reply = await asked(path, **body)

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


class WithBos(ScriptedGenerator):
    """Puts a 1 before prompts that shall have special tokens."""

    async def encode(
        self, text: str, field: str = "prompt", *, add_special_tokens: bool = True
    ) -> list[int]:
        return [1] * add_special_tokens + await super().encode(text)


@pytest.mark.parametrize(("asked", "has_bos"), [(None, True), (True, True), (False, False)])
async def test_a_prompt_has_special_tokens_unless_they_are_not_wanted(
    asked: bool | None, has_bos: bool
) -> None:
    reply = await post(WithBos(), "/tokenize", {"prompt": "a", "add_special_tokens": asked})

    assert reply.json()["tokens"] == [1] * has_bos + [ord("a")]


async def test_the_empty_text_has_no_tokens() -> None:
    assert (await asked("/tokenize", prompt="")).json()["tokens"] == []
    assert (await asked("/detokenize", tokens=[])).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})]
)
async def test_they_are_limited_as_other_routes_are(path: str, body: dict[str, Any]) -> None:
    unknown = await asked(path, **body, model="gpt-4")
    ignored = await asked(path, **body, colour="red")
    loading = await post(make_api(health=Health()), path, body)
    too_large = await post(make_api(limits=Limits(max_body_bytes=4)), path, body)
    async with client_of(ScriptedGenerator()) as client:
        got = await client.get(path)

    assert unknown.json()["error"]["code"] == "model_not_found"
    assert (ignored.status_code, ignored.headers["x-ignored-params"]) == (200, "colour")
    assert (loading.status_code, too_large.status_code, got.status_code) == (503, 413, 405)


async def test_the_version_is_told_while_the_model_loads() -> None:
    async with client_of(make_api(health=Health())) as client:
        reply = await client.get("/version")

    assert reply.json() == {"version": __version__}


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/version"])
async def test_with_the_prefix_of_the_api_they_are_not_there_and_the_answer_says_where(path: str) -> None:
    reply = await post(ScriptedGenerator(), f"/v1{path}", {})

    assert reply.status_code == 404
    assert f"Did you mean {path}?" in reply.json()["error"]["message"]


RENDER = "/v1/chat/completions/render"


async def test_render_shows_the_prompt_that_a_chat_would_have() -> None:
    async with whole_server() as server:
        body = {"model": MODEL, "messages": [USER], "temperature": 0, "max_tokens": 3, "user": "u"}
        shown = await post(server.api, RENDER, body)
        chat = await post(server.api, "/v1/chat/completions", body)
        tokenized = await post(server.api, "/tokenize", {"messages": [USER]})
        back = await post(server.api, "/detokenize", {"tokens": shown.json()["prompt_token_ids"]})

    reply = shown.json()
    assert list(reply) == ["prompt", "prompt_token_ids", "count", "max_model_len"]
    assert reply["prompt_token_ids"] == tokenized.json()["tokens"]
    assert reply["count"] == chat.json()["usage"]["prompt_tokens"]
    assert back.json()["prompt"] == reply["prompt"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [USER], "temperature": 9}, "temperature"),
        ({"messages": [USER], "logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": [USER], "response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
async def test_render_refuses_what_a_chat_refuses(body: dict[str, Any], field: str) -> None:
    async with whole_server() as server:
        shown = await post(server.api, RENDER, body)
        chat = await post(server.api, "/v1/chat/completions", body)

    assert shown.status_code == chat.status_code == 400
    assert shown.json() == chat.json()
    assert field in shown.json()["error"]["param"]
