"""Structured output from the fields of a request to the reply; the model below is random ids."""

import asyncio
import json
import re
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from service.text.grammar import GrammarSpec
from tests.openai_api.scripted import (
    CHAT,
    ENDPOINTS,
    MODEL,
    ScriptedGenerator,
    deltas_of,
    events_of,
    make_api,
    post,
    served,
)
from tests.openai_api.whole_server import chat, whole_server

CHAT_URL = "/v1/chat/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "word": {"enum": ["a", "b.", "c"]}},
    "required": ["ok", "word"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def json_spec(schema: Any, field: str) -> GrammarSpec:
    text = json.dumps(schema, separators=(",", ":"))
    return GrammarSpec(kind="json", text=text, field=field)


# fields


@pytest.mark.parametrize(("path", "good"), ENDPOINTS)
@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, json_spec({"type": "object"}, "response_format")),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            json_spec(SCHEMA, "response_format.schema"),
        ),
        ({"response_format": JSON_SCHEMA}, json_spec(SCHEMA, "response_format.json_schema.schema")),
        ({"guided_json": SCHEMA}, json_spec(SCHEMA, "guided_json")),
        ({"guided_json": '{"type": "null"}'}, GrammarSpec(
            kind="json", text='{"type": "null"}', field="guided_json")),
        ({"guided_regex": "a+"}, GrammarSpec(kind="regex", text="a+", field="guided_regex")),
        ({"guided_choice": ["a", "b"]}, GrammarSpec(
            kind="choice", text='["a","b"]', field="guided_choice")),
        ({"guided_grammar": "start: /a/"}, GrammarSpec(
            kind="grammar", text="start: /a/", field="guided_grammar")),
        ({"structured_outputs": {"json": SCHEMA}}, json_spec(SCHEMA, "structured_outputs.json")),
        ({"structured_outputs": {"regex": "a"}}, GrammarSpec(
            kind="regex", text="a", field="structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["a"]}}, GrammarSpec(
            kind="choice", text='["a"]', field="structured_outputs.choice")),
        ({"structured_outputs": {"grammar": "x"}}, GrammarSpec(
            kind="grammar", text="x", field="structured_outputs.grammar")),
        ({"structured_outputs": {"json_object": True}},
         json_spec({"type": "object"}, "structured_outputs.json_object")),
        ({"structured_outputs": {"json_object": False}}, None),
    ],
)  # fmt: skip
async def test_each_way_to_ask_becomes_one_grammar(
    path: str, good: dict[str, Any], asked: dict[str, Any], wanted: GrammarSpec | None
) -> None:
    generator = ScriptedGenerator()

    reply = await post(generator, path, {**good, **asked})

    assert reply.status_code == 200, reply.text
    assert generator.params.grammar == wanted
    assert "x-ignored-params" not in reply.headers


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, None),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {**JSON_SCHEMA, "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {**JSON_SCHEMA, "type": "json_object"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "strictness": 1}}, None),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"backend": "x"}}, None),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": JSON_SCHEMA}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.json_object"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
    ],
)
async def test_what_says_nothing_or_two_things_is_refused(asked: dict[str, Any], param: str | None) -> None:
    generator = ScriptedGenerator()

    reply = await post(generator, CHAT_URL, {**CHAT, **asked})

    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param or (param is None and error["param"])
    assert generator.generations == []


# replies


@pytest.mark.parametrize("asked", [{"response_format": JSON_SCHEMA}, {"guided_json": SCHEMA}])
@pytest.mark.parametrize("n", [1, 3])
async def test_replies_parse_and_validate_and_streamed_equals_plain(n: int, asked: dict[str, Any]) -> None:
    body = {**chat("abc", n=n, **asked), "max_tokens": 700}
    async with whole_server(max_model_len=800) as server:
        plain = (await post(server.api, CHAT_URL, body)).json()
        *chunks, _ = events_of(await post(server.api, CHAT_URL, {**body, "stream": True}))
        num_used = server.num_used_blocks

    for choice in plain["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        assert choice["finish_reason"] == "stop"
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
    assert num_used == 0


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"guided_regex": "[a-c]{2,5}z"}, "[a-c]{2,5}z"),
        ({"guided_choice": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
        ({"structured_outputs": {"grammar": 'start: "a" ("bc" | start) "d"'}}, "a+bcd+"),
        ({"guided_grammar": 'root ::= "ab" | "cd"'}, "ab|cd"),
    ],
)
async def test_completions_keep_to_regex_choice_and_grammar(asked: dict[str, Any], pattern: str) -> None:
    async with whole_server() as server:
        for prompt in ([5], [6, 7], [8]):
            body = {"prompt": prompt, "max_tokens": 150, **asked}
            choice = (await post(server.api, "/v1/completions", body)).json()["choices"][0]

            if choice["finish_reason"] == "stop":
                assert re.fullmatch(pattern, choice["text"])
            else:
                assert "grammar" in str(asked)  # this one may nest for ever


