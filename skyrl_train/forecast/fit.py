"""Before a run on GPUs starts: open keys are chosen from its forecast, which is reported, and a run that surely cannot
fit is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

from transformers import AutoConfig, PretrainedConfig

from skyrl_train.checks.equivalence import known_config
from skyrl_train.config import Config
from skyrl_train.config.training import RunConfig
from skyrl_train.device.kinds import DeviceKind
from skyrl_train.forecast import report
from skyrl_train.forecast.choices.chosen import chosen, chosen_for_evaluation
from skyrl_train.forecast.forecast import Inputs, forecast, workload_of
from skyrl_train.forecast.proposals import proposals
from skyrl_train.hf.hub import local_folder
from skyrl_train.hf.ledger import LEDGERS

C = TypeVar("C", bound=RunConfig)
FP8_CAPABILITY = 8.9
"""Compute capability from which GPUs multiply matrices in FP8."""


def fitted(
    config: C, model: PretrainedConfig, kind: DeviceKind, say: Callable[[str], None], *, any_samples: bool = False
) -> C:
    """The configuration with all open keys chosen.

    Args: model: of the policy; say: gets the choices, memory and limits as a few lines; any_samples: whether updates
        may have other numbers of samples than the configuration says. Raises: ValueError for a run
        that needs more memory than the device has, whatever the errors of the estimates, or that needs FP8 without it.
    """
    if isinstance(config, Config):
        require_fp8(config, kind)
    models = {config.trainer.policy.model.path: model} | other_models(config, lambda key, path: local_folder(path))
    given = Inputs(config, models, kind, workload_of(config), any_samples)
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
    """Like `fitted`, for engines alone, whatever memory they need."""
    require_fp8(config, kind)
    choices = chosen_for_evaluation(config, model, kind)
    if choices.made:
        say(report.choices_line(choices))
    return cast(Config, choices.config)


def require_fp8(config: Config, kind: DeviceKind) -> None:
    """Raises: ValueError for FP8 engines on GPUs that cannot compute in FP8."""
    generator = config.generator
    if generator.quantization == "fp8" and generator.run_engines_locally and kind.capability < FP8_CAPABILITY:
        raise ValueError(
            f"generator.quantization is fp8 and the GPUs are {kind.name}, of compute capability {kind.capability}: "
            f"FP8 needs at least {FP8_CAPABILITY} (such as L40S, H100 or later). Set generator.quantization=null"
        )


def other_models(config: RunConfig, find: Callable[[str, str], str]) -> dict[str, PretrainedConfig]:
    """Configurations of the models beside the policy, by their paths. A teacher on engines may be of any family that
    vLLM knows; it is left out if its sizes are not known here.

    Args: find: key and path of a model -> folder of its config.json.
    """
    if not isinstance(config, Config):
        return {}
    trainer, found = config.trainer, dict[str, PretrainedConfig]()
    for model in (*trainer.scoring_models, *trainer.engine_teachers):
        if (path := model.model_path) in {trainer.policy.model.path, *found}:
            continue
        folder = find(model.path_key, path)
        if model not in trainer.engine_teachers:
            found[path] = known_config(folder, model.path_key)
        elif PretrainedConfig.get_config_dict(folder)[0].get("model_type") in LEDGERS:
            found[path] = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return found
