"""An engine that says what it is told to. Implements service.engine.interface.EngineClient."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from service.engine.observer import RequestRecord
from service.engine.request import FinishReason, Output, SamplingParams, TokenLogprobs

# An id; ids that come together; a whole output; an event to wait for; or an exception to raise.
Item = int | list[int] | Output | asyncio.Event | Exception
Script = Sequence[Item]


@dataclass(slots=True)
class Submission:
    """One submitted request, as the engine saw it."""

    prompt_ids: list[int]
    params: SamplingParams
    request_id: str
    priority: int
    salt: bytes
    closed_as: list[str] = field(default_factory=list)  # causes, of closings that came before the end
    is_over: bool = False


class ScriptedStream:
    """Outputs of one script, which ends as an engine's would: at EOS, a stop id, max_tokens or `close`.

    A script that has run out ends with LENGTH.
    """

    def __init__(self, submission: Submission, script: Script, eos_token_ids: frozenset[int]) -> None:
        self._submission = submission
        self._script = list(script)
        self._num_left = submission.params.max_tokens
        self._closed = asyncio.Event()
        self.record: RequestRecord | None = None
        params = submission.params
        self._ending_ids = (frozenset() if params.ignore_eos else eos_token_ids) | set(
            params.stop_token_ids
        )

    async def __aiter__(self) -> AsyncIterator[Output]:
        for item in self._script:
            await asyncio.sleep(0)
            if isinstance(item, asyncio.Event):
                await self._wait(item)
            if self._closed.is_set():
                yield Output(finish_reason=FinishReason.CANCELLED)
                return
            if isinstance(item, Exception):
                self._submission.is_over = True
                raise item
            if isinstance(item, asyncio.Event):
                continue
            output = (
                item
                if isinstance(item, Output)
                else self._output([item] if isinstance(item, int) else item)
            )
            self._submission.is_over = output.finish_reason is not None
            yield output
            if output.finish_reason is not None:
                return
        self._submission.is_over = True
        yield Output(finish_reason=FinishReason.LENGTH)

    async def close(self, cause: str) -> None:
        if not self._submission.is_over:
            self._submission.is_over = True
            self._submission.closed_as.append(cause)
            self._closed.set()

    async def _wait(self, event: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(each.wait()) for each in (event, self._closed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _output(self, ids: list[int]) -> Output:
        output = Output()
        for token_id in ids[: self._num_left]:
            output.token_ids.append(token_id)
            if self._submission.params.logprobs is not None:
                output.logprobs.append(logprobs_of(token_id, self._submission.params.logprobs))
            if token_id in self._ending_ids:
                output.finish_reason, output.stop_token_id = FinishReason.STOP, token_id
                break
        self._num_left -= len(output.token_ids)
        if not self._num_left and output.finish_reason is None:
            output.finish_reason = FinishReason.LENGTH
        return output


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """What ScriptedEngine reports for an id: the chosen id itself leads, then 0, 1, ... follow."""
    tops = [token_id, *range(num_top)][:num_top]
    return TokenLogprobs(token_id, -0.5, 1, tuple(tops), tuple(-0.5 - i for i in range(len(tops))))


class ScriptedEngine:
    """Request i of all that are submitted follows `scripts[i]`; the last script serves all later ones.

    `refusals`: what `submit` raises, by number of the submission. `script_of` replaces the list of scripts.
    """

    def __init__(
        self,
        *scripts: Script,
        max_model_len: int = 4096,
        vocab_size: int = 1 << 20,
        eos_token_ids: Sequence[int] = (),
        refusals: dict[int, Exception] | None = None,
        script_of: Callable[[Submission], Script] | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.max_waiting = 1000
        self.vocab_size = vocab_size
        self.submissions: list[Submission] = []
        self._scripts = scripts or ((),)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._refusals = refusals or {}
        self._script_of = script_of

    async def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        salt: bytes = b"",
    ) -> ScriptedStream:
        number = len(self.submissions)
        if number in self._refusals:
            raise self._refusals[number]
        submission = Submission(list(prompt_ids), params, request_id, priority, salt)
        self.submissions.append(submission)
        script = self._scripts[min(number, len(self._scripts) - 1)]
        if self._script_of is not None:
            script = self._script_of(submission)
        return ScriptedStream(submission, script, self._eos_token_ids)
