"""Frameworks that people build on, unchanged, against a real server whose model is a script."""

from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from service.text.chat_format import HERMES, ChatFormat, ThinkingTags
from tests.openai_api.scripted import ScriptedGenerator, Steps, deltas_of, make_api, served

pytestmark = pytest.mark.timeout(60)

MODEL = "alias"
CITY = '{"name":"Paris","size":"large"}'


class City(pydantic.BaseModel):
    name: str
    size: Literal["small", "large"]


class Scripted(ScriptedGenerator):
    """Calls the tool that it is shown, tells what that said, and fills in whatever form it is bound to."""

    def __init__(self) -> None:
        super().__init__(self._say, chat_format=ChatFormat(ThinkingTags(1, 2, True), HERMES))

    def _say(self, _ids: list[int], params: Any) -> Steps:
        text = f"<think>\nHm.\n</think>\n\n{self._answer(params)}"
        return deltas_of(*(text[at : at + 3] for at in range(0, len(text), 3)))

    def _answer(self, params: Any) -> str:
        if params.grammar is not None and params.grammar.kind == "json":
            return CITY
        if self.messages[-1]["role"] == "tool":
            return f"It is {self.messages[-1]['content']}."
        names = [tool["function"]["name"] for tool in self.chat_options.get("tools") or ()]
        if not names:
            return "Hello."
        arguments = '{"city": "Paris"}' if names[0] == "get_weather" else CITY
        return f'<tool_call>\n{{"name": "{names[0]}", "arguments": {arguments}}}\n</tool_call>'


def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


def sdk(port: int) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)


@pytest.mark.conformance("langchain-openai", "chat and responses: text, tools, streams, structured output")
@pytest.mark.parametrize("is_responses", [False, True])
async def test_langchain(is_responses: bool) -> None:
    langchain = pytest.importorskip("langchain_openai")
    async with served(make_api(Scripted())) as port, httpx.AsyncClient() as http:
        model = langchain.ChatOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key="x",
            model=MODEL,
            use_responses_api=is_responses,
            http_async_client=http,
        )
        with_tools = model.bind_tools([get_weather])
        plain = await model.ainvoke("Hi")
        called = await with_tools.ainvoke("Weather?")
        chunks = [chunk async for chunk in with_tools.astream("Weather?")]
        (call,) = called.tool_calls
        output = {"role": "tool", "content": get_weather(**call["args"]), "tool_call_id": call["id"]}
        last = await with_tools.ainvoke([("user", "Weather?"), called, output])
        city = await model.with_structured_output(City).ainvoke("Paris")

    streamed = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    assert plain.text == "Hello."
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    assert [(each["name"], each["args"]) for each in streamed.tool_calls] == [(call["name"], call["args"])]
    assert last.text == "It is sunny in Paris."
    assert city == City(name="Paris", size="large")


@pytest.mark.conformance(
    "pydantic-ai-slim", "chat and responses: agents, tools, streams, structured output"
)
@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
async def test_pydantic_ai(kind: str) -> None:
    ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    async with served(make_api(Scripted())) as port, sdk(port) as client:
        provider = providers.OpenAIProvider(openai_client=client)
        model = getattr(models, kind)(MODEL, provider=provider)
        answered = await ai.Agent(model, tools=[get_weather]).run("Weather?")
        async with ai.Agent(model).run_stream("Hi") as stream:
            streamed = await stream.get_output()
        city = await ai.Agent(model, output_type=City).run("Paris")  # by a tool that must be called
        native = await ai.Agent(model, output_type=ai.NativeOutput(City)).run("Paris")  # by a schema

    assert answered.output == "It is sunny in Paris."
    assert streamed == "Hello."
    assert city.output == native.output == City(name="Paris", size="large")


@pytest.mark.conformance("openai-agents", "agents with tools, streams, structured output")
async def test_openai_agents() -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    async with served(make_api(Scripted())) as port, sdk(port) as client:
        model = agents.OpenAIResponsesModel(MODEL, client)
        tools = [agents.function_tool(get_weather)]
        agent = agents.Agent(name="a", instructions="Be brief.", model=model, tools=tools)
        answered = await agents.Runner.run(agent, "Weather?")
        streamed = agents.Runner.run_streamed(agent, "Weather?")
        kinds = {event.type async for event in streamed.stream_events()}
        city = await agents.Runner.run(agents.Agent(name="b", model=model, output_type=City), "Paris")

    assert answered.final_output == streamed.final_output == "It is sunny in Paris."
    assert "raw_response_event" in kinds
    assert city.final_output == City(name="Paris", size="large")
