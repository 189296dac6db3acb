"""Opens a model: reads headers and metadata, checks everything, and takes no memory yet."""

from pathlib import Path

import msgspec

from service.errors import ModelError
from service.model.config import ModelConfig, SamplingDefaults
from service.model.weights import WeightSource


class TokenizerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the text layer needs to make a tokenizer and a chat template."""

    tokenizer_json: str  # text of a `tokenizers` JSON
    chat_template: str | None = None  # Jinja
    bos_token: str | None = None
    eos_token: str | None = None
    add_bos_token: bool | None = None  # None: as the JSON's post-processor says
    special_tokens: tuple[str, ...] = ()


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is known to be whole."""

    path: Path
    config: ModelConfig
    sampling_defaults: SamplingDefaults
    tokenizer: TokenizerSpec
    weights: WeightSource
    num_parameters: int
    fingerprint: str  # stands for the weights: changes whenever they do
    group_sizes: dict[str, int] = {}  # of the tensors that are in INT8, by name


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face directory or a GGUF file.

    Raises: ModelError, naming file, tensor, found and wanted; UnsupportedModelError.
    """
    from service.model.gguf import open_gguf  # they build on this module
    from service.model.huggingface import open_directory

    if path.is_dir():
        return open_directory(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory.")
    if path.suffix.lower() in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        raise ModelError(
            f"{path} is a pickle, which can run code when it is loaded: use safetensors or GGUF."
        )
    if path.suffix.lower() == ".safetensors":
        return open_directory(path.parent)
    return open_gguf(path)
