"""skyrl_train 0.4's experiment, whose hooks become the parts of a run of this project."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from skyrl_train.checks.tokenizer import load_tokenizer
from skyrl_train.compat.dataset import PromptDataset, prompts_of
from skyrl_train.compat.generators.client import InferenceEngineClient
from skyrl_train.compat.generators.collector import GeneratorCollector, Postprocessed, needs_logprobs
from skyrl_train.compat.generators.environments import SkyRLGymGenerator
from skyrl_train.compat.settings import config_of, translate_arguments
from skyrl_train.compat.trainer import REPLACED, RayPPOTrainer, overridden, refuse
from skyrl_train.config import Config, config_dir
from skyrl_train.entrypoints import command
from skyrl_train.entrypoints.experiment import Experiment
from skyrl_train.entrypoints.main_base import COMMAND
from skyrl_train.entrypoints.run import MODEL
from skyrl_train.hf.hub import local_folder
from skyrl_train.rollout.collect import Collector
from skyrl_train.rollout.contract import Rollout
from skyrl_train.rollout.source import GroupSource, SourceParts
from skyrl_train.trainer.trainer import Parts, Trainer
from skyrl_train.types import Generate, Metrics, Prompt

log = logging.getLogger(__name__)
__all__ = ["BasePPOExp", "config_dir"]
HOOKS = {
    "get_colocate_pg": "devices follow trainer.placement",
    "get_inference_client": "engines follow generator; for another kind set generator.backend=module:attribute",
    "get_tracker": "set trainer.logger, or override get_tracker of skyrl_train.Experiment",
}
"""Method of BasePPOExp -> what replaces it."""
GENERATOR_HOOKS = {
    name: "override agent_loop, or write a rollout (generator.rollout)"
    for name in ("generate_batched", "get_obs_ids_from_obs", "_build_per_token_rewards")
}


class BasePPOExp:
    """An experiment. Override `get_train_dataset`, `get_eval_dataset`, `get_tokenizer`, `get_generator`, `get_trainer`.

    Attributes: cfg, tokenizer, train_dataset, eval_dataset.
    """

    def __init__(self, cfg: DictConfig) -> None:
        """Raises: ConfigError; NotImplementedError for overridden methods that are not served."""
        refuse(type(self), BasePPOExp, HOOKS)
        self.cfg = cfg
        self._config = config_of(cfg)
        command.prepare(COMMAND, self._config)
        COMMAND.check(self._config, None, True)
        self.tokenizer = self.get_tokenizer()
        self.train_dataset = self.get_train_dataset()
        self.eval_dataset = self.get_eval_dataset()
        self.colocate_pg = None

    @staticmethod
    def get_cfg_as_str(cfg: DictConfig) -> str:
        return OmegaConf.to_yaml(cfg)

    def get_tokenizer(self, padding_side: str = "left") -> Any:
        trainer = self._config.trainer
        tokenizer = load_tokenizer(local_folder(trainer.policy.model.path), MODEL, trainer.trust_remote_code)
        tokenizer.padding_side = padding_side
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer

    def get_train_dataset(self) -> Any:
        """Rows as (messages, env_class, extras, uid)."""
        return PromptDataset.of_config(self._config, self.tokenizer, self._config.data.train_data)

    def get_eval_dataset(self) -> Any:
        """Like `get_train_dataset`; None without held-out rows."""
        sources = self._config.data.val_data
        return PromptDataset.of_config(self._config, self.tokenizer, sources) if sources else None

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
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
        logging.getLogger("skyrl_train").setLevel(logging.INFO)
        config = of_trainer(self._config, trainer)
        COMMAND.check(config, None, True)
        kind = cast(type[Experiment], partial(_Run, self, trainer))
        interrupts = command.Interrupts()
        work = partial(command.run, dataclasses.replace(COMMAND, run=kind), config, Console(), interrupts)
        ended = command.beside_a_running_loop(work, interrupts)
        if ended.error is not None:
            raise ended.error
        if ended.code:
            raise KeyboardInterrupt


def of_trainer(config: Config, trainer: RayPPOTrainer) -> Config:
    """The configuration that a trainer of 0.4 asks for. Its own postprocessing replaces the penalty of long responses,
    which is a key that it reads.
    """
    settings = config.trainer
    if trainer.source is not None and settings.source == "on_policy":
        settings = dataclasses.replace(settings, source=trainer.source)
    if trainer.postprocesses:
        buffer = dataclasses.replace(settings.algorithm.overlong_buffer, len=None)
        algorithm = dataclasses.replace(settings.algorithm, overlong_buffer=buffer)
        settings = dataclasses.replace(settings, algorithm=algorithm)
    return dataclasses.replace(config, trainer=settings)


class _Run(Experiment):
    """A run whose parts are the hooks of an experiment of 0.4."""

    def __init__(self, hooks: BasePPOExp, trainer: RayPPOTrainer, config: Config, console: Console) -> None:
        self._hooks, self._old = hooks, trainer
        generator, kind = trainer.generator, type(trainer.generator)
        methods = ("generate", "agent_loop")
        is_own = not isinstance(generator, SkyRLGymGenerator) or any(
            overridden(kind, SkyRLGymGenerator, name) for name in methods
        )
        self._generator = generator if is_own else None
        self._reported: list[Mapping[str, Any]] = []
        super().__init__(config, console)
        trainer.step_of_run = self._step

    def _step(self) -> int:
        return 0 if self.loop is None else self.loop.global_step

    def _check_environments(self) -> None:
        if self._generator is None or isinstance(self._generator, SkyRLGymGenerator):
            super()._check_environments()

    def get_tokenizer(self) -> Any:
        return self._hooks.tokenizer

    def get_train_prompts(self) -> list[Prompt]:
        return prompts_of(self._hooks.train_dataset, self.config.environment.env_class)

    def get_val_prompts(self) -> list[Prompt]:
        return prompts_of(self._hooks.eval_dataset, self.config.environment.env_class)

    def get_collector(self, generate: Generate, rollout: Rollout) -> Collector:
        plain = super().get_collector(generate, rollout)
        if self._generator is None:
            return plain
        return GeneratorCollector(self._generator, rollout, plain.engines, self._step, self._reported.append)

    def get_source(self, parts: SourceParts) -> GroupSource:
        collector = parts.collector
        if isinstance(collector, GeneratorCollector):
            needs = needs_logprobs(self.config.trainer.algorithm)
            collector = collector.for_training(parts.policy_version, needs_logprobs=needs)
        if self._old.postprocesses:
            collector = Postprocessed(collector, self._old.postprocess_generator_output)
        return super().get_source(dataclasses.replace(parts, collector=collector))

    def get_trainer(self, parts: Parts) -> Trainer:
        return _Trainer(self.config, parts, self.num_steps, self._own_metrics)

    def _own_metrics(self) -> Metrics:
        """Means of what generators and hooks have reported since the last step."""
        reported = [*self._reported, self._old.all_metrics]
        self._reported.clear()
        values: dict[str, list[float]] = {}
        for metrics in reported:
            for name, value in metrics.items():
                if isinstance(value, int | float):
                    values.setdefault(name, []).append(float(value))
        self._old.all_metrics.clear()
        return {name: sum(each) / len(each) for name, each in values.items()}


class _Trainer(Trainer):
    def __init__(self, config: Config, parts: Parts, num_steps: int, own_metrics: Any) -> None:
        super().__init__(config, parts, num_steps)
        self._own_metrics = own_metrics

    async def step(self) -> Metrics:
        metrics = await super().step()
        return {**self._own_metrics(), **metrics}


translate_arguments()
