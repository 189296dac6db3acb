"""The engine as its users see it: messages of plain structs, so that a transport may stand between."""

from collections.abc import AsyncIterator
from typing import Protocol

from service.engine.observer import RequestRecord
from service.engine.request import Output, SamplingParams


class OutputStream(Protocol):
    """Outputs of one request. Leaving early: `close`; it frees the request's blocks at the next step."""

    record: RequestRecord | None  # once the request is over

    def __aiter__(self) -> AsyncIterator[Output]:
        """Outputs as steps end; the last has a finish reason. Ids that are ready together come together."""

    async def close(self, cause: str) -> None:
        """Cancel what is left of the request; idempotent, and nothing if it has ended.

        `cause` labels the abort in the metrics: "client_gone", "error"; "stop_string" counts as no abort.
        """


class EngineClient(Protocol):
    """Submit ids, get ids. Implemented by service/engine/engine.py, and by a script in tests."""

    max_model_len: int  # tokens of prompt and output together that one request can have
    max_waiting: int  # requests that can be submitted before one of them is planned
    vocab_size: int  # ids below this may be in a prompt; the model's rows above the tokenizer are not

    async def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        salt: bytes = b"",
    ) -> OutputStream:
        """Queue a request. Returns once it is accepted, before it has run.

        Raises: ContextLengthError (prompt does not fit), RequestError (ids or parameters outside the
            vocabulary), OverloadedError (queue full, with the seconds until a place is expected),
            EngineDeadError.
        """
