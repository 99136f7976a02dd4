"""The forecast of a run before it starts: printed where the run uses GPUs of this machine, and refused if it surely
cannot fit.
"""

from __future__ import annotations

from rich.console import Console
from transformers import AutoConfig, PretrainedConfig

from skyrl_train.config import Config
from skyrl_train.config.training import RunConfig
from skyrl_train.device import device_type
from skyrl_train.device.kinds import this_device
from skyrl_train.forecast import report
from skyrl_train.forecast.forecast import Inputs, forecast, workload_of
from skyrl_train.forecast.proposals import proposals
from skyrl_train.hf.hub import local_folder


def print_forecast(config: RunConfig, model: PretrainedConfig, console: Console) -> None:
    """Print memory and limits in a few lines; without a GPU of a known kind on this machine, nothing.

    Args: model: of the policy. Raises: ValueError for a run that needs more memory than the device has, whatever the
    errors of the estimates.
    """
    kind = this_device() if device_type() == "cuda" else None
    if kind is None:
        return
    inputs = Inputs(config, {config.trainer.policy.model.path: model} | _others(config), kind, workload_of(config))
    made = forecast(inputs)
    if made.impossible:
        raise ValueError(report.refusal(made, proposals(inputs)))
    console.print(report.summary(made), highlight=False, soft_wrap=True, style="dim")


def _others(config: RunConfig) -> dict[str, PretrainedConfig]:
    """Configurations of the models that score, by their paths."""
    if not isinstance(config, Config):
        return {}
    paths = {model.model_path for model in config.trainer.scoring_models} - {config.trainer.policy.model.path}
    return {path: AutoConfig.from_pretrained(local_folder(path), trust_remote_code=False) for path in paths}
