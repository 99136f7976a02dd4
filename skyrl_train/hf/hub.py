"""Model folders: a local one, or a hub model downloaded once per node."""

from __future__ import annotations

from pathlib import Path

PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
TWICE = ["consolidated*"]
"""A second copy of the weights in Mistral's own format."""


def local_folder(path: str) -> str:
    """The absolute folder of a model; a hub name is downloaded into the hub's cache.

    Processes of a node may call it concurrently: the hub library locks each file. Raises: ValueError.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return str(folder.resolve())
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(path, allow_patterns=PATTERNS, ignore_patterns=TWICE)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"model {path!r} is neither a folder nor can it be downloaded from the hub ({type(error).__name__}). Name "
            "the folder of a Hugging Face checkpoint, or check the hub name and the network"
        ) from error


def seen_from_anywhere(path: str) -> str:
    """A folder's absolute path, for processes with other working directories; hub names are returned unchanged."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.is_dir() else path
