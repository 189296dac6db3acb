"""Bodies that can't be served end in a 4xx of OpenAI's shape, and nothing else happens."""

import json
from pathlib import Path
from typing import Any

import pytest

from openai_api.field_table import field_table
from openai_api.fields import HARMLESS, MAX_NAMES, REFUSED_BY_CHAT, REFUSED_BY_COMPLETIONS
from service.text.generation import GenerationParams
from tests.openai_api.scripted import (
    CHAT,
    ENDPOINTS,
    PROMPT,
    ScriptedGenerator,
    client_of,
    deltas_of,
    make_api,
    post,
)

CHAT_URL, COMPLETIONS_URL = "/v1/chat/completions", "/v1/completions"


def is_openai_error(body: Any) -> bool:
    return set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}


# bodies that are wrong for both endpoints

NOT_JSON = [
    b"", b" \n", b"{", b"}", b"[]", b"null", b'"x"', b"7", b"true", b"{} x", b"{'a': 1}", b"{\"a\": }",
    b'{"a": 1,}', b"\xff\xfe", b'{"model": "\xff"}', b'{"temperature": NaN}', b'{"temperature": Infinity}',
    b'{"temperature": -Infinity}', b'{"user": NaN}', b'{"temperature": 1e400}',
    b'{"model": "a", "model": "b"}', b'{"metadata": {"a": 1, "a": 2}}', b'{"\\ud800": 1, "\\ud800": 2}',
    b"[" * 5000 + b"]" * 5000,
    b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"seed": ' + b"9" * 5000 + b"}",
    b'{"a": "\n"}', b'{"a": "\\x"}',
    b'{"a": 01}', b"\x00", b"<xml/>", b"a=b&c=d",
]  # fmt: skip

# in fields without meaning, of bodies that would be served otherwise
STRICT = [
    b'{"a": NaN}',
    b'{"a": [-Infinity]}',
    b'{"a": {"b": 1, "b": 1}}',
    b'{"a": 1, "a": 2}',
    b'{"a": 1,}',
]

BAD_FIELDS: list[dict[str, Any]] = [
    {"temperature": -0.1}, {"temperature": 2.1}, {"temperature": "1"}, {"temperature": True},
    {"top_p": 0}, {"top_p": 1.1}, {"n": 0}, {"n": -1}, {"n": 10**6}, {"n": 1.5},
    {"n": True}, {"max_tokens": 0}, {"max_tokens": -5}, {"max_tokens": 2**40}, {"max_tokens": "5"},
    {"stop": ""}, {"stop": [""]}, {"stop": ["x"] * 17}, {"stop": [None]}, {"stop": 5}, {"seed": 2**63},
    {"seed": 1.5}, {"presence_penalty": 2.1}, {"frequency_penalty": -2.1}, {"logit_bias": {"x": 1}},
    {"logit_bias": {"-1": 5}}, {"logit_bias": {"1": 101}}, {"logit_bias": {"1": True}}, {"logit_bias": []},
    {"logit_bias": {str(i): 1 for i in range(5000)}}, {"logit_bias": {"1" * 5000: 1}}, {"top_k": -2},
    {"min_p": 1.5}, {"repetition_penalty": 0}, {"min_tokens": -1}, {"min_tokens": 9, "max_tokens": 8},
    {"stop_token_ids": [-1]}, {"stop_token_ids": [2**40]}, {"stop_token_ids": list(range(200))},
    {"stop_token_ids": [True]}, {"stream": 1}, {"stream": "yes"}, {"ignore_eos": 1}, {"priority": 2**31},
    {"stream_options": {"include_usage": True}}, {"stream": True, "stream_options": {"include_usage": 1}},
    {"stream": True, "stream_options": []}, {"model": 5}, {"model": ""}, {"model": "gpt-4"},
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT_URL, COMPLETIONS_URL])
@pytest.mark.parametrize("body", NOT_JSON, ids=lambda body: repr(body[:20]))
async def test_a_malformed_body_is_a_400_and_the_next_request_is_served(path: str, body: bytes) -> None:
    generator = ScriptedGenerator()

    reply = await post(generator, path, body)
    after = await post(generator, path, dict(ENDPOINTS)[path])

    assert reply.status_code == 400
    assert is_openai_error(reply.json())
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert "Traceback" not in reply.text
    assert after.status_code == 200


