"""All checks of a model folder before anything starts: its configuration, its weights and how it is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_train.checks.equivalence import compare_with_hugging_face, known_config
from skyrl_train.checks.weights import check_weights
from skyrl_train.hf.hub import local_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def checked_folder(key: str, path: str) -> tuple[str, PretrainedConfig]:
    """The folder and configuration of a model, which is downloaded if it is a hub name.

    Args: key and its value, path, for errors. Raises: ValueError that says what is wrong.
    """
    folder = local_folder(path)
    config = known_config(folder, key)
    check_weights(config, key, path, folder)
    compare_with_hugging_face(config, folder, key)
    return folder, config
