"""API keys: from the file of `api_keys_file` and the variable PHOTON_API_KEYS.

Only digests are kept, so that no key can get into a log, a traceback or a dump.
"""

import hashlib
import hmac
import logging
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, get_args

import msgspec

from service.environment import read_api_keys_variable
from service.errors import SettingsError
from service.settings import API_KEYS_VARIABLE, Settings

log = logging.getLogger(__name__)

Scope = Literal["inference", "metrics"]
SCOPES: tuple[Scope, ...] = get_args(Scope)


class ApiKey(msgspec.Struct, frozen=True):
    """One key. Scope "metrics" is for /metrics alone, "inference" for every route."""

    digest: bytes  # SHA-256: of equal length whatever the key, so that comparing takes equal time
    scope: Scope = "inference"


def digest_of(key: bytes) -> bytes:
    """What is kept and compared instead of a key."""
    return hashlib.sha256(key).digest()


def find_key(keys: Iterable[ApiKey], given: bytes) -> ApiKey | None:
    """The key that was given, if it is one of ours. Compares all of them, each in constant time."""
    digest, found = digest_of(given), None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def read_api_keys(settings: Settings, environ: Mapping[str, str] | None = None) -> tuple[ApiKey, ...]:
    """All keys; none means that no request needs one.

    Raises: SettingsError, which names file and line, never a key: a file that can't be read or holds no
        key, a key that no client could send, an unknown scope, a key with two scopes, none for inference.
    """
    by_digest: dict[bytes, ApiKey] = {}
    for source, text in _sources(settings, environ):
        try:
            key = _parse(text)
            known = by_digest.setdefault(key.digest, key)
            if known != key:
                raise ValueError("the key was given before, with another scope")
        except ValueError as error:
            raise SettingsError(f"{source}: {error}.") from None
    keys = tuple(by_digest.values())
    if keys and all(key.scope != "inference" for key in keys):
        raise SettingsError(
            "All API keys have the scope metrics, so that nobody could use the model. Add one."
        )
    if settings.metrics_key and not keys:
        raise SettingsError(
            f"metrics_key is true, but there is no API key: set api_keys_file or {API_KEYS_VARIABLE}."
        )
    return keys


def _sources(settings: Settings, environ: Mapping[str, str] | None) -> list[tuple[str, str]]:
    """Where each key comes from, and its text with the scope."""
    found = []
    if settings.api_keys_file is not None:
        path = Path(settings.api_keys_file).expanduser()
        lines = enumerate(_read(path).splitlines(), 1)
        kept = [
            (f"{path}, line {i}", line) for i, line in lines if line.strip() and line.lstrip()[0] != "#"
        ]
        if not kept:
            raise SettingsError(
                f"api_keys_file: {path} holds no key. Write one a line, or unset the option."
            )
        found += kept
    if variable := read_api_keys_variable(environ):
        parts = [part for part in variable.split(",") if part.strip()]
        if not parts:
            raise SettingsError(f"{API_KEYS_VARIABLE} holds no key. Separate keys by commas, or unset it.")
        found += [(f"{API_KEYS_VARIABLE}, key {i}", part) for i, part in enumerate(parts, 1)]
    return found


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
        mode = path.stat().st_mode
    except OSError as error:
        raise SettingsError(f"api_keys_file: {path} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise SettingsError(f"api_keys_file: {path} is not a text file in UTF-8.") from None
    if mode & stat.S_IROTH:
        log.warning("%s holds API keys, and every user of this machine can read it; chmod o-r it", path)
    return text


def _parse(text: str) -> ApiKey:
    """Raises: ValueError, which does not show the text."""
    key, *scopes = text.split()
    if not (key.isascii() and key.isprintable()):
        raise ValueError("a key is made of visible ASCII characters")
    if len(scopes) > 1 or (scopes and scopes[0] not in SCOPES):
        raise ValueError(f"after the key stands nothing, or its scope: {' or '.join(SCOPES)}")
    scope: Scope = "metrics" if scopes == ["metrics"] else "inference"
    return ApiKey(digest_of(key.encode()), scope)
