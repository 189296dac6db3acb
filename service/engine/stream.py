"""What one request has gained, until whoever asked for it reads it."""

import asyncio
from collections.abc import AsyncIterator, Callable

from service.engine.observer import RequestRecord
from service.engine.request import FinishReason, Output, Request, TokenLogprobs


class Stream:
    """Outputs of one request, from the engine to its owner. Implements interface.OutputStream.

    Ids gather here until the owner reads: it finds all of them in one output, however many steps they took.
    """

    def __init__(self, request: Request, cancel: Callable[["Stream", str], None]) -> None:
        self.request = request
        self.last_output_at = request.submitted_at
        self.first_output_after: float | None = None
        self.record: RequestRecord | None = None
        self._cancel = cancel
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._end: Output | None = None
        self._is_over = False
        self._wakeup: asyncio.Future[None] | None = None

    def add(self, token_id: int) -> None:
        """One more id; the owner does not hear of it before `wake`."""
        self._ids.append(token_id)

    def add_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Those of the id that was added last."""
        self._logprobs.append(logprobs)

    def add_prompt_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        """Those of some more of the prompt's ids, heard of together with the first generated one."""
        self._prompt_logprobs += logprobs

    def end(
        self, reason: FinishReason, *, stop_token_id: int | None = None, error: str | None = None
    ) -> None:
        """Nothing more comes; the owner is woken."""
        self._end = Output(finish_reason=reason, stop_token_id=stop_token_id, error=error)
        self.wake()

    def wake(self) -> None:
        """Let the owner read."""
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    async def __aiter__(self) -> AsyncIterator[Output]:
        while not self._is_over:
            if not self._ids and self._end is None:
                self._wakeup = asyncio.get_running_loop().create_future()
                await self._wakeup
            yield self._take()

    def _take(self) -> Output:
        """All that has gathered."""
        output, self._is_over = self._end or Output(), self._end is not None
        output.token_ids, self._ids = self._ids, []
        output.logprobs, self._logprobs = self._logprobs, []
        output.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        output.num_cached_tokens = self.request.num_cached_tokens or 0
        return output

    async def close(self, cause: str) -> None:
        """See interface.OutputStream.close."""
        self._cancel(self, cause)
