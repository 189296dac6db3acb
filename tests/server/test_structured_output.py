"""Replies of the real default model that must match something."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from tests.server.server_process import ServerProcess

FRANCE: Any = [{"role": "user", "content": "Describe the capital of France as JSON."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "is_capital": {"type": "boolean"},
        "size": {"enum": ["small", "large"]},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
    },
    "required": ["city", "is_capital", "size", "rivers"],
    "additionalProperties": False,
}
ASKED: dict[str, Any] = {
    "messages": FRANCE,
    "max_tokens": 200,
    "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
}


def streamed_text(server: ServerProcess, body: dict[str, Any]) -> str:
    with server.streaming("/v1/chat/completions", body) as stream:
        *chunks, done = stream
    assert done == "[DONE]"
    return "".join(json.loads(each)["choices"][0]["delta"].get("content", "") for each in chunks)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_replies_parse_and_validate_and_streamed_equals_plain(
    server: ServerProcess, temperature: float
) -> None:
    body = {**ASKED, "temperature": temperature, "seed": 7, "n": 1}

    status, plain = server.call("POST", "/v1/chat/completions", body)
    text = streamed_text(server, body)

    assert status == 200, plain
    choice = plain["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert text == choice["message"]["content"]


def test_each_of_several_choices_keeps_to_the_schema(server: ServerProcess) -> None:
    status, reply = server.call(
        "POST", "/v1/chat/completions", {**ASKED, "n": 4, "temperature": 1.2, "seed": 3}
    )

    assert status == 200, reply
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"guided_choice": ["Paris", "London"]}, "Paris|London"),
        ({"guided_regex": r"[A-Z][a-z]{1,8}, [0-9]{4}\."}, r"[A-Z][a-z]{1,8}, [0-9]{4}\."),
        ({"structured_outputs": {"grammar": 'root ::= "I say: " ("yes" | "no")'}}, "I say: (yes|no)"),
    ],
)
def test_completions_keep_to_what_is_asked(
    server: ServerProcess, asked: dict[str, Any], pattern: str
) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 40, "temperature": 1, **asked}

    status, reply = server.call("POST", "/v1/completions", body)

    assert status == 200, reply
    assert re.fullmatch(pattern, reply["choices"][0]["text"])
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_bad_schemas_are_refused_while_others_stream(server: ServerProcess) -> None:
    plain = {"messages": FRANCE, "max_tokens": 40, "temperature": 0}
    alone = streamed_text(server, plain)
    bad: list[Any] = [{"type": "foo"}, {"not": {}}, {"$ref": "#"}, {"type": "string", "pattern": "("}]
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(streamed_text, server, plain)
        for schema in bad:
            status, reply = server.call("POST", "/v1/chat/completions", {**plain, "guided_json": schema})
            assert status == 400, schema
            assert reply["error"]["param"] == "guided_json"

    assert beside.result() == alone


class City(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=20)
    size: Literal["small", "large"]
    inhabitants: int = pydantic.Field(ge=0, le=10_000_000)


def test_the_parse_helper_of_the_sdk_gives_the_object(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=server.base, api_key="none", max_retries=0) as client:
        reply = client.chat.completions.parse(
            model="SmolLM2-135M-Instruct", messages=FRANCE, response_format=City, max_tokens=200
        )

    parsed = reply.choices[0].message.parsed
    assert isinstance(parsed, City)
    assert reply.choices[0].message.content is not None
    assert parsed == City.model_validate_json(reply.choices[0].message.content)


def test_responses_are_the_chats_they_come_to(server: ServerProcess) -> None:
    chat = {"messages": FRANCE, "max_tokens": 12, "temperature": 0}
    status, reply = server.call("POST", "/v1/chat/completions", chat)
    assert status == 200, reply
    with openai.OpenAI(base_url=server.base, api_key="none", max_retries=0) as client:
        asked: Any = {
            "input": FRANCE,
            "model": "SmolLM2-135M-Instruct",
            "max_output_tokens": 12,
            "temperature": 0,
        }
        plain = client.responses.create(**asked)
        *_, last = client.responses.create(**asked, stream=True)

    assert last.type == "response.incomplete"
    assert plain.output_text == last.response.output_text == reply["choices"][0]["message"]["content"]
    assert (plain.status, plain.usage and plain.usage.output_tokens) == ("incomplete", 12)


def test_a_model_without_tools_refuses_them_by_name(server: ServerProcess) -> None:
    tool = {"type": "function", "function": {"name": "f"}}

    status, reply = server.call("POST", "/v1/chat/completions", {"messages": FRANCE, "tools": [tool]})

    assert status == 400
    assert reply["error"]["param"] == "tools"
