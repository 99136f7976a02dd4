"""The parts of a run that need no process, with the tiny model."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from skyrl_train.config import ConfigError, load_config
from skyrl_train.entrypoints.experiment import Experiment
from skyrl_train.rollout.admission import Admission
from skyrl_train.rollout.contract import RolloutFailure
from skyrl_train.service.checks import checked_model
from skyrl_train.tasks.tiny import VOCABULARY
from skyrl_train.types import Group, Sample, SamplingParams
from tests.support.jobs import write_world
from tests.support.rollouts import Quiet, prompt, sample


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    world = write_world(tmp_path_factory.mktemp("experiment") / "world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(world)
        patch.syspath_prepend(str(world))
        return Experiment(load_config(["+experiment=tiny"], [world / "configs"]), Console(quiet=True))


@pytest.mark.parametrize("override", ["lora.rank=4", "lora.rank=0", "freeze_moe_router=true"])
def test_a_run_with_frozen_weights_remembers_those_of_its_model(override: str, experiment: Experiment):
    section = "model" if override.startswith("lora") else "megatron_config"
    trainer = load_config([f"trainer.policy.{section}.{override}"]).trainer
    run = copy.copy(experiment)
    run.config = replace(run.config, trainer=replace(run.config.trainer, policy=trainer.policy))
    run.find_checkpoint()
    assert (run.base["fingerprint"] is not None) == (override != "lora.rank=0")


def test_an_override_that_returns_nothing_is_an_error_that_names_it_and_what_it_must_return(experiment: Experiment):
    class Own(Experiment):
        def get_rollout(self, env_pool: Any) -> Any:
            super().get_rollout(env_pool)

        def get_hints(self) -> None:
            pass

        def get_answer(self) -> None:
            """Not a method of the base."""

    run: Any = copy.copy(experiment)
    run.__class__ = Own
    line = Own.get_rollout.__wrapped__.__code__.co_firstlineno  # type: ignore[attr-defined]
    what = r"it must return what Experiment.get_rollout returns, Rollout. Add its `return`"
    with pytest.raises(ValueError, match=rf"Own.get_rollout \({__file__}:{line}\) returned None: {what}"):
        run.get_rollout(None)
    assert run.get_hints() is None and run.get_answer() is None


def test_a_policy_with_another_norm_than_its_config_is_refused_before_the_start(experiment: Experiment):
    kwargs = "trainer.policy.megatron_config.transformer_config_kwargs"
    config = load_config([f"trainer.policy.model.path={experiment.model_folder}", f"{kwargs}.layernorm_epsilon=1.0"])
    expected = f"{kwargs}.layernorm_epsilon is 1.0: the config.json of {experiment.model_folder} has rms_norm_eps 1e-0"
    with pytest.raises(ConfigError, match=expected):
        Experiment(config, Console(quiet=True))
    with pytest.raises(ConfigError, match=expected):
        checked_model(config)


def test_a_token_beyond_the_models_vocabulary_is_a_failure_of_the_rollout_that_returned_it(
    experiment: Experiment,
):
    def collected(last: int) -> list[Group]:
        async def rollout(*_: Any) -> Sample:
            return replace(sample(1.0), token_ids=torch.tensor([4, 5, last]))

        collector, params = experiment.get_collector(None, rollout), SamplingParams(max_generate_length=4)  # type: ignore[arg-type]
        return asyncio.run(collector.collect([prompt("a")], 1, params, Quiet(), Admission(0)))

    size = len(VOCABULARY)
    with pytest.raises(
        RolloutFailure, match=rf"prompt a.*has token id {size}: .* has {size} tokens, from 0 to {size - 1}"
    ):
        collected(size)
    assert len(collected(size - 1)) == 1
