"""Before a run on GPUs of this machine starts: open keys are chosen from its forecast, which is printed, and a run that
surely cannot fit is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar, cast

from rich.console import Console
from transformers import AutoConfig, PretrainedConfig

from skyrl_train.config import Config
from skyrl_train.config.training import RunConfig
from skyrl_train.device import device_type
from skyrl_train.device.kinds import this_device
from skyrl_train.forecast import report
from skyrl_train.forecast.choices import chosen
from skyrl_train.forecast.forecast import Inputs, forecast, workload_of
from skyrl_train.forecast.proposals import proposals
from skyrl_train.hf.hub import local_folder

C = TypeVar("C", bound=RunConfig)


def fitted(config: C, model: PretrainedConfig, console: Console) -> C:
    """The configuration with all open keys chosen; the choices, memory and limits are printed in a few lines. Without a
    GPU of a known kind on this machine nothing is chosen or printed.

    Args: model: of the policy. Raises: ValueError for a run that needs more memory than the device has, whatever the
    errors of the estimates.
    """
    kind = this_device() if device_type() == "cuda" else None
    if kind is None:
        return config
    given = Inputs(config, {config.trainer.policy.model.path: model} | _others(config), kind, workload_of(config))
    choices = chosen(given)
    made = forecast(replace(given, config=choices.config))
    if made.impossible:
        raise ValueError(report.refusal(made, proposals(given)))
    for text in (report.choices_line(choices), report.summary(made)):
        console.print(text, highlight=False, soft_wrap=True, style="dim", markup=False)
    return cast(C, choices.config)


def _others(config: RunConfig) -> dict[str, PretrainedConfig]:
    """Configurations of the models that score, by their paths."""
    if not isinstance(config, Config):
        return {}
    paths = {model.model_path for model in config.trainer.scoring_models} - {config.trainer.policy.model.path}
    return {path: AutoConfig.from_pretrained(local_folder(path), trust_remote_code=False) for path in paths}
