"""Fetches a model from the Hugging Face hub: the files that are needed and no others."""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from service.errors import DownloadError
from service.progress import Progress

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]
_SUBFOLDERS = ["*/*"]  # `*` of the patterns above goes through slashes
# of httpx or of its successor, as the version of huggingface_hub has it; its own errors derive from this
_TRANSPORT_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]


def is_hub_name(name: str) -> bool:
    """Whether a model's name is org/name."""
    return _NAME.fullmatch(name) is not None


def fetch_from_hub(
    name: str,
    *,
    revision: str | None,
    cache_dir: Path,
    token: str | None,
    offline: bool,
    progress: Progress,
    endpoint: str | None = None,
) -> Path:
    """Download what is missing of `name` and return its folder.

    `token`: None uses what `hf auth login` has stored. `endpoint`: another hub; None: HF_ENDPOINT or the
    public one.
    Raises: DownloadError, saying whether the model is unknown, needs a token, or can't be reached.
    """
    progress.phase(f"fetching {name} from the Hugging Face hub")
    options: dict[str, Any] = {"revision": revision, "token": token, "endpoint": endpoint}
    at_revision = f" at revision {revision}" if revision else ""
    try:
        folder = snapshot_download(
            name,
            cache_dir=cache_dir / "hub",
            allow_patterns=_WANTED,
            ignore_patterns=_SUBFOLDERS,
            local_files_only=offline,
            **options,
        )
        if not any(Path(folder).glob("*.safetensors")):
            files = (
                []
                if offline
                else HfApi(endpoint=endpoint, token=token).list_repo_files(name, revision=revision)
            )
            raise DownloadError(_without_weights(name, files))
    except GatedRepoError:
        raise DownloadError(
            f"{name} is gated: accept its terms on its page, then give a token that may read it (HF_TOKEN "
            "or --hf-token-file)."
        ) from None
    except RevisionNotFoundError:
        raise DownloadError(f"{name} has no revision {revision}.") from None
    except RepositoryNotFoundError:
        raise DownloadError(
            f"{name} is not on the hub, or is private: check the name, or give a token (HF_TOKEN or "
            "--hf-token-file). A local folder is named by its path, such as ./models/name."
        ) from None
    except LocalEntryNotFoundError as error:
        why = "offline is set" if offline else "the hub can't be reached"
        if isinstance(error.__cause__, HfHubHTTPError):
            why = f"the hub refused: {error.__cause__}"
        elif isinstance(error.__cause__, OfflineModeIsEnabled):
            why = "HF_HUB_OFFLINE is set"
        raise DownloadError(f"{name}{at_revision} is not in {cache_dir / 'hub'}, and {why}.") from None
    except HfHubHTTPError as error:
        raise DownloadError(f"The hub refused {name}{at_revision}: {error}") from None
    except (OSError, HFValidationError, _TRANSPORT_ERROR) as error:
        raise DownloadError(f"{name}{at_revision} could not be fetched: {error}.") from None
    return Path(folder)


def _without_weights(name: str, files: list[str]) -> str:
    if any(file.endswith(".gguf") for file in files):
        return f"{name} holds GGUF files only: download one of them and give its path to --model."
    return f"{name} has no model.safetensors; weights as pickles (.bin, .pt) are not loaded."
