"""A fault of the device ends the engine cleanly, and the liveness probe says so."""

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

FAULT = 'extern "C" __global__ void fault() { *(volatile int*)16 = 1; }'


async def break_the_device() -> dict[str, Any]:
    """Writes where nothing is, while requests run. The context is lost for the whole process."""
    import cupy

    from openai_api.health import Health
    from service.engine.request import SamplingParams
    from service.errors import EngineDeadError
    from service.tensor.cuda.backend import CudaBackend
    from tests.gpu.test_engine import running

    async with running(CudaBackend()) as engine:
        health = Health(is_ready=True, engine_failure=lambda: engine.failure)
        assert health.is_alive
        params = SamplingParams(max_tokens=500, temperature=0.0)
        streams = [await engine.submit([1, 2, 3], params, request_id="r") for _ in range(4)]
        runner: Any = engine.runner
        with runner._stream:
            cupy.RawKernel(FAULT, "fault")((1,), (1,), ())
        last = [[output async for output in stream][-1] for stream in streams]
        refusal = None
        try:
            await engine.submit([1], params, request_id="late")
        except EngineDeadError as error:
            refusal = str(error)
        return {
            "errors": [output.error for output in last],
            "failure": engine.failure,
            "refusal": refusal,
            "is_alive": health.is_alive,
        }


def test_a_device_fault_reaches_the_probe() -> None:
    script = "import asyncio, json; from tests.gpu.test_device_fault import break_the_device as f; "
    script += "print(json.dumps(asyncio.run(f())), flush=True); import os; os._exit(0)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all("the GPU" in error or "The GPU" in error for error in found["errors"])
    assert "illegal" in found["failure"].lower()
    assert found["refusal"] is not None
    assert found["is_alive"] is False
