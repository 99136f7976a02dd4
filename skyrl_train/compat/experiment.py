"""skyrl_train 0.4's experiment, whose hooks become the parts of a run of this project."""

from __future__ import annotations

import copy
import dataclasses
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from skyrl_train.checks.training import data_file_problems
from skyrl_train.compat.generators.client import InferenceEngineClient
from skyrl_train.compat.generators.environments import SkyRLGymGenerator
from skyrl_train.compat.settings import config_of, translate_arguments
from skyrl_train.compat.trainer import (
    REPLACED,
    REPLACED_IN_ASYNC,
    FullyAsyncRayPPOTrainer,
    RayPPOTrainer,
    overridden,
    refuse,
)
from skyrl_train.config import Config, ConfigError
from skyrl_train.entrypoints import command
from skyrl_train.entrypoints.main_base import COMMAND
from skyrl_train.faults import require_returns
from skyrl_train.hf.download import download
from skyrl_train.hf.hub import local_folder

if TYPE_CHECKING:
    from skyrl_train.compat.dataset import PromptDataset
    from skyrl_train.entrypoints.experiment import Experiment

HOOKS = {
    "get_colocate_pg": "devices follow trainer.placement",
    **dict.fromkeys(
        ("get_inference_client", "_get_legacy_inference_client", "_get_new_inference_client"),
        "engines follow generator; for another kind set generator.backend=module:attribute",
    ),
    "get_tracker": "set trainer.logger, which also takes your own module:Class (docs/extending.md#sink)",
}
"""Method of BasePPOExp -> what replaces it."""
GENERATOR_HOOKS = {
    name: "override agent_loop, or write a rollout (generator.rollout)"
    for name in (
        *("generate_batched", "get_obs_ids_from_obs", "_build_per_token_rewards", "_zero_reward_if_not_stop"),
        *("_run_in_executor_if_available", "_update_chat_history"),
        "_update_agent_state_by_retokenizing_chat_history",
        "_update_agent_loop_state_with_multiturn_chat_template",
        "_update_agent_loop_state_with_singleturn_chat_template",
    )
}