@pytest.mark.parametrize("path", ["/v1/responses", f"{CHAT_URL}/render", "/tokenize", "/detokenize"])
async def test_other_routes_refuse_malformed_bodies_alike(path: str) -> None:
    for body in NOT_JSON:
        reply = await post(ScriptedGenerator(), path, body)

        assert reply.status_code == 400, body
        assert is_openai_error(reply.json())


@pytest.mark.parametrize(("path", "good"), ENDPOINTS)
@pytest.mark.parametrize("fault", STRICT)
async def test_json_is_strict_where_no_value_is_read(path: str, good: dict[str, Any], fault: bytes) -> None:
    reply = await post(ScriptedGenerator(), path, json.dumps(good).encode()[:-1] + b"," + fault[1:])

    assert reply.status_code == 400
    assert is_openai_error(reply.json())


@pytest.mark.parametrize(("path", "good"), ENDPOINTS)
@pytest.mark.parametrize("bad", BAD_FIELDS, ids=lambda bad: repr(bad)[:40])
async def test_a_bad_value_names_its_field(path: str, good: dict[str, Any], bad: dict[str, Any]) -> None:
    generator = ScriptedGenerator()

    reply = await post(generator, path, {**good, **bad})

    assert reply.status_code == (404 if isinstance(bad.get("model"), str) else 400)
    assert is_openai_error(reply.json())
    error = reply.json()["error"]
    assert error["param"].split(".")[0].split("[")[0] in bad
    assert error["message"]
    assert reply.headers["x-should-retry"] == "false"
    assert generator.generations == []


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [None]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0]"),
        ({"messages": "Hi"}, "messages"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt"),
    ],
)
async def test_a_bad_chat_field_is_named(bad: dict[str, Any], param: str) -> None:
    reply = await post(ScriptedGenerator(), CHAT_URL, {**CHAT, **bad})

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("logprobs", [21, -1, True])
async def test_legacy_logprobs_are_a_number_up_to_20(logprobs: Any) -> None:
    reply = await post(ScriptedGenerator(), COMPLETIONS_URL, {**PROMPT, "logprobs": logprobs})

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "logprobs"


async def test_a_message_says_field_rule_and_value() -> None:
    reply = await post(ScriptedGenerator(), CHAT_URL, {**CHAT, "temperature": 3})

    assert reply.json()["error"]["message"] == "temperature: Expected `float` <= 2.0; got 3"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "APPLICATION/JSON"}, 200),
        ({"content-type": "application/vnd.api+json"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": "application/json; charset=latin-1"}, 415),
        ({"content-encoding": "gzip"}, 415),
    ],
)
async def test_the_body_must_be_declared_as_json(headers: dict[str, str], status: int) -> None:
    reply = await post(ScriptedGenerator(), CHAT_URL, CHAT, **headers)

    assert reply.status_code == status
    assert status == 200 or is_openai_error(reply.json())


async def test_a_missing_content_type_is_taken_as_json() -> None:
    async with client_of(ScriptedGenerator()) as client:
        reply = await client.post(CHAT_URL, content=json.dumps(CHAT))

    assert reply.status_code == 200


# what is not done: refused by name, or accepted and reported


@pytest.mark.parametrize(("path", "good"), ENDPOINTS)
async def test_whatever_would_change_the_answer_is_refused_and_null_never_is(
    path: str, good: dict[str, Any]
) -> None:
    refused = REFUSED_BY_CHAT if path == CHAT_URL else REFUSED_BY_COMPLETIONS
    for name, rule in refused.items():
        reply = await post(ScriptedGenerator(), path, {**good, name: {"a": "b"}})

        assert reply.status_code == 400, name
        assert reply.json()["error"]["param"] == name
        assert reply.json()["error"]["code"] == "unsupported_parameter"
        assert name in reply.json()["error"]["message"]
        for value in (None, *rule.allowed):
            neutral = await post(ScriptedGenerator(), path, {**good, name: value})
            assert neutral.status_code == 200, (name, value)
            assert "x-ignored-params" not in neutral.headers


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT_URL, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (CHAT_URL, {"functions": [{"name": "f"}]}),
        (CHAT_URL, {"modalities": ["text", "audio"]}),
        (CHAT_URL, {"verbosity": "low"}),
        (COMPLETIONS_URL, {"suffix": "x"}),
        (COMPLETIONS_URL, {"best_of": True}),
        (COMPLETIONS_URL, {"logprobs_mode": "processed_logprobs"}),
        (COMPLETIONS_URL, {"max_tokens": 0}),
        (CHAT_URL, {"max_tokens": 0}),
        (CHAT_URL, {"echo": True}),
        (CHAT_URL, {"best_of": 2}),
        (COMPLETIONS_URL, {"grammar": "root ::= x"}),
    ],
)
async def test_real_uses_of_what_is_not_done_are_refused(path: str, asked: dict[str, Any]) -> None:
    reply = await post(ScriptedGenerator(), path, {**dict(ENDPOINTS)[path], **asked})

    assert reply.status_code == 400
    assert [reply.json()["error"]["param"]] == list(asked)


