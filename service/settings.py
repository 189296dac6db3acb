"""Settings: every option once, with type, limits, unit and help. Flags, PHOTON_* variables, the TOML file,
`--help` and the table in the README are derived from it.

An option's value comes from the first of: flag, PHOTON_* variable, PORT (for `port` alone), TOML file,
default. This module is the only one that reads the process environment. Secrets are no options:
`read_hf_token`, `read_api_keys_variable`.
"""

import difflib
import math
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import platformdirs
from msgspec import Meta

from service.errors import SettingsError

PREFIX = "PHOTON_"
CONFIG_VARIABLE = "PHOTON_CONFIG"
TOKEN_VARIABLE = "PHOTON_HF_TOKEN"  # noqa: S105  the name of a variable, no secret
API_KEYS_VARIABLE = "PHOTON_API_KEYS"
_SECRETS = frozenset({TOKEN_VARIABLE, API_KEYS_VARIABLE})

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
_BY_NAME = {option.name: option for option in OPTIONS}


def load_settings(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """Merge flags (by option name, and `config`; None: not given), environment and TOML file.

    Raises: SettingsError, which names the flag, variable or key, its value and what is allowed.
    """
    env = _environment(os.environ if environ is None else environ)
    values: dict[str, Any] = {}
    named = env.pop(CONFIG_VARIABLE, None)
    if config := flags.get("config") or named:
        values |= _from_toml(Path(config))
    if port := env.pop("PORT", None):
        values["port"] = _convert(_BY_NAME["port"], port, "PORT", strict=False)
    for variable, text in env.items():
        option = _known(variable, {option.variable: option for option in OPTIONS}, "variable")
        raw = [part.strip() for part in text.split(",") if part.strip()] if option.is_list else text
        values[option.name] = _convert(option, raw, variable, strict=False)
    for option in OPTIONS:
        if (given := flags.get(option.name)) is not None:
            values[option.name] = _convert(option, given, option.flag, strict=False)
    return Settings(**values)


def read_hf_token(settings: Settings, environ: Mapping[str, str] | None = None) -> str | None:
    """The Hugging Face token, from PHOTON_HF_TOKEN, the file of `hf_token_file`, or HF_TOKEN.

    Raises: SettingsError when the file can't be read.
    """
    env = os.environ if environ is None else environ
    if token := env.get(TOKEN_VARIABLE):
        return token
    if settings.hf_token_file is None:
        return env.get("HF_TOKEN") or None
    try:
        return Path(settings.hf_token_file).expanduser().read_text().strip() or None
    except OSError as error:
        raise SettingsError(
            f"hf_token_file is {settings.hf_token_file!r}, but: {error.strerror}."
        ) from None


def read_api_keys_variable(environ: Mapping[str, str] | None = None) -> str | None:
    """What PHOTON_API_KEYS holds; service/api_keys.py reads it."""
    return (os.environ if environ is None else environ).get(API_KEYS_VARIABLE) or None


def set_thread_count(settings: Settings) -> None:
    """Tell BLAS libraries how many threads to use. They read it as NumPy is imported: call this before.

    Without `threads`, a number that the user has set for a library by its own variable stays.
    Writes:  the process environment
    """
    assert "numpy" not in sys.modules, "too late: NumPy has been imported"
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if settings.threads is not None:
            os.environ[variable] = str(settings.threads)
        else:
            os.environ.setdefault(variable, str(usable_cores()))


def usable_cores() -> int:
    """Cores that this process may keep busy: its CPU affinity, and the CPU limit of its container."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no control groups of version 2, or no limit ("max")
        return cores


_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that are meant for us and not empty.

    Kubernetes sets PHOTON_PORT=tcp://10.0.0.1:80 and the like where a Service is called `photon`.
    """
    names = [name for name in environ if name == "PORT" or name.startswith(PREFIX)]
    return {
        name: environ[name]
        for name in names
        if environ[name]
        and name not in _SECRETS
        and not _SERVICE_LINK.search(name)
        and not environ[name].startswith(("tcp://", "udp://", "sctp://"))
    }


def _from_toml(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"The settings file {path} can't be read: {error.strerror}.") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"The settings file {path} is not TOML: {error}.") from None
    values = {}
    for key, value in table.items():
        option = _known(key, _BY_NAME, f"key in {path}:")
        values[option.name] = _convert(option, value, f"{key} in {path}", strict=True)
    return values


def _known(name: str, known: Mapping[str, Option], kind: str) -> Option:
    if name in known:
        return known[name]
    raise SettingsError(f"Unknown {kind} {name}.{nearest_hint(name, [*known, *_SECRETS])}")


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """` Did you mean X?`, or nothing when no known name is like it."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _convert(option: Option, value: Any, source: str, *, strict: bool) -> Any:
    try:
        converted = msgspec.convert(value, option.type, strict=strict)
    except msgspec.ValidationError:
        converted = math.nan
    if isinstance(converted, float) and not math.isfinite(converted):
        unit = f" ({option.unit})" if option.unit else ""
        raise SettingsError(f"{source} is {value!r}; it takes {option.allowed}{unit}.")
    return converted
