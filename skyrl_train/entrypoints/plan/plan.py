"""Forecast the memory and time of a run without a GPU, and propose a layout.

    python -m skyrl_train.entrypoints.plan [+experiment=NAME] plan.device=h200 [key=value ...]

It reads the configuration of a training run and its model's config.json alone (a folder or a hub name; plan.shape for a
known shape). Memory is counted from what the code allocates; times are estimates from measured utilisation.
Exit code: 0 fits, 1 may not fit or does not fit, 2 invalid configuration.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from transformers import PretrainedConfig

from skyrl_train.checks.engines import check_vllm
from skyrl_train.checks.equivalence import known_config
from skyrl_train.checks.model import model_problems
from skyrl_train.checks.training import MODEL
from skyrl_train.config import ConfigError
from skyrl_train.config.rl import PLAN, PlanConfig
from skyrl_train.device.kinds import DeviceKind, device_kind, device_kinds, this_device
from skyrl_train.entrypoints.command import guarded
from skyrl_train.forecast import report
from skyrl_train.forecast.choices.chosen import chosen
from skyrl_train.forecast.fit import other_models, require_fp8
from skyrl_train.forecast.forecast import Inputs, forecast, workload_of
from skyrl_train.forecast.parts import ENGINE
from skyrl_train.forecast.proposals import problems, proposals
from skyrl_train.forecast.shapes import model_config, shapes
from skyrl_train.hf.download import config_folder
from skyrl_train.tracking.writable import require_file
from skyrl_train.trainer.build import teacher_max_model_len


def main(argv: Sequence[str]) -> int:
    """Print the forecast of a command line and return the exit code."""
    errors = (ValueError, OSError)
    return guarded(lambda: plan(PLAN.read(argv or ["--help"]), Console()), Console(stderr=True), errors)


def plan(config: PlanConfig, console: Console) -> int:
    """Print memory, times, limits and proposals; 0 if the run fits for sure."""
    require_file("plan.json_file", config.plan.json_file)
    workload = workload_of(config, config.plan.prompt_tokens, config.plan.response_tokens)
    given = Inputs(config, _models(config), _device(config), workload)
    if found_problems := problems(given):
        raise ConfigError(found_problems)
    check_vllm(config, given.model, "cuda")
    teacher_max_model_len(config, given.model)
    require_fp8(config, given.device)
    choices = chosen(given)
    inputs = replace(given, config=choices.config)
    made = forecast(inputs)
    console.print(report.introduction(inputs, made), highlight=False, soft_wrap=True)
    console.print(report.choices_line(choices), highlight=False, soft_wrap=True, markup=False)
    console.print(report.memory_table(made))
    console.print(report.time_table(made))
    console.print(report.limits(made), highlight=False, soft_wrap=True)
    of_engines = [phase for phase in made.phases if phase.device == ENGINE or phase.phase == "generation"]
    found = proposals(given) if config.plan.propose else []
    if found:
        console.print(report.proposal_table(found))
        console.print(report.proposal_lines(found), highlight=False, soft_wrap=True, markup=False)
    elif config.plan.propose and any(phase.high > made.capacity for phase in of_engines):
        text = f"An engine may not fit. {report.OF_ENGINES}"
        console.print(text, highlight=False, soft_wrap=True)
    elif config.plan.propose:
        console.print("No layout of up to 64 GPUs fits for sure", highlight=False)
    if config.plan.json_file is not None:
        Path(config.plan.json_file).write_text(json.dumps(report.numbers(made, choices, found), indent=1))
    return 0 if made.fits and not made.uncounted else 1


def _models(config: PlanConfig) -> dict[str, PretrainedConfig]:
    """Configurations of all models, by their paths; a shape replaces the policy's."""
    policy, shape = config.trainer.policy.model.path, config.plan.shape
    if shape is None and config.plan.num_layers is not None:
        raise ConfigError(
            [
                f"plan.num_layers is {config.plan.num_layers} and plan.shape is null: it is the number of layers of a "
                "shape. Set plan.shape, or remove plan.num_layers"
            ]
        )
    if shape is None:
        if found_problems := list(model_problems(config)):
            raise ConfigError(found_problems)
        own = known_config(config_folder(MODEL, policy), MODEL)
    elif shape in shapes():
        own = model_config(shape, config.plan.num_layers)
    else:
        raise ConfigError([f"plan.shape is {shape}: there is no such shape. Choose one of {', '.join(shapes())}"])
    return {policy: own} | other_models(config, config_folder)


def _device(config: PlanConfig) -> DeviceKind:
    """The kind of `plan.device`, or of this machine's first GPU with the memory that it has."""
    known = ", ".join(name.lower() for name in device_kinds())
    if config.plan.device is not None:
        kind = device_kind(config.plan.device)
        if kind is None:
            raise ConfigError([f"plan.device is {config.plan.device}: an unknown kind of GPU. Choose one of {known}"])
        return kind
    kind = this_device()
    if kind is None:
        raise ConfigError([f"plan.device is null: this machine has no GPU of a known kind. Set it to one of {known}"])
    return kind
