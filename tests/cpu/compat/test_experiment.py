"""Methods of 0.4's classes that are not served, and the configuration of a run with a trainer of 0.4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from skyrl_train.fully_async_trainer import FullyAsyncRayPPOTrainer

from skyrl_train.compat.experiment import GENERATOR_HOOKS, HOOKS, of_trainer
from skyrl_train.compat.generators.environments import SkyRLGymGenerator
from skyrl_train.compat.trainer import REPLACED, REPLACED_IN_ASYNC, refuse
from skyrl_train.config import ConfigError
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.trainer import RayPPOTrainer
from tests.support.hydra_main import composed

PAGE = (Path(__file__).parents[3] / "docs/skyrl_train_04.md").read_text()
REFUSED = [
    (base, table, name)
    for base, table in (
        (BasePPOExp, HOOKS),
        (RayPPOTrainer, REPLACED),
        (FullyAsyncRayPPOTrainer, REPLACED_IN_ASYNC),
        (SkyRLGymGenerator, GENERATOR_HOOKS),
    )
    for name in table
]


@pytest.mark.parametrize(("base", "table", "name"), REFUSED, ids=[name for *_, name in REFUSED])
def test_an_overridden_method_that_is_not_served_is_an_error_that_the_page_has(base: type, table: dict, name: str):
    own = type("Own", (type("Mixin", (), {name: print}), base), {})
    with pytest.raises(NotImplementedError) as error:
        refuse(own, base, table)
    assert f"Own.{name}: {table[name]}" in str(error.value)
    (row,) = [line for line in PAGE.splitlines() if f"`{name}`" in line and f"of `{base.__name__}`" in line]
    assert row.endswith(f"| {table[name]} |")


def test_a_method_of_0_4_that_is_called_is_an_error_with_what_replaces_it():
    trainer: Any = trainer_of(RayPPOTrainer, composed())
    with pytest.raises(NotImplementedError, match=r"RayPPOTrainer.save_models is not served: the run builds"):
        trainer.save_models()
    assert not hasattr(trainer, "other")


def test_an_experiment_refuses_methods_of_its_generator_and_of_its_asynchronous_trainer():
    def experiment(generator: dict[str, Any], trainer: dict[str, Any], base: type = FullyAsyncRayPPOTrainer) -> Any:
        class Own(BasePPOExp):
            def __init__(self) -> None:
                self.cfg, self.tokenizer, self.train_dataset, self.eval_dataset = composed(), None, [], None

            def get_generator(self, cfg: Any, *arguments: Any) -> Any:
                return type("OwnGenerator", (SkyRLGymGenerator,), generator)(cfg.generator, None, None, None, "model")

            def get_trainer(self, *arguments: Any, **named: Any) -> RayPPOTrainer:
                return type("OwnTrainer", (base,), trainer)(*arguments, **named)

        return Own()

    with pytest.raises(NotImplementedError, match=r"OwnTrainer._run_training: the run has its own loop"):
        experiment({}, {"_run_training": print})._setup_trainer()
    with pytest.raises(NotImplementedError, match=r"OwnGenerator._zero_reward_if_not_stop: override agent_loop"):
        experiment({"_zero_reward_if_not_stop": print}, {})._setup_trainer()
    experiment({}, {"_run_training": print}, RayPPOTrainer)._setup_trainer()  # a name of its own


def test_a_hook_that_returns_nothing_is_named():
    class Own(BasePPOExp):
        def get_generator(self, *arguments: Any) -> None:
            pass

        def get_eval_dataset(self) -> None:
            pass

    own: Any = object.__new__(Own)
    with pytest.raises(ValueError, match=r"Own.get_generator .* returned None: it must return what BasePPOExp.get_gen"):
        own.get_generator()
    assert own.get_eval_dataset() is None


def test_the_hooks_that_are_served_are_not_refused():
    own = type("Own", (RayPPOTrainer,), {"postprocess_generator_output": print, "mine": print})
    refuse(own, RayPPOTrainer, REPLACED)
    served = ("get_tokenizer", "get_train_dataset", "get_eval_dataset", "get_generator", "get_trainer", "run")
    refuse(type("Own", (BasePPOExp,), dict.fromkeys(served, print)), BasePPOExp, HOOKS)


def test_the_asynchronous_trainer_streams_with_the_corrections_of_stale_samples():
    cfg = composed()
    assert of_trainer(cfg, trainer_of(RayPPOTrainer, cfg)).trainer.source == "on_policy"
    streaming = of_trainer(cfg, trainer_of(FullyAsyncRayPPOTrainer, cfg)).trainer
    assert streaming.source == "streaming" and streaming.algorithm.corrections == ("token_tis",)
    own = composed("trainer.source=own:Source")
    assert of_trainer(own, trainer_of(FullyAsyncRayPPOTrainer, own)).trainer.source == "own:Source"


def test_data_sources_are_checked_unless_the_experiment_reads_them_itself():
    cfg = composed("data.train_data=[tasks]", "trainer.train_batch_size=7")
    with pytest.raises(ConfigError, match=r"data.train_data contains tasks"):
        BasePPOExp(cfg)
    with pytest.raises(ConfigError) as error:
        type("Own", (BasePPOExp,), {"get_train_dataset": print})(cfg)
    assert "train_data" not in str(error.value) and "trainer.train_batch_size" in str(error.value)


def test_a_trainer_that_postprocesses_gets_zeroed_rewards_and_applies_the_penalty_of_long_responses_itself():
    class Own(RayPPOTrainer):
        def postprocess_generator_output(self, generator_output: Any, uids: list[str]) -> Any:
            return generator_output

    cfg = composed("trainer.algorithm.overlong_buffer.len=4", "generator.zero_reward_on_non_stop=true")
    trainer = trainer_of(Own, cfg)
    config = of_trainer(cfg, trainer)
    assert config.trainer.algorithm.overlong_buffer.len is None and not config.generator.zero_reward_on_non_stop
    assert trainer.cfg.trainer.algorithm.overlong_buffer.len == 4


def trainer_of(kind: type[RayPPOTrainer], cfg: Any) -> RayPPOTrainer:
    return kind(cfg, None, None, None, None, None)
