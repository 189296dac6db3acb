"""A load generator for any OpenAI-compatible server: streams completions and keeps arrival times."""

import asyncio
import json
import re
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from service.errors import PhotonError

_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server. Its address is without `/v1`."""

    url: str
    api_key: str | None = None
    model: str | None = None  # None: requests name none, as ours allows

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 80

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def path(self, name: str) -> str:
        return f"{urlsplit(self.url).path.rstrip('/')}/v1/{name}"


def first_model(target: Target) -> str:
    """The first name that GET /v1/models lists. Raises: PhotonError."""
    with closing(HTTPConnection(*target.address, timeout=_TIMEOUT_SECONDS)) as connection:
        try:
            connection.request("GET", target.path("models"), headers=target.headers)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, HTTPException) as error:
            raise PhotonError(f"{target.url} can't be reached: {error}.") from None
    if answer.status != 200:
        raise PhotonError(f"{target.url} answered {answer.status}: {body[:2000].decode(errors='replace')}")
    try:
        name: str = json.loads(body)["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise PhotonError(f"{target.url} lists no model at {target.path('models')}.") from None
    return name


@dataclass(slots=True)
class StreamTimes:
    """One streamed reply. Units: seconds of perf_counter; tokens."""

    sent_at: float
    arrivals: list[float] = field(default_factory=list)  # of reads that held text
    num_tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent_at


async def stream_completion(target: Target, body: dict[str, Any]) -> StreamTimes:
    """POST one streaming completion and read it to the end.

    Raises: PhotonError when the server can't be reached, does not answer 200, or sends no text.
    """
    host, port = target.address
    model = {} if target.model is None else {"model": target.model}
    asked = {**model, **body, "stream": True, "stream_options": {"include_usage": True}}
    payload = json.dumps(asked).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in target.headers.items())
    head = (
        f"POST {target.path('completions')} HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Connection: close\r\n{more}"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    try:
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    except OSError as error:
        raise PhotonError(f"{target.url} can't be reached: {error}.") from None
    try:
        times = StreamTimes(perf_counter())
        writer.write(head.encode() + payload)
        answer = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in answer.split(b"\r\n", 1)[0]:
            rest = await reader.read(2000)
            raise PhotonError(
                f"{target.url} answered {answer.splitlines()[0].decode()}: {rest.decode(errors='replace')}"
            )
        tail = b""
        while piece := await reader.read(1 << 16):
            if b'"text"' in piece:
                times.arrivals.append(perf_counter())
            tail = (tail + piece)[-4000:]
        times.num_tokens = _completion_tokens(tail)
        if not times.arrivals:
            raise PhotonError(f"{target.url} sent no text.")
        return times
    finally:
        writer.close()


def _completion_tokens(tail: bytes) -> int:
    """From the usage event, the last before [DONE]."""
    found = _COMPLETION_TOKENS.findall(tail)
    if not found:
        raise PhotonError(f"The stream ended without usage: {tail[-200:].decode(errors='replace')}")
    return int(found[-1])


async def run_load(target: Target, bodies: list[dict[str, Any]]) -> dict[str, float]:
    """All bodies at once. Units of the result: tokens a second, milliseconds."""
    started_at = perf_counter()
    replies = await asyncio.gather(*(stream_completion(target, body) for body in bodies))
    seconds = perf_counter() - started_at
    first_all = max(reply.arrivals[0] for reply in replies)
    last = max(reply.arrivals[-1] for reply in replies)
    gaps = sorted(
        1000 * (after - before)
        for reply in replies
        for before, after in zip(reply.arrivals, reply.arrivals[1:], strict=False)
    )
    ttfts = sorted(1000 * reply.ttft for reply in replies)
    decoding = [
        sum(1 for at in reply.arrivals if at > first_all) * reply.num_tokens / len(reply.arrivals)
        for reply in replies
    ]
    return {
        "streams": len(bodies),
        "output_tokens_per_second": sum(reply.num_tokens for reply in replies) / seconds,
        "decode_tokens_per_second": sum(decoding) / (last - first_all) if last > first_all else 0.0,
        "ttft_ms_median": ttfts[len(ttfts) // 2],
        "ttft_ms_max": ttfts[-1],
        "itl_ms_median": gaps[len(gaps) // 2] if gaps else 0.0,
        "itl_ms_p99": gaps[int(len(gaps) * 0.99)] if gaps else 0.0,
    }