async def test_best_of_equal_to_n_is_no_wish() -> None:
    generator = ScriptedGenerator(lambda ids, params: deltas_of("a") + deltas_of("b", index=1))

    reply = await post(generator, COMPLETIONS_URL, {**PROMPT, "n": 2, "best_of": 2})

    assert reply.status_code == 200


@pytest.mark.parametrize(("path", "good"), ENDPOINTS)
async def test_harmless_and_unknown_fields_are_reported(path: str, good: dict[str, Any]) -> None:
    reply = await post(
        ScriptedGenerator(), path, {**good, **dict.fromkeys(HARMLESS, "x"), "strict": True, "zz": None}
    )

    assert reply.status_code == 200
    assert reply.headers["x-ignored-params"].split(", ") == sorted([*HARMLESS, "strict"])


async def test_unknown_keys_of_messages_are_reported_once() -> None:
    part = {"type": "text", "text": "x", "cache_control": {}}
    messages = [{"role": "user", "content": [part, part], "id": 1, "gone": None}] * 2

    reply = await post(ScriptedGenerator(), CHAT_URL, {"messages": messages})

    assert reply.headers["x-ignored-params"] == "messages[].content[].cache_control, messages[].id"


async def test_the_header_of_ignored_names_is_bounded_and_clean() -> None:
    names = {"a\r\nSet-Cookie: x": 1, "b" * 5000: 1, "\u20ac": 1, **{f"x{i}": 1 for i in range(100)}}

    reply = await post(ScriptedGenerator(), CHAT_URL, {**CHAT, **names})

    value = reply.headers["x-ignored-params"]
    assert "set-cookie" not in reply.headers
    assert "a??Set-Cookie??x" in value
    assert value.endswith(", ...")
    assert len(value.split(", ")) == MAX_NAMES + 1
    assert len(value) < MAX_NAMES * 70


async def test_every_field_reaches_the_generation() -> None:
    generator = ScriptedGenerator()
    asked = {
        "max_tokens": 9, "temperature": 0.5, "top_p": 0.25, "top_k": 4, "min_p": 0.125, "seed": -1,
        "repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": -1, "min_tokens": 2, "n": 3,
        "logit_bias": {"7": 1.5, "3": -100}, "stop": ["b", "a", "b"], "stop_token_ids": [5, 4, 5],
        "include_stop_str_in_output": True, "skip_special_tokens": False, "ignore_eos": True,
        "priority": -3,
    }  # fmt: skip

    await post(generator, CHAT_URL, {**CHAT, **asked})

    assert generator.params == GenerationParams(
        max_tokens=9, temperature=0.5, top_p=0.25, top_k=4, min_p=0.125, seed=2**64 - 1,
        repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=-1.0, min_tokens=2, n=3,
        logit_bias=((3, -100.0), (7, 1.5)), stop=("b", "a"), stop_token_ids=(5, 4),
        include_stop_str_in_output=True, skip_special_tokens=False, ignore_eos=True, priority=-3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "good", "max_tokens"), [(CHAT_URL, CHAT, None), (COMPLETIONS_URL, PROMPT, 16)]
)
async def test_what_is_not_asked_for_is_left_to_the_model(
    path: str, good: dict[str, Any], max_tokens: int | None
) -> None:
    generator = ScriptedGenerator()

    await post(generator, path, good)

    assert generator.params == GenerationParams(max_tokens=max_tokens)
    assert generator.params.skip_special_tokens


