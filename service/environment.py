"""The process environment: settings from flags, PHOTON_* variables and a TOML file, secrets, threads.

No other module reads it.
"""

import difflib
import math
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from service.errors import SettingsError
from service.settings import API_KEYS_VARIABLE, OPTIONS, PREFIX, TOKEN_VARIABLE, Option, Settings

CONFIG_VARIABLE = "PHOTON_CONFIG"
_SECRETS = frozenset({TOKEN_VARIABLE, API_KEYS_VARIABLE})
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


def environment_without_keys() -> dict[str, str]:
    """For a server that only we ask."""
    return {name: value for name, value in os.environ.items() if name != API_KEYS_VARIABLE}


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
