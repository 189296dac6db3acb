"""A generator that says what it is told to, and a client for an app around it."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn, cast

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from openai_api.api import Api
from openai_api.health import Health
from openai_api.middleware import wrap
from openai_api.routes import make_routes
from service.engine.request import TokenLogprobs
from service.errors import ContextLengthError, RequestError
from service.text.chat_format import ChatFormat
from service.text.choice import Delta
from service.text.generation import GenerationParams, TextGenerator

MODEL = "org/tiny"
VOCAB = 0x110000  # a token is a character
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
PROMPT = {"model": MODEL, "prompt": "Hi"}
ENDPOINTS: list[tuple[str, dict[str, Any]]] = [("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)]


def deltas_of(*texts: str, index: int = 0, finish_reason: str = "stop", **fields: Any) -> list[Delta]:
    """One delta a text, with an id for each character; the last one ends the choice."""
    deltas = [Delta(index=index, text=text, token_ids=[ord(c) for c in text], **fields) for text in texts]
    return [*deltas, Delta(index=index, token_ids=[0], finish_reason=finish_reason)]


Steps = Sequence[Delta | Exception | asyncio.Event]
Script = Callable[[list[int], GenerationParams], Steps]


class ScriptedGeneration:
    """Hands out the deltas of a script; raises its exceptions, waits for its events."""

    def __init__(self, script: Steps, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = 0
        self.is_clamped = False
        self.closed_as: list[str] = []
        self.closed = asyncio.Event()
        self.is_over = False
        self._script = script

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for item in self._script:
            await asyncio.sleep(0)
            if isinstance(item, Exception):
                raise item
            if isinstance(item, asyncio.Event):
                await self._until(item)
            else:
                yield item
            if self.closed.is_set():
                return
        self.is_over = True

    async def _until(self, event: asyncio.Event) -> None:
        """Wait for it, or until the generation is closed: whoever waits gets no more then."""
        waiting = [asyncio.create_task(each.wait()) for each in (event, self.closed)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    async def aclose(self, cause: str = "client_gone") -> None:
        if not self.is_over:
            self.closed_as.append(cause)
            self.closed.set()


class ScriptedGenerator:
    """Stands in for TextGenerator: a token is a character, a chat is rendered as `role: content` lines."""

    def __init__(
        self,
        script: Script | None = None,
        max_model_len: int = 10_000,
        chat_format: ChatFormat = ChatFormat(),  # noqa: B008  # never changes
        prompt_end: str = "",
    ) -> None:
        """`prompt_end`: what the chat template puts behind the messages."""
        self.max_model_len = max_model_len
        self.max_choices = 1000
        self.chat_format, self.prompt_end = chat_format, prompt_end
        self.script = script or (lambda ids, params: deltas_of("Hel", "lo"))
        self.prompts: list[list[int]] = []
        self.messages: list[dict[str, Any]] = []
        self.chat_options: dict[str, Any] = {}
        self.params = GenerationParams()
        self.request_ids: list[str] = []
        self.generations: list[ScriptedGeneration] = []
        self.refusal: Exception | None = None
        self.token_bytes: dict[int, bytes] = {}

    async def encode(
        self, text: str, field: str = "prompt", *, add_special_tokens: bool = True
    ) -> list[int]:
        return [ord(c) for c in text]

    async def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> tuple[str, list[int]]:
        self.messages, self.chat_options = messages, options
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages) + self.prompt_end
        return text, [ord(c) for c in text]

    def check_ids(self, ids: list[int], field: str) -> None:
        if not all(0 <= each < VOCAB for each in ids):
            raise RequestError(f"{field}: ids are below {VOCAB}", field=field)

    async def decode(self, ids: list[int], field: str) -> str:
        return "".join(map(chr, ids))

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        raw = self.token_bytes.get(token_id, chr(token_id).encode())
        return raw.decode(errors="replace"), raw

    async def start(
        self, prompt_ids: list[int], params: GenerationParams, *, request_id: str
    ) -> ScriptedGeneration:
        if self.refusal is not None:
            raise self.refusal
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            text = f"The prompt has {len(prompt_ids)} tokens, the context {self.max_model_len}."
            raise ContextLengthError(text, field="prompt")
        self.prompts.append(prompt_ids)
        self.params = params
        self.request_ids.append(request_id)
        generation = ScriptedGeneration(self.script(prompt_ids, params), len(prompt_ids))
        generation.is_clamped = params.max_tokens is not None and params.max_tokens > room
        generation.max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        self.generations.append(generation)
        return generation


def logprobs_of(token_id: int, logprob: float, *top: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, 1, tuple(i for i, _ in top), tuple(value for _, value in top))


def make_api(generator: Any = None, **fields: Any) -> Api:
    health = Health(is_ready=True)
    given = {"model_names": [MODEL, "alias"], "health": health, "created": 1_700_000_000, **fields}
    return Api(generator=cast(TextGenerator, generator or ScriptedGenerator()), **given)


def make_app(api: Api) -> ASGIApp:
    return wrap(Starlette(routes=make_routes(api)), api)


def client_of(api: Api | ScriptedGenerator) -> httpx.AsyncClient:
    """A client that raises whatever escapes from the app."""
    whole = api if isinstance(api, Api) else make_api(api)
    return httpx.AsyncClient(transport=httpx.ASGITransport(make_app(whole)), base_url="http://test")


@asynccontextmanager
async def served(api: Api) -> AsyncIterator[int]:
    """The port of a real server on the loopback interface."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(make_app(api), lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve([listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


async def post(api: Api | ScriptedGenerator, path: str, body: Any, **headers: str) -> httpx.Response:
    """POST a value as JSON, or bytes as they are."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client_of(api) as client:
        return await client.post(
            path, content=content, headers={"content-type": "application/json", **headers}
        )


def events_of(reply: httpx.Response) -> list[Any]:
    """Events of a whole stream, parsed strictly; the last is "[DONE]". Fails on anything but data lines."""
    blocks = reply.text.split("\n\n")
    assert blocks.pop() == "", "the stream ends within an event"
    parsed: list[Any] = []
    for block in blocks:
        if block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        assert "\n" not in block
        payload = block.removeprefix("data: ")
        parsed.append(payload if payload == "[DONE]" else strict_json(payload))
    return parsed


def strict_json(text: str | bytes) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)
