"""Checks across fields, and the parameters of a generation."""

from typing import Any

from openai_api.protocol import ChatRequest, CompletionRequest, GenerationRequest
from service.errors import RequestError
from service.text.generation import GenerationParams
from service.text.grammar import GrammarSpec

MAX_LOGIT_BIAS_ID_DIGITS = 10


def generation_params(
    body: GenerationRequest, *, max_tokens: int | None, logprobs: int | None, grammar: GrammarSpec | None
) -> GenerationParams:
    """Raises: RequestError."""
    _check_stream_options(body)
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs are in plain replies only.", field="prompt_logprobs")
    _check_min_tokens(body, max_tokens)
    given: dict[str, Any] = {
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "min_tokens": body.min_tokens,
        "ignore_eos": body.ignore_eos,
        "skip_special_tokens": body.skip_special_tokens,
        "include_stop_str_in_output": body.include_stop_str_in_output,
        "n": body.n,
        "priority": body.priority,
        "cache_salt": body.cache_salt,
    }
    return GenerationParams(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else max(0, body.top_k),
        min_p=body.min_p,
        seed=None if body.seed is None else body.seed % 2**64,  # the sampler's key is unsigned
        repetition_penalty=body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias or {}),
        stop=_stop(body.stop),
        stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        grammar=grammar,
        **{name: value for name, value in given.items() if value is not None},
    )


def chat_max_tokens(body: ChatRequest) -> tuple[str, int | None]:
    """The name the limit was given under, and the limit. Raises: RequestError where two names disagree."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        message = (
            f"max_completion_tokens is {new} but max_tokens, its older name, is {old}; send one of them."
        )
        raise RequestError(message, field="max_completion_tokens")
    return ("max_tokens", old) if new is None else ("max_completion_tokens", new)


def num_chat_logprobs(body: ChatRequest) -> int | None:
    """Raises: RequestError for top_logprobs without logprobs."""
    if not body.logprobs:
        if body.top_logprobs:
            raise RequestError("top_logprobs needs logprobs: true.", field="top_logprobs")
        return None
    return body.top_logprobs or 0


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a completion, all of one kind. Raises: RequestError naming the item."""
    prompt = body.prompt
    if prompt is None:
        raise RequestError("prompt is missing.", field="prompt")
    if isinstance(prompt, str):
        return [_text(prompt, "prompt")]
    if not prompt:
        raise RequestError("prompt is empty; send text or token ids.", field="prompt")
    if type(prompt[0]) is int:
        return [_ids(prompt, "prompt")]
    if isinstance(prompt[0], list):
        return [_ids(ids, f"prompt[{i}]") for i, ids in enumerate(prompt)]
    return [_text(text, f"prompt[{i}]") for i, text in enumerate(prompt)]


def _text(text: Any, field: str) -> str:
    if not isinstance(text, str):
        raise RequestError(f"{field}: a prompt is text or a list of token ids, all alike.", field=field)
    if not text:
        raise RequestError(f"{field} is empty; send text or token ids.", field=field)
    return text


def _ids(ids: Any, field: str) -> list[int]:
    if not isinstance(ids, list):
        raise RequestError(f"{field}: prompts must be all texts or all lists of token ids.", field=field)
    if not ids:
        raise RequestError(f"{field} is empty; send text or token ids.", field=field)
    if set(map(type, ids)) != {int}:  # in C, unlike a loop; a bool is no int here
        i = next(i for i, each in enumerate(ids) if type(each) is not int)
        raise RequestError(f"{field}[{i}]: a token id is an integer.", field=f"{field}[{i}]")
    return ids


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop))


def _logit_bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_LOGIT_BIAS_ID_DIGITS):
            shown = key if len(key) <= 40 else f"{key[:40]}..."
            raise RequestError(f"logit_bias: the key {shown!r} is not a token id.", field="logit_bias")
        by_id[int(key)] = value
    return tuple(sorted(by_id.items()))


def _check_stream_options(body: GenerationRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true.", field="stream_options")


def _check_min_tokens(body: GenerationRequest, max_tokens: int | None) -> None:
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        message = f"min_tokens is {body.min_tokens}, more than max_tokens, {max_tokens}."
        raise RequestError(message, field="min_tokens")