async def test_null_means_absent_for_every_field() -> None:
    absent, null = ScriptedGenerator(), ScriptedGenerator()
    names = ["max_tokens", "temperature", "top_p", "n", "stop", "stream", "seed", "logit_bias",
             "top_k", "stream_options", "logprobs", "top_logprobs", "model", "stop_token_ids"]  # fmt: skip

    await post(absent, CHAT_URL, CHAT)
    reply = await post(null, CHAT_URL, {**CHAT, **dict.fromkeys(names)})

    assert reply.status_code == 200
    assert null.params == absent.params
    assert (absent.params.temperature, absent.params.top_k, absent.params.max_tokens) == (None, None, None)


@pytest.mark.parametrize("top_k", [-1, 0])
async def test_both_ways_to_turn_top_k_off(top_k: int) -> None:
    generator = ScriptedGenerator()

    await post(generator, CHAT_URL, {**CHAT, "top_k": top_k})

    assert generator.params.top_k == 0


# Unicode

LONE = [rb"\ud83c", rb"\udc00x", rb"x\uD83Cy", rb"\udc00\ud800"]


@pytest.mark.parametrize("text", LONE, ids=repr)
@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": "a%bb"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a%bb"}]}]}',
        b'{"messages": [{"role": "user", "content": "x", "name": "%b"}], "stop": ["%b"], "user": "%b"}',
        b'{"messages": [{"role": "user", "content": "x"}], "metadata": {"%b": "%b"}, "%b": 1}',
    ],
)
async def test_half_of_a_surrogate_pair_becomes_a_replacement_character(text: bytes, body: bytes) -> None:
    generator = ScriptedGenerator()

    reply = await post(generator, CHAT_URL, body.replace(b"%b", text))

    assert reply.status_code == 200
    rendered = "".join(map(chr, generator.prompts[0])) + "".join(generator.params.stop)
    assert not any(0xD800 <= ord(c) <= 0xDFFF for c in rendered)
    if b"a%bb" in body:
        assert "\ufffd" in rendered


@pytest.mark.parametrize("body", [b'{"prompt": "a%bb"}', b'{"prompt": ["x", "a%bb"]}'])
async def test_half_of_a_surrogate_pair_in_a_prompt_is_one_character(body: bytes) -> None:
    generator = ScriptedGenerator()

    reply = await post(generator, COMPLETIONS_URL, body.replace(b"%b", LONE[0]))

    assert reply.status_code == 200
    assert generator.prompts[-1] == [ord(c) for c in "a\ufffdb"]


@pytest.mark.parametrize("text", LONE, ids=repr)
async def test_a_model_name_with_half_a_pair_is_unknown(text: bytes) -> None:
    reply = await post(ScriptedGenerator(), CHAT_URL, b'{"model": "%b", "messages": []}' % text)

    assert reply.status_code in (400, 404)
    assert is_openai_error(reply.json())


@pytest.mark.parametrize(
    "text", ["a\x00b", "\U0001f300", "\ufeffx", "e" + "\u0301" * 1000, "\x7f\x1b[0m", "\u2028"], ids=ascii
)
@pytest.mark.parametrize("is_escaped", [True, False])
async def test_any_other_text_arrives_whole(text: str, is_escaped: bool) -> None:
    generator = ScriptedGenerator()

    await post(generator, COMPLETIONS_URL, json.dumps({"prompt": text}, ensure_ascii=is_escaped).encode())
    reply = await post(generator, COMPLETIONS_URL, {"prompt": text + "more"})

    assert generator.prompts[0] == [ord(c) for c in text]
    assert reply.json()["usage"]["prompt_tokens"] == len(text) + 4


async def test_a_byte_order_mark_is_skipped() -> None:
    reply = await post(ScriptedGenerator(), CHAT_URL, b"\xef\xbb\xbf" + json.dumps(CHAT).encode())

    assert reply.status_code == 200


async def test_refusals_of_bad_bodies_leave_no_metric_labels_behind() -> None:
    api = make_api()

    await post(api, CHAT_URL, {**CHAT, "model": "no-such-model-anywhere"})

    assert b"no-such-model" not in api.metrics.exposition()


def test_the_table_of_fields_is_that_of_the_code() -> None:
    written = (Path(__file__).parents[2] / "docs" / "fields.md").read_text()

    assert written == field_table(), "remake it: python -m openai_api.field_table > docs/fields.md"
