"""One request's ids -> `Delta`s of text with logprobs and a finish reason."""
# interface first; the text helper completes this module
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from service.engine.request import SamplingParams, TokenLogprobs


class Delta(msgspec.Struct, kw_only=True):
    """A piece of one choice's reply. The fold of a choice's deltas is its plain reply."""

    index: int = 0  # which of the n choices
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason: str | None = None  # "stop" or "length" on the last delta of a choice
    num_cached_tokens: int = 0
    stop_reason: str | int | None = None  # the stop string or stop token id that ended the choice


class GenerationParams(msgspec.Struct, frozen=True, kw_only=True):
    """What the API asks for; None means: the model's generation_config, then OpenAI's default."""

    max_tokens: int | None = None  # None: up to the context
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: chosen and k top ones
    n: int = 1
    priority: int = 0


class Generation(Protocol):
    """A started request of n choices."""

    num_prompt_tokens: int
    max_tokens: int  # after clamping to the context
    is_clamped: bool  # max_tokens was asked for and did not fit

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def aclose(self, cause: str = "client_gone") -> None: ...


__all__ = ["AsyncIterator", "SamplingParams"]
