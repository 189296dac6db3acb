"""llama.cpp on the same GGUF file and cores: decode and prefill tokens/s at 1, 8 and 16 requests; JSON.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install xllamacpp==2026.10.11549
    /tmp/peer/bin/python benchmarks/compare_llamacpp.py MODEL.gguf

Run `photoninfer bench` before and after it, since shared machines drift. Prompts of 128 random ids,
128 ids of output, greedy; decode is counted as `photoninfer bench` counts it: from the moment when every
request has its first id until the last id.
"""

import json
import os
import random
import statistics
import sys
import threading
import time
from typing import Any

import xllamacpp

PROMPT, OUTPUT, LONG_PROMPT = 128, 128, 512
MAX_BATCH = 16


def start_server(model: str) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel = MAX_BATCH
    params.n_ctx = MAX_BATCH * 1024
    params.cpuparams.n_threads = len(os.sched_getaffinity(0))
    params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    params.cont_batching = True
    params.warmup = True
    return xllamacpp.Server(params)


def complete(server: Any, number: int, prompt: int, output: int) -> list[float]:
    """Arrival times of the ids."""
    rng = random.Random(number)
    arrivals: list[float] = []
    body = {
        "prompt": [rng.randrange(1000, 40_000) for _ in range(prompt)],
        "max_tokens": output,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
    }

    def receive(chunk: dict[str, Any]) -> bool:
        arrivals.append(time.perf_counter())  # a chunk an id; the last has the finish reason
        return False

    server.handle_completions(body, receive)
    return arrivals


def decode(server: Any, batch: int) -> float:
    replies: list[list[float]] = [[] for _ in range(batch)]

    def one(i: int) -> None:
        replies[i] = complete(server, 1000 * batch + i, PROMPT, OUTPUT)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(batch)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first_all = max(reply[0] for reply in replies)
    last = max(reply[-1] for reply in replies)
    return sum(1 for reply in replies for at in reply if at > first_all) / (last - first_all)


def main() -> None:
    server = start_server(sys.argv[1])
    complete(server, 0, 16, 8)
    seconds = []
    for number in range(3):
        started_at = time.perf_counter()
        seconds.append(complete(server, 7 + number, LONG_PROMPT, 1)[0] - started_at)
    report = {
        "peer": f"llama.cpp through xllamacpp {getattr(xllamacpp, '__version__', '')}",
        "prefill_tokens_per_second": LONG_PROMPT / statistics.median(seconds),
        "decode_tokens_per_second": {str(batch): decode(server, batch) for batch in (1, 8, 16)},
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
