"""From what a user calls a model to an opened checkpoint."""

from contextlib import suppress
from pathlib import Path

import msgspec

from service.environment import read_hf_token
from service.errors import DownloadError, ModelError
from service.model.checkpoint import Checkpoint, open_checkpoint
from service.model.default_model import fetch_default_model
from service.model.hub import fetch_from_hub, is_hub_name
from service.model.huggingface import read_tokenizer
from service.model.weight_cache import open_gguf_cached
from service.progress import NoProgress, Progress
from service.settings import Settings


def find_model(settings: Settings, progress: Progress) -> Checkpoint:
    """Fetch the model if it is not here, and open it.

    A path that exists goes before a name on the hub.
    Raises: ModelError and its kinds.
    """
    path = fetch_model(settings, progress)
    progress.phase(f"opening {path.name}")
    if path.is_file() and path.suffix == ".gguf" and settings.weight_cache:
        checkpoint = open_gguf_cached(path, settings.cache_path, settings.shared_cache_path)
    else:
        checkpoint = open_checkpoint(path)
    if settings.tokenizer is None:
        return checkpoint
    return msgspec.structs.replace(
        checkpoint, tokenizer=read_tokenizer(Path(settings.tokenizer).expanduser())
    )


def fetch_model(settings: Settings, progress: Progress) -> Path:
    """The model's file or folder on this machine. Raises: DownloadError, ModelError."""
    if settings.model is not None:
        path = Path(settings.model).expanduser()
        if path.exists():
            return path
        if not is_hub_name(settings.model):
            raise ModelError(
                f"{settings.model}: no such file or directory, and no name on the hub (org/name) either."
            )
    shared = settings.shared_cache_path
    if shared is not None:
        with suppress(DownloadError):  # it is not there
            return _fetch_into(shared, settings, NoProgress(), offline=True)
    return _fetch_into(settings.cache_path, settings, progress, offline=settings.offline)


def _fetch_into(cache_dir: Path, settings: Settings, progress: Progress, *, offline: bool) -> Path:
    if settings.model is None:
        return fetch_default_model(cache_dir, progress, offline)
    return fetch_from_hub(
        settings.model,
        revision=settings.revision,
        cache_dir=cache_dir,
        token=read_hf_token(settings),
        offline=offline,
        progress=progress,
    )