async def test_a_reply_that_is_cut_off_says_so() -> None:
    async with whole_server() as server:
        body = {**chat("abc", response_format=JSON_SCHEMA), "max_tokens": 3}
        choice = (await post(server.api, CHAT_URL, body)).json()["choices"][0]

    assert choice["finish_reason"] == "length"


BAD: list[dict[str, Any]] = [
    {"guided_json": {"properties": {"a": "bar"}}},
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"type": "foo"}},
    {"guided_json": {"type": "array", "uniqueItems": True}},
    {"guided_json": "{"},
    {"guided_json": '{"items":' * 900 + "{}" + "}" * 900},
    {"guided_json": {"enum": ["\u00e9" * 200_000]}},
    {"guided_regex": "("},
    {"guided_regex": "(?=a)b"},
    {"guided_regex": "a" * 9000},
    {"guided_grammar": "start: nowhere"},
    {"guided_grammar": "start: %json {}"},
    {"guided_choice": ["x" * 200_000]},
]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_bad_grammar_is_a_400_before_admission_and_others_do_not_notice(is_stream: bool) -> None:
    good = {"prompt": [5, 6], "max_tokens": 100}
    async with whole_server() as server:
        alone = (await post(server.api, "/v1/completions", good)).json()["choices"]
        running = asyncio.create_task(post(server.api, "/v1/completions", good))
        for asked in BAD:
            num_submitted = server.engine._num_submitted
            bad = {**CHAT, "model": MODEL, **asked, "stream": is_stream}
            reply = await post(server.api, CHAT_URL, bad)

            assert reply.status_code == 400, asked
            assert reply.json()["error"]["param"] == next(iter(asked))
            assert server.engine._num_submitted <= num_submitted + 1  # of the good one at most
        beside = (await running).json()["choices"]
        after = (await post(server.api, "/v1/completions", good)).json()["choices"]

    assert alone == beside == after


async def test_text_that_the_model_lacks_ends_the_one_reply_with_the_reason() -> None:
    async with whole_server() as server:
        body = {"prompt": [5], "max_tokens": 100, "guided_regex": "a[A-Z]"}
        failed = await post(server.api, "/v1/completions", body)
        after = await post(server.api, "/v1/completions", {"prompt": [5], "max_tokens": 3})

    assert failed.status_code == 400
    assert failed.json()["error"]["param"] == "guided_regex"
    assert "tokens of this model" in failed.json()["error"]["message"]
    assert after.status_code == 200


async def test_a_grammar_that_grows_too_complex_ends_its_own_reply_alone() -> None:
    good = {"prompt": [5, 6], "max_tokens": 100}
    async with whole_server() as server:
        alone = (await post(server.api, "/v1/completions", good)).json()["choices"]
        bad = {"prompt": [5], "max_tokens": 100, "guided_regex": "((a{1000}){1000}){1000}", "stream": True}
        failed, beside = await asyncio.gather(
            post(server.api, "/v1/completions", bad), post(server.api, "/v1/completions", good)
        )

    assert "guided_regex: " in failed.text
    assert "[DONE]" not in failed.text
    assert beside.json()["choices"] == alone


# the SDK's helper


class Person(pydantic.BaseModel):
    name: str
    mood: Literal["good", "bad"]
    age: int | None = None


@pytest.mark.conformance("openai", "chat.completions.parse")
async def test_the_parse_helper_of_the_sdk_gives_the_object() -> None:
    generator = ScriptedGenerator(
        lambda ids, params: deltas_of('{"name":"Ada",', '"mood":"good","age":36}')
    )
    async with (
        served(make_api(generator)) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client,
    ):
        reply = await client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], response_format=Person
        )

    assert reply.choices[0].message.parsed == Person(name="Ada", mood="good", age=36)
    assert generator.params.grammar is not None
    assert json.loads(generator.params.grammar.text) == {
        **Person.model_json_schema(),
        **json.loads(generator.params.grammar.text),
    }
