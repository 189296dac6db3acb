"""Opens a model directory as Hugging Face lays it out."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from service.errors import ModelError
from service.model.checkpoint import Checkpoint, TokenizerSpec
from service.model.config import parse_config, parse_sampling_defaults
from service.model.quantization import QuantizedTensors, read_scheme
from service.model.safetensors_file import SafetensorsFile
from service.model.weights import NamedWeights, check_shapes, wanted_shapes

_INDEX = "model.safetensors.index.json"


def open_directory(directory: Path) -> Checkpoint:
    """Raises: ModelError, naming file, tensor, found and wanted."""
    raw = _read_json(directory / "config.json")
    generation = _read_json(directory / "generation_config.json", optional=True)
    config = parse_config(raw, generation, str(directory / "config.json"))
    files = [SafetensorsFile(path) for path in _weight_files(directory)]
    where = {name: file for file in files for name in file.shapes}
    shapes = {name: shape for file in files for name, shape in file.shapes.items()}
    paths = {name: str(file.path) for name, file in where.items()}
    scheme = read_scheme(raw, str(directory / "config.json"))
    quantized = QuantizedTensors(scheme, shapes, lambda name: where[name].tensor(name), str(directory))
    num_parameters = check_shapes(config, quantized.shapes, str(directory), paths)
    needed = {part for name in wanted_shapes(config) for part in quantized.files(name)}
    packed = {part for name in quantized.group_sizes for part in quantized.files(name)}
    for name in packed - where.keys():
        raise ModelError(f"{directory}: the tensor {name} is missing; config.json says it is quantised.")
    for file in files:
        file.check_dtypes(needed, packed)

    return Checkpoint(
        path=directory,
        config=config,
        sampling_defaults=parse_sampling_defaults(generation, str(directory / "generation_config.json")),
        tokenizer=read_tokenizer(directory),
        weights=NamedWeights(config, quantized),
        num_parameters=num_parameters,
        fingerprint=_fingerprint(raw, files),
        group_sizes=quantized.group_sizes,
    )


def _weight_files(directory: Path) -> list[Path]:
    """The shards that the index names, or the single file."""
    if (directory / _INDEX).exists():
        weight_map = _read_json(directory / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{directory / _INDEX}: there is no weight_map.")
        for name in weight_map.values():
            if not isinstance(name, str) or Path(name).name != name:
                raise ModelError(f"{directory / _INDEX}: {name!r} is no name of a file beside it.")
        names = sorted(set(weight_map.values()))
        for name in names:
            if not (directory / name).is_file():
                raise ModelError(f"{directory / name} is missing; the index {_INDEX} names it.")
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")) or any(directory.glob("*.pth")):
        raise ModelError(
            f"{directory} holds weights as pickles only, which can run code when they are loaded: "
            "convert them to safetensors."
        )
    raise ModelError(f"{directory}: there is neither model.safetensors nor {_INDEX}.")


def read_tokenizer(location: Path) -> TokenizerSpec:
    """The tokenizer in a model's directory, or of a tokenizer.json with its companions beside it.

    Raises: ModelError, naming the file that is missing or damaged.
    """
    directory = location if location.is_dir() else location.parent
    path = directory / "tokenizer.json" if location.is_dir() else location
    if not path.is_file():
        raise ModelError(f"{path} is missing: the tokenizer is needed in the format of `tokenizers`.")
    config = _read_json(directory / "tokenizer_config.json", optional=True)
    template_file = directory / "chat_template.jinja"
    template = (
        _read_text(template_file) if template_file.is_file() else _template(config.get("chat_template"))
    )
    special = _read_json(directory / "special_tokens_map.json", optional=True)
    named = {**special, **{key: value for key, value in config.items() if value is not None}}
    extra = named.get("additional_special_tokens")
    extra = extra if isinstance(extra, list) else []
    tokens = [_content(value) for key, value in named.items() if key.endswith("_token")]
    return TokenizerSpec(
        tokenizer_json=_read_text(path),
        chat_template=template,
        bos_token=_content(named.get("bos_token")),
        eos_token=_content(named.get("eos_token")),
        add_bos_token=config.get("add_bos_token")
        if isinstance(config.get("add_bos_token"), bool)
        else None,
        special_tokens=tuple(dict.fromkeys(t for t in [*tokens, *map(_content, extra)] if t)),
    )


def _content(token: Any, key: str = "content") -> str | None:
    """Tokens are strings, or objects with a content."""
    if isinstance(token, Mapping):
        token = token.get(key)
    return token if isinstance(token, str) else None


def _template(value: Any) -> str | None:
    """A template is a string, or a list of named ones, of which "default" is meant."""
    if isinstance(value, list):
        value = next(
            (_content(item, "template") for item in value if _content(item, "name") == "default"), None
        )
    return value if isinstance(value, str) else None


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} can't be read as text: {error}.") from None
    if text.startswith("version https://git-lfs"):
        raise ModelError(f"{path} is a Git LFS pointer, not the file: run `git lfs pull` there.")
    return text


def _read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if optional:
            return {}
        raise ModelError(f"{path} is missing.")
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON ({error}).") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; an object is wanted.")
    return value


def _fingerprint(raw: Mapping[str, Any], files: list[SafetensorsFile]) -> str:
    """Of the config, and of every file's name, length and time of change: reading all takes long."""
    digest = hashlib.blake2b(msgspec.json.encode(raw, order="deterministic"), digest_size=16)
    for file in files:
        stat = file.path.stat()
        digest.update(f"{file.path.name}:{stat.st_size}:{stat.st_mtime_ns}".encode())
    return digest.hexdigest()
