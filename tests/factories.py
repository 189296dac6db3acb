"""Builders of the things that tests are about, with defaults: a test shows only what matters to it."""

from service.engine.request import Request, SamplingParams

_SERIAL = iter(range(1, 1 << 60))


def make_request(
    name: str = "r", prompt: int = 4, output: int = 4, priority: int = 0, first_id: int = 0
) -> Request:
    """A request whose prompt is `prompt` consecutive ids from `first_id` on."""
    return Request(
        id=name,
        prompt_ids=list(range(first_id, first_id + prompt)),
        params=SamplingParams(max_tokens=output, temperature=0.0),
        priority=priority,
        arrival=next(_SERIAL),
    )
