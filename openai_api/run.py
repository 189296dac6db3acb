"""The started generations of one HTTP request, as one stream of deltas with counts."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from openai_api.replies import CompletionTokensDetails, PromptTokensDetails, Usage
from service.engine.observer import RequestRecord
from service.errors import DeadlineError, GenerationError
from service.text.choice import Delta
from service.text.generation import Generation, GenerationParams, TextGenerator
from service.text.merge import merged


@dataclass(slots=True)
class Run:
    """Choice i of prompt p has index p * n + i. Leaving it as a context manager cancels what is left.

    A deadline cancels by a timer and not by whoever reads, so that it also holds for a client that reads
    slowly or not at all, and costs nothing a token.
    """

    generations: list[Generation]
    n: int
    timeout_seconds: float | None = None
    num_generated_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_cached_tokens: int = 0
    is_expired: bool = False
    _timer: asyncio.TimerHandle | None = None
    _expiring: "asyncio.Task[None] | None" = None

    @classmethod
    async def start(
        cls,
        generator: TextGenerator,
        prompts: Sequence[list[int]],
        params: GenerationParams,
        request_id: str,
        timeout_seconds: float | None = None,
    ) -> "Run":
        """Submit every prompt, or none. Raises: every refusal of TextGenerator.start."""
        run = cls([], params.n, timeout_seconds)
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        try:
            for i, ids in enumerate(prompts):
                unique = request_id if len(prompts) == 1 else f"{request_id}-{i}"
                run.generations.append(await generator.start(ids, params, request_id=unique))
        except BaseException:
            await run.close("error")
            raise
        if timeout_seconds is not None:
            run._timer = loop.call_at(started_at + timeout_seconds, run._expire)
        return run

    def _expire(self) -> None:
        self.is_expired = True
        self._expiring = asyncio.create_task(self._close_all("timeout"))

    async def close(self, cause: str = "client_gone") -> None:
        """Cancel what is left, and the deadline; nothing where a generation has ended."""
        if self._timer is not None:
            self._timer.cancel()
        await self._close_all(cause)

    async def _close_all(self, cause: str) -> None:
        for generation in self.generations:
            await generation.aclose(cause)

    async def __aenter__(self) -> "Run":
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    @property
    def num_choices(self) -> int:
        return len(self.generations) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(each.num_prompt_tokens for each in self.generations)

    @property
    def clamped_max_tokens(self) -> int | None:
        """What max_tokens became where it did not fit into the context; None where it did."""
        return min((each.max_tokens for each in self.generations if each.is_clamped), default=None)

    @property
    def records(self) -> list[RequestRecord]:
        """What the engine kept of the choices that are over."""
        return [record for each in self.generations for record in each.records]

    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_generated_tokens,
            total_tokens=self.num_prompt_tokens + self.num_generated_tokens,
            prompt_tokens_details=PromptTokensDetails(self.num_cached_tokens),
            completion_tokens_details=CompletionTokensDetails(self.num_reasoning_tokens),
        )

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Deltas of all choices as they come.

        Raises: GenerationError when one fails, or when the engine ends one early, as at a forced stop: a
            reply that is cut off must not look whole. DeadlineError.
        """
        cached: dict[int, int] = {}  # by prompt
        num_open = self.num_choices
        source = merged([self._placed(each, i * self.n) for i, each in enumerate(self.generations)])
        try:
            async with aclosing(source):
                async for delta in source:
                    self.num_generated_tokens += len(delta.token_ids)
                    self.num_reasoning_tokens += delta.num_reasoning_tokens
                    prompt, choice = divmod(delta.index, self.n)
                    if choice == 0 and delta.num_cached_tokens > cached.get(prompt, 0):
                        # of the first choice: the others may have hit what that one has just computed
                        cached[prompt] = delta.num_cached_tokens
                        self.num_cached_tokens = sum(cached.values())
                    num_open -= delta.finish_reason is not None
                    yield delta
            if num_open:
                raise self._cut_off()
        except Exception:
            await self.close("error")
            raise

    def _cut_off(self) -> GenerationError:
        if not self.is_expired:
            return GenerationError("The server ended this reply early.")
        return DeadlineError(
            f"The request was not done within {self.timeout_seconds:g} seconds, and was stopped after "
            f"{self.num_generated_tokens} tokens. Set a longer timeout, or ask for fewer tokens."
        )

    def _placed(self, generation: Generation, first_index: int) -> AsyncIterable[Delta]:
        """Its deltas, with the indices of the whole request."""

        async def placed() -> AsyncGenerator[Delta, None]:
            async for delta in generation:
                delta.index += first_index
                yield delta

        return placed() if first_index else generation
