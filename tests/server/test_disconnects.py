"""Clients that leave: their requests end, their blocks come back, and nobody else notices."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.server.server_process import ServerProcess

CASES = json.loads((Path(__file__).parents[1] / "cases" / "smol_ref.json").read_text())["cases"]
ENDLESS: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True}


def leave_in_the_middle(server: ServerProcess) -> None:
    with server.streaming("/v1/completions", ENDLESS) as stream:
        stream.take(2)


def leave_without_reading(server: ServerProcess) -> None:
    """A plain request, given up once it has been sent."""
    payload = json.dumps(ENDLESS).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + payload)


def test_requests_whose_clients_left_are_aborted_and_give_back_their_blocks(server: ServerProcess) -> None:
    before = server.wait_until_idle()
    with ThreadPoolExecutor(24) as pool:  # more than run at once, so some leave from the queue
        jobs = [pool.submit(leave_in_the_middle, server) for _ in range(6)]
        jobs += [pool.submit(leave_without_reading, server) for _ in range(18)]
        for job in jobs:
            job.result()
    after = server.wait_until_idle()

    name = "photoninfer_requests_total"
    assert after[name, "abort"] - before[name, "abort"] == 24
    assert after[name, "error"] == before[name, "error"]


def test_others_get_their_golden_answers_meanwhile(server: ServerProcess) -> None:
    case = CASES[0]
    body = {"messages": case["messages"], "temperature": 0, "max_tokens": 64}
    with ThreadPoolExecutor(12) as pool:
        leavers = [pool.submit(leave_in_the_middle, server) for _ in range(6)]
        asked = [pool.submit(server.call, "POST", "/v1/chat/completions", body) for _ in range(4)]
        answers = [job.result() for job in asked]
        for job in leavers:
            job.result()

    for status, reply in answers:
        assert status == 200
        assert reply["choices"][0]["message"]["content"] == case["text_to_eos"]
    server.wait_until_idle()
