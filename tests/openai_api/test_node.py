"""The official SDK for Node, unchanged, against a real server whose model is a script."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from openai_api.api import Api
from service.errors import OverloadedError
from tests.npm import OPENAI_VERSION, npm_module
from tests.openai_api.scripted import ScriptedGenerator, make_api, served
from tests.openai_api.test_auth import key
from tests.openai_api.test_clients import CITY, MODEL, Scripted
from tests.programs import require

pytestmark = pytest.mark.timeout(120)

FOLDER = Path(__file__).parent


async def told_by(script: str, api: Api) -> Any:
    """What a script prints of a server."""
    node, modules = require("node", "nodejs"), npm_module("openai", OPENAI_VERSION)
    async with served(api) as port:
        process = await asyncio.create_subprocess_exec(
            node,
            str(FOLDER / script),
            str(modules),
            f"http://127.0.0.1:{port}/v1",
            MODEL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return json.loads(out)


@pytest.mark.conformance("openai for Node", "chat, text, tools, parsing, responses, models, errors")
async def test_whatever_it_offers() -> None:
    told = await told_by("node_client.mjs", make_api(Scripted()))

    assert told["plain"] == told["streamed"] == told["response"] == told["responseStreamed"] == "Hello."
    assert told["text"].endswith("Hello.")
    assert told["usage"][0] == told["usage"][1]
    assert told["models"] == ["org/tiny", MODEL]
    assert told["tools"] == "It is sunny in Paris."
    assert told["parsed"] == json.loads(CITY)
    assert told["events"] == ["response.created", "response.completed"]
    assert told["bad"] == [True, "temperature", True]
    assert told["unknown"] == [True, "model_not_found"]


@pytest.mark.conformance("openai for Node", "a full or loading server is asked again")
@pytest.mark.parametrize("is_full", [True, False])
async def test_it_asks_again_where_that_may_help(is_full: bool) -> None:
    generator = ScriptedGenerator()
    generator.refusal = OverloadedError("The queue is full.", retry_after_seconds=0.1) if is_full else None
    api = make_api(generator)
    if not is_full:
        api.health.is_ready = False

    told = await told_by("node_retries.mjs", api)

    assert told == {"status": 503, "code": "server_is_overloaded", "kind": "InternalServerError"}
    assert api.metrics.http == {("/v1/chat/completions", "POST", "503"): 2}


@pytest.mark.conformance("openai for Node", "a wrong key is not tried again")
async def test_a_wrong_key_is_not_tried_again() -> None:
    api = make_api()
    api.access = type(api.access)(keys=(key("good"),))

    told = await told_by("node_retries.mjs", api)

    assert told == {"status": 401, "code": "invalid_api_key", "kind": "AuthenticationError"}
    assert sum(api.metrics.http.values()) == 1
