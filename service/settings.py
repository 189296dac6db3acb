"""Settings: every option once, with type, limits, unit and help. Flags, PHOTON_* variables, the TOML file,
`--help` and the table in the README are derived from it.

An option's value comes from the first of: flag, PHOTON_* variable, PORT (for `port` alone), TOML file,
default: environment.py reads them. Secrets are no options.
"""

from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import platformdirs
from msgspec import Meta

PREFIX = "PHOTON_"
TOKEN_VARIABLE = "PHOTON_HF_TOKEN"  # noqa: S105  the name of a variable, no secret
API_KEYS_VARIABLE = "PHOTON_API_KEYS"

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16"]
QuantizationMode = Literal["auto", "int8", "none"]
GroupSize = Literal[32, 64, 128]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Address = Annotated[
    str, Meta(pattern=r"^https?://[^/\s]+(/\S*)?\Z", title="an address such as http://collector:4318")
]
Origin = Annotated[
    str, Meta(pattern=r"^(\*|https?://[^/\s,]+)\Z", title="origins such as https://example.org, or *")
]


def _about(group: str, text: str, unit: str | None = None) -> Meta:
    return Meta(title=group, description=text, extra={"unit": unit})


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All options, valid as a whole once `load_settings` has returned it."""

    model: Annotated[
        str | None,
        _about(
            "model", "GGUF file, Hugging Face directory or hub name (org/name); unset: the default model"
        ),
    ] = None
    tokenizer: Annotated[
        str | None, _about("model", "directory or tokenizer.json to use instead of the model's own")
    ] = None
    revision: Annotated[
        str | None, _about("model", "branch, tag or commit of a hub model; unset: its main branch")
    ] = None
    served_model_name: Annotated[
        tuple[str, ...],
        _about("model", "name that requests may use, the first in answers; unset: the model's own"),
    ] = ()
    cache_dir: Annotated[
        str | None,
        _about("model", "folder of downloads and prepared weights; unset: the user's cache folder"),
    ] = None
    shared_cache_dir: Annotated[
        str | None,
        _about(
            "model",
            "folder laid out like cache_dir that is looked into first and never written, such as one in a "
            "container image; unset: none",
        ),
    ] = None
    weight_cache: Annotated[
        bool, _about("model", "keep prepared weights in cache_dir, so that the next start is quick")
    ] = True
    offline: Annotated[bool, _about("model", "download nothing, use what is cached")] = False
    hf_token_file: Annotated[
        str | None,
        _about("model", f"file that holds a Hugging Face token; or set {TOKEN_VARIABLE} or HF_TOKEN"),
    ] = None

    host: Annotated[str, _about("server", "address to listen at; 0.0.0.0 or :: for all interfaces")] = (
        "127.0.0.1"
    )
    port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)],
        _about("server", "TCP port; 0: any free one; the variable PORT works too"),
    ] = 5728
    max_body_mib: Annotated[Count, _about("server", "largest request body", "MiB")] = 32
    ping_seconds: Annotated[
        Seconds, _about("server", "a waiting stream gets a comment this often; 0: never", "seconds")
    ] = 15.0
    heartbeat_limit_seconds: Annotated[
        Annotated[float, Meta(gt=0)],
        _about("server", "/livez fails when a step takes longer than this", "seconds"),
    ] = 60.0
    unready_when_full: Annotated[
        bool,
        _about("server", "/readyz fails while the queue is full, so that routers go to another replica"),
    ] = False
    drain_seconds: Annotated[
        Seconds, _about("server", "at SIGTERM or Ctrl-C, time for accepted requests to end", "seconds")
    ] = 30.0
    request_timeout_seconds: Annotated[
        Seconds,
        _about("server", "a request without a `timeout` of its own fails after this; 0: never", "seconds"),
    ] = 0.0
    api_keys_file: Annotated[
        str | None,
        _about(
            "server",
            "file of API keys, one a line, and ` metrics` after one that is for /metrics only; "
            f"or set {API_KEYS_VARIABLE}",
        ),
    ] = None
    metrics_key: Annotated[bool, _about("server", "/metrics needs an API key, too")] = False
    max_requests_per_key: Annotated[
        Annotated[int, Meta(ge=0)],
        _about("server", "requests that one API key may have open; more are refused with 429; 0: any"),
    ] = 0
    cors_origins: Annotated[
        tuple[Origin, ...],
        _about(
            "server", "web pages whose scripts may ask, such as https://example.org; *: all; unset: none"
        ),
    ] = ()

    device: Annotated[
        Device, _about("engine", "where the model runs; auto: a GPU if there is one and CuPy is installed")
    ] = "auto"
    dtype: Annotated[
        Dtype, _about("engine", "number format of the weights; auto: float32 on a CPU, bfloat16 on a GPU")
    ] = "auto"
    quantization: Annotated[
        QuantizationMode,
        _about("engine", "auto: INT8 weights where the model has them; int8: make all so; none: floats"),
    ] = "auto"
    group_size: Annotated[
        GroupSize, _about("engine", "weights that share a scale when quantization is int8")
    ] = 128
    quantize_embedding: Annotated[bool, _about("engine", "int8 includes the embedding")] = True
    quantize_head: Annotated[
        bool, _about("engine", "int8 includes the head, where it is not the embedding")
    ] = True
    threads: Annotated[
        Count | None,
        _about("engine", "CPU threads of matrix products; unset: the cores this process may use"),
    ] = None
    max_model_len: Annotated[
        Count | None,
        _about("engine", "longest prompt and reply together; unset: the model's context", "tokens"),
    ] = None
    block_size: Annotated[
        Annotated[int, Meta(ge=1, le=256)], _about("engine", "positions in a block of KV cache", "tokens")
    ] = 16
    kv_cache_gib: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        _about("engine", "size of the KV cache; unset: 1 on a CPU, on a GPU what is left", "GiB"),
    ] = None
    gpu_memory_fraction: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        _about("engine", "share of the GPU's free memory that weights, KV cache and workspace may take"),
    ] = 0.9
    max_running: Annotated[
        Count | None, _about("engine", "requests computed at once; unset: 64 on a CPU, 256 on a GPU")
    ] = None
    max_step_tokens: Annotated[
        Count | None,
        _about("engine", "token budget of a step; unset: 256 on a CPU, 2048 on a GPU", "tokens"),
    ] = None
    max_waiting: Annotated[
        Annotated[int, Meta(ge=1)], _about("engine", "requests that may wait; more are refused with 503")
    ] = 1024
    prefix_cache: Annotated[
        bool, _about("engine", "reuse the KV cache of prompts that start with the same tokens")
    ] = True

    log_level: Annotated[LogLevel, _about("log", "least serious kind of line to log")] = "info"
    log_format: Annotated[LogFormat, _about("log", "lines for people, or one JSON object a line")] = "text"
    access_log: Annotated[bool, _about("log", "log a line a request; never its text")] = True
    trace_endpoint: Annotated[
        Address | None,
        _about(
            "log",
            "OpenTelemetry collector that gets a span a request, by OTLP over HTTP, such as "
            "http://collector:4318; needs the extra `otel`; unset: none",
        ),
    ] = None
    trace_sample_ratio: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        _about("log", "share of the requests that get a span, where their caller has not decided"),
    ] = 1.0

    @property
    def cache_path(self) -> Path:
        """The folder of downloads and prepared weights."""
        if self.cache_dir is None:
            return Path(platformdirs.user_cache_dir("photoninfer", appauthor=False))
        return Path(self.cache_dir).expanduser()

    @property
    def shared_cache_path(self) -> Path | None:
        """The folder that is looked into before `cache_path`."""
        return None if self.shared_cache_dir is None else Path(self.shared_cache_dir).expanduser()


class Option(msgspec.Struct, frozen=True):
    """One field of Settings as flags, variables and texts need it."""

    name: str
    type: Any
    default: Any
    group: str
    help: str
    unit: str | None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def is_bool(self) -> bool:
        return self.type is bool

    @property
    def is_list(self) -> bool:
        return get_origin(self.type) is tuple

    @property
    def allowed(self) -> str:
        """The values that can be given, in words."""
        return "true or false" if self.is_bool else _allowed(self.type)


def _options() -> tuple[Option, ...]:
    options = []
    for field in msgspec.structs.fields(Settings):
        base, *limits, about = get_args(field.type)  # nested Annotated types come flattened
        value_type = Annotated[(base, *limits)] if limits else base
        unit = about.extra["unit"]
        options.append(
            Option(field.name, value_type, field.default, about.title, f"{about.description}", unit)
        )
    return tuple(options)


def _allowed(value_type: Any) -> str:
    arguments = get_args(value_type)
    if get_origin(value_type) is Annotated:
        return arguments[1].title or _allowed(arguments[0]) + _limits(arguments[1])
    if get_origin(value_type) is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if get_origin(value_type) is tuple:
        items = "names" if arguments[0] is str else _allowed(arguments[0])
        return f"{items}, separated by commas"
    if NoneType in arguments:
        return _allowed(arguments[0])
    return {int: "a whole number", float: "a number", str: "text"}[value_type]


def _limits(meta: Meta) -> str:
    if meta.ge is not None and meta.le is not None:
        return f" from {meta.ge} to {meta.le}"
    parts = [(" of at least", meta.ge), (" above", meta.gt), (" and at most", meta.le)]
    return "".join(f"{words} {limit}" for words, limit in parts if limit is not None)


OPTIONS = _options()
