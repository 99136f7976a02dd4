"""Before a run on GPUs starts: open keys are chosen from its forecast, which is reported, and a run that surely cannot
fit is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

from transformers import AutoConfig, PretrainedConfig

from skyrl_train.config import Config
from skyrl_train.config.training import RunConfig
from skyrl_train.device.kinds import DeviceKind
from skyrl_train.forecast import report
from skyrl_train.forecast.choices import chosen, chosen_for_evaluation
from skyrl_train.forecast.forecast import Inputs, forecast, workload_of
from skyrl_train.forecast.proposals import proposals
from skyrl_train.hf.hub import local_folder

C = TypeVar("C", bound=RunConfig)


def fitted(config: C, model: PretrainedConfig, kind: DeviceKind, say: Callable[[str], None]) -> C:
    """The configuration with all open keys chosen.

    Args: model: of the policy; say: gets the choices, memory and limits as a few lines. Raises: ValueError for a run
        that needs more memory than the device has, whatever the errors of the estimates.
    """
    given = Inputs(config, {config.trainer.policy.model.path: model} | _others(config), kind, workload_of(config))
    choices = chosen(given)
    made = forecast(replace(given, config=choices.config))
    if made.impossible:
        raise ValueError(report.refusal(made, proposals(given)))
    say(report.choices_line(choices))
    say(report.summary(made))
    return cast(C, choices.config)


def fitted_for_evaluation(
    config: Config, model: PretrainedConfig, kind: DeviceKind, say: Callable[[str], None]
) -> Config:
    """Like `fitted`, for engines alone; nothing is refused."""
    choices = chosen_for_evaluation(config, model, kind)
    if choices.made:
        say(report.choices_line(choices))
    return cast(Config, choices.config)


def _others(config: RunConfig) -> dict[str, PretrainedConfig]:
    """Configurations of the models that score, by their paths."""
    if not isinstance(config, Config):
        return {}
    paths = {model.model_path for model in config.trainer.scoring_models} - {config.trainer.policy.model.path}
    return {path: AutoConfig.from_pretrained(local_folder(path), trust_remote_code=False) for path in paths}
