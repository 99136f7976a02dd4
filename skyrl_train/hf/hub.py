"""Model folders: a local one, or that of a hub model in this node's cache.

A hub model is `NAME`, or `NAME@REVISION` with a branch, a tag or a commit. `download` puts it into the cache; nothing
here uses the network.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
"""Files of a model. Python files, such as a tokenizer's class, run only with trainer.trust_remote_code."""
TWICE = ["consolidated*"]
"""A second copy of the weights in Mistral's own format."""


def local_folder(path: str) -> str:
    """The absolute folder of a model on this node. Raises: ValueError if it is not there."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.is_dir() else _snapshot(path)


def seen_from_anywhere(path: str) -> str:
    """A folder's absolute path, for processes with other working directories; a hub name with the commit in this node's
    cache, so that all nodes have the same files. Another path is unchanged: `local_folder` reports that it is missing.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return str(folder.resolve())
    try:
        return f"{name_and_revision(path)[0]}@{Path(_snapshot(path)).name}"
    except ValueError:
        return path


def address_problem(key: str, path: str) -> str | None:
    """Sentence for a folder to write that is the address of a bucket; it would become a local folder of that name."""
    if not re.match(r"\w[\w+.-]*://", path):
        return None
    return f"{key} is {path}: only local or shared folders are written. Mount the bucket, or name a folder"


def name_and_revision(path: str) -> tuple[str, str | None]:
    """Both parts of a hub model; None means the default branch. A folder is its own name, also with an @."""
    if Path(path).expanduser().is_dir():
        return path, None
    name, _, revision = path.partition("@")
    return name, revision or None


def cache_folder() -> str:
    """Absolute folder of this process's cache of the hub."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return os.path.abspath(HF_HUB_CACHE)


def _snapshot(path: str) -> str:
    from huggingface_hub import snapshot_download

    name, revision = name_and_revision(path)
    try:
        return snapshot_download(
            name, revision=revision, allow_patterns=PATTERNS, ignore_patterns=TWICE, local_files_only=True
        )
    except (ValueError, OSError) as error:  # the library's own errors are subclasses
        raise ValueError(
            f"model {path!r} is neither a folder nor complete in this node's cache of the hub ({type(error).__name__})"
        ) from error
