"""Reinforcement learning of language models with Ray, Megatron-core and vLLM.

`load_config`, `run` and `await run_async` train from a script or a notebook. They are imported when they are used: it
takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyrl_train.compat.finder import install

if TYPE_CHECKING:
    from skyrl_train.api import load_config, run, run_async
    from skyrl_train.config import ConfigError
    from skyrl_train.entrypoints.experiment import Experiment

    __version__: str

__all__ = ["ConfigError", "Experiment", "load_config", "run", "run_async", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version

        return version("skyrl_train")
    from skyrl_train import api, config

    return getattr(config if name == "ConfigError" else api, name)


install()  # modules of skyrl_train 0.4
