"""The default model on the GPU against golden outputs of the reference implementation in float32."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.engine.build import build_engine
from service.engine.engine import Engine
from service.engine.observer import NoObserver
from service.engine.request import SamplingParams
from service.model.checkpoint import open_checkpoint
from service.progress import NoProgress
from service.settings import Settings

pytestmark = pytest.mark.gpu

CASES = json.loads((Path(__file__).parents[1] / "cases" / "smol_ref.json").read_text())["cases"]
CLEAR = 0.3  # logprobs between the two most likely ids: bfloat16 can't turn these round


def load(path: Path) -> Engine:
    checkpoint = open_checkpoint(path)
    settings = Settings(device="cuda", kv_cache_gib=2.0, max_running=64)
    return build_engine(
        checkpoint, settings, vocab_size=49152, progress=NoProgress(), observer=NoObserver()
    )


async def generate(engine: Engine, prompt: list[int], num_tokens: int) -> list[Any]:
    """Logprobs of each position, two top ids with them."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, logprobs=2, ignore_eos=True)
    stream = await engine.submit(prompt, params, request_id="golden")
    return [entry async for output in stream for entry in output.logprobs]


async def test_logprobs_and_choices_are_the_golden_ones(default_model: Path) -> None:
    engine = load(default_model)
    await engine.start()
    differences = []
    try:
        for case in CASES:
            ids = case["output_ids"]
            forced = await asyncio.gather(
                *(generate(engine, case["prompt_ids"] + ids[:position], 1) for position in range(len(ids)))
            )
            for position, (entry,) in enumerate(forced):
                if case["margin"][position] > CLEAR:
                    assert entry.top_ids[0] == ids[position], f"position {position}"
                if entry.top_ids[0] == ids[position]:
                    differences.append(abs(entry.logprob - case["logprob"][position]))
            free = [entry.token_id for entry in await generate(engine, case["prompt_ids"], len(ids))]
            sure = next((i for i, margin in enumerate(case["margin"]) if margin < CLEAR), len(ids))
            assert free[:sure] == ids[:sure]
    finally:
        await engine.stop()
    print(f"{len(differences)} positions: mean {np.mean(differences):.4f}, max {max(differences):.4f}")
    assert len(differences) > 60
    assert np.mean(differences) < 0.05