class BasePPOExp:  # the program that starts Ray imports it too: what only a run needs, 4 s of imports, is in `run`
    """An experiment. Override `get_train_dataset`, `get_eval_dataset`, `get_tokenizer`, `get_generator`, `get_trainer`.

    Attributes: cfg, tokenizer, train_dataset, eval_dataset.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        require_returns(cls)

    def __init__(self, cfg: DictConfig) -> None:
        """Raises: ConfigError; NotImplementedError for overridden methods that are not served."""
        refuse(type(self), BasePPOExp, HOOKS)
        self.cfg = cfg
        self._config = config_of(cfg)
        self._command = dataclasses.replace(COMMAND, check=self._check)
        command.prepare(self._command, self._config)
        self._check(self._config, None)
        self.tokenizer = self.get_tokenizer()
        self.train_dataset = self.get_train_dataset()
        self.eval_dataset = self.get_eval_dataset()
        self.colocate_pg = None

    def _check(self, config: Config, num_train_prompts: int | None, files: bool = True) -> None:
        """Raises: ConfigError; a `get_train_dataset` of a subclass reads data.train_data in its own way."""
        try:
            COMMAND.check(config, num_train_prompts, files)
        except ConfigError as error:
            reads_itself = overridden(type(self), BasePPOExp, "get_train_dataset")
            ignored = set(data_file_problems(config.data)) if reads_itself else set()
            if problems := [each for each in error.problems if each not in ignored]:
                raise ConfigError(problems) from error

    @staticmethod
    def get_cfg_as_str(cfg: DictConfig) -> str:
        return OmegaConf.to_yaml(cfg)

    def get_tokenizer(self, padding_side: str = "left") -> Any:
        from skyrl_train.checks.tokenizer import load_tokenizer

        trainer = self._config.trainer
        key, path = "trainer.policy.model.path", trainer.policy.model.path
        download(key, path, trainer.download_timeout_s)
        tokenizer = load_tokenizer(local_folder(path), key, trainer.trust_remote_code)
        tokenizer.padding_side = padding_side
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer

    def get_train_dataset(self) -> Any | None:
        """Rows as (messages, env_class, extras, uid); None where nothing is trained."""
        return self._dataset(self._config.data.train_data)

    def get_eval_dataset(self) -> Any | None:
        """Like `get_train_dataset`; None without held-out rows."""
        sources = self._config.data.val_data
        return self._dataset(sources) if sources else None

    def _dataset(self, sources: tuple[str, ...]) -> PromptDataset:
        from skyrl_train.compat.dataset import PromptDataset
        from skyrl_train.data.prompts import configured_prompts

        return PromptDataset.of(configured_prompts(self._config, self.tokenizer, sources))

    def get_generator(self, cfg: DictConfig, tokenizer: Any, inference_engine_client: InferenceEngineClient) -> Any:
        return SkyRLGymGenerator(
            generator_cfg=cfg.generator,
            skyrl_gym_cfg=cfg.environment.skyrl_gym,
            inference_engine_client=inference_engine_client,
            tokenizer=tokenizer,
            model_name=cfg.trainer.policy.model.path,
        )

    def get_trainer(self, *arguments: Any, **named: Any) -> RayPPOTrainer:
        return RayPPOTrainer(*arguments, **named)

    def _setup_trainer(self) -> RayPPOTrainer:
        """The trainer, with which `asyncio.run(trainer.train())` runs the experiment."""
        client = InferenceEngineClient(self.tokenizer, self.cfg.trainer.policy.model.path)
        generator = self.get_generator(self.cfg, self.tokenizer, client)
        trainer = self.get_trainer(
            cfg=self.cfg,
            tracker=None,
            tokenizer=self.tokenizer,
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            inference_engine_client=client,
            generator=generator,
            colocate_pg=None,
        )
        refuse(type(trainer), RayPPOTrainer, REPLACED)
        if isinstance(trainer, FullyAsyncRayPPOTrainer):
            refuse(type(trainer), FullyAsyncRayPPOTrainer, REPLACED_IN_ASYNC)
        if isinstance(generator, SkyRLGymGenerator):
            refuse(type(generator), SkyRLGymGenerator, GENERATOR_HOOKS)
        trainer.start = partial(self._train, trainer)
        return trainer

    def run(self) -> None:
        """Train. Raises: the error of a failed run; KeyboardInterrupt if interrupted."""
        trainer = self._setup_trainer()
        assert trainer.start is not None
        trainer.start()

    def _train(self, trainer: RayPPOTrainer) -> None:
        from skyrl_train.compat.run import HookedRun

        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
        logging.getLogger("skyrl_train").setLevel(logging.INFO)
        config = of_trainer(self.cfg, trainer)
        self._check(config, None)
        kind = cast("type[Experiment]", partial(HookedRun, self, trainer))
        interrupts = command.Interrupts()
        work = partial(command.run, dataclasses.replace(self._command, run=kind), config, Console(), interrupts)
        ended = command.beside_a_running_loop(work, interrupts)
        if ended.error is not None:
            raise ended.error
        if ended.code:
            raise KeyboardInterrupt


def of_trainer(cfg: DictConfig, trainer: RayPPOTrainer) -> Config:
    """The configuration that a trainer of 0.4 asks for. Its own postprocessing replaces the penalty of long responses,
    which is a key that it reads, and gets rewards that are zeroed already.
    """
    cfg = copy.deepcopy(cfg)  # with its interpolations: some defaults follow the source
    if trainer.source is not None and cfg.trainer.source == "on_policy":
        cfg.trainer.source = trainer.source
    if trainer.postprocesses:
        cfg.trainer.algorithm.overlong_buffer.len = None
        cfg.generator.zero_reward_on_non_stop = False
    return config_of(cfg)


translate_arguments()
