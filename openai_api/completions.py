"""POST /v1/completions."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from openai_api.answer import Stamp, UsageWishes, answer
from openai_api.api import Api
from openai_api.fields import REFUSED_BY_COMPLETIONS, ignored_fields
from openai_api.grammar import grammar_of
from openai_api.json_body import read_object
from openai_api.logprobs import LegacyLogprobs
from openai_api.params import generation_params, prompts_of
from openai_api.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    to_struct,
)
from openai_api.run import Run
from openai_api.sse import EventStream
from service.text.generation import TextGenerator

_DONE_FIELDS = frozenset(field.name for field in msgspec.structs.fields(CompletionRequest))


class Completions:
    """Parse, refuse, encode, start; then chunks."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def create(self, http: Request) -> Response | EventStream:
        """Raises: whatever is refused, before the first byte of an answer."""
        generator = self._api.ready_generator()
        raw = await read_object(http)
        ignored = ignored_fields(raw, _DONE_FIELDS, REFUSED_BY_COMPLETIONS)
        body = to_struct(raw, CompletionRequest)
        stamp = Stamp.new("cmpl-", self._api.served_name(body.model), self._api.system_fingerprint)
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        params = generation_params(
            body, max_tokens=max_tokens, logprobs=body.logprobs, grammar=grammar_of(body)
        )
        prompts = prompts_of(body)
        self._api.check_choices(len(prompts) * params.n, "prompt" if len(prompts) > 1 else "n")
        ids = await _encode(generator, prompts)

        run = await Run.start(generator, ids, params, stamp.id, self._api.timeout_of(body.timeout))

        if run.clamped_max_tokens is not None and body.max_tokens is not None:
            ignored.append(f"max_tokens;clamped={run.clamped_max_tokens}")
        reply = CompletionReply(generator, run, stamp, UsageWishes.of(body))
        limits = self._api.limits
        return await answer(
            http, reply, run, is_stream=bool(body.stream), ignored=ignored, ping_seconds=limits.ping_seconds
        )


async def _encode(generator: TextGenerator, prompts: list[str | list[int]]) -> list[list[int]]:
    encoded = []
    for i, prompt in enumerate(prompts):
        field = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
        if isinstance(prompt, str):
            encoded.append(await generator.encode(prompt, field))
        else:
            generator.check_ids(prompt, field)
            encoded.append(prompt)
    return encoded


class CompletionReply:
    """Chunks of a completion: of each choice text, then the finish reason."""

    def __init__(self, generator: TextGenerator, run: Run, stamp: Stamp, usage: UsageWishes) -> None:
        self._run = run
        self._stamp = stamp
        self._usage = usage
        self._logprobs = LegacyLogprobs(generator)

    async def chunks(self) -> AsyncGenerator[list[Completion], None]:
        async with aclosing(self._run.deltas()) as deltas:
            async for delta in deltas:
                choices = []
                logprobs = self._logprobs.of(delta)
                if delta.text or logprobs is not None:
                    choices.append(CompletionChoice(delta.index, delta.text, logprobs))
                if delta.finish_reason is not None:
                    choices.append(CompletionChoice(delta.index, "", None, delta.finish_reason))
                if choices:
                    yield [self._chunk([choice]) for choice in choices]
        if self._usage.at_end:
            last = self._chunk([])
            last.usage = self._run.usage()
            yield [last]

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        stamp, usage = self._stamp, self._usage
        sent = self._run.usage() if usage.always else None if usage.at_end else UNSET
        return Completion(stamp.id, stamp.created, stamp.model, stamp.system_fingerprint, choices, sent)

    async def joined(self) -> Completion:
        indices = range(self._run.num_choices)
        choices = [CompletionChoice(index, "") for index in indices]
        texts: list[list[str]] = [[] for _ in indices]
        async with aclosing(self.chunks()) as batches:
            async for batch in batches:
                for chunk in batch:
                    for piece in chunk.choices:
                        texts[piece.index].append(piece.text)
                        _extend(choices[piece.index], piece)
        for choice, text in zip(choices, texts, strict=True):
            choice.text = "".join(text)
        whole = self._chunk(choices)
        whole.usage = self._run.usage()
        return whole


def _extend(choice: CompletionChoice, piece: CompletionChoice) -> None:
    if piece.finish_reason is not None:
        choice.finish_reason = piece.finish_reason
    if piece.logprobs is not None:
        if choice.logprobs is None:
            choice.logprobs = CompletionLogprobs([], [], [], [])
        choice.logprobs.tokens += piece.logprobs.tokens
        choice.logprobs.token_logprobs += piece.logprobs.token_logprobs
        choice.logprobs.top_logprobs += piece.logprobs.top_logprobs
        choice.logprobs.text_offset += piece.logprobs.text_offset
