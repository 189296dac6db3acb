"""Keys and deadlines of a real process."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

from tests.checkpoints import make_checkpoint
from tests.server.server_process import READY_SECONDS, running_server

KEY, OTHER, METRICS = "sk-from-the-file", "sk-from-the-variable", "sk-for-metrics"
TINY = ("--kv-cache-gib", "0.01", "--served-model-name", "tiny")


def keys_file(folder: Path, text: str) -> str:
    file = folder / "keys.txt"
    file.write_text(text)
    file.chmod(0o600)
    return str(file)


def test_keys_of_file_and_variable_open_a_server_and_stay_out_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHOTON_API_KEYS", OTHER)
    file = keys_file(tmp_path, f"{KEY}\n{METRICS} metrics\n")
    guarded = ("--api-keys-file", file, "--metrics-key", "--log-level", "debug")
    with running_server("--model", str(make_checkpoint(tmp_path / "tiny")), *TINY, *guarded) as server:
        with httpx.Client(base_url=server.base.removesuffix("/v1")) as client:
            statuses = {
                path: [
                    client.get(path, headers={"authorization": f"Bearer {key}"}).status_code
                    for key in (KEY, OTHER, METRICS, "sk-wrong")
                ]
                for path in ("/v1/models", "/metrics", "/health")
            }
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        good = openai.OpenAI(base_url=server.base, api_key=OTHER, max_retries=0)
        reply = good.post("/chat/completions", body=chat, cast_to=httpx.Response)
        with pytest.raises(openai.AuthenticationError):
            good.with_options(api_key="sk-wrong").models.list()
        with pytest.raises(openai.PermissionDeniedError):
            good.with_options(api_key=METRICS).models.list()
        code = server.stop()

    assert statuses == {
        "/v1/models": [200, 200, 403, 401],
        "/metrics": [200, 200, 200, 401],
        "/health": [200, 200, 200, 200],
    }
    assert reply.status_code == 200
    assert code == 0
    assert "sk-" not in server.log


@pytest.mark.parametrize(
    ("text", "words"), [("\n# none yet\n", "holds no key"), (f"{KEY} root\n", "keys.txt, line 1")]
)
def test_a_server_does_not_start_with_a_bad_file_of_keys(tmp_path: Path, text: str, words: str) -> None:
    command = [sys.executable, "-m", "service", "serve", "--offline", "--port", "0"]
    command += ["--api-keys-file", keys_file(tmp_path, text)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=READY_SECONDS, check=False)

    assert ended.returncode == 1
    assert words in ended.stderr
    assert KEY not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_request_ends_at_the_server_s_deadline_or_at_its_own(tmp_path: Path, default_model: Path) -> None:
    endless = {"prompt": "Once upon a time", "max_tokens": 6000, "ignore_eos": True}
    with running_server(
        "--offline", "--kv-cache-gib", "0.25", "--request-timeout-seconds", "0.3"
    ) as server:
        plain = server.call("POST", "/v1/completions", endless)
        with server.streaming("/v1/completions", {**endless, "timeout": 3}) as stream:
            *events, last = list(stream)
        after = server.wait_until_idle()
        server.stop()

    assert plain[0] == 504
    assert "0.3 seconds" in plain[1]["error"]["message"]
    assert events
    assert json.loads(last)["error"]["code"] == "deadline_exceeded"
    assert after["photoninfer_aborts_total", "timeout"] == 2
    assert after["photoninfer_kv_blocks", "used"] == 0
