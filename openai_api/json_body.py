"""Body of a request -> JSON object, strictly. All that is wrong ends in a 400 or 415 that says what."""

import json
import re
from typing import Any, NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import Request

from service.errors import RequestError

_BOM = b"\xef\xbb\xbf"
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


async def read_object(http: Request) -> dict[str, Any]:
    """Read the body.

    Strict where leniency would hide a mistake: a key twice in one object, NaN and Infinity are refused.
    Half of a surrogate pair (clients that cut a text within an emoji send it) becomes U+FFFD, everywhere.
    A missing Content-Type is taken as JSON; another one is refused, which also keeps web pages of
    other origins from posting here without a preflight.
    Raises: HTTPException 415 (type or encoding of the body), RequestError.
    """
    _check_headers(http)
    return parse_object(await http.body())


def _check_headers(http: Request) -> None:
    kind, _, options = http.headers.get("content-type", "application/json").partition(";")
    kind, options = kind.strip().lower(), options.lower()
    is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    if not is_json or ("charset" in options and "utf-8" not in options):
        raise HTTPException(415, "Send the body as JSON, with the header Content-Type: application/json.")
    if http.headers.get("content-encoding", "identity").lower() not in ("identity", ""):
        raise HTTPException(415, "Compressed bodies are not taken; send without Content-Encoding.")


def parse_object(body: bytes) -> dict[str, Any]:
    """Raises: RequestError."""
    if not body.strip():
        raise RequestError("The body is empty; send a JSON object.")
    try:
        # bytes that are not UTF-8, and integers of thousands of digits, are ValueErrors too
        parsed = _DECODER.decode(body.removeprefix(_BOM).decode())
        if _SURROGATE_ESCAPE.search(body):
            parsed = _well_formed(parsed)
    except json.JSONDecodeError as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"The body is not UTF-8: invalid byte at {error.start}.") from None
    except ValueError:
        raise RequestError("The body is not valid JSON: a number has too many digits.") from None
    except RecursionError:
        raise RequestError("The body is nested too deeply.") from None
    if not isinstance(parsed, dict):
        raise RequestError("The body must be a JSON object, such as {...}.")
    return parsed


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        twice = _SURROGATE.sub("\ufffd", twice)
        raise RequestError(f"The body has the key {shown(twice)} twice in one object.", field=twice)
    return parsed


def _no_constant(name: str) -> NoReturn:
    raise RequestError(f"The body is not valid JSON: {name} is not a JSON number.")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant)


def _well_formed(value: Any) -> Any:
    """The same value, with U+FFFD for every lone surrogate in its strings and keys."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_well_formed(each) for each in value]
    if isinstance(value, dict):
        return {_well_formed(key): _well_formed(each) for key, each in value.items()}
    return value


def shown(value: Any) -> str:
    """A client's value for an error message: as JSON, on one line, not long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
