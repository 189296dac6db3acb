"""POST /v1/completions."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from openai_api.answer import Stamp, UsageWishes, answer
from openai_api.api import Api
from openai_api.completions_reply import CompletionReply, Prompt, Wishes
from openai_api.fields import REFUSED_BY_COMPLETIONS, ignored_fields
from openai_api.grammar import grammar_of
from openai_api.json_body import read_object
from openai_api.params import generation_params, prompts_of
from openai_api.protocol import DEFAULT_COMPLETION_TOKENS, CompletionRequest, to_struct
from openai_api.run import Run
from openai_api.sse import EventStream
from service.errors import RequestError
from service.text.generation import GenerationParams, TextGenerator

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
        params = _params(body)
        asked = prompts_of(body)
        of_many = "prompt" if len(asked) > 1 else "n" if body.best_of is None else "best_of"
        self._api.check_choices(generator, len(asked) * params.n, of_many)
        prompts = await _encode(generator, asked, echo=bool(body.echo))

        ids = [prompt.ids for prompt in prompts]
        run = await Run.start(generator, ids, params, stamp.id, self._api.timeout_of(body.timeout))

        if run.clamped_max_tokens is not None and body.max_tokens is not None:
            ignored.append(f"max_tokens;clamped={run.clamped_max_tokens}")
        wishes = Wishes(
            usage=UsageWishes.of(body),
            num_kept=body.n or 1,
            echo=bool(body.echo),
            logprobs=body.logprobs is not None,
            prompt_logprobs=body.prompt_logprobs is not None,
            token_ids=bool(body.return_token_ids),
        )
        reply = CompletionReply(generator, run, stamp, prompts, wishes)
        limits = self._api.limits
        return await answer(
            http, reply, run, is_stream=bool(body.stream), ignored=ignored, ping_seconds=limits.ping_seconds
        )


def _params(body: CompletionRequest) -> GenerationParams:
    """Raises: RequestError."""
    n, best_of = body.n or 1, body.best_of
    if best_of is not None and best_of < n:
        raise RequestError(f"best_of is {best_of}, less than n, {n}.", field="best_of")
    if best_of is not None and best_of > n and body.stream:
        raise RequestError("best_of picks among whole replies, so it can't be streamed.", field="best_of")
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        message = (
            "max_tokens is 0; ask for at least one, or for the prompt's own with echo or prompt_logprobs."
        )
        raise RequestError(message, field="max_tokens")
    logprobs = body.logprobs
    if best_of is not None and best_of > n and logprobs is None:
        logprobs = 0  # to choose by
    params = generation_params(body, max_tokens=max_tokens, logprobs=logprobs, grammar=grammar_of(body))
    of_prompt = [body.prompt_logprobs, body.logprobs if body.echo else None]
    wanted = max((number for number in of_prompt if number is not None), default=None)
    return msgspec.structs.replace(params, n=best_of or n, prompt_logprobs=wanted)


async def _encode(generator: TextGenerator, asked: list[str | list[int]], *, echo: bool) -> list[Prompt]:
    prompts = []
    for i, prompt in enumerate(asked):
        field = "prompt" if len(asked) == 1 else f"prompt[{i}]"
        if isinstance(prompt, str):
            ids = await generator.encode(prompt, field)
            own = await generator.encode(prompt, field, add_special_tokens=False) if echo else ids
            prompts.append(Prompt(ids, prompt, len(ids) - len(own)))
        else:
            generator.check_ids(prompt, field)
            prompts.append(Prompt(prompt, await generator.decode(prompt, field) if echo else ""))
    return prompts
